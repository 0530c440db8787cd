"""What is fused in a layer, and that it is told by what it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig

from megatrain.model import fuse_layers, port_model
from megatrain.model.fuse_layers import fuse
from megatrain.model.fused import rms_norm
from megatrain.model.tiny import shrink, twin_from
from tests.kinds import stock_model, tiny_config

NORM, GATED, ROTARY = "RMS norm", "RMS norm with a gate", "rotary embedding"


def norms(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, NORM)


SANDWICH = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
FUSED = {
    "llama": norms("input_layernorm", "post_attention_layernorm") | {"mlp": "MLP gated by silu", "self_attn": ROTARY},
    "gemma3_text": norms("input_layernorm", "post_attention_layernorm", *SANDWICH)
    | norms("self_attn.q_norm", "self_attn.k_norm")
    | {"mlp": "MLP gated by gelu_tanh", "self_attn": ROTARY},
    "phi3": norms("input_layernorm", "post_attention_layernorm") | {"mlp": "MLP gated by silu", "self_attn": ROTARY},
    "cohere2": {"input_layernorm": "layer norm", "mlp": "MLP gated by silu", "self_attn": ROTARY},
    "mixtral": norms("input_layernorm", "post_attention_layernorm")
    | {"mlp.experts": "experts gated by silu", "self_attn": ROTARY},
    "gpt_oss": norms("input_layernorm", "post_attention_layernorm")
    | {"mlp.experts": "experts gated by quick_gelu, clipped", "self_attn": ROTARY},
    "gpt_neox": {"attention": ROTARY},
    "gpt2": {},
}


@pytest.mark.parametrize("kind", FUSED)
def test_functions_of_published_layers_are_fused(kind: str) -> None:
    layer = port_model(stock_model(tiny_config(kind), 0), torch.bfloat16).templates[0]
    names = [name for name, _ in layer.named_parameters()]
    assert fuse(layer) == FUSED[kind]
    assert [name for name, _ in layer.named_parameters()] == names
    assert fuse(layer) == {}  # what is fused is left alone
    assert fuse(copy.deepcopy(layer)) == {}


@pytest.mark.parametrize(
    ("kind", "name", "groups"), [("qwen3_next", "linear_attn.norm", 1), ("nemotron_h", "mixer.norm", 2)]
)
def test_norms_with_gates_of_published_layers_are_fused(kind: str, name: str, groups: int) -> None:
    layer = port_model(twin_from(shrink(AutoConfig.for_model(kind)), 0), torch.bfloat16).templates[0]
    assert fuse(layer)[name] == GATED
    norm: Any = layer.get_submodule(name).forward
    assert norm.forms[2].groups == groups


def test_layers_of_ordinary_width_are_fused_without_weights() -> None:
    config = tiny_config("llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=1)
    with torch.device("meta"):
        layer = stock_model(config, 0).model.layers[0]
    assert fuse(layer) == FUSED["llama"]


class Norm(nn.Module):
    """The norm of most models, or what `change` makes of it."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.change, self.epsilon = nn.Parameter(torch.ones(16)), change, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x, self.scale)


def normed(x: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize(
    ("change", "fused"),
    {
        "scaled": (lambda x, w: w * normed(x), NORM),
        "scaled by 1 + weight": (lambda x, w: normed(x) * (1 + w), NORM),
        "weight for nothing": (lambda x, w: normed(x), None),
        "in float32": (lambda x, w: w.float() * normed(x.float()), None),
        "another epsilon than it says": (lambda x, w: w * normed(x, 3e-6), None),
        "epsilon outside of the root": (lambda x, w: w * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6), None),
        "a least root": (lambda x, w: w * x / x.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-12), None),
        "by its length": (lambda x, w: w * functional.normalize(x, dim=-1), None),
        "limited": (lambda x, w: w * normed(x.clamp(max=20)), None),
        "over tokens": (lambda x, w: w * normed(x.transpose(-1, -2)).transpose(-1, -2), None),
        "dropping": (lambda x, w: functional.dropout(w * normed(x), 0.1), None),
        "failing": (lambda x, w: x.no_such_thing, None),
    }.values(),
    ids=lambda value: "" if callable(value) else str(value),
)
def test_norms_are_told_from_what_is_like_them(change: Callable[[Tensor, Tensor], Tensor], fused: str | None) -> None:
    layer = nn.Sequential(Norm(change))
    assert fuse(layer).get("0") == fused


