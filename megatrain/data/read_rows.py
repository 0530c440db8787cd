"""Reads rows from JSON (lines), CSV, Parquet, Arrow, text, folders, saved datasets and the hub.

`datasets` reads what is in columns, a row at a time and without a second copy on the disk; it lives here alone and is
loaded on first use. JSON is read by ourselves, because a mistake in it must be told by its line. Every row knows its
place, for whatever is found wrong with it later. CSV is read by Python's reader, which leaves 007 what it is.

Arrow holds one type per column, so that a key which some rows lack is there in all of them, as a null. A null in a
column of objects is therefore taken for a missing key. In JSON a null stays a null.

Left out: datasets that need Python code of their own.
"""

from __future__ import annotations

import csv
import glob
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TextIO, TypeAlias

from megatrain.data.compressed_files import (
    DamagedData,
    kind_of,
    open_bytes,
    open_text,
    without_compression,
    zstd_reader,
)
from megatrain.data.hub import commit_or_download
from megatrain.data.json_text import MalformedJson, list_elements, parse_json
from megatrain.data.text_sources import SourceFile, find_files
from megatrain.errors import DataError, SampleError, first_line
from megatrain.system.paths import may_be_hub_name, missing, read_json, refuse_unreadable_in, usable_path

# What is not trained on, counted by reason, with the place of the first of each.
#
# Whoever reads or encodes samples is handed a `LeftOut` and asks it what to do with an unusable one: end the run with
# its error (`stop`, the default), or leave it out and count it (`leave_out`). Nothing else may pass over a sample.


Bad: TypeAlias = Literal["stop", "leave_out"]


@dataclass
class LeftOut:
    """`bad` is what happens to an unusable sample; `counts` and `first` are by reason."""

    bad: Bad = "stop"
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first place

    def add(self, reason: str, place: str, count: int = 1) -> None:
        """Counts what is left out by intention, or has nothing in it."""
        if count > 0:
            self.counts[reason] += count
            self.first.setdefault(reason, place)

    def merge(self, later: LeftOut) -> None:
        """Counts what was left out after all that is counted here."""
        self.counts.update(later.counts)
        self.first = {**later.first, **self.first}

    def refuse(self, error: SampleError) -> None:
        """Raises `error`, or counts its sample as left out."""
        if self.bad == "stop":
            raise error
        self.add(error.reason, error.where)

    def lines(self) -> list[str]:
        """For the user, the most frequent reason first: `12 too long (first: chats.jsonl:17)`."""
        return [f"{count:,} {reason} (first: {self.first[reason]})" for reason, count in self.counts.most_common()]


JSON_LINES = (".jsonl", ".ndjson")
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
SEPARATED = {".csv": ",", ".tsv": "\t"}
TURNS = ({"role", "content"}, {"from", "value"})
"""Keys of a turn of a chat."""
LONGEST_CELL = 1 << 30
"""Characters; Python's reader has 131,072 otherwise."""
TEXTS = (".txt", ".md")
SUFFIXES = (".json", *JSON_LINES, *SEPARATED, *TABLES, *TEXTS)
DATASET_INFO = "dataset_info.json"  # a list of data sets in LLaMA-Factory, a description in a saved dataset
DOCS = frozenset({"readme", "license", "licence", "notice", "citation", "changelog", "dataset_infos"})
"""Files that stand beside samples and are about them, by their names in small letters without a suffix."""


@dataclass(frozen=True)
class Row:
    """One row, before anyone has looked at what it means."""

    fields: Mapping[str, Any]
    file: str  # rows of one file have one schema
    place: str  # `chats.jsonl:17`, `chats.parquet[16]`: lines count from 1, rows from 0


