"""Decides whether a source is plain text or samples: by its name, or else by the first object of a file.

Plain text (`text_sources.py`) continues across windows; samples (`sample_sources.py`) stay whole. JSON lines may be
either: plain text if the first object has a `text` field and no field of another format. A folder is samples if its
files are, not counting files about the data (a README). A folder with both, and samples in a file whose name does not
say so (`chats.txt`), are refused unless the user sets the format, since JSON trained as plain text teaches its syntax.
Not here: what a format is (`sample_formats.py`).
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from megatrain.data.files import STDLIB, find_files, kind_of, open_bytes, parse_json
from megatrain.data.read_rows import (
    DATASET_INFO,
    JSON_LINES,
    SEPARATED,
    SUFFIXES,
    TABLES,
    TEXTS,
    LeftOut,
    SourceRow,
    commit_or_download,
    is_saved,
    read_rows,
    refuse_missing,
    without_docs,
)
from megatrain.data.sample_formats import FIELDS, Format, Schema, detect_schema
from megatrain.data.sample_sources import Source, read_dataset_info
from megatrain.data.token_files import is_token_file
from megatrain.errors import DataError, SampleError
from megatrain.system.paths import may_be_hub_name, usable_path

FIRST_ROWS = 1000
"""Rows of a file that are searched for one of a known format."""
FIRST_LINE_BYTES = 1 << 20
"""The part of the first line that is checked in a file whose name does not say that it holds samples."""


def holds_samples(name: str, schema: Schema | None = None, pattern: str = "*") -> bool:
    """Whether the source called `name` holds samples, not plain text.

    schema: what the user says of its fields. pattern: chooses the files of a folder. A name that does not exist counts
    as a data set on the hub if it could be one. Raises `DataError` if the user must say which it is.
    """
    schema, path = schema or Schema(), usable_path(name, error=DataError)
    says_samples = schema.format not in ("auto", "text")
    if name == STDLIB or is_token_file(path):
        if says_samples:
            fix = "leave data.format out, or name a file of samples"
            raise DataError(f"holds text or tokens, not {schema.format} samples", where=name, fix=fix)
        return False
    if _entry_of(name) is not None or kind_of(path) in (*TABLES, *SEPARATED) or says_samples:
        return True
    if path.is_dir():
        return _is_data_set(path) or _folder_holds_samples(path, schema, pattern)
    if path.is_file():
        if schema.format == "auto" and kind_of(path) not in (".json", *JSON_LINES):
            _require_text(path, schema)
        return kind_of(path) in (".json", ".ndjson") or _file_holds_samples(path, schema, named=True)
    may_be_of_hub = not path.suffix or path.suffix[1].isdigit()  # as in `OpenHermes-2.5`
    return may_be_of_hub and may_be_hub_name(name) and "/" in name


def source_called(
    name: str, schema: Schema, *, split: str = "train", subset: str | None = None, pattern: str = "*"
) -> Source:
    """The source called `name`: a path, a data set on the hub, or an entry of a `dataset_info.json`, such as
    `data/dataset_info.json#alpaca`, which overrides the other arguments."""
    entry = _entry_of(name)
    if entry is not None:
        return read_dataset_info(*entry)
    return Source(name, schema, split=split, subset=subset, pattern=pattern)


def require_source(name: str, schema: Schema, *, asks_hub: bool = False) -> None:
    """Raise `DataError` unless `name` is a file, a folder, or may be a data set on the hub.

    An empty file is refused too. Reads no data, only a `dataset_info.json`. asks_hub: ask the hub whether it has it.
    """
    if _entry_of(name) is not None:
        name = source_called(name, schema).name
    path = usable_path(name, error=DataError)
    if name != STDLIB and path.is_file() and not path.stat().st_size:
        raise DataError("is empty", where=name, fix="name a file with something in it")
    if name == STDLIB or path.exists():
        return
    if holds_samples(name, schema):
        refuse_missing(name)
        if asks_hub:
            commit_or_download(name)
    else:
        find_files([name])


def is_described(name: str) -> bool:
    """Whether a source is an entry of a `dataset_info.json`, which describes its format itself."""
    return _entry_of(name) is not None


def is_of_hub(name: str) -> bool:
    """Whether the source called `name` is not on this machine, so it can only be a data set on the hub."""
    return name != STDLIB and not is_described(name) and not usable_path(name, error=DataError).exists()


def has_splits(name: str) -> bool:
    """Whether the source called `name` may have several splits: on the hub, or saved by `datasets`."""
    return is_of_hub(name) or _is_data_set(usable_path(name, error=DataError))


def begins_with_text(source: Source) -> bool:
    """Whether the first row of `source` is a plain text. Raises `DataError` if it cannot be read."""
    rows = source.opened(LeftOut("leave_out")).rows_from(0, None)
    try:
        first = next(rows, None)
        return first is not None and detect_schema(first, source.schema).format == "text"
    except SampleError:
        return False


def _entry_of(name: str) -> tuple[str, str] | None:
    """(path, entry) if `name` is an entry of a `dataset_info.json`."""
    path, mark, entry = name.rpartition("#")
    return (path, entry) if mark and Path(path).name == DATASET_INFO else None


def _is_data_set(folder: Path) -> bool:
    return is_saved(folder) or (folder / DATASET_INFO).is_file()


def _folder_holds_samples(folder: Path, schema: Schema, pattern: str) -> bool:
    files = [file.path for file in without_docs(find_files([folder], pattern)[0])]
    samples = [file for file in files if kind_of(file) in TABLES or _file_holds_samples(file, schema)]
    others = [file for file in files if kind_of(file) not in SUFFIXES or kind_of(file) in TEXTS]
    if samples and others and schema.format == "auto":
        what = f"holds samples ({samples[0].name}) and other files ({others[0].name})"
        raise DataError(what, where=str(folder), fix="choose the files by data.pattern, or set data.format")
    unclear = [file for file in files if kind_of(file) == ".json"]  # reading them as samples reports the error
    return bool(samples or unclear) and not others


def _file_holds_samples(path: Path, schema: Schema, *, named: bool = False) -> bool:
    """Whether a JSON or CSV file holds samples: its first row of a known format is not plain text, or is plain text in
    a column that the user named, or in a CSV file.

    JSON lines without a row of a known format count as samples too if a row has no `text` field or is not JSON, so that
    reading them as samples reports the error. named: whether the user named the file; if so, raises `DataError` if it
    is unreadable.
    """
    if kind_of(path) not in (".json", *JSON_LINES, *SEPARATED):
        return False
    unknown, unusable = False, LeftOut("leave_out")
    try:
        for row in islice(read_rows(str(path), unusable), FIRST_ROWS):
            kind = _format_of(row, schema)
            if kind is not None:
                return kind != "text" or schema.column("text") != "text" or kind_of(path) in SEPARATED
            unknown = unknown or "text" not in row.fields
    except DataError:
        if named:
            raise
        # a file of a folder: reading it reports the error, with the line
    malformed = unusable.counts.keys() - {"empty file"}
    return (unknown or bool(malformed)) and kind_of(path) in JSON_LINES


def _format_of(row: SourceRow, schema: Schema) -> Format | None:
    try:
        return detect_schema(row, schema).format
    except SampleError:
        return None


def _require_text(path: Path, schema: Schema) -> None:
    """Raise `DataError` for a file that would be read as plain text, but begins like samples."""
    try:
        with open_bytes(path) as file:
            first = file.readline(FIRST_LINE_BYTES).decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError):
        return  # reading it as text reports the error
    fix = "set data.format=text if it is meant to be read as plain text"
    names = {name.strip().strip("\"'").lower() for name in re.split("[,;\t]", first)}
    columns = [needed for needed, _ in FIELDS.values() if len(needed) > 1 and {*needed} <= names]
    if columns:
        what = "holds a table of samples, but its name does not say so"
        fix = f"rename it to end in .csv or .tsv, with commas or tabs between columns; {fix}"
        raise DataError(what, where=str(path), fix=fix)
    try:
        value = parse_json(first)
    except (ValueError, RecursionError):
        return
    fields = value[0] if isinstance(value, list) and value else value
    if isinstance(fields, dict) and _format_of(SourceRow(fields, str(path), str(path)), schema) not in (None, "text"):
        what = "holds samples, but its name does not say so"
        raise DataError(what, where=str(path), fix=f"rename it to end in .jsonl or .json; {fix}")
