"""The planner's input, `Question`, and its answer, `Plan`.

Plans are found by `search` and analysed by `analysis`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from megatrain.errors import PlanError
from megatrain.formatting import at_most
from megatrain.plan.cost import Calibration
from megatrain.schedule import Timeline
from megatrain.schedule.ops import Stream
from megatrain.schedule.passes.state_buffers import save_nbytes
from megatrain.schedule.replay import DISK_STREAMS
from megatrain.spec import Batching, Hardware, Limits, ModelSpec, Numerics, Policy, Precision, Work
from megatrain.spec.work import refuse_huge_step

RESERVE_NBYTES = 1 << 30
"""Memory of each tier that is left to the driver, kernels, fragmentation and the process itself."""


VALUE_NBYTES = 4
"""Bytes of a value of an image: processors give float32."""

NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Choice:
    """How a step is run: the numerics, which affect results and are fixed for a run, and the policy, which does not
    affect them."""

    numerics: Numerics
    policy: Policy
    _hash: int = field(init=False, repr=False, compare=False)
    """A policy has a placement per unit, and a search looks each choice up several times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.numerics, self.policy)))

    def __hash__(self) -> int:
        return self._hash

    def get(self, name: str) -> Any:
        """A field of the numerics or of the policy."""
        return getattr(self.numerics if name in NUMERICS else self.policy, name)

    def change(self, **fields: Any) -> Choice:
        """A copy with some fields of the numerics or of the policy replaced."""
        of_numerics = {name: fields.pop(name) for name in list(fields) if name in NUMERICS}
        numerics = replace(self.numerics, **of_numerics) if of_numerics else self.numerics
        return Choice(numerics, replace(self.policy, **fields) if fields else self.policy)


NUMERICS = frozenset(field.name for field in fields(Numerics))


