"""The checksum of a block: what it is, and that it changes whenever a word does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.memory.checksum import LANES, ODD, checksum, checksums

WORD = 1 << 64


def reference(pieces: list[np.ndarray]) -> int:
    """The same in plain integers."""

    def mix(h: int, word: int) -> int:
        x = h ^ word
        return (x ^ x >> 32) * int(ODD) % WORD

    total = 0
    for piece in pieces:
        words = [int(word) for word in piece.view(np.uint64)]
        lanes = [(k + 1) * int(ODD) % WORD for k in range(LANES)]
        whole = len(words) // LANES * LANES
        for index, word in enumerate(words[:whole]):
            lanes[index % LANES] = mix(lanes[index % LANES], word)
        total = mix(total, len(words))
        for word in [*lanes, *words[whole:]]:
            total = mix(total, word)
    return total


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


@given(sizes=st.lists(st.integers(0, 300).map(lambda words: 8 * words), max_size=3))
def test_the_checksum_equals_integer_arithmetic(sizes: list[int]) -> None:
    pieces = [noise(size) for size in sizes]
    assert checksum(pieces) == reference(pieces)


@given(
    grain=st.integers(1, 200).map(lambda words: 8 * words),
    grains=st.integers(0, 3),
    rest=st.integers(0, 200).map(lambda words: 8 * words),
)
def test_each_grain_has_the_checksum_of_its_bytes(grain: int, grains: int, rest: int) -> None:
    memory = noise(grain * grains + min(rest, grain))
    parts = [[memory[at : at + grain]] for at in range(0, memory.size, grain)]
    assert checksums(memory, grain).tolist() == [reference(part) for part in parts]


@pytest.mark.parametrize("filled", [noise(4096), np.zeros(4096, np.uint8)], ids=["noise", "zeros"])
def test_every_bit_of_a_sector_changes_the_checksum(filled: np.ndarray) -> None:
    before = checksum([filled])
    sums = set()
    for bit in range(8 * filled.size):
        filled[bit // 8] ^= 1 << bit % 8
        sums.add(checksum([filled]))
        filled[bit // 8] ^= 1 << bit % 8
    assert before not in sums
    assert len(sums) == 8 * filled.size, "and each flip gives a sum of its own"


def test_simultaneous_high_bit_changes_change_the_checksum() -> None:
    """Without the shift, the top bits of two words of one lane would cancel out: signs that all flip, say."""
    block = noise(1 << 16)
    before = checksum([block])
    for stride in (1, 2, LANES, 2 * LANES):
        changed = block.copy()
        changed.view(np.uint64)[::stride] ^= np.uint64(1 << 63)
        assert checksum([changed]) != before


def test_position_and_length_change_the_checksum() -> None:
    block = noise(1 << 14)
    sectors = block.reshape(-1, 4096)
    assert checksum([sectors[[1, 0, 2, 3]].reshape(-1)]) != checksum([block])
    assert checksum([np.zeros(4096, np.uint8)]) != checksum([np.zeros(8192, np.uint8)])
    for size in (0, 8, 4096):
        assert checksum([block[:size]]) != checksum([block[: size + 8]])
