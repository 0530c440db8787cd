"""Lion trains as the loop that its authors published: clipped or not, wherever its state is, with the same bits."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain import AdamW, Engine, Lion
from megatrain.errors import CheckpointError, ConfigError
from megatrain.model import ModelSource
from megatrain.spec import Numerics
from tests.integration.test_ranks import batches_of
from tests.integration.test_ranks import trained as ranks_trained
from tests.stock.test_without_gradients import CASES, STEPS, at_times, engine_of, named
from tests.tiny import equal, stock_gradients, tiny_model

LION = Lion(lr=1e-3, betas=(0.9, 0.97), weight_decay=0.1, no_decay=("*norm*",))
TWENTY = [STEPS[number % len(STEPS)] for number in range(20)]


@cache
def by_its_authors(clip: float | None) -> dict[str, Tensor]:
    """google/automl, lion/lion_pytorch.py; a parameter without a gradient is left."""
    model = at_times()
    momenta = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batches in TWENTY:
        _, gradients = stock_gradients(model, batches)
        for name, p in model.named_parameters():
            p.grad = gradients[name] if gradients[name].any() else None
        nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        for name, p in model.named_parameters():
            if p.grad is not None:
                p.data.mul_(1 - LION.lr * (LION.weight_decay if LION.decays(name, p.shape) else 0))
                update = momenta[name] * 0.9 + p.grad * (1 - 0.9)
                p.data.add_(update.sign_(), alpha=-LION.lr)
                momenta[name].mul_(0.97).add_(p.grad, alpha=1 - 0.97)
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(case: str, folder: Path, device: str = "", stop: int = len(STEPS)) -> Engine:
    named, policy, clip = CASES[case]
    engine = engine_of(at_times(), device or named, policy, clip, optimizer=LION, disk=[folder])
    for batches in TWENTY[:stop]:
        engine.step(batches)
    return engine


@cache
def plainest(clip: float | None, stop: int = len(STEPS)) -> dict[str, Tensor]:
    with trained("cpu" if clip is None else "cpu, clipped", Path(), stop=stop) as engine:
        return engine.master_weights()


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.slow), 0.5])
def test_twenty_steps_equal_the_authors_loop(clip: float | None) -> None:
    """But for a few elements at whose step rounding decides about a sign."""
    found, start = plainest(clip, 20), dict(at_times().named_parameters())
    for name, value in by_its_authors(clip).items():
        apart = (found[name] - value).abs()
        assert (apart > 1e-6).sum() <= 2e-3 * apart.numel(), name
        assert torch.equal(value, start[name]) == ("never" in name or not value.numel()), name


@named(CASES, "on the disk, clipped", "streamed, clipped", "on the device, clipped")
def test_no_bit_depends_on_where_its_state_is(case: str, tmp_path: Path) -> None:
    with trained(case, tmp_path) as engine:
        assert equal(engine.master_weights(), plainest(CASES[case][2]))


@pytest.mark.gpu
def test_no_bit_depends_on_where_its_state_is_on_a_gpu(tmp_path: Path) -> None:
    results = []
    for case in ("sim, clipped", "streamed, clipped", "on the device, clipped"):
        with trained(case, tmp_path, "cuda:0") as engine:
            results.append(engine.master_weights())
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


def test_ranks_update_alike() -> None:
    model, batches = tiny_model(), batches_of(2)
    many, one = (ranks_trained(size, model, batches, steps=2, optimizer=LION) for size in (2, 1))
    assert equal(many.weights, one.weights)


@pytest.mark.parametrize("case", ["cpu, clipped", pytest.param("on the disk", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_with_the_same_bits(case: str, tmp_path: Path) -> None:
    _, policy, clip = CASES[case]
    with trained(case, tmp_path, stop=3) as engine:
        folder = engine.save(tmp_path / "run").wait()
    options: Any = {"policy": policy, "max_grad_norm": clip, "disk": [tmp_path], "verify": False}
    options["numerics"] = Numerics("fp32", loss_chunk_tokens=5)
    with Engine.from_checkpoint(folder, source=ModelSource(at_times()), **options) as engine:
        engine.restore(folder)
        assert engine.optimizer == LION
        for batches in STEPS[3:]:
            engine.step(batches)
        assert equal(engine.master_weights(), plainest(clip))


def test_the_state_of_another_optimizer_is_refused_or_starts_as_zeros(tmp_path: Path) -> None:
    """As from the same weights without a state: AdamW counts its updates from 1."""
    with Engine.from_model(tiny_model(), "cpu", "fp32", LION, verify=False) as engine:
        engine.step(TWENTY[0])
        folder = engine.save(tmp_path).wait()
        with pytest.raises(ConfigError, match="AdamW cannot go on with what Lion has kept; make another engine"):
            engine.set_optimizer(AdamW())
    found: list[dict[str, Tensor]] = []
    options: Any = {"precision": "fp32", "optimizer": AdamW(lr=1e-2), "verify": False}
    with pytest.raises(CheckpointError, match="was trained by lion, and adamw cannot go on with its state; use lion"):
        Engine.from_checkpoint(folder, **options)
    for engine in (Engine.from_checkpoint(folder, new="zero", **options), Engine.from_pretrained(folder, **options)):
        with engine:
            engine.step(TWENTY[1])
            engine.step(TWENTY[2])
            found.append(engine.master_weights())
    assert equal(*found)
    with Engine.from_model(tiny_model(), "cpu", "fp32", verify=False) as engine:
        before = engine.master_weights()
        with pytest.raises(CheckpointError, match="was trained by lion"):
            engine.restore(folder)
        assert equal(engine.master_weights(), before)
        engine.step(TWENTY[1])
