"""Claims about windows: together they are the token stream, and unusable data is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.text_sources import Windows, pack, split_windows, unused_tokens
from megatrain.data.token_files import open_tokens, write_tokens
from megatrain.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pack")


def windows_of(folder: Path, length: int, window: int) -> Windows:
    return pack(write_tokens(folder / "x.bin", [np.arange(length)], length), window=window, vocab_size=length)


def read(windows: Windows) -> npt.NDArray[np.int64]:
    return np.stack([windows.row(index).ids for index in range(len(windows))])


@given(length=st.integers(2, 200), window=st.integers(2, 20))
def test_windows_and_leftover_tokens_make_up_the_stream(folder: Path, length: int, window: int) -> None:
    length = max(length, window)
    windows = windows_of(folder, length, window)
    rows = read(windows)
    assert rows.dtype == np.int64
    assert rows.shape == (len(windows), window)
    assert rows.ravel().tolist() == list(range(length - unused_tokens(windows)))
    assert 0 <= unused_tokens(windows) < window


@given(count=st.integers(2, 60), fraction=st.floats(0, 0.99))
def test_a_split_takes_the_last_windows_and_loses_none(folder: Path, count: int, fraction: float) -> None:
    windows = windows_of(folder, 2 * count, 2)
    if round(count * fraction) == count:
        with pytest.raises(DataError, match="leaves none to train on"):
            split_windows(windows, fraction)
        return
    train, validation = split_windows(windows, fraction)
    rows = [read(part) for part in (train, validation) if part]
    assert np.concatenate(rows).ravel().tolist() == list(range(2 * count))
    assert (validation is None) == (fraction == 0)
    if validation:
        assert len(validation) == max(1, round(count * fraction))
        assert train.identity != validation.identity


def test_windows_outside_a_split_cannot_be_read(folder: Path) -> None:
    train, _ = split_windows(windows_of(folder, 20, 2), 0.5)
    for index in (-1, len(train)):
        with pytest.raises(IndexError):
            train.row(index)


def test_an_id_outside_the_vocabulary_is_refused_before_training(folder: Path) -> None:
    file = write_tokens(folder / "x.bin", [np.array([1, 2, 3, 9])], 10)
    assert len(pack(file, window=2, vocab_size=10)) == 2
    with pytest.raises(DataError, match="token id 9 at position 3 is outside the vocabulary of 9; tokenise"):
        pack(file, window=2, vocab_size=9)
    np.save(folder / "x.npy", np.array([1, -2, 3, 4]))
    with pytest.raises(DataError, match="token id -2 at position 1"):
        pack(open_tokens(folder / "x.npy"), window=2, vocab_size=10)
