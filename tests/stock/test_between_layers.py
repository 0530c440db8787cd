"""What a model computes between its layers runs in the next one, and equals the stock model in loss and gradients."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from megatrain import Policy
from megatrain.errors import ModelError
from megatrain.model import freeze_parameters, port_model
from megatrain.train.parity import truth
from tests.stock.image_models import image_batch, image_model, text_batch
from tests.stock.test_frozen_towers import gradients_of
from tests.stock.test_images import SMALL, errors, made, mixed
from tests.tiny import batch, equal, tiny_model

RECOMPUTED, KEPT = replace(SMALL, activations="recompute"), replace(SMALL, activations="keep")
MIXTURE = replace(SMALL, activations_by_layer=(("chosen", "input", "offload"),))
POLICIES = [
    pytest.param("cpu", None, id="cpu"),
    pytest.param("sim:3", RECOMPUTED, id="recomputed"),
    pytest.param("sim:4", KEPT, id="kept"),
    pytest.param("sim:5", MIXTURE, id="mixture", marks=pytest.mark.slow),
]


def assert_equal_to_stock(
    model: nn.Module, batches: list[dict[str, Tensor]], device: str, policy: Policy | None
) -> dict[str, Tensor]:
    loss, expected = truth(model, batches)  # type: ignore[arg-type]
    with made(model, device, policy) as engine:
        found = engine.gradients(batches)
        off = errors(found, {name: expected[name] for name in found})
        worst = max(off, key=lambda name: off[name])
        assert off[worst] < 1e-5, worst
        assert engine.evaluate(batches) == pytest.approx(loss, rel=1e-6)
        assert engine.step(batches).loss == pytest.approx(loss, rel=1e-6)
    return found


# Images ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "policy"), POLICIES)
def test_images_that_enter_between_layers_train_as_in_torch(device: str, policy: Policy | None) -> None:
    """Two micro-batches with an image, one without."""
    found = assert_equal_to_stock(image_model("qwen3_vl"), mixed("qwen3_vl"), device, policy)
    assert all(value.any() for name, value in found.items() if "deepstack" in name)


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:3", marks=pytest.mark.slow)])
def test_a_frozen_tower_gets_no_gradient_through_what_enters_between_layers(device: str) -> None:
    model = image_model("qwen3_vl")
    freeze_parameters(model, ["vision"])
    found = assert_equal_to_stock(model, mixed("qwen3_vl"), device, None if device == "cpu" else RECOMPUTED)
    assert not any("visual" in name for name in found)


def test_an_adapter_of_every_linear_layer_trains_as_in_peft() -> None:
    """In the tower, too, whose features enter between layers."""
    batches, config = mixed("qwen3_vl"), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    stock = get_peft_model(image_model("qwen3_vl"), config)
    with made(stock) as engine:
        found = engine.gradients(batches)
    expected = gradients_of(stock, batches)
    assert any("deepstack" in name and value.any() for name, value in expected.items())
    assert max(errors(found, expected).values()) < 1e-5


def test_features_behind_the_last_layer_are_refused() -> None:
    """They would have to enter in the head, which gets no images."""
    model = image_model("qwen3_vl")
    visual: Any = model.get_submodule("model.visual")
    visual.deepstack_visual_indexes = [0, 1]
    visual.deepstack_merger_list.append(copy.deepcopy(visual.deepstack_merger_list[0]))
    with made(model) as engine:
        with pytest.raises(ModelError, match="a tensor of the prologue enters behind the last layer"):
            engine.step([image_batch("qwen3_vl", 1)])
        assert engine.steps == 0
        engine.step([text_batch(1)])


# Any code -------------------------------------------------------------------------------------------------------------


class Loop(LlamaModel):
    """A Llama whose loop does something between its layers."""

    does: Callable[..., Tensor]
    ends: Callable[..., Tensor]
    tells: Callable[..., dict[str, Any]]

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **_: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        first, places = hidden, torch.arange(input_ids.shape[1], device=hidden.device)[None]
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        given = {"position_ids": places, "position_embeddings": self.rotary_emb(hidden, places)}
        seen, memo = list[Tensor](), dict[str, Tensor]()
        for index, layer in enumerate(self.layers):
            if index:
                seen.append(hidden)
                hidden = self.does(hidden, first=first, real=real.bool(), number=index, before=seen, memo=memo)
            hidden = layer(hidden, **self.tells(given, before=seen))
        hidden = self.ends(hidden, first=first, real=real.bool(), before=seen)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def unchanged(self: Any, hidden: Tensor, **_: Any) -> Tensor:
    hidden.float().mean()  # of no use
    return hidden[:, :]


def looping(
    does: Callable[..., Any] = unchanged,
    *,
    ends: Callable[..., Any] = lambda self, hidden, **_: hidden,
    tells: Callable[..., Any] = lambda self, given, **_: given,
) -> LlamaForCausalLM:
    """does, tells: compute the hidden state, and other arguments, in front of each layer but the first. ends: computes
    what the final norm gets."""
    model: Any = tiny_model("llama")
    model.model.__class__ = type("Loop", (Loop,), {"does": does, "ends": ends, "tells": tells})
    model.model.gains = nn.Parameter(torch.linspace(0.5, 1.5, 4 * model.config.hidden_size).view(4, -1))
    return model  # type: ignore[no-any-return]


def masked(self: Any, hidden: Tensor, real: Tensor, **_: Any) -> Tensor:
    return hidden * real.unsqueeze(-1).to(hidden.dtype)


def masked_in_place(self: Any, hidden: Tensor, real: Tensor, **_: Any) -> Tensor:
    hidden *= real.unsqueeze(-1)
    return hidden


def written_at_places(self: Any, hidden: Tensor, real: Tensor, first: Tensor, **_: Any) -> Tensor:
    hidden[real] = hidden[real, :] * 0.5 + first[real]
    hidden.flatten(0, 1)[1::2].add_(1.0)
    return hidden


def with_weights(self: Any, hidden: Tensor, first: Tensor, number: int, **_: Any) -> Tensor:
    """A parameter outside the layers, the input of the first layer, several results, and code without gradients."""
    one, other = hidden.chunk(2, dim=-1)
    mixed = torch.cat([one + other, functional.silu(other)], dim=-1) * self.gains[number] + first * 0.25
    with torch.no_grad():
        size = mixed.square().mean(-1, keepdim=True).sqrt()
    return mixed / (1 + size)


@pytest.mark.few(5)
@pytest.mark.parametrize(("device", "policy"), POLICIES)
@pytest.mark.parametrize("does", [masked, masked_in_place, written_at_places, with_weights, unchanged])
def test_code_between_layers_trains_as_in_torch(
    does: Callable[..., Tensor], device: str, policy: Policy | None
) -> None:
    found = assert_equal_to_stock(looping(does), [batch(2, 9, 0, 3), batch(1, 6, 1)], device, policy)
    assert bool(found["model.gains"].any()) == (does is with_weights)


def skipping(self: Any, hidden: Tensor, before: list[Tensor], first: Tensor, memo: Any, **_: Any) -> Tensor:
    """As a U-Net, and what was computed from an output two layers below."""
    memo["squares"] = memo["squares"] * 0.5 if memo else before[0].square()
    return hidden + before[0].tanh() * 0.5 + memo["squares"].mean(-1, keepdim=True) + first


def turned(self: Any, given: dict[str, Any], before: list[Tensor], **_: Any) -> dict[str, Any]:
    """Positions that depend on the outputs of the last layer and of an earlier one."""
    if not before:
        return given
    cosines, sines = given["position_embeddings"]
    moved = before[-1].mean(-1, keepdim=True) + before[0].amax(-1, keepdim=True)
    return {**given, "position_embeddings": (cosines * (1 + 0.1 * moved), sines)}


def collected(self: Any, hidden: Tensor, before: list[Tensor], first: Tensor, **_: Any) -> Tensor:
    scores = torch.stack([first, *before, hidden], dim=-2) * self.gains[: len(before) + 2]
    return scores.softmax(-2).sum(-2) + hidden


@pytest.mark.parametrize(("device", "policy"), POLICIES)
def test_outputs_of_earlier_units_reach_later_layers_and_the_head(device: str, policy: Policy | None) -> None:
    """Of each layer and of the prologue, as they are and computed with: for hidden states, other arguments, logits."""
    model = looping(skipping, ends=collected, tells=turned)
    found = assert_equal_to_stock(model, [batch(2, 9, 0, 3), batch(1, 6, 1)], device, policy)
    assert found["model.gains"].any()
    spec = port_model(model, torch.float32).structure
    units = {side.source: side.users for side in spec.sides if side.is_hidden}
    assert units == {0: (2, 3, 4), 1: (3, 4), 2: (4,)}


def test_what_the_head_alone_reads_of_earlier_layers_is_no_input_of_others() -> None:
    model = looping(lambda self, hidden, **_: hidden, ends=collected)
    assert_equal_to_stock(model, [batch(2, 9, 0, 3)], "sim:3", replace(RECOMPUTED, placements=()))
    assert {side.users for side in port_model(model, torch.float32).structure.sides} == {(4,)}


def test_what_only_some_texts_get_of_earlier_layers_is_refused_for_these() -> None:
    """No schedule has it."""

    def if_masked(self: Any, hidden: Tensor, real: Tensor, before: list[Tensor], **_: Any) -> Tensor:
        return hidden if bool(real.all()) else hidden + before[0]

    with made(looping(if_masked)) as engine:
        with pytest.raises(ModelError, match=r"layer 2 gets the output of model\.layers\.0 in this micro-batch only"):
            engine.step([batch(2, 9, 0, 3)])
        engine.step([batch(1, 6, 1)])


def test_code_that_only_some_texts_lead_to_is_done_for_these() -> None:
    def if_masked(self: Any, hidden: Tensor, real: Tensor, **_: Any) -> Tensor:
        return hidden if bool(real.all()) else hidden * (1.5 + real.unsqueeze(-1))

    assert_equal_to_stock(looping(if_masked), [batch(2, 9, 0, 3), batch(1, 6, 1)], "cpu", None)


def test_numbers_drawn_between_layers_are_drawn_again_when_a_layer_runs_again() -> None:
    def dropped(self: Any, hidden: Tensor, **_: Any) -> Tensor:
        return functional.dropout(hidden, 0.5)

    found = []
    for device, policy in (("cpu", None), ("sim:3", RECOMPUTED), ("sim:4", KEPT)):
        with made(looping(dropped), device, policy) as engine:
            found.append(engine.gradients([batch(2, 9, 0, 3), batch(1, 6, 1)]))
    assert all(equal(found[0], each) for each in found[1:])


def test_a_layers_peak_holds_what_the_code_before_it_allocates() -> None:
    def repeated(self: Any, hidden: Tensor, **_: Any) -> Tensor:
        return hidden.unsqueeze(0).repeat(50, 1, 1, 1).mean(0)

    plain, wide = (port_model(looping(does), torch.float32).spec for does in (unchanged, repeated))
    at = [[unit.profile.forward.nbytes(False, 64, 64) for unit in spec.units[1:3]] for spec in (plain, wide)]
    assert at[0][0] == at[1][0]
    assert at[1][1] > 50 * 64 * 4 * plain.hidden_size > at[0][1]


REFUSED: dict[str, tuple[str, Callable[..., Any]]] = {
    "bool": ("__bool__ reads values", lambda hidden, **_: hidden * 2 if hidden.mean() > 0 else hidden),
    "item": ("item reads values", lambda hidden, **_: hidden * hidden.max().item()),
    "list": ("tolist reads values", lambda hidden, **_: hidden * hidden[0, 0, :1].tolist()[0]),
    "numpy": ("numpy reads values", lambda hidden, **_: hidden * float(hidden.detach().numpy()[0, 0, 0])),
    "shape": ("nonzero gives a shape that", lambda hidden, **_: hidden * len(hidden.nonzero())),
    "chosen": ("__getitem__ gives a shape that", lambda hidden, **_: hidden + hidden[hidden > 0].mean()),
    "kernel": ("empty_like makes memory", lambda hidden, **_: torch.empty_like(hidden).copy_(hidden)),
    "written": ("what is written in place is used after", lambda hidden, before, **_: hidden.add_(1.0) + before[0]),
    "old": (
        "add_ writes into what was computed before",
        lambda hidden, memo, **_: hidden + (memo["old"].add_(1.0) if memo else memo.setdefault("old", hidden * 2)),
    ),
    "another": ("is not computed from that of the layer before", lambda hidden, first, **_: first),
    "alias": ("is not computed from that of the layer before", lambda hidden, first, **_: first[:]),
    "prologue": ("writes into a tensor of the prologue", lambda hidden, first, **_: hidden + first.mul_(hidden)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_code_between_layers_that_cannot_be_replayed_is_refused(kind: str) -> None:
    message, does = REFUSED[kind]
    with pytest.raises(ModelError, match=f"code between the decoder layers: .*{re.escape(message)}") as refusal:
        port_model(looping(lambda self, hidden, **others: does(hidden, **others)), torch.float32)
    assert "\n" not in str(refusal.value)


def test_what_is_drawn_for_one_layer_and_used_by_others_is_refused() -> None:
    """Each would draw it anew."""

    def drawn(self: Any, hidden: Tensor, memo: Any, **_: Any) -> Tensor:
        return hidden + memo.setdefault("noise", functional.dropout(hidden, 0.5))

    with pytest.raises(ModelError, match="what dropout has drawn is used after the next layer"):
        port_model(looping(drawn), torch.float32)


def test_a_mask_of_what_the_head_reads_is_refused() -> None:
    def masking(self: Any, hidden: Tensor, before: list[Tensor], real: Tensor, **_: Any) -> Tensor:
        return hidden + before[0] * real.unsqueeze(-1)

    with pytest.raises(ModelError, match="a tensor of the prologue enters behind the last layer"):
        port_model(looping(ends=masking), torch.float32)


def test_a_parameter_of_a_layer_that_is_used_before_it_is_refused() -> None:
    def scaled(self: Any, hidden: Tensor, number: int, **_: Any) -> Tensor:
        return hidden * self.layers[number].input_layernorm.weight

    with pytest.raises(ModelError, match="a parameter of a layer or of the head is used"):
        port_model(looping(scaled), torch.float32)
