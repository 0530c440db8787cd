"""NEFTune (Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", 2023): noise on embeddings.

The noise is drawn in the forward of the embedding. The engine runs that forward again in its backward pass with the
same seed, as for dropout, so both draw the same noise under any plan (`engine.context.call_seed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def noisy_embeddings(model: Any, alpha: float | None) -> Iterator[None]:
    """In the block, the model's input embedding has a hook that adds noise in training mode. Copies keep the hook.

    alpha: strength of the noise, by the paper's formula; no hook if it is `None`.
    """
    if alpha is None:
        yield
        return
    handle = model.get_input_embeddings().register_forward_hook(partial(_with_noise, alpha))
    try:
        yield
    finally:
        handle.remove()


def _with_noise(alpha: float, module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Embeddings [batch, length, hidden size] plus uniform noise of at most alpha / sqrt(length * hidden size)."""
    if not module.training:
        return output
    largest = alpha / math.sqrt(output.shape[1] * output.shape[2])
    return output + torch.empty_like(output).uniform_(-largest, largest)


__all__ = ["noisy_embeddings"]
