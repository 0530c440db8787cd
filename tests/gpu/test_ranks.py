"""On GPUs: two ranks, a process and a device each, train as ranks on the cpu do.

On stand-ins gloo carries what NCCL would (`tests.rank_processes`), and each rank tells which accesses waited for
nothing. Real ones are asked where there are two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatrain.dist import World
from megatrain.errors import MegaTrainError
from megatrain.schedule import Schedule
from megatrain.spec import Policy
from megatrain.train import schedule_cache
from tests import standin_cuda
from tests.integration.test_ranks import MUON, POLICIES, SHARDS, UNCLIPPED, Trained, batches_of, of_rank, same, trained
from tests.rank_processes import STANDIN, RankProcesses
from tests.tiny import tiny_model

pytestmark = pytest.mark.gpu

ASKED: dict[str, tuple[str, Policy]] = {
    **{name: ("bf16", policy) for name, policy in UNCLIPPED.items() if "streamed" in name},
    "gathered": ("fp32", SHARDS),
    "shared": ("fp32", replace(SHARDS, delivery="shared")),
    "gathered, by shard": ("bf16", POLICIES["by shard"]),
    "shared, by shard": ("bf16", POLICIES["shared, by shard"]),
    "pageable": ("bf16", POLICIES["pageable"]),
    "on the device": ("bf16", POLICIES["on the device"]),
    "in all tiers": ("bf16", POLICIES["on the device, in the host and on the disk"]),
    "matrices, gathered": ("bf16", SHARDS),
    "matrices, shared": ("bf16", POLICIES["shared"]),
    "matrices, in all tiers": ("bf16", POLICIES["on the device, in the host and on the disk"]),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    if standin_cuda.installed() is None and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, or the stand-in: make test-cuda")
    found = RankProcesses(2, "cuda" if standin_cuda.installed() is None else STANDIN)
    yield found
    found.close()


def trained_here(world: World, **how: Any) -> tuple[Trained, list[str]]:
    """On this rank's GPU, and what did not wait there for what it needed."""
    standin = standin_cuda.installed()
    device = f"cuda:{world.rank if standin is None else 0}"
    found = of_rank(world, tiny_model("llama"), batches_of(4), device=device, **how)
    return found, [] if standin is None else standin.violations(clear=True)


@pytest.mark.parametrize("name", ASKED)
def test_two_ranks_match_their_cpu_losses(name: str, ranks: RankProcesses, tmp_path: Path) -> None:
    precision, policy = ASKED[name]
    how: dict[str, Any] = {"precision": precision, "policy": policy}
    how |= {"max_grad_norm": None} if name in UNCLIPPED else {}
    how |= {"optimizer": MUON} if "matrices" in name else {}
    disk = {"disk": [tmp_path]} if "in all tiers" in name else {}
    (first, late), (other, late_too) = ranks.run(trained_here, 2, **how, **disk)
    assert [*late, *late_too] == []
    assert first[:3] == other[:3]
    assert same(first.weights, other.weights)
    assert same(first.gradients, other.gradients)
    on_cpu = trained(2, tiny_model("llama"), batches_of(4), **how, **disk)
    assert first.losses == pytest.approx(on_cpu.losses, rel=1e-6 if precision == "fp32" else 1e-2)


def hasty_here(world: World) -> list[str]:
    """What is told of a step whose collectives bring weights together without waiting for their copies."""

    def hasty(*how: Any) -> Schedule:
        schedule = built(*how)
        waits = zip(schedule.ops, schedule.waits, strict=True)
        return replace(schedule, waits=tuple(() if op.kind == "GATHER" else each for op, each in waits))

    built = schedule_cache._build
    found: list[str] = []
    with patch.object(schedule_cache, "_build", hasty), patch.object(schedule_cache, "check"), suppress(MegaTrainError):
        found += trained_here(world, steps=1)[1]  # if its numbers came out right all the same
    return [*found, *standin_cuda.installed().violations(clear=True)]


@pytest.mark.skipif(standin_cuda.installed() is None, reason="needs the stand-in: make test-cuda")
def test_a_collective_without_its_wait_is_detected(ranks: RankProcesses) -> None:
    """Or the tests above would see nothing. The last one here: what such a step leaves may spoil the next."""
    assert all(ranks.run(hasty_here, 2))
