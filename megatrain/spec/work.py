"""`Work`: the micro-batches of one step, as sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatrain.errors import PlanError
from megatrain.spec.validate_fields import Bounds, check_fields

Batching = Literal["uniform", "padded", "packed"]
"""Sequences of one length without a mask; padded ones with masks; packed ones with positions."""
Tokens = Annotated[int, Bounds(1, 1 << 60)]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one step: the token count (batch x length, including padding) of each micro-batch."""

    tokens: tuple[Tokens, ...]
    length: Tokens | None = None
    """Tokens per sequence; `None` if a micro-batch is one sequence. Affects prices, not ops."""
    repeats: Annotated[float, Bounds(1)] = 1
    """How many micro-batches each represents: 1, except in the planner's first pass, which uses fewer ops."""
    batching: Batching = "uniform"
    """How sequences are arranged in micro-batches, which decides the masks."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "work.")
        if not self.tokens:
            raise PlanError("a step needs micro-batches of at least one token", where="work.tokens")

    @classmethod
    def of_two_rounds(cls, micro_batches_per_round: int) -> Work:
        """Minimal work with several micro-batches, and with several rounds if there are rounds."""
        return cls((1,) * (1 + max(1, micro_batches_per_round)))

    @property
    def micro_batches(self) -> int:
        return len(self.tokens)
