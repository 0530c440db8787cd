"""A call in phases costs what its work and its switches cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.shapes import llama_shape
from megatrain.plan import machine
from megatrain.plan.cost import PHASED_CALL_KERNELS, SWITCH_KERNELS, op_seconds
from megatrain.schedule import build_step
from megatrain.spec import ModelSpec, Numerics, Policy, Work


def model() -> ModelSpec:
    return llama_shape("3B", 8, 4096, feed_forward=11_008, vocabulary=64_000)


def test_a_phased_call_costs_its_work_and_switches() -> None:
    of, work, hardware = model(), Work((512,), 512), machine("h200")
    policy = Policy(shard_nbytes=64 << 20)
    totals = []
    for each in (policy, replace(policy, wait_for="shard")):
        price, ops = op_seconds(of, Numerics(), each, work, hardware), build_step(of, Numerics(), each, work).ops
        calls = [op for op in ops if op.stream == "compute" and op.unit == 3]
        turns = (
            sum(op.shard >= 0 for op in calls) * SWITCH_KERNELS
            + sum(op.shard == 0 for op in calls) * PHASED_CALL_KERNELS
        )
        assert bool(turns) == (each.wait_for == "shard")
        totals.append(sum(price(op) for op in calls) - turns * (hardware.launch_seconds or 0.0))
    assert totals[0] == pytest.approx(totals[1])
