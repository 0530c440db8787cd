"""`Work`: the micro-batches of one step, as sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatrain.errors import PlanError
from megatrain.spec.fields import Bounds, check_fields

Batching = Literal["uniform", "padded", "packed"]
"""Sequences of one length without a mask; padded ones with theirs; several samples in one, with their positions."""
Tokens = Annotated[int, Bounds(1, 1 << 60)]


@dataclass(frozen=True, slots=True)
class Work:
    """What one step has to do: the token count (batch x length, padding included) of each micro-batch."""

    tokens: tuple[Tokens, ...]
    length: Tokens | None = None
    """Tokens of a sequence; `None` where a micro-batch is one sequence. It matters for prices, not for ops."""
    repeats: Annotated[float, Bounds(1)] = 1
    """How many micro-batches each stands for: 1 but in the planner's first look, where fewer ops do."""
    batching: Batching = "uniform"
    """How sequences lie in micro-batches, which decides what layers are told by masks."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "work.")
        if not self.tokens:
            raise PlanError("a step needs micro-batches of at least one token", where="work.tokens")

    @classmethod
    def of_two_rounds(cls, micro_batches_per_round: int) -> Work:
        """As few tokens as have more than one micro-batch, and more than one round where there are rounds."""
        return cls((1,) * (1 + max(1, micro_batches_per_round)))

    @property
    def micro_batches(self) -> int:
        return len(self.tokens)
