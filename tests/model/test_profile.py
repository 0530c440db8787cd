"""What a layer is said to take is what it takes."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain import Engine, Policy
from megatrain.model import port_model, profile
from megatrain.model.peak import DeviceAttention, SkipLargeProducts, recorded_backward
from megatrain.spec import ModelSpec
from megatrain.spec.layer_profile import LayerProfile
from tests.kinds import stock_model, tiny_config
from tests.tiny import FAMILIES, batch, tiny_model


@cache
def spec_of(family: str) -> ModelSpec:
    """The measured specification of a family's tiny model in float32."""
    return port_model(tiny_model(family), torch.float32).spec


@cache
def spec_of_kind(kind: str, **changes: Any) -> ModelSpec:
    """That of a kind of model as the library initialises it."""
    return port_model(stock_model(tiny_config(kind, **changes), 0), torch.float32).spec


def kept_by_the_stock_layer(model: PreTrainedModel, rows: int, length: int) -> int:
    """Bytes that autograd keeps of layer 1 inside the stock model's own forward pass, weights not counted."""
    layer = model.get_submodule(port_model(model, torch.float32).stack)[1]
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []
    given: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        if inside and not {tensor.untyped_storage().data_ptr()} & (weights | given):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inside: list[bool] = []

    def enter(module: object, args: object, kwargs: dict[str, object]) -> None:
        inside.append(True)
        values = [value for item in kwargs.values() for value in (item if isinstance(item, tuple) else (item,))]
        given.update(value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor))

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**{key: value for key, value in batch(rows, length, 0).items() if key != "labels"}, use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("family", "rows", "length"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("llama", 1, 24), ("qwen3", 3, 11))),
        ("gemma2", 1, 24),
        ("gpt2", 3, 11),
    ],
)
def test_the_bytes_of_a_kept_graph_are_predicted(family: str, rows: int, length: int) -> None:
    """And the layer's input, which in float32 it keeps too."""
    spec = spec_of(family)
    found = spec.units[2].profile.kept(rows, length) + rows * length * spec.hidden_size * 4
    assert found == pytest.approx(kept_by_the_stock_layer(tiny_model(family), rows, length), rel=0.02)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "changes"), [("deepseek_v3", {"first_k_dense_replace": 2}), ("gpt2", {"attn_pdrop": 0.1})]
)
def test_scores_that_a_cpu_alone_makes_are_counted_there_alone(kind: str, changes: dict[str, Any]) -> None:
    """CUDA has a fused kernel for values of another width than the keys', and for dropout; a cpu has none."""
    model, spec = stock_model(tiny_config(kind, **changes), 0), spec_of_kind(kind, **changes)
    assert spec.units[2].profile.graph.per_pair == 0
    assert all(peak.per_pair == 0 for peak in spec.units[2].profile.backward.device)
    on_a_cpu = spec.on_a_cpu()
    found = on_a_cpu.units[2].profile.kept(1, 24) + 24 * spec.hidden_size * 4
    assert found == pytest.approx(kept_by_the_stock_layer(model, 1, 24), rel=0.02)
    if kind == "gpt2":  # an engine measures the layers anew
        with Engine.from_model(model, "cpu", precision="fp32", verify=False) as engine:
            assert engine.parts.ported.spec == on_a_cpu


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [1, 3])
def test_attention_that_is_not_run_is_counted_like_one_that_is(rows: int) -> None:
    """Without dropout a cpu has a fused kernel, which gives and saves the same."""
    without, with_dropout = (spec_of_kind("gpt2", attn_pdrop=share).units[2].profile for share in (0.0, 0.1))
    assert with_dropout.attention_flops == without.attention_flops
    assert with_dropout.kept(rows, 24) == pytest.approx(without.kept(rows, 24), abs=16)
    for way in ("forward", "backward"):
        taken = [getattr(each, way).nbytes(False, rows * 24, 24) for each in (with_dropout, without)]
        assert taken[0] == pytest.approx(taken[1], rel=0.01)


def test_frozen_weights_count_no_gradients_or_saved_inputs() -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    spec = port_model(model, torch.float32).spec
    layer, head = spec.units[2], spec.units[-1]
    found = layer.profile.kept(3, 11) + 3 * 11 * spec.hidden_size * 4
    assert found == pytest.approx(kept_by_the_stock_layer(model, 3, 11), rel=0.02)
    assert found < 0.8 * kept_by_the_stock_layer(tiny_model("llama"), 3, 11)
    for unit in (layer, head):
        trained = max((4 * param.numel for param in unit.params if param.trainable), default=0)
        frozen = max(4 * param.numel for param in unit.params if not param.trainable)
        most = max(part.fixed for part in unit.profile.backward.device)
        assert most < 1.01 * trained + 1000 < frozen


def test_layers_with_different_frozen_weights_are_measured_separately() -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.0." not in name)
    spec = port_model(model, torch.float32).spec
    first, second = (spec.units[index].profile.kept(3, 11) for index in (1, 2))
    assert first < 0.8 * second