class NormOfSlices(nn.Module):
    """A norm of every `size` channels, with a weight that all of them share, or without one."""

    def __init__(self, size: int, *, weighted: bool) -> None:
        super().__init__()
        self.size, self.weight = size, nn.Parameter(torch.full((size,), 3.0)) if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        made = normed(x.unflatten(-1, (-1, self.size)))
        return (made if self.weight is None else self.weight * made).flatten(-2)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [1, 8, 24])
def test_norms_of_slices_of_fixed_width_are_right_for_any_number_of_them(size: int, weighted: bool) -> None:
    layer, x = nn.Sequential(NormOfSlices(size, weighted=weighted)), torch.randn(2, 96)
    expected = layer(x)
    assert fuse(layer) == ({"0": NORM} if weighted else {})
    assert torch.equal(layer(x), expected)


class Mlp(nn.Module):
    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.c(self.combine(self.a(x), self.b(x)))
        return made


@pytest.mark.parametrize(
    ("combine", "fused"),
    {
        "first": (lambda a, b: functional.silu(a) * b, "MLP gated by silu"),
        "second": (lambda a, b: a * functional.gelu(b), "MLP gated by gelu"),
        "relu": (lambda a, b: functional.relu(a) * b, "MLP gated by relu"),
        "quick": (lambda a, b: a * torch.sigmoid(1.702 * a) * b, "MLP gated by quick_gelu"),
        "limited": (lambda a, b: functional.silu(a.clamp(max=7)) * b, None),
        "limited far away": (lambda a, b: functional.silu(a) * b.clamp(-1000, 1000), None),
        "shifted": (lambda a, b: functional.silu(a) * (b + 1), "MLP gated by silu"),
        "shifted by another number": (lambda a, b: functional.silu(a) * (b + 2), None),
        "linear": (lambda a, b: a * b, None),
        "dropping": (lambda a, b: functional.dropout(functional.silu(a) * b, 0.1), None),
        "one alone": (lambda a, b: functional.silu(a), None),
    }.values(),
    ids=lambda value: "" if callable(value) else str(value),
)
def test_gated_mlps_are_told_from_what_is_like_them(
    combine: Callable[[Tensor, Tensor], Tensor], fused: str | None
) -> None:
    layer = nn.Sequential(Mlp(combine)).eval()
    before = layer(x := torch.randn(3, 5, 12))
    assert fuse(layer).get("0") == fused
    assert not layer.training
    assert fused is None or torch.allclose(layer(x), before, atol=1e-6)


def test_calls_with_more_arguments_run_the_modules_own_code() -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
            return normed(x) if gate is None else normed(x) * gate

    layer, x = nn.Sequential(Gated()), torch.randn(2, 8)
    assert fuse(layer) == {"0": NORM}
    assert torch.equal(layer[0](x, x), normed(x) * x)
    assert torch.equal(layer[0](x, gate=x), normed(x) * x)


