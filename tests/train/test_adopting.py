"""`Engine.adopt` refuses every policy that the engine cannot use, and goes on with the old one, to the same bits."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from megatrain import AdamW, Engine, Policy
from megatrain.errors import DoesNotFit, PlanError
from megatrain.spec import Keep, Limits, Numerics, Placement
from tests.adapted import adapted
from tests.tiny import equal, tiny_model, unequal_batches

UNITS = 5
STEPS = 4
KINDS = ("llama", "llama-tied", "adapter")
HOMES: tuple[dict[str, str], ...] = (
    *({} for _ in range(4)),
    *({"gradients": "disk"}, {"moments": "disk"}, {"weights": "disk"}, {"weights": "file"}, {"weights": "device"}),
    {"weights": "disk", "low_bits": "disk", "moments": "disk", "gradients": "disk"},
    {"weights": "device", "low_bits": "device", "moments": "device"},
)


def engine(kind: str, device: str, disk: Path | None = None, limits: Limits | None = None) -> Engine:
    model: PreTrainedModel = adapted() if kind == "adapter" else tiny_model(kind)
    numerics, disks = Numerics("bf16", loss_chunk_tokens=5), [disk] if disk else []
    how = {"numerics": numerics, "disk": disks, "limits": limits, "optimizer": AdamW(lr=1e-2), "max_grad_norm": 0.5}
    return Engine.from_model(model, device, seed=4, verify=False, **how)  # type: ignore[arg-type]


@cache
def undisturbed(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    with engine(kind, "cpu") as made:
        return [made.step(unequal_batches(1 + step % 3)).loss for step in range(STEPS)], made.master_weights()


def random_policy(draw: random.Random, before: Policy) -> Policy:
    """Most fields as they were; raises `PlanError` for values that no policy has."""
    rows = tuple(tuple(draw.choices(get_args(Keep), k=draw.randint(1, 3))) for _ in range(draw.randint(1, 4)))
    homes = tuple(Placement(**draw.choice(HOMES)) for _ in range(draw.choice([UNITS] * 5 + [4])))  # type: ignore[arg-type]
    changes = {
        "weight_slots": draw.randint(1, 3),
        "grad_slots": draw.randint(1, 3),
        "shard_nbytes": draw.choice([300, 2048, 1 << 30]),
        "wait_for": draw.choice(["unit", "shard"]),
        "read_ahead_nbytes": draw.choice([0, 1, 2000, 1 << 40]),
        "activations": draw.choice(["keep", "recompute"]),
        "activations_by_layer": rows,
        "offload_slots": draw.randint(1, 2),
        "recompute_slots": draw.choice([None, 1, 2]),
        "micro_batches_per_round": draw.choice([1, 2, 1 << 20]),
        "update": "during_backward",
        "streamed_updates": draw.choice([0.3, 1.0]),
        "shares_memory": not before.shares_memory,
        "host_threads": draw.randint(0, 2),
        "transfer": "pageable",
        "pinned_staging_slots": 1,
        "placements": homes,
        "delivery": "shared",
        "disk_staging_slots": draw.randint(1, 3),
    }
    chosen = draw.sample(sorted(changes), draw.randint(1, 4))
    return replace(before, **{name: changes[name] for name in chosen})


def _adopt_and_step(kind: str, device: str, disk: Path | None, seed: int) -> int:
    """Returns how many policies were adopted."""
    draw, adopted = random.Random(seed), 0
    losses, weights = undisturbed(kind)
    with engine(kind, device, disk) as made:
        for step in range(STEPS):
            for _ in range(draw.randint(1, 2)):
                before = made.policy
                try:
                    policy = random_policy(draw, before)
                except PlanError:
                    continue
                try:
                    made.adopt(policy)
                    adopted += 1
                    assert made.policy == policy
                except PlanError:
                    assert made.policy == before
            assert made.step(unequal_batches(1 + step % 3)).loss == losses[step], (seed, made.policy)
        assert equal(made.master_weights(), weights), (seed, made.policy)
    return adopted


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_policies_are_refused_or_change_no_bit(kind: str, tmp_path: Path) -> None:
    _adopt_and_step(kind, "sim:3", tmp_path, seed=1)


@pytest.mark.slow
@given(
    kind=st.sampled_from(KINDS), device=st.sampled_from(["cpu", "sim:3"]), on_disk=st.booleans(), seed=st.integers(0)
)
def test_a_policy_is_refused_or_changes_no_bit(
    tmp_path_factory: pytest.TempPathFactory, kind: str, device: str, on_disk: bool, seed: int
) -> None:
    _adopt_and_step(kind, device, tmp_path_factory.mktemp("disk") if on_disk else None, seed)


@pytest.mark.slow
def test_random_policies_are_adopted_about_as_often_as_refused() -> None:
    assert 10 <= sum(_adopt_and_step("llama", "sim:3", None, seed) for seed in range(10)) <= 50


REFUSED: dict[str, tuple[str, Policy, str]] = {
    "gradients on a disk that is not there": (
        "llama",
        Policy(placements=(Placement(gradients="disk"),) * UNITS),
        "policy: uses the disk, but no folder is given; give a folder as `disk`",
    ),
    "rounds with a tied head": (
        "llama-tied",
        Policy(micro_batches_per_round=1),
        "policy.micro_batches_per_round: a tied head and embedding share a gradient",
    ),
    "more rows than layers": (
        "llama",
        Policy(activations_by_layer=(("input",),) * 4),
        "policy.activations_by_layer: has rows for 4 layers, but the model has 3",
    ),
    "weights in files that are not there": (
        "llama",
        Policy(placements=(Placement("file"),) * UNITS),
        "policy.placements: reads weights from files, but the model's files hold no frozen weights",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_step_could_use_is_refused(name: str) -> None:
    kind, policy, message = REFUSED[name]
    with engine(kind, "sim:1") as made:
        losses, _ = undisturbed(kind)
        before = made.policy
        assert made.step(unequal_batches(1)).loss == losses[0]
        with pytest.raises(PlanError, match=message):
            made.adopt(policy)
        assert made.policy == before
        assert made.step(unequal_batches(2)).loss == losses[1]


def test_rounds_with_a_tied_head_are_refused_at_the_start() -> None:
    with pytest.raises(PlanError, match="a tied head and embedding share a gradient"):
        Engine.from_model(tiny_model("llama-tied"), "sim:1", policy=Policy(micro_batches_per_round=1), verify=False)


def test_threads_of_the_optimizer_follow_the_policy() -> None:
    with engine("llama", "cpu") as made:
        made.adopt(replace(made.policy, host_threads=2))
        assert made.parts.optimizer.threads == 2


def test_a_refused_policy_leaves_the_choice_of_activations_open() -> None:
    """An engine without a policy of its user chooses for each step what layers keep."""
    with engine("llama", "cpu") as made:
        with pytest.raises(PlanError):
            made.adopt(replace(made.policy, activations_by_layer=(("input",),) * 4))
        assert made.parts.schedules.fits_activations


def test_no_disk_means_none_even_with_a_folder(tmp_path: Path) -> None:
    """And what is advised then would fit."""
    little = Limits(host_nbytes=300_000, disk_nbytes=0)
    with pytest.raises(DoesNotFit, match=r"kB of host memory.*no other policy of this model fits"):
        engine("llama", "sim:1", tmp_path, little)
    on_disk = Policy(placements=(Placement(moments="disk"),) * UNITS)
    none = Limits(disk_nbytes=0)
    with pytest.raises(DoesNotFit, match=r"of disk memory.*budget of 0 B.*all state in host memory would fit"):
        Engine.from_model(tiny_model(), "sim:1", policy=on_disk, disk=[tmp_path], limits=none, verify=False)
    with engine("llama", "sim:1", tmp_path, none) as made:
        with pytest.raises(DoesNotFit, match=r"of disk memory.*budget of 0 B"):
            made.adopt(on_disk)
        assert made.step(unequal_batches(1)).loss == undisturbed("llama")[0][0]
