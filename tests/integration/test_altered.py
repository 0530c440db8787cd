"""Models that their user has altered, by wrapped forwards, hooks or shared modules.

Each trains as it would by plain PyTorch, or is refused with the name of what is not supported.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from megatrain import Engine, Policy
from megatrain.errors import ModelError
from megatrain.spec import Numerics
from tests.tiny import relative_error, stock_gradients, tiny_model, unequal_batches

Alter = Callable[[PreTrainedModel], Any]


def wrapped(module: nn.Module, times: float = 1.3) -> None:
    old = module.forward
    module.forward = lambda x: old(x) * times  # type: ignore[method-assign]


def of_attention(model: PreTrainedModel) -> None:
    attention = model.model.layers[1].self_attn
    old = attention.forward

    @functools.wraps(old)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output, *rest = old(*args, **kwargs)
        return output * 1.3, *rest

    attention.forward = forward


def of_whole(model: PreTrainedModel, module: nn.Module) -> None:
    old = module.forward
    module.forward = lambda *args, **kwargs: old(*args, **kwargs)  # type: ignore[method-assign]


def by_default_argument(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = lambda x, old=layer.mlp.forward: old(x) * 1.3


def with_foreign(model: PreTrainedModel, extra: Tensor) -> None:
    class Added(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x * extra

    model.model.layers[2].mlp.act_fn = Added()


def of_hook(model: PreTrainedModel) -> None:
    other = model.model.layers[0].mlp.up_proj
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, output: output + other(args[0]))


def frozen(alter: Alter) -> Alter:
    def both(model: PreTrainedModel) -> None:
        alter(model)
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_(True)

    return both


FOREIGN: dict[str, tuple[Alter, str]] = {
    "one layer's mlp": (lambda m: wrapped(m.model.layers[1].mlp), r"model\.layers\.1\.mlp\.gate_proj\.weight"),
    "a frozen one": (frozen(lambda m: wrapped(m.model.layers[2].mlp)), r"model\.layers\.2\.mlp\.gate_proj\.weight"),
    "the last layer's norm": (lambda m: wrapped(m.model.layers[2].input_layernorm), r"2\.input_layernorm\.weight"),
    "attention, by functools.wraps": (of_attention, r"model\.layers\.1\.self_attn\.q_proj\.weight"),
    "a whole layer": (lambda m: of_whole(m, m.model.layers[1]), r"model\.layers\.1\.input_layernorm\.weight"),
    "every mlp, by a default argument": (by_default_argument, r"model\.layers\.0\.mlp\.gate_proj\.weight"),
    "the table": (lambda m: wrapped(m.model.embed_tokens), r"model\.embed_tokens\.weight"),
    "the head": (lambda m: wrapped(m.lm_head), r"lm_head\.weight"),
    "the last norm": (lambda m: wrapped(m.model.norm), r"model\.norm\.weight"),
    "positions": (lambda m: of_whole(m, m.model.rotary_emb), r"model\.rotary_emb\.inv_freq"),
    "the inner model": (lambda m: of_whole(m, m.model), r"model\.embed_tokens\.weight"),
    "the model": (lambda m: of_whole(m, m), r"model\.embed_tokens\.weight"),
    "a hook that reads another layer": (of_hook, r"model\.layers\.0\.mlp\.up_proj\.weight"),
    "a parameter of nobody's": (
        lambda m: with_foreign(m, nn.Parameter(torch.ones(48))),
        "does not belong to the model",
    ),
    "a leaf of nobody's": (
        lambda m: with_foreign(m, torch.ones(48, requires_grad=True)),
        "does not belong to the model",
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FOREIGN)
def test_code_reading_untrained_attributes_is_refused_by_name(name: str, precision: Any) -> None:
    alter, says = FOREIGN[name]
    model = tiny_model()
    alter(model)
    with pytest.raises(ModelError, match=says):
        Engine.from_model(model, precision=precision, verify=False)


# Hooks ------------------------------------------------------------------------------------------------------------


def doubled(module: nn.Module) -> None:
    """A forward that finds its module by itself, as `types.MethodType` binds it."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return type(self).forward(self, x) * 1.3

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def prefixed(model: PreTrainedModel) -> None:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 1.1} if "hidden_states" in kwargs else kwargs

    model.model.layers[1].self_attn.register_forward_pre_hook(before, with_kwargs=True)


