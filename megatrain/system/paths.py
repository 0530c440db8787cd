"""Paths that a user names and small files that are read whole: checked in one way, with one error for each mistake.

`usable_path` is how a text becomes a path, for every key of the configuration, every argument of the command line and
every source. After it `exists`, `is_file` and the like answer and do not raise. `read_bytes`, `read_text` and
`read_json` are how a small file is read: a pipe or a device, which never ends, is an `OSError` as an unreadable file
is, and JSON that is nested too deeply is a `ValueError` as malformed JSON is. `written_whole` is how one is written.

Left out: folders that appear whole (`system.atomic`), and forcing what was written to the disk.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from megatrain.errors import ConfigError, MegaTrainError, ModelError

LARGEST_NBYTES = 1 << 30
"""Of a file that is read whole. The largest tokenizers have 40 MB, the manifest of a checkpoint of 10**12 parameters
50 MB."""

READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
MAPPED = (".safetensors", ".bin", ".pt", ".pth", ".arrow", ".parquet")
"""Suffixes of what libraries read in a folder of a model, a tokenizer or a data set."""

HUB_NAME = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")
"""What a name on the Hugging Face hub looks like."""

LONGEST_SHOWN = 160
"""Characters of a path in an error."""

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
    """The path that `named` stands for, with `~` expanded. Nothing needs to be there; it may be a name on the hub.

    where: the key or argument that holds it. to_write: what is going to be made at the path, if anything.

    Raises `error` for a text that can be no path (empty, with a zero byte, too long), for a path that cannot be reached
    (behind a folder that may not be entered, through links that lead in a circle), and for a folder or file to write
    where something else is in its place or in its way.
    """
    text = os.fspath(named)
    place = ": ".join(part for part in (where, shown(text)) if part)
    if what := _not_a_path(text):
        raise error(what, where=place, fix="name a file or a folder")
    path = Path(os.path.expanduser(text))
    if text.startswith("~") and str(path).startswith("~"):
        what = f"nobody knows the home folder that {shown(text.split(os.sep)[0])} stands for"
        raise error(what, where=place, fix="give the whole path, or write ./~... for a name that begins with ~")
    if not path.is_absolute() and (problem := _no_working_directory()):
        raise error(f"the working directory is gone ({problem})", where=place, fix="change to one that is there")
    found: int | None = None
    try:
        found = _mode(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as problem:
        raise error(_unreachable(path, problem), where=place, fix="name another place, or mend this one") from problem
    if found is not None and to_write == "folder" and not stat.S_ISDIR(found):
        raise error(f"is {_kind(found)}, not a folder", where=place, fix="name another folder")
    if found is not None and to_write == "file" and not stat.S_ISREG(found):
        raise error(f"is {_kind(found)}, not a file", where=place, fix="name another file")
    if found is None and to_write and (obstacle := _obstacle(path)) is not None:
        raise error(f"{shown(str(obstacle))} is not a folder", where=place, fix="name a path without it")
    return path


def _not_a_path(text: str) -> str:
    """Why a text can be no path on any system; empty where it can."""
    if not text:
        return "is empty"
    if "\0" in text:
        return "holds a zero byte, which no path can"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return "holds a lone surrogate, which no path can"
    return ""


def _mode(path: Path) -> int:
    """What is at a path, as `os.stat` tells it; a folder must be one that may be entered. Raises `OSError`."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        os.stat(os.path.join(path, os.curdir))
    return mode


def _no_working_directory() -> str:
    try:
        os.getcwd()
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def _unreachable(path: Path, problem: OSError) -> str:
    if problem.errno == errno.ENAMETOOLONG:
        return "is longer than the file system allows"
    if problem.errno == errno.ELOOP:
        return "is reached by links that lead in a circle"
    if problem.errno in (errno.EACCES, errno.EPERM):
        for folder in [*reversed(Path(os.path.abspath(path)).parents), path]:
            try:
                os.stat(os.path.join(folder, os.curdir))
            except PermissionError:
                return f"{shown(str(folder))} may not be entered"
            except OSError:
                break
    return f"cannot be reached ({problem.strerror or problem})"


def _obstacle(path: Path) -> Path | None:
    """What is no folder among those that `path` would lie in; `path` itself where it is a link that leads nowhere."""
    for each in (path, *path.parents):
        if os.path.lexists(each):
            return None if each.is_dir() else each
    return None


def _kind(mode: int) -> str:
    return next((name for holds, name in _KINDS if holds(mode)), "a file")


def shown(text: str) -> str:
    """A path in a message: printable, and of a length that a person reads."""
    plain = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    half = LONGEST_SHOWN // 2
    return plain if len(plain) <= LONGEST_SHOWN else f"{plain[:half]}...{plain[-half:]}"


