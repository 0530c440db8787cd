"""Reads the samples of a source: its rows, converted by the schema that the user gave or that the first row implies.

With format `auto`, the first row of a file decides the format of that file. A row of another format in it is an error
that names the row, since reading it by the wrong format would train the wrong tokens.

An entry of LLaMA-Factory's `dataset_info.json` is a source, too. It names a file or a hub dataset, a formatting
(`alpaca`, the default, or `sharegpt`), columns, tags, a split and a number of samples (here the first ones are used;
LLaMA-Factory draws them). The keys mean what LLaMA-Factory's `data/README.md` says: `ranking` makes the rows
preferences, and a column `kto_tag` makes them answers labelled good or bad. Pictures, sound, scripts, and hosts other
than the hub are refused, not ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.data.files import parse_json
from megatrain.data.preferences import read_pair, read_unpaired, with_mismatched
from megatrain.data.read_rows import LeftOut, RowStream, SourceRow
from megatrain.data.sample_formats import Format, LabelCheck, Sample, Schema, detect_schema, read_sample, require_json
from megatrain.errors import DataError, SampleError
from megatrain.system.paths import missing, read_text, usable_path

# formatting -> (LLaMA-Factory's name of a column -> our name)
COLUMNS: dict[str, dict[str, str]] = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations", "tools": "tools"},
}
REFUSED_COLUMNS = ("images", "videos", "audios")
REFUSED_HOSTS = ("script_url", "cloud_file_name", "ms_hub_url", "om_hub_url")
KNOWN = frozenset(
    {"hf_hub_url", "file_name", "formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags"}
)


@dataclass(frozen=True)
class Source:
    """A file, a folder, or a data set on the hub, and how it is read."""

    name: str
    schema: Schema = field(default_factory=Schema)
    split: str = "train"  # of a data set on the hub or a saved one; so are the next two
    subset: str | None = None
    folder: str | None = None
    limit: int | None = None  # read this many samples, the first ones
    pattern: str = "*"  # which files of a local folder are read

    def opened(self, left_out: LeftOut) -> RowStream:
        """Its rows; unusable ones go to `left_out`."""
        return RowStream(
            self.name, left_out, split=self.split, subset=self.subset, folder=self.folder, pattern=self.pattern
        )

    @property
    def is_local(self) -> bool:
        """Whether it is an existing file or folder."""
        return usable_path(self.name, error=DataError).exists()


def read_samples(source: Source, left_out: LeftOut) -> Iterator[Sample]:
    """The samples of `source`.

    Raises `DataError` for a source that is missing, unreadable or malformed, if a column `label` turns out to mark
    answers as good or bad (see `LabelCheck`), and if there is no sample. A single unusable sample goes to `left_out`.
    """
    has_samples, labels = False, LabelCheck()
    for sample in with_mismatched(_read_source(source, left_out, labels), source.name):
        has_samples = True
        yield sample
    labels.refuse_labels()
    if not has_samples:
        reasons = "; ".join(left_out.lines()) or "they are empty"
        what, fix = f"no sample (left out: {reasons})", "name a source with samples in it"
        raise DataError(what, where=source.name, fix=fix)


def _read_source(source: Source, left_out: LeftOut, labels: LabelCheck) -> Iterator[Sample]:
    count = 0
    rows = source.opened(left_out).rows_from(0, None)

    def within_limit() -> Iterator[SourceRow]:
        for row in rows:
            if source.limit is not None and count >= source.limit:
                reason = f"beyond the first {source.limit:,}"
                if source.is_local:
                    left_out.add(reason, row.place, 1 + sum(1 for _ in rows))
                else:  # not counted, since that would download them
                    left_out.add(f"{reason} or more", row.place)
                return
            yield row

    for samples in samples_of(within_limit(), source.schema, left_out, labels):
        count += 1
        yield from samples


def samples_of(
    rows: Iterable[SourceRow], asked: Schema, left_out: LeftOut, labels: LabelCheck
) -> Iterator[tuple[Sample, ...]]:
    """The samples of each usable row. If the format asked for is `auto`, the first row of a file decides it.

    An unusable row goes to `left_out`, the others to `labels`. Raises `DataError`.
    """
    schema, file = asked, None
    for row in rows:
        try:
            if row.file != file:
                schema = detect_schema(row, asked)
                file = row.file
            samples = _read_row(row, schema, asked)
            for sample in samples:
                require_json(sample)
        except SampleError as error:
            left_out.refuse(error)
            continue
        labels.add(row, schema)
        yield samples


def _read_row(row: SourceRow, schema: Schema, asked: Schema) -> tuple[Sample, ...]:
    if asked.format == "auto":
        other = detect_schema(row, asked)  # raises for a row of no known format
        in_turns = {other.format, schema.format} == {"chat", "sharegpt"}  # which may differ by the first turn only
        if not schema.fits(row.fields) or (other.format != schema.format and not in_turns):
            what = f"a sample in {other.format} format, but the file begins with {schema.format} samples"
            fix = "give each format a file of its own, or set data.format"
            raise SampleError(what, reason="of another format than its file", where=row.place, fix=fix)
    if schema.format == "preference":
        return read_pair(row, schema)
    return (read_unpaired(row, schema) if schema.format == "unpaired" else read_sample(row, schema),)


# LLaMA-Factory's lists of data sets -----------------------------------------------------------------------------------


def read_dataset_info(path: str | Path, name: str) -> Source:
    """The source that entry `name` of the file `path` describes; its files are relative to that folder.

    Raises `DataError` for an entry that does not exist, is malformed, or asks for something unsupported.
    """
    path = usable_path(path, error=DataError)
    if not path.is_file():
        raise missing(path, DataError)
    try:
        entries = parse_json(read_text(path, "utf-8-sig"))
    except OSError as error:
        raise DataError(error.strerror or str(error), where=str(path)) from error
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg})", where=f"{path}:{error.lineno}", fix="correct the file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON ({error})", where=str(path), fix="correct the file") from error
    if not isinstance(entries, dict):
        raise DataError(f"{type(entries).__name__} instead of an object that describes data sets", where=str(path))
    entry, where = entries.get(name), f"{path}#{name}"
    if entry is None:
        nearest = difflib.get_close_matches(name, entries, n=1)
        fix = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(entries) or 'none'}"
        raise DataError("no data set of that name", where=where, fix=fix)
    if not isinstance(entry, dict):
        raise DataError(f"{type(entry).__name__} instead of an object that describes a data set", where=where)
    return _source(entry, path.parent, where)


def _source(entry: Mapping[str, Any], folder: Path, where: str) -> Source:
    columns = _names(entry, "columns", where)
    tags = _names(entry, "tags", where)
    for column in REFUSED_COLUMNS:
        if column in columns:
            fix = "name its file in data.sources, and set data.images" if column == "images" else "name other data"
            raise DataError(f"has the column {column!r}, which is not supported here", where=where, fix=fix)
    location = entry.get("hf_hub_url") or entry.get("file_name")
    if not isinstance(location, str):
        hosts = [key for key in REFUSED_HOSTS if key in entry]
        what = f"is available by {hosts[0]!r} only" if hosts else "has neither 'file_name' nor 'hf_hub_url'"
        raise DataError(what, where=where, fix="download it, and name its file in 'file_name'")
    if unknown := sorted(entry.keys() - KNOWN - set(REFUSED_HOSTS)):
        raise DataError(f"has an unknown key {unknown[0]!r}", where=where, fix="remove it")
    limit = entry.get("num_samples")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise DataError(f"'num_samples' is {limit!r}", where=where, fix="give 1 or more")
    return Source(
        location if entry.get("hf_hub_url") else str(folder / location),
        schema=_schema(entry.get("formatting", "alpaca"), columns, tags, where, bool(entry.get("ranking"))),
        split=entry.get("split", "train"),
        subset=entry.get("subset"),
        folder=entry.get("folder"),
        limit=limit,
    )


def _schema(
    formatting: object, columns: Mapping[str, str], tags: Mapping[str, str], where: str, ranking: bool
) -> Schema:
    if formatting not in COLUMNS:
        what = f"'formatting' is {formatting!r}"
        raise DataError(what, where=where, fix=f"known are {', '.join(COLUMNS)}")
    if formatting == "alpaca" and "prompt" in columns and "response" not in columns and not ranking:
        return Schema("text", {"text": columns["prompt"]})  # LLaMA-Factory's pre-training format
    known = {**COLUMNS[str(formatting)], "system": "system"}
    if ranking:
        known = {**known, "chosen": "chosen", "rejected": "rejected"}
        known = {column: name for column, name in known.items() if column not in ("response", "history")}
    elif "kto_tag" in columns:
        known = {**known, "kto_tag": "label"}
    for column in columns:
        if column not in known:
            what = f"has a column {column!r}, which {formatting} data does not have"
            raise DataError(what, where=where, fix=f"known are {', '.join(known)}")
    chosen: Format = "alpaca" if formatting == "alpaca" else "sharegpt"
    if ranking or "kto_tag" in columns:
        chosen = "preference" if ranking else "unpaired"
    return Schema(chosen, {known[column]: name for column, name in columns.items()}, tags)


def _names(entry: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    names = entry.get(key) or {}
    if not isinstance(names, dict) or not all(isinstance(name, str | None) for name in names.values()):
        raise DataError(f"{key!r} is not an object of names", where=where)
    return {ours: name for ours, name in names.items() if name is not None}
