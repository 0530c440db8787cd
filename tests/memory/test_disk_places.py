"""Where regions lie on files: no two in one place, at sectors, split by share, and gaps used again."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatrain.memory.scratch_files import Space, lay_out, split_by_share
from megatrain.spec.hardware import SECTOR, whole_sectors

shares = st.lists(st.floats(0.01, 100), min_size=1, max_size=4)


@given(nbytes=st.integers(0, 1 << 40), parts=shares)
def test_parts_are_consecutive_and_follow_their_shares(nbytes: int, parts: list[float]) -> None:
    split = split_by_share(nbytes, parts)
    assert [start for start, _ in split] == [0, *(stop for _, stop in split[:-1])]
    assert split[-1][1] == nbytes
    for (start, stop), share in zip(split, parts, strict=True):
        assert start % SECTOR == 0 or start == stop == nbytes
        assert abs(stop - start - nbytes * share / sum(parts)) <= 2 * SECTOR


@given(
    parts=shares,
    block=st.integers(1, 5).map(lambda sectors: sectors * SECTOR),
    orders=st.lists(st.tuples(st.integers(0, 40 * SECTOR), st.booleans()), max_size=12),
)
def test_regions_never_overlap(parts: list[float], block: int, orders: list[tuple[int, bool]]) -> None:
    spaces = [Space() for _ in parts]
    regions = []
    for nbytes, forgets in orders:
        if forgets and regions:
            for piece in regions.pop(len(regions) // 2):
                spaces[piece.file].give(piece.place, piece.nbytes)
        regions.append(lay_out(nbytes, spaces, parts, block))
        assert sum(piece.nbytes for piece in regions[-1]) == nbytes
        assert all(piece.nbytes <= block for piece in regions[-1])
        for number, space in enumerate(spaces):
            taken = sorted(
                (piece.place, piece.place + whole_sectors(piece.nbytes))
                for region in regions
                for piece in region
                if piece.file == number
            )
            assert all(start % SECTOR == 0 for start, _ in taken)
            assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
            assert space.nbytes == sum(stop - start for start, stop in taken) + space.unused_nbytes


def test_gaps_are_merged_and_used_first() -> None:
    space = Space()
    places = [space.take(SECTOR) for _ in range(4)]
    for place in (places[0], places[2], places[1]):
        space.give(place, SECTOR)
    assert space.unused_nbytes == 3 * SECTOR
    assert space.take(3 * SECTOR - 5) == 0
    assert space.nbytes == 4 * SECTOR


def test_the_last_gap_is_extended() -> None:
    space = Space()
    space.take(SECTOR)
    space.give(space.take(2 * SECTOR), 2 * SECTOR)
    assert space.take(5 * SECTOR) == SECTOR
    assert (space.nbytes, space.unused_nbytes) == (6 * SECTOR, 0)


def test_a_plan_on_a_copy_changes_nothing() -> None:
    space = Space()
    space.give(space.take(SECTOR), SECTOR)
    space.copy().take(SECTOR)
    assert space.unused_nbytes == SECTOR
