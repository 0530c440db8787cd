"""Matrices that are updated whole: the same bits under any placement and policy, and after an interruption anywhere."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.device.sim import FaultKind
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.optim import Muon
from megatrain.schedule.passes import pieces, state_buffers
from megatrain.spec import Numerics, Placement
from megatrain.testing import SimDevice, random_fault
from tests.tiny import equal, tiny_model, unequal_batches

HOST, DEVICE, DISK = Placement(), Placement("device", "device", "device"), Placement("disk", "disk", "disk", "disk")
CACHED, MOMENTS, WEIGHTS = Placement("device"), Placement(moments="disk"), Placement("disk", "disk")
GRADIENTS = Placement(gradients="disk")
PLACES = (HOST, DISK, MOMENTS, WEIGHTS, GRADIENTS, DEVICE, CACHED)
IN_SHARED_MEMORY = PLACES[:5]
UNITS = 4
UPDATES: tuple[Literal["next_forward"], Literal["during_backward"]] = ("next_forward", "during_backward")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of matrices in a unit, and pieces on the disk that reach into several groups."""
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 1)
    monkeypatch.setattr(state_buffers, "PIECE_NBYTES", 1)
    monkeypatch.setattr(pieces, "GROUP_NBYTES", 4096)


def made(device: Any, policy: Policy, folder: Path, **changes: Any) -> Engine:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    clip = None if policy.update == "during_backward" else 0.5
    muon = Muon(lr=1e-2, adamw=AdamW(lr=3e-3))
    folder.mkdir(exist_ok=True)
    options = {"disk": [folder], "numerics": Numerics("bf16", loss_chunk_tokens=5), "verify": False, **changes}
    return Engine.from_model(tiny_model(**sizes), device, "bf16", muon, clip, policy, **options)


Outcome = tuple[list[float], dict[str, Tensor]]


def run(engine: Engine, counts: tuple[int, ...] = (2, 3, 1)) -> Outcome:
    losses = [engine.step(unequal_batches(count)).loss for count in counts]
    return losses, engine.master_weights()


@cache  # nothing is on the disk
def expected(update: Literal["next_forward", "during_backward"]) -> Outcome:
    """In host memory, which the device shares."""
    with made("cpu", Policy(shares_memory=True, update=update), Path(tempfile.mkdtemp())) as engine:
        return run(engine)


def same(found: Outcome, update: Literal["next_forward", "during_backward"] = "next_forward") -> bool:
    losses, weights = expected(update)
    return found[0] == losses and equal(found[1], weights)


def drawn(seed: int) -> tuple[Any, Policy]:
    draw = random.Random(seed)
    shares = draw.random() < 0.3
    policy = Policy(
        update=draw.choice(UPDATES),
        shares_memory=shares,
        placements=tuple(draw.choice(IN_SHARED_MEMORY if shares else PLACES) for _ in range(UNITS)),
        shard_nbytes=draw.choice((20_000, 100_000)),
        grad_slots=draw.randint(1, 3),
        disk_staging_slots=draw.randint(1, 3),
        weight_slots=draw.randint(1, 3),
        read_ahead_nbytes=0 if shares else draw.choice((0, 0, 5000)),
        streamed_updates=0.0 if shares else draw.choice((0.0, 0.5)),
        micro_batches_per_round=draw.choice((0, 0, 1)),
    )
    return "cpu" if shares else SimDevice(seed), policy


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 30), marks=pytest.mark.slow)])
def test_placements_and_policies_never_change_a_bit(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        device, policy = drawn(seed)
        with made(device, policy, tmp_path / str(seed)) as engine:
            assert same(run(engine), policy.update), (seed, policy)


@pytest.mark.slow
def test_adopting_other_placements_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    with made("sim:5", Policy(shard_nbytes=100_000), tmp_path) as engine:
        losses = []
        for count, place in ((2, DISK), (3, DEVICE), (1, HOST)):
            losses.append(engine.step(unequal_batches(count)).loss)
            engine.adopt(Policy(shard_nbytes=100_000, placements=(HOST, place, place, HOST)))
        assert same((losses, engine.master_weights()))


class Stop(KeyboardInterrupt):
    """As from a user."""


def retried(step: Callable[[], Any]) -> tuple[float, int]:
    """(loss, number of failures) of a step that is called again after a failure."""
    for failures in range(3):
        try:
            return step().loss, failures
        except (Stop, MegaTrainError):
            continue
    raise AssertionError("it fails again and again")


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 40), marks=pytest.mark.slow)])
def test_an_interruption_before_any_change_loses_and_repeats_nothing(seeds: range, tmp_path: Path) -> None:
    interrupted = 0
    for seed in seeds:
        draw = random.Random(seed)
        device, policy = drawn(seed)
        policy, left = replace(policy, update="next_forward"), draw.randrange(1, 70)
        with made(device, policy, tmp_path / str(seed)) as engine:
            wait = engine.parts.optimizer.before_update

            def stop(unit: int, wait: Callable[[int], None] = wait) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Stop
                wait(unit)

            engine.parts.optimizer.before_update = stop
            losses = []
            for count in (2, 3, 1):
                loss, failures = retried(lambda count=count: engine.step(unequal_batches(count)))  # type: ignore[misc]
                losses.append(loss)
                interrupted += failures
            left = 0  # what reads weights must not be stopped
            assert same((losses, engine.master_weights())), (seed, policy)
    assert interrupted > len(seeds) / 3 or len(seeds) == 1


