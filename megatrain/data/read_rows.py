"""Reads rows from JSON (lines), CSV, Parquet, Arrow, text, folders, saved datasets and the hub.

The `datasets` library reads tables, row by row and without a second copy on disk; it is imported here only, on first
use. JSON is read without it, also from the hub and as a stream: `datasets` gives a column one type, so that texts
become dates and numbers. CSV is read by Python's reader, which keeps 007 as it is. Every row has its place (file and
line) for later errors.

A struct of Arrow has the same keys in every row, so a key that some rows lack is null in these rows. Nulls of structs
are therefore treated as missing keys. In JSON, also in a column of JSON, a null stays a null.

Not supported: data sets that need Python code of their own.
"""

from __future__ import annotations

import csv
import glob
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from functools import cache
from itertools import islice
from pathlib import Path, PosixPath
from types import ModuleType
from typing import Any, Literal, NamedTuple, TextIO, TypeAlias

from megatrain.data.files import (
    DamagedData,
    MalformedJson,
    SourceFile,
    find_files,
    kind_of,
    list_elements,
    open_bytes,
    open_text,
    parse_json,
    unreadable,
    without_compression,
    zstd_reader,
)
from megatrain.errors import DataError, SampleError, first_line
from megatrain.system import hub_client
from megatrain.system.paths import may_be_hub_name, missing, nearest_path, read_json, usable_path

Bad: TypeAlias = Literal["stop", "leave_out"]
"""What happens to an unusable sample: its error stops the run, or it is left out and counted."""


@dataclass
class LeftOut:
    """Counts the samples that are left out, by reason, and decides what happens to unusable ones.

    Everything that reads or encodes samples takes a `LeftOut`, and skips no sample without it.
    """

    bad: Bad = "stop"
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> the place of the first one

    def add(self, reason: str, place: str, count: int = 1) -> None:
        """Count samples that are left out on purpose, or empty."""
        if count > 0:
            self.counts[reason] += count
            self.first.setdefault(reason, place)

    def merge(self, later: LeftOut) -> None:
        """Add the counts of samples that come after these."""
        self.counts.update(later.counts)
        self.first = {**later.first, **self.first}

    def clear(self) -> None:
        """Forget all counts."""
        self.counts.clear()
        self.first.clear()

    def refuse(self, error: SampleError) -> None:
        """Raise the error of an unusable sample, or count the sample as left out."""
        if self.bad == "stop":
            raise error
        self.add(error.reason, error.where)

    def lines(self) -> list[str]:
        """The counts for the user, the most frequent reason first: `12 too long (first: chats.jsonl:17)`."""
        return [f"{count:,} {reason} (first: {self.first[reason]})" for reason, count in self.counts.most_common()]


JSON_LINES = (".jsonl", ".ndjson")
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
SEPARATED = {".csv": ",", ".tsv": "\t"}
TURNS = ({"role", "content"}, {"from", "value"})
"""Keys of a turn of a chat, in the two common formats."""
TABLE_ROWS = 1000
"""Rows of a table that are converted at once."""
PIECE_CHARACTERS = 1 << 20
"""Of a text that is read in pieces."""
COMPRESSION_MAGIC = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04")
"""The first bytes of gzip, zstd, bzip2, xz and zip files."""
LONGEST_CELL = 1 << 30
"""Characters of a cell; Python's default is 131,072."""
TEXTS = (".txt", ".md")
SUFFIXES = (".json", *JSON_LINES, *SEPARATED, *TABLES, *TEXTS)
DATASET_INFO = "dataset_info.json"  # LLaMA-Factory's list of data sets, or the description of a saved data set
DOCS = frozenset({"readme", "license", "licence", "notice", "citation", "changelog", "dataset_infos"})
"""Files about the data, which are no samples: names in lower case, without a suffix."""


class SourceRow(NamedTuple):
    """One row of a source, not yet interpreted."""

    fields: Mapping[str, Any]
    file: str  # rows of one file have one schema
    place: str  # `chats.jsonl:17` or `chats.parquet[16]`: lines count from 1, rows from 0
    begins: bool = True  # whether a text begins here, and ends here; if not, it is a part of one
    ends: bool = True


def read_rows(name: str, left_out: LeftOut, **which: Any) -> Iterator[SourceRow]:
    """The rows of a `RowStream` from the first one on, all of them."""
    yield from RowStream(name, left_out, **which).rows_from(0, None)


