"""What is planned for a checkpoint without storage is what the library writes for the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatrain.errors import ExportError
from megatrain.model import WrittenTensor, port_model
from megatrain.model import checkpoint_names as written_module
from megatrain.model.checkpoint_names import WrittenModel
from tests.tiny import tiny_model


def planned(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, WrittenTensor]:
    units = WrittenModel(port_model(model, torch.bfloat16), dtype).units
    names = [tensor.name for unit in units for tensor in unit]
    assert len(names) == len(set(names))
    return {tensor.name: tensor for unit in units for tensor in unit}


def with_saved_buffer(model: PreTrainedModel) -> PreTrainedModel:
    """One buffer inside a layer and one outside, both saved, and one that is not."""
    model.model.layers[1].mlp.register_buffer("seen", torch.tensor([3, 4]))
    model.model.register_buffer("scale", torch.tensor([0.5], dtype=torch.float64))
    model.model.register_buffer("cache", torch.zeros(3), persistent=False)
    return model


def test_parameters_take_the_written_dtype_and_buffers_keep_theirs() -> None:
    found = planned(with_saved_buffer(tiny_model()), torch.bfloat16)
    assert found["model.layers.1.mlp.seen"].dtype == torch.int64
    assert found["model.scale"].dtype == torch.float64
    assert "model.cache" not in found
    assert found["model.norm.weight"] == WrittenTensor("model.norm.weight", (32,), torch.bfloat16)
    assert found["model.norm.weight"].nbytes == 64


def test_buffers_are_written_with_their_unit() -> None:
    ported = port_model(with_saved_buffer(tiny_model()), torch.float32)
    written = WrittenModel(ported, torch.float32)
    places = {tensor.name: unit for unit, tensors in enumerate(written.units) for tensor in tensors}
    assert places["model.layers.1.mlp.seen"] == 2
    assert places["model.scale"] == 0
    masters = {param.name: torch.zeros(param.shape) for param in ported.structure.units[2].params}
    assert written.tensors(2, masters)["model.layers.1.mlp.seen"].tolist() == [3, 4]


def test_names_excluded_from_saving_are_omitted() -> None:
    model = with_saved_buffer(tiny_model())
    model._keys_to_ignore_on_save = {"model.scale"}
    assert "model.scale" not in planned(model, torch.float32)


def test_tied_weights_are_written_under_the_librarys_name() -> None:
    class HeadFirst(AutoModelForCausalLM._model_mapping[type(tiny_model().config)]):  # type: ignore[misc]
        """A Llama whose first name for the tied parameter is that of the head."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._modules = {"lm_head": self._modules["lm_head"], "model": self._modules["model"]}

    model = HeadFirst(tiny_model("llama-tied").config)
    assert next(name for name, _ in model.named_parameters()) == "lm_head.weight"
    found = planned(model, torch.float32)
    assert "model.embed_tokens.weight" in found
    assert "lm_head.weight" not in found


def test_fused_experts_are_written_one_by_one() -> None:
    found = planned(tiny_model("mixtral"), torch.float32)
    assert found["model.layers.0.block_sparse_moe.experts.3.w1.weight"].shape == (48, 32)
    assert found["model.layers.0.block_sparse_moe.experts.3.w2.weight"].shape == (32, 48)
    assert not [name for name in found if "gate_up" in name]


def test_models_whose_checkpoints_merge_units_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = written_module.revert_weight_conversion

    def joining(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = dict(plain(model, tensors))
        norms = [found.pop(name) for name in list(found) if "input_layernorm" in name]
        return {**found, **({"norms": torch.stack(norms)} if norms else {})}

    monkeypatch.setattr(written_module, "revert_weight_conversion", joining)
    with pytest.raises(ExportError, match="joins tensors of several units"):
        planned(tiny_model(), torch.float32)


def test_planning_leaves_the_ported_model_unchanged(tmp_path: Any) -> None:
    ported = port_model(tiny_model("llama-tied"), torch.bfloat16)
    WrittenModel(ported, torch.float32).write_small_files(tmp_path)
    assert {parameter.dtype for parameter in ported.skeleton.parameters()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "generation_config.json"]


def test_an_invalid_generation_config_is_one_clear_error(tmp_path: Any) -> None:
    model = tiny_model()
    model.generation_config.num_return_sequences = 4  # cannot be had without sampling or beams
    with pytest.raises(ExportError, match="generation_config") as caught:
        WrittenModel(port_model(model, torch.float32), torch.float32).write_small_files(tmp_path)
    assert "\n" not in str(caught.value)
