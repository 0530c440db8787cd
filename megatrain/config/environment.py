"""What the environment says: how many processes a launcher has started, and one default that is set here."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from megatrain.errors import ConfigError

LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # of the step; SLURM_NTASKS is set in a batch script too
}
"""What starts several processes -> the variables in which each finds how many they are, and its own number."""


def let_idle_threads_sleep() -> None:
    """Make idle OpenMP threads sleep, unless the user's environment says otherwise; to be called before torch loads.

    By default they spin, and take the core from the very thread that they wait for as soon as anything else runs. With
    three other processes on two cores the quickstart came to 170 tokens/s so, and to 2,500 with sleeping threads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def refuse_several_processes(where: str) -> None:
    """Raise `ConfigError` in each of several processes that a launcher has started: every one would do all of the work
    alone, and none would hear of the others."""
    for launcher, (size, rank) in LAUNCHERS.items():
        count = os.environ.get(size, "")
        if count.isdecimal() and int(count) > 1:
            number = os.environ.get(rank)
            told = f"{size}={count}" + (f", {rank}={number}" if number is not None else "")
            error = ConfigError(
                f"one of {int(count):,} processes ({told}), and MegaTrain trains with one",
                where=where,
                fix=f"start a single one, without {launcher}, or unset {size}",
            )
            _tell_torchrun(str(error))
            raise error


def _tell_torchrun(line: str) -> None:
    """Let torchrun end its own report, of some 40 lines, with the reason."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
