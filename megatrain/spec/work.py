"""`Work`: the micro-batches of one step, as sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatrain.errors import MegaTrainError, PlanError
from megatrain.spec.validate_fields import Bounds, check_fields

Batching = Literal["uniform", "padded", "packed"]
"""Sequences of one length without a mask; padded ones with masks; packed ones with positions."""
Tokens = Annotated[int, Bounds(1, 1 << 60)]

MOST_TOKENS = 1 << 26
"""Most tokens in one step."""


def refuse_huge_step(tokens: int, where: str, error: type[MegaTrainError] = PlanError, *, tokens_each: int = 1) -> None:
    """Raise `error` for a step of more than `MOST_TOKENS`. tokens_each: tokens of one of what is counted at `where`."""
    if tokens > MOST_TOKENS:
        fix = f"give {max(1, MOST_TOKENS // tokens_each):,} or less"
        raise error(f"{tokens:,} tokens per step are too many", where=where, fix=fix)


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
    beyond_text: bool = False
    """Whether any micro-batch of any rank brings the model more than ids, a mask and positions: images, say."""
    values_per_token: Annotated[float, Bounds(0)] = 0.0
    """Values of images (pixels times channels) for each token, in the micro-batch that has the most."""

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
