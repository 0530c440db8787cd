"""A step that fails or is interrupted anywhere gives the same bits when repeated, under any policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.engine.resumable_call import ResumableCall
from megatrain.errors import MegaTrainError
from megatrain.spec import Keep, Numerics, Placement
from megatrain.testing import KINDS, SimDevice, random_fault
from tests.integration.test_phased_calls import calls_under_way
from tests.tiny import batch, equal, tiny_model, unequal_batches

STEPS = 3
FAMILIES = ("llama", "llama-tied", "gpt2", "mixtral-balanced", "qwen3-moe", "gemma2", "qwen3-tied")
FROZEN: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "the lower part": ("embed", "layers.0.", "wte", "wpe", "h.0."),
    "the head": ("lm_head", "norm", "ln_f"),
    "some matrices": ("k_proj", "down_proj", "up_proj", "c_proj", "experts.down"),
    "a layer": ("layers.1.", "h.1."),
}
HOMES = (
    *(
        Placement(),
        Placement(),
        Placement("device"),
        Placement("device", "device", "device"),
        Placement("disk", "disk", "disk", "disk"),
    ),
    *(Placement(moments="disk"), Placement(gradients="disk"), Placement("disk"), Placement("device", "host", "disk")),
)
ROWS: tuple[Keep, ...] = get_args(Keep)


def engine(
    device: str | SimDevice, family: str, frozen: str, numerics: Numerics, policy: Policy, disk: Path | None
) -> Engine:
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.1} if family == "gpt2" else {}
    model = tiny_model(family, **dropout)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in FROZEN[frozen]))
    clip = None if policy.update == "during_backward" else 0.5
    folders = [disk] if disk is not None and policy.placements else []
    how = (numerics.precision, AdamW(lr=1e-2), clip, policy)
    return Engine.from_model(model, device, *how, seed=4, verify=False, disk=folders, numerics=numerics)


def data(step: int) -> list[dict[str, Tensor]]:
    return unequal_batches(3)[: 1 + step] if step % 2 else [batch(2, 9, step), batch(1, 12, step + 1, padded=2)]


@cache
def undisturbed(family: str, frozen: str, numerics: Numerics, policy: Policy) -> tuple[list[float], dict[str, Tensor]]:
    with engine("cpu", family, frozen, numerics, policy, None) as made:
        return [made.step(data(step)).loss for step in range(STEPS)], made.master_weights()


def random_policy(draw: random.Random, plain: Policy, units: int) -> Policy:
    rows = tuple(tuple(draw.choice(ROWS) for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 3)))
    return replace(
        plain,
        shares_memory=False,
        wait_for=draw.choice(["shard", "shard", "unit"]),
        activations_by_layer=rows,
        weight_slots=draw.randint(1, 3),
        grad_slots=draw.randint(1, 3),
        shard_nbytes=draw.choice([300, 2048, 5000, 10**9]),
        placements=tuple(draw.choice(HOMES) for _ in range(units)),
        disk_staging_slots=draw.randint(1, 3),
        offload_slots=draw.randint(1, 3),
        recompute_slots=draw.choice([None, 1, 2]),
        transfer=draw.choice(["pinned", "pageable"]),
    )


def interrupted_after(turns: int) -> Callable[[ResumableCall, object, object], None]:
    """`ResumableCall.run_phase` with Ctrl-C after this number of turns."""
    honest, left = ResumableCall.run_phase, [turns]

    def run_phase(self: ResumableCall, op: object, lease: object) -> None:
        honest(self, op, lease)  # type: ignore[arg-type]
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    return run_phase


def break_off(made: Engine, device: SimDevice, step: int, draw: random.Random) -> bool:
    """Begin a step and make an op fail or a user interrupt it. Returns whether it was aborted."""
    if draw.random() < 0.5:
        kind = "pending step" if made.parts.optimizer.pending else "step"
        schedule = made.parts.schedules.get(kind, made.parts.step_input(data(step), None, None, trains=True)[1])  # type: ignore[arg-type]
        device.faults.append(random_fault(schedule, draw.choice(KINDS), draw.randrange(10**6)))
        with pytest.raises(MegaTrainError):
            made.step(data(step))
        return True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableCall, "run_phase", interrupted_after(draw.randrange(1, 12)))
        try:
            made.step(data(step))
        except KeyboardInterrupt:
            return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 40, 8))
def test_aborted_and_repeated_steps_change_no_bit(first: int, tmp_path: Path) -> None:
    """Everything that must not change results is random, also the policy between steps."""
    for seed in range(first, first + 8):
        draw, device = random.Random(seed), SimDevice(seed)
        family, frozen = draw.choice(FAMILIES), draw.choice(list(FROZEN))
        update = draw.choice(["next_forward", "next_forward", "during_backward"])
        chunk = draw.choice([0, 4])
        numerics = Numerics(draw.choice(["bf16", "fp32"]), loss_chunk_tokens=5, mlp_chunk_tokens=chunk)  # type: ignore[arg-type]
        plain = Policy(shares_memory=True, update=update)  # type: ignore[arg-type]
        losses, weights = undisturbed(family, frozen, numerics, plain)
        units = 6 if family == "gemma2" else 5
        policy = random_policy(draw, plain, units)
        with engine(device, family, frozen, numerics, policy, tmp_path) as made:
            for step in range(STEPS):
                done = update == "next_forward" and draw.random() < 0.7 and not break_off(made, device, step, draw)
                device.faults.clear()
                assert not calls_under_way()
                assert made.parts.pool.leases == 0
                if not done:
                    assert made.step(data(step)).loss == losses[step], (seed, family, frozen, policy)
                if draw.random() < 0.3:
                    stays = {"wait_for": policy.wait_for, "transfer": policy.transfer}
                    made.adopt(replace(random_policy(draw, plain, units), **stays))
            assert equal(made.master_weights(), weights), (seed, family, frozen, policy)
