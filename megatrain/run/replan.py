"""A run's plan: told before it begins, and made again once times are measured.

What a run measures corrects the prices that it was planned with (`Replanner`), and a better plan is taken up between
two steps: all of it once, and what layers keep whenever the bus has become faster or slower. It changes no result: the
numerics stay. It leaves out the first plan (`run`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from megatrain.errors import DiskError, DoesNotFit, OutOfDeviceMemory
from megatrain.plan import Calibration, Choice, Plan, calibrate, contention, examine, find_plan, op_seconds, peak_table
from megatrain.plan.cost import LIKE
from megatrain.plan.refinements import locks_too_much
from megatrain.spec import IN_HOST, Policy
from megatrain.train.engine import Engine
from megatrain.train.events import Planned, Replanned
from megatrain.train.progress import describe_policy
from megatrain.train.schedule_cache import FIXED

WORTH_IT = 0.03
"""Predicted gain below which a plan is not exchanged for another."""

DRIFT = 0.2
"""Of the speed of the bus that the plan was made for: what changes by less is followed by nothing."""

NAMES = tuple(field.name for field in fields(Policy))
MAY_CHANGE = tuple(name for name in NAMES if name not in (*FIXED, "host_threads"))
"""What of a policy is chosen anew. State moves where its placement changes."""

MAY_FOLLOW = ("activations", "activations_by_layer")
"""What is chosen anew while a run goes on: it costs no move of state."""

COPIES = ("FETCH", "GRAD", "RELOAD", "OFFLOAD")

Pace = dict[str, float]
"""Kind of copy -> measured over predicted seconds."""


def foreseen(plan: Plan, engine: Engine, facts: Sequence[tuple[str, str]], step: int) -> Planned:
    """What the plan says of a run that begins after `step` steps, for those who read its metrics."""
    return Planned(
        step,
        engine.structure.name,
        dict(facts) | {"policy": "; ".join(describe_policy(engine.numerics, engine.policy))},
        plan.seconds,
        _by_tier(peak_table(plan)),
        _by_tier(engine.memory_table()),
    )


def _by_tier(table: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    tiers: dict[str, dict[str, int]] = {}
    for (tier, use), nbytes in table.items():
        tiers.setdefault(tier, {})[use] = nbytes
    return tiers


@dataclass
class Replanner:
    """Compares measured op times with the plan's prices, and takes up a plan that is better by them.

    Once, after `warm_up` steps, everything is planned anew. From then on what layers keep follows the bus: where its
    speed has changed in two steps on end, by more than `DRIFT` and to about the same, what is kept is chosen again.
    So a bus that others use recomputes more, an idle one fetches more, and one that flickers changes nothing.
    """

    engine: Engine
    plan: Plan
    warm_up: int = 0
    _pace: Pace | None = field(default=None, init=False)
    """That the plan was made for."""
    _before: Pace | None = field(default=None, init=False)
    """Of the step before, if it had drifted."""

    def __post_init__(self) -> None:
        self.engine.record_timeline = True

    def __call__(self, step: int) -> Replanned | None:
        """To be called after a step. What has been changed, or `None`."""
        timeline = self.engine.timeline
        if timeline is None or step < self.warm_up:
            return None
        question, policy, work = self.plan.question, self.engine.policy, self.plan.work
        if not any(op.kind == "BACKWARD" for op in timeline.schedule.ops):
            return None  # of an evaluation or a sample in between
        price = op_seconds(question.model, self.engine.numerics, policy, work, question.hardware)
        shared = contention(question.model, self.engine.numerics, question.hardware)
        found = calibrate(question.model, timeline, price, shared, one_processor=question.hardware.shares_memory)
        pace = {kind: found.of(kind, "layer") for kind in COPIES if found.knows(kind, "layer")}
        if self._pace is None:
            self._pace = pace
            return self._replan(step, found)
        before, self._before = self._before, pace if _drifted(pace, self._pace) else None
        if self._before is None or before is None or _drifted(pace, before):
            return None
        self._pace, self._before = pace, None
        return self._replan(step, found, MAY_FOLLOW)

    def _replan(self, step: int, found: Calibration, may_change: Sequence[str] = MAY_CHANGE) -> Replanned | None:
        """Take up the best plan by these times whose policy differs in no other fields, if it is worth it."""
        question, policy, work = self.plan.question, self.engine.policy, self.plan.work
        numerics, size = self.engine.numerics, self.plan.micro_batch
        stays = {name: getattr(policy, name) for name in NAMES if name not in may_change}
        fixed = {"micro_batch": size, **asdict(numerics), **stays}
        measured = replace(question, calibration=found, overrides={**question.overrides, **fixed})
        now = examine(measured, Choice(numerics, policy), size)
        better = find_plan(measured)
        gain = 1 - better.seconds / now.seconds
        if gain < WORTH_IT or (locks_too_much(better) and not locks_too_much(now)):
            return None
        try:
            self.engine.adopt(better.policy)
            self.engine.prepare(work)
        except (DoesNotFit, OutOfDeviceMemory, DiskError):  # others may have taken room since; the state is whole
            self.engine.adopt(policy)
            return None
        return Replanned(step, now.seconds, better.seconds, _changes(policy, better.policy))


def _drifted(now: Pace, then: Pace) -> bool:
    """Whether copies take another time; what goes the same way of the bus stands for what was not measured then."""
    pairs = [(now[kind], then.get(kind, then.get(LIKE[kind], now[kind]))) for kind in now]
    return any(not 1 / (1 + DRIFT) <= new / old <= 1 + DRIFT for new, old in pairs)


def _changes(before: Policy, after: Policy) -> str:
    changed = [name for name in NAMES if getattr(before, name) != getattr(after, name)]
    return ", ".join(f"{name} {_word(getattr(before, name))} -> {_word(getattr(after, name))}" for name in changed)


def _word(value: object) -> str:
    """Rows by what layers keep, placements by how many units are not in host memory."""
    if not isinstance(value, tuple):
        return str(value)
    if value and isinstance(value[0], tuple):
        counts = Counter(keep for row in value for keep in row)
        return " and ".join(f"{count / counts.total():.0%} {keep}" for keep, count in counts.most_common())
    return f"{sum(each != IN_HOST for each in value)} units" if value else "none"
