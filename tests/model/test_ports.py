"""A model behind ports is the same model: its own forward, run in pieces."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model import PortedModel, port_model
from megatrain.model.ports import Ports, split_hidden
from megatrain.model.weight_sources import load_causal_lm
from tests.tiny import FAMILIES, batch, causal_lm_from_config, tiny_model


def in_pieces(model: PreTrainedModel, ported: PortedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Logits [batch, length, vocabulary] through prologue, layers and head."""
    weights = dict(model.named_parameters())
    units = ported.structure.units
    own = [{param.name: weights[param.name] for param in unit.params} for unit in units]
    hidden, calls = ported.prologue(own[0], inputs)
    values: dict[int, Tensor] = {}
    for index, call in enumerate(calls):
        inside = {name.removeprefix(ported.prefix(index)): value for name, value in own[1 + index].items()}
        hidden, made = ported.layer(index, inside, hidden, call, values=values)
        values |= made
    head = {**own[-1], **{name: weights[name] for name in units[-1].borrows}}
    return ported.head(head, hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_logits_are_bit_equal_to_the_stock_model(family: str, padded: int) -> None:
    model = tiny_model(family).eval()
    inputs = {key: value for key, value in batch(2, 11, 0, padded).items() if key != "labels"}
    with torch.no_grad():
        assert torch.equal(in_pieces(model, port_model(model, torch.float32), inputs), model(**inputs).logits)


def test_a_parameter_may_have_two_names_in_a_layer() -> None:
    model = tiny_model().eval()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.gate_proj.weight
    inputs = {"input_ids": batch(2, 11, 0)["input_ids"]}
    with torch.no_grad():
        assert torch.equal(in_pieces(model, port_model(model, torch.float32), inputs), model(**inputs).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_one_place_and_no_storage_of_its_own(family: str) -> None:
    model = tiny_model(family)
    ported = port_model(model, torch.bfloat16)
    names = [param.name for unit in ported.structure.units for param in unit.params]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    for root in (ported.skeleton, *ported.templates):
        assert all(p.is_meta and p.dtype == torch.bfloat16 for p in root.parameters())
    assert ported.structure.tied == ("lm_head.weight" not in names)


def test_a_split_model_does_not_keep_the_weights_of_the_given_one() -> None:
    model = tiny_model()
    weight = ref(next(model.parameters()))
    ported = port_model(model, torch.float32)
    del model
    gc.collect()
    assert weight() is None
    assert ported.measured is not None


def test_experts_count_by_their_active_share() -> None:
    spec = port_model(tiny_model("qwen3-moe"), torch.float32).structure
    shares = {param.name.rpartition(".")[2]: param.active for param in spec.units[1].params}
    assert shares["gate_up_proj"] == shares["down_proj"] == 2 / 8


def test_layers_returning_tuples_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older code returns (hidden, attention weights) from a layer and takes the first of them."""
    model = tiny_model().eval()
    inputs = {"input_ids": batch(2, 5, 0)["input_ids"]}
    with torch.no_grad():
        expected = model(**inputs).logits
    layer_class = type(model.model.layers[0])
    plain = layer_class.forward

    class Unpacking(nn.ModuleList):
        """Takes the first of what each layer returns, as the loop of such a model does."""

        def __getitem__(self, index: object) -> object:
            return [lambda *a, _layer=layer, **k: _layer(*a, **k)[0] for layer in self._modules.values()]

    monkeypatch.setattr(layer_class, "forward", lambda self, *a, **k: (plain(self, *a, **k), None))
    for modules in (nn.ModuleList, Ports):
        monkeypatch.setattr(modules, "__getitem__", Unpacking.__getitem__)
    ported = port_model(model, torch.float32)
    assert [port.returns for port in ported.ports] == [2, 2, 2]
    with torch.no_grad():
        assert torch.equal(in_pieces(model, ported, inputs), expected)


def test_work_between_layers_is_done_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_model().eval(), {"input_ids": batch(2, 11, 0)["input_ids"]}
    plain = type(model.model).forward

    def scaled(self: nn.Module, *args: object, **kwargs: object) -> object:
        for layer in self.layers:
            call = layer.forward
            layer.forward = lambda hidden, *a, _call=call, **k: _call(hidden * 0.5, *a, **k)
        try:
            return plain(self, *args, **kwargs)
        finally:
            for layer in self.layers:
                del layer.forward

    monkeypatch.setattr(type(model.model), "forward", scaled)
    with torch.no_grad():
        assert torch.equal(in_pieces(model, port_model(model, torch.float32), inputs), model(**inputs).logits)


def test_layers_called_without_a_hidden_state_are_refused() -> None:
    with pytest.raises(ModelError, match="without a hidden state"):
        split_hidden((), {"attention_mask": None})


def test_layers_that_share_a_parameter_are_refused() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ModelError, match="layers share a parameter"):
        port_model(model, torch.float32)


def test_a_parameter_that_is_a_buffer_too_is_refused() -> None:
    """The buffer would keep the first value."""
    model = tiny_model()
    mlp = model.model.layers[1].mlp
    mlp.register_buffer("again", mlp.up_proj.weight)
    with pytest.raises(ModelError, match=r"buffer model\.layers\.1\.mlp\.again is a parameter too"):
        port_model(model, torch.float32)


def test_an_argument_of_layers_that_needs_a_gradient_is_a_side_value_of_the_prologue() -> None:
    model = tiny_model()
    rotary = model.model.rotary_emb
    rotary.scale = nn.Parameter(torch.ones(()))
    plain = type(rotary).forward

    class Learned(type(rotary)):  # type: ignore[misc]
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = plain(self, x, position_ids)
            return cos * self.scale, sin

    rotary.__class__ = Learned
    (side,) = port_model(model, torch.float32).structure.sides
    assert (side.source, side.users, side.differentiable) == (0, (1, 2, 3), True)


def test_a_fresh_model_depends_only_on_config_and_seed() -> None:
    one, same, other = (causal_lm_from_config(dict(FAMILIES["llama"]), seed) for seed in (1, 1, 2))
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_size": 3}, "has no model_type"),
        ({"model_type": "lama"}, "lama"),
        ({"model_type": "t5"}, "T5"),
        ("no/such/folder", "model"),
    ],
)
def test_an_unusable_config_is_one_line(config: object, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        causal_lm_from_config(config, 0)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_one_line(tmp_path: object) -> None:
    with pytest.raises(ModelError) as caught:
        load_causal_lm(f"{tmp_path}/nothing")
    assert "\n" not in str(caught.value)


def test_old_names_that_the_config_class_turns_into_other_fields_are_known() -> None:
    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    fields = {"model_type": "gpt_neox", "num_hidden_layers": 2, **small, "rotary_pct": 0.5, "rotary_emb_base": 5000}
    rope = causal_lm_from_config(fields, 0).config.rope_parameters
    assert (rope["partial_rotary_factor"], rope["rope_theta"]) == (0.5, 5000)


def test_a_misspelt_config_field_suggests_the_nearest_name() -> None:
    with pytest.raises(ModelError, match=r"llama has no field 'hiden_size'; did you mean 'hidden_size'\?"):
        causal_lm_from_config({"model_type": "llama", "hiden_size": 32}, 0)
