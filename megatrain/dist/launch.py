"""Starts the ranks of one machine under torchrun's agent, and exits with the status of the first that failed.

The agent's own report of an end, forty lines with tracebacks, would hide the line of the rank that failed. Ranks leave
their errors to this process, which shows one that is common to all, or that the others quote, once. Leaves out what
torchrun has options for: several machines, restarts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from signal import Signals

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megatrain.errors import RankError
from megatrain.system.environment import show_errors_once

NO_MESSAGE = "<NONE>"
"""The message that torchrun has for a process that wrote no error file."""


def launch(ranks: int, module: str, *arguments: str, tell: Callable[[str], object]) -> int:
    """Run `python -m MODULE ARGUMENTS` in so many processes, and return the exit status of the first that failed.

    tell: is called with each line by which ranks say why they have ended (`tell_torchrun`), once. Signals are forwarded
    to the ranks; the status is then 128 + the signal's number, as for a shell. Raises `RankError` for a rank that a
    signal of somebody else has ended, since that one has said nothing.
    """
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    show_errors_once()
    try:
        torchrun.main(["--standalone", "--nproc-per-node", str(ranks), "-m", module, *arguments])
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as error:
        by_agent = -Signals.SIGTERM  # which ends the others
        for line in distinct(failure.error_file_data["message"] for failure in error.failures.values()):
            tell(line)
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0 and failure.exitcode != by_agent:
                name = Signals(-failure.exitcode).name
                raise RankError(f"was ended by {name}", where=f"rank {rank}, process {failure.pid}") from error
        return int(error.get_first_failure()[1].exitcode)
    return 0


def distinct(lines: Iterable[str]) -> list[str]:
    """The lines without repeats. Leaves out a line that another one repeats behind a rank's name and a colon."""
    said = [line for line in dict.fromkeys(lines) if line != NO_MESSAGE]
    return [line for line in said if not any(other.endswith(f": {line}") for other in said)]