def read_rows(
    name: str,
    left_out: LeftOut,
    *,
    split: str = "train",
    subset: str | None = None,
    folder: str | None = None,
    pattern: str = "*",
) -> Iterator[Row]:
    """The rows of `name`: a file, a folder, or a dataset on the hub (of which `subset` and `folder` name parts).

    Files of a folder that match `pattern` are read in sorted order; what is no data there, empty files, and files that
    repeat another byte for byte are left out and counted. Raises `DataError` for what is missing, unreadable or
    malformed, and asks `left_out` about single rows.
    """
    path = usable_path(name, error=DataError)
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            yield from _numbered(name, lambda library: _saved(library, path, split))
            return
        yield from _folder_rows(path, left_out, pattern)
    elif path.is_file() and path.name == DATASET_INFO:
        raise _list_of_data_sets(path)
    elif path.is_file():
        yield from _file_rows(path, left_out)
    elif path.exists():
        raise DataError("neither a file nor a folder", where=name)
    else:
        refuse_missing(name)
        yield from _hub_rows(name, split, subset, folder)


def refuse_missing(name: str) -> None:
    """Raise `DataError` for a source of samples that is not on this machine and, by its name, not on the hub."""
    path = usable_path(name, error=DataError)
    if not path.exists() and (kind_of(path) in SUFFIXES or not may_be_hub_name(name)):
        raise missing(path, DataError)


def without_docs(files: Sequence[SourceFile]) -> list[SourceFile]:
    """`files` without those that are about the others; all of them where there are but texts."""
    if all(kind_of(file.path) not in SUFFIXES or kind_of(file.path) in TEXTS for file in files):
        return list(files)
    return [file for file in files if without_compression(file.path).stem.lower() not in DOCS]


def _folder_rows(folder: Path, left_out: LeftOut, pattern: str) -> Iterator[Row]:
    if (folder / DATASET_INFO).is_file():
        raise _list_of_data_sets(folder / DATASET_INFO)
    found, skipped = find_files([folder], pattern)
    for reason, count in skipped.items():
        left_out.add(f"{reason} in a folder", str(folder), count)
    data = without_docs(found)
    files = [file for file in data if kind_of(file.path) in SUFFIXES]
    for file in found:
        if file not in data:
            left_out.add("file about the data", str(file.path))
        elif kind_of(file.path) not in SUFFIXES:
            left_out.add("file of another kind", str(file.path))
    if not files:
        raise DataError("holds no file of samples", where=str(folder), fix=f"known are {', '.join(SUFFIXES)}")
    for file in _once(files, left_out):
        yield from _file_rows(file.path, left_out)


def _list_of_data_sets(index: Path) -> DataError:
    """The error for a list that was named in place of one of its data sets, or for a saved data set's description."""
    try:
        entries = read_json(index)
        names = [str(name) for name, entry in entries.items() if isinstance(entry, dict)]
    except (OSError, ValueError, AttributeError) as error:
        what = f"cannot be read ({getattr(error, 'strerror', None) or first_line(error)})"
        return DataError(what, where=str(index), fix="correct the file, or name a file of samples")
    if "features" in names or not names:
        return DataError("describes a data set and holds no sample", where=str(index), fix="name a file of samples")
    shown = [f"{index}#{names[0]}", *(f"#{name}" for name in names[1:4])]
    more = f", {len(names) - 4:,} more" if len(names) > 4 else ""
    fix = f"name one of them: {', '.join(shown)}{more}"
    return DataError("is a list of data sets, of which one is to be named", where=str(index), fix=fix)


def _once(files: Sequence[SourceFile], left_out: LeftOut) -> Iterator[SourceFile]:
    """`files` without those that repeat an earlier one. Only files of one size are read to compare them."""
    same_size: dict[int, list[Path]] = defaultdict(list)
    for file in files:
        same_size[file.nbytes].append(file.path)
    seen: set[str] = set()
    for file in files:
        if file.nbytes and len(same_size[file.nbytes]) > 1:
            digest = _digest(file.path)
            if digest in seen:
                left_out.add("file that repeats another", str(file.path))
                continue
            seen.add(digest)
        yield file


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(error.strerror or str(error), where=str(path), fix="make it readable") from error


