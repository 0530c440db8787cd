"""The stand-in is compiled once, whatever checkout asks for it, and even if an earlier build was killed."""

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


def test_a_finished_build_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` compiles again where its sources lie in another folder."""
    calls: list[str] = []
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", lambda *_, **__: calls.append("compiled"))
    monkeypatch.setattr(standin_cuda, "_imported", lambda library: calls.append(library.name))
    for _ in range(2):
        standin_cuda.build()
    assert calls == ["compiled", f"{standin_cuda.NAME}.so"]
