"""Stopping a run from outside: Ctrl-C or SIGTERM asks for a stop after the step under way, a second one leaves at once.

A handler only takes note, because a step cut in the middle is a step lost. It leaves out what happens then: the loop
asks `requested` between steps.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping after this step; once more to leave at once, without saving\n"


class StopSignals:
    """In a `with` block, the first of `SIGNALS` sets `requested`; the next one does what it always did.

    Only the main thread of a process may handle signals, so only it may enter the block.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        os.write(2, NOTICE)  # not `print`: the signal may have interrupted one

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