def _file_rows(path: Path, left_out: LeftOut) -> Iterator[Row]:
    if kind_of(path) not in SUFFIXES:
        fix = f"known are {', '.join(SUFFIXES)}, and all but columns with .gz or .zst behind it"
        raise DataError(f"a file of samples does not end in {kind_of(path) or 'nothing'!r}", where=str(path), fix=fix)
    rows = 0
    try:
        for row in _parsed(path, left_out) if path.stat().st_size else ():
            rows += 1
            yield row
    except OSError as error:
        fix = "fetch it anew, or leave it out" if isinstance(error, DamagedData) else "make it readable"
        raise DataError(error.strerror or str(error), where=str(path), fix=fix) from error
    if rows == 0:
        left_out.add("empty file", str(path))


def _parsed(path: Path, left_out: LeftOut) -> Iterator[Row]:
    if kind_of(path) in TABLES:
        return _numbered(str(path), lambda library: _table(library, path))
    if kind_of(path) in JSON_LINES:
        return _json_lines(path, left_out)
    if kind_of(path) in SEPARATED:
        return _separated_rows(path, left_out)
    return _json_rows(path, left_out) if kind_of(path) == ".json" else _text_row(path)


def _text_row(path: Path) -> Iterator[Row]:
    with open_bytes(path) as file:
        text = _decoded(file.read(), str(path))
    if text.strip():
        yield Row({"text": text}, str(path), str(path))


def _separated_rows(path: Path, left_out: LeftOut) -> Iterator[Row]:
    """The rows below the header of a CSV or TSV file, every cell as text, or the turns whose JSON text it is.

    A row's place is its first line.
    """
    csv.field_size_limit(LONGEST_CELL)
    with open_text(path) as text:
        reader = csv.reader(text, delimiter=SEPARATED[kind_of(path)], strict=True)
        at = 1
        try:
            header = next(filter(None, reader), [])
            twice = [name for name, count in Counter(header).items() if count > 1]
            if twice:
                raise DataError(f"two columns are called {twice[0]!r}", where=f"{path}:{at}", fix="rename one of them")
            at = reader.line_num + 1
            for cells in reader:
                place, at = f"{path}:{at}", reader.line_num + 1
                if len(cells) == len(header):
                    yield Row(dict(zip(header, map(_cell, cells), strict=True)), str(path), place)
                elif cells:  # an empty line has none
                    what = f"{len(cells)} cells below a header of {len(header)}"
                    fix = "correct the row; put quotes around a cell that holds the separator or a line end"
                    left_out.refuse(SampleError(what, reason="of another number of cells", where=place, fix=fix))
        except csv.Error as error:
            raise DataError(f"not a table ({error})", where=f"{path}:{at}", fix="correct the file") from error
        except UnicodeDecodeError as error:
            raise _not_utf8(error, f"{path}:{_line_not_utf8(path)}") from error


