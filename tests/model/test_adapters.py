"""An adapter over a base that nobody holds begins, is written and comes back as `peft` has it."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import megatrain
from megatrain import Engine, Policy
from megatrain.commands.export import run_export
from megatrain.errors import CheckpointError, ExportError, ModelError
from megatrain.model.adapters import with_adapter
from tests.adapted import METHODS, adapted, config_of
from tests.kinds import tiny_config
from tests.tiny import equal, tiny_model, unequal_batches

IDS = unequal_batches()[1]["input_ids"]
QUICK = ("lora", "whole ends", "oft")
"""Methods of which no two work alike; `tests/integration/test_adapters.py` has the gradients of all."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def in_memory(base: Path) -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=2).from_pretrained(base).train()


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(each, marks=() if each in QUICK else pytest.mark.slow)
        for each in ("lora", "dora", "of the ends", "whole ends", "ia3", "lokr", "norms", "oft")
    ],
)
def test_a_fresh_file_backed_adapter_equals_pefts_for_the_seed(base: Path, method: str) -> None:
    loaded = in_memory(base)
    torch.manual_seed(7)
    stock = peft.get_peft_model(loaded, config_of(method)).get_base_model()
    with Engine.from_pretrained(base, adapter=config_of(method), seed=7, precision="fp32", verify=False) as engine:
        weights = engine.master_weights()
        trained = {param.name for unit in engine.structure.units for param in unit.params if param.trainable}
        assert torch.allclose(engine.logits({"input_ids": IDS}), logits_of(stock), atol=1e-5)
    assert trained == {name for name, each in stock.named_parameters() if each.requires_grad}
    assert equal(weights, {name: each.detach() for name, each in stock.named_parameters()})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in METHODS]
)
def test_a_saved_adapter_loads_in_peft_and_resumes(base: Path, method: str, tmp_path: Path) -> None:
    model = adapted(in_memory(base), method)
    with Engine.from_model(model, precision="fp32", verify=False) as engine:
        engine.step(unequal_batches(), lr=1e-2)
        ours = engine.logits({"input_ids": IDS})
        folder, weights = engine.save_pretrained(tmp_path / "adapter"), engine.master_weights()
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    stock = peft.PeftModel.from_pretrained(in_memory(base), str(folder))
    assert torch.allclose(logits_of(stock), ours, atol=1e-5)
    with Engine.from_pretrained(base, adapter=folder, precision="fp32", verify=False) as engine:
        assert equal(engine.master_weights(), weights)
        engine.step(unequal_batches())


def test_the_adapter_file_equals_pefts_bit_for_bit(base: Path, tmp_path: Path) -> None:
    model = adapted(in_memory(base), "whole ends")
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    with Engine.from_model(model, verify=False) as engine:
        folder = engine.save_pretrained(tmp_path / "ours")
    ours, theirs = (peft.load_peft_weights(str(each), device="cpu") for each in (folder, tmp_path / "theirs"))
    assert equal(dict(sorted(ours.items())), dict(sorted(theirs.items())))


def test_an_adapter_folder_loads_its_base_and_adapter(base: Path, tmp_path: Path) -> None:
    with Engine.from_pretrained(base, adapter=config_of("lora"), verify=False) as engine:
        engine.step(unequal_batches())
        folder, weights = engine.save_pretrained(tmp_path / "adapter"), engine.master_weights()
    with Engine.from_pretrained(folder, verify=False) as engine:
        assert equal(engine.master_weights(), weights)


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    with Engine.from_pretrained(base, adapter=config_of("lora"), verify=False) as engine:
        folder = engine.save_pretrained(tmp_path / "adapter")
    tiny_model("llama", hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"adapter: .*size mismatch"):
        Engine.from_pretrained(tmp_path / "other", adapter=folder)
    with pytest.raises(ModelError, match="holds no adapter; give a folder with adapter_config"):
        Engine.from_pretrained(base, adapter=tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_lora_weights": "eva"}, "init_lora_weights='eva' needs or changes the weights of the whole base"),
        ({"kasa_config": peft.tuners.lora.config.KasaConfig()}, "kasa_config needs or changes the weights"),
        ({"target_modules": ["nothing"]}, "adapter: .*nothing.*; set target_modules to names"),
    ],
)
def test_unsupported_file_backed_adapters_are_refused(base: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Engine.from_pretrained(base, adapter=config_of("lora", **changes))


@pytest.mark.few(4)
@pytest.mark.parametrize("method", ["lora", "dora", "whole ends", "of the ends", "ia3", "loha", "norms"])
def test_merging_equals_pefts_float32_merge_unit_by_unit(base: Path, method: str, tmp_path: Path) -> None:
    model = adapted(in_memory(base), method)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    expected = dict(model.merge_and_unload().named_parameters())
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        merged = run_export(str(tmp_path / "adapter"), tmp_path / precision, precision=precision, merge=True)
        found = dict(AutoModelForCausalLM.from_pretrained(merged, dtype="auto").named_parameters())
        assert equal(found, {name: each.detach().to(dtype) for name, each in expected.items()})


def test_biases_and_experts_are_merged_too(tmp_path: Path) -> None:
    for family, changes in (("gpt2", {"bias": "all", "fan_in_fan_out": True}), ("qwen3-moe", {})):
        tiny_model(family).save_pretrained(tmp_path / family)
        with Engine.from_pretrained(tmp_path / family, adapter=config_of("lora", **changes), verify=False) as engine:
            engine.step(unequal_batches(), lr=1e-1)
            folder = engine.save_pretrained(tmp_path / f"{family}-adapter")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / family)
        expected = dict(peft.PeftModel.from_pretrained(loaded, str(folder)).merge_and_unload().named_parameters())
        assert not equal(expected, dict(AutoModelForCausalLM.from_pretrained(tmp_path / family).named_parameters()))
        merged = run_export(str(folder), tmp_path / f"{family}-merged", precision="fp32", merge=True)
        assert equal(dict(AutoModelForCausalLM.from_pretrained(merged).named_parameters()), expected)