class Low(nn.Module):
    """Another layer's module, with the shapes of those beside it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.5


def other_mlp(model: PreTrainedModel) -> None:
    model.model.layers[2].mlp = Low(model.model.layers[2].mlp)


def attention_hooked(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: output * 1.2)


HONOURED: dict[str, Alter] = {
    "a method bound to its module": lambda m: doubled(m.model.layers[1].mlp),
    "a forward by partial": lambda m: setattr(
        m.model.layers[1].mlp, "forward", functools.partial(_times, m.model.layers[1].mlp.forward)
    ),
    "another class in one layer": other_mlp,
    "forward hooks": attention_hooked,
    "a hook on a whole layer": lambda m: m.model.layers[0].register_forward_hook(lambda mod, args, out: out * 1.1),
    "a hook before attention": prefixed,
    "a hook on the table": lambda m: m.model.embed_tokens.register_forward_hook(lambda mod, args, out: out * 3),
    "a hook on the head": lambda m: m.lm_head.register_forward_hook(lambda mod, args, out: torch.tanh(out)),
    "backward hooks": lambda m: m.model.layers[1].mlp.register_full_backward_hook(
        lambda mod, given, taken: tuple(each * 0.5 for each in given)
    ),
    "a backward hook before": lambda m: m.model.layers[1].mlp.register_full_backward_pre_hook(
        lambda mod, taken: tuple(each * 0.5 for each in taken)
    ),
    "inputs that need a gradient": lambda m: m.enable_input_require_grads(),
    "a parametrization": lambda m: parametrize.register_parametrization(
        m.model.layers[1].mlp.up_proj, "weight", Scaled()
    ),
    "a parameter that nothing uses": lambda m: m.model.layers[1].mlp.register_parameter(
        "extra", nn.Parameter(torch.ones(5))
    ),
    "one parameter under two names of a layer": lambda m: setattr(
        m.model.layers[1].mlp.up_proj, "weight", m.model.layers[1].mlp.gate_proj.weight
    ),
}


def _times(old: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return old(x) * 1.3


@pytest.mark.few(14)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("name", HONOURED)
def test_supported_modifications_match_plain_pytorch(name: str, activations: Any) -> None:
    model = tiny_model()
    HONOURED[name](model)
    loss, expected = stock_gradients(model, unequal_batches())
    numerics, policy = Numerics("fp32", loss_chunk_tokens=7), Policy(activations=activations, shares_memory=True)
    with Engine.from_model(model, numerics=numerics, policy=policy, verify=False) as engine:
        found = engine.gradients(unequal_batches())
        assert engine.evaluate(unequal_batches()) == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys()
    for each, gradient in expected.items():
        assert relative_error(found[each], gradient) < 2e-6, each


# Refused by name ----------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """An mlp with a running mean of what it is given."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean(), alpha=0.1)
        return self.mlp(x)


def counting(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = Counting(model.model.layers[1].mlp)


def counting_table(model: PreTrainedModel) -> None:
    table = model.model.embed_tokens
    table.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    table.register_forward_hook(lambda module, args, output: module.calls.add_(1) and None)


def same_layer(model: PreTrainedModel) -> None:
    model.model.layers[2] = model.model.layers[0]


def same_mlp(model: PreTrainedModel) -> None:
    model.model.layers[2].mlp = model.model.layers[0].mlp


def shared_with_the_head(model: PreTrainedModel) -> None:
    model.model.layers[1].input_layernorm = model.model.norm


def in_one_memory(model: PreTrainedModel) -> None:
    model.lm_head.weight.data = model.model.embed_tokens.weight.data


def without_parameters(model: PreTrainedModel) -> None:
    class Nothing(nn.Module):
        attention_type = "full_attention"

        def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
            return hidden_states

    model.model.layers[1] = Nothing()


def reads_with_a_graph(model: PreTrainedModel) -> None:
    """A hook that reads what nobody trains only where gradients are wanted."""
    other = model.model.layers[0].mlp.up_proj
    model.model.layers[1].mlp.up_proj.register_forward_hook(
        lambda module, args, output: output + other(args[0]) if torch.is_grad_enabled() else output
    )


def centred(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))