def refuse_missing(name: str) -> None:
    """Raise `DataError` for a source that is not on this machine and whose name cannot be one on the hub."""
    path = usable_path(name, error=DataError)
    if not path.exists() and (kind_of(path) in SUFFIXES or not may_be_hub_name(name)):
        raise missing(path, DataError)


def is_saved(folder: Path) -> bool:
    """Whether `datasets` has saved a data set in `folder`."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def without_docs(files: Sequence[SourceFile]) -> list[SourceFile]:
    """`files` without those about the data (a README), unless all of them are texts."""
    if all(kind_of(file.path) not in SUFFIXES or kind_of(file.path) in TEXTS for file in files):
        return list(files)
    return [file for file in files if without_compression(file.path).stem.lower() not in DOCS]


def _folder_files(folder: Path, left_out: LeftOut, pattern: str) -> list[Path]:
    """The files of samples in a folder. Others, empty files and copies are left out and counted."""
    if (folder / DATASET_INFO).is_file():
        raise _list_of_data_sets(folder / DATASET_INFO)
    everything, skipped = find_files([folder], pattern)
    for reason, count in skipped.items():
        left_out.add(f"{reason} in a folder", str(folder), count)
    data = without_docs(everything)
    files = [file for file in data if kind_of(file.path) in SUFFIXES]
    for file in everything:
        if file not in data:
            left_out.add("file about the data", str(file.path))
        elif kind_of(file.path) not in SUFFIXES:
            left_out.add("file of another kind", str(file.path))
    if not files:
        raise DataError("holds no file of samples", where=str(folder), fix=f"known are {', '.join(SUFFIXES)}")
    return [file.path for file in files]


def _list_of_data_sets(index: Path) -> DataError:
    """The error for naming a list of data sets, not one of them, or the description of a saved data set."""
    try:
        entries = read_json(index)
        names = [str(name) for name, entry in entries.items() if isinstance(entry, dict)]
    except (OSError, ValueError, AttributeError) as error:
        what = f"cannot be read ({getattr(error, 'strerror', None) or first_line(error)})"
        return DataError(what, where=str(index), fix="correct the file, or name a file of samples")
    if "features" in names or not names:
        return DataError("describes a data set, and holds no samples", where=str(index), fix="name a file of samples")
    fix = f"name one of them, {index}#{names[0]} say"
    return DataError("is a list of data sets; one of them must be named", where=str(index), fix=fix)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file. Raises `DataError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(error, path) from error


def _file_rows(path: Path, left_out: LeftOut, skipped: int) -> Iterator[SourceRow]:
    """The rows of a file after the first `skipped`; `left_out` gets only what comes after these."""
    kind, is_remote, rows = kind_of(path), isinstance(path, RemoteFile), skipped
    if kind not in SUFFIXES:
        fix = f"known are {', '.join(SUFFIXES)}, and all but {' and '.join(TABLES)} followed by .gz or .zst"
        raise DataError(f"a file of samples does not end in {kind or 'nothing'!r}", where=str(path), fix=fix)
    try:
        if is_remote or path.stat().st_size:
            parsed = _table_rows(path, skipped)
            if kind not in TABLES:
                parsed = next(parse for parse, kinds in READERS.values() if kind in kinds)(path, left_out)
                for _ in islice(parsed, skipped):
                    pass
                if skipped:
                    left_out.clear()
            for row in parsed:
                rows += 1
                yield row
    except OSError as error:
        if is_remote:
            raise
        raise unreadable(error, path) from error
    if rows == 0:
        left_out.add("empty file", str(path))


def _table_rows(path: Path, skipped: int) -> Iterator[SourceRow]:
    """The rows of a Parquet or Arrow file. Those that are skipped are read, but not converted."""
    library = _datasets_library(str(path))
    files = glob.escape(str(path))
    data = library.load_dataset(TABLES[kind_of(path)], data_files=files, split="train", streaming=True)
    types, first = dict(data.features), 0
    for table in data.with_format("arrow").iter(TABLE_ROWS):
        start = max(first, skipped)
        for number, fields in enumerate(table.slice(start - first).to_pylist(), start):
            yield SourceRow(_plain(fields, types), str(path), f"{path}[{number}]")
        first += len(table)


# Plain texts ----------------------------------------------------------------------------------------------------------


def read_texts(name: str, left_out: LeftOut, pattern: str = "*") -> Iterator[SourceRow]:
    """The rows of plain texts: of JSON lines, of a text file with any suffix, of all of these in a folder, or of the
    standard library.

    A large file is read in pieces that end with a line, so memory does not grow with its size. In a folder, files that
    are not text are left out; a file that the user named must be text. Text is UTF-8; a byte-order mark is dropped, and
    line ends are kept. Raises `DataError`.
    """
    files, skipped = find_files([name], pattern)
    for reason, count in skipped.items():
        left_out.add(reason, name, count)
    for file in files:
        rows, begins = 0, True
        try:
            if kind_of(file.path) in JSON_LINES and file.nbytes:
                yield from _json_lines(file.path, left_out)
                continue
            if not (file.named or _is_text(file.path)):
                left_out.add("not UTF-8 text", str(file.path))
                continue
            for text, ends in _pieces(file.path):
                yield SourceRow({"text": text}, str(file.path), str(file.path), begins, ends)
                rows, begins = rows + 1, False
        except OSError as error:
            raise unreadable(error, file.path) from error
        if not rows:
            left_out.add("empty file", str(file.path))


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """A text file in pieces of about `PIECE_CHARACTERS`, none of them empty, and whether each is the last.

    Raises `DataError` if it is not text.
    """
    try:
        with open_text(path) as file:
            text = _next_piece(file)
            while text:
                following = _next_piece(file)
                yield text, not following
                text = following
    except UnicodeDecodeError as error:
        with open_bytes(path) as data:
            head = data.read(8)
        if head.startswith(COMPRESSION_MAGIC):
            what = "holds compressed data, which is only read from .gz and .zst files"
            fix = "rename it to end in .gz or .zst, or decompress it"
            raise DataError(what, where=str(path), fix=fix) from error
        what = f"not UTF-8 text ({error.reason})"
        raise DataError(what, where=str(path), fix="convert it to UTF-8, or leave it out") from error


def _next_piece(file: TextIO) -> str:
    text = file.read(PIECE_CHARACTERS)
    text += file.readline(PIECE_CHARACTERS)  # to the end of the line, unless it is very long
    if "\0" in text:
        raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "a zero byte")
    return text


def _is_text(path: Path) -> bool:
    """Whether a file is text; reads all of it, so that reading it later does not fail halfway."""
    try:
        for _ in _pieces(path):
            pass
    except (DataError, DamagedData):
        return False
    return True


def _text_row(path: Path, _: LeftOut) -> Iterator[SourceRow]:
    """A text file as one row."""
    text = "".join(piece for piece, _ in _pieces(path))
    if text.strip():
        yield SourceRow({"text": text}, str(path), str(path))


# Tables and JSON ------------------------------------------------------------------------------------------------------


def _csv_rows(path: Path, left_out: LeftOut) -> Iterator[SourceRow]:
    """The rows of a CSV or TSV file with a header. Cells are text, or the turns of a chat if they are JSON (`_cell`).

    The place of a row is its first line.
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
                    yield SourceRow(dict(zip(header, map(_cell, cells), strict=True)), str(path), place)
                elif cells:  # an empty line has none
                    what = f"{len(cells)} cells in a row, but {len(header)} in the header"
                    fix = "correct the row; put quotes around a cell that holds the separator or a line end"
                    left_out.refuse(SampleError(what, reason="of another number of cells", where=place, fix=fix))
        except csv.Error as error:
            raise DataError(f"not a table ({error})", where=f"{path}:{at}", fix="correct the file") from error
        except UnicodeDecodeError as error:
            raise _not_utf8(error, f"{path}:{_line_not_utf8(path)}") from error