def test_auto_target_modules_exclude_fused_experts_named_like_other_layers() -> None:
    """A shared expert has the names that experts had before they were fused."""
    config = peft.LoraConfig(r=4, target_modules="auto")
    names = [name for name, each in planned_with(config).named_parameters() if each.requires_grad]
    assert any("self_attn.q_a_proj" in name for name in names)
    assert not any("expert" in name for name in names)


def test_a_planned_adapter_takes_no_memory() -> None:
    """Of fused experts it may be larger than the host."""
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    model = planned_with(config)
    assert any("experts" in name for name, each in model.named_parameters() if each.requires_grad)
    assert all(each.is_meta for each in model.parameters())


def planned_with(config: peft.PeftConfig) -> PreTrainedModel:
    with torch.device("meta"):
        structure = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
    return with_adapter(structure, config)


def test_merge_is_accepted_only_with_an_adapter(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is not an adapter, so there is nothing to merge"):
        run_export(str(base), tmp_path / "merged", merge=True)
    with Engine.from_pretrained(base, adapter=config_of("lora"), verify=False) as engine:
        folder = engine.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ExportError, match="is an adapter; add --merge"):
        run_export(str(folder), tmp_path / "merged")


def state_of(engine: Engine) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in engine.master_weights().items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["lora", "whole ends"])
def test_an_adapter_checkpoint_holds_no_base_and_resumes_bit_for_bit(base: Path, method: str, tmp_path: Path) -> None:
    with Engine.from_pretrained(base, adapter=config_of(method), verify=False) as engine:
        engine.step(unequal_batches(), lr=1e-2)
        folder = engine.save(tmp_path / "checkpoints").wait()
        for _ in range(3):
            engine.step(unequal_batches(), lr=1e-2)
        expected = state_of(engine)
        engine.restore(folder)
        for _ in range(3):
            engine.step(unequal_batches(), lr=1e-2)
        assert equal(state_of(engine), expected), "a rollback inside the process"
    names = {path.name for path in folder.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "manifest.json", "optimizer", "training.json"}
    assert peft.load_peft_weights(str(folder), device="cpu")
    with Engine.from_checkpoint(folder, policy=Policy(shard_nbytes=4096, shares_memory=True), verify=False) as engine:
        for _ in range(3):
            engine.step(unequal_batches(), lr=1e-2)
        assert equal(state_of(engine), expected)


def test_an_adapter_checkpoint_requires_its_own_base(base: Path, tmp_path: Path) -> None:
    with Engine.from_pretrained(base, adapter=config_of("lora"), verify=False) as engine:
        folder = engine.save(tmp_path / "checkpoints").wait()
    changed = in_memory(base)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 0] += 0.125
    changed.save_pretrained(base)
    with pytest.raises(CheckpointError, match="is of an adapter over another base: the checksum of its weights is"):
        Engine.from_checkpoint(folder, verify=False)
    with Engine.from_pretrained(base, adapter=config_of("lora"), verify=False) as engine:
        engine.step(unequal_batches(), lr=1e-2)
        before, applied = state_of(engine), engine.diagnostics.applied_updates()
        with pytest.raises(CheckpointError, match="is of an adapter over another base"):
            engine.restore(folder)
        assert equal(state_of(engine), before)
        assert engine.diagnostics.applied_updates() == applied


def test_no_module_imports_peft_at_import_time() -> None:
    """What libraries import behind our back is asked below."""
    for file in Path(megatrain.__file__).parent.rglob("*.py"):
        at_once = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {each.name for node in at_once for each in node.names} | {
            getattr(node, "module", "") for node in at_once
        }
        assert not any(name and name.partition(".")[0] == "peft" for name in names), file


@pytest.mark.slow  # a process that imports all anew
def test_importing_the_package_does_not_import_peft() -> None:
    import subprocess
    import sys

    warnings.simplefilter("ignore")
    code = "import sys, megatrain.train.engine; sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
