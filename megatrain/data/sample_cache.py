"""Caches encoded samples in memory-mapped files, under a key that hashes their content and how they are encoded.

A sample file is three files of one name: a token file (`.bin` and `.json`, see `token_files.py`) with the ids of all
samples, one after another, and a table in Arrow's format (`.arrow`) with a row for each sample:

    trained         whether each token is a target
    targets         how many are
    hash            a hash of its ids, to find copies; 0 for a mismatched answer
    good            whether it is an answer labelled desirable

and if samples may have images

    text, place     its text before the processor, and the place of its row
    paths, sizes    where its images are, and their sizes as files; an image in no file has an empty path
    data            the encoded bytes of those

The `.json` is written last, so files that a crash leaves are not taken for a sample file. Samples are written as they
are encoded, and none is kept in memory.

The cache key hashes everything that the samples depend on: every byte of a local source (the commit of one on the hub),
how its fields are read, and the encoder's identity. So a file that is moved or touched is not encoded again, and a
changed byte is never overlooked. Hashing takes about a hundredth of the time of encoding. What to report and an example
are stored too, so a run that starts from the cache reports the same. Old entries are not removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, cast

import numpy as np
import numpy.typing as npt

from megatrain.data.encode import EncodedSample, Encoder, Statistics, encode_samples, try_to_render
from megatrain.data.files import kind_of, unreadable
from megatrain.data.images import Image
from megatrain.data.preferences import BAD, GOOD, MISMATCHED, SECOND, whole_pairs
from megatrain.data.processor import ImageText
from megatrain.data.read_rows import JSON_LINES, SEPARATED, Bad, LeftOut, commit_or_download, file_digest
from megatrain.data.sample_formats import Sample
from megatrain.data.sample_sources import Source, read_samples
from megatrain.data.token_files import TokenArray, TokenFile, open_tokens, write_tokens
from megatrain.data.tokenizer import batched
from megatrain.errors import DataError
from megatrain.system.atomic import sync
from megatrain.system.locks import alone
from megatrain.system.paths import usable_path, written_whole

TABLE = ".arrow"
WRITTEN_ROWS = 256
"""Rows of the table that are written at a time; fewer if they hold images."""
IMAGES_OF_A_ROW_NBYTES = 1 << 16
"""Bytes of images that count as a row more."""
COUNTED = 4096
"""Samples whose tokens are counted at a time, since that takes nine bytes for each."""
TOLD_ROWS = 256
"""Rows between two calls of a progress function."""


Runs = list[tuple[str, bool]]
"""A rendered example: runs (text, whether it is trained)."""


class Details(TypedDict, total=False):
    """What is said of a sample file."""

    source: str
    report: list[str]  # `Statistics.lines` of the time when the samples were encoded
    example: Runs  # the first sample with a target, not truncated
    text_only: bool  # every sample is a plain text without a prompt, so that every token is trained
    chats: bool  # any sample is a conversation
    pairs: bool  # the even samples are chosen answers, each followed by the rejected one
    unpaired: bool  # the even samples are answers labelled by `marks`, each followed by a mismatched one


@dataclass(frozen=True, eq=False)
class SampleFile:
    """An open sample file. table: a `pyarrow.Table`. The arrays are its columns, of shape (samples,)."""

    tokens: TokenFile
    table: Any
    lengths: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    marks: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """(ids, mask of targets) of sample `number`, counted from 0."""
        first = int(self._starts[number])
        trained = self.table["trained"][number].values.to_numpy(zero_copy_only=False)
        return self.tokens.ids[first : first + len(trained)].astype(np.int64), trained

    def image_text(self, number: int) -> ImageText | None:
        """The text and the images of sample `number`; None if samples have none."""
        if "text" not in self.table.column_names:
            return None
        text, place, paths, images = (self.table[name][number].as_py() for name in ("text", "place", "paths", "data"))
        return ImageText(text, tuple(map(partial(Image, place), paths, images)), place)

    def require_images(self) -> None:
        """Raise `DataError` for a file of an image that is missing, or has another size than when it was encoded."""
        for batch in self.table.to_batches() if "text" in self.table.column_names else ():
            for row in batch.select(["place", "paths", "sizes"]).to_pylist():
                for path, size in zip(row["paths"], row["sizes"], strict=True):
                    image = Image(row["place"], path)
                    if path and image.nbytes != size:
                        what = f"{image.name} has changed since the samples were encoded"
                        raise DataError(what, where=image.place, fix="restore it, or choose another data.cache")

    @property
    def details(self) -> Details:
        """What the writer stored beside the samples."""
        return cast(Details, self.tokens.details)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of each sample's ids, number of targets and label, which tells data sets apart."""
        arrays = (self.hashes, self.lengths, self.targets, self.marks)
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:32]

    def counts(self, token: int) -> npt.NDArray[np.int64]:
        """How often each sample has this token."""
        counts = np.zeros(len(self), np.int64)
        for first in range(0, len(self), COUNTED):
            starts = self._starts[first : first + COUNTED]
            ids = self.tokens.ids[starts[0] : starts[-1] + self.lengths[first : first + COUNTED][-1]]
            counts[first : first + COUNTED] = np.add.reduceat(ids == token, starts - starts[0], dtype=np.int64)
        return counts

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        """The position of each sample's first token."""
        return np.cumsum(self.lengths) - self.lengths