KINDS: tuple[FaultKind, ...] = ("raise", "copy", "hang", "short")
OPS = ("MOMENTUM", "ORTHOGONALIZE", "APPLY", "RELOAD", "OFFLOAD", "READ", "WRITE", "UPDATE")


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 48), marks=pytest.mark.slow)])
def test_a_failure_of_any_op_loses_and_repeats_nothing(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        device = SimDevice(seed)
        _, policy = drawn(seed)
        placements = tuple(random.Random(seed).choice(PLACES) for _ in range(UNITS))
        policy = Policy(placements=placements, shard_nbytes=policy.shard_nbytes)
        with made(device, policy, tmp_path / str(seed)) as engine:
            losses = [engine.step(unequal_batches(2)).loss]
            work = engine.parts.step_input(unequal_batches(3), trains=True).work
            schedule = engine.parts.schedules.get("pending step", work)
            kinds = {op.kind for op in schedule.ops}
            kind = next(kind for kind in (OPS[seed % len(OPS)], "MOMENTUM") if kind in kinds)
            ops = tuple(op for op in schedule.ops if op.kind == kind)
            device.faults.append(random_fault(replace(schedule, ops=ops, waits=()), KINDS[seed % 4], seed))
            loss, failures = retried(lambda: engine.step(unequal_batches(3)))
            assert failures == 1
            losses += [loss, engine.step(unequal_batches(1)).loss]
            assert same((losses, engine.master_weights())), (seed, kind, policy)


def test_a_parameter_without_a_gradient_keeps_its_weights_and_momentum(tmp_path: Path) -> None:
    """As in torch, where its gradient is None."""
    with made("sim:2", Policy(), tmp_path) as engine:
        unit = 1
        name = next(param.name for param in engine.structure.units[unit].params if param.matrices)
        engine.step(unequal_batches(2))
        before = engine.master_weights()
        absent = engine.parts.optimizer.absent
        engine.parts.optimizer.absent = lambda at, names: absent(at, [*names, *([name] if at == unit else [])])  # type: ignore[method-assign]
        engine.step(unequal_batches(2))
        after = engine.master_weights()
        changed = {key for key in after if not torch.equal(before[key], after[key])}
        assert changed == {*after} - {name}
        assert engine.parts.optimizer.versions[unit].missed == {name: 1}


@pytest.mark.slow
def test_matrices_of_an_adapter_are_updated_before_a_frozen_rest(tmp_path: Path) -> None:
    outcomes = []
    for device, place in (("cpu", HOST), ("sim:2", HOST), ("sim:3", DISK), ("sim:4", DEVICE)):
        torch.manual_seed(0)
        model = get_peft_model(
            tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        )
        policy = Policy(shares_memory=device == "cpu", placements=(place,) * 5)
        muon = Muon(lr=1e-2, adamw=AdamW(lr=3e-3))
        with Engine.from_model(model, device, "bf16", muon, 1.0, policy, verify=False, disk=[tmp_path]) as engine:
            params = [param for unit in engine.structure.units for param in unit.params]
            assert {param.name for param in params if param.trainable} == {p.name for p in params if p.matrices}
            outcomes.append(run(engine))
    assert all(losses == outcomes[0][0] and equal(weights, outcomes[0][1]) for losses, weights in outcomes)


def test_another_choice_of_matrices_is_refused_while_training(tmp_path: Path) -> None:
    with made("cpu", Policy(shares_memory=True), tmp_path) as engine:
        engine.set_optimizer(Muon(lr=1e-3, momentum=0.9, adamw=AdamW(lr=1e-4)))
        for other in (Muon(newton_schulz="fp32"), Muon(ns_steps=4), Muon(matrices=(("*.up_proj.weight", False),))):
            with pytest.raises(ConfigError, match="other matrices would be updated whole"):
                engine.set_optimizer(other)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    counts = (2, 3)
    with made("sim:1", Policy(placements=(HOST, DISK, HOST, HOST)), tmp_path / "disk") as engine:
        losses = [engine.step(unequal_batches(count)).loss for count in counts]
        folder = engine.save(tmp_path).wait()
    with Engine.from_checkpoint(
        folder, device="cpu", verify=False, max_grad_norm=0.5, numerics=Numerics("bf16", loss_chunk_tokens=5)
    ) as resumed:
        assert isinstance(resumed.optimizer, Muon)
        losses.append(resumed.step(unequal_batches(1)).loss)
        assert same((losses, resumed.master_weights()))
