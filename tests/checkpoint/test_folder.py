"""The newest sound checkpoint is found whatever has happened; what goes was to go, and is never the last one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.checkpoint import manifest
from megatrain.checkpoint.folder import Retention, newest_sound, open_checkpoint, prune
from megatrain.checkpoint.listing import checkpoints, step_of
from megatrain.checkpoint.manifest import full_check, quick_check
from megatrain.checkpoint.save import PlannedCheckpoint
from megatrain.errors import CheckpointError
from megatrain.system.atomic import put_all_right
from tests.killed import die, killed
from tests.saved import bits, expected, loaded, ported, save

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def planned() -> PlannedCheckpoint:
    return PlannedCheckpoint(ported(num_hidden_layers=1, vocab_size=16))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(folder)]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# Finding -------------------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_newest_first_ignoring_other_files(planned: PlannedCheckpoint, tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none") == []
    for step in (2, 100_000_000, 10, 123_456_789):
        (tmp_path / f"step-{step:08d}").mkdir()
    for name in ("step-1", "step-00000001x", ".step-00000003.77.part", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000004").write_text("")
    assert steps_in(tmp_path) == [123_456_789, 100_000_000, 10, 2]
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints(tmp_path / "step-00000004")


def test_damaged_and_unfinished_checkpoints_are_skipped_with_a_message(
    planned: PlannedCheckpoint, tmp_path: Path
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, planned=planned)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    flip(tmp_path / "step-00000003" / "optimizer" / "moments.safetensors")
    found = newest_sound(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 2
    size = (tmp_path / "step-00000003" / "optimizer" / "moments.safetensors").stat().st_size
    assert found.skipped == (
        "step-00000004: manifest.json is missing: the folder is unfinished, or not a checkpoint",
        f"step-00000003: optimizer/moments.safetensors is damaged between byte 0 and byte {size:,}",
    )
    assert bits(loaded(found.checkpoint, planned)) == expected(planned, 2)
    quickly = newest_sound(tmp_path, partial(open_checkpoint, check=quick_check))
    assert quickly.checkpoint is not None
    assert quickly.checkpoint.step == 3, "nothing was read"


def test_no_valid_checkpoint_yields_none(planned: PlannedCheckpoint, tmp_path: Path) -> None:
    assert newest_sound(tmp_path / "none").checkpoint is None
    flip(save(tmp_path, planned=planned) / "config.json")
    found = newest_sound(tmp_path)
    assert found.checkpoint is None
    assert len(found.skipped) == 1


# Keeping -------------------------------------------------------------------------------------------------------------

SCORES = st.dictionaries(st.integers(0, 40), st.none() | st.integers(0, 5).map(float), max_size=12)


@given(SCORES, st.integers(1, 4), st.none() | st.integers(1, 7), st.integers(0, 3))
def test_retention_keeps_the_expected_checkpoints(
    scores: dict[int, float | None], last: int, every: int | None, best: int
) -> None:
    kept = Retention(last, every, best).kept(scores)
    assert kept <= scores.keys()
    assert kept >= set(sorted(scores)[-last:])
    if every:
        assert kept >= {step for step in scores if step % every == 0}
    scored = {step: score for step, score in scores.items() if score is not None}
    chosen = sorted(scored, key=lambda step: (scored[step], -step))[:best]
    assert kept >= set(chosen)
    assert len(kept) <= last + best + len([step for step in scores if every and step % every == 0])


def test_retention_keeps_last_periodic_and_best(planned: PlannedCheckpoint, tmp_path: Path) -> None:
    for step, score in {10: 3.0, 20: None, 30: 1.0, 40: 2.0, 50: 2.5, 60: None}.items():
        save(tmp_path, step, planned=planned, score=score)
    gone = prune(tmp_path, Retention(keep_last=1, keep_every=20, keep_best=1))
    assert sorted(map(step_of, gone)) == [10, 50]
    assert names_in(tmp_path) == [f"step-{step:08d}" for step in (20, 30, 40, 60)]
    assert prune(tmp_path, Retention(keep_last=1, keep_every=20, keep_best=1)) == []
    prune(tmp_path, Retention(keep_last=2))
    assert steps_in(tmp_path) == [60, 40]


def test_pruning_keeps_the_newest_valid_checkpoint_and_foreign_files(
    planned: PlannedCheckpoint, tmp_path: Path
) -> None:
    for step in range(1, 7):
        save(tmp_path, step, planned=planned)
    (tmp_path / "step-00000006" / "training.json").unlink()
    flip(tmp_path / "step-00000005" / "manifest.json")
    (tmp_path / "step-00000002" / "config.json").unlink()
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "step-00000000" / "thesis.txt").write_text("years of work")
    flip(tmp_path / "step-00000001" / "manifest.json")
    gone = prune(tmp_path, Retention(keep_last=1))
    assert sorted(map(step_of, gone)) == [2, 3], "2 is damaged, and 3 is not the newest sound one"
    assert steps_in(tmp_path) == [6, 5, 4, 1, 0]


def test_pruning_removes_nothing_without_a_valid_checkpoint(planned: PlannedCheckpoint, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        (save(tmp_path, step, planned=planned) / "config.json").unlink()
    assert prune(tmp_path, Retention(keep_last=1)) == []
    assert len(checkpoints(tmp_path)) == 5


def test_an_undeletable_checkpoint_is_one_clear_error(
    planned: PlannedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step, planned=planned)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", denied)
    with pytest.raises(CheckpointError, match=r"step-00000001: cannot be removed \(Permission denied\)"):
        prune(tmp_path, Retention(keep_last=1))
    monkeypatch.undo()
    assert full_check(tmp_path / "step-00000001") == []
    monkeypatch.setattr(shutil, "rmtree", denied)
    with pytest.raises(CheckpointError, match="cannot be removed"):
        prune(tmp_path, Retention(keep_last=1))
    monkeypatch.undo()
    assert steps_in(tmp_path) == [2], "renamed already, so nobody sees half of it"
    assert len(names_in(tmp_path)) == 2
    prune(tmp_path, Retention(keep_last=1))
    assert names_in(tmp_path) == ["step-00000002"]


# Killed --------------------------------------------------------------------------------------------------------------


def die_at_call(owner: Any, name: str, when: Callable[..., bool]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: die() if when(*args) else original(*args, **kwargs))


def nth(number: int) -> Callable[..., bool]:
    calls = iter(range(1_000_000))
    return lambda *_: next(calls) == number


KILLS: dict[str, Callable[[], object]] = {
    "at the first block": lambda: die_at_call(os, "pwrite", nth(0)),
    "at a later block": lambda: die_at_call(os, "pwrite", nth(9)),
    "as a file gets its size": lambda: die_at_call(os, "ftruncate", nth(1)),
    "at the first small file": lambda: die_at_call(Path, "write_bytes", nth(0)),
    "at the manifest": lambda: die_at_call(Path, "write_text", lambda path, *_: path.name == "manifest.json"),
    "as files are forced to the disk": lambda: die_at_call(os, "fsync", nth(3)),
    "before the old one moves": lambda: die_at_call(Path, "rename", lambda path, _: path.name.startswith("step-")),
    "between the renames": lambda: die_at_call(Path, "rename", lambda path, _: path.name.endswith(".part")),
    "before the old one goes": lambda: die_at_call(shutil, "rmtree", lambda path, *_, **__: path.name.endswith(".old")),
}


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("kill", "replaces"), [*((kill, True) for kill in KILLS), *((kill, False) for kill in KILLS if "old" not in kill)]
)
def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(
    kill: str, replaces: bool, planned: PlannedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", 4096)
    for step in (1, 2) if replaces else (1,):
        save(tmp_path, step, planned=planned)

    def work() -> None:
        KILLS[kill]()
        save(tmp_path, 2, seed=7, planned=planned)

    killed(work)
    assert len(names_in(tmp_path)) > 1, "it was killed with work left behind"
    found = newest_sound(tmp_path)
    assert found.checkpoint is not None
    assert found.skipped == (), "there is nothing half-written to skip"
    put_all_right(tmp_path)
    assert [name for name in names_in(tmp_path) if name.startswith(".")] == []
    found = newest_sound(tmp_path)
    assert found.checkpoint is not None
    seed = {"before the old one goes": 7}.get(kill, 2) if replaces else 1
    assert bits(loaded(found.checkpoint, planned)) == expected(planned, seed)
    save(tmp_path, 3, planned=planned)
    assert steps_in(tmp_path) == ([3, 2, 1] if replaces else [3, 1])


@pytest.mark.parametrize("kill", ["rename", "rmtree"])
def test_an_interrupted_prune_is_completed_by_the_next(kill: str, planned: PlannedCheckpoint, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, planned=planned)

    def work() -> None:
        if kill == "rename":
            die_at_call(Path, "rename", nth(1))
        else:
            die_at_call(os, "unlink", nth(2))
            die_at_call(os, "rmdir", nth(0))
        prune(tmp_path, Retention(keep_last=1))

    killed(work)
    assert all(full_check(path) == [] for path in checkpoints(tmp_path)), "what is seen is whole"
    assert [name for name in names_in(tmp_path) if name.endswith(".gone")] or kill == "rename"
    prune(tmp_path, Retention(keep_last=1))
    assert names_in(tmp_path) == ["step-00000003"]


def test_kills_at_random_moments_of_saving_and_pruning(planned: PlannedCheckpoint, tmp_path: Path) -> None:
    began = time.perf_counter()
    save(tmp_path, 1, planned=planned)
    longest = max(0.15, 3 * (time.perf_counter() - began))  # so that a busy machine comes to save something
    draw = random.Random(0)
    newest = 1
    for kills in range(100):
        if kills >= 10 and newest > 1:  # some were written, however busy the machine is
            break
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)
                put_all_right(tmp_path)
                for step in range(newest + 1, newest + 1_000):
                    save(tmp_path, step, planned=planned)
                    prune(tmp_path, Retention(keep_last=2))
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.005, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = newest_sound(tmp_path)
        assert found.checkpoint is not None
        assert found.skipped == ()
        assert found.checkpoint.step >= newest
        newest = found.checkpoint.step
        assert bits(loaded(found.checkpoint, planned)) == expected(planned, newest)
        assert found.checkpoint.training == {"step": newest}
    assert newest > 1
    put_all_right(tmp_path)
    prune(tmp_path, Retention(keep_last=1))
    assert names_in(tmp_path) == [f"step-{newest:08d}"]


def test_files_of_running_processes_are_left_alone(planned: PlannedCheckpoint, tmp_path: Path) -> None:
    save(tmp_path, 1, planned=planned)
    living = [f".step-00000002.{os.getppid()}.{kind}" for kind in ("part", "old", "gone")]
    own = f".step-00000002.{os.getpid()}.part"
    dead = [f".step-00000002.4194999.{kind}" for kind in ("part", "gone")]  # beyond the largest process id of Linux
    for name in (*living, own, *dead):
        (tmp_path / name).mkdir()
    prune(tmp_path, Retention(keep_last=1))
    assert names_in(tmp_path) == sorted([*living, own, dead[0], "step-00000001"]), "a thread may be writing our own"
    put_all_right(tmp_path)
    assert names_in(tmp_path) == sorted([*living, "step-00000001"])


def test_pruning_a_symlink_removes_only_the_link(planned: PlannedCheckpoint, tmp_path: Path) -> None:
    """Someone has moved checkpoints to a larger drive: they are replaced and removed here, and stay there."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (1, 2):
        save(folder, step, planned=planned).rename(elsewhere / str(step))
        (folder / f"step-{step:08d}").symlink_to(elsewhere / str(step))
    again = save(folder, 2, planned=planned)
    assert not again.is_symlink()
    save(folder, 3, planned=planned)
    prune(folder, Retention(keep_last=2))
    assert names_in(folder) == ["step-00000002", "step-00000003"]
    assert [full_check(elsewhere / str(step)) for step in (1, 2)] == [[], []]