def write_samples(
    path: Path,
    samples: Iterable[EncodedSample],
    vocab_size: int,
    details: Details,
    *,
    has_images: bool = False,
) -> SampleFile:
    """Write `samples` as the sample file `path` (a `.bin`) and open it.

    details: a JSON object to store; used only after the last sample, so `samples` may fill it. has_images: whether they
    were encoded for a processor. Raises what `write_tokens` raises.
    """
    with closing(_ids_of(iter(samples), path, has_images=has_images)) as ids:
        write_tokens(path, ids, vocab_size, details)
    return open_samples(path)


def open_samples(path: Path) -> SampleFile:
    """Open a sample file, memory-mapped. Raises `DataError` if one of its files is missing or does not fit the rest."""
    import pyarrow

    tokens = open_tokens(path)
    try:
        file = _with_table(tokens, pyarrow.ipc.open_file(pyarrow.memory_map(str(path.with_suffix(TABLE)))).read_all())
    except (OSError, ValueError, LookupError) as error:
        raise DataError(f"is not a sample file ({error})", where=str(path), fix="remove it") from error
    if file.lengths.sum() != len(tokens):
        raise DataError("its files do not belong together", where=str(path), fix="remove them")
    return file


def samples_in_memory(samples: Sequence[EncodedSample]) -> SampleFile:
    """`samples`, which have no images, as a sample file that lies on no disk."""
    import pyarrow

    table = pyarrow.Table.from_pylist(list(map(_row, samples)), _schema(has_images=False))
    ids = np.concatenate([np.empty(0, np.int32), *(sample.ids for sample in samples)])
    return _with_table(TokenFile(Path(), ids, None, {}), table)


def _with_table(tokens: TokenFile, table: Any) -> SampleFile:
    import pyarrow.compute

    counts = (pyarrow.compute.list_value_length(table["trained"]), table["targets"])
    lengths, targets = (column.to_numpy().astype(np.int64) for column in counts)
    return SampleFile(tokens, table, lengths, targets, table["hash"].to_numpy(), table["good"].to_numpy())


def _schema(*, has_images: bool) -> Any:
    """The columns of the table, as a `pyarrow.Schema`."""
    import pyarrow

    number, text, data = pyarrow.uint64(), pyarrow.string(), pyarrow.large_binary()
    types = {"trained": pyarrow.list_(pyarrow.bool_()), "targets": number, "hash": number, "good": pyarrow.bool_()}
    if has_images:
        types |= {"text": text, "place": text}
        types |= {"paths": pyarrow.list_(text), "sizes": pyarrow.list_(number), "data": pyarrow.list_(data)}
    return pyarrow.schema(types)


def is_sample_file(path: Path) -> bool:
    """Whether all files of the sample file `path` exist."""
    return all(path.with_suffix(suffix).is_file() for suffix in (".bin", ".json", TABLE))


def _ids_of(samples: Iterator[EncodedSample], path: Path, *, has_images: bool) -> Generator[TokenArray]:
    """The ids of all samples; what else there is of them is written to the table meanwhile."""
    import pyarrow

    schema = _schema(has_images=has_images)
    with written_whole(path.with_suffix(TABLE)) as draft:  # before `write_tokens` completes `.bin` and `.json`
        with pyarrow.ipc.new_file(str(draft), schema) as writer:
            for together in batched(samples, _rows_counted, WRITTEN_ROWS):
                writer.write(pyarrow.RecordBatch.from_pylist([_row(sample) for sample in together], schema))
                yield from (sample.ids for sample in together)
        sync(draft)  # so that a power cut leaves no complete ids beside an incomplete mask


def _rows_counted(sample: EncodedSample) -> int:
    """As how many rows a sample counts that waits in memory with its images."""
    images = () if sample.images is None else sample.images.images
    return 1 + sum(len(image.data or b"") for image in images) // IMAGES_OF_A_ROW_NBYTES


def _row(sample: EncodedSample) -> dict[str, Any]:
    """A sample's row of the table."""
    row: dict[str, Any] = {"trained": sample.trained, "targets": sample.trained.sum(), "good": sample.answer == GOOD}
    digest = hashlib.blake2b(sample.ids.tobytes(), digest_size=8)
    if sample.images is not None:
        images = sample.images.images
        digest.update("".join(image.identity for image in images).encode())
        row |= {"text": sample.images.text, "place": sample.images.place, "data": [image.data for image in images]}
        row |= {"paths": [image.path for image in images], "sizes": [image.nbytes for image in images]}
    return {**row, "hash": 0 if sample.answer == MISMATCHED else int.from_bytes(digest.digest(), "little")}


