"""Caches encoded samples in memory-mapped files, under a key that hashes their content and how they are encoded.

A sample file is six files of one name, or eight:

    .bin, .json     the ids of all samples, one after another, as a token file (`token_files.py`)
    .lengths        two uint32 per sample: its numbers of tokens and of targets
    .trained        one bit per token: whether it is a target; each sample starts at a byte
    .hashes         64 bits per sample: a hash of its ids, to find copies; 0 for a mismatched answer
    .marks          one byte per sample: 1 for an answer labelled desirable

and if samples may have images

    .images         per sample, as JSON, its text before the processor and where its images are: their paths, or where
                    their encoded bytes follow
    .places         where each sample begins in `.images`, and the end: uint64

The `.json` is written last, so files that a crash leaves are not taken for a sample file. Samples are written as they
are encoded, and none is kept in memory.

The cache key hashes everything that the samples depend on: every byte of a local source (the commit of one on the hub),
how its fields are read, and the encoder's identity. So a file that is moved or touched is not encoded again, and a
changed byte is never overlooked. Hashing takes about a hundredth of the time of encoding. The statistics and an example
are stored too, so a run that starts from the cache reports the same. Old entries are not removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

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
from megatrain.errors import DataError
from megatrain.system.locks import alone
from megatrain.system.paths import usable_path

PARTS = (LENGTHS, TRAINED, HASHES, MARKS) = ".lengths", ".trained", ".hashes", ".marks"
COUNTED = 4096
"""Samples whose tokens are counted at a time."""
TOLD_ROWS = 256
"""Rows between two calls of a progress function."""
IMAGE_PARTS = (IMAGES, PLACES) = ".images", ".places"


@dataclass(frozen=True, eq=False)
class SampleFile:
    """An open sample file. Arrays are memory maps of shape (samples,), except `bits`, the bytes of `.trained`."""

    tokens: TokenFile
    lengths: npt.NDArray[np.uint32]
    targets: npt.NDArray[np.uint32]
    bits: npt.NDArray[np.uint8]
    hashes: npt.NDArray[np.uint64]
    marks: npt.NDArray[np.uint8]
    images: npt.NDArray[np.uint8] | None = None
    places: npt.NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """(ids, mask of targets) of sample `number`, counted from 0."""
        size = int(self.lengths[number])
        first, byte = int(self._starts[number]), int(self._bytes[number])
        trained = np.unpackbits(self.bits[byte : byte + -(-size // 8)], count=size).astype(np.bool_)
        return self.tokens.ids[first : first + size].astype(np.int64), trained

    def image_text(self, number: int) -> ImageText | None:
        """The text and the images of sample `number`; None if samples have none."""
        if self.images is None:
            return None
        fields, data = self._image_record(number)
        images, at = list[Image](), 0
        for path, size in fields["images"]:
            images.append(Image(fields["place"], path, None if path else data[at : at + size].tobytes()))
            at += 0 if path else size
        return ImageText(fields["text"], tuple(images), fields["place"])

    def require_images(self) -> None:
        """Raise `DataError` for a file of an image that is missing, or has another size than when it was encoded."""
        for number in range(0 if self.places is None else len(self)):
            fields, _ = self._image_record(number)
            for path, size in fields["images"]:
                image = Image(fields["place"], path)
                if path and image.nbytes != size:
                    what = f"{image.name} has changed since the samples were encoded"
                    raise DataError(what, where=image.place, fix="restore it, or choose another data.cache")

    def _image_record(self, number: int) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
        """(what is said of the images of sample `number`, their bytes, of which none are read)."""
        assert self.images is not None
        assert self.places is not None
        start, stop = map(int, self.places[number : number + 2])
        size = int.from_bytes(self.images[start : start + 4].tobytes(), "little")
        begin = start + 4 + size
        return json.loads(self.images[start + 4 : begin].tobytes()), self.images[begin:stop]

    @property
    def details(self) -> Mapping[str, Any]:
        """What the writer stored beside the samples."""
        return self.tokens.details

    @cached_property
    def fingerprint(self) -> str:
        """A hash of each sample's ids and number of targets, which tells data sets apart."""
        digest = hashlib.sha256(np.ascontiguousarray(self.hashes).tobytes())
        digest.update(np.ascontiguousarray(self.lengths).tobytes())
        digest.update(np.ascontiguousarray(self.targets).tobytes())
        if holds_unpaired(self):
            digest.update(np.ascontiguousarray(self.marks).tobytes())
        return digest.hexdigest()[:32]

    def counts(self, token: int) -> npt.NDArray[np.int64]:
        """How often each sample has this token."""
        counts = np.zeros(len(self), dtype=np.int64)
        for first in range(0, len(self), COUNTED):
            starts = self._starts[first : first + COUNTED]
            stop = int(self._starts[first + COUNTED]) if first + COUNTED < len(self) else len(self.tokens.ids)
            ids = self.tokens.ids[int(starts[0]) : stop]
            counts[first : first + COUNTED] = np.add.reduceat(ids == token, starts - starts[0], dtype=np.int64)
        return counts

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        """The position of each sample's first token."""
        return _offsets(self.lengths.astype(np.int64))

    @cached_property
    def _bytes(self) -> npt.NDArray[np.int64]:
        """The position of each sample's first byte in `bits`."""
        return _offsets(-(-self.lengths.astype(np.int64) // 8))


def write_samples(
    path: Path,
    samples: Iterable[EncodedSample],
    vocab_size: int,
    details: Mapping[str, Any],
    *,
    has_images: bool = False,
) -> SampleFile:
    """Write `samples` as the sample file `path` (a `.bin`) and open it.

    details: a JSON object to store; used only after the last sample, so `samples` may fill it. has_images: whether they
    were encoded for a processor. Raises what `write_tokens` raises.
    """
    suffixes = (*PARTS, *IMAGE_PARTS) if has_images else PARTS
    drafts = {suffix: path.with_name(f"{path.stem}{suffix}.{uuid.uuid4().hex}.tmp") for suffix in suffixes}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tokens(path, _arrays(path, samples, drafts), vocab_size, details)
    except OSError as error:
        fix = "free some space, or choose another folder"
        raise DataError(f"cannot be written ({error.strerror or error})", where=str(path), fix=fix) from error
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    return open_samples(path)


def open_samples(path: Path) -> SampleFile:
    """Open a sample file, memory-mapped. Raises `DataError` if one of its files is missing or does not fit the rest."""
    tokens = open_tokens(path)
    try:
        lengths = np.memmap(path.with_suffix(LENGTHS), dtype="<u4", mode="r").reshape(-1, 2)
        bits = np.memmap(path.with_suffix(TRAINED), dtype=np.uint8, mode="r")
        hashes = np.memmap(path.with_suffix(HASHES), dtype="<u8", mode="r")
        marks = np.memmap(path.with_suffix(MARKS), dtype=np.uint8, mode="r")
        images = places = None
        if path.with_suffix(PLACES).is_file():
            images = np.memmap(path.with_suffix(IMAGES), dtype=np.uint8, mode="r")
            places = np.memmap(path.with_suffix(PLACES), dtype="<u8", mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"is not a sample file ({error})", where=str(path), fix="remove it") from error
    sizes = lengths[:, 0].astype(np.int64)
    counts = int(sizes.sum()), int((-(-sizes // 8)).sum()), len(sizes), len(sizes)
    if counts != (len(tokens), len(bits), len(hashes), len(marks)):
        raise DataError("its files do not belong together", where=str(path), fix="remove them")
    if images is not None and places is not None and (len(places) != len(sizes) + 1 or places[-1] != len(images)):
        raise DataError("its files do not belong together", where=str(path), fix="remove them")
    return SampleFile(tokens, lengths[:, 0], lengths[:, 1], bits, hashes, marks, images, places)


def is_sample_file(path: Path, *, has_images: bool = False) -> bool:
    """Whether all files of the sample file `path` exist."""
    suffixes = (".bin", ".json", *PARTS, *(IMAGE_PARTS if has_images else ()))
    return all(path.with_suffix(suffix).is_file() for suffix in suffixes)


def _arrays(path: Path, samples: Iterable[EncodedSample], drafts: Mapping[str, Path]) -> Iterator[TokenArray]:
    with ExitStack() as stack:
        files = [stack.enter_context(draft.open("wb")) for draft in drafts.values()]
        lengths, trained, hashes, marks, *of_images = files
        if of_images:
            of_images[1].write(bytes(8))
        for sample in samples:
            lengths.write(np.array([len(sample), sample.trained.sum()], dtype="<u4").tobytes())
            trained.write(np.packbits(sample.trained).tobytes())
            is_own = sample.answer != MISMATCHED
            hashes.write(_hash_of(sample) if is_own else bytes(8))
            marks.write(bytes([sample.answer == GOOD]))
            if of_images:
                assert sample.images is not None
                of_images[0].write(_image_record(sample.images))
                of_images[1].write(np.array([of_images[0].tell()], dtype="<u8").tobytes())
            yield sample.ids
        for file in files:  # so that a power cut leaves no complete ids beside an incomplete mask
            file.flush()
            os.fsync(file.fileno())
    for suffix, draft in drafts.items():  # before `write_tokens` does so with `.bin` and `.json`
        draft.replace(path.with_suffix(suffix))


def _hash_of(sample: EncodedSample) -> bytes:
    """A hash of the ids of a sample, and of what tells its images from others."""
    digest = hashlib.blake2b(sample.ids.tobytes(), digest_size=8)
    for image in () if sample.images is None else sample.images.images:
        digest.update(image.identity.encode())
    return digest.digest()


def _image_record(sample: ImageText) -> bytes:
    """A sample of `.images`: the length of a JSON text, the text, and the bytes of images that are in no file."""
    images = [(image.path, image.nbytes) for image in sample.images]
    head = json.dumps({"text": sample.text, "place": sample.place, "images": images}).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *(image.data or b"" for image in sample.images)])


def _offsets(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)


# From sources to sample files -----------------------------------------------------------------------------------------

FORMAT = 10  # part of the key: raise it when the same content would give other samples

Runs = list[tuple[str, bool]]
"""A rendered example: runs (text, whether it is trained)."""

EncodingProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the name of a source, how many of its rows are encoded, and how many it has if that is known."""


def prepare_samples(
    source: Source, encoder: Encoder, *, cache: Path, bad: Bad = "stop", progress: EncodingProgress | None = None
) -> SampleFile:
    """The encoded samples of `source`, from the folder `cache` if it has them; otherwise encoded and stored there.

    bad: what happens to unusable samples. Raises `DataError` for a source that cannot be read or has no sample to train
    on, and `SampleError` for an unusable sample if `bad` is `stop`.
    """
    path, has_images = cache / f"{_key(source, encoder, bad)}.bin", encoder.processor is not None
    with alone(path) if not is_sample_file(path, has_images=has_images) else nullcontext():
        if is_sample_file(path, has_images=has_images):
            file = open_samples(path)
            file.require_images()
            return file
        statistics = Statistics(LeftOut(bad))
        details: dict[str, Any] = {"source": source.name}
        samples = _encoded(source, encoder, statistics, details, _row_progress(source, progress))
        return write_samples(path, samples, encoder.vocabulary, details, has_images=has_images)


def _row_progress(source: Source, progress: EncodingProgress | None) -> Callable[[int], None]:
    """Passes the number of encoded rows of `source` on to `progress`."""
    if progress is None:
        return lambda done: None
    total = _rows_of(source)
    return lambda done: progress(source.name, done, total)


def statistics_of(file: SampleFile) -> Statistics:
    """The statistics of the time when the samples were encoded."""
    kept = dict(file.details["statistics"])
    left_out = kept.pop("left_out")
    left_out = LeftOut(left_out["bad"], Counter(left_out["counts"]), dict(left_out["first"]))
    return Statistics(**{**kept, "left_out": left_out, "notes": Counter(kept["notes"])})


def example_of(file: SampleFile) -> Runs:
    """The first sample with a target, not truncated."""
    return [(text, trained) for text, trained in file.details["example"]]


def holds_text_only(file: SampleFile) -> bool:
    """Whether every sample is a plain text without a prompt, so that every token is trained."""
    return bool(file.details["text_only"])


def holds_chats(file: SampleFile) -> bool:
    """Whether any sample is a conversation."""
    return bool(file.details["chats"])


def holds_pairs(file: SampleFile) -> bool:
    """Whether samples are pairs: the even ones are chosen answers, each followed by the rejected one."""
    return bool(file.details["pairs"])


def holds_unpaired(file: SampleFile) -> bool:
    """Whether the even samples are answers labelled by `marks`, each followed by a mismatched one."""
    return bool(file.details.get("unpaired"))


def _encoded(
    source: Source, encoder: Encoder, statistics: Statistics, details: dict[str, Any], tell: Callable[[int], None]
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
    details |= {
        "statistics": _as_json(statistics),
        "example": example,
        "text_only": text_only,
        "chats": chats,
        "pairs": "pairs" in kinds,
        "unpaired": "unpaired" in kinds,
    }


def _rows_of(source: Source) -> int | None:
    """The approximate number of rows of `source`, if it is a file of lines; None otherwise."""
    path = usable_path(source.name, error=DataError)
    if not path.is_file() or path.suffix not in (*JSON_LINES, *SEPARATED):
        return None
    with path.open("rb") as file:
        lines = sum(chunk.count(b"\n") for chunk in iter(partial(file.read, 1 << 20), b""))
    return max(1, lines if source.limit is None else min(lines, source.limit))


def _as_json(statistics: Statistics) -> dict[str, Any]:
    """`statistics` as `statistics_of` reads them. `dataclasses.asdict` would break counters before Python 3.12."""
    left_out = statistics.left_out
    kept = {"bad": left_out.bad, "counts": dict(left_out.counts), "first": left_out.first}
    plain = {one.name: getattr(statistics, one.name) for one in fields(Statistics)}
    return {**plain, "left_out": kept, "notes": dict(statistics.notes)}


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
