"""A run that is to be killed: a call of `tests.fork_server`, which dies where it is told to.

That is the nth call of an op's action or of a function of the file system, or after some seconds.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def arrange(place: str, count: float) -> None:
    """Have this process killed at the `count`th time that something is about to happen, or after so many seconds."""
    from megatrain.checkpoint.range_writer import RangeWriter
    from megatrain.engine import streamer

    left = [int(count)]

    def counted(honest: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                kill()
            return honest(*arguments, **named)

        return call

    if place == "seconds":
        threading.Thread(target=lambda: (time.sleep(count), kill()), daemon=True).start()
    elif place in streamer.ACTIONS:
        streamer.ACTIONS[place] = counted(streamer.ACTIONS[place])
    elif place == "write":
        RangeWriter.write = counted(RangeWriter.write)  # type: ignore[method-assign]
    elif place == "rename":
        pathlib.Path.rename = counted(pathlib.Path.rename)  # type: ignore[method-assign]
    else:
        setattr(os, place, counted(getattr(os, place)))


def run(tree: dict[str, Any], place: str | None, count: float) -> None:
    """Train by the fields of a configuration, telling it; a refusal is the exit status 2."""
    from rich.console import Console

    from megatrain.config import Config
    from megatrain.errors import MegaTrainError
    from megatrain.run.training import run_training

    if place is not None:
        arrange(place, count)
    try:
        run_training(Config.model_validate(tree), Console(file=sys.stdout, width=120))
    except MegaTrainError as error:
        print(error)
        sys.exit(2)
