"""A path is usable or refused in a line; what is read ends; a file is written whole, or is as it was."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from megatrain.errors import ConfigError, DataError
from megatrain.system import paths
from megatrain.system.paths import (
    lies_within,
    may_be_hub_name,
    missing,
    nearest_path,
    parsed_json,
    read_json,
    read_text,
    usable_path,
    written_whole,
)
from tests.bad_paths import FOR_A_FILE, FOR_A_FOLDER, KINDS, bad_path

NAMES = ("gpt2", "org/Llama-3.1_8B", "-5GB", "org/-a", "org-/a", "a.", "a--b", "a..b", "a.git", "é", "a/" + "b" * 97)

DEEP = "[" * 100_000 + "]" * 100_000


def cases() -> list[tuple[str, str, Literal["", "folder", "file"]]]:
    found: list[tuple[str, str, Literal["", "folder", "file"]]] = []
    for to_write, kinds in (("", {}), ("folder", FOR_A_FOLDER), ("file", FOR_A_FILE)):
        found += [(kind, says, to_write) for kind, says in {**KINDS, **kinds}.items()]  # type: ignore[misc]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_the_hubs_own_library_refuses_is_no_name_on_the_hub(name: str) -> None:
    with nullcontext() if name in NAMES[:2] else pytest.raises(HFValidationError):
        validate_repo_id(name)
    assert may_be_hub_name(name) == (name in NAMES[:2])


@pytest.mark.parametrize(("kind", "says", "to_write"), cases())
def test_a_path_that_nobody_can_use_is_refused_in_a_line(
    kind: str, says: str, to_write: Literal["", "folder", "file"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = bad_path(kind, tmp_path, monkeypatch)
    with pytest.raises(DataError) as caught:
        usable_path(text, where="data.sources", error=DataError, to_write=to_write)
    message = str(caught.value)
    assert says in message
    assert message.startswith("data.sources: ")
    assert len(message) < 600
    assert message.isprintable()


MOUNTS = r"""
/dev/vda / ext4 rw,relatime 0 0
/dev/loop0 {0}/with\040space btrfs rw,relatime,compress=zstd:3,space_cache=v2 0 0
/dev/loop1 {0}/forced btrfs rw,compress-force=lzo 0 0
/dev/loop2 {0}/plain btrfs rw,space_cache=v2 0 0
/dev/loop3 {0}/off btrfs rw,compress=no 0 0
pool {0}/pool zfs rw,xattr,noacl 0 0
/dev/vdb {0}/with\040space/inner ext4 rw 0 0
""".lstrip()


@pytest.mark.parametrize(
    ("place", "kind", "compresses"),
    [
        ("with space/folder", "btrfs", True),
        ("with space/inner", "ext4", False),
        ("forced", "btrfs", True),
        ("plain", "btrfs", False),
        ("off", "btrfs", False),
        ("pool", "zfs", False),
        ("elsewhere", "ext4", False),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_the_mount_above_it(
    place: str, kind: str, compresses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For compression, only one that spares what is allocated in advance counts."""
    mounts = MOUNTS.replace("{0}", str(tmp_path))
    monkeypatch.setattr(paths, "read_text", lambda *_, **__: mounts)
    assert paths.file_system(tmp_path / place)[0] == kind
    assert paths.compresses_what_is_not_preallocated(tmp_path / place) == compresses


def test_any_other_path_is_usable_whether_or_not_anything_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for text in (".", "absent/below", "org/name", "file", "file/below", "link/absent", "data.json#name", "ein Wort"):
        assert usable_path(text) == Path(text)
        assert usable_path(tmp_path / text) == tmp_path / text
        usable_path(text).exists()
    assert usable_path("~/x") == tmp_path / "x"
    for text in (".", "link", "absent/below"):
        usable_path(text, to_write="folder")
    for text in ("file", "link/absent", "absent/below"):
        usable_path(text, to_write="file")


def test_without_a_working_directory_only_whole_paths_are_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="the working directory is gone"):
        usable_path("runs/new")
    usable_path(tmp_path / "runs")


def test_the_nearest_name_is_told_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("")
    assert nearest_path(tmp_path / "corpsu.txt") == tmp_path / "corpus.txt"
    monkeypatch.chdir(tmp_path)
    assert nearest_path(Path("corpsu.txt")) == Path("corpus.txt")
    assert nearest_path(tmp_path / "zzz" / "below") is None
    assert "did you mean" in str(missing(tmp_path / "corpsu.txt"))
    assert "does not contain 'zzz'" in str(missing(tmp_path / "zzz" / "below"))
    assert "is a folder, not a file" in str(missing(tmp_path))
    (tmp_path / "secret").mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(os.listdir("/absent")))  # it may not be listed
    assert nearest_path(tmp_path / "secret" / "x") is None


def test_json_that_is_nested_too_deeply_is_as_good_as_malformed(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(DEEP)
    for call in (lambda: parsed_json(DEEP), lambda: read_json(tmp_path / "deep.json")):
        with pytest.raises(ValueError, match="nested too deeply"):
            call()
    assert parsed_json('{"a": 1}') == {"a": 1}


def test_line_ends_are_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\r\n2\r3\n")
    assert read_text(tmp_path / "a") == "1\n2\n3\n"


def test_what_lies_within_a_folder_does_so_by_name_and_by_links(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "out").symlink_to(tmp_path)
    (folder / "blob.safetensors").symlink_to(tmp_path / "blob")  # as the hub's cache has them
    for name in ("a.safetensors", "sub/a.safetensors", "sub/../a", "blob.safetensors"):
        assert lies_within(folder / name, folder)
    for name in ("../a", "sub/../../a", "/etc/passwd", "out/a", "out/../a", "../model2/a", "a\0b"):
        assert not lies_within(folder / name, folder)


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with written_whole(path) as draft:
        draft.write_text("new")
        assert draft.suffix == ".json"
        assert not path.exists()
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_stood_there_stays_where_writing_fails(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(error), written_whole(path) as draft:
        draft.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_is_absent_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "absent" / "a.json") as draft:
        draft.write_text("new")