def _cell(text: str) -> Any:
    """The value of a cell: parsed if it is the JSON of a turn or a list of turns, since CSV has no nested values;
    otherwise its text."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return text
    turns = value if isinstance(value, list) else [value]
    is_turn = [isinstance(turn, dict) and any(keys <= turn.keys() for keys in TURNS) for turn in turns]
    return value if is_turn and all(is_turn) else text


def _line_not_utf8(path: Path) -> int:
    """The number of the first line that is not UTF-8. The error itself does not tell, since text is decoded in larger
    pieces."""
    good = 0
    with open_bytes(path) as file, suppress(UnicodeDecodeError):
        for line in file:
            line.decode("utf-8-sig")
            good += 1
    return good + 1


def _json_lines(path: Path, left_out: LeftOut) -> Iterator[SourceRow]:
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                fields = parse_json(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise _not_utf8(error, place) from error
            except (ValueError, RecursionError) as error:
                what = f"not a line of JSON ({error})"
                fix = "correct or remove the line"
                left_out.refuse(SampleError(what, reason="not a line of JSON", where=place, fix=fix))
                continue
            if isinstance(fields, dict):
                yield SourceRow(fields, str(path), place)
            else:
                left_out.refuse(_no_object(fields, place))


def _json_rows(path: Path, left_out: LeftOut) -> Iterator[SourceRow]:
    """The elements of the list in a `.json` file, or JSON lines, also those of a `.json` file, which are common."""
    try:
        if kind_of(path) in JSON_LINES or _is_json_lines(path):
            yield from _json_lines(path, left_out)
            return
        with open_text(path) as text:
            for number, fields in enumerate(list_elements(text)):
                place = f"{path}[{number}]"
                if isinstance(fields, dict):
                    yield SourceRow(fields, str(path), place)
                else:
                    left_out.refuse(_no_object(fields, place))
    except MalformedJson as error:
        raise DataError(f"not JSON ({error})", where=f"{path}:{error.line}", fix="correct the file") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(error, str(path)) from error
    except RecursionError as error:
        raise DataError("JSON that is nested too deeply", where=str(path)) from error


def _no_object(fields: object, place: str) -> SampleError:
    what = f"{type(fields).__name__} instead of an object"
    return SampleError(what, reason="not an object", where=place, fix="each sample is one JSON object")


def _is_json_lines(path: Path) -> bool:
    """Whether a `.json` file is JSON lines, not a list, by its first line. Raises `DataError` if it is neither."""
    with open_text(path) as text:
        while (character := text.read(1)).isspace():
            pass
        line = character + text.readline() if character == "{" else ""
    if not line:
        return not character  # a file of white space has no lines
    try:
        return isinstance(parse_json(line), dict)
    except ValueError as error:
        what = f"a single object instead of a list of samples, or a line that is not JSON ({error})"
        fix = "save a list of objects, or one object per line"
        raise DataError(what, where=str(path), fix=fix) from error


def _not_utf8(error: UnicodeDecodeError, place: str) -> DataError:
    return DataError(f"not UTF-8 text ({error.reason})", where=place, fix="convert it to UTF-8")


def _on_hub(library: ModuleType, name: str, subset: str | None, split: str, left_out: LeftOut, **options: Any) -> Any:
    """Open a data set on the hub as a stream, with its files read like local ones: JSON, CSV and texts by this module's
    readers if they can. Columns whose types the data set's card declares have these, except in JSON, which states its
    types."""
    builder = library.load_dataset_builder(name, subset, **options)
    files = (builder.config.data_files or {}).get(split)
    if files and _reads_all(builder, files):
        return FileRows([RemoteFile(file) if "://" in file else Path(file) for file in files], left_out)
    whole = {"sample_by": "document"} if builder.name == "text" else {}
    return library.load_dataset(name, subset, split=split, streaming=True, **options, **whole)


def _reads_all(builder: Any, files: Sequence[str]) -> bool:
    """Whether this module's reader for a builder reads all of its files (not in archives), and by its options."""
    kinds = {kind_of(Path(file)) for file in files}
    if builder.name not in READERS or not kinds <= {*READERS[builder.name][1]}:
        return False
    if builder.name == "csv":
        return not builder.info.features and {SEPARATED[kind] for kind in kinds} == {builder.config.sep}
    return not getattr(builder.config, "field", None)