@dataclass(frozen=True)
class Question:
    """What to plan for.

    tokens_per_step: of all sequences of a step.
    length: tokens per sequence.
    clips: whether gradients are clipped by their global norm.
    overrides: fields of `Numerics` and `Policy`, and `micro_batch` (sequences), that the planner must not choose. It
    chooses all other fields of the policy, and of the numerics only chunk sizes.
    limits: without one, a tier's limit is what the machine has, less `RESERVE_NBYTES`.

    Raises `PlanError` if `tokens_per_step`, `length` or the `micro_batch` override is invalid.
    """

    model: ModelSpec
    hardware: Hardware
    tokens_per_step: int
    length: int
    precision: Precision = "bf16"
    clips: bool = True
    overrides: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = NO_LIMITS
    calibration: Calibration | None = None
    batching: Batching = "uniform"
    """How sequences form a micro-batch (`Work.batching`)."""
    values_per_token: float = 0.0
    """Values of images for each token (`Work.values_per_token`)."""
    read_ahead: int = 0
    """How many steps' images are in host memory at a time."""
    saves: bool = False
    """Whether checkpoints are written during training. The plan includes the host memory for that."""
    parts: float = 1.0
    """Sequences in a step of all ranks over those of this question, which is for one of them if they are several
    (`ranks.question_of_one`); its model, machine and limits are then the share of one rank, too."""
    asked_model: ModelSpec | None = field(default=None, compare=False, repr=False)
    """The model as it was asked about, if on this machine it is another: a cpu may have no fused kernel for its
    attention."""

    def __post_init__(self) -> None:
        if self.hardware.shares_memory:
            object.__setattr__(self, "asked_model", self.asked_model or self.model)
            object.__setattr__(self, "model", self.model.on_a_cpu())
        if not 1 <= self.length <= self.tokens_per_step:
            what = f"{self.tokens_per_step:,} tokens per step of sequences of {self.length:,}"
            raise PlanError(what, where="tokens_per_step", fix="give at least one sequence's tokens")
        refuse_huge_step(self.tokens_per_step, "tokens_per_step")
        size = self.overrides.get("micro_batch", 1)
        if not isinstance(size, int) or size < 1:
            raise PlanError(
                f"{size!r} is not a number of sequences", where="overrides.micro_batch", fix="give 1 or more"
            )

    @cached_property
    def cost_key(self) -> CostKey:
        return CostKey(self)

    @property
    def sequences(self) -> int:
        """Sequences per step."""
        return -(-self.tokens_per_step // self.length)

    @property
    def tokens_of_all(self) -> int:
        """Tokens in a step of all ranks, in whole sequences."""
        return round(self.parts * self.sequences * self.length)

    @property
    def images_nbytes(self) -> int:
        """Bytes of images in host memory: of steps that are read ahead."""
        return round(self.read_ahead * self.sequences * self.length * self.values_per_token * VALUE_NBYTES)

    def budgets(self) -> dict[str, int]:
        """Tier -> bytes that a run may use, besides its images in host memory. A device that shares memory with the
        host has no entry."""
        return {
            tier: (usable_nbytes(total) if limit is None else limit) - (self.images_nbytes if tier == "host" else 0)
            for tier, limit, total in self._limits()
        }

    def limit(self, tier: str) -> str:
        """The budget of a tier, and where it comes from, in words."""
        limit, total = next((limit, total) for name, limit, total in self._limits() if name == tier)
        if limit is not None:
            return f"the {at_most(total)} available" if limit == total else f"its budget of {at_most(limit)}"
        return f"the {at_most(usable_nbytes(total))} usable of {at_most(total)}"

    def _limits(self) -> list[tuple[str, int | None, int]]:
        """(tier, the user's limit in bytes, bytes of the machine)"""
        hardware = self.hardware
        totals = hardware.capacities
        return [(tier, self.limits.of(tier), nbytes) for tier, nbytes in totals.items()][hardware.shares_memory :]


class CostKey:
    """A cache key: equal for questions whose candidates have the same costs.

    Sizes of memory and overrides are not part of it, so questions that differ in them share estimates.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        rates = replace(question.hardware, name="", device_nbytes=0, host_nbytes=0, disk_nbytes=None, sources=())
        rates = replace(rates, disk_endurance_nbytes=None, pinnable_nbytes=None)
        measured = question.calibration and tuple(question.calibration.factors.items())
        step = question.sequences, question.length, question.batching, question.saves, question.values_per_token
        self._key = question.model, rates, measured, step
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CostKey) and self._key == other._key


@dataclass(frozen=True)
class Estimate:
    """The cost of a candidate.

    seconds: of a step in steady state.
    nbytes: tier -> peak bytes.
    busy: stream -> seconds in which it is busy.
    late: stream -> the part of these after the forward pass.
    loss: seconds of compute between the passes, during which other streams have hardly anything to do.
    movable: fraction of a pass's disk time that could be moved to the other pass, forward or backward.
    rounds: of the step.
    further: the parts of `busy` and of `late` that all rounds but one take. What is done once in a step, such as
    updates, is in the first forward pass or in the last backward pass.
    """

    seconds: float
    nbytes: Mapping[str, int]
    busy: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)
    loss: float = 0.0
    movable: float = 0.0
    rounds: float = 1.0
    further: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})

    @property
    def disk_seconds(self) -> float:
        return max(self.busy.get(stream, 0.0) for stream in DISK_STREAMS)

    @property
    def further_share(self) -> float:
        """All rounds but one, over all."""
        return 1.0 - 1.0 / self.rounds

    def passes(self) -> list[dict[str, float]]:
        """Stream -> seconds that have to be in the forward pass, without the loss; and the same after the loss. With
        several rounds these are the passes with what is done once, and then come the sums of all other passes."""
        (busy, late), share = self.further, self.further_share
        if not share:
            return self._passes(self.busy, self.late, self.loss)
        once = plus(self.busy, busy, -1.0), plus(self.late, late, -1.0)
        return self._passes(*once, (1 - share) * self.loss) + self._passes(busy, late, share * self.loss)

    def _passes(self, busy: Mapping[str, float], late: Mapping[str, float], loss: float) -> list[dict[str, float]]:
        bound = {stream: 1.0 - self.movable if stream in DISK_STREAMS else 1.0 for stream in busy}
        behind = {stream: share * late.get(stream, 0.0) for stream, share in bound.items()}
        before = {stream: share * busy[stream] - behind[stream] for stream, share in bound.items()}
        return [before | {"compute": before.get("compute", 0.0) - loss}, behind]

    def least_seconds(self) -> float:
        """Seconds that the step takes at least: those of the loss and of the busiest stream of each pass, which do not
        overlap, and all of the disk's."""
        return max(self.loss + sum(max(part.values(), default=0.0) for part in self.passes()), self.disk_seconds)

    def fits(self, budgets: Mapping[str, int]) -> bool:
        return all(self.nbytes[tier] <= budget for tier, budget in budgets.items())

    def short(self, budgets: Mapping[str, int]) -> dict[str, int]:
        """Tier -> bytes beyond the budget, negative if there is room left."""
        return {tier: self.nbytes[tier] - budget for tier, budget in budgets.items()}


def plus(busy: Mapping[str, float], more: Mapping[str, float], times: float = 1.0) -> dict[str, float]:
    """Stream -> seconds of `busy` and so many times those of `more`."""
    return {stream: busy.get(stream, 0.0) + times * more.get(stream, 0.0) for stream in {**busy, **more}}


@dataclass(frozen=True)
class Plan:
    """The answer: the choice, the micro-batches of a step, its replay, and its peak bytes by tier.

    left_out: rounds that the replay leaves out since all are alike. What it says of a step is extrapolated from the
    part between the losses of its last two rounds.
    """

    question: Question
    choice: Choice
    work: Work
    timeline: Timeline
    nbytes: Mapping[str, int]
    left_out: int = 0

    @property
    def numerics(self) -> Numerics:
        return self.choice.numerics

    @property
    def policy(self) -> Policy:
        return self.choice.policy

    @property
    def seconds(self) -> float:
        """Of a step in steady state."""
        seconds, ends = self.timeline.seconds, self.timeline.ends
        if self.left_out:
            first, last = self._losses_of_last_rounds
            seconds += self.left_out * (ends[last] - ends[first])
        return seconds

    @cached_property
    def _losses_of_last_rounds(self) -> tuple[int, int]:
        """Numbers of the ops that end the losses of the replay's last two rounds."""
        losses = {op.micro: place for place, op in enumerate(self.timeline.schedule.ops) if op.kind == "LOSS"}
        last = max(losses)
        return losses[last - self.policy.micro_batches_per_round], losses[last]

    def _of_ops(self, of: Callable[[int], float]) -> float:
        """The sum of `of` (number of an op) over the ops of a step."""
        total = sum(map(of, range(len(self.timeline.ends))))
        if self.left_out:
            first, last = self._losses_of_last_rounds
            total += self.left_out * sum(map(of, range(first + 1, last + 1)))
        return total

    def busy_seconds(self, stream: Stream) -> float:
        """Seconds of a step in which the stream has work."""
        ops, starts, ends = self.timeline.schedule.ops, self.timeline.starts, self.timeline.ends
        return self._of_ops(lambda each: ends[each] - starts[each] if ops[each].stream == stream else 0.0)

    def stall_seconds(self) -> float:
        """Seconds of a step in which compute waits."""
        return self.seconds - self.busy_seconds("compute")

    @property
    def taken(self) -> Estimate:
        """Seconds and bytes according to the replay."""
        return Estimate(self.seconds, self.nbytes)

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch."""
        return self.work.tokens[0] // self.question.length

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.question.tokens_of_all / self.seconds

    @property
    def written_nbytes(self) -> int:
        """Bytes that a step writes to the disk."""
        ops = self.timeline.schedule.ops
        return round(self._of_ops(lambda each: ops[each].nbytes if ops[each].kind == "WRITE" else 0))

    @property
    def read_from_files_nbytes(self) -> int:
        """Bytes that a step reads from the model's own files."""
        schedule = self.timeline.schedule
        reads = [access for op in schedule.ops if op.kind == "READ" for access in op.reads]
        return sum(each.stop - each.start for each in reads if schedule.buffers[each.buffer].tier == "file")

    @property
    def save_nbytes(self) -> int:
        """Bytes of host memory for checkpoints that are written during training."""
        return save_nbytes(self.question.model, self.numerics, self.policy) if self.question.saves else 0


def usable_nbytes(nbytes: int) -> int:
    """Bytes that a run may use of a tier of this size."""
    return nbytes - min(RESERVE_NBYTES, nbytes // 8)
