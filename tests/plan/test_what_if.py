"""Plans of changed questions are found with fewer replays, and hardly slower than by a whole search."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import pytest

from bench.shapes import llama_shape
from megatrain.plan import Plan, Question, estimate, examine, find_plan, machine
from megatrain.plan import search as search_module
from megatrain.plan.question import Candidate, Choice
from megatrain.plan.what_if import faster_plan
from megatrain.spec import Limits

MODEL = llama_shape("1B", 8, 2048, feed_forward=8192, vocabulary=64_000)
LIMITS = Limits(device_nbytes=6 * 10**9, host_nbytes=5 * 10**9, disk_nbytes=10**12)
QUESTION = Question(MODEL, replace(machine("rtx-4090"), disk_nbytes=10**12), 4096, 1024, limits=LIMITS)


@cache
def planned() -> Plan:
    return find_plan(QUESTION)


def replayed(monkeypatch: pytest.MonkeyPatch, like: Plan | None) -> tuple[Plan, set[Candidate]]:
    """The plan without clipping, and all candidates that were replayed for it."""
    seen: set[Candidate] = set()

    def look(question: Question, choice: Choice, micro_batch: int) -> Plan:
        seen.add((choice, micro_batch))
        return examine(question, choice, micro_batch)

    monkeypatch.setattr(search_module, "examine_rounds", look)
    found = faster_plan(replace(QUESTION, clips=False), inf, like)
    assert found
    return found, seen


@pytest.mark.slow
def test_a_plan_like_another_takes_fewer_replays_and_is_hardly_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(each.uses_disk for each in planned().policy.placements)
    (quick, few), (thorough, many) = (replayed(monkeypatch, like) for like in (planned(), None))
    assert 2 * len(few) <= len(many)
    assert quick.policy.disk_staging_slots == planned().policy.disk_staging_slots
    assert quick.taken.fits(QUESTION.budgets())
    assert thorough.seconds * 0.99 <= quick.seconds <= 1.05 * thorough.seconds


def test_no_step_is_shorter_than_its_busiest_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    _, candidates = replayed(monkeypatch, None)
    asked = replace(QUESTION, clips=False)
    for each in candidates:
        assert max(estimate(asked, *each).busy.values()) < 1.001 * examine(asked, *each).seconds
