"""The memory that an op holds, by what it declares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.errors import MegaTrainError
from megatrain.memory import Held
from megatrain.schedule import Access

DTYPE_OF_NBYTES = {2: torch.bfloat16, 4: torch.float32}
PART_LETTERS = {"w": "hi", "l": "low", "m": "moments"}
"""First letter of a content -> the part of a unit's state that it is."""


def part_of(held: Held, access: Access) -> Tensor:
    """The bytes of an access, uint8."""
    return held[access.buffer][access.start : access.stop]


def access_of(accesses: Sequence[Access], content: str) -> Access:
    """The access whose content is `content`, or a partial sum of it."""
    for access in accesses:
        if access.content.partition("~")[0] == content:
            return access
    raise MegaTrainError(f"the op declares no {content}")
