"""Models whose layers pass more than the hidden state equal the stock model in loss and every gradient."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from megatrain import AdamW, Engine, Policy
from megatrain.engine.step_state import Activations
from megatrain.errors import MegaTrainError, ScheduleError
from megatrain.model import port_model
from megatrain.model.tiny import shrink, twin_from, with_dropout
from megatrain.plan.spec_file import as_fields, read_model
from megatrain.schedule.build import build_step
from megatrain.schedule.check import check
from megatrain.schedule.contents import Hidden, Side, SideGradient
from megatrain.schedule.deps import derive_waits
from megatrain.schedule.ops import Schedule, Use
from megatrain.spec import Numerics, Placement, UpdateTime, Work
from megatrain.train.parity import compare, full_settings, short_cases, short_settings
from tests.tiny import FAMILIES, batch, equal, tiny_model, unequal_batches

FEW_TOKENS = 40
PASSING = {
    "gemma3n_text": {True},
    "gemma4_text": {True},
    "glm_moe_dsa": {False},
    "hy_v4": {False},
    "zaya": {True},
    "inkling2_text": {True},
}
"""Model type -> whether its side values need a gradient: inputs of each layer, router states and outputs of earlier
layers do, sparse indices not. The hidden state of the first does not begin with the batch."""
BLOCKS = {"n_layers_per_attn_res_block": 2, "num_hidden_layers": 4}
SHARING: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 39},
    "inkling2_text": {**BLOCKS, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid_sliding"]},
}
QUICK = ("zaya", "inkling2_text")  # `gemma4_text` trains with shared keys, too, below

SHARDS = Policy(shard_nbytes=1 << 13)
ON_DEVICE = Placement("device", "device", "device")
POLICIES = {
    "recomputed": replace(SHARDS, activations="recompute"),
    "kept": replace(SHARDS, activations="keep", grad_slots=1),
    "offloaded": replace(SHARDS, activations_by_layer=(("offload",),), offload_slots=1),
    "offloaded by shard": replace(SHARDS, wait_for="shard", activations_by_layer=(("offload", "offload_chosen"),)),
    "offloaded in rounds": replace(
        SHARDS, activations_by_layer=(("offload_attention",), ("graph", "offload")), micro_batches_per_round=2
    ),
    "offloaded and dropped": replace(SHARDS, activations_by_layer=(("offload",), ("drop",)), offload_slots=1),
    "stored": replace(SHARDS, activations_by_layer=(("chosen", "offload_chosen"), ("attention", "graph"))),
    "by shard": replace(SHARDS, wait_for="shard", weight_slots=1),
    "in one slot": replace(SHARDS, wait_for="shard", read_ahead_nbytes=4096),
    "in rounds": replace(SHARDS, micro_batches_per_round=1),
    "updated during backward": replace(SHARDS, update="during_backward"),
    "on the device": replace(SHARDS, placements=(ON_DEVICE,) * 4),
}

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def make(model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
    return Engine.from_model(model, device, numerics=numerics, policy=policy, verify=False)


def twin(kind: str, **fields: Any) -> PreTrainedModel:
    fields = SHARING.get(kind, {}) | fields
    return twin_from(with_dropout(shrink(AutoConfig.for_model(kind, **fields)), 0.0), 0)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in PASSING]
)
def test_loss_and_gradients_equal_the_stock_model(kind: str) -> None:
    model = twin(kind)
    with make(model, "cpu", Numerics("fp32"), Policy(shares_memory=True)) as engine:
        sides = engine.parts.streamer.context.spec.sides
    assert {side.differentiable for side in sides} == PASSING[kind]
    report = compare(model, make, short_cases(model), [*short_settings(), full_settings()[-1]], 1e-6, enough=1)
    assert report.ok, report.worst


def test_what_a_layer_gets_and_does_not_read_is_no_side_value() -> None:
    """Each layer chooses positions of its own, and is called with those of the layer before."""
    model = twin("glm_moe_dsa", indexer_types=["full"] * 78)
    assert port_model(model, torch.float32).structure.sides == ()
    report = compare(model, make, short_cases(model)[:1], short_settings()[:1], 1e-6, enough=1)
    assert report.ok, report.worst


def test_keys_and_values_of_earlier_layers_get_the_gradients_of_all_that_use_them() -> None:
    model = twin("gemma4_text", num_kv_shared_layers=2)
    report = compare(model, make, short_cases(model), [*short_settings(), full_settings()[-1]], 1e-6, enough=1)
    assert report.ok, report.worst


def stepped(model: PreTrainedModel, device: str, policy: Policy) -> dict[str, Tensor]:
    """Gradients, and losses and weights after a step, of micro-batches of 30, 18 and 13 tokens."""
    clip, batches = None if policy.update == "during_backward" else 0.5, unequal_batches(3)
    for each in batches:  # a twin's vocabulary may be smaller
        each["input_ids"] %= FEW_TOKENS
        each["labels"] = each["input_ids"].masked_fill(each["labels"] < 0, -100)
    options: dict[str, Any] = {"optimizer": AdamW(lr=1e-2), "max_grad_norm": clip, "policy": policy, "verify": False}
    with Engine.from_model(model, device, numerics=Numerics("fp32", loss_chunk_tokens=5), **options) as engine:
        found = {f"gradient {name}": gradient for name, gradient in engine.gradients(batches).items()}
        found["losses"] = torch.tensor([engine.step(batches).loss, engine.evaluate(batches)], dtype=torch.float64)
        return found | engine.master_weights()


@cache
def plainest(kind: str, update: UpdateTime) -> dict[str, Tensor]:
    return stepped(small(kind), "cpu", Policy(shares_memory=True, activations="keep", update=update))


def small(kind: str) -> PreTrainedModel:
    """With a head of its own, which rounds need."""
    return tiny_model(kind) if kind in FAMILIES else twin(kind, tie_word_embeddings=False)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", ["gemma4", *(pytest.param(each, marks=pytest.mark.slow) for each in PASSING)])
def test_no_policy_changes_a_bit(kind: str, name: str) -> None:
    model, policy = small(kind), POLICIES[name]
    if policy.placements:
        policy = replace(policy, placements=(ON_DEVICE,) * (model.config.num_hidden_layers + 2))
    assert equal(stepped(model, "sim:3", policy), plainest(kind, policy.update))


@pytest.mark.parametrize(
    "kind", ["gemma4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("zaya", "inkling2_text"))]
)
def test_what_layers_pass_on_leaves_the_device_and_comes_back(kind: str) -> None:
    """And takes no more of it with more micro-batches."""
    spec, on_device = port_model(small(kind), torch.float32).spec, []
    for count in (4, 8):
        schedule = build_step(spec, Numerics("fp32"), POLICIES["offloaded"], Work((20,) * count))
        check(schedule)
        for copy in ("OFFLOAD", "RELOAD"):
            moved = {type(op.reads[0].content) for op in schedule.ops if op.kind == copy}
            assert moved >= {Hidden if kind == "inkling2_text" else Side, SideGradient}, copy
        uses = (Use.SIDE_VALUES, Use.SIDE_GRADIENTS, Use.OFFLOAD_SLOTS)
        on_device.append(sum(each.nbytes for each in schedule.buffers.values() if each.use in uses))
    assert on_device[0] == on_device[1]


def schedule_of(kind: str) -> Schedule:
    spec = port_model(small(kind), torch.float32).structure
    return build_step(spec, Numerics("fp32"), Policy(activations="recompute"), Work((40, 20), length=20))


def test_the_checker_misses_no_side_value_that_is_lost() -> None:
    """A value or a sum of gradients that is not there is found, as is one that is replaced or that nothing takes.

    All ops that touch one are on one stream, so no wait of theirs can be missing."""
    schedule = schedule_of("gemma4")
    check(schedule)
    kinds, streams = set(), set()
    for index, op in enumerate(schedule.ops):
        for name in ("reads", "writes"):
            for access in getattr(op, name):
                if not isinstance(access.content, Side | SideGradient):
                    continue
                kinds.add((type(access.content), name))
                streams.add(op.stream)
                if op.micro or (name, type(access.content)) == ("reads", Side):
                    continue
                ops, rest = list(schedule.ops), [each for each in getattr(op, name) if each != access]
                ops[index] = op._replace(**{name: tuple(rest)})
                with pytest.raises(ScheduleError, match=r"but finds|which nothing reads"):
                    check(derive_waits(replace(schedule, ops=tuple(ops), waits=())))
    assert kinds == {(kind, name) for kind in (Side, SideGradient) for name in ("reads", "writes")}
    assert streams == {"compute"}


def test_a_layer_gets_only_side_values_that_its_op_declares() -> None:
    with make(tiny_model("gemma4"), "sim:3", Numerics("fp32"), Policy()) as engine:
        batches = unequal_batches(1)
        engine.gradients(batches)
        ((key, schedule),) = engine.parts.schedules.known.items()
        index = next(i for i, op in enumerate(schedule.ops) if any(isinstance(a.content, Side) for a in op.reads))
        ops, op = list(schedule.ops), schedule.ops[index]
        ops[index] = op._replace(reads=tuple(each for each in op.reads if not isinstance(each.content, Side)))
        engine.parts.schedules.known[key] = replace(schedule, ops=tuple(ops))
        with pytest.raises(MegaTrainError, match="Marker"):
            engine.gradients(batches)


def test_a_side_value_lives_until_the_last_backward_that_reads_it() -> None:
    schedule = schedule_of("gemma4")
    (begin, end), *_ = (life for name, life in schedule.lifetimes.items() if name.startswith("device/side_values/"))
    assert (schedule.ops[begin].kind, schedule.ops[begin].unit) == ("FORWARD", 1)
    assert (schedule.ops[end].kind, schedule.ops[end].unit) == ("BACKWARD", 2)


@pytest.mark.parametrize(
    "kind", ["gemma4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("zaya", "inkling2_text"))]
)
def test_the_planned_bytes_are_those_of_the_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each value and each sum of gradients in a run, and of all at once."""
    ported, held = port_model(small(kind), torch.float32), dict[str, int]()
    batches, most = [batch(2, 20, 0), batch(1, 20, 1)], 0
    schedule = build_step(ported.spec, Numerics("fp32"), Policy(), Work((40, 20), length=20))
    assert read_model({"model": json.loads(json.dumps(as_fields(ported.spec)))}, "a file") == ported.spec
    keep, add = Activations.keep_sides, Activations.add_side_gradients

    def noting(inner: Callable[..., None]) -> Callable[..., None]:
        def wrapped(self: Activations, *args: Any) -> None:
            nonlocal most
            inner(self, *args)
            held.update({buffer: each.untyped_storage().nbytes() for buffer, each in self.sides.items()})
            most = max(most, sum(each.untyped_storage().nbytes() for each in self.sides.values()))

        return wrapped

    monkeypatch.setattr(Activations, "keep_sides", noting(keep))
    monkeypatch.setattr(Activations, "add_side_gradients", noting(add))
    with make(small(kind), "cpu", Numerics("fp32"), Policy()) as engine:
        engine.gradients([{**each, **dict.fromkeys(each, each["input_ids"] % FEW_TOKENS)} for each in batches])
    planned = {
        name: each for name, each in schedule.buffers.items() if each.use in (Use.SIDE_VALUES, Use.SIDE_GRADIENTS)
    }
    assert held == {name: each.nbytes for name, each in planned.items()}
    alive = [
        sum(
            planned[name].nbytes
            for name, (begin, end) in schedule.lifetimes.items()
            if name in planned and begin <= at <= end
        )
        for at in range(len(schedule.ops))
    ]
    assert most == max(alive)


def test_chosen_positions_are_priced_as_many_as_there_are_in_long_sequences() -> None:
    ported = port_model(twin("glm_moe_dsa"), torch.float32)
    for module in ported.templates[0].modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 48
    (side,) = ported.measured._measurement._sized((8, 16, 32), 10_000)  # type: ignore[union-attr]
    assert [side.nbytes(10 * length, length) for length in (8, 32, 48, 10_000)] == [
        10 * length * 4 * min(length, 48) for length in (8, 32, 48, 10_000)
    ]


def test_values_below_all_that_is_trained_get_no_gradient() -> None:
    model = twin("zaya")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name)
    spec = port_model(model, torch.float32).structure
    assert not any(spec.wants_gradient(side) for side in spec.sides)
    report = compare(model, make, short_cases(model), short_settings(), 1e-6, enough=1)
    assert report.ok, report.worst
