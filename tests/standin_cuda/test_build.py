"""The stand-in is compiled once, even if an earlier build was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils import cpp_extension

from tests import standin_cuda


def test_a_build_that_was_killed_does_not_block_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` waits for as long as its lock file is there."""
    locks: list[bool] = []

    def load(*_: object, build_directory: str, **__: object) -> None:
        lock = Path(build_directory) / "lock"
        locks.append(lock.exists())
        lock.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", load)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            standin_cuda.build()
    assert locks == [False, False]