def may_be_hub_name(name: str) -> bool:
    """Whether `name`, by which nothing is here, may be one on the Hugging Face hub: `gpt2` or `organisation/model`.

    Anything else is a path, and so is `a/b` where there is a folder `a`.
    """
    folder, slash, _ = name.partition("/")
    return bool(HUB_NAME.fullmatch(name)) and not (slash and Path(folder).is_dir())


def refuse_absent_model(name: str, where: str) -> None:
    """Raise `ModelError` for the name of a model that is no path here and can be no name on the Hugging Face hub."""
    path = usable_path(name, where="model", error=ModelError)
    if path.exists() or (may_be_hub_name(name) and not name.endswith(".json")):
        return
    fix = "give a Hugging Face folder, or a hub name"
    if HUB_NAME.fullmatch(name) and path.parent.name and path.parent.is_dir():
        fix = f"the folder {path.parent} is here and holds no {path.name}; for the hub's, start from another folder"
    raise ModelError("no such folder or file", where=where, fix=fix)


def nearest_folder(path: Path) -> Path:
    """The folder in which `path` is, or would be made: itself, or the nearest above that is there."""
    absolute = path.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.is_dir())


def nearest_path(path: Path) -> Path | None:
    """The existing path most like `path`: a neighbour, similar in name, of the first part that is missing."""
    folder, name = _first_missing(path)
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:  # no folder, or one that may not be listed
        return None
    similar = difflib.get_close_matches(name, names, n=1)
    return folder / similar[0] if similar else None


def missing(path: Path, error: type[MegaTrainError] = ConfigError) -> MegaTrainError:
    """The error to raise for `path`, at which there is no file and no folder, with the nearest name that there is."""
    with suppress(OSError):
        return error(f"is {_kind(os.stat(path).st_mode)}, not a file", where=shown(str(path)), fix="name a file")
    if path.is_symlink():
        return error("is a link to nothing", where=shown(str(path)), fix="mend the link, or name a file")
    folder, name = _first_missing(path)
    nearest = nearest_path(path)
    fix = f"did you mean {nearest}?" if nearest else f"{folder} holds nothing called {name!r}"
    return error("no such file or folder", where=shown(str(path)), fix=fix)


def _first_missing(path: Path) -> tuple[Path, str]:
    absolute = path.absolute()
    folder, name = absolute.parent, absolute.name
    while not folder.exists() and folder != folder.parent:
        folder, name = folder.parent, folder.name
    return folder, name


def lies_within(path: Path, folder: Path) -> bool:
    """Whether `path` is below `folder` by its name and after following the links to the folders on the way.

    A file itself may be a link to anywhere, as all files in the hub's cache are.
    """
    if "\0" in str(path) or not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)):
        return False
    return Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder))


def read_bytes(path: str | Path) -> bytes:
    """What a file holds. Raises `OSError`, also for what is no file and for one larger than `LARGEST_NBYTES`."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    refuse_special(path)
    with open(path, "rb") as file:
        content = file.read(LARGEST_NBYTES + 1)  # not `st_size`, which is 0 for files of /proc
    if len(content) > LARGEST_NBYTES:
        raise OSError(errno.EFBIG, f"larger than {LARGEST_NBYTES >> 30} GiB", str(path))
    return content


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """What a text file holds, with line ends as `\\n`. Raises as `read_bytes`, and `UnicodeDecodeError`."""
    text = read_bytes(path).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises as `read_bytes`, and `ValueError` for what is no JSON or nested too deeply."""
    return parsed_json(read_bytes(path))


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises `ValueError` for what is no JSON or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def refuse_special(path: str | Path) -> None:
    """Raise `OSError` for a pipe, a device or a socket: to open or read it might never end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, f"{_kind(mode)}, not a file", str(path))


def refuse_unreadable_in(folder: Path) -> None:
    """Raise `OSError` where a file in `folder`, which libraries are to read, would never end or is too large.

    Files of tensors and tables are mapped and may have any size. Links that lead nowhere are passed over: whoever needs
    the file says that it is missing.
    """
    for entry in sorted(folder.iterdir()):
        if entry.suffix not in (*READ_WHOLE, *MAPPED):
            continue
        with suppress(FileNotFoundError):
            refuse_special(entry)
            if entry.suffix in READ_WHOLE and entry.stat().st_size > LARGEST_NBYTES:
                raise OSError(errno.EFBIG, f"larger than {LARGEST_NBYTES >> 30} GiB", str(entry))


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write, in the folder of `path`, with its suffix; it becomes `path` when the block ends without an error.

    What stood there stays until then, and stays where writing fails. Raises the `OSError` of a folder that refuses it.
    """
    draft = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
