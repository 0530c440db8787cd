"""Tests whether a model keeps packed sequences apart, by running its small twin.

The library's attention masks separate several sequences in one row if positions restart with each. That works for
full, sliding-window and chunked attention through the library's mask functions; it does not for layers that carry a
state along the row (state spaces, linear attention, convolutions) or for models that build masks without looking at
positions. There is no list of models: the twin's logits for a packed row are compared with those of each sequence
alone. Sequences are longer than the twin's windows.

A kernel that does not exist on the CPU cannot be tested. Flash attention separates packed sequences only in
micro-batches of one row (`modeling_flash_attention_utils` in the library).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils.generic import is_flash_attention_requested

from megatrain.errors import ModelError, typed_line
from megatrain.model.ports import takes
from megatrain.model.tiny import StockConfig, StockModel, ordinary_tokens, twin_of

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, that counts as float32 rounding."""

LENGTHS = (11, 2, 23)
"""Lengths of the packed sequences; the last starts where it would see all tokens before it."""


def why_not_packable(config: StockConfig, kind: type[StockModel] | None, attention: str) -> str:
    """Why samples in one row would see each other with this model class and kernel; empty if they would not."""
    try:
        twin = twin_of(config, 0, attention, kind).eval()
        if not takes(twin, "position_ids"):
            return "its forward does not take position_ids"
        error = _difference(twin)
    except ModelError as refusal:
        return f"its small twin cannot be tested ({refusal.what})"
    except Exception as failure:  # from the model's own code
        return f"it fails with packed sequences ({typed_line(failure)})"
    return "" if error <= TOLERANCE else f"samples in one row would see each other (logits differ by {error:.1%})"


def only_single_rows(attention: str) -> bool:
    """Whether this kernel separates packed sequences only in micro-batches of one row."""
    return is_flash_attention_requested(requested_attention_implementation=attention)


def _difference(twin: StockModel) -> float:
    """The largest change of the twin's logits when sequences are packed, relative to the largest logit."""
    tokens = torch.tensor(ordinary_tokens(twin.config))
    generator = torch.Generator().manual_seed(0)
    alone = [tokens[torch.randint(len(tokens), (1, size), generator=generator)] for size in LENGTHS]
    positions = torch.cat([torch.arange(size) for size in LENGTHS]).unsqueeze(0)

    def logits(**inputs: Any) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = twin(**inputs, use_cache=False).logits[0]
        return made

    expected = torch.cat([logits(input_ids=ids) for ids in alone])
    together = logits(input_ids=torch.cat(alone, dim=1), position_ids=positions)
    return float((together - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
