"""Ranks that are processes, started once for all tests that want some: they join a world and do what they are given.

A rank in a smaller world is the same process with groups of its own. `python -m tests.rank_processes RANK SIZE DEVICE`
is one of them; it takes pickled calls from its standard input. Of stand-in GPUs each has its own, and gloo carries what
NCCL would between real ones: it waits for it on the device, and puts it there.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.dist import World
    from megatrain.dist.world import Collectives

MOST = 4
STANDIN = "stand-in"
"""In place of the type of a device."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class RankProcesses:
    """So many of them; device: the type of what their schedules have collectives between."""

    def __init__(self, most: int = MOST, device: str = "cpu") -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment = {**os.environ, **meeting, "OMP_NUM_THREADS": "1"}
        begin = [sys.executable, *(["-m", "tests.standin_cuda"] if device == STANDIN else []), "-m", __name__]
        commands = [[*begin, str(rank), str(most), device] for rank in range(most)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
        self.processes = [subprocess.Popen(command, **pipes) for command in commands]

    def run(self, work: Callable[..., Any], size: int, **arguments: Any) -> list[Any]:
        """What `work(world, **arguments)` returns on each of `size` ranks; with one, its world is `ALONE`."""
        for process in self.processes[:size]:
            pickle.dump((work, size, arguments), process.stdin)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
        answers = [pickle.load(process.stdout) for process in self.processes[:size]]  # type: ignore[arg-type]
        for rank, (_, failure) in enumerate(answers):
            assert failure is None, f"rank {rank}: {failure}"
        return [answer for answer, _ in answers]

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            process.wait(60)
            process.stdout.close()  # type: ignore[union-attr]


class ThroughHost:
    """Carries what lies on a device by what carries host memory."""

    def __init__(self, carrier: Collectives) -> None:
        self._carrier = carrier

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        self._carry(self._carrier.all_gather, whole, own)

    def all_to_all(self, received: Tensor, sent: Tensor, *nbytes: Any) -> None:
        self._carry(self._carrier.all_to_all, received, sent, *nbytes)

    def close(self) -> None:
        self._carrier.close()

    def _carry(self, carrier: Callable[..., None], target: Tensor, source: Tensor, *nbytes: Any) -> None:
        there = target.new_empty(target.shape, device="cpu")
        carrier(there, source.cpu(), *nbytes)
        target.copy_(there)


def joined(rank: int, size: int, device: str) -> World:
    """A rank of all."""
    from megatrain.dist.processes import join

    world = join(rank, size, "cpu" if device == STANDIN else device, seconds=120)
    assert world.device is not None
    return replace(world, device=ThroughHost(world.device)) if device == STANDIN else world


def serve(rank: int, size: int, device: str) -> None:
    """Do what comes until nothing does."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # what libraries print goes elsewhere
    import torch.distributed as dist

    from megatrain.dist import ALONE, World
    from megatrain.dist.processes import ProcessCollectives

    worlds = {1: ALONE, size: joined(rank, size, device)}
    for smaller in range(2, size):
        groups = [dist.new_group(list(range(smaller)), backend="gloo") for _ in range(3)]
        if rank < smaller:
            worlds[smaller] = World(rank, smaller, *(ProcessCollectives(group, f"rank {rank}") for group in groups))
    while True:
        try:
            work, of, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = work(worlds[of], **arguments), None
        except BaseException:
            answer = None, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