REFUSED: dict[str, tuple[Alter, str]] = {
    "a gradient hook": (
        lambda m: m.model.embed_tokens.weight.register_hook(lambda gradient: gradient * 0),
        r"parameter model\.embed_tokens\.weight has a gradient hook",
    ),
    "a hook after accumulation": (
        lambda m: m.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda parameter: None),
        r"parameter model\.layers\.1\.mlp\.up_proj\.weight has a gradient hook",
    ),
    "a layer that counts": (counting, r"model\.layers\.1\.mlp\.mean"),
    "a table that counts": (counting_table, r"model\.embed_tokens\.calls"),
    "one layer twice": (same_layer, r"model\.layers\.0 is in the model twice, also as model\.layers\.2"),
    "one mlp in two layers": (same_mlp, r"model\.layers\.0\.mlp is in the model twice, also as model\.layers\.2\.mlp"),
    "one norm in a layer and behind": (shared_with_the_head, r"1\.input_layernorm is .* twice, also as model\.norm"),
    "one product in a layer twice": (
        lambda m: setattr(m.model.layers[1].mlp, "up_proj", m.model.layers[1].mlp.gate_proj),
        r"model\.layers\.1\.mlp\.gate_proj is in the model twice, also as model\.layers\.1\.mlp\.up_proj",
    ),
    "one parameter in two layers": (
        lambda m: setattr(m.model.layers[2].mlp.up_proj, "weight", m.model.layers[0].mlp.up_proj.weight),
        r"layers share a parameter: model\.layers\.2\.mlp\.up_proj\.weight is",
    ),
    "two parameters in one memory": (in_one_memory, r"lm_head\.weight shares memory with model\.embed_tokens\.weight"),
    "a layer without parameters": (without_parameters, r"its layer model\.layers\.1 has no parameters"),
    "a hook that reads where gradients are wanted": (
        reads_with_a_graph,
        r"reads model\.layers\.0\.mlp\.up_proj\.weight",
    ),
    "a last norm over tokens": (centred, "after its layers looks at several tokens"),
    "a head over tokens": (
        lambda m: m.lm_head.register_forward_hook(lambda mod, args, out: out.cumsum(1)),
        "after its layers looks at several tokens",
    ),
    "a hook on the model": (lambda m: m.register_forward_hook(lambda *_: None), r"the model has a hook"),
    "a hook on the inner model": (
        lambda m: m.model.register_forward_pre_hook(lambda *_: None),
        r"module model has a hook",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modifications_that_would_be_lost_are_refused_by_name(name: str) -> None:
    alter, says = REFUSED[name]
    model = tiny_model()
    alter(model)
    with pytest.raises(ModelError, match=says):
        Engine.from_model(model, precision="fp32", verify=False)


def test_stateful_layers_are_accepted_where_state_has_no_effect() -> None:
    model = tiny_model()
    counting(model)
    with Engine.from_model(model.eval(), precision="fp32", verify=False) as engine:
        engine.step(unequal_batches())


class Mixing(Low):
    """Not token-wise, as the modules beside it are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(1, keepdim=True))


def test_customised_layers_are_not_mistaken_for_the_first() -> None:
    model = tiny_model()
    model.model.layers[2].mlp = Mixing(model.model.layers[2].mlp)
    _, expected = stock_gradients(model, unequal_batches())
    numerics, policy = Numerics("fp32", mlp_chunk_tokens=3), Policy(shares_memory=True)
    with Engine.from_model(model, numerics=numerics, policy=policy, verify=False) as engine:
        found = engine.gradients(unequal_batches())
    for each, gradient in expected.items():
        assert relative_error(found[each], gradient) < 2e-6, each


class Switched(Low):
    """Token-wise in one layer and not in another."""

    def __init__(self, mlp: nn.Module, mixes: bool) -> None:
        super().__init__(mlp)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(1, keepdim=True) if self.mixes else x)


def test_layers_with_different_switches_are_distinguished() -> None:
    model = tiny_model()
    for index, layer in enumerate(model.model.layers):
        layer.mlp = Switched(layer.mlp, index == 2)
    _, expected = stock_gradients(model, unequal_batches())
    numerics, policy = Numerics("fp32", mlp_chunk_tokens=3), Policy(shares_memory=True)
    with Engine.from_model(model, numerics=numerics, policy=policy, verify=False) as engine:
        found = engine.gradients(unequal_batches())
    assert all(relative_error(found[name], expected[name]) < 2e-6 for name in expected)


def test_errors_about_modified_models_name_their_class() -> None:
    model = tiny_model()
    attention_hooked(model)
    with Engine.from_model(model, precision="fp32") as engine:
        assert engine.checked.state == "unchecked"
        assert "its class is computed correctly" in engine.checked.why
