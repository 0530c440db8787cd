"""Encoded samples on disk, memory mapped, so that a run starts at once and data need not fit in memory.

Five files of one name: `.bin` and `.json` hold all ids, one sample after another, as a token file does (`tokens.py`);
`.lengths` holds the tokens and the targets of each sample (two uint32); `.trained` one bit for each token, each sample
from a byte of its own; `.hashes` 64 bits for the ids of each, by which copies are found. The `.json` is written last,
so what a crash leaves is no sample file. They are written while samples come in, and none is kept in memory. Left out:
where samples come from (`cache.py`).
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatrain.data.encode import EncodedSample
from megatrain.data.tokens import TokenArray, TokenFile, open_tokens, write_tokens
from megatrain.errors import DataError

PARTS = (LENGTHS, TRAINED, HASHES) = ".lengths", ".trained", ".hashes"


@dataclass(frozen=True, eq=False)
class SampleFile:
    """An open file of samples. `lengths`, `targets` and `hashes`, all [samples], are memory maps, as all is."""

    tokens: TokenFile
    lengths: npt.NDArray[np.uint32]
    targets: npt.NDArray[np.uint32]
    bits: npt.NDArray[np.uint8]
    hashes: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """(ids, which of them are targets) of sample `number`, from 0 on."""
        size = int(self.lengths[number])
        first, byte = int(self._starts[number]), int(self._bytes[number])
        trained = np.unpackbits(self.bits[byte : byte + -(-size // 8)], count=size).astype(np.bool_)
        return self.tokens.ids[first : first + size].astype(np.int64), trained

    @property
    def details(self) -> Mapping[str, Any]:
        """What the writer wrote beside them."""
        return self.tokens.details

    @cached_property
    def fingerprint(self) -> str:
        """A hash that tells one data set from another: of each sample's ids, and of how many of them are trained."""
        digest = hashlib.sha256(np.ascontiguousarray(self.hashes).tobytes())
        digest.update(np.ascontiguousarray(self.lengths).tobytes())
        digest.update(np.ascontiguousarray(self.targets).tobytes())
        return digest.hexdigest()[:32]

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return _running(self.lengths.astype(np.int64))

    @cached_property
    def _bytes(self) -> npt.NDArray[np.int64]:
        return _running(-(-self.lengths.astype(np.int64) // 8))


def write_samples(
    path: Path, samples: Iterable[EncodedSample], vocab_size: int, details: Mapping[str, Any]
) -> SampleFile:
    """Writes `samples` under the name `path` (a `.bin`) and opens them; `details`, JSON, is read after the last one.

    Raises what `write_tokens` raises.
    """
    drafts = {suffix: path.with_name(f"{path.stem}{suffix}.{uuid.uuid4().hex}.tmp") for suffix in PARTS}
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
    """Opens them memory mapped. Raises `DataError` where a file is missing or does not belong to the others."""
    tokens = open_tokens(path)
    try:
        lengths = np.memmap(path.with_suffix(LENGTHS), dtype="<u4", mode="r").reshape(-1, 2)
        bits = np.memmap(path.with_suffix(TRAINED), dtype=np.uint8, mode="r")
        hashes = np.memmap(path.with_suffix(HASHES), dtype="<u8", mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"does not hold samples ({error})", where=str(path), fix="remove it") from error
    sizes = lengths[:, 0].astype(np.int64)
    if (int(sizes.sum()), int((-(-sizes // 8)).sum()), len(sizes)) != (len(tokens), len(bits), len(hashes)):
        raise DataError("its files are not of one data set", where=str(path), fix="remove them")
    return SampleFile(tokens, lengths[:, 0], lengths[:, 1], bits, hashes)


def are_samples(path: Path) -> bool:
    """Whether a whole set of files of that name is there."""
    return all(path.with_suffix(suffix).is_file() for suffix in (".bin", ".json", *PARTS))


def _arrays(path: Path, samples: Iterable[EncodedSample], drafts: Mapping[str, Path]) -> Iterator[TokenArray]:
    with ExitStack() as stack:
        files = [stack.enter_context(drafts[suffix].open("wb")) for suffix in PARTS]
        lengths, trained, hashes = files
        for sample in samples:
            lengths.write(np.array([len(sample), sample.trained.sum()], dtype="<u4").tobytes())
            trained.write(np.packbits(sample.trained).tobytes())
            hashes.write(hashlib.blake2b(sample.ids.tobytes(), digest_size=8).digest())
            yield sample.ids
        for file in files:  # else a power cut could leave what is trained empty beside ids that are whole
            file.flush()
            os.fsync(file.fileno())
    for suffix, draft in drafts.items():  # before the ids and their note, which come last
        draft.replace(path.with_suffix(suffix))


def _running(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
