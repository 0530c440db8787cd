"""The data of a run has a position that can be kept, and draws that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.train.batch_feed import Feed


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


def test_a_kept_position_is_gone_on_from() -> None:
    feed = Feed(Counting())
    assert numbers(feed, 3) == [0, 1, 2]
    state, other = feed.state(), Feed(Counting())
    other.restore(state)
    assert numbers(other, 2) == numbers(feed, 2) == [3, 4]
    assert other.state() == feed.state()


def test_what_is_left_out_is_passed_over_also_after_a_resume_and_a_second_time() -> None:
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


def test_a_draw_that_was_not_used_is_put_back() -> None:
    feed = Feed(Counting())
    feed.put_back()
    numbers(feed, 2)
    feed.put_back()
    assert numbers(feed, 2) == [1, 2]
