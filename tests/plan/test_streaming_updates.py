"""Updates are streamed where a replay says that it gains, fits and may be page-locked, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.shapes import llama_shape
from megatrain.plan import Plan, Question, find_plan, machine
from megatrain.plan.placement import spread
from megatrain.schedule.passes.pinned_staging import pinned_nbytes

GB = 10**9
MODEL = llama_shape("3B", 12, 4096, vocabulary=32_000)
DESKTOP = replace(machine("rtx-5090"), device_nbytes=12 * GB)
SMALL = Question(MODEL, DESKTOP, 4096, 4096)


def without(question: Question) -> Plan:
    return find_plan(replace(question, overrides={**question.overrides, "streamed_updates": 0.0}))


@pytest.mark.parametrize("clips", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_some_updates_are_streamed_if_compute_waits_for_the_optimizer(clips: bool) -> None:
    asked = replace(SMALL, clips=clips)
    plain, chosen = without(asked), find_plan(asked)
    assert plain.policy.streamed_updates == 0
    assert chosen.policy.streamed_updates > 0
    assert chosen.seconds < 0.99 * plain.seconds
    assert chosen.taken.fits(asked.budgets())
    units = range(len(MODEL.units))
    kept, before = ([u for u in units if plan.policy.placement(u).on_device] for plan in (chosen, plain))
    assert len(kept) <= len(before)  # a layer on the device may make room for what is streamed
    assert all(each == spread(list(MODEL.layers), len(each)) for each in (kept, before))


def test_no_updates_are_streamed_if_compute_never_waits() -> None:
    assert find_plan(replace(SMALL, tokens_per_step=1 << 15, length=1 << 15)).policy.streamed_updates == 0


@pytest.mark.parametrize("share", [0.0, pytest.param(0.25, marks=pytest.mark.slow)])
def test_a_share_set_by_the_user_is_kept(share: float) -> None:
    policy = find_plan(replace(SMALL, overrides={"streamed_updates": share})).policy
    assert policy.streamed_updates == share


def test_streamed_state_is_limited_by_pinnable_memory() -> None:
    plain = without(SMALL)
    locked = pinned_nbytes(plain.timeline.schedule.buffers.values(), "pinned")
    found = find_plan(replace(SMALL, hardware=replace(DESKTOP, pinnable_nbytes=locked)))
    assert (found.policy.transfer, found.policy.streamed_updates) == ("pinned", 0)
