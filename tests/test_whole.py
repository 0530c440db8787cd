"""A file is there whole, or as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.whole import written_whole


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
