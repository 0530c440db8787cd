"""Several ranks train one model: the numbers are those of one rank, on any device, by any policy, with any delays.

Here ranks are threads; `test_rank_processes` has them as processes. Where each has one micro-batch, sums of gradients
have the order that they have with one rank, so bits are the same; else losses agree to rounding.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain import AdamW, Engine, Lion, Policy
from megatrain.checkpoint import range_writer
from megatrain.checkpoint.manifest import full_check
from megatrain.dist import ALONE, World
from megatrain.engine import DTYPES, reports
from megatrain.engine.gradient_accumulation import GradientAccumulator
from megatrain.errors import BatchError, MegaTrainError, NonFinite, PlanError, RankError
from megatrain.model import ModelSource, port_model
from megatrain.optim import Muon, Optimizer
from megatrain.schedule.passes import pieces
from megatrain.spec import Numerics, Placement, Precision, UpdateTime
from megatrain.train.optimizer import StreamedOptimizer
from megatrain.train.options import SourceInUnits
from tests.adapted import adapted
from tests.ranks import together, worlds
from tests.tiny import batch, tiny_model

MAKING = threading.Lock()
"""Making an engine draws random numbers, and its model once more for files is made without memory: for all threads."""
SHARDS = Policy(shard_nbytes=16 << 10)
DISK = Placement(weights="disk", low_bits="disk", moments="disk", gradients="disk")
KEPT, ON_DEVICE = Placement(weights="device"), Placement("device", "device", "device")
ADAMW, LION = AdamW(lr=1e-2, weight_decay=0.1), Lion(lr=1e-3, weight_decay=0.1)
MUON = Muon(lr=1e-2, adamw=AdamW(lr=3e-3))


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    metrics: list[Any]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    table: dict[tuple[str, str], int]
    written_nbytes: int
    """By the steps to the disk tier, as each of them says of all ranks."""
    own_written_nbytes: int


def of_rank(
    world: World,
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    *,
    steps: int = 3,
    precision: Precision = "fp32",
    policy: Policy = SHARDS,
    device: str = "cpu",
    **options: Any,
) -> Trained:
    own = batches[world.rank :: world.size]
    with MAKING:
        numerics = Numerics(precision, loss_chunk_tokens=64)
        options = {"max_grad_norm": 0.5, "optimizer": ADAMW, "verify": False, **options}
        source, dtype = ModelSource(model), DTYPES[precision]
        ported = port_model(model, dtype)
    options |= {"device": device, "numerics": numerics, "policy": policy, "world": world}
    with Engine.from_source(SourceInUnits(source, ported), **options) as engine:
        disk = engine.parts.disk
        before = disk.written_nbytes if disk else 0
        outputs = [engine.step(own) for _ in range(steps)]
        nbytes = sum(each.written_nbytes for each in outputs), (disk.written_nbytes if disk else 0) - before
        gradients = engine.gradients(own)
        losses = [each.loss for each in outputs] + [engine.evaluate(own)]
        norms, metrics = [each.grad_norm for each in outputs], [each.by_micro_batch for each in outputs]
        return Trained(
            losses, norms, metrics, gradients, engine.master_weights(), engine.diagnostics.memory_table(), *nbytes
        )


def trained(size: int, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], **how: Any) -> Trained:
    """What all ranks have come to, which is the same. With one rank, by the same policy."""
    if size == 1:
        return of_rank(ALONE, model, batches, **how)
    seed = how.pop("seed", None)
    found = together(worlds(size, seed), lambda world: of_rank(world, model, batches, **how))
    assert found[0].written_nbytes == sum(each.own_written_nbytes for each in found)
    for other in found[1:]:
        assert other[:3] == found[0][:3]
        assert other.written_nbytes == found[0].written_nbytes
        assert same(other.weights, found[0].weights)
        assert same(other.gradients, found[0].gradients)
    return found[0]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Also in the signs of zeros."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.int32), right[name].view(torch.int32)) for name in left
    )


def batches_of(count: int, *, masked: bool = False) -> list[dict[str, Tensor]]:
    """masked: only the first has targets, so that gradients have the same bits on any number of ranks."""
    batches = [batch(2, 5 + index % 3, seed=index, padded=index % 2) for index in range(count)]
    for each in batches[1:] if masked else ():
        each["labels"][:] = -100
    return batches


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "precision", "size", "optimizer"),
    [
        ("llama", "bf16", 3, ADAMW),
        ("mixtral-balanced", "fp32", 3, LION),
        pytest.param("llama", "fp32", 2, LION, marks=pytest.mark.slow),
        pytest.param("gemma4", "fp32", 2, ADAMW, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", "bf16", 2, ADAMW, marks=pytest.mark.slow),
    ],
)
def test_one_micro_batch_per_rank_matches_one_rank_bitwise(
    family: str, precision: Precision, size: int, optimizer: Optimizer
) -> None:
    """In bf16 sums are in float32 with one rank, too."""
    model, batches = tiny_model(family), batches_of(size)
    many, one = (trained(of, model, batches, precision=precision, seed=7, optimizer=optimizer) for of in (size, 1))
    assert many.losses == one.losses
    assert many.norms == pytest.approx(one.norms, rel=1e-13)
    assert many.metrics == one.metrics
    assert same(many.gradients, one.gradients)
    assert same(many.weights, one.weights)


POLICIES: dict[str, Policy] = {
    "by shard": replace(SHARDS, wait_for="shard", weight_slots=1),
    "kept": replace(SHARDS, activations="keep", grad_slots=1),
    "mixed": replace(SHARDS, activations_by_layer=(("offload",), ("input",), ("drop",)), recompute_slots=1),
    "pageable": replace(SHARDS, transfer="pageable", pinned_staging_slots=1),
    "one shard": Policy(),
    "rounds": replace(SHARDS, micro_batches_per_round=1),
    "disk": replace(SHARDS, placements=(DISK,) * 5),
    "on the device": replace(SHARDS, placements=(ON_DEVICE,) * 5),
    "on the device, in the host and on the disk": replace(
        SHARDS, placements=(ON_DEVICE, KEPT, DISK, ON_DEVICE, KEPT), weight_slots=1
    ),
    "shared": replace(SHARDS, delivery="shared"),
    "shared, and kept": replace(SHARDS, delivery="shared", placements=(KEPT,) * 5),
    "shared, by shard": replace(SHARDS, delivery="shared", wait_for="shard", weight_slots=1, transfer="pageable"),
    "shared, but for the disk": replace(
        SHARDS, delivery="shared", placements=(replace(DISK, weights="host"),) * 5, micro_batches_per_round=1
    ),
}


def by_two(**how: Any) -> Trained:
    return trained(2, tiny_model("llama"), batches_of(4), precision="bf16", steps=2, **how)


plain_by_two = cache(by_two)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, marks=pytest.mark.slow if (place + other) % 2 else ())
        for place, name in enumerate(POLICIES)
        for other, device in enumerate(("cpu", "sim:3"))
    ],
)
def test_no_policy_and_no_device_changes_a_bit(name: str, device: str, tmp_path: Path) -> None:
    plain, disk = plain_by_two(), {"disk": [tmp_path]} if "disk" in name else {}
    found = by_two(policy=POLICIES[name], device=device, seed=1, **disk)
    assert found.losses == plain.losses
    assert found.norms == plain.norms
    assert same(found.weights, plain.weights)
    assert (found.written_nbytes > 0) == ("disk" in name)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of matrices in a layer, of which a rank makes one or a few orthogonal."""
    monkeypatch.setattr(pieces, "GROUP_NBYTES", 4096)


