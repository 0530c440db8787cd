"""NEFTune (Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", 2023): noise on embeddings.

The noise is drawn in the forward of the embedding, a part of the model that the engine runs again in its backward pass
after it has seeded as for dropout, so both draw the same, whatever the plan (`engine.ops.call_seed`).
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
    """In the block, the model's embeddings get noise as they train: what is made of it then keeps that."""
    if alpha is None:
        yield
        return
    handle = model.get_input_embeddings().register_forward_hook(partial(_with_noise, alpha))
    try:
        yield
    finally:
        handle.remove()


def _with_noise(alpha: float, module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Uniform noise of up to alpha / sqrt(length * hidden size) on embeddings [batch, length, hidden size]."""
    if not module.training:
        return output
    most = alpha / math.sqrt(output.shape[1] * output.shape[2])
    return output + torch.empty_like(output).uniform_(-most, most)


__all__ = ["noisy_embeddings"]