def _downloaded(library: ModuleType, name: str, subset: str | None, folder: str | None, split: str) -> Any:
    """Load a data set from the cache of `datasets`, in its offline mode: online it would retry for most of a minute."""
    was_offline = library.config.HF_HUB_OFFLINE
    library.config.HF_HUB_OFFLINE = True
    try:
        return library.load_dataset(name, subset, data_dir=folder, split=split)
    finally:
        library.config.HF_HUB_OFFLINE = was_offline


@contextmanager
def _as_data_error(name: str) -> Iterator[None]:
    """In the block, whatever `datasets`, its readers and its network client raise becomes a `DataError`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot be read ({first_line(error)})", where=name, fix=READABLE) from error


READERS: dict[str, tuple[Callable[[Path, LeftOut], Iterator[SourceRow]], tuple[str, ...]]] = {
    "json": (_json_rows, (".json", *JSON_LINES)),
    "csv": (_csv_rows, tuple(SEPARATED)),
    "text": (_text_row, TEXTS),
}
"""Name of a builder in `datasets` -> what reads its files here, and which files."""
READABLE = "check the network, the files, the split and the subset"


class RemoteFile(PosixPath):
    """A file on the hub, by its address; `datasets` makes lost connections again."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def open(self, *_: Any, **__: Any) -> Any:
        """Open it for reading bytes."""
        from datasets.utils.file_utils import xopen

        return xopen(str(self), "rb")


