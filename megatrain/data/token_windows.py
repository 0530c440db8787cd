"""Cuts a token stream into fixed windows: window i is tokens [i * window, (i + 1) * window).

Documents continue across windows, with an end-of-text token between them, so no token is padding. Tokens after the last
whole window are unused and counted. Labels equal the inputs, since Hugging Face models shift them in the loss. No
attention mask separates documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatrain.data.packing import Row
from megatrain.data.sampler import epoch_order
from megatrain.data.token_files import TokenFile, require_ids_below
from megatrain.errors import DataError


@dataclass(frozen=True)
class Windows:
    """`count` windows of a token file, from window `first` on. Nothing is read before it is used."""

    file: TokenFile
    window: int  # tokens
    vocab_size: int
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Windows `indices` as a new array (len(indices), window).

        Raises `DataError` for an id outside the vocabulary, with its position in the file, and `IndexError`.
        """
        batch = np.empty((len(indices), self.window), dtype=np.int64)
        for row, index in zip(batch, indices, strict=True):
            if not 0 <= index < self.count:
                raise IndexError(f"window {index} of {self.count}")
            start = (self.first + int(index)) * self.window
            row[:] = self.file.ids[start : start + self.window]
            require_ids_below(row, self.vocab_size, start, self.file.path)
        return batch

    def row(self, index: int) -> Row:
        """Window `index`, with every token as a target."""
        (ids,) = self.read(np.array([index]))
        return Row(ids, ids)

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """A random permutation."""
        return epoch_order(seed, epoch, self.count)

    def targets(self, index: int) -> int:
        """The number of targets of a window: all tokens but the first."""
        return self.window - 1

    @property
    def identity(self) -> dict[str, str | int]:
        """See `Batching.identity`."""
        dataset = self.file.fingerprint
        return {"dataset": dataset, "window": self.window, "first": self.first, "windows": self.count}


def pack(file: TokenFile, *, window: int, vocab_size: int) -> Windows:
    """All whole windows of `window` tokens in `file`.

    Unless the file states that its ids are below `vocab_size`, it is read once to check them, so that a wrong id is
    found before training. Raises `DataError` if the file is shorter than a window, or has an id outside the model's
    vocabulary.
    """
    if window < 2:
        raise DataError(f"a window of {window} tokens holds nothing to predict", fix="use 2 tokens or more")
    if len(file) < window:
        fix = f"set data.sequence_length={len(file)} or less, or give more text"
        raise DataError(f"{len(file)} tokens are less than one window of {window}", where=str(file.path), fix=fix)
    file.require_ids_below(vocab_size)
    return Windows(file, window, vocab_size, first=0, count=len(file) // window)


def unused_tokens(windows: Windows) -> int:
    """The number of tokens after the file's last whole window."""
    return len(windows.file) % windows.window


def split_windows(windows: Windows, validation_fraction: float) -> tuple[Windows, Windows | None]:
    """(training, validation): hold out the last `validation_fraction` of the windows, at least one.

    At most one document is in both parts. A fraction of 0 gives None for validation. Raises `DataError` if no window
    would be left to train on.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(f"a validation fraction of {validation_fraction}", fix="use 0 or more and less than 1")
    if validation_fraction == 0:
        return windows, None
    held_out = max(1, round(windows.count * validation_fraction))
    trained = windows.count - held_out
    if trained < 1:
        counted = "the only sequence" if windows.count == 1 else f"{held_out} of {windows.count} sequences"
        what = f"holding out {counted} for validation leaves none to train on"
        fix = "lower data.sequence_length or data.validation_fraction, or give more text"
        raise DataError(what, where=str(windows.file.path), fix=fix)
    return replace(windows, count=trained), replace(windows, first=windows.first + trained, count=held_out)