# From sources to sample files -----------------------------------------------------------------------------------------

FORMAT = 11  # part of the key: raise it when the same content would give other samples

EncodingProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the name of a source, how many of its rows are encoded, and how many it has if that is known."""


def prepare_samples(
    source: Source, encoder: Encoder, *, cache: Path, bad: Bad = "stop", progress: EncodingProgress | None = None
) -> SampleFile:
    """The encoded samples of `source`, from the folder `cache` if it has them; otherwise encoded and stored there.

    bad: what happens to unusable samples. Raises `DataError` for a source that cannot be read or has no sample to train
    on, and `SampleError` for an unusable sample if `bad` is `stop`.
    """
    path = cache / f"{_key(source, encoder, bad)}.bin"
    with alone(path) if not is_sample_file(path) else nullcontext():
        if is_sample_file(path):
            file = open_samples(path)
            file.require_images()
            return file
        statistics = Statistics(LeftOut(bad))
        details: Details = {"source": source.name}
        samples = _encoded(source, encoder, statistics, details, _row_progress(source, progress))
        return write_samples(path, samples, encoder.vocabulary, details, has_images=encoder.processor is not None)


def _row_progress(source: Source, progress: EncodingProgress | None) -> Callable[[int], None]:
    """Passes the number of encoded rows of `source` on to `progress`."""
    if progress is None:
        return lambda done: None
    total = _rows_of(source)
    return lambda done: progress(source.name, done, total)


def _encoded(
    source: Source, encoder: Encoder, statistics: Statistics, details: Details, tell: Callable[[int], None]
) -> Iterator[EncodedSample]:
    """The encoded samples of `source`. Fills `statistics`, and `details` at its end. tell: is called with the number of
    rows so far."""
    example: Runs = []
    text_only, chats, rows = True, False, 0
    kinds: set[str] = set()

    def samples() -> Iterator[Sample]:
        nonlocal text_only, chats, rows
        for sample in read_samples(source, statistics.left_out):
            rows += sample.answer not in SECOND  # of the two samples of a row
            if rows % TOLD_ROWS == 0:
                tell(rows)
            text_only = text_only and sample.text is not None and not sample.prompt
            chats = chats or bool(sample.messages)
            kinds.add("unpaired" if sample.answer in (GOOD, BAD, MISMATCHED) else "pairs" if sample.answer else "")
            if not example:
                example.extend(try_to_render(sample, encoder))
            yield sample

    yield from whole_pairs(encode_samples(samples(), encoder, statistics), statistics)
    tell(rows)
    if len(kinds) > 1:
        what, fix = "holds both preferences and other samples", "give each a source of its own"
        raise DataError(what, where=source.name, fix=fix)
    if not statistics.samples:
        reasons = "; ".join(statistics.left_out.lines())
        what = f"no sample is left to train on (left out: {reasons})"
        raise DataError(what, where=source.name, fix="see data.train_on, data.sequence_length and data.too_long")
    details["report"], details["example"] = statistics.lines(), example
    details["text_only"], details["chats"] = text_only, chats
    details["pairs"], details["unpaired"] = "pairs" in kinds, "unpaired" in kinds


def _rows_of(source: Source) -> int | None:
    """The approximate number of rows of `source`, if it is a file of lines; None otherwise."""
    path = usable_path(source.name, error=DataError)
    if not path.is_file() or path.suffix not in (*JSON_LINES, *SEPARATED):
        return None
    with path.open("rb") as file:
        lines = sum(chunk.count(b"\n") for chunk in iter(partial(file.read, 1 << 20), b""))
    return max(1, lines if source.limit is None else min(lines, source.limit))


def _key(source: Source, encoder: Encoder, bad: str) -> str:
    schema = source.schema
    reading: list[Any] = [schema.format, dict(schema.columns), dict(schema.tags)]
    if schema.images is not None:  # whose paths begin at the source
        reading += [schema.images, str(usable_path(source.name, error=DataError).absolute())]
    which = [source.split, source.subset, source.folder, source.pattern, source.limit]
    content = [FORMAT, encoder.identity, _content(source), reading, which, bad]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _content(source: Source) -> object:
    """What identifies the content of `source`: digests of its files, or the commit of a data set on the hub."""
    path = usable_path(source.name, error=DataError)
    if path.is_file():
        return [kind_of(path), file_digest(path)]
    if path.is_dir():
        try:
            files = sorted(file for file in path.rglob("*") if file.is_file())
        except OSError as error:
            raise unreadable(error, path) from error
        return [[str(file.relative_to(path)), file_digest(file)] for file in files]
    if path.exists():
        return source.name
    try:
        commit = commit_or_download(source.name)
    except DataError:  # reading it reports the error
        commit = None
    return [source.name, commit]
