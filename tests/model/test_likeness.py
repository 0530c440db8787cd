"""What is learned of a layer serves every layer like it, and none that differs in anything a run depends on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from megatrain.model import learn, likeness, port_model
from megatrain.model.likeness import learned
from megatrain.spec import LayerProfile
from tests.kinds import KINDS, stock_model, tiny_config
from tests.tiny import tiny_model

Counted = list[nn.Module]


@pytest.fixture
def learned_anew(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The layers that are run to be learned, with nothing known before."""
    seen: Counted = []
    honest = learn._learn_profile

    def counted(layer: nn.Module, whole: Any) -> Any:
        seen.append(layer)
        return honest(layer, whole)

    monkeypatch.setattr(learn, "_learn_profile", counted)
    monkeypatch.setattr(likeness, "_LEARNED", {})
    return seen


@pytest.fixture
def counted_only(learned_anew: Counted, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """As `learned_anew`, but nothing is learned of them, which takes long and is not asked about."""

    def counted(layer: nn.Module, _: Any) -> Any:
        learned_anew.append(layer)
        return ANSWER

    monkeypatch.setattr(learn, "_learn_profile", counted)
    monkeypatch.setattr(learn, "_learn_masked", lambda layer, masked, profile, parts: profile)
    return learned_anew


@pytest.mark.parametrize(
    "kind",
    ["llama", "gemma2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "deepseek_v3", "bamba"))],
)
def test_a_model_that_was_met_before_is_not_learned_again(kind: str, learned_anew: Counted) -> None:
    assert kind in KINDS
    first = port_model(stock_model(tiny_config(kind), 0), torch.float32)
    kinds = len(learned_anew)
    assert kinds >= 1
    again = port_model(stock_model(tiny_config(kind), 1), torch.float32)  # other weights, of which nothing is learned
    assert (again.spec, again.parts) == (first.spec, first.parts)
    assert len(learned_anew) == kinds


def no_gradient(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.requires_grad_(False)


def a_hook(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: output)


def an_object(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.anything = object()


def another_function(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def an_attribute(model: PreTrainedModel) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-3


def another_mode(model: PreTrainedModel) -> None:
    model.eval()


def a_config(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.config._attn_implementation = "eager"


def a_buffer(model: PreTrainedModel) -> None:
    """Which reaches layers as an argument: rotary tables."""
    model.model.rotary_emb.inv_freq.mul_(2)


CHANGES = [no_gradient, a_hook, an_object, another_function, an_attribute, another_mode, a_config, a_buffer]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_run_depends_on_calls_for_another_one(
    change: Callable[[PreTrainedModel], None], counted_only: Counted
) -> None:
    port_model(tiny_model(num_hidden_layers=1), torch.float32)
    changed = tiny_model(num_hidden_layers=1)
    change(changed)
    port_model(changed, torch.float32)
    assert len(counted_only) == 2


def test_another_dtype_calls_for_another_run(counted_only: Counted) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        port_model(tiny_model(num_hidden_layers=1), dtype)
    assert len(counted_only) == 2


def test_a_function_of_the_class_put_there_from_outside_calls_for_another_run(
    counted_only: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(num_hidden_layers=1)
    port_model(model, torch.float32)
    kind = type(model.model.layers[0].mlp)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden: 2 * plain(self, hidden))
    port_model(model, torch.float32)
    assert len(counted_only) == 2


ANSWER = LayerProfile(), ()


def layer_with(value: Any) -> nn.Module:
    layer = nn.Identity()
    layer.value = value
    return layer


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), ((1,), [1]), ({1: 2, 3: 4}, {3: 4, 1: 2}), (partial(int, "1"), partial(int, "2"))],
)
def test_values_that_are_equal_but_not_alike_are_told_apart(
    one: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likeness, "_LEARNED", {})
    asked = []
    for value in (one, other, one):
        learned(layer_with(value), (), lambda: asked.append(1) or ANSWER)
    assert len(asked) == 2


def test_no_more_are_remembered_than_that_and_a_failure_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "_LEARNED", {})
    for value in range(likeness.MOST + 3):
        learned(layer_with(value), (), lambda: ANSWER)
    assert len(likeness._LEARNED) == likeness.MOST

    def fail() -> Any:
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011
            learned(layer_with("new"), (), fail)


def test_a_layer_that_holds_itself_is_told_too() -> None:
    layer = layer_with([])
    layer.value.append(layer.value)
    assert learned(layer, (), lambda: ANSWER) == ANSWER
