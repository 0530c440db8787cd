"""A run's plan: told before it begins, and made again once times are measured.

What a run measures corrects the prices that it was planned with (`Replanner`), and a better plan is taken up between
two steps. It changes no result: only what no number depends on may differ. It leaves out the first plan (`run`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatrain.errors import DiskError, DoesNotFit, OutOfDeviceMemory
from megatrain.plan import Plan, calibrate, examine, find_plan, op_seconds, peak_table
from megatrain.spec import IN_HOST, Policy
from megatrain.train.engine import Engine
from megatrain.train.events import Planned, Replanned
from megatrain.train.progress import describe_policy

WORTH_IT = 0.03
"""Predicted gain below which a plan is not exchanged for another."""

MAY_CHANGE = ("activations", "activation_rows", "weight_slots", "grad_slots", "shard_nbytes", "homes", "stage_slots")
"""Fields of a policy that a plan chooses anew: no number depends on them. State moves where its home changes."""


def foreseen(plan: Plan, engine: Engine, facts: Sequence[tuple[str, str]], step: int) -> Planned:
    """What the plan says of a run that begins after `step` steps, for those who read its metrics."""
    return Planned(
        step,
        engine.spec.name,
        dict(facts) | {"policy": "; ".join(describe_policy(engine.policy))},
        plan.seconds,
        _by_tier(peak_table(plan)),
        _by_tier(engine.memory_table()),
    )


def _by_tier(table: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    tiers: dict[str, dict[str, int]] = {}
    for (tier, owner), nbytes in table.items():
        tiers.setdefault(tier, {})[owner] = nbytes
    return tiers


@dataclass
class Replanner:
    """Compares measured op times with the plan's prices, once, and takes up a plan that is better by them."""

    engine: Engine
    plan: Plan

    def __call__(self, step: int) -> Replanned | None:
        """To be called after a step. What has been changed, or `None`."""
        timeline = self.engine.timeline
        if timeline is None:
            return None
        question, policy, work = self.plan.question, self.engine.policy, self.plan.work
        price = op_seconds(question.model, policy, work, question.hardware)
        fixed = {name: getattr(policy, name) for name in ("loss_chunk_tokens", "mlp_chunk_tokens")}
        measured = replace(
            question,
            calibration=calibrate(question.model, timeline, price, one_processor=question.hardware.shares_memory),
            pinned={**question.pinned, **fixed, "micro_batch": self.plan.micro_batch},
        )
        now = examine(measured, policy, self.plan.micro_batch)
        better = find_plan(measured)
        gain = 1 - better.seconds / now.seconds
        if gain < WORTH_IT:
            return None
        adopted = replace(policy, **{name: getattr(better.policy, name) for name in MAY_CHANGE})
        try:
            self.engine.adopt(adopted)
            self.engine.prepare(work)
        except (DoesNotFit, OutOfDeviceMemory, DiskError):  # others may have taken room since; the state is whole
            self.engine.adopt(policy)
            return None
        return Replanned(step, now.seconds, better.seconds, _changes(policy, adopted))


def _changes(before: Policy, after: Policy) -> str:
    changed = [name for name in MAY_CHANGE if getattr(before, name) != getattr(after, name)]
    return ", ".join(f"{name} {_word(getattr(before, name))} -> {_word(getattr(after, name))}" for name in changed)


def _word(value: object) -> str:
    """Rows by what layers keep, homes by how many units have one of their own."""
    if not isinstance(value, tuple):
        return str(value)
    if value and isinstance(value[0], tuple):
        return f"graphs of {value.count(('graph',))} of {len(value)} layers"
    return f"{sum(home != IN_HOST for home in value)} units" if value else "none"
