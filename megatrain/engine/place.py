"""Which unit and parameter lie at a byte of a buffer, in words, for errors of the tiers below.

They know bytes and contents only; what a content is the content of stands in its name (`w3`: the weights of unit 3).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.layout import Layout
from megatrain.schedule import AHEAD, UNDER_WAY, Schedule
from megatrain.spec import ModelSpec


def place_of(
    spec: ModelSpec,
    layouts: Sequence[Layout],
    running: Schedule | None,
    buffer: str,
    start: int,
    content: str,
    nbytes: int = 2,
) -> str:
    """The unit, and for weights and gradients the parameter, that lie at byte `start` of a buffer. nbytes: of an
    element of weights."""
    digits = content.lstrip("wglmnhdakc").partition(".")[0].partition("~")[0].rstrip(UNDER_WAY)
    if not digits.isdigit() or int(digits) >= len(spec.units):
        return buffer
    unit = int(digits)
    if content[0] not in "wg" or running is None or buffer.startswith(("host/slab/", AHEAD)):
        return spec.units[unit].name
    layout = layouts[unit] if content[0] == "w" else layouts[unit].trained
    begin, end = running.extent(buffer, content)
    return _named(spec, layout, unit, (start - begin) // ((end - begin) // layout.size))


def _named(spec: ModelSpec, layout: Layout, unit: int, element: int) -> str:
    inside = (field.name for field in layout.fields if field.start <= element < field.stop)
    return f"unit {spec.units[unit].name}, {next(inside, 'between parameters')}"
