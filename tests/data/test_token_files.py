"""Claims about token files: exact, memory-mapped, complete or absent, and refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data import token_files
from megatrain.data.token_files import TokenArray, open_tokens, write_tokens
from megatrain.errors import DataError


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_tokens(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(
    vocab_size=st.sampled_from([257, 1 << 16, (1 << 16) + 1, 200_000]),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 50), min_size=1, max_size=4),
)
def test_token_files_round_trip(
    tmp_path_factory: pytest.TempPathFactory, vocab_size: int, seed: int, cuts: list[int]
) -> None:
    ids = np.random.default_rng(seed).integers(0, vocab_size, 50)
    ids[0] = vocab_size - 1
    path = tmp_path_factory.mktemp("tokens") / "new" / "x.bin"
    file = write_tokens(path, np.split(ids, sorted(cuts)), vocab_size, {"note": 1})
    assert isinstance(file.ids, np.memmap)
    assert file.ids.dtype == (np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    assert file.ids.tolist() == ids.tolist()
    assert (file.vocab_size, file.details) == (vocab_size, {"note": 1})


def test_a_foreign_bin_file_needs_only_its_dtype(tmp_path: Path) -> None:
    np.arange(70_000, 70_010, dtype="<u4").tofile(tmp_path / "x.bin")
    assert "has no x.json beside it" in refused(tmp_path / "x.bin")
    (tmp_path / "x.json").write_text('{"dtype": "uint32"}')
    assert open_tokens(tmp_path / "x.bin").ids.tolist() == list(range(70_000, 70_010))


def test_npy_files_are_memory_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10, dtype=">i8"))
    file = open_tokens(tmp_path / "x.npy")
    assert isinstance(file.ids, np.memmap)
    assert file.ids.tolist() == list(range(10))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write_tokens(path, [np.arange(5)], 10)

    def broken() -> Iterator[TokenArray]:
        yield np.arange(3)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_tokens(path, broken(), 10)
    with pytest.raises(DataError, match="no token to write"):
        write_tokens(path, [], 10)
    with pytest.raises(DataError, match="token id 10 at position 4 is outside the vocabulary of 10"):
        write_tokens(path, [np.array([1, 2, 3]), np.array([4, 10])], 10)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.bin", "x.json"]
    assert open_tokens(path).ids.tolist() == list(range(5))


def test_a_crash_between_both_files_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.bin"
    write_tokens(path, [np.arange(8)], 10)
    rename = Path.replace

    def crash(self: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(path, [np.full(4, 70_000)], 70_001)
    assert "has no x.json" in refused(path)


def test_a_description_that_stays_the_same_is_never_missing(tmp_path: Path) -> None:
    """Another process may be opening it."""
    path = tmp_path / "x.bin"
    write_tokens(path, [np.arange(3)], 10)
    before = path.with_suffix(".json").stat().st_ino
    write_tokens(path, [np.arange(3) + 1], 10)
    assert path.with_suffix(".json").stat().st_ino == before
    write_tokens(path, [np.arange(4)], 10)
    assert open_tokens(path).ids.tolist() == [0, 1, 2, 3]


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        write_tokens(tmp_path / "file" / "x.bin", [np.arange(3)], 10)


@pytest.mark.parametrize(
    "note", ["", "[]", "{}", '{"dtype": "float32"}', '{"dtype": []}', '{"dtype": "uint16", "vocab_size": "x"}']
)
def test_malformed_metadata_is_refused(tmp_path: Path, note: str) -> None:
    (tmp_path / "x.bin").write_bytes(b"1234")
    (tmp_path / "x.json").write_text(note)
    assert "x.json: does not describe a token file" in refused(tmp_path / "x.bin")


def test_a_truncated_or_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write_tokens(path, [np.arange(8)], 10)
    path.write_bytes(path.read_bytes()[:-2])
    assert "14 bytes are not 8 tokens of uint16" in refused(path)
    path.with_suffix(".json").write_text(json.dumps({"dtype": "uint16"}))
    path.write_bytes(b"123")
    assert "3 bytes are not whole tokens of uint16" in refused(path)
    path.write_bytes(b"")
    assert "holds no token" in refused(path)


def test_npy_files_that_are_not_integer_vectors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for array in (np.zeros((2, 2), int), np.zeros(3)):
        np.save(path, array)
        assert "not a 1-D array of integers" in refused(path)
    np.save(path, np.array([{}]), allow_pickle=True)
    assert "not a .npy array" in refused(path)
    for content in (b"", b"some text"):
        path.write_bytes(content)
        assert "not a .npy array" in refused(path)


def test_a_missing_file_suggests_the_nearest_existing_one(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", [np.arange(8)], 10)
    assert f"did you mean {tmp_path / 'train.bin'}?" in refused(tmp_path / "trian.bin")


def test_a_fingerprint_depends_on_ids_not_storage(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 100, 200_000)  # more than the samples hold
    first = write_tokens(tmp_path / "x.bin", [ids], 100)
    np.save(tmp_path / "x.npy", ids)
    assert open_tokens(tmp_path / "x.npy").fingerprint == first.fingerprint
    assert write_tokens(tmp_path / "y.bin", [ids[:-1]], 100).fingerprint != first.fingerprint
    assert write_tokens(tmp_path / "z.bin", [ids[::-1]], 100).fingerprint != first.fingerprint


@pytest.mark.parametrize("length", [1, 65_536, 65_537])
def test_small_files_are_fingerprinted_whole(tmp_path: Path, length: int) -> None:
    ids = np.zeros(length, dtype=np.int64)
    prints = {write_tokens(tmp_path / "x.bin", [ids], 10).fingerprint}
    for position in {0, length - 1}:
        changed = ids.copy()
        changed[position] = 1
        prints.add(write_tokens(tmp_path / "x.bin", [changed], 10).fingerprint)
    assert len(prints) == 1 + len({0, length - 1})


@pytest.mark.parametrize(("wrong", "position"), [(10, 7), (-1, 0), (1 << 40, 99)])
def test_a_scan_finds_the_first_invalid_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int, position: int
) -> None:
    monkeypatch.setattr(token_files, "SCAN_TOKENS", 8)
    ids = np.full(100, 9)
    ids[position] = wrong
    np.save(tmp_path / "x.npy", ids)
    file = open_tokens(tmp_path / "x.npy")
    with pytest.raises(DataError, match=f"token id {wrong} at position {position} is outside the vocabulary of 10"):
        file.require_ids_below(10)
