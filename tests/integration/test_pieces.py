"""State on the disk in pieces: the bits of state in host memory, also where the drive fails between two pieces."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.errors import DiskError, DiskFull
from megatrain.memory import Disk
from megatrain.memory.io_queue import Traffic
from megatrain.schedule import Op
from megatrain.schedule.passes import pieces
from megatrain.spec import Numerics, Placement, Precision, Work
from tests.disk_faults import DiskFault, failing_later
from tests.tiny import equal, tiny_model, unequal_batches

UNITS = 4
ON_DISK, STATE = Placement("disk", "disk", "disk", "disk"), Placement("host", "disk", "disk", "host")
WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
"""Layers of 200,000 elements, which are four blocks of the norm."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 1)


def made(
    device: str,
    precision: Precision,
    update: str,
    placement: Placement | None,
    disk: Path | Disk,
    frozen: str = "",
    grad_precision: Precision | None = None,
) -> Engine:
    model = tiny_model(**WIDE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    policy = Policy(
        update=update,  # type: ignore[arg-type]
        shares_memory=device == "cpu",
        placements=() if placement is None else (placement,) * UNITS,
        shard_nbytes=100_000,
    )
    return Engine.from_model(
        model,
        device,
        precision,
        AdamW(lr=1e-2),
        None if update == "during_backward" else 0.5,
        policy,
        seed=4,
        verify=False,
        disk=disk if isinstance(disk, Disk) else [disk],
        numerics=Numerics(precision, grad_precision=grad_precision, loss_chunk_tokens=5),
    )


def trained(engine: Engine) -> dict[str, Tensor]:
    """Losses, norms and gradients of a few steps, and the weights after them."""
    with engine:
        stepped = [engine.step(unequal_batches(count)) for count in (2, 3)]
        numbers = [number for step in stepped for number in (step.loss, step.grad_norm)]
        found = {f"gradient {name}": each for name, each in engine.gradients(unequal_batches(2)).items()}
        losses = torch.tensor([*numbers, engine.evaluate(unequal_batches(2))], dtype=torch.float64)
        return found | {"losses": losses} | engine.master_weights()


@cache
def expected(precision: Precision, update: str, folder: Path, frozen: str = "") -> dict[str, Tensor]:
    return trained(made("cpu", precision, update, None, folder, frozen))


CASES = [
    ("cpu", "bf16", "next_forward", ON_DISK, ""),
    ("sim:3", "fp32", "during_backward", ON_DISK, ""),
    ("sim:4", "bf16", "next_forward", STATE, "layers.1.mlp"),
    *(
        pytest.param(device, precision, update, placement, frozen, marks=pytest.mark.slow)
        for device in ("cpu", "sim:5")
        for precision in ("bf16", "fp32")
        for update in ("next_forward", "during_backward")
        for placement in (ON_DISK, STATE)
        for frozen in ("", "layers.0.self_attn")
    ),
]


@pytest.mark.parametrize(("device", "precision", "update", "placement", "frozen"), CASES)
def test_pieces_give_the_bits_of_state_in_host_memory(
    device: str, precision: Precision, update: str, placement: Placement, frozen: str, tmp_path: Path
) -> None:
    engine = made(device, precision, update, placement, tmp_path, frozen)
    pieces_of_layer = {op.shard for op in _updates(engine) if op.unit == 1}
    assert len(pieces_of_layer) >= 2
    assert equal(trained(engine), expected(precision, update, tmp_path, frozen))


def test_all_ranges_of_a_piece_move_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each has too few blocks for the depth of the drive's queue."""
    with made("cpu", "bf16", "during_backward", STATE, tmp_path) as engine:
        engine.step(unequal_batches(2))
        regions: list[int] = []
        carry = Traffic.carry
        monkeypatch.setattr(Traffic, "carry", lambda self, all_of: regions.append(len(all_of)) or carry(self, all_of))
        engine.step(unequal_batches(2))
        ops = [op for op in engine.diagnostics.timeline.schedule.ops if op.kind in ("READ", "WRITE")]  # type: ignore[union-attr]
    assert sorted(regions) == sorted(len(op.reads) for op in ops)
    assert max(regions) >= 2


def _updates(engine: Engine) -> list[Op]:
    kinds = engine.parts.schedules
    schedule = kinds.get("pending step" if engine.policy.update == "next_forward" else "step", Work((6,)))
    return [op for op in schedule.ops if op.kind == "UPDATE"]


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 40), marks=pytest.mark.slow)])
def test_a_drive_that_fails_between_pieces_costs_an_error_and_no_number(seeds: range, tmp_path: Path) -> None:
    """Some pieces are updated then, others not; the step done again updates the others."""
    weights = expected("bf16", "next_forward", tmp_path)
    struck = 0
    for seed in seeds:
        draw = random.Random(seed)
        part, unit = draw.choice(["low_bits", "moments", "gradients"]), draw.randrange(1, UNITS - 1)
        kind, on = draw.choice([("read", "read"), ("write", "write"), ("short", "write")])
        fault = DiskFault(kind, f"disk/{part}/{unit}", on, after=draw.randint(1, 6))  # type: ignore[arg-type]
        calls, is_loaded = failing_later(fault)

        with made(
            "cpu" if seed % 2 else f"sim:{seed}", "bf16", "next_forward", ON_DISK, Disk([tmp_path], calls=calls)
        ) as engine:
            is_loaded.set()
            left = [
                lambda: engine.step(unequal_batches(2)),
                lambda: engine.step(unequal_batches(3)),
                engine.master_weights,
            ]
            while left:
                try:
                    last = left[0]()
                    left = left[1:]
                except DiskError:
                    struck += 1
            assert isinstance(last, dict)
            assert equal(last, {name: weights[name] for name in last}), fault
    assert struck >= len(seeds) // 2


def test_a_write_that_fails_after_the_last_update_is_told_as_an_applied_step(tmp_path: Path) -> None:
    """The state is what the step has made of it, and the next step is the second."""
    weights = []
    for faults in ((), (DiskFault("full", "disk/moments/0"),)):
        calls, is_loaded = failing_later(*faults)
        with made("cpu", "bf16", "during_backward", ON_DISK, Disk([tmp_path], calls=calls)) as engine:
            is_loaded.set()
            with pytest.raises(DiskFull, match="updated all weights") if faults else nullcontext():
                engine.step(unequal_batches(2))
            assert engine.steps == 1
            engine.step(unequal_batches(3))
            weights.append(engine.master_weights())
    assert equal(*weights)


def test_a_write_that_fails_before_the_last_update_is_not_told_as_an_applied_step(tmp_path: Path) -> None:
    calls, is_loaded = failing_later(DiskFault("full", "disk/moments/2"))
    with made("cpu", "bf16", "during_backward", ON_DISK, Disk([tmp_path], calls=calls)) as engine:
        is_loaded.set()
        with pytest.raises(DiskFull) as raised:
            engine.step(unequal_batches(2))
        assert "updated all" not in str(raised.value)
        assert engine.steps == 0