class FileRows:
    """Rows of files, one file after another, with a state as a data set of `datasets` has it."""

    def __init__(self, files: Sequence[Path], left_out: LeftOut) -> None:
        self.files, self._left_out = files, left_out
        self._file, self._rows = 0, 0  # the current file, and how many of its rows have been read

    def state_dict(self) -> dict[str, Any]:
        """The state at the row after the last one returned, as JSON."""
        return {"file": self._file, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._file, self._rows = state["file"], state["rows"]

    def __iter__(self) -> Iterator[SourceRow]:
        """The rows from the state on; unusable ones are left out."""
        while self._file < len(self.files):
            for row in _file_rows(self.files[self._file], self._left_out, self._rows):
                self._rows += 1
                yield row
            self._file, self._rows = self._file + 1, 0


class RowStream:
    """The rows of a source in its own order, from the first one or from any state that was saved. Nothing is cached.

    name: a file, a folder (of which `pattern` chooses files), a saved data set, or a data set on the hub at one commit
    (of which `subset` and `folder` select parts). split: of a saved data set or one on the hub. left_out: receives
    unusable rows, and files of folders that are not read. Raises `DataError` for a source that is missing, malformed or
    cannot be read.
    """

    def __init__(
        self,
        name: str,
        left_out: LeftOut | None = None,
        *,
        split: str = "train",
        subset: str | None = None,
        folder: str | None = None,
        pattern: str = "*",
    ) -> None:
        self.name, self._split, self._subset, self._folder, self._pattern = name, split, subset, folder, pattern
        self.left_out = left_out or LeftOut()
        self.commit: str | None = None
        """The commit of a data set on the hub; None for one on this machine, including an earlier download."""
        if not usable_path(name, error=DataError).exists():
            refuse_missing(name)
            self.commit = commit_or_download(name)
        self._data, self._beginning = self._open()

    def go_to(self, commit: str | None) -> None:
        """Read the data set at another commit from now on."""
        if commit != self.commit:
            self.commit = commit
            self._data, self._beginning = self._open()

    def rows_from(self, number: int, state: Mapping[str, Any] | None) -> Iterator[SourceRow]:
        """SourceRow `number` and those after it in an epoch. state: `state()` at that row, or None for the first row.

        A state that another reader of the same rows has left is not used: the rows before are read again.
        """
        is_known = state is not None and _reader_of(state) == _reader_of(self._beginning)
        with _as_data_error(self.name):
            self._data.load_state_dict(dict(state if state is not None and is_known else self._beginning))
            yield from islice(self._rows(number if is_known else 0), 0 if is_known else number, None)

    @property
    def holds_texts(self) -> bool:
        """Whether the rows are whole text files."""
        if isinstance(self._data, FileRows):
            return {kind_of(file) for file in self._data.files} <= {*TEXTS}
        return bool(self._data.info.builder_name == "text")

    def state(self) -> dict[str, Any]:
        """The state at the row after the last one returned, as JSON."""
        state: dict[str, Any] = self._data.state_dict()
        return state

    def _rows(self, first: int) -> Iterator[SourceRow]:
        if isinstance(self._data, FileRows):
            yield from self._data
            return
        types = dict(self._data.features or {})
        for number, fields in enumerate(self._data, start=first):
            yield SourceRow(_plain(fields, types), self.name, f"{self.name}[{number}]")

    def _open(self) -> tuple[Any, Mapping[str, Any]]:
        """The data set, `FileRows` or a stream of `datasets`, and its state at the beginning."""
        data = self._data_set()
        return data, data.state_dict()

    def _data_set(self) -> Any:
        path = usable_path(self.name, error=DataError)
        if path.is_file():  # without `datasets`, which takes seconds to import
            if path.name == DATASET_INFO:
                raise _list_of_data_sets(path)
            return FileRows([path], self.left_out)
        if path.is_dir() and not is_saved(path):
            return FileRows(_folder_files(path, self.left_out, self._pattern), self.left_out)
        if path.exists() and not path.is_dir():
            raise DataError("neither a file nor a folder", where=self.name)
        library = _datasets_library(self.name)
        with _as_data_error(self.name):
            if path.is_dir():
                saved = library.load_from_disk(str(path))
                data = saved[self._split] if isinstance(saved, dict) else saved
            elif self.commit is None:
                data = _downloaded(library, self.name, self._subset, self._folder, self._split)
            else:
                options = {"data_dir": self._folder, "revision": self.commit}
                data = _on_hub(library, self.name, self._subset, self._split, self.left_out, **options)
            data = data.to_iterable_dataset() if isinstance(data, library.Dataset) else data
            if "decode=True" in str(getattr(data, "features", None)):  # its decoder of JSON rounds numbers
                data = data.decode(False)
            return data


def _datasets_library(name: str) -> ModuleType:
    """The module `datasets`. Raises `DataError` if it is not installed."""
    try:
        import datasets
        from fsspec import compression  # type: ignore[import-untyped]
    except ImportError as error:
        what = "needs the `datasets` package, which is not installed"
        raise DataError(what, where=name, fix="pip install datasets, or use JSON lines") from error
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # otherwise it reports every file that it opens to a server
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported by our own exceptions
    if "zstd" not in compression.compr:  # `datasets` by itself needs another package to stream `.zst` files
        compression.register_compression("zstd", lambda file, mode="rb", **_: zstd_reader(file), "zst")
    library: ModuleType = datasets
    return library


def _reader_of(state: Mapping[str, Any]) -> object:
    """What tells the states of different readers apart."""
    return state.get("examples_iterable", {}).get("type")


def _plain(value: Any, kind: Any) -> Any:
    """A value of a table as JSON has it. kind: its type, of `datasets`.

    A struct loses its null fields, since other rows may have brought them. Text of a JSON column is parsed. Dates and
    times become their ISO text, and decimal numbers the same number.
    """
    if isinstance(value, Mapping):
        kinds = kind if isinstance(kind, Mapping) else {}
        return {key: _plain(inner, kinds.get(key)) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner, getattr(kind, "feature", None)) for inner in value]
    if type(kind).__name__ == "Json":
        return None if value is None else parse_json(value)
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        number = int(value) if value.as_tuple().exponent == 0 else float(value)
        return number if Decimal(repr(number)) == value else value  # not if it would be rounded
    return value


