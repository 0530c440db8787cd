"""Chooses the cases of a grid that the quick suite runs: `count` of a test under `few(count)`; others are slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import pytest


def mark_all_but_few_slow(items: Sequence[pytest.Item]) -> None:
    """Cases that are slow by their own mark are not counted."""
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        marker = cases[0].get_closest_marker("few")
        assert marker is not None
        quick = chosen([case.callspec.params for case in cases], marker.args[0])
        for case in (case for place, case in enumerate(cases) if place not in quick):
            case.add_marker(pytest.mark.slow)


def chosen(cases: Sequence[Mapping[str, object]], count: int) -> set[int]:
    """Places of `count` cases, by turns the one whose arguments have the most values that no chosen one has, and of
    equal ones that whose values are the rarest among the chosen."""
    values = [[(name, _by_value(value)) for name, value in case.items()] for case in cases]
    uses: Counter[tuple[str, Hashable]] = Counter()
    places: set[int] = set()

    def rank(place: int) -> tuple[int, int, int]:
        used = [uses[value] for value in values[place]]
        return used.count(0), -sum(used), -place

    while len(places) < min(count, len(cases)):
        best = max(set(range(len(cases))) - places, key=rank)
        places.add(best)
        uses.update(values[best])
    return places


def _by_value(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
