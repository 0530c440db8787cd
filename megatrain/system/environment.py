"""Environment variables: this process's rank and rendezvous address, as set by a launcher, and three that we set."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import ConfigError

LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    # of the step; SLURM_NTASKS is set in a batch script too
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
}
"""Launcher -> its variables for world size, rank and local rank. `accelerate launch`, Kubeflow's PyTorchJob and Ray
Train set torchrun's."""

SHOWS_ERRORS = "MEGATRAIN_LAUNCHER_SHOWS_ERRORS"
"""Set by `--ranks` for the ranks that it starts."""


@dataclass(frozen=True, slots=True)
class Launch:
    rank: int
    size: int
    local_rank: int
    address: str = ""
    """Host name or address of rank 0's machine."""


def let_idle_threads_sleep() -> None:
    """Make idle OpenMP threads sleep, unless the user's environment says otherwise. Call it before torch is imported.

    By default they spin, and when other processes run they take the core from the thread they are waiting for.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def let_ranks_finish() -> None:
    """Make torchrun, when it is stopped, wait ten minutes for each rank's step and checkpoint before it kills it; its
    default is 30 seconds."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")


def show_errors_once() -> None:
    """Have the ranks that this process will start leave their errors to it, since most are common to all."""
    os.environ[SHOWS_ERRORS] = "1"


def seconds_to_stop() -> float | None:
    """After a signal, until torchrun kills this rank; `None` where it has not started it."""
    told = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    return float(told) if "TORCHELASTIC_RUN_ID" in os.environ and told.isdecimal() else None


def refuse_several_processes(where: str) -> None:
    """Raise `ConfigError` if a launcher started several processes of a command that does not train: each would do all
    of the work by itself."""
    if (launcher := _launcher()) is not None:
        size, told = LAUNCHERS[launcher][0], _told(launcher)
        fix = f"start it without {launcher}, or unset {size}"
        what = f"started as one of {int(os.environ[size]):,} processes ({told}), but it runs in a single process"
        raise _told_to_torchrun(ConfigError(what, where=where, fix=fix))


def find_launch() -> Launch | None:
    """This process's place among those a launcher started; `None` if there is only one.

    Raises `ConfigError` if the variable for the rank, the address or the port is missing or not a number.
    """
    if (launcher := _launcher()) is None:
        _refuse_half()
        return None
    size_name, rank_name, local_name = LAUNCHERS[launcher]
    needed = {name: os.environ.get(name, "") for name in (rank_name, "MASTER_ADDR", "MASTER_PORT")}
    numbers = {**needed, local_name: os.environ.get(local_name, "0")}
    size = int(os.environ[size_name])
    for name, value in numbers.items():
        fits = bool(value) if name == "MASTER_ADDR" else value.isdecimal()
        if not fits or (name == rank_name and int(value) >= size):
            what = f"started as one of {size:,} processes ({_told(launcher)}), but {name} is {value!r}"
            fix = f"start them with torchrun, which sets {name}, or set it yourself"
            raise _told_to_torchrun(ConfigError(what, where="environment", fix=fix))
    return Launch(int(needed[rank_name]), size, int(numbers[local_name]), needed["MASTER_ADDR"])


def _refuse_half() -> None:
    """Raise `ConfigError` for a rank without a valid world size: each such process would train alone, all of them into
    the same folder."""
    count, rank, _ = LAUNCHERS["torchrun"]
    size, number = os.environ.get(count, ""), os.environ.get(rank, "")
    if (size and not size.isdecimal()) or (number and not size) or (number.isdecimal() and size == "1" and int(number)):
        what = f"{count} is {size!r} and {rank} is {number!r}, which do not fit together"
        fix = f"start them with torchrun, which sets both, or unset {rank}"
        raise _told_to_torchrun(ConfigError(what, where="environment", fix=fix))


def _launcher() -> str | None:
    """Name of the launcher that started several processes, if one did."""
    counts = {launcher: os.environ.get(names[0], "") for launcher, names in LAUNCHERS.items()}
    return next((name for name, count in counts.items() if count.isdecimal() and int(count) > 1), None)


def _told(launcher: str) -> str:
    """The launcher's world size and rank as `NAME=value`, for a message."""
    return ", ".join(f"{name}={os.environ[name]}" for name in LAUNCHERS[launcher][:2] if name in os.environ)


def _told_to_torchrun(error: ConfigError) -> ConfigError:
    tell_torchrun(str(error))
    return error


def tell_torchrun(line: str) -> bool:
    """Write an error's line where torchrun looks for it, to show it at the end of its own 40-line report.

    Returns whether `--ranks` shows it, in place of this process, because it started all of them (`show_errors_once`).
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
            return SHOWS_ERRORS in os.environ
    return False
