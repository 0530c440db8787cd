"""The loop's data feed: a loader, the draws to skip, and a position that can be saved.

A draw is one `next` of the loader, counted from the start of the run. After a rollback, draws that gave a
non-finite step are skipped when they come again; they are part of the position, so a resumed run skips the same
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol


class Loader(Protocol):
    """Endless steps from a position that can be saved; `data.Loader` is one."""

    def __next__(self) -> Sequence[Mapping[str, Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Feed:
    """Steps from a loader, without the draws to skip."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.drawn = 0
        """Draws so far, including skipped ones."""
        self.left_out: set[int] = set()
        """Numbers of the draws to skip, from 0."""
        self._before: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Sequence[Mapping[str, Any]]]:
        return self

    def __next__(self) -> Sequence[Mapping[str, Any]]:
        self._before = self.state()
        while True:
            micro_batches = next(self.loader)
            self.drawn += 1
            if self.drawn - 1 not in self.left_out:
                return micro_batches

    def state(self) -> dict[str, Any]:
        """The position of the next draw, in plain values."""
        return {"drawn": self.drawn, "left_out": sorted(self.left_out), "loader": self.loader.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`. Raises `DataError`, changing nothing, if the data has changed."""
        self.loader.load_state_dict(state["loader"])
        self.drawn, self.left_out = state["drawn"], set(state["left_out"])

    def put_back(self) -> None:
        """Undo the last draw, which was not used."""
        if self._before:
            self.restore(self._before)

    def leave_out(self, draw: int, back_to: Mapping[str, Any]) -> None:
        """Go back to `back_to`, and skip `draw`, and all draws skipped so far, when they come again."""
        known = self.left_out | {draw}
        self.restore(back_to)
        self.left_out |= known