def _cell(text: str) -> Any:
    """A turn of a chat or a list of them, where a cell holds its JSON: a table has no other way to hold one."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return text
    turns = value if isinstance(value, list) else [value]
    are = bool(turns) and all(isinstance(turn, dict) and any(keys <= turn.keys() for keys in TURNS) for turn in turns)
    return value if are else text


def _line_not_utf8(path: Path) -> int:
    """The first line that is no UTF-8, of a file that has one: text is decoded ahead of what is read of it."""
    good = 0
    with open_bytes(path) as file, suppress(UnicodeDecodeError):
        for line in file:
            line.decode("utf-8-sig")
            good += 1
    return good + 1


def _json_lines(path: Path, left_out: LeftOut) -> Iterator[Row]:
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                fields = parse_json(_decoded(line, place))
            except (ValueError, RecursionError) as error:
                what = f"not a line of JSON ({error})"
                fix = "correct or remove the line"
                left_out.refuse(SampleError(what, reason="not a line of JSON", where=place, fix=fix))
                continue
            yield from _object(fields, path, place, left_out)


def _json_rows(path: Path, left_out: LeftOut) -> Iterator[Row]:
    """The list in a JSON file; JSON lines under that name, which are common, are read as what they are."""
    try:
        with open_text(path) as text:
            is_lines = _begins_with_object(text, str(path))
        if is_lines:
            yield from _json_lines(path, left_out)
            return
        with open_text(path) as text:
            for number, fields in enumerate(list_elements(text)):
                yield from _object(fields, path, f"{path}[{number}]", left_out)
    except MalformedJson as error:
        raise DataError(f"not JSON ({error})", where=f"{path}:{error.line}", fix="correct the file") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(error, str(path)) from error
    except RecursionError as error:
        raise DataError("JSON that is nested too deeply", where=str(path)) from error


def _object(fields: object, path: Path, place: str, left_out: LeftOut) -> Iterator[Row]:
    if isinstance(fields, dict):
        yield Row(fields, str(path), place)
    else:
        what = f"{type(fields).__name__} in place of an object"
        left_out.refuse(SampleError(what, reason="not an object", where=place, fix="each sample is one JSON object"))


def _begins_with_object(text: TextIO, where: str) -> bool:
    """Whether the first line is an object, as in JSON lines; a list is not read. Raises `DataError` for neither."""
    while (character := text.read(1)).isspace():
        pass
    if character != "{":
        return not character  # nothing at all is no lines
    try:
        return isinstance(parse_json(character + text.readline()), dict)
    except ValueError as error:
        what = f"dict in place of a list of samples, or a line that is not JSON ({error})"
        fix = "save a list of objects, or one object per line"
        raise DataError(what, where=where, fix=fix) from error


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, place) from error


def _not_utf8(error: UnicodeDecodeError, place: str) -> DataError:
    return DataError(f"not UTF-8 text ({error.reason})", where=place, fix="convert it to UTF-8")


def _hub_rows(name: str, split: str, subset: str | None, folder: str | None) -> Iterator[Row]:
    """Streamed where the hub answers; else from an earlier download, where there is one."""
    if commit_or_download(name) is None:
        yield from _numbered(name, lambda library: _downloaded(library, name, subset, folder, split))
        return

    def load(library: ModuleType) -> Any:
        return library.load_dataset(name, subset, data_dir=folder, split=split, streaming=True)

    yield from _numbered(name, load)


def _downloaded(library: ModuleType, name: str, subset: str | None, folder: str | None, split: str) -> Any:
    """From the library's cache. Its switch for work without a hub keeps it from asking for most of a minute."""
    was_offline = library.config.HF_HUB_OFFLINE
    library.config.HF_HUB_OFFLINE = True
    try:
        return library.load_dataset(name, subset, data_dir=folder, split=split)
    finally:
        library.config.HF_HUB_OFFLINE = was_offline


def _table(library: ModuleType, path: Path) -> Any:
    return library.load_dataset(TABLES[kind_of(path)], data_files=glob.escape(str(path)), split="train", streaming=True)


def _saved(library: ModuleType, path: Path, split: str) -> Any:
    for folder in (path, *filter(Path.is_dir, path.iterdir())):  # a folder for each split
        refuse_unreadable_in(folder)
    saved = library.load_from_disk(str(path))
    return saved[split] if isinstance(saved, dict) else saved


def _numbered(name: str, load: Callable[[ModuleType], Any]) -> Iterator[Row]:
    """The rows of what `load` gives, by their number."""
    library = _library(name)
    try:
        for number, fields in enumerate(load(library)):
            yield Row(_without_nulls(fields), name, f"{name}[{number}]")
    except Exception as error:  # the library raises whatever its readers and its network raise
        what = f"cannot be read ({first_line(error)})"
        raise DataError(what, where=name, fix="check the file, or its split and subset") from error


STREAMED = {**TABLES, ".json": "json", **dict.fromkeys(JSON_LINES, "json")}
"""Files that are streamed, and what the library calls them."""


