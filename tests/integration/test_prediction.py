"""What a plan predicts is what runs: peak bytes on the cpu and the simulated device, and seconds on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.prediction import Case, allocated_nbytes, fields, policy_of
from megatrain import Engine
from megatrain.device.cpu import CpuDevice
from megatrain.device.sim import SimDevice
from megatrain.plan import Choice, Plan, Question, examine, op_seconds
from megatrain.schedule import Op
from megatrain.schedule.passes.workspace import beside_nbytes
from megatrain.spec import Hardware, Numerics, Policy
from megatrain.spec.hardware import AttentionRate, ElementwiseRate, ProductRate

CASES = (
    Case(64, 3, "fp32", length=64, vocabulary=512),
    Case(64, 3, "fp32", "keep", length=64, vocabulary=512),
    Case(64, 6, length=32, rows=6, vocabulary=512),
    Case(64, 2, activations="keep", length=32, vocabulary=2048),
    Case(128, 2, length=64, vocabulary=512),
    Case(128, 2, activations="keep", length=128, vocabulary=512),
    Case(128, 4, "fp32", "keep", rows=2, micro_batch=1, length=128, clips=False),
    Case(128, 3, "fp32", rows=3, micro_batch=1, length=96),
    Case(192, 2, "fp32", rows=4, micro_batch=4, length=32, clips=False),
    Case(192, 2, rows=2, micro_batch=2, length=64, clips=False, vocabulary=512),
)
LONG_CASES = (
    (Case(256, 2, rows=2, micro_batch=1, length=256, vocabulary=512), 64),
    (Case(256, 2, "fp32", rows=2, micro_batch=1, length=256, vocabulary=512), 128),
    (Case(128, 3, "fp32", rows=3, micro_batch=3, length=128, vocabulary=512), 64),
    (Case(128, 2, "fp32", "keep", rows=1, micro_batch=1, length=512, vocabulary=512), 64),
)
"""And how many tokens token-wise parts compute at one time."""


QUICK = (3, 7, 9, 13)
"""Places of what is asked in the quick suite: each precision kept and recomputed, one micro-batch and two, a chunk."""


def all_of(cases: Sequence[Any], quick: Container[int]) -> list[Any]:
    """Parameters, of which those outside `quick` are for the thorough suite."""
    return [pytest.param(each, marks=() if place in quick else pytest.mark.slow) for place, each in enumerate(cases)]


CPU = Hardware("cpu", 1 << 40, 1 << 40, 1e9, 1e9, 1e11, 1e10, shares_memory=True, fresh_bandwidth=2e9)
ACCELERATOR = Hardware(
    "accelerator",
    1 << 40,
    1 << 40,
    fetch_bandwidth=2e9,
    grad_bandwidth=1e9,
    flops=1e11,
    host_bandwidth=1e10,
    products=(ProductRate("bf16", 64, 64, 64, 1e10), ProductRate("fp32", 64, 64, 64, 5e9)),
    attention=(AttentionRate("bf16", 64, 64, 1e10, 5e9),),
    elementwise=(ElementwiseRate("fp32", 1e9, 4e8),),
    device_bandwidth=1e10,
    launch_seconds=1e-5,
)


def step(engine: Engine, case: Case) -> Callable[[], object]:
    """A step over the case's micro-batches, whose memory is there already."""
    shape = case.micro_batch, case.length
    ids = [torch.randint(case.vocabulary, shape) for _ in range(case.rows // case.micro_batch)]
    batches = [{"input_ids": each, "labels": each} for each in ids]
    return lambda: engine.step(batches)


def open_engine(case: Case, numerics: Numerics, policy: Policy, device: CpuDevice | SimDevice) -> Engine:
    clip = 1.0 if case.clips else None
    return Engine.from_config(
        fields(case), device=device, numerics=numerics, policy=policy, max_grad_norm=clip, verify=False
    )


def plan_of(engine: Engine, case: Case, policy: Policy, hardware: Hardware) -> Plan:
    tokens = case.rows * case.length
    question = Question(engine.parts.ported.spec, hardware, tokens, case.length, case.precision, case.clips)
    return examine(question, Choice(engine.numerics, policy), case.micro_batch)


@pytest.mark.few(2)
@pytest.mark.parametrize("chunked", all_of([*((case, 0) for case in CASES), *LONG_CASES], QUICK), ids=str)
def test_on_the_cpu_the_predicted_peak_is_not_exceeded_and_within_five_percent(chunked: tuple[Case, int]) -> None:
    """Of all that the ledger knows of and all that torch allocates beside it, autograd's graphs included."""
    case, chunk = chunked
    device, policy = CpuDevice(), policy_of(case)
    numerics = Numerics(case.precision, mlp_chunk_tokens=chunk)
    with open_engine(case, numerics, policy, device) as engine:
        predicted = plan_of(engine, case, policy, CPU).nbytes
        one = step(engine, case)
        one()
        real = allocated_nbytes(one) + sum(engine.diagnostics.memory_table().values())
    device.close()
    assert real <= predicted["host"] <= 1.05 * real + _spared(case, policy)


def _spared(case: Case, policy: Policy) -> int:
    """What is counted for products in bfloat16 and some processors do not take: packed operands, and a float32 sum."""
    if case.precision == "fp32":
        return 0
    inner, tokens = 4 * case.hidden, case.micro_batch * case.length
    largest = max(case.hidden * inner, max(inner, case.vocabulary) * max(case.hidden, tokens))
    return beside_nbytes(Numerics(), policy) + 4 * largest


@pytest.mark.parametrize(
    ("tokens", "width", "out"),
    [
        (8, 512, 512),
        (64, 64, 512),
        (512, 64, 64),
        (64, 1024, 2048),
        pytest.param(2048, 2048, 512, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bfloat16_matmul_workspace_is_within_the_counted_size(tokens: int, width: int, out: int, threads: int) -> None:
    rows, weights = torch.ones(tokens, width).bfloat16(), torch.ones(out, width).bfloat16()
    gradient = torch.ones(tokens, out).bfloat16()
    products = {
        "forward": (lambda: torch.nn.functional.linear(rows, weights), tokens * out),
        "input gradient": (lambda: gradient @ weights, tokens * width),
        "weight gradient": (lambda: gradient.t() @ rows, out * width),
    }
    counted = beside_nbytes(Numerics("bf16"), Policy(shares_memory=True, host_threads=threads))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, (product, numel) in products.items():
            assert allocated_nbytes(product) <= (2 + 4) * numel + counted, name
    finally:
        torch.set_num_threads(before)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", all_of(CASES, (2, 8)), ids=str)
def test_simulated_time_and_memory_match_the_prediction(case: Case) -> None:
    case = replace(case, vocabulary=512)  # the simulator looks at all of a table, time and again
    policy = replace(policy_of(case), shares_memory=False)
    price: list[Callable[[Op], float]] = []
    device = SimDevice(3, cost=lambda task: price[0](task) if isinstance(task, Op) and price else 0.0)
    with open_engine(case, Numerics(case.precision), policy, device) as engine:
        plan = plan_of(engine, case, policy, ACCELERATOR)
        price.append(op_seconds(engine.parts.ported.spec, engine.numerics, policy, plan.work, ACCELERATOR))
        one = step(engine, case)
        one()
        one()
        timeline, held = engine.diagnostics.timeline, engine.diagnostics.memory_table()
    device.close()
    assert timeline is not None
    assert timeline.seconds == pytest.approx(plan.seconds, rel=0.01)
    for tier in ("device", "host"):
        ledger = sum(nbytes for (of, _), nbytes in held.items() if of == tier)
        assert ledger == plan.timeline.schedule.arena_nbytes(tier)  # type: ignore[arg-type]
        assert ledger <= plan.nbytes[tier]
    assert plan.nbytes["host"] <= 1.05 * ledger
