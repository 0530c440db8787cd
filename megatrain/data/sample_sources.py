"""A source of samples: its rows and schema, and counts of what was left out.

The first row of a file decides an `auto` format for that file. A row of another format in the same file is an error
that names it, because half a file read with the wrong eyes would train on the wrong tokens. Left out: mixing of
sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from megatrain.data.preferences import read_pair
from megatrain.data.read_rows import LeftOut, Row, read_rows
from megatrain.data.sample_formats import Labels, Sample, Schema, detect_schema, read_sample
from megatrain.data.unpaired import read_unpaired, with_mismatched
from megatrain.errors import DataError, SampleError
from megatrain.system.paths import usable_path


@dataclass(frozen=True)
class Source:
    """A file, a folder, or a dataset on the hub, and how it is read."""

    name: str
    schema: Schema = field(default_factory=Schema)
    split: str = "train"  # of a saved dataset or one on the hub, as the two below
    subset: str | None = None
    folder: str | None = None
    limit: int | None = None  # samples taken, from the first on
    pattern: str = "*"  # which files of a local folder are read

    def rows(self, left_out: LeftOut) -> Iterator[Row]:
        """See `read_rows`."""
        return read_rows(
            self.name, left_out, split=self.split, subset=self.subset, folder=self.folder, pattern=self.pattern
        )

    @property
    def is_local(self) -> bool:
        """Whether its name is that of a file or folder that exists."""
        return usable_path(self.name, error=DataError).exists()


def read_samples(sources: Sequence[Source], left_out: LeftOut) -> Iterator[Sample]:
    """The samples of `sources`, one source after another.

    Raises `DataError` for a source that is missing, unreadable or malformed, one whose labels turn out to mark good and
    bad answers, or where none holds a sample; asks `left_out` about single samples.
    """
    found = False
    for source in sources:
        labels = Labels()
        for sample in with_mismatched(_read_source(source, left_out, labels), source.name):
            found = True
            yield sample
        labels.refuse_marks()
    if not found:
        reasons = "; ".join(left_out.lines()) or "they are empty"
        where = ", ".join(source.name for source in sources)
        raise DataError(f"no sample (left out: {reasons})", where=where, fix="name a source with samples in it")


def _read_source(source: Source, left_out: LeftOut, labels: Labels) -> Iterator[Sample]:
    taken = 0
    rows = source.rows(left_out)

    def within_limit() -> Iterator[Row]:
        for row in rows:
            if source.limit is not None and taken >= source.limit:
                reason = f"beyond the first {source.limit:,}"
                if source.is_local:
                    left_out.add(reason, row.place, 1 + sum(1 for _ in rows))
                else:  # nothing is fetched to be counted
                    left_out.add(f"{reason} or more", row.place)
                return
            yield row

    for samples in samples_of(within_limit(), source.schema, left_out, labels):
        taken += 1
        yield from samples


def samples_of(rows: Iterable[Row], asked: Schema, left_out: LeftOut, labels: Labels) -> Iterator[tuple[Sample, ...]]:
    """The samples of each usable row, of which the first of a file decides the schema where none is asked for.

    Raises `DataError`; asks `left_out` about single rows, and shows the others to `labels`.
    """
    schema, file = asked, None
    for row in rows:
        try:
            if row.file != file:
                schema = detect_schema(row, asked)
                file = row.file
            samples = _read_row(row, schema, asked)
        except SampleError as error:
            left_out.refuse(error)
            continue
        labels.add(row, schema)
        yield samples


def _read_row(row: Row, schema: Schema, asked: Schema) -> tuple[Sample, ...]:
    if asked.format == "auto":
        other = detect_schema(row, asked)  # raises where it is of no format at all
        in_turns = {other.format, schema.format} == {"chat", "sharegpt"}  # told apart by the messages that they hold
        if not schema.fits(row.fields) or (other.format != schema.format and not in_turns):
            what = f"a {other.format} sample in a file that began with {schema.format} samples"
            fix = "give each format a file of its own, or set data.format"
            raise SampleError(what, reason="of another format than its file", where=row.place, fix=fix)
    if schema.format == "preference":
        return read_pair(row, schema)
    return (read_unpaired(row, schema) if schema.format == "unpaired" else read_sample(row, schema),)