class RowStream:
    """The rows of a data set as they come, an epoch after another, from any place that was told before.

    The data set is on the hub, at one commit; or a folder, a saved data set or a file of `STREAMED`, as the library
    reads them: one type to a column. A place is found again by the library's own state, which leads to the right part
    of the right file. Nothing is kept. Raises `DataError` for what is missing or cannot be read.
    """

    def __init__(self, name: str, split: str, subset: str | None, folder: str | None, pattern: str = "*") -> None:
        self.name, self._split, self._subset, self._folder, self._pattern = name, split, subset, folder, pattern
        self.commit: str | None = None
        """Of a data set on the hub; `None` for one on this machine, an earlier download too."""
        if not usable_path(name, error=DataError).exists():
            refuse_missing(name)
            self.commit = commit_or_download(name)
        self._data, self._beginning = self._opened()

    def go_to(self, commit: str | None) -> None:
        """Reads what the hub had at another commit."""
        if commit != self.commit:
            self.commit = commit
            self._data, self._beginning = self._opened()

    def rows_from(self, number: int, at: Mapping[str, Any] | None) -> Iterator[Row]:
        """Row `number` and all behind it in an epoch; `at` is what `place` was there, or `None` for the first row."""
        with self._told():
            self._data.load_state_dict(dict(at or self._beginning))
            rows = enumerate(self._data, start=number)
        while True:
            with self._told():
                row = next(rows, None)
            if row is None:
                return
            yield Row(_without_nulls(row[1]), self.name, f"{self.name}[{row[0]}]")

    def place(self) -> dict[str, Any]:
        """Where the row is that follows on the last one given, as JSON."""
        state: dict[str, Any] = self._data.state_dict()
        return state

    def _opened(self) -> tuple[Any, Mapping[str, Any]]:
        library = _library(self.name)
        with self._told():
            data = self._found(library)
            data = data.to_iterable_dataset() if isinstance(data, library.Dataset) else data
            return data, data.state_dict()

    def _found(self, library: ModuleType) -> Any:
        path = usable_path(self.name, error=DataError)
        how = {"split": self._split, "streaming": True}
        if path.is_file():
            if kind_of(path) not in STREAMED:
                fix = f"leave data.streaming out, or name a folder, a data set on the hub or {', '.join(STREAMED)}"
                raise DataError("is no file that is streamed", where=self.name, fix=fix)
            return library.load_dataset(STREAMED[kind_of(path)], data_files=glob.escape(str(path)), **how)
        if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return _saved(library, path, self._split)
        if not path.exists() and self.commit is None:
            return _downloaded(library, self.name, self._subset, self._folder, self._split)
        if path.is_dir():
            how |= {"data_files": None if self._pattern == "*" else self._pattern}
        else:
            how |= {"data_dir": self._folder, "revision": self.commit}
        data = library.load_dataset(self.name, self._subset, **how)
        if data.info.builder_name == "text":
            what, fix = "holds plain text, each line of which would be a sample", "leave data.streaming out"
            raise DataError(what, where=self.name, fix=fix)
        return data

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever the library's readers and its network raise, as one error."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            what, fix = (
                f"cannot be read ({first_line(error)})",
                "check the network, the files, the split and the subset",
            )
            raise DataError(what, where=self.name, fix=fix) from error


def _library(name: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        what = "needs the `datasets` package, which is not installed"
        raise DataError(what, where=name, fix="pip install datasets, or bring JSON lines") from error
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it tells a server of every file that it opens
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is said once, by the error
    _teach_zstd()
    library: ModuleType = datasets
    return library


def _teach_zstd() -> None:
    """Has the library read `.zst`, which it knows where a package is installed that `open_bytes` does without."""
    from fsspec import compression  # type: ignore[import-untyped]

    if "zstd" not in compression.compr:
        compression.register_compression("zstd", lambda file, mode="rb", **_: zstd_reader(file), "zst")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
