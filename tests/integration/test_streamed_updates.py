"""Updates on the device of state that waits in host memory change no bit, and lose none where they are broken off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.device import Device
from megatrain.errors import MegaTrainError, NonFinite
from megatrain.schedule import Schedule
from megatrain.schedule.passes.pinned_staging import is_pinned
from megatrain.spec import Numerics, Part, Placement, Precision
from megatrain.testing import KINDS, Fault, SimDevice, random_fault
from tests.tiny import equal, tiny_model, unequal_batches

CACHED, RESIDENT = Placement("device"), Placement("device", "device", "device")
PIECES = {"RELOAD": "fetch", "UPDATE": "grad", "PLACE": "grad", "OFFLOAD": "grad"}
"""Ops of a piece -> their stream."""


def made(
    device: str | Device,
    policy: Policy,
    family: str = "llama",
    precision: Precision = "bf16",
    grad_precision: Precision | None = None,
    frozen: str = "",
) -> Engine:
    clip = None if policy.update == "during_backward" else 0.5
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    numerics = Numerics(precision, grad_precision=grad_precision, loss_chunk_tokens=5)
    optimizer = AdamW(lr=1e-2, weight_decay=0.1)
    return Engine.from_model(model, device, None, optimizer, clip, policy, seed=4, verify=False, numerics=numerics)


def trained(engine: Engine, counts: tuple[int, ...] = (2, 3)) -> dict[str, Tensor]:
    """Gradients before and behind a few steps, their losses, and what they leave."""
    with engine:
        found = {f"gradient {name}": each for name, each in engine.gradients(unequal_batches(2)).items()}
        losses = [engine.step(unequal_batches(count)).loss for count in counts]
        found |= {f"then {name}": each for name, each in engine.gradients(unequal_batches(1)).items()}
        losses.append(engine.evaluate(unequal_batches(2)))
        for number, unit in enumerate(engine.parts.store.units):
            for moment, name in enumerate(AdamW.STATE):
                values = unit.read(Part.MOMENTS, 0, unit.trained, moment)
                found[f"{name} of {number}"] = torch.from_numpy(values.copy())
        return found | engine.master_weights() | {"losses": torch.tensor(losses, dtype=torch.float64)}


@cache
def plainest(family: str, precision: Precision, update: str, wide: bool = False, frozen: str = "") -> dict[str, Tensor]:
    policy = Policy(update=update)  # type: ignore[arg-type]
    return trained(made("cpu", policy, family, precision, "fp32" if wide else None, frozen))


def updated_there(engine: Engine) -> Counter[int]:
    """Unit -> pieces in which a step that the engine knows updates it on the device."""
    there = [
        Counter(op.unit for op in each.ops if op.kind == "UPDATE" and op.stream == "grad") for each in known(engine)
    ]
    return max(there, key=Counter.total)


def known(engine: Engine) -> Iterator[Schedule]:
    yield from engine.parts.schedules.known.values()


# Bits -----------------------------------------------------------------------------------------------------------------


@settings(max_examples=settings.default.max_examples // 5 if settings.default.max_examples > 100 else 2)
@given(
    share=st.sampled_from([0.4, 1.0]),
    slots=st.integers(1, 4),
    grad_slots=st.integers(1, 3),
    shard=st.sampled_from([9_000, 60_000, 1 << 20]),
    wait_for=st.sampled_from(["unit", "shard"]),
    ahead=st.sampled_from([0, 0, 6000]),
    activations=st.sampled_from([(), (("graph",),), (("offload", "input"), ("drop",)), (("offload_chosen",),)]),
    update=st.sampled_from(["next_forward", "during_backward"]),
    placements=st.sampled_from([(), (Placement(), CACHED, Placement(), RESIDENT, Placement())]),
    precision=st.sampled_from(["bf16", "fp32"]),
    wide=st.booleans(),
    family=st.sampled_from(["llama", "llama-tied", "gpt2", "mixtral-balanced"]),
    in_round=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_device_updates_give_the_bits_of_host_updates(
    share: float,
    slots: int,
    grad_slots: int,
    shard: int,
    wait_for: str,
    ahead: int,
    activations: tuple[tuple[str, ...], ...],
    update: str,
    placements: tuple[Placement, ...],
    precision: Precision,
    wide: bool,
    family: str,
    in_round: int,
    seed: int,
) -> None:
    policy = Policy(
        streamed_updates=share,
        weight_slots=slots,
        grad_slots=grad_slots,
        shard_nbytes=shard,
        wait_for=wait_for,  # type: ignore[arg-type]
        read_ahead_nbytes=ahead,
        activations_by_layer=activations,  # type: ignore[arg-type]
        update=update,  # type: ignore[arg-type]
        placements=placements,
        micro_batches_per_round=0 if family in ("llama-tied", "gpt2") else in_round,
    )
    expected = plainest(family, precision, update, wide)
    engine = made("cpu" if seed % 3 == 0 else f"sim:{seed}", policy, family, precision, "fp32" if wide else None)
    assert equal(trained(engine), expected)


@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_the_device_updates_the_planned_pieces(update: str) -> None:
    policy = Policy(streamed_updates=0.7, shard_nbytes=30_000, update=update)  # type: ignore[arg-type]
    engine = made("sim:1", policy)
    with engine:
        engine.step(unequal_batches(1))
        engine.step(unequal_batches(1))
        assert updated_there(engine).keys() == {1, 3}
        assert min(updated_there(engine).values()) > 2
        assert engine.parts.device.order.count("UPDATE u1 s0") == (2 if update == "during_backward" else 1)  # type: ignore[attr-defined]
        engine.weights.flush()
        assert set(engine.diagnostics.applied_updates().values()) == {2}


@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_partly_frozen_layers_are_updated_on_the_host(update: str) -> None:
    frozen = "layers.1.mlp"
    policy = Policy(streamed_updates=1.0, shard_nbytes=30_000, update=update)  # type: ignore[arg-type]
    with made("sim:5", policy, frozen=frozen) as engine:
        for _ in range(2):
            engine.step(unequal_batches(1))
        assert updated_there(engine).keys() == {1, 3}
    assert equal(trained(made("sim:5", policy, frozen=frozen)), plainest("llama", "bf16", update, False, frozen))


def test_shares_change_between_steps_and_streamed_state_is_pinned() -> None:
    """Also of a policy under which low bits and moments had been pageable."""
    device = SimDevice(2)
    engine = made(device, Policy(shard_nbytes=30_000))
    with engine:
        locked = []
        for share in (0.0, 1.0, 0.4, 0.0):
            engine.adopt(replace(engine.policy, streamed_updates=share))
            engine.step(unequal_batches(2))
            locked.append(sum(device.host.locked.values()))
            for buffer in engine.parts.pool.buffers.values():
                memory = engine.parts.pool._memory.get(buffer.name)
                assert (
                    buffer.tier != "host"
                    or memory is None
                    or is_pinned(buffer, "pinned") == (memory.data_ptr() in device.host.locked)
                )
        layers = [unit.numel for unit in engine.structure.units[1:-1]]
        assert locked[1] - locked[0] == 10 * sum(layers)
        assert locked[1:] == locked[1:2] * 3, "what has been locked stays"
        found = engine.master_weights()
    with made("cpu", Policy()) as plain:
        for _ in range(4):
            plain.step(unequal_batches(2))
        assert equal(plain.master_weights(), found)


# Failures -------------------------------------------------------------------------------------------------------------


@cache
def calm(update: str) -> tuple[Schedule, list[dict[str, Tensor]]]:
    """The pieces of a step that updates on the device, and the weights after each of three steps."""
    with made(SimDevice(0), failing(update)) as engine:
        weights = []
        for _ in range(3):
            engine.step(unequal_batches())
            if update == "during_backward":
                weights.append(engine.master_weights())
        schedule = next(
            each for each in known(engine) if any(op.kind == "UPDATE" and op.stream == "grad" for op in each.ops)
        )
    if update == "next_forward":
        for count in (1, 2, 3):
            with made(SimDevice(0), Policy()) as engine:
                for _ in range(count):
                    engine.step(unequal_batches())
                weights.append(engine.master_weights())
    pieces = tuple(op for op in schedule.ops if PIECES.get(op.kind) == op.stream and op.shard >= 0)
    return replace(schedule, ops=pieces, waits=()), weights


def failing(update: str) -> Policy:
    return Policy(streamed_updates=0.7, shard_nbytes=60_000, weight_slots=3, update=update)  # type: ignore[arg-type]


def _fail(kind: str, op: str, seed: int, update: str) -> None:
    pieces, weights = calm(update)
    device = SimDevice(seed)
    with made(device, failing(update)) as engine:
        engine.step(unequal_batches())
        some = replace(pieces, ops=tuple(each for each in pieces.ops if each.kind == op))
        fault = random_fault(some, kind, seed)  # type: ignore[arg-type]
        device.faults.append(fault)
        with pytest.raises(MegaTrainError, match=str(fault.at)):
            engine.step(unequal_batches())
        assert not device.faults
        assert engine.parts.pool.leases == 0
        if update == "next_forward":
            assert equal(engine.master_weights(), weights[0]), "each byte is updated once"
            engine.step(unequal_batches())
            assert equal(engine.master_weights(), weights[1]), "as if nothing was"
            return
        _whole_or_named(engine, weights)


def _whole_or_named(engine: Engine, weights: list[dict[str, Tensor]]) -> None:
    """Without clipping: a piece is updated or not, a torn state is refused and says of what, and any other goes on."""
    counts, versions = engine.diagnostics.applied_updates(), engine.parts.optimizer.versions
    partly = {unit: version.reached for unit, version in enumerate(versions) if version.reached}
    for unit, spec in enumerate(engine.structure.units):
        for place in engine.parts.store.layouts[unit].fields:
            found = engine.master_weights()[place.name].flatten()
            ahead = max(0, partly.get(unit, 0) - place.start) if counts[spec.name] == 1 else found.numel()
            expected = torch.cat([weights[1][place.name].flatten()[:ahead], weights[0][place.name].flatten()[ahead:]])
            assert torch.equal(found, expected), place.name
    if partly or len(set(counts.values())) > 1:
        with pytest.raises(NonFinite, match="has updated only these units") as caught:
            engine.step(unequal_batches())
        assert all(engine.structure.units[unit].name in str(caught.value) for unit in partly)
        return
    engine.step(unequal_batches())
    assert equal(engine.master_weights(), weights[1 if set(counts.values()) == {1} else 2])


QUICK = [("raise", "next_forward"), ("copy", "during_backward"), ("hang", "during_backward")]
"""An op, a copy and a stream; `test_hostile` has all kinds for engines that update in host memory."""


@pytest.mark.few(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "update"),
    [
        pytest.param(kind, update, marks=() if (kind, update) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for update in ("next_forward", "during_backward")
    ],
)
def test_a_failed_state_transfer_loses_no_state(kind: str, update: str) -> None:
    ops = [op for op in PIECES if op != "PLACE" or update == "next_forward"]
    for seed, op in enumerate(ops):
        _fail(kind, op, seed, update)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_failures_lose_no_state(kind: str, update: str) -> None:
    ops = [op for op in PIECES if op != "PLACE" or update == "next_forward"]
    for seed, op in zip(range(100, 200), cycle(ops), strict=False):
        _fail(kind, op, seed, update)


def test_a_piece_with_a_failed_copy_back_is_copied_before_any_read(tmp_path: Path) -> None:
    """Its gradient has been used, and its old state is damaged: only the slot has what it is."""
    _, weights = calm("next_forward")
    device = SimDevice(3, faults=[Fault("short", "OFFLOAD u1 s0")])
    with made(device, failing("next_forward")) as engine:
        engine.step(unequal_batches())
        with pytest.raises(MegaTrainError, match="OFFLOAD u1 s0"):
            engine.step(unequal_batches())
        assert engine.parts.optimizer.is_interrupted
        folder = engine.save(tmp_path).wait()
    with Engine.from_checkpoint(folder, device="cpu", verify=False) as resumed:
        assert equal(resumed.master_weights(), weights[0])


@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_a_gradient_that_is_not_finite_is_not_applied(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.engine import gradient_accumulation as sums

    finish = sums.GradientAccumulator.finish

    def poisoned(self: sums.GradientAccumulator) -> list[str]:
        for name, view in self._views.items():
            if name.endswith("layers.0.mlp.up_proj.weight"):
                view *= float("inf")
        return finish(self)

    with made("sim:3", failing(update)) as engine:
        engine.step(unequal_batches())
        engine.weights.flush()
        before = {name: each for name, each in engine.master_weights().items() if "layers.0." in name}
        monkeypatch.setattr(sums.GradientAccumulator, "finish", poisoned)
        with pytest.raises(NonFinite, match=r"model.layers.0: the gradient is not finite") as caught:
            engine.step(unequal_batches())
        monkeypatch.undo()
        after = {name: each for name, each in engine.master_weights().items() if "layers.0." in name}
        assert equal(before, after)
        if update == "during_backward":
            assert "already updated: " in str(caught.value)
            assert "model.layers.2" in str(caught.value)
            return
        assert "nothing was updated" in str(caught.value)
        engine.step(unequal_batches())
        assert equal(engine.master_weights(), calm(update)[1][1])
