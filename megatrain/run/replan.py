"""Re-plan a run with measured op times.

Measured times correct the predictions of the plan, and `Replanner` switches to a better plan between two steps: the
whole policy once after warm-up, and afterwards only what layers keep, whenever the bus becomes faster or slower.
Results do not change, because the numerics stay the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from megatrain.errors import DiskError, DoesNotFit, OutOfDeviceMemory
from megatrain.plan import Calibration, Choice, Plan, calibrate, contention, examine, find_plan, op_seconds
from megatrain.plan.cost import SAME_DIRECTION
from megatrain.plan.refinements import locks_too_much
from megatrain.spec import IN_HOST, Policy
from megatrain.train.engine import Engine
from megatrain.train.events import Replanned
from megatrain.train.schedule_cache import FIXED

WORTH_IT = 0.03
"""Smallest predicted gain for which the plan is replaced."""

DRIFT = 0.2
"""Relative change of the bus speed below which nothing is re-planned."""

NAMES = tuple(field.name for field in fields(Policy))
MAY_CHANGE = tuple(name for name in NAMES if name not in (*FIXED, "host_threads"))
"""Policy fields that may change in the first re-plan. State is moved if its placement changes."""

MAY_FOLLOW = ("activations", "activations_by_layer")
"""Policy fields that may change later, since no state has to move."""

COPIES = ("FETCH", "GRAD", "RELOAD", "OFFLOAD")

Pace = dict[str, float]
"""Kind of copy -> measured seconds relative to predicted."""


@dataclass
class Replanner:
    """Compares measured op times with the plan's predictions, and switches to a better plan.

    After `warm_up` steps the whole policy is planned again, once. From then on only what layers keep is re-planned, if
    the bus speed changes by more than `DRIFT` and stays there for two steps in a row: a busy bus leads to more
    recomputation, an idle one to more offloading, and short fluctuations to no change.
    """

    engine: Engine
    plan: Plan
    warm_up: int = 0
    _pace: Pace | None = field(default=None, init=False)
    """Bus speed that the current plan assumes."""
    _before: Pace | None = field(default=None, init=False)
    """Bus speed of the previous step, if it had drifted."""

    def __post_init__(self) -> None:
        self.engine.diagnostics.record_timeline = True

    def __call__(self, step: int) -> Replanned | None:
        """Call after each step. Returns the change of plan, or `None`."""
        timeline = self.engine.diagnostics.timeline
        if timeline is None or step < self.warm_up:
            return None
        question, policy, work = self.plan.question, self.engine.policy, self.plan.work
        if not any(op.kind == "BACKWARD" for op in timeline.schedule.ops):
            return None  # the timeline is of an evaluation or a sample
        price = op_seconds(question.model, self.engine.numerics, policy, work, question.hardware)
        shared = contention(question.model, self.engine.numerics, question.hardware)
        measured = calibrate(question.model, timeline, price, shared, one_processor=question.hardware.shares_memory)
        pace = {kind: measured.of(kind, "layer") for kind in COPIES if measured.knows(kind, "layer")}
        if self._pace is None:
            self._pace = pace
            return self._replan(step, measured)
        before, self._before = self._before, pace if _drifted(pace, self._pace) else None
        if self._before is None or before is None or _drifted(pace, before):
            return None
        self._pace, self._before = pace, None
        return self._replan(step, measured, MAY_FOLLOW)

    def _replan(self, step: int, times: Calibration, may_change: Sequence[str] = MAY_CHANGE) -> Replanned | None:
        """Switch to the best plan by these times that differs only in `may_change`, if the gain is large enough."""
        question, policy, work = self.plan.question, self.engine.policy, self.plan.work
        numerics, size = self.engine.numerics, self.plan.micro_batch
        stays = {name: getattr(policy, name) for name in NAMES if name not in may_change}
        fixed = {"micro_batch": size, **asdict(numerics), **stays}
        measured = replace(question, calibration=times, overrides={**question.overrides, **fixed})
        now = examine(measured, Choice(numerics, policy), size)
        better = find_plan(measured)
        gain = 1 - better.seconds / now.seconds
        if gain < WORTH_IT or (locks_too_much(better) and not locks_too_much(now)):
            return None
        try:
            self.engine.adopt(better.policy)
            self.engine.parts.prepare(work)
        except (DoesNotFit, OutOfDeviceMemory, DiskError):  # others may have taken the memory; the state is intact
            self.engine.adopt(policy)
            return None
        return Replanned(step, now.seconds, better.seconds, _changes(policy, better.policy))


def _drifted(now: Pace, then: Pace) -> bool:
    """Whether copy times changed; a kind not measured then is compared with another in the same direction."""
    pairs = [(now[kind], then.get(kind, then.get(SAME_DIRECTION[kind], now[kind]))) for kind in now]
    return any(not 1 / (1 + DRIFT) <= new / old <= 1 + DRIFT for new, old in pairs)


def _changes(before: Policy, after: Policy) -> str:
    changed = [name for name in NAMES if getattr(before, name) != getattr(after, name)]
    return ", ".join(f"{name} {_word(getattr(before, name))} -> {_word(getattr(after, name))}" for name in changed)


def _word(value: object) -> str:
    """A policy value in words: activation rows by what layers keep, placements by the units not in host memory."""
    if not isinstance(value, tuple):
        return str(value)
    if value and isinstance(value[0], tuple):
        counts = Counter(keep for row in value for keep in row)
        return " and ".join(f"{count / counts.total():.0%} {keep}" for keep, count in counts.most_common())
    return f"{sum(each != IN_HOST for each in value)} units" if value else "none"