# The hub --------------------------------------------------------------------------------------------------------------


@cache
def commit_or_download(name: str) -> str | None:
    """The latest commit of a data set, or `None` if the hub does not provide it but an earlier download exists.

    A process looks up a data set once, so it checks, caches and reads the same commit. Raises `DataError` if there is
    neither.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError

    def letters(text: str) -> str:
        """What `Org/TinyTexts` has in common with the name of its folder, `Org___tiny_texts`."""
        return text.replace("/", "").replace("_", "").lower()

    try:
        return str(hub_client.ask_hub(lambda api: api.dataset_info(name, timeout=hub_client.TIMEOUT_SECONDS)).sha)
    except Exception as error:
        folder = Path(constants.HF_HOME, "datasets")  # the cache of `datasets`, whose import would take seconds
        if folder.is_dir() and any(letters(path.name) == letters(name) for path in folder.iterdir()):
            return None
        nearest = nearest_path(Path(name))
        what = "neither a local file nor an earlier download, and the Hugging Face hub did not provide it"
        what, fix = f"{what} ({first_line(error)})", "name a local file or folder"
        if isinstance(error, RepositoryNotFoundError):
            what = "the Hugging Face hub has no data set of this name, or keeps it private"
            fix = "correct the name, or log in with `hf auth login`"
        raise DataError(what, where=name, fix=f"did you mean {nearest}?" if nearest else fix) from error