class GatedNorm(nn.Module):
    """A norm in groups of 4 channels that can have a gate, or what `change` makes of it."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight, self.change, self.group_size = nn.Parameter(torch.randn(16, generator=draw)), change, 4

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.change(x, self.weight, gate)


def in_groups(x: Tensor, size: int = 4) -> Tensor:
    return normed(x.float().unflatten(-1, (-1, size))).flatten(-2).to(x.dtype)


def silu(gate: Tensor | None) -> Tensor | float:
    return 1.0 if gate is None else functional.silu(gate.float())


GATED_NORMS: dict[str, tuple[Callable[..., Tensor], str | None, tuple[bool, bool]]] = {
    "the input": (lambda x, w, gate: w * in_groups(x * silu(gate)).to(x.dtype), GATED, (True, True)),
    "the result": (lambda x, w, gate: (w * normed(x) * silu(gate)).to(x.dtype), GATED, (True, True)),
    "necessary": (lambda x, w, gate: (w * normed(x) * gate.float().sigmoid()).to(x.dtype), GATED, (False, True)),
    "in groups of another size": (lambda x, w, gate: w * in_groups(x, 2), None, (False, False)),
    "by another function": (
        lambda x, w, gate: w * normed(x) * (1 if gate is None else gate.tanh()),
        NORM,
        (True, False),
    ),
    "in float32": (lambda x, w, gate: w * normed(x) * silu(gate), NORM, (True, False)),
    "in the gate's dtype": (
        lambda x, w, gate: (w * normed(x) * silu(gate)).to(x.dtype if gate is None else gate.dtype),
        *(NORM, (True, False)),
    ),
    "limited": (
        lambda x, w, gate: (w * normed(x) * silu(None if gate is None else gate.clamp(max=20))).to(x.dtype),
        *(NORM, (True, False)),
    ),
}
"""What is gated, or how -> the norm, what is fused, and whether a call without and one with a gate is."""


@pytest.mark.parametrize("name", GATED_NORMS)
def test_gated_norms_are_fused_where_they_are_what_they_seem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, fused, by_call = GATED_NORMS[name]
    layer, calls = nn.Sequential(GatedNorm(change)), list[object]()
    monkeypatch.setattr(fuse_layers, "rms_norm", lambda *args: calls.append(args) or rms_norm(*args))
    draw = torch.Generator().manual_seed(1)
    x, gate = torch.randn(2, 3, 16, generator=draw), torch.randn(2, 3, 16, generator=draw)
    assert fuse(copy.deepcopy(layer)).get("0") == fused
    fused_layer = copy.deepcopy(layer)
    fuse(fused_layer)
    for args, is_fused in zip(((x,), (x, gate)), by_call, strict=True):
        if name == "necessary" and len(args) == 1:
            continue
        calls.clear()
        assert torch.allclose(fused_layer[0](*args), layer[0](*args), atol=1e-6)
        assert bool(calls) == is_fused


def test_a_gate_that_is_named_or_of_another_shape_runs_the_modules_own_code() -> None:
    layer = nn.Sequential(GatedNorm(GATED_NORMS["the result"][0]))
    plain, x, gate = copy.deepcopy(layer), torch.ones(2, 1, 16), torch.ones(2, 3, 16)
    assert fuse(layer) == {"0": GATED}
    assert torch.equal(layer[0](x, gate=gate), plain[0](x, gate=gate))
    assert torch.equal(layer[0](x, gate), plain[0](x, gate))
    assert torch.equal(layer[0](x, None), plain[0](x))


def test_angles_in_float32_turn_channels_in_bfloat16_where_the_module_does_so() -> None:
    """Ernie 4.5 multiplies in float32 and returns bfloat16; Llama would return float32, and is left to its own code."""
    q, k, angle = torch.ones(2, 3, 5, 8, dtype=torch.bfloat16), torch.ones(2, 1, 5, 8), torch.ones(1, 5, 8)
    for kind, is_fused in (("ernie4_5", True), ("llama", False)):
        layer = port_model(twin_from(shrink(AutoConfig.for_model(kind)), 0), torch.bfloat16).templates[0]
        assert fuse(layer)["self_attn"] == ROTARY
        turn: Any = layer.get_submodule("self_attn").forward.__func__.__globals__["apply_rotary_pos_emb"]
        assert turn._fits(1, q, k.bfloat16(), angle, angle) == is_fused
        assert turn._fits(1, q, k.bfloat16(), angle.bfloat16(), angle.bfloat16())
        assert not turn._fits(1, q.float(), k, angle.bfloat16(), angle.bfloat16())
        for one, other in zip(
            turn(q, k.bfloat16(), angle, angle), turn.plain(q, k.bfloat16(), angle, angle), strict=True
        ):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
