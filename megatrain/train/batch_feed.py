"""The data of a run as its loop takes it: a loader, what of it is left out, and a position that can be kept.

A draw is what one `next` of the loader gives, counted since the run began. After a rollback the draws that were not
finite are left out when they come again; which those are is part of the position, so a run that is resumed leaves out
the same ones. It leaves out the order itself, which is the loader's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol


class Loader(Protocol):
    """Endless steps, from a position that can be kept; `data.Loader` is one."""

    def __next__(self) -> Sequence[Mapping[str, Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Feed:
    """Steps from a loader, but for the draws that are left out."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.drawn = 0
        """Draws so far, those left out included."""
        self.left_out: set[int] = set()
        """Numbers of draws, from 0."""
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
        """Where the next draw is, in plain values."""
        return {"drawn": self.drawn, "left_out": sorted(self.left_out), "loader": self.loader.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was kept. Raises `DataError`, and changes nothing, where the data is another."""
        self.loader.load_state_dict(state["loader"])
        self.drawn, self.left_out = state["drawn"], set(state["left_out"])

    def put_back(self) -> None:
        """The last draw has not been used."""
        if self._before:
            self.restore(self._before)

    def leave_out(self, draw: int, back_to: Mapping[str, Any]) -> None:
        """Go back to `back_to`, and when `draw` comes again, as well as what has been left out so far, pass it over."""
        known = self.left_out | {draw}
        self.restore(back_to)
        self.left_out |= known
