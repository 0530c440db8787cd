"""What is asked of the planner, and what it answers.

Left out: how an answer is found (`search`), and what follows from it (`outlook`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.errors import PlanError
from megatrain.plan.cost import Calibration
from megatrain.schedule import Timeline
from megatrain.schedule.state import save_nbytes
from megatrain.spec import Hardware, ModelSpec, Policy, Precision, Rows, Work

MOST_TOKENS = 1 << 26
"""Tokens per step beyond which nobody trains."""

RESERVE_NBYTES = 1 << 30
"""Memory of each tier that is left to the driver, to kernels, to fragmentation and to the process itself."""


Candidate = tuple[Policy, int]
"""A policy, and the sequences of a micro-batch."""


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for.

    tokens_per_step: of all sequences of a step together. length: tokens of a sequence. clips: by the global norm.
    pinned: fields of `Policy`, and `micro_batch` (sequences), that the user has decided. Budgets are in bytes; `None`
    is what the machine has, less a reserve; 0 of the disk leaves it alone. Raises `PlanError` for tokens or pinned
    fields that cannot be.
    """

    model: ModelSpec
    hardware: Hardware
    tokens_per_step: int
    length: int
    precision: Precision = "bf16"
    clips: bool = True
    pinned: Mapping[str, Any] = field(default_factory=dict)
    device_budget_nbytes: int | None = None
    host_budget_nbytes: int | None = None
    disk_budget_nbytes: int | None = None
    calibration: Calibration | None = None
    rows_are: Rows = "whole"
    """What a micro-batch's sequences are (`Work.rows`)."""
    saves: bool = False
    """Whether checkpoints are written beside steps: what that takes of host memory is part of the plan."""

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.tokens_per_step:
            what = f"{self.tokens_per_step:,} tokens per step of sequences of {self.length:,}"
            raise PlanError(what, where="tokens_per_step", fix="give at least one sequence's tokens")
        if self.tokens_per_step > MOST_TOKENS:
            what = f"{self.tokens_per_step:,} tokens per step are more than anyone trains with"
            raise PlanError(what, where="tokens_per_step", fix=f"give {MOST_TOKENS:,} or less")
        size = self.pinned.get("micro_batch", 1)
        if not isinstance(size, int) or size < 1:
            raise PlanError(f"{size!r} is no number of sequences", where="pinned.micro_batch", fix="give 1 or more")

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return -(-self.tokens_per_step // self.length)

    def budgets(self) -> dict[str, int]:
        """Tier -> bytes that a run may take. A device that shares memory has none of its own."""
        return {tier: usable_nbytes(there) if given is None else given for tier, given, there in self._limits()}

    def limit(self, tier: str) -> str:
        """The budget of a tier in words that tell where it comes from."""
        given, there = next((given, there) for name, given, there in self._limits() if name == tier)
        if given is not None:
            return f"the {there:,} there are" if given == there else f"its budget of {given:,}"
        return f"the {usable_nbytes(there):,} that may be taken of the {there:,} there are"

    def _limits(self) -> list[tuple[str, int | None, int]]:
        """Tier, the bytes that the user allows, if any, and those that there are."""
        hardware = self.hardware
        device = ("device", self.device_budget_nbytes, hardware.device_nbytes)
        host = ("host", self.host_budget_nbytes, hardware.host_nbytes)
        disk = ("disk", self.disk_budget_nbytes, hardware.disk_nbytes or 0)
        return [host, disk] if hardware.shares_memory else [device, host, disk]


@dataclass(frozen=True)
class Estimate:
    """A candidate's price: seconds of a step in steady state, peak bytes by tier, busy seconds by stream.

    late: of the busy seconds, those from the end of the forward pass on.
    """

    seconds: float
    nbytes: Mapping[str, int]
    busy: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)

    def fits(self, budgets: Mapping[str, int]) -> bool:
        return all(self.nbytes[tier] <= budget for tier, budget in budgets.items())

    def short(self, budgets: Mapping[str, int]) -> dict[str, int]:
        """Tier -> bytes that are missing; negative where some are left."""
        return {tier: self.nbytes[tier] - budget for tier, budget in budgets.items()}


@dataclass(frozen=True)
class Plan:
    """The answer: a policy and how a step is cut, with the replayed step and its peak memory by tier."""

    question: Question
    policy: Policy
    work: Work
    timeline: Timeline
    nbytes: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """Of a step in steady state."""
        return self.timeline.seconds

    @property
    def taken(self) -> Estimate:
        """Seconds and bytes, as the replay has found them."""
        return Estimate(self.seconds, self.nbytes)

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch."""
        return self.work.tokens[0] // self.question.length

    @property
    def tokens_per_second(self) -> float:
        return sum(self.work.tokens) / self.seconds

    @property
    def save_nbytes(self) -> int:
        """Part of the host's bytes that checkpoints take beside steps."""
        return save_nbytes(self.question.model, self.policy) if self.question.saves else 0


def usable_nbytes(nbytes: int) -> int:
    """What a run may take of a tier of that size."""
    return nbytes - min(RESERVE_NBYTES, nbytes // 8)
