"""What the other ranks hear of one that ends: in threads of one process, over real connections."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from megatrain.dist import World
from megatrain.dist.watch import Watch
from megatrain.errors import ConfigError, RankError
from tests.ranks import together, worlds


@pytest.mark.parametrize("said", [b"", b'{"at": "step 8"}\n{"at": "st'])
def test_a_rank_whose_connection_ends_is_named_by_all_others(said: bytes) -> None:
    """Also in the middle of a word."""

    def work(world: World) -> str:
        with closing(Watch(world, "127.0.0.1")) as watch:
            watch.at("step 7")
            if world.rank == 1:
                (first,) = watch._others.values()
                first.sendall(said)
                watch._leaves.set()  # or its own thread would end this process
                first.shutdown(socket.SHUT_RDWR)
                return ""
            return str(watch.failed(RankError("closed by its peer", where="rank 0")))

    step = 8 if said else 7
    line = f"rank 1 of 3, at step {step}: was killed, or its machine is gone"
    assert together(worlds(3, seed=0), work) == [line, "", line]


def test_a_rank_that_fails_tells_why_and_one_that_has_ended_well_is_not_missed() -> None:
    def work(world: World) -> str:
        with closing(Watch(world, "127.0.0.1")) as watch:
            if world.rank == 0:
                return str(watch.failed(RankError("closed by its peer", where="rank 0")))
            watch.at("loading the model")
            if world.rank == 1:
                return ""
            error = ConfigError("is a file", where="runs/new")
            assert watch.failed(error) is error
            return str(error)

    line = "runs/new: is a file"
    assert together(worlds(3, seed=0), work) == [f"rank 2 of 3, at loading the model: {line}", "", line]