@cache
def by_one(family: str, size: int, update: UpdateTime, newton_schulz: Literal["bf16", "fp32"] = "bf16") -> Trained:
    return with_matrices(family, 1, size, replace(SHARDS, update=update), newton_schulz)


def with_matrices(
    family: str, size: int, batches: int, policy: Policy, newton_schulz: Literal["bf16", "fp32"] = "bf16", **how: Any
) -> Trained:
    """Two steps with Muon, a micro-batch for each of so many ranks."""
    optimizer, clip = replace(MUON, newton_schulz=newton_schulz), None if policy.update == "during_backward" else 0.5
    how = {"precision": "bf16", "steps": 2, "optimizer": optimizer, "max_grad_norm": clip, "policy": policy, **how}
    return trained(size, tiny_model(family), batches_of(batches), **how)


@pytest.mark.few(3)
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize(
    ("family", "newton_schulz"),
    [
        ("llama", "fp32"),
        ("qwen3-moe", "bf16"),
        pytest.param("llama", "bf16", marks=pytest.mark.slow),
        pytest.param("gpt2", "fp32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
@pytest.mark.parametrize("name", ["disk", "shared", "on the device, in the host and on the disk", "plain"])
def test_whole_matrices_get_the_bits_of_one_rank(
    name: str, update: UpdateTime, size: int, family: str, newton_schulz: Literal["bf16", "fp32"], tmp_path: Path
) -> None:
    policy = replace(POLICIES.get(name, SHARDS), update=update, streamed_updates=0.6 * (name in ("plain", "shared")))
    one = by_one(family, size, update, newton_schulz)
    many = with_matrices(family, size, size, policy, newton_schulz, device="sim:3", seed=7, disk=[tmp_path])
    assert many.losses == one.losses
    assert same(many.gradients, one.gradients)
    assert same(many.weights, one.weights)


@pytest.mark.usefixtures("small_groups")
def test_a_rank_that_fails_while_it_makes_matrices_orthogonal_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, failures = StreamedOptimizer.orthogonalize, list[BaseException]()

    def failing(self: StreamedOptimizer, unit: int, group: Any, direction: Tensor) -> None:
        if self._world.rank == 1 and unit == 2:
            raise MegaTrainError("is broken", where="rank 1")
        honest(self, unit, group, direction)

    def work(world: World) -> None:
        try:
            of_rank(world, tiny_model("llama"), batches_of(3), optimizer=MUON)
        except BaseException as failure:
            failures.append(failure)
            raise

    monkeypatch.setattr(StreamedOptimizer, "orthogonalize", failing)
    with pytest.raises(MegaTrainError, match="is broken"):
        together(worlds(3), work)
    assert sorted(type(failure).__name__ for failure in failures) == ["MegaTrainError", "RankError", "RankError"]


def test_ranks_that_have_other_updates_left_are_told() -> None:
    """One that has made an update has no gradient any more, of which another may need its part of a direction."""

    def work(world: World) -> str:
        with MAKING:
            engine = Engine.from_model(tiny_model("llama"), policy=SHARDS, verify=False, world=world, optimizer=MUON)
        with engine:
            engine.step(batches_of(2)[world.rank : world.rank + 1])
            assert engine.parts.optimizer._update is not None
            if world.rank == 1:
                engine.parts.optimizer._update.units.discard(2)
            with pytest.raises(RankError, match=r"rank 1: trains with updates left \[0, 1, 3, 4\], where rank 0"):
                engine.parts.flush()
            engine.parts.optimizer.restore(1)
            return ""

    together(worlds(2), work)


AT_ONCE = replace(SHARDS, update="during_backward")
UNCLIPPED: dict[str, Policy] = {
    "at once": AT_ONCE,
    "streamed, at once": replace(AT_ONCE, streamed_updates=1.0),
    "streamed, and kept": replace(SHARDS, streamed_updates=1.0, placements=(Placement(), *(KEPT,) * 4)),
    "at once, shared": replace(AT_ONCE, delivery="shared", micro_batches_per_round=1),
    "streamed, shared": replace(SHARDS, delivery="shared", streamed_updates=0.7),
    "at once, on the device": replace(AT_ONCE, placements=(ON_DEVICE, *(Placement(),) * 3, ON_DEVICE), weight_slots=1),
    "at once, on the disk": replace(AT_ONCE, placements=(DISK,) * 5),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp32"])
@pytest.mark.parametrize("name", UNCLIPPED)
def test_immediate_and_device_updates_change_no_bit(name: str, precision: Precision, tmp_path: Path) -> None:
    model, batches = tiny_model("llama"), batches_of(4)
    how: dict[str, Any] = {"precision": precision, "steps": 2, "max_grad_norm": None, "device": "sim:2"}
    disk = {"disk": [tmp_path]} if "disk" in name else {}
    plain = trained(2, model, batches, **how)
    found = trained(2, model, batches, policy=UNCLIPPED[name], seed=1, **disk, **how)
    assert found.losses == plain.losses
    assert found.norms == pytest.approx(plain.norms, rel=1e-13)
    assert same(found.weights, plain.weights)


def test_each_rank_holds_only_its_share() -> None:
    model, batches = tiny_model("llama", hidden_size=256, intermediate_size=512), batches_of(4)
    one, four = (trained(of, model, batches, precision="bf16", steps=1) for of in (1, 4))
    for use in ("weights", "optimizer state", "gradients"):
        assert four.table["host", use] == pytest.approx(one.table["host", use] / 4, rel=0.02)


@pytest.mark.parametrize(
    ("family", "size"),
    [("llama-tied", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("llama", 2), ("gemma2", 4)))],
)
def test_uneven_micro_batches_match_one_rank_to_rounding(family: str, size: int) -> None:
    model, batches = tiny_model(family), batches_of(5)
    many, one = (trained(of, model, batches, steps=4) for of in (size, 1))
    assert many.losses == pytest.approx(one.losses, rel=1e-6)
    assert many.norms == pytest.approx(one.norms, rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("llama", "fp32"),
        ("mixtral", "bf16"),
        pytest.param("llama", "bf16", marks=pytest.mark.slow),
        pytest.param("mixtral", "fp32", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_masked_labels_change_no_bit(precision: Precision, family: str) -> None:
    model, batches = tiny_model(family), batches_of(3, masked=True)
    many, one = (trained(of, model, batches, precision=precision) for of in (3, 1))
    assert many.losses == one.losses
    assert same(many.gradients, one.gradients)
    assert same(many.weights, one.weights)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_frozen_parts_stay_frozen_and_unclipped_steps_are_not_clipped(clip: float | None) -> None:
    model, batches = tiny_model("llama"), batches_of(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name or "norm" in name)
    many, one = (trained(of, model, batches, max_grad_norm=clip, policy=SHARDS) for of in (2, 1))
    assert same(many.weights, one.weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(many.weights[name], parameter.detach()) != parameter.requires_grad


def test_router_loss_weights_use_the_global_step() -> None:
    model, batches = tiny_model("mixtral-balanced"), batches_of(2)
    shares = [0.25, 0.75]

    def work(world: World) -> float:
        with MAKING:
            engine = Engine.from_model(model, precision="fp32", policy=SHARDS, verify=False, world=world)
        with engine:
            own = slice(world.rank, None, world.size)
            return engine.step(batches[own], router_weights=shares[own]).loss

    assert together(worlds(2), work) == [work(ALONE)] * 2


@pytest.mark.slow
def test_results_do_not_depend_on_rank_timing() -> None:
    """Nor in the tests of policies, whose ranks have other delays than those of the plain run."""
    model, batches = tiny_model("llama"), batches_of(5)
    found = [trained(3, model, batches, precision="bf16", seed=seed) for seed in (1, 2)]
    assert found[0][:3] == found[1][:3]
    assert same(found[0].weights, found[1].weights)


def all_refuse(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> list[str]:
    """What a step raises on each rank, and that the next one is as if there had been none."""

    def work(world: World) -> tuple[str, float]:
        with MAKING:
            engine = Engine.from_model(model, precision="fp32", policy=SHARDS, verify=False, world=world)
        with engine:
            with pytest.raises((NonFinite, BatchError, RankError)) as caught:
                engine.step(batches[world.rank :: world.size])
            return f"{caught.type.__name__}: {caught.value}", engine.step([batch(2, 6, seed=world.rank)]).loss

    found = together(worlds(3), work)
    assert len({loss for _, loss in found}) == 1
    return [line for line, _ in found]


def nonfinite_on_rank_1(model: nn.Module) -> NonFinite:
    """The one error that all of three ranks raise, if only the batch of rank 1 has token 95."""
    batches = batches_of(3)
    for index, each in enumerate(batches):
        each["input_ids"].clamp_(max=94)
        each["labels"].clamp_(max=94)
        each["input_ids"][0, 0] = 95 if index == 1 else 5

    def work(world: World) -> NonFinite:
        with MAKING:
            engine = Engine.from_model(model, precision="fp32", policy=SHARDS, verify=False, world=world)
        with engine, pytest.raises(NonFinite) as caught:
            engine.step(batches[world.rank :: world.size])
        return caught.value

    found = together(worlds(3), work)
    assert len({str(each) for each in found}) == 1
    assert len({each.parameters for each in found}) == 1
    return found[0]


def test_a_nonfinite_loss_on_one_rank_stops_all_with_one_message() -> None:
    """Which names the rank."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[95] = torch.inf
    error = nonfinite_on_rank_1(model)
    assert error.parameters == ("model.embed_tokens.weight",)
    assert "on rank 1" in str(error)


def test_a_nonfinite_loss_of_finite_weights_names_module_and_rank_on_all() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:95] = 0.0
        model.model.layers[1].mlp.up_proj.weight.mul_(1e6)
        model.model.layers[1].mlp.down_proj.weight[5] = 3e38
    error = nonfinite_on_rank_1(model)
    assert "on rank 1, first not finite: the output of model.layers.1.mlp.down_proj on rank 1; " in str(error)


def fails_first(world: World, policy: Policy, clip: float | None, then: Exception | None = None) -> list[str]:
    """What two steps of a rank raise, if on rank 1 the first loss is nan. then: raised there by the call after it."""
    calls = 0

    def loss(log_probs: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += world.rank
        if calls == 2 and then is not None:
            raise then
        return -log_probs.sum() * (math.nan if calls == 1 else 1.0)

    lines = []
    how: dict[str, Any] = {"precision": "fp32", "policy": policy, "max_grad_norm": clip, "verify": False}
    with MAKING:
        engine = Engine.from_model(tiny_model("llama"), world=world, **how)
    with engine:
        for _ in range(2):
            try:
                engine.step(batches_of(2)[world.rank :: world.size], loss_fn=loss)
            except MegaTrainError as error:
                lines.append(f"{type(error).__name__}: {error}")
                if not isinstance(error, NonFinite):
                    world.close()  # as at the end of a process, so that others do not wait for this rank
                    break
    return lines


def test_a_loss_is_not_computed_again_where_units_were_updated() -> None:
    """Nothing is said then about modules, of which none has run."""
    first, second = together(worlds(2), lambda world: fails_first(world, AT_ONCE, None))
    assert first == second
    assert first[0].startswith("NonFinite: the loss is nan on rank 1; units before it have been updated")


def test_a_rank_that_fails_as_a_loss_is_computed_again_says_so() -> None:
    """Else it would be a step ahead of the others, which wait for it in the forward pass."""
    first, second = together(worlds(2), lambda world: fails_first(world, SHARDS, 1.0, RuntimeError("of a user")))
    assert len(first) == len(second) == 1
    assert first[0].startswith("RankError: ")
    assert "of a user" in second[0]


def test_invalid_micro_batches_on_one_rank_are_reported_on_all() -> None:
    batches = batches_of(3)
    batches[2]["input_ids"][0, 0] = 96
    first, second, own = all_refuse(tiny_model("llama"), batches)
    assert first == second
    assert first.startswith("RankError: rank 2: BatchError: ")
    assert own.startswith("BatchError: ")
    assert "96" in own


def test_fewer_micro_batches_than_ranks_are_refused() -> None:
    lines = all_refuse(tiny_model("llama"), batches_of(2))
    assert all("at least one micro-batch" in line for line in lines)


def test_a_nonfinite_gradient_on_one_rank_stops_all() -> None:
    def loss_of(rank: int) -> Any:
        def loss(log_probs: Tensor, batch: Any) -> Tensor:
            return -log_probs.sum() + ((log_probs[0, 2] * 0).sqrt() if rank == 2 else 0)

        return loss

    def work(world: World) -> str:
        with MAKING:
            engine = Engine.from_model(model, precision="fp32", policy=SHARDS, verify=False, world=world)
        with engine, pytest.raises(NonFinite) as caught:
            engine.step(batches[world.rank :: world.size], loss_fn=loss_of(world.rank))
        assert engine.diagnostics.applied_updates() == dict.fromkeys(engine.diagnostics.applied_updates(), 0)
        return str(caught.value)

    model, batches = tiny_model("llama"), batches_of(3)
    (line,) = set(together(worlds(3), work))
    assert "the gradient of rank 2 is not finite for lm_head.weight and 1 more" in line
    assert math.isfinite(trained(3, model, batches, steps=1).losses[0])


def test_magnitudes_of_gradients_are_read_only_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are still on their way while later shards are reduced."""
    on_their_way: dict[int, list[tuple[Tensor, Tensor]]] = {}
    reduce, honest = World.reduce, reports.reports_of_all_ranks

    def late(self: World, *tensors: Tensor) -> Tensor:
        largest = reduce(self, *tensors)
        landed = torch.full_like(largest, math.nan)
        on_their_way.setdefault(self.rank, []).append((landed, largest))
        return landed

    def after(context: Any, step: Any) -> Any:
        for landed, largest in on_their_way.pop(context.world.rank, ()):
            landed.copy_(largest)
        return honest(context, step)

    model, batches = tiny_model("llama"), batches_of(2)
    at_once = trained(2, model, batches, steps=2).losses
    monkeypatch.setattr(World, "reduce", late)
    monkeypatch.setattr(reports, "reports_of_all_ranks", after)
    assert trained(2, model, batches, steps=2).losses == at_once


@pytest.mark.parametrize("poisoned", ["input_layernorm", "self_attn.o_proj", "mlp.down_proj"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_named_by_its_parameter_on_all(
    poisoned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns it."""
    model, batches, finish = tiny_model("llama"), batches_of(3), GradientAccumulator.finish

    def spoilt(self: GradientAccumulator) -> list[str]:
        for name, view in self._views.items():
            if threading.current_thread().name == "rank 1" and name.endswith(f"layers.1.{poisoned}.weight"):
                view *= math.inf
        return finish(self)

    def work(world: World) -> str:
        with MAKING:
            engine = Engine.from_model(model, precision="fp32", policy=SHARDS, verify=False, world=world)
        with engine, pytest.raises(NonFinite) as caught:
            engine.step(batches[world.rank :: world.size])
        return str(caught.value)

    monkeypatch.setattr(GradientAccumulator, "finish", spoilt)
    (line,) = set(together(worlds(3), work))
    said = f"model.layers.1: the gradient of rank 1 is not finite for model.layers.1.{poisoned}.weight; nothing was"
    assert line.startswith(said)


def test_immediate_updates_are_torn_on_all_by_one_nonfinite_gradient() -> None:
    """All say so, also where all that they have of it was updated, and none goes on."""
    model, batches = tiny_model("llama"), batches_of(2)

    def loss(log_probs: Tensor, batch: Any) -> Tensor:
        return -log_probs.sum()

    def spoilt(log_probs: Tensor, batch: Any) -> Tensor:
        def spoil(gradient: Tensor) -> Tensor:
            return torch.full_like(gradient, torch.inf)

        log_probs.register_hook(spoil)
        return -log_probs.sum()

    def work(world: World) -> list[str]:
        how: dict[str, Any] = {"precision": "fp32", "policy": AT_ONCE, "max_grad_norm": None, "verify": False}
        with MAKING:
            engine = Engine.from_model(model, world=world, **how)
        lines = []
        with engine:
            for loss_fn in (spoilt if world.rank else loss, loss):
                with pytest.raises(NonFinite) as caught:
                    engine.step(batches[world.rank :: world.size], loss_fn=loss_fn)
                lines.append(str(caught.value))
        return lines

    first, second = together(worlds(2), work)
    assert first == second
    assert "the gradient of rank 1 is not finite" in first[0]
    assert "start again from a saved model" in first[0]
    assert "an interrupted step has updated units on only some ranks" in first[1]


def test_differing_policies_are_reported_before_computing() -> None:
    model, batches = tiny_model("llama"), batches_of(2)

    def work(world: World) -> None:
        policy = replace(SHARDS, shard_nbytes=SHARDS.shard_nbytes * (1 + world.rank))
        of_rank(world, model, batches, policy=policy)

    with pytest.raises(RankError, match="ranks 0 and 1 do not match"):
        together(worlds(2), work)


@pytest.mark.parametrize(
    ("unlike", "told"),
    [
        ({"seed": 1}, "rank 1: trains with seed 1, where rank 0 trains with 0"),
        ({"optimizer": AdamW(lr=1e-3)}, "rank 1: trains with lr 0.001, where rank 0 trains with 0.01"),
        ({"optimizer": AdamW(lr=1e-2, weight_decay=0.2)}, r"rank 1: trains with optimizer .*weight_decay=0\.2"),
        ({"max_grad_norm": 0.25}, "rank 1: trains with max_grad_norm 0.25, where rank 0 trains with 0.5"),
    ],
)
def test_ranks_that_would_not_train_alike_are_told_before_anything_is_computed(
    unlike: dict[str, Any], told: str
) -> None:
    """Each would update its part of the weights in its own way, and no number would say so."""
    model, batches = tiny_model("llama"), batches_of(2)

    def work(world: World) -> str:
        with pytest.raises(RankError, match=told) as caught:
            of_rank(world, model, batches, **(unlike if world.rank == 1 else {}))
        return str(caught.value)

    assert len(set(together(worlds(2), work))) == 1


def test_ownership_cannot_change_during_training() -> None:
    model = tiny_model("llama")

    def work(world: World) -> str:
        with MAKING:
            engine = Engine.from_model(model, precision="fp32", policy=SHARDS, verify=False, world=world)
        with engine:
            engine.step(batches_of(2)[world.rank : world.rank + 1])
            engine.adopt(replace(SHARDS, weight_slots=1))
            with pytest.raises(PlanError, match="shard_nbytes"):
                engine.adopt(Policy())
            return ""

    together(worlds(2), work)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saved_again(world: World, checkpoint: Path, folder: Path, precision: Precision) -> tuple[Path, Path, float, str]:
    """A checkpoint and a model of the same state, written by these ranks; loss and weights of the step that follows.

    Two ranks do not know the same folder."""
    with MAKING:
        options: Any = {"policy": SHARDS, "max_grad_norm": 0.5, "numerics": Numerics(precision, loss_chunk_tokens=64)}
        engine = Engine.from_checkpoint(checkpoint, world=world, verify=False, **options)
    with engine:
        engine.parts.store.frozen_checksum()  # by all ranks, before one has the lock
        with MAKING:
            save = engine.save(
                folder / ("elsewhere" if (world.rank, world.size) == (1, 2) else "again"), {"position": 3}
            )
        model = engine.save_pretrained(folder / "model")
        own = batches_of(4, masked=True)[world.rank :: world.size]
        output = engine.step(own)
        again = save.wait(60)
        assert save.streamed == ("the ranks do not share its folder" if world.size == 2 else "")
        with MAKING:
            engine.restore(again)
        assert engine.step(own) == replace(output, stall_seconds=ANY)
        weights = b"".join(value.numpy().tobytes() for value in engine.master_weights().values())
        return again, model, output.loss, hashlib.sha256(weights).hexdigest()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("frozen", "precision", "optimizer"),
    [
        (True, "fp32", MUON),
        pytest.param(True, "fp32", None, marks=pytest.mark.slow),
        pytest.param(False, "bf16", None, marks=pytest.mark.slow),
        pytest.param(False, "fp32", None, marks=pytest.mark.slow),
        pytest.param(True, "bf16", None, marks=pytest.mark.slow),
        pytest.param(False, "bf16", MUON, marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_resumes_and_writes_the_same_files(
    tmp_path: Path, precision: Precision, frozen: bool, optimizer: Muon | None
) -> None:
    """Byte for byte, whatever number wrote what they go on from; steps that follow do not change what is written."""
    options: Any = {"optimizer": optimizer} if optimizer else {}
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "mlp" in name)

    def first(world: World) -> Path:
        with MAKING:
            numerics = Numerics(precision, loss_chunk_tokens=64)
            engine = Engine.from_model(
                model, numerics=numerics, policy=SHARDS, max_grad_norm=0.5, world=world, **options
            )
        with engine:
            for _ in range(2):
                engine.step(batches_of(3)[world.rank :: world.size])
            engine.weights.flush()
            engine.parts.store.frozen_checksum()  # by all ranks, before one has the lock
            with MAKING:
                save = engine.save(tmp_path / "first", {"position": 3})
            return save.wait(60)

    written = together(worlds(3), first)[0]
    followed = set()
    for size in (1, 2, 4):
        folder = tmp_path / str(size)

        def work(world: World, folder: Path = folder) -> tuple[Path, Path, float, str]:
            return saved_again(world, written, folder, precision)

        found = [work(ALONE)] if size == 1 else together(worlds(size, seed=size), work)
        assert len(set(found)) == 1
        again, exported, *after = found[0]
        followed.add(tuple(after))
        assert files_in(again) == files_in(written)
        assert files_in(exported) == files_in(tmp_path / "1" / "model")
    assert len(followed) == 1


def test_device_state_is_saved_and_moves_to_the_host_and_back(tmp_path: Path) -> None:
    model, batches = tiny_model("llama"), batches_of(2)

    def work(world: World, policies: Sequence[Policy], folder: Path) -> tuple[dict[str, bytes], list[float]]:
        with MAKING:
            engine = Engine.from_model(model, "sim:1", "bf16", policy=policies[0], verify=False, world=world)
        losses = []
        with engine:
            with MAKING:  # and the model for files, once: a save of what is on the device waits for other ranks
                save = engine.save(folder / "begin")
            save.wait(60)
            for policy in policies:
                engine.adopt(policy)
                losses.append(engine.step(batches[world.rank :: world.size]).loss)
            engine.weights.flush()
            save = engine.save(folder)
            losses.append(engine.step(batches[world.rank :: world.size]).loss)
            return {name: data for name, data in files_in(save.wait(60)).items() if "safetensors" in name}, losses

    there = replace(SHARDS, placements=(ON_DEVICE,) * 5)
    moving = [SHARDS, there, replace(there, placements=(KEPT, ON_DEVICE) * 2 + (ON_DEVICE,)), there]
    staying = together(worlds(2), lambda world: work(world, [SHARDS] * 4, tmp_path / "staying"))
    assert together(worlds(2), lambda world: work(world, moving, tmp_path / "moving")) == staying


def test_unreliable_shared_writes_fall_back_to_rank_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, loses, model, streamed = range_writer.write_all, [True], tiny_model("llama"), list[str]()

    def write(file: range_writer.OpenFile, data: memoryview, start: int) -> None:
        if not loses[0]:
            honest(file, data, start)

    def work(world: World) -> None:
        with MAKING:
            engine = Engine.from_model(model, precision="fp32", policy=SHARDS, verify=False, world=world)
        with engine:
            with MAKING:
                save = engine.save(tmp_path, step=1)
            with pytest.raises(MegaTrainError, match=r"holds between byte 0 and byte .* not what rank 0 has written"):
                save.wait(60)
            loses[0] = False
            with MAKING:
                save = engine.save(tmp_path, step=2)
            assert full_check(save.wait(60)) == []
            streamed.append(save.streamed)

    monkeypatch.setattr(range_writer, "write_all", write)
    together(worlds(2), work)
    assert streamed == ["what the ranks had written together was not there afterwards"] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fields", "optimizer"),
    [
        ({}, MUON),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, AdamW()),
        pytest.param({}, AdamW(), marks=pytest.mark.slow),
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, AdamW(), marks=pytest.mark.slow),
        pytest.param({"trainable_token_indices": [3, 5]}, AdamW(), marks=pytest.mark.slow),
    ],
)
def test_adapters_train_alike_on_any_number_of_ranks(
    fields: dict[str, Any], optimizer: AdamW | Muon, tmp_path: Path
) -> None:
    """What is in a file twice too (a tied embedding), and what is there but frozen (an adapted head)."""
    model, batches = adapted("llama-tied" if fields else "llama", **fields), batches_of(2)

    def work(world: World) -> tuple[str, bytes, bytes]:
        with MAKING:
            engine = Engine.from_model(model, "cpu", "bf16", optimizer, policy=SHARDS, verify=False, world=world)
        with engine:
            for _ in range(2):
                engine.step(batches[world.rank :: world.size])
            folder, checksum = engine.save_pretrained(tmp_path / str(world.size)), engine.parts.store.frozen_checksum()
            with MAKING:
                save = engine.save(tmp_path / f"{world.size}-checkpoint")
            files = [each / "adapter_model.safetensors" for each in (folder, save.wait(60))]
            assert full_check(files[1].parent) == []
            return checksum, files[0].read_bytes(), files[1].read_bytes()

    (alone,) = together(worlds(1), work)
    assert all(found == alone for found in together(worlds(2), work))


def test_a_failed_save_on_rank_zero_fails_on_all_and_training_continues(tmp_path: Path) -> None:
    model, batches = tiny_model("llama"), batches_of(3)

    def refuse(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    def work(world: World) -> tuple[str, str, float]:
        with MAKING:
            engine = Engine.from_model(model, precision="fp32", policy=SHARDS, verify=False, world=world)
        with engine:
            with MAKING:
                save = engine.save(tmp_path, write_more=refuse)
            with pytest.raises(MegaTrainError) as saving:
                save.wait(60)
            with pytest.raises(MegaTrainError) as exporting:
                engine.save_pretrained(tmp_path / "model", write_more=refuse)
            return str(saving.value), str(exporting.value), engine.step(batches[world.rank :: world.size]).loss

    found = together(worlds(3), work)
    assert all("No space left on device" in line for *lines, _ in found for line in lines)
    assert all(line.startswith("rank 0: ") for *lines, _ in found[1:] for line in lines)
    assert len({loss for *_, loss in found}) == 1
    assert not list(tmp_path.iterdir())


def test_on_a_cpu_backward_does_not_wait_for_the_previous_layers_reduce() -> None:
    model, batches = tiny_model("llama"), batches_of(2)

    def work(world: World) -> list[tuple[float, float]]:
        carrier: Any = world.device
        with MAKING:
            engine = Engine.from_model(model, precision="fp32", policy=Policy(), verify=False, world=world)
        with engine:
            carrier._delay = lambda: 0.2  # far longer than a busy machine keeps a thread from its turn
            engine.step([batches[world.rank]])
            timeline = engine.parts.streamer.timeline
            assert timeline is not None
            ops = [(op.kind, op.unit) for op in timeline.schedule.ops]
            begins, ends = dict(zip(ops, timeline.starts, strict=True)), dict(zip(ops, timeline.ends, strict=True))
            return [(begins["BACKWARD", unit], ends["REDUCE", unit + 1]) for unit in engine.parts.ported.spec.layers]

    for pairs in together(worlds(2), work):
        assert all(backward < summed for backward, summed in pairs)


def test_a_bit_flipped_in_transit_changes_the_result() -> None:
    """Or these tests would see nothing."""
    model, batches = tiny_model("llama"), batches_of(2)

    def spoil(number: int, received: Tensor) -> None:
        if number == 3:
            received[2] ^= 64

    right = trained(2, model, batches, steps=1)
    spoilt = together(worlds(2, spoil=spoil), lambda world: of_rank(world, model, batches, steps=1))
    assert not same(spoilt[0].weights, right.weights)