def test_the_stand_in_attention_kernel_works_only_while_measuring() -> None:
    query, value = torch.ones(1, 2, 8, 24), torch.ones(1, 2, 8, 16)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    with SkipLargeProducts(), DeviceAttention() as measured:  # type: ignore[no-untyped-call]
        assert not nn.functional.scaled_dot_product_attention(query, query, value).any()
    assert measured.calls == 1
    with pytest.raises(NotImplementedError):
        attend(query, query, value, None, False)
    assert nn.functional.scaled_dot_product_attention(query, query, value).allclose(value)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in ("gpt2", "gemma2") else pytest.mark.slow) for family in FAMILIES],
)
def test_attention_flops_are_counted_for_every_kernel(family: str) -> None:
    """4 heads of 8: scores and their product with the values, two operations each per multiply-add."""
    found = spec_of(family).units[1].profile
    assert found.attention_flops == 2 * 2 * 4 * 8


def test_attention_that_adds_its_positions_within_the_product_is_counted() -> None:
    """BLOOM's scores are one `baddbmm` of three dimensions: 4 heads of 8, as above."""
    found = spec_of_kind("bloom").units[1].profile
    assert found.attention_flops == 2 * 2 * 4 * 8


def test_sliding_windows_limit_attention_flops() -> None:
    units = spec_of("gemma2").units
    assert [unit.profile.window for unit in units[1:-1]] == [4, None, 4, None]
    windowed, full = units[1].profile, units[2].profile
    attended = sum(min(position + 1, 4) for position in range(10)) / 10
    assert windowed.attended(10) == pytest.approx(attended)
    assert full.attended(10) == pytest.approx(5.5)


class Padding(nn.Module):
    """Whose tokens it pads to blocks of so many."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        padded = nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[1] % self.block))
        for _ in range(20):
            padded = padded.sigmoid()
        return hidden + padded[:, : hidden.shape[1]]


class Scoring(nn.Module):
    """Of each token's heads with keys that all heads have in common, which are copied for each of several rows."""

    def forward(self, hidden: Tensor) -> Tensor:
        heads = hidden.repeat(1, 1, 4).view(*hidden.shape[:2], 4, -1)
        scores = torch.matmul(heads, hidden.transpose(1, 2).unsqueeze(1))
        return hidden + scores.mean((-1, -2)).unsqueeze(-1)


def run_of(layer: nn.Module, rows: int) -> profile.Run:
    def run(tokens: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        given = torch.zeros(rows, tokens, 8, requires_grad=True)
        return layer(given), [], [given]

    return run


def profiled(layer: nn.Module) -> LayerProfile:
    return profile.profile_layer(layer, partial(run_of, layer), (), (8, 16, 32), 1 << 20)


@pytest.mark.parametrize("block", [1, 64, 256])
def test_layers_that_pad_to_blocks_are_measured_in_blocks(block: int) -> None:
    """At 8, 16 and 32 it takes as much, and a longer run shows that this does not go on."""
    layer = Padding(block)
    found = profiled(layer)
    assert found.block == block
    for tokens in (300, 1000):
        record = recorded_backward(run_of(layer, 1), tokens)
        assert sum(record.kept) <= found.kept(1, tokens) <= 1.1 * sum(record.kept)


def test_per_row_copies_are_counted_for_several_rows() -> None:
    layer = Scoring()
    found = profiled(layer)
    measured = recorded_backward(run_of(layer, 2), 100).peak
    alone, said = (each.backward.nbytes(False, 200, 100) for each in (found, found.of("several")))
    assert alone < 0.99 * measured
    assert measured <= said <= 1.01 * measured
    assert not profiled(Padding(1)).others


def test_an_engine_with_a_given_policy_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the policy is given. A plan, or `auto`, asks for it, once."""
    measured: list[nn.Module] = []
    honest = profile.profile_layer

    def counted(layer: nn.Module, *given: Any) -> LayerProfile:
        measured.append(layer)
        return honest(layer, *given)

    monkeypatch.setattr(profile, "profile_layer", counted)
    policy = Policy(shares_memory=True, activations="keep")
    with Engine.from_model(tiny_model(), "cpu", "fp32", policy=policy) as engine:
        engine.step([batch(1, 8, 0)])
        assert len(measured) == 0
        assert engine.structure.units[1].params == engine.parts.ported.spec.units[1].params
        kinds = len(measured)
        assert kinds > 0
        assert engine.parts.ported.spec.units[1].profile.graph.per_token > 0
        engine.step([batch(1, 8, 0)])
        assert len(measured) == kinds


def test_measuring_between_steps_changes_no_bit() -> None:
    """With dropout, whose numbers it must not draw from."""
    found = []
    for asks in (False, True):
        policy = Policy(shares_memory=True)
        model = tiny_model("gpt2", resid_pdrop=0.1)
        with Engine.from_model(model, "cpu", "fp32", policy=policy, verify=False) as engine:
            losses = [engine.step([batch(2, 8, 0)]).loss]
            before = torch.get_rng_state()
            assert not asks or engine.parts.ported.spec.units[1].profile.graph.per_token > 0
            assert torch.equal(before, torch.get_rng_state())
            losses.append(engine.step([batch(2, 8, 1)]).loss)
        found.append(losses)
    assert found[0] == found[1]
