"""What the other ranks hear of one that ends: in threads of one process, over real connections."""

from __future__ import annotations

import re
import socket
from contextlib import closing
from pathlib import Path

import pytest

import megatrain
from megatrain.dist import World
from megatrain.dist.watch import PROMPT, Watch
from megatrain.errors import ConfigError, RankError
from tests.ranks import together, worlds


@pytest.mark.parametrize("said", [b"", b'{"at": "step 8"}\n{"at": "st'])
def test_a_disconnected_rank_is_named_by_all_others(said: bytes) -> None:
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
    line = f"rank 1 of 3, at step {step}: was killed, or its machine failed"
    assert together(worlds(3, seed=0), work) == [line, "", line]


def test_a_failed_rank_reports_why_and_a_finished_one_is_not_missed() -> None:
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


@pytest.mark.few(3)
@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("answers", [True, False])
def test_a_stalled_rank_is_named_by_those_waiting(missing: int, answers: bool) -> None:
    """It answers, from its thread, that it has come to fewer collectives; or it does not answer."""

    def work(world: World) -> str:
        with closing(Watch(world, "127.0.0.1", {"device": 0.4, "host": 60.0})) as watch:
            watch._leaves.set()  # or its own thread would end this process
            doing = Doing()
            watch.at("step 7", doing.what)
            watch.enters("device")
            watch.leaves("device")
            if world.rank != missing:
                watch.enters("device")
            elif not answers:
                watch._take = lambda rank, message: None  # type: ignore[method-assign]
                if world.rank == 0:
                    watch._look = lambda *_: None  # type: ignore[method-assign]
            if world.rank != missing:
                assert watch._heard.wait(20)
                with pytest.raises(RankError, match=f"rank {missing}"):
                    watch.enters("host")
            world.exchange("all have heard", None)
            return watch._line

    found = together(worlds(3, seed=0), work)
    told = [line for rank, line in enumerate(found) if rank != missing]
    is_still = "is still in FETCH;" if answers else "hangs and does not answer;"
    for line in told:
        assert re.match(rf"rank {missing} of 3, at step 7: {is_still} the others have waited for \d s in FETCH", line)


@pytest.mark.parametrize("about", ["losses", "the plan"])
def test_host_waits_within_a_step_use_the_device_timeout(about: str) -> None:
    """And are told which call the other is in; for what one does for all, they wait as long as that may take."""

    def work(world: World) -> str:
        with closing(Watch(world, "127.0.0.1", {"device": 0.2, "host": 60.0})) as watch:
            watch._leaves.set()  # or its own thread would end this process
            doing = Doing("")
            watch.at("step 7", doing.what)
            world.exchange("all are at it", None)
            watch.about = about
            if world.rank == 0:
                watch.enters("host")
                watch._heard.wait(20 if about == "losses" else 1.0)
            world.exchange("all have heard", None)
            return watch._line

    line, _ = together(worlds(2, seed=0), work)
    told = r"rank 1 of 2, at step 7: is still in \S+ \(.*\.py:\d+\); the others have waited for \d s in losses"
    assert re.match(told, line) if about == "losses" else line == ""


def test_exchanges_within_a_step_are_labelled_as_such() -> None:
    source = "".join(path.read_text() for path in Path(megatrain.__file__).parent.rglob("*.py") if path.stem != "watch")
    assert [each for each in PROMPT if f'"{each}"' not in source] == []


class Doing:
    def __init__(self, op: str = "FETCH") -> None:
        self._op = op

    def what(self) -> str:
        return self._op
