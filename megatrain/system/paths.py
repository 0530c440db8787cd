"""Check paths given by the user, and read and write small files, with one error message for each kind of mistake.

`usable_path` converts a string to a path, for configuration keys, command-line arguments and data sources; `exists`,
`is_file` and the like do not raise for it. `read_text` and `read_json` read small files; JSON nested too deeply is a
`ValueError` like other malformed JSON.
`written_whole` writes a file atomically, without syncing it to disk; `written_or_refused` with a typed error. For
folders see `system.atomic`.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from megatrain.errors import ConfigError, MegaTrainError, ModelError, first_line

HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]{0,94}\w)?(/\w([\w.-]{0,94}\w)?)?", re.ASCII)
"""A name on the Hugging Face hub: the names that `huggingface_hub.utils.validate_repo_id` accepts."""

LONGEST_SHOWN = 160
"""Most characters of a path in an error message."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def usable_path(
    named: str | Path,
    *,
    where: str = "",
    error: type[MegaTrainError] = ConfigError,
    to_write: Literal["", "folder", "file"] = "",
) -> Path:
    """`named` as a path, with `~` expanded. It need not exist, and may also be a name on the hub.

    where: the key or argument that holds it. to_write: what will be created at the path, if anything.

    Raises `error` for a string that cannot be a path (empty, with a zero byte, too long), a path that cannot be reached
    (a folder without permission, circular links), and, with `to_write`, something else in its place or in its way.
    """
    if not isinstance(named, str | os.PathLike):
        in_memory = hasattr(named, "forward")  # type: ignore[unreachable]  # from Python, anything may come
        fix = "a model in memory goes to Engine.from_model" if in_memory else "name a file or a folder"
        raise error(f"is a {type(named).__name__}, not a path", where=where, fix=fix)
    text = os.fspath(named)
    place = ": ".join(part for part in (where, shown(text)) if part)
    if not text:
        raise error("is empty", where=place, fix="name a file or a folder")
    path = Path(os.path.expanduser(text))
    if text.startswith("~") and str(path).startswith("~"):
        what = f"the home folder {shown(text.split(os.sep)[0])} is unknown"
        raise error(what, where=place, fix="give the full path, or write ./~... for a name that begins with ~")
    try:
        path.absolute()
    except OSError as problem:
        what = f"the working directory is gone ({problem.strerror or problem})"
        raise error(what, where=place, fix="change to one that exists") from problem
    mode: int | None = None
    try:
        mode = _mode(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as problem:
        what = f"cannot be reached ({problem.strerror or problem})"
        raise error(what, where=place, fix="fix that, or name another path") from problem
    except ValueError as problem:  # a zero byte, or a lone surrogate
        raise error(f"cannot be a path ({problem})", where=place, fix="name a file or a folder") from problem
    if mode is not None and to_write == "folder" and not stat.S_ISDIR(mode):
        raise error(f"is {_kind(mode)}, not a folder", where=place, fix="name another folder")
    if mode is not None and to_write == "file" and not stat.S_ISREG(mode):
        raise error(f"is {_kind(mode)}, not a file", where=place, fix="name another file")
    if mode is None and to_write and (obstacle := _obstacle(path)) is not None:
        raise error(f"{shown(str(obstacle))} is not a folder", where=place, fix="name a path without it")
    return path


def _mode(path: Path) -> int:
    """Mode of the file at a path, from `os.stat`. Raises `OSError`, also for a folder that may not be entered."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        os.stat(os.path.join(path, os.curdir))
    return mode


def _obstacle(path: Path) -> Path | None:
    """A parent of `path` that is not a folder; `path` itself if it is a broken link."""
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            return None if folder.is_dir() else folder
    return None


def _kind(mode: int) -> str:
    return next((name for holds, name in _KINDS if holds(mode)), "a file")


def shown(text: str) -> str:
    """A path for a message: printable and shortened."""
    plain = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    half = LONGEST_SHOWN // 2
    return plain if len(plain) <= LONGEST_SHOWN else f"{plain[:half]}...{plain[-half:]}"


def may_be_hub_name(name: str) -> bool:
    """Whether `name`, which is not an existing path, may be a name on the hub: `gpt2` or `organisation/model`.

    Anything else is taken for a path, and so is `a/b` if there is a folder `a`.
    """
    folder, slash, _ = name.partition("/")
    return bool(HUB_NAME.fullmatch(name)) and not (slash and Path(folder).is_dir())


def refuse_impossible_model(name: str, where: str) -> None:
    """Raise `ModelError` for a model name that is not an existing path and cannot be a name on the hub."""
    path = usable_path(name, where="model", error=ModelError)
    if path.exists() or (may_be_hub_name(name) and not name.endswith(".json")):
        return
    fix = "give a Hugging Face folder, or a hub name"
    if nearest := nearest_path(path):
        fix = f"did you mean {nearest}?"
    if HUB_NAME.fullmatch(name) and path.parent.name and path.parent.is_dir():
        has = fix if nearest else f"the folder {path.parent} exists but has no {path.name};"
        fix = f"{has} for the hub's, start in another directory"
    raise ModelError("no such folder or file", where=where, fix=fix)


def nearest_folder(path: Path) -> Path:
    """`path` if it is a folder, else its nearest parent that exists."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())


def nearest_path(path: Path) -> Path | None:
    """The existing path most similar to `path`, relative if that is: a similar name in place of its first missing
    part."""
    folder, name = _first_missing(path)
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:  # not a folder, or not readable
        return None
    similar = difflib.get_close_matches(name, names, n=1)
    if not similar:
        return None
    return folder / similar[0] if path.is_absolute() else Path(os.path.relpath(folder / similar[0]))


def missing(path: Path, error: type[MegaTrainError] = ConfigError) -> MegaTrainError:
    """The error to raise for a missing file or folder, with the most similar existing name."""
    with suppress(OSError):
        return error(f"is {_kind(os.stat(path).st_mode)}, not a file", where=shown(str(path)), fix="name a file")
    if path.is_symlink():
        return error("is a broken link", where=shown(str(path)), fix="fix the link, or name a file")
    folder, name = _first_missing(path)
    nearest = nearest_path(path)
    fix = f"did you mean {nearest}?" if nearest else f"{folder} does not contain {name!r}"
    return error("no such file or folder", where=shown(str(path)), fix=fix)


def _first_missing(path: Path) -> tuple[Path, str]:
    absolute = path.absolute()
    folder, name = absolute.parent, absolute.name
    while not folder.exists() and folder != folder.parent:
        folder, name = folder.parent, folder.name
    return folder, name


def lies_within(path: Path, folder: Path) -> bool:
    """Whether `path` is inside `folder`, both by name and after resolving links among its parent folders.

    The file itself may be a link to anywhere, as files in the hub's cache are.
    """
    if "\0" in str(path) or not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)):
        return False
    return Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder))


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Content of a text file, with line ends as `\\n`. Raises `OSError` and `UnicodeDecodeError`."""
    text = Path(path).read_bytes().decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises `OSError`, and `ValueError` for malformed or too deeply nested JSON."""
    return parsed_json(Path(path).read_bytes())


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON string. Raises `ValueError` for malformed or too deeply nested JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path next to `path`, with its suffix; it is renamed to `path` if the block succeeds.

    An existing file stays in place until then, or if writing fails. Raises `OSError` if the folder refuses it.
    """
    name = f"{os.getpid()}-{os.urandom(4).hex()}"  # containers that share a folder may have equal process ids
    draft = path.with_name(f".{path.stem}.{name}.part{path.suffix}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


@contextmanager
def written_or_refused(
    path: Path, error: type[MegaTrainError], fix: str, *, makes_folder: bool = False
) -> Iterator[Path]:
    """As `written_whole`, but raises `error`, which advises `fix`, where the file cannot be written.

    makes_folder: whether the folder is created, if it is missing.
    """
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as draft:
            yield draft
    except OSError as problem:
        # The system's text for the number, since Arrow's own is long and repeats the number.
        why = os.strerror(problem.errno) if problem.errno else first_line(problem)
        raise error(f"cannot be written ({why})", where=str(path), fix=fix) from problem


def file_system(folder: Path) -> tuple[str, list[str]]:
    """The kind of the file system of an existing folder, and the options of its mount; nothing where the system does
    not list its mounts."""
    mounts: dict[Path, tuple[str, list[str]]] = {}
    with suppress(OSError):
        for line in read_text("/proc/self/mounts", errors="surrogateescape").splitlines():
            _, place, kind, options, *_ = line.split(" ")
            place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place)
            mounts[Path(place)] = kind, options.split(",")
    absolute = folder.resolve()
    return next((mounts[above] for above in (absolute, *absolute.parents) if above in mounts), ("", []))


def compresses_what_is_not_preallocated(folder: Path) -> bool:
    """Whether the file system of `folder` compresses its files, but not those whose space is allocated in advance.

    Btrfs does, and before Linux 6.15 it does not compress what bypasses the page cache, either. Where ZFS compresses,
    it compresses all: to allocate there is to ask whether the pool has room.
    """
    kind, options = file_system(folder)
    return kind == "btrfs" and any(re.fullmatch(r"compress(-force)?(=(?!no).*)?", option) for option in options)


def is_cached(file: int, buffer: memoryview) -> bool:
    """Whether the first bytes of an open file are in the page cache; reads them into `buffer` if so.

    After a direct write it tells whether the file system has only said that it writes directly, as ext4 does with
    data=journal. False where the system cannot tell.
    """
    flags, direct = fcntl.fcntl(file, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~direct)
        return os.preadv(file, [buffer], 0, os.RWF_NOWAIT) > 0
    except (OSError, AttributeError):
        return False
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
