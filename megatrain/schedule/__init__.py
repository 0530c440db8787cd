"""A training step as a value: ops with their reads and writes, which can be checked and priced without a device.

`build` makes the ops, `deps` derives the waits between streams, `check` proves a schedule correct, `check_world`
those of several ranks together, `replay` prices it, `show` prints it. No torch and no model code: units are
numbers here.
"""

from megatrain.schedule.build import build_flush, build_forward, build_step
from megatrain.schedule.check import check
from megatrain.schedule.check_world import check_world
from megatrain.schedule.contents import USED
from megatrain.schedule.deps import derive_waits
from megatrain.schedule.ops import CALLS, Access, Buffer, Op, Schedule, Use, nbytes_by_use, show_op, show_schedule
from megatrain.schedule.passes.phases import calls_in, whole
from megatrain.schedule.replay import Timeline, chrome_trace, replay

__all__ = [
    "CALLS",
    "USED",
    "Access",
    "Buffer",
    "Op",
    "Schedule",
    "Timeline",
    "Use",
    "build_flush",
    "build_forward",
    "build_step",
    "calls_in",
    "check",
    "check_world",
    "chrome_trace",
    "derive_waits",
    "nbytes_by_use",
    "replay",
    "show_op",
    "show_schedule",
    "whole",
]
