"""Folders of a container's image, which overlayfs does not rename, are replaced and deleted all the same."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.system.atomic import appearing, finish_vanishing, put_all_right, put_right, vanish
from tests.killed import die, killed


@pytest.fixture(params=["overlayfs", "simulated"])
def image(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that holds `model` in the lower layer: a file `weights`, and one in a folder."""
    lower, merged = tmp_path / "lower", tmp_path / "merged"
    (lower / "model" / "inner").mkdir(parents=True)
    (lower / "model" / "weights").write_text("old")
    (lower / "model" / "inner" / "moments").write_text("old")
    if request.param == "simulated":
        rename = Path.rename

        def refuse_lower(path: Path, to: Path) -> Path:
            if path == lower / "model" and (path / "inner").exists():
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            return rename(path, to)

        monkeypatch.setattr(Path, "rename", refuse_lower)
        yield lower
        return
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={lower},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount an overlayfs")
    yield merged
    subprocess.run(["umount", str(merged)], check=True)


def replace(target: Path) -> None:
    with appearing(target) as staging:
        (staging / "weights").write_text("new")


def die_half_deleted(folder: Path) -> None:
    (folder / "weights").unlink()
    die()


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_the_image_is_replaced(image: Path) -> None:
    replace(image / "model")
    assert contents(image) == {"model/weights": "new"}
    replace(image / "model")  # now it is an ordinary folder
    assert [path.name for path in image.iterdir()] == ["model"]


def test_a_folder_of_the_image_is_deleted(image: Path) -> None:
    vanish(image / "model")
    assert list(image.iterdir()) == []


def test_if_writing_fails_a_folder_of_the_image_stays(image: Path) -> None:
    with pytest.raises(OSError, match="full"), appearing(image / "model"):
        raise OSError(errno.ENOSPC, "full")
    assert contents(image) == {"model/weights": "old", "model/inner/moments": "old"}
    assert [path.name for path in image.iterdir()] == ["model"]


@pytest.mark.parametrize("settle", [put_all_right, lambda folder: put_right(folder / "model")])
def test_a_replacement_that_was_killed_is_finished(
    image: Path, settle: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(shutil, "rmtree", die_half_deleted)
        killed(lambda: replace(image / "model"))
    assert contents(image / "model") == {"inner/moments": "old"}, "it was killed with work left behind"
    settle(image)
    assert contents(image) == {"model/weights": "new"}


def test_a_deletion_that_was_killed_is_finished(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(shutil, "rmtree", die_half_deleted)
        killed(lambda: vanish(image / "model"))
    assert contents(image / "model") == {"inner/moments": "old"}, "it was killed with work left behind"
    finish_vanishing(image)
    assert list(image.iterdir()) == []


def test_what_cannot_be_deleted_does_not_cost_the_replacement(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:

        def refuse(folder: Path, ignore_errors: bool = False) -> None:
            if not ignore_errors:
                raise OSError(errno.EACCES, "denied")

        failing.setattr(shutil, "rmtree", refuse)
        with pytest.raises(OSError, match="denied"):
            replace(image / "model")
    put_right(image / "model")
    assert contents(image) == {"model/weights": "new"}
