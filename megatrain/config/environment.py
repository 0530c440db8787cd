"""What the environment says: which of several processes a launcher has started this is, and where they meet; and one
default that is set here."""

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
"""What starts several processes -> the variables in which each finds how many they are, its own number, and that on its
machine. `accelerate launch`, a PyTorchJob of Kubeflow and Ray Train set those of torchrun."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One of several processes: its rank of `size`, and that among those of its machine."""

    rank: int
    size: int
    local_rank: int
    address: str = ""
    """Of the machine of the first."""


def let_idle_threads_sleep() -> None:
    """Make idle OpenMP threads sleep, unless the user's environment says otherwise; to be called before torch loads.

    By default they spin, and take the core from the very thread that they wait for as soon as anything else runs. With
    three other processes on two cores the quickstart came to 170 tokens/s so, and to 2,500 with sleeping threads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def let_ranks_finish() -> None:
    """Give ranks that torchrun is told to stop ten minutes for their step and its checkpoint; it kills them after half
    a minute otherwise."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")


def refuse_several_processes(where: str) -> None:
    """Raise `ConfigError` in each of several processes that a launcher has started, for what is no training: every one
    would do all of the work alone, and none would hear of the others."""
    if (launcher := _launcher()) is not None:
        size, told = LAUNCHERS[launcher][0], _told(launcher)
        fix = f"start a single one, without {launcher}, or unset {size}"
        what = f"one of {int(os.environ[size]):,} processes ({told}), and this is for one"
        raise _told_to_torchrun(ConfigError(what, where=where, fix=fix))


def find_launch() -> Launch | None:
    """Which of several processes this is; `None` where there is one. Raises `ConfigError` where a variable that tells
    it, or where they meet, is missing or is no number."""
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
            what = f"one of {size:,} processes ({_told(launcher)}), but {name} is {value!r}"
            fix = "start them with torchrun, which sets it, or set it"
            raise _told_to_torchrun(ConfigError(what, where="environment", fix=fix))
    return Launch(int(needed[rank_name]), size, int(numbers[local_name]), needed["MASTER_ADDR"])


def _refuse_half() -> None:
    """Raise `ConfigError` for a process with a number and no count, or one that is none: it would train alone, as all
    the others would, into one folder."""
    count, rank, _ = LAUNCHERS["torchrun"]
    size, number = os.environ.get(count, ""), os.environ.get(rank, "")
    if (size and not size.isdecimal()) or (number and not size) or (number.isdecimal() and size == "1" and int(number)):
        what = f"{count} is {size!r}, and {rank} is {number!r}: one of several processes, or a single one?"
        fix = f"start them with torchrun, which sets both, or unset {rank}"
        raise _told_to_torchrun(ConfigError(what, where="environment", fix=fix))


def _launcher() -> str | None:
    """What has started several processes, of which this is one."""
    counts = {launcher: os.environ.get(names[0], "") for launcher, names in LAUNCHERS.items()}
    return next((name for name, count in counts.items() if count.isdecimal() and int(count) > 1), None)


def _told(launcher: str) -> str:
    """What the variables say, as far as they are set."""
    return ", ".join(f"{name}={os.environ[name]}" for name in LAUNCHERS[launcher][:2] if name in os.environ)


def _told_to_torchrun(error: ConfigError) -> ConfigError:
    tell_torchrun(str(error))
    return error


def tell_torchrun(line: str) -> None:
    """Let torchrun end its own report, of some 40 lines, with the reason."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
