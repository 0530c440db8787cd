"""The data of a run has a position that can be kept, and draws that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.train.loop import Feed


class Counting:
    """A loader whose steps are their own numbers."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> list[dict[str, Any]]:
        self.position += 1
        return [{"number": self.position - 1}]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def numbers(feed: Feed, count: int) -> list[int]:
    return [next(feed)[0]["number"] for _ in range(count)]


def test_saved_positions_continue() -> None:
    feed = Feed(Counting())
    assert numbers(feed, 3) == [0, 1, 2]
    state, other = feed.state(), Feed(Counting())
    other.restore(state)
    assert numbers(other, 2) == numbers(feed, 2) == [3, 4]
    assert other.state() == feed.state()


def test_skipped_data_stays_skipped_after_a_resume() -> None:
    feed = Feed(Counting())
    numbers(feed, 2)
    kept = feed.state()
    numbers(feed, 3)
    feed.leave_out(3, kept)
    assert numbers(feed, 2) == [2, 4]
    feed.leave_out(4, kept)
    other = Feed(Counting())
    other.restore(feed.state())
    assert numbers(other, 3) == numbers(feed, 3) == [2, 5, 6]
    assert feed.left_out == {3, 4}


def test_an_unused_random_draw_is_restored() -> None:
    feed = Feed(Counting())
    feed.put_back()
    numbers(feed, 2)
    feed.put_back()
    assert numbers(feed, 2) == [1, 2]
