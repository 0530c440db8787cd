"""Several ranks that are processes and meet over gloo: the numbers are those of one, as in `test_ranks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import AdamW, Engine, Policy
from megatrain.dist import ALONE, World
from megatrain.optim import Optimizer
from megatrain.spec import Numerics
from tests.integration.test_ranks import (
    ADAMW,
    LION,
    MUON,
    SHARDS,
    Trained,
    batches_of,
    files_in,
    of_rank,
    same,
    saved_again,
)
from tests.rank_processes import RankProcesses
from tests.references import reference_reduce
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow
DROPS = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.1, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    found = RankProcesses()
    yield found
    found.close()


def trained_here(
    world: World, family: str, count: int, *, masked: bool = False, drops: bool = False, **how: Any
) -> Trained:
    model, batches = tiny_model(family, **(DROPS if drops else {})), batches_of(count, masked=masked)
    if drops:
        model.train()
    return of_rank(world, model, batches, **how)


def trained(ranks: RankProcesses, size: int, family: str, count: int, **how: Any) -> Trained:
    """What all ranks have come to, which is the same."""
    first, *others = ranks.run(trained_here, size, family=family, count=count, **how)
    for other in others:
        assert other[:3] == first[:3]
        assert same(other.weights, first.weights)
    return first


@pytest.mark.parametrize("size", [2, 3, 4])
def test_twenty_steps_match_one_rank_and_repeat_bit_for_bit(ranks: RankProcesses, size: int) -> None:
    """With five micro-batches, which no number of ranks divides. At three times the rate the loss falls so far that one
    rank with its micro-batches in another order differs by 1.3e-6 itself; at this one by 3e-8."""
    how: dict[str, Any] = {"steps": 20, "optimizer": AdamW(lr=3e-3, weight_decay=0.1)}
    one, many, again = (trained(ranks, of, "llama", 5, **how) for of in (1, size, size))
    assert many.losses == pytest.approx(one.losses, rel=1e-6)
    assert many[:3] == again[:3]
    assert same(many.weights, again.weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shared_memory_delivery_gives_the_same_bits_as_gathering(ranks: RankProcesses, precision: str) -> None:
    policies = SHARDS, replace(SHARDS, delivery="shared"), Policy(delivery="shared", wait_for="shard")
    first, *others = (trained(ranks, 3, "llama", 5, policy=each, precision=precision) for each in policies)
    for other in others:
        assert other[:3] == first[:3]
        assert same(other.weights, first.weights)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        ("mixtral", {"precision": "bf16"}),
        ("mixtral", {"precision": "bf16", "optimizer": MUON}),
        ("llama", {"optimizer": LION}),
    ],
)
def test_ranks_with_masked_labels_change_no_bit(ranks: RankProcesses, family: str, how: dict[str, Any]) -> None:
    one, many = (trained(ranks, of, family, 4, masked=True, **how) for of in (1, 4))
    assert many.losses == one.losses
    assert same(many.gradients, one.gradients)
    assert same(many.weights, one.weights)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("gpt2", {"drops": True}),
        ("gpt2", {"drops": True, "precision": "bf16"}),
        ("mixtral-balanced", {}),
        ("llama", {"max_grad_norm": None, "policy": "auto"}),
        ("qwen3-moe", {"optimizer": MUON}),
        ("llama", {"optimizer": MUON, "max_grad_norm": None, "policy": replace(SHARDS, delivery="shared")}),
    ],
)
def test_one_micro_batch_per_rank_matches_one_rank_bitwise(
    ranks: RankProcesses, family: str, how: dict[str, Any]
) -> None:
    """What is drawn for dropout is of the micro-batch's number among all."""
    one, many = (trained(ranks, of, family, 3, **how) for of in (1, 3))
    assert many.losses == one.losses
    assert same(many.weights, one.weights)
    if how.get("drops"):
        undropped = trained(ranks, 1, family, 3, **{**how, "drops": False})
        assert undropped.losses != one.losses


@pytest.mark.parametrize("size", [2, 3])
def test_rank_sums_equal_the_reference(ranks: RankProcesses, size: int) -> None:
    expected = reference_reduce([terms(rank, size) for rank in range(size)], torch.bfloat16)
    for own, right in zip(ranks.run(summed, size), expected, strict=True):
        assert torch.equal(own, right)


def terms(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size * 1024, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def summed(world: World) -> torch.Tensor:
    own = torch.empty(1024, dtype=torch.bfloat16)
    world.reduce(own, torch.empty(world.size * 1024), terms(world.rank, world.size))
    return own


@pytest.mark.parametrize("of", [2, 3])
@pytest.mark.parametrize(("family", "optimizer"), [("llama", ADAMW), ("mixtral", ADAMW), ("mixtral", MUON)])
def test_checkpoints_are_identical_for_any_number_of_ranks(
    ranks: RankProcesses, family: str, optimizer: Optimizer, of: int, tmp_path: Path
) -> None:
    """Written together, and with two ranks by the first, since each knows another folder. What follows has the bits of
    one rank."""
    written, *_ = ranks.run(saved_first, of, family=family, optimizer=optimizer, folder=tmp_path / "first")
    followed = set()
    for size in (1, 2, 3, 4):
        folder = tmp_path / str(size)
        found = ranks.run(saved_again, size, checkpoint=written, folder=folder, precision="fp32")
        assert len(set(found)) == 1
        again, _, *after = found[0]
        assert files_in(again) == files_in(written)
        followed.add(tuple(after))
    assert len(followed) == 1


def saved_first(world: World, family: str, optimizer: Optimizer, folder: Path) -> Path:
    how: dict[str, Any] = {"numerics": Numerics("fp32", loss_chunk_tokens=64), "policy": SHARDS, "max_grad_norm": 0.5}
    with Engine.from_model(tiny_model(family), optimizer=optimizer, verify=False, world=world, **how) as engine:
        engine.step(batches_of(3)[world.rank :: world.size])
        save = engine.save(folder, {"position": 3})
        path = save.wait(60)
        assert not save.streamed
        return path


def test_engines_under_torchrun_train_together(tmp_path: Path) -> None:
    """Each joins by itself, and warns of nothing."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default::FutureWarning"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    one = of_rank(ALONE, tiny_model(), batches_of(3), steps=2)
    assert first == pytest.approx(one.losses[:2], rel=1e-6)


ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys
from pathlib import Path
from megatrain import AdamW, Engine
from megatrain.spec import Numerics
from tests.integration.test_ranks import SHARDS, batches_of
from tests.tiny import tiny_model

with Engine.from_model(
    tiny_model(), numerics=Numerics("fp32", loss_chunk_tokens=64), optimizer=AdamW(lr=1e-2, weight_decay=0.1),
    policy=SHARDS, max_grad_norm=0.5, verify=False,
) as engine:
    world = engine.world
    assert (world.rank, world.size) == (int(os.environ["RANK"]), 2)
    losses = [engine.step(batches_of(3)[world.rank :: world.size]).loss for _ in range(2)]
Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(losses))
"""
