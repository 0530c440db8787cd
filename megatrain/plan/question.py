"""The planner's input, `Question`, and its answer, `Plan`.

Left out: how an answer is found (`search`), and what follows from it (`analysis`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from megatrain.errors import PlanError
from megatrain.plan.cost import Calibration
from megatrain.schedule import Timeline
from megatrain.schedule.passes.state_buffers import save_nbytes
from megatrain.spec import Batching, Hardware, Limits, ModelSpec, Numerics, Policy, Precision, Work

MOST_TOKENS = 1 << 26
"""Tokens per step beyond which nobody trains."""

RESERVE_NBYTES = 1 << 30
"""Memory of each tier that is left to the driver, to kernels, to fragmentation and to the process itself."""


OPEN = Limits()


@dataclass(frozen=True, slots=True)
class Choice:
    """How a step may be run: what its numbers depend on, chosen when a run begins, and what they do not."""

    numerics: Numerics
    policy: Policy

    def __post_init__(self) -> None:
        self.policy.refuse_contradictions(self.numerics)

    def get(self, name: str) -> Any:
        """A field of either."""
        return getattr(self.numerics if name in NUMERICS else self.policy, name)

    def change(self, **fields: Any) -> Choice:
        """With other fields, whichever of the two has them."""
        rounding = {name: fields.pop(name) for name in list(fields) if name in NUMERICS}
        numerics = replace(self.numerics, **rounding) if rounding else self.numerics
        return Choice(numerics, replace(self.policy, **fields) if fields else self.policy)


NUMERICS = frozenset(field.name for field in fields(Numerics))

Candidate = tuple[Choice, int]
"""How a step may be run, and the sequences of a micro-batch."""


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for.

    tokens_per_step: of all sequences of a step together. length: tokens of a sequence. clips: by the global norm.
    pinned: fields of `Numerics` and `Policy`, and `micro_batch` (sequences), that are decided; the planner may choose
    the others, of the numerics chunks alone. Where limits are open, they are what the machine has, less a reserve.
    Raises `PlanError` for tokens or pinned fields that cannot be.
    """

    model: ModelSpec
    hardware: Hardware
    tokens_per_step: int
    length: int
    precision: Precision = "bf16"
    clips: bool = True
    overrides: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = OPEN
    calibration: Calibration | None = None
    batching: Batching = "uniform"
    """What a micro-batch's sequences are (`Work.batching`)."""
    saves: bool = False
    """Whether checkpoints are written beside steps: what that takes of host memory is part of the plan."""
    parts: float = 1.0
    """So many times as many sequences a step of all ranks has, where the question is that of one of them
    (`ranks.question_of_one`); model, machine and limits are its own then, too."""

    def __post_init__(self) -> None:
        if self.hardware.shares_memory:
            object.__setattr__(self, "model", self.model.on_a_cpu())
        if not 1 <= self.length <= self.tokens_per_step:
            what = f"{self.tokens_per_step:,} tokens per step of sequences of {self.length:,}"
            raise PlanError(what, where="tokens_per_step", fix="give at least one sequence's tokens")
        if self.tokens_per_step > MOST_TOKENS:
            what = f"{self.tokens_per_step:,} tokens per step are more than anyone trains with"
            raise PlanError(what, where="tokens_per_step", fix=f"give {MOST_TOKENS:,} or less")
        size = self.overrides.get("micro_batch", 1)
        if not isinstance(size, int) or size < 1:
            raise PlanError(f"{size!r} is no number of sequences", where="overrides.micro_batch", fix="give 1 or more")

    @cached_property
    def priced_alike(self) -> PricedAlike:
        return PricedAlike(self)

    @property
    def sequences(self) -> int:
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
        there = {"device": hardware.device_nbytes, "host": hardware.host_nbytes, "disk": hardware.disk_nbytes or 0}
        return [(tier, self.limits.of(tier), nbytes) for tier, nbytes in there.items()][hardware.shares_memory :]


class PricedAlike:
    """A question as far as it decides what a candidate takes: how much memory there is and what else may be chosen do
    not count, so that what one question has found out is known to the next."""

    def __init__(self, question: Question) -> None:
        self.question = question
        machine = replace(question.hardware, name="", device_nbytes=0, host_nbytes=0, disk_nbytes=None, sources=())
        machine = replace(machine, disk_endurance_nbytes=None, pinnable_nbytes=None)
        measured = question.calibration and tuple(question.calibration.factors.items())
        steps = question.sequences, question.length, question.batching, question.saves
        self._key = question.model, machine, measured, steps
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PricedAlike) and self._key == other._key


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
    """The answer: what to run a step by and how a step is cut, with the replayed step and its peak memory by tier."""

    question: Question
    choice: Choice
    work: Work
    timeline: Timeline
    nbytes: Mapping[str, int]

    @property
    def numerics(self) -> Numerics:
        return self.choice.numerics

    @property
    def policy(self) -> Policy:
        return self.choice.policy

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
        """Of all ranks together."""
        return self.question.parts * sum(self.work.tokens) / self.seconds

    @property
    def written_nbytes(self) -> int:
        """Bytes that a step writes to the disk."""
        return sum(op.nbytes for op in self.timeline.schedule.ops if op.kind == "WRITE")

    @property
    def read_from_files_nbytes(self) -> int:
        """Bytes that a step reads from the model's own files."""
        schedule = self.timeline.schedule
        reads = [access for op in schedule.ops if op.kind == "READ" for access in op.reads]
        return sum(each.stop - each.start for each in reads if schedule.buffers[each.buffer].tier == "file")

    @property
    def save_nbytes(self) -> int:
        """Part of the host's bytes that checkpoints take beside steps."""
        return save_nbytes(self.question.model, self.numerics, self.policy) if self.question.saves else 0


def usable_nbytes(nbytes: int) -> int:
    """What a run may take of a tier of that size."""
    return nbytes - min(RESERVE_NBYTES, nbytes // 8)
