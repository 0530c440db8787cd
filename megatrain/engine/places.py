"""Where things lie: in the memory that an op holds, and, for messages, in the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.errors import MegaTrainError
from megatrain.layout import layout_of
from megatrain.memory import Held
from megatrain.schedule import Access, Schedule
from megatrain.spec import ModelSpec

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


def located(schedule: Schedule | None, model: ModelSpec, buffer: str, start: int, content: str) -> str:
    """The unit, and for weights and gradients the parameter, that lie at byte `start` of a buffer of `schedule`."""
    digits = content.lstrip("wglmnhdakc").partition(".")[0].partition("~")[0].rstrip("+")
    if not digits.isdigit() or int(digits) >= len(model.units):
        return buffer
    unit = model.units[int(digits)]
    if content[0] not in "wg" or schedule is None:
        return unit.name
    layout = layout_of(unit) if content[0] == "w" else layout_of(unit).trained
    element = start // (schedule.extent(buffer, content) // layout.size)
    inside = (field.name for field in layout.fields if field.start <= element < field.stop)
    return f"unit {unit.name}, {next(inside, 'between parameters')}"
