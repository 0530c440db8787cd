"""What a run tells about its saves, and how long it waits for them, with an engine that saves as slowly as asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatrain.checkpoint.folder import Retention, open_checkpoint
from megatrain.dist import ALONE, World
from megatrain.errors import CheckpointError, NonFinite
from megatrain.train.async_save import Save
from megatrain.train.checkpoints import Checkpoints, found_by_first
from megatrain.train.engine import Engine
from megatrain.train.events import Resumed, Saved, Warned
from megatrain.train.loop import Feed
from tests.ranks import together, worlds
from tests.tiny import tiny_model


class SlowEngine:
    """Each save takes the next of `seconds`, or the last; then what is to follow is called."""

    world = ALONE

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.saved = list(seconds or (0.0,)), list[int]()
        self.saver = SimpleNamespace(wait=self._wait, abandon=self._abandon)
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None

    def save(self, folder: Path, training: Any, *, step: int, then: Callable[[Path], object], **_: Any) -> Save:
        self._wait()
        save = Save(step)
        self._given_up.clear()

        seconds = self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]

        def write() -> None:
            if self._given_up.wait(seconds):
                save.end(None, CheckpointError("was given up"))
                return
            then(folder / str(step))
            self.saved.append(step)
            save.end(folder / str(step), None)

        self._thread = threading.Thread(target=write)
        self._thread.start()
        return save

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _abandon(self) -> None:
        self._given_up.set()
        self._wait()


class NoData:
    def __next__(self) -> Any:
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def made(engine: SlowEngine, folder: Path) -> Checkpoints:
    return Checkpoints(cast(Engine, engine), folder, Retention(), Feed(NoData()), {})


def test_copies_for_want_of_hard_links_are_told_once(tmp_path: Path) -> None:
    class Copies(SlowEngine):
        def save(self, *args: Any, **more: Any) -> Save:
            save = super().save(*args, **more)
            save.copied = 3 << 30, "Operation not supported"
            return save

    engine = Copies()
    checkpoints = made(engine, tmp_path)
    events = []
    for step in (1, 2, 3):
        events += [checkpoints.save(step)]
        engine.saver.wait()
        events += [checkpoints.collect(step), checkpoints.collect(step)]
    told = [event.what for event in events if isinstance(event, Warned)]
    what = "3.22 GB that did not change are written again with every checkpoint, because its folder takes"
    assert told == [f"{what} no hard links to the previous one (Operation not supported)"]
    assert [event.step for event in events if isinstance(event, Saved)] == [1, 2, 3]


def test_the_end_waits_a_bounded_time_for_two_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the end of the first save 60 s have passed, so that 0.1 s of 60.1 are left for the second."""
    engine, waited = SlowEngine(0.0, 600.0), list[float]()
    checkpoints = made(engine, tmp_path)
    assert checkpoints.save(2) is None
    wait = Save.wait

    def counted(save: Save, timeout: float | None = None) -> Path:
        if timeout is not None:
            waited.append(timeout)
            now[0] += 60.0
        return wait(save, timeout)

    now = [100.0]
    monkeypatch.setattr(Save, "wait", counted)
    monkeypatch.setattr("megatrain.train.checkpoints.time", SimpleNamespace(monotonic=lambda: now[0]))
    told = checkpoints.finish(3, timeout=60.1)
    assert waited == [pytest.approx(60.1), pytest.approx(0.1)]
    assert [type(event) for event in told] == [Saved, Warned]
    assert "the deadline has come before step 3 was saved; the newest checkpoint is that of step 2" in str(told[1])
    assert engine.saved == [2]


def test_a_failed_prune_is_reported_and_the_checkpoint_kept(tmp_path: Path) -> None:
    """The folder of checkpoints is a file here, which cannot be listed."""
    engine, folder = SlowEngine(), tmp_path / "file"
    folder.write_text("")
    checkpoints = made(engine, folder)
    checkpoints.save(4)
    told = checkpoints.finish(4)
    assert [type(event) for event in told] == [Saved, Warned]
    assert engine.saved == [4]


def test_the_resumed_checkpoint_counts_as_saved_if_it_is_the_runs(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name, step in (("own", 5), ("other", -1)):
        checkpoints = made(SlowEngine(), tmp_path / "own")
        checkpoints(Resumed(5, 9, str((tmp_path / name / "step-00000005").resolve())))
        assert checkpoints.step == step


def test_a_save_finishing_while_being_abandoned_is_reported(tmp_path: Path) -> None:
    engine = SlowEngine(0.2)
    engine.saver.abandon = engine._wait  # too late: nothing asks any more
    checkpoints = made(engine, tmp_path)
    checkpoints.save(2)
    assert [type(event) for event in checkpoints.finish(3, timeout=0.01)] == [Saved, Warned]
    assert [type(event) for event in checkpoints.finish(3, timeout=0.01)] == [Saved]
    assert checkpoints.step == 3


def refusing(engine: SlowEngine, folder: Path) -> tuple[Checkpoints, list[int]]:
    """Checkpoints of an engine that cannot save any more, and the steps at which it was asked to."""
    asked: list[int] = []

    def save(folder: Path, training: Any, *, step: int, **_: Any) -> Save:
        asked.append(step)
        raise CheckpointError("no space is left", where=str(folder))

    engine.save = save  # type: ignore[method-assign]
    return made(engine, folder), asked


def test_unsavable_state_is_reported_once_and_fails_the_end(tmp_path: Path) -> None:
    checkpoints, asked = refusing(SlowEngine(), tmp_path)
    checkpoints(Resumed(2, 9, str((tmp_path / "step-00000002").resolve())))
    assert isinstance(checkpoints.save(4), Warned)
    assert checkpoints.finish(4) == []
    assert [type(event) for event in checkpoints.finish(5)] == [Warned]
    assert asked == [4, 5]
    what = "the state after step 5, the last one, was not saved; the newest checkpoint is that of step 2"
    with pytest.raises(CheckpointError, match=f"{what}; the model is in m; .* continues after step 2"):
        checkpoints.refuse_unsaved(5, Path("m"))
    checkpoints.refuse_unsaved(2)


def test_steps_repeated_after_a_rollback_are_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine()
    engine.restore = lambda checkpoint, **_: None  # type: ignore[attr-defined]
    checkpoints = made(engine, tmp_path)
    checkpoints.save(4)
    data = {"drawn": 2, "left_out": [], "loader": {}}
    kept = SimpleNamespace(training={"run": {"step": 2, "data": data}}, folder=tmp_path / "step-00000002")
    monkeypatch.setattr("megatrain.train.checkpoints.newest_sound", lambda folder: SimpleNamespace(checkpoint=kept))
    assert checkpoints.roll_back(NonFinite("the loss is nan"), 5) == 2
    checkpoints.finish(4)
    assert engine.saved == [4, 4]
    checkpoints.refuse_unsaved(4)


def test_all_ranks_follow_rank_zeros_verification(tmp_path: Path) -> None:
    """Though another's view of the folder is an older one."""
    with Engine.from_model(tiny_model(), "cpu", "fp32", verify=False) as engine:
        for step in (1, 2):
            engine.save(tmp_path, {"step": step}, step=step).wait()
    older, newest = sorted(tmp_path.iterdir())

    def work(world: World) -> str:
        found = found_by_first(world, lambda: open_checkpoint(older if world.rank else newest))
        assert found is not None
        return found.folder.name

    assert together(worlds(2, seed=0), work) == [newest.name] * 2
    assert together(worlds(2, seed=0), lambda world: found_by_first(world, lambda: None)) == [None, None]
