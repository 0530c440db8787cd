"""Does a model keep packed sequences apart? Asked of its small twin, because the answer is in its code.

Several sequences in one row, positions starting again with each, are kept apart by the library's attention masks. That
holds for full, sliding-window and chunked attention through the library's mask functions; it does not hold for layers
that carry a state along the row (state spaces, linear attention, convolutions), nor for models that make masks of their
own without looking at positions. No list of models says which is which: the twin's logits for a packed row are compared
with those of each sequence alone. Sequences are longer than a twin's windows.

A kernel that no cpu has cannot be asked. Flash attention sees packed sequences in micro-batches of one row only, as
`modeling_flash_attention_utils` of the library says.
"""

from __future__ import annotations

from typing import Any

import torch

from megatrain.errors import ModelError, typed_line
from megatrain.model.ports import takes
from megatrain.model.tiny import StockConfig, StockModel, ordinary_tokens, twin_of

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, that is taken for rounding in float32."""

LENGTHS = (11, 2, 23)
"""Tokens of the packed sequences; the last one starts where all before it would be seen."""


def why_not_packable(config: StockConfig, kind: type[StockModel] | None, attention: str) -> str:
    """Why samples of one row would see each other in a model of this class and kernel; empty where they do not."""
    try:
        twin = twin_of(config, 0, attention, kind).eval()
        if not takes(twin, "position_ids"):
            return "its forward takes no positions"
        error = _difference(twin)
    except ModelError as refusal:
        return f"its small twin cannot be asked ({refusal.what})"
    except Exception as failure:  # of the model's own code
        return f"it fails with packed sequences ({typed_line(failure)})"
    return "" if error <= TOLERANCE else f"samples in one row would see each other (logits differ by {error:.1%})"


def only_single_rows(attention: str) -> bool:
    """Whether this kernel tells packed sequences apart in micro-batches of one row only."""
    return attention.startswith("flash_attention")


def _difference(twin: StockModel) -> float:
    """By how much the twin's logits change when sequences are packed, relative to the largest; the worst of any."""
    tokens = torch.tensor(ordinary_tokens(twin.config))
    generator = torch.Generator().manual_seed(0)
    alone = [tokens[torch.randint(len(tokens), (1, size), generator=generator)] for size in LENGTHS]
    positions = torch.cat([torch.arange(size) for size in LENGTHS]).unsqueeze(0)

    def logits(**inputs: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = twin(**inputs, use_cache=False).logits[0]
        return found

    expected = torch.cat([logits(input_ids=ids) for ids in alone])
    found = logits(input_ids=torch.cat(alone, dim=1), position_ids=positions)
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
