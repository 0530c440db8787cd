"""Reads the samples of a source: its rows, converted by the schema that the user gave or that the first row implies.

With format `auto`, the first row of a file decides the format of that file. A row of another format in it is an error
that names the row, since reading it by the wrong format would train the wrong tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from megatrain.data.kto import read_unpaired, with_mismatched
from megatrain.data.preferences import read_pair
from megatrain.data.read_rows import LeftOut, Row, RowStream
from megatrain.data.sample_formats import LabelCheck, Sample, Schema, detect_schema, read_sample, require_json
from megatrain.errors import DataError, SampleError
from megatrain.system.paths import usable_path


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


def read_samples(sources: Sequence[Source], left_out: LeftOut) -> Iterator[Sample]:
    """The samples of `sources`, one source after another.

    Raises `DataError` for a source that is missing, unreadable or malformed, if a column `label` turns out to mark
    answers as good or bad (see `LabelCheck`), and if there is no sample. A single unusable sample goes to `left_out`.
    """
    found = False
    for source in sources:
        labels = LabelCheck()
        for sample in with_mismatched(_read_source(source, left_out, labels), source.name):
            found = True
            yield sample
        labels.refuse_labels()
    if not found:
        reasons = "; ".join(left_out.lines()) or "they are empty"
        where = ", ".join(source.name for source in sources)
        raise DataError(f"no sample (left out: {reasons})", where=where, fix="name a source with samples in it")


def _read_source(source: Source, left_out: LeftOut, labels: LabelCheck) -> Iterator[Sample]:
    taken = 0
    rows = source.opened(left_out).rows_from(0, None)

    def within_limit() -> Iterator[Row]:
        for row in rows:
            if source.limit is not None and taken >= source.limit:
                reason = f"beyond the first {source.limit:,}"
                if source.is_local:
                    left_out.add(reason, row.place, 1 + sum(1 for _ in rows))
                else:  # not counted, since that would download them
                    left_out.add(f"{reason} or more", row.place)
                return
            yield row

    for samples in samples_of(within_limit(), source.schema, left_out, labels):
        taken += 1
        yield from samples


def samples_of(
    rows: Iterable[Row], asked: Schema, left_out: LeftOut, labels: LabelCheck
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


def _read_row(row: Row, schema: Schema, asked: Schema) -> tuple[Sample, ...]:
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
