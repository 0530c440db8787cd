"""Ranks that are processes, started once for all tests that want some: they join a world and do what they are given.

A rank in a smaller world is the same process with groups of its own. `python -m tests.rank_processes RANK SIZE`
is one of them; it takes pickled calls from its standard input.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

MOST = 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class RankProcesses:
    """`MOST` of them."""

    def __init__(self) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment = {**os.environ, **meeting, "OMP_NUM_THREADS": "1"}
        commands = [[sys.executable, "-m", __name__, str(rank), str(MOST)] for rank in range(MOST)]
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


def serve(rank: int, size: int) -> None:
    """Do what comes until nothing does."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # what libraries print goes elsewhere
    import torch.distributed as dist

    from megatrain.dist import ALONE, World
    from megatrain.dist.processes import ProcessCollectives, join

    worlds = {1: ALONE, size: join(rank, size, "cpu", seconds=120)}
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
    serve(*map(int, sys.argv[1:]))
