"""What is not trained on, counted by reason, with the place of the first of each.

Whoever reads or encodes samples is handed a `LeftOut` and asks it what to do with an unusable one: end the run with its
error (`stop`, the default), or leave it out and count it (`leave_out`). Nothing else may pass over a sample.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from megatrain.errors import SampleError


@dataclass
class LeftOut:
    """`bad` is what happens to an unusable sample; `counts` and `first` are by reason."""

    bad: Literal["stop", "leave_out"] = "stop"
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first place

    def add(self, reason: str, place: str, count: int = 1) -> None:
        """Counts what is left out by intention, or has nothing in it."""
        if count > 0:
            self.counts[reason] += count
            self.first.setdefault(reason, place)

    def refuse(self, error: SampleError) -> None:
        """Raises `error`, or counts its sample as left out."""
        if self.bad == "stop":
            raise error
        self.add(error.reason, error.where)

    def lines(self) -> list[str]:
        """For the user, the most frequent reason first: `12 too long (first: chats.jsonl:17)`."""
        return [f"{count:,} {reason} (first: {self.first[reason]})" for reason, count in self.counts.most_common()]
