"""Paths that nobody can use, for every key and argument that takes one."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KINDS = {
    "empty": "is empty",
    "a zero byte": "cannot be a path",
    "a lone surrogate": "cannot be a path",
    "a long name": "cannot be reached (File name too long)",
    "links in a circle": "cannot be reached (Too many levels of symbolic links)",
    "a locked folder": "cannot be reached (Permission denied)",
    "nobody's home": "the home folder",
}
"""Of whatever a path is for, with what the error says."""

FOR_A_FOLDER = {
    "a file": "is a file, not a folder",
    "below a file": "is not a folder",
    "a lost link": "is not a folder",
}
"""More of them, where a folder is to be made."""

FOR_A_FILE = {"a folder": "is a folder, not a file", "a pipe": "is a pipe, not a file", "below a file": "not a folder"}
"""More of them, where a file is to be written."""


def bad_path(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A path of that kind, made in `folder` where it needs anything there."""
    match kind:
        case "empty":
            return ""
        case "a zero byte":
            return str(folder / "a\0b")
        case "a lone surrogate":
            return str(folder / "a\ud800b")
        case "a long name":
            return str(folder / ("n" * 300))
        case "links in a circle":
            (folder / "one").symlink_to(folder / "two")
            (folder / "two").symlink_to(folder / "one")
            return str(folder / "one")
        case "a locked folder":
            lock(folder / "locked", monkeypatch)
            return str(folder / "locked")
        case "nobody's home":
            return "~no-such-user/here"
        case "a folder":
            return str(folder)
        case "a pipe":
            os.mkfifo(folder / "pipe")
            return str(folder / "pipe")
        case "a lost link":
            (folder / "lost").symlink_to(folder / "nowhere")
            return str(folder / "lost")
    (folder / "file").write_text("words")
    return str(folder / "file" / "below") if kind == "below a file" else str(folder / "file")


def lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder that this process may not enter, whoever runs it: for the superuser modes count for nothing."""
    folder.mkdir(exist_ok=True)
    (folder / "inside").mkdir(exist_ok=True)
    below = f"{folder}{os.sep}"

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(path: Any = os.curdir, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.path.join(os.getcwd(), path).startswith(below):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *args, **kwargs)

        return refusing

    for name in ("stat", "lstat", "open", "mkdir", "scandir", "listdir", "readlink", "rename", "unlink"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    for module in (builtins, io):
        monkeypatch.setattr(module, "open", guarded(module.open))
