"""Decides whether a source is plain text or samples: by its name, else by the first object of a file.

Plain text (`text_sources.py`) runs on across windows; samples (`sample_sources.py`) stay whole. JSON lines may be
either: with a `text` field and none of a richer format they are plain text, as the first object says. A folder is
samples where its files are, but for those that are about them (a README); a folder of samples and of other things, and
samples under a name that does not say so (`chats.txt`), are refused unless the user names the format: read
with the wrong eyes they would be trained as text, marks and all. Left out: what a format is (`sample_formats.py`).
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from megatrain.data.compressed_files import kind_of, open_bytes
from megatrain.data.dataset_info import read_dataset_info
from megatrain.data.hub import commit_or_download
from megatrain.data.json_text import parsed
from megatrain.data.read_rows import (
    FOREIGN_INDEX,
    JSON_LINES,
    SEPARATED,
    SUFFIXES,
    TABLES,
    TEXTS,
    LeftOut,
    Row,
    read_rows,
    refuse_missing,
    without_companions,
)
from megatrain.data.sample_formats import FIELDS, Format, Schema, detect_schema
from megatrain.data.sample_sources import Source
from megatrain.data.text_sources import STDLIB, find_files
from megatrain.data.token_files import is_token_file
from megatrain.errors import DataError, SampleError
from megatrain.system.paths import may_be_hub_name, usable_path

FIRST_ROWS = 1000
"""Of a JSON file: how many are looked at for one of a known format."""
FIRST_LINE_BYTES = 1 << 20
"""Of a file that does not look like samples by its name: how much of its first line is looked at."""


def holds_samples(name: str, schema: Schema | None = None, pattern: str = "*") -> bool:
    """Whether the source called `name` is to be read as samples, given what the user says of its fields.

    `pattern` chooses the files of a folder. What does not exist is taken for a data set on the hub where its name
    could be one. Raises `DataError` where it cannot be told without a word of the user.
    """
    schema, path = schema or Schema(), usable_path(name, error=DataError)
    says_samples = schema.format not in ("auto", "text")
    if name == STDLIB or is_token_file(path):
        if says_samples:
            fix = "leave data.format out, or name a file of samples"
            raise DataError(f"holds no {schema.format} samples", where=name, fix=fix)
        return False
    if _index_and_name(name) is not None or kind_of(path) in (*TABLES, *SEPARATED) or says_samples:
        return True
    if path.is_dir():
        return _is_saved(path) or _folder_holds_samples(path, schema, pattern)
    if path.is_file():
        if schema.format == "auto" and kind_of(path) not in (".json", *JSON_LINES):
            _require_text(path, schema)
        return kind_of(path) in (".json", ".ndjson") or _is_rich(path, schema, named=True)
    may_be_of_hub = not path.suffix or path.suffix[1].isdigit()  # `OpenHermes-2.5`
    return may_be_of_hub and may_be_hub_name(name) and "/" in name


def source_called(
    name: str, schema: Schema, *, split: str = "train", subset: str | None = None, pattern: str = "*"
) -> Source:
    """The source called `name`, which may be an entry of a `dataset_info.json`: `data/dataset_info.json#alpaca`."""
    entry = _index_and_name(name)
    if entry is not None:
        (source,) = read_dataset_info(entry[0], [entry[1]])
        return source
    return Source(name, schema, split=split, subset=subset, pattern=pattern)


def require_source(name: str, schema: Schema) -> None:
    """Raise `DataError` where nothing is called `name`: no file, no folder, and no data set of the hub.

    An empty file is refused too. Nothing but a list of data sets is read, and the hub is asked once.
    """
    if _index_and_name(name) is not None:
        name = source_called(name, schema).name
    path = usable_path(name, error=DataError)
    if name != STDLIB and path.is_file() and not path.stat().st_size:
        raise DataError("is empty", where=name, fix="name a file with something in it")
    if name == STDLIB or path.exists():
        return
    if holds_samples(name, schema):
        refuse_missing(name)
        commit_or_download(name)
    else:
        find_files([name])


def is_described(name: str) -> bool:
    """Whether a source is an entry of a `dataset_info.json`, which says itself how it is read."""
    return _index_and_name(name) is not None


def is_of_hub(name: str) -> bool:
    """Whether the source called `name` could only be a data set on the hub."""
    return name != STDLIB and not is_described(name) and not usable_path(name, error=DataError).exists()


def has_splits(name: str) -> bool:
    """Whether the source called `name` may have several splits: on the hub, or as the library saves them."""
    return is_of_hub(name) or _is_saved(usable_path(name, error=DataError))


def begins_with_text(source: Source) -> bool:
    """Whether the first row of `source` is a plain text. Raises `DataError` where it cannot be read."""
    rows = source.rows(LeftOut("leave_out"))
    try:
        first = next(rows, None)
        return first is not None and detect_schema(first, source.schema).format == "text"
    except SampleError:
        return False


def _index_and_name(name: str) -> tuple[str, str] | None:
    index, found, entry = name.rpartition("#")
    return (index, entry) if found and Path(index).name == FOREIGN_INDEX else None


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json", FOREIGN_INDEX))


def _folder_holds_samples(folder: Path, schema: Schema, pattern: str) -> bool:
    files = [file.path for file in without_companions(find_files([folder], pattern)[0])]
    rich = [file for file in files if kind_of(file) in TABLES or _is_rich(file, schema)]
    others = [file for file in files if kind_of(file) not in SUFFIXES or kind_of(file) in TEXTS]
    if rich and others and schema.format == "auto":
        what = f"holds samples ({rich[0].name}) beside other files ({others[0].name})"
        raise DataError(what, where=str(folder), fix="say which are meant: set data.pattern, or data.format")
    unclear = [file for file in files if kind_of(file) == ".json"]  # whoever reads one says what is wrong
    return bool(rich or unclear) and not others


def _is_rich(path: Path, schema: Schema, *, named: bool = False) -> bool:
    """Whether the first object of a JSON file, or row of a table, is more than a plain text, or one to be looked for.

    JSON lines of which none is of a known format count too: whoever reads samples says what such rows want. Raises
    `DataError` for a file that the user named and that cannot be read.
    """
    if kind_of(path) not in (".json", *JSON_LINES, *SEPARATED):
        return False
    unknown = False
    try:
        for row in islice(read_rows(str(path), LeftOut("leave_out")), FIRST_ROWS):
            found = _format_of(row, schema)
            if found is not None:
                return found != "text" or schema.column("text") != "text" or kind_of(path) in SEPARATED
            unknown = unknown or "text" not in row.fields
    except DataError:
        if named:
            raise
        # of a folder; whoever reads it says what is wrong, with its line
    return unknown and kind_of(path) in JSON_LINES


def _format_of(row: Row, schema: Schema) -> Format | None:
    try:
        return detect_schema(row, schema).format
    except SampleError:
        return None


def _require_text(path: Path, schema: Schema) -> None:
    """Raises `DataError` where a file that would be read as plain text begins as samples do."""
    try:
        with open_bytes(path) as file:
            first = file.readline(FIRST_LINE_BYTES).decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError):
        return  # whoever reads it says what is wrong
    fix = "set data.format=text if it is meant to be read as plain text"
    names = {name.strip().strip("\"'").lower() for name in re.split("[,;\t]", first)}
    columns = [needed for needed, _ in FIELDS.values() if len(needed) > 1 and {*needed} <= names]
    if columns:
        what = "a table in text, which is not read as samples"
        raise DataError(
            what, where=str(path), fix=f"rename it to end in .csv or .tsv, with commas or tabs between columns; {fix}"
        )
    try:
        value = parsed(first)
    except (ValueError, RecursionError):
        return
    fields = value[0] if isinstance(value, list) and value else value
    if isinstance(fields, dict) and _format_of(Row(fields, str(path), str(path)), schema) not in (None, "text"):
        what = "holds samples under a name that does not say so"
        raise DataError(what, where=str(path), fix=f"rename it to end in .jsonl or .json; {fix}")
