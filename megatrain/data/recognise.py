"""Plain text or samples? Told by a source's name and, where that does not say, by the first row of a file.

Plain text (`text.py`) runs on across windows; samples (`samples.py`) stay whole. JSON lines may be either: with a
`text` field and none of a richer format they are plain text, as the first object says. A folder is taken for samples
where all of its files are of such kinds. Left out: what a format is (`formats.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

from megatrain.data.dataset_info import read_dataset_info
from megatrain.data.formats import Format, Schema, detect_schema
from megatrain.data.left_out import LeftOut
from megatrain.data.records import FOREIGN_INDEX, JSON_LINES, SUFFIXES, TABLES, TEXTS, Row, read_rows
from megatrain.data.samples import Source
from megatrain.data.text import STDLIB
from megatrain.data.tokenizer import HUB_NAME
from megatrain.data.tokens import is_token_file
from megatrain.errors import DataError, SampleError


def holds_samples(name: str, chosen: Format = "auto") -> bool:
    """Whether the source called `name` is to be read as samples, given the format that the user has chosen.

    What does not exist is taken for a data set on the hub where its name could be one.
    """
    path = Path(name).expanduser()
    if name == STDLIB or is_token_file(path):
        if chosen not in ("auto", "text"):
            fix = "leave data.format out, or name a file of samples"
            raise DataError(f"holds no {chosen} samples", where=name, fix=fix)
        return False
    if _index_and_name(name) is not None or path.suffix in TABLES:
        return True
    if chosen not in ("auto", "text"):
        return True
    if path.is_dir():
        if (
            (path / "state.json").is_file()
            or (path / "dataset_dict.json").is_file()
            or (path / FOREIGN_INDEX).is_file()
        ):
            return True
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
        rich = [file for file in files if file.suffix in SUFFIXES and file.suffix not in TEXTS]
        return bool(files) and len(rich) == len(files) and _is_rich(rich[0])
    if path.is_file():
        return _is_rich(path)
    return not path.suffix and bool(HUB_NAME.fullmatch(name)) and "/" in name


def source_called(name: str, schema: Schema, *, split: str = "train", subset: str | None = None) -> Source:
    """The source called `name`, which may be an entry of a `dataset_info.json`: `data/dataset_info.json#alpaca`."""
    entry = _index_and_name(name)
    if entry is not None:
        (source,) = read_dataset_info(entry[0], [entry[1]])
        return source
    return Source(name, schema, split=split, subset=subset)


def begins_with_text(source: Source) -> bool:
    """Whether the first row of `source` is a plain text. Raises `DataError` where it cannot be read."""
    left_out = LeftOut("leave_out")
    rows = read_rows(source.name, left_out, split=source.split, subset=source.subset, folder=source.folder)
    try:
        first = next(rows, None)
        return first is not None and detect_schema(first, source.schema).format == "text"
    except SampleError:
        return False


def _index_and_name(name: str) -> tuple[str, str] | None:
    index, found, entry = name.rpartition("#")
    return (index, entry) if found and Path(index).name == FOREIGN_INDEX else None


def _is_rich(path: Path) -> bool:
    """Whether the first object of a file is more than a plain text."""
    if path.suffix in TABLES or path.suffix in (".json", ".ndjson"):
        return True
    if path.suffix not in JSON_LINES:
        return False
    try:
        with path.open("rb") as file:
            line = next((line for line in file if line.strip()), b"")
        fields = json.loads(line.decode("utf-8-sig"))
        schema = detect_schema(Row(fields, str(path), f"{path}:1"), Schema())
    except (OSError, ValueError, AttributeError, RecursionError, SampleError):
        return False  # whoever reads it says what is wrong, with its line
    return schema.format != "text"
