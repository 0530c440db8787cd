"""Adapter folders of stock `peft` load, generate and merge to the logits of the model that was trained."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from peft.tuners.lora.config import KasaConfig, MontecloraConfig
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from megatrain import Engine
from megatrain.cli import app
from megatrain.commands.export import ModelToRead, run_export
from megatrain.commands.generate import GenerationModel, run_generation
from megatrain.config import load_config
from megatrain.config.keys import AdapterSection
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import MegaTrainError, ModelError
from megatrain.model import freeze_parameters, lora_config, pretrained_source
from megatrain.run.sampling import Sampling
from megatrain.run.training import run_training
from tests.adapted import METHODS, config_of
from tests.tiny import tiny_model, unequal_batches

IDS = unequal_batches()[1]["input_ids"]
TOLERANCE = 1e-5

Q, BOTH = ["q_proj"], ["embed_tokens", "lm_head"]
LORA: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "pissa": {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa"},
    "whole ends": {"target_modules": Q, "modules_to_save": BOTH},
    "whole ends tied": {"target_modules": Q, "modules_to_save": BOTH, "ensure_weight_tying": True},
    "dora, biases": {"target_modules": [*Q, "embed_tokens"], "use_dora": True, "bias": "all"},
    "ends": {"target_modules": [*Q, *BOTH]},
    "ends tied": {"target_modules": [*Q, *BOTH], "ensure_weight_tying": True},
    "patterns": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "exclude_modules": ["k_proj"]},
    "one layer": {"target_modules": Q, "layers_to_transform": [1], "bias": "lora_only"},
    "whole embedding": {"target_modules": Q, "modules_to_save": ["embed_tokens"]},
    "whole head": {"target_modules": Q, "modules_to_save": ["lm_head", "norm"]},
    "tokens": {"target_modules": Q, "trainable_token_indices": [3, 5, 9]},
    "pissa of the head": {"target_modules": [*Q, "lm_head"], "init_lora_weights": "pissa", "use_rslora": True},
    "pissa dora": {"target_modules": Q, "init_lora_weights": "pissa", "use_dora": True},
    **{
        str(start): {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": start}
        for start in (False, "gaussian", "olora", "orthogonal", "mica", "eva")
    },
}
CONV = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
GPT2: dict[str, dict[str, Any]] = {
    "conv": {**CONV, "bias": "all", "lora_bias": True},
    "conv pissa": {**CONV, "init_lora_weights": "pissa"},
    "conv embedding": {**CONV, "target_modules": ["c_attn", "wte"]},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"target_modules": Q, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "experts rslora": {"target_modules": Q, "target_parameters": ["experts.gate_up_proj"], "use_rslora": True},
    "router pissa": {"target_modules": Q, "target_parameters": ["gate.weight"], "init_lora_weights": "pissa"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, {family}": (family, {"kind": "LoraConfig", "r": 4, "lora_alpha": 6, **fields})
       for name, fields in LORA.items() for family in ("llama", "llama-tied")},
    **{name: ("gpt2", {"kind": "LoraConfig", "r": 4, **fields}) for name, fields in GPT2.items()},
    **{f"{name}, {family}": (family, {"kind": "LoraConfig", "r": 4, **fields})
       for name, fields in EXPERTS.items() for family in ("mixtral", "qwen3-moe")},
    **{f"{name}, tied": ("llama-tied", fields) for name, fields in METHODS.items() if fields["kind"] != "LoraConfig"},
}  # fmt: skip
QUICK = (*("head, llama", "ends tied, llama-tied", "pissa, llama", "whole ends, llama-tied", "dora, biases, llama"),)


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def stock(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def trained(base: Any, config: peft.PeftConfig) -> Any:
    """An adapter over a model, of which every trained value has moved."""
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def saved(tmp_path: Path, family: str, fields: dict[str, Any], **changes: Any) -> tuple[Path, Path, Tensor]:
    """A base, an adapter over it that `peft` has saved, and the logits of the two together."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    tiny_model(family, num_hidden_layers=2, **changes).save_pretrained(base)
    kind = getattr(peft, {"kind": "LoraConfig", **fields}["kind"])
    fields = {name: value for name, value in fields.items() if name != "kind"}
    model = trained(stock(base), kind(task_type="CAUSAL_LM", **fields))
    expected = logits_of(model)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        model.save_pretrained(folder)
    return base, folder, expected


def loaded(base: Path, folder: Path) -> Tensor:
    with Engine.from_pretrained(base, adapter=folder, precision="fp32", verify=False) as engine:
        return engine.logits({"input_ids": IDS})


def merged(folder: Path, target: Path) -> Tensor:
    return logits_of(stock(run_export(str(folder), target, precision="fp32", merge=True)))


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in CASES]
)
def test_a_folder_of_peft_loads_and_merges_to_the_model_that_was_trained(name: str, tmp_path: Path) -> None:
    base, folder, expected = saved(tmp_path, *CASES[name])
    assert (logits_of(peft.PeftModel.from_pretrained(stock(base), str(folder))) - expected).abs().max() < TOLERANCE
    assert (expected - logits_of(stock(base))).abs().max() > 100 * TOLERANCE
    assert (merged(folder, tmp_path / "merged") - expected).abs().max() < TOLERANCE
    if name == "ends tied, llama-tied":
        with pytest.raises(ModelError, match="leave ensure_weight_tying out of the adapter's config"):
            loaded(base, folder)
        source = pretrained_source(folder, trains=False)  # as `megatrain generate` reads it
        freeze_parameters(source.model, ("*",))
        with Engine.from_source(source, precision="fp32", verify=False) as engine:
            assert (engine.logits({"input_ids": IDS}) - expected).abs().max() < TOLERANCE
        return
    assert (loaded(base, folder) - expected).abs().max() < TOLERANCE


def test_of_adapters_saved_under_names_one_is_to_be_named(tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(stock(tmp_path / "base"), config_of("lora", target_modules=Q), adapter_name="tuned")
    model.save_pretrained(tmp_path / "adapters")
    for use in (
        lambda: loaded(tmp_path / "base", tmp_path / "adapters"),
        lambda: merged(tmp_path / "adapters", tmp_path / "merged"),
    ):
        with pytest.raises(ModelError, match=f"; give the folder of its adapter: {tmp_path}/adapters/tuned"):
            use()
    assert (loaded(tmp_path / "base", tmp_path / "adapters/tuned") - logits_of(model)).abs().max() < TOLERANCE


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tied_pair_stays_one_weight_where_it_was_trained_as_one(tied: bool, tmp_path: Path) -> None:
    fields = {"r": 4, "target_modules": Q, "modules_to_save": BOTH, "ensure_weight_tying": tied}
    _, folder, _ = saved(tmp_path, "llama-tied", fields)
    merged(folder, tmp_path / "merged")
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(tmp_path / "merged/model.safetensors")) is not tied


@pytest.mark.parametrize("start", ["pissa", pytest.param("olora", marks=pytest.mark.slow)])
def test_an_adapter_that_changes_its_base_begins_and_comes_back_as_pefts(start: str, tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    config = config_of("lora", init_lora_weights=start, target_modules=["q_proj", "down_proj"])
    fresh = logits_of(peft.get_peft_model(stock(tmp_path / "base"), config))
    with Engine.from_pretrained(tmp_path / "base", adapter=config, precision="fp32", verify=False) as engine:
        assert (engine.logits({"input_ids": IDS}) - fresh).abs().max() < TOLERANCE
        engine.step(unequal_batches(), lr=1e-2)
        ours, folder = engine.logits({"input_ids": IDS}), engine.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(stock(tmp_path / "base"), str(folder))
    assert (logits_of(again) - ours).abs().max() < TOLERANCE
    assert (loaded(tmp_path / "base", folder) - ours).abs().max() < TOLERANCE


STARTS = {
    "lora": {},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "dora": {"use_dora": True},
    "whole head": {"modules_to_save": ["lm_head"]},
    "whole last norm": {"modules_to_save": ["model.norm"]},
    "whole norms": {"modules_to_save": ["input_layernorm"]},
    "whole embedding": {"modules_to_save": ["embed_tokens"]},
    "head and embedding": {"target_modules": [*Q, *BOTH]},
    "rows": {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [3]}},
    "norms": {"kind": "LNTuningConfig", "target_modules": ["norm", "input_layernorm"]},
    "all biases": {"bias": "all"},
    "biases beside": {"bias": "lora_only"},
}
CANNOT_BE_ASKED = {
    "pissa": "init_lora_weights='pissa' has changed the base",
    "olora": "init_lora_weights='olora' has changed the base",
    "whole head": "the base's lm_head.original_module.weight cannot be asked",
    "whole last norm": "the base's model.norm.original_module.weight cannot be asked",
    "norms": "the base's model.norm.base_layer.weight cannot be asked",
    "all biases": "model.layers.0.self_attn.k_proj.bias",
    "biases beside": "the base's model.layers.0.self_attn.q_proj.base_layer.bias",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each not in ("pissa", "whole head"))) for each in STARTS],
)
def test_what_an_adapted_model_says_of_its_base_is_what_the_base_says_or_refused(name: str, tmp_path: Path) -> None:
    batches = unequal_batches()
    base, folder, logits = saved(tmp_path, "llama", {"target_modules": Q, **STARTS[name]}, attention_bias=True)
    with Engine.from_pretrained(base, precision="fp32", verify=False) as engine:
        expected = engine.log_probs(batches)
    with Engine.from_pretrained(base, adapter=folder, precision="fp32", verify=False) as engine:
        if name in CANNOT_BE_ASKED:
            with pytest.raises(ModelError, match=re.escape(CANNOT_BE_ASKED[name])):
                engine.log_probs(batches, of_base=True)
        else:
            for ours, theirs in zip(engine.log_probs(batches, of_base=True), expected, strict=True):
                assert (ours - theirs).abs().max() < TOLERANCE
        assert (engine.logits({"input_ids": IDS}) - logits).abs().max() < TOLERANCE, "the adapter is on again"


IN_MEMORY: dict[str, tuple[dict[str, Any], bool, str]] = {
    "whole embedding over tied ones": ({"modules_to_save": ["embed_tokens"]}, True, "embed_tokens.original_module"),
    "biases, trained before": ({"bias": "all"}, False, "model.layers.0.self_attn.k_proj.bias"),
    "biases beside, trained before": ({"bias": "lora_only"}, False, "self_attn.q_proj.base_layer.bias"),
    "kasa": ({"kasa_config": KasaConfig()}, False, "kasa_config has changed the base"),
}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_base_that_is_not_as_it_was_is_not_asked_in_memory_either(name: str) -> None:
    settings, tied, why = IN_MEMORY[name]
    model = peft.get_peft_model(
        tiny_model("llama", attention_bias=True, tie_word_embeddings=tied),
        peft.LoraConfig(r=2, target_modules=Q, **settings),
    )
    for path, parameter in model.named_parameters():
        if path.endswith(".bias"):
            parameter.requires_grad_(False)
    with (
        Engine.from_model(model, precision="fp32", verify=False) as engine,
        pytest.raises(ModelError, match=re.escape(why)),
    ):
        engine.log_probs(unequal_batches(), of_base=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pissa by chance": (
        {"init_lora_weights": "pissa_niter_4"},
        "has changed the base by what its folder does not hold",
    ),
    "lora_ga": ({"init_lora_weights": "lora_ga"}, "make it an adapter of the changed base: set init_lora_weights=True"),
    "kasa": ({"kasa_config": KasaConfig()}, r"kasa_config .*; merge it with peft \(merge_and_unload\)"),
    "replicated layers": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication uses layers of the base several"),
    "monteclora": ({"monteclora_config": MontecloraConfig()}, "MonteCLoRA draws .*; leave monteclora_config out"),
    "vera": ({"kind": "VeraConfig"}, r"VERA keeps projections .*; use LoRA, .*merge it with peft"),
    "adalora": ({"kind": "AdaLoraConfig", "total_step": 9, "r": 8}, "ADALORA changes its ranks"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if "pissa" in each else pytest.mark.slow) for each in REFUSED]
)
def test_what_cannot_be_right_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    fields, message = REFUSED[name]
    base, folder, _ = saved(tmp_path, "llama", {"r": 4, "target_modules": Q, **fields})
    uses: tuple[Callable[[], object], ...] = (lambda: loaded(base, folder), lambda: merged(folder, tmp_path / "merged"))
    for use in uses:
        with pytest.raises(ModelError, match=message):
            use()
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("start", [pytest.param("corda", marks=pytest.mark.slow), "loftq"])
def test_folders_that_peft_itself_cannot_load_are_refused_too(start: str, tmp_path: Path) -> None:
    base, folder, _ = saved(tmp_path, "llama", {"r": 4, "target_modules": Q})
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": start}))
    with pytest.raises(ModelError, match=f"init_lora_weights='{start}' has changed the base"):
        loaded(base, folder)


@pytest.mark.slow
def test_the_way_out_of_a_changed_base_gives_the_trained_model(tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    model = trained(stock(tmp_path / "base"), config_of("lora", init_lora_weights="pissa_niter_4", target_modules=Q))
    with pytest.raises(ModelError, match="by what its folder does not hold"):
        Engine.from_model(model, verify=False)
    expected = logits_of(model)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "adapter")
    model.unload().save_pretrained(tmp_path / "changed")
    assert (loaded(tmp_path / "changed", tmp_path / "adapter") - expected).abs().max() < TOLERANCE


def of_transformers_4(folder: Path) -> None:
    """Rewrite an adapter over fused experts as one over the experts that transformers 4 had apart: w1, w2 and w3."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    config |= {"target_modules": ["w1", "w2", "w3"], "target_parameters": None}
    config |= {"rank_pattern": {}, "alpha_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator, values = torch.Generator().manual_seed(1), dict[str, Tensor]()
    shapes = {"w1": (32, 48), "w2": (48, 32), "w3": (32, 48)}
    for layer, expert, (name, (inner, outer)) in (
        (layer, expert, each) for layer in range(2) for expert in range(4) for each in shapes.items()
    ):
        path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
        values[f"{path}.lora_A.weight"] = torch.randn((rank, inner), generator=generator) / 8
        values[f"{path}.lora_B.weight"] = torch.randn((outer, rank), generator=generator) / 8
    save_file(values, folder / "adapter_model.safetensors", {"format": "pt"})


def by_hand(base: Path, folder: Path) -> Tensor:
    """The logits of a Mixtral with such an adapter: to each expert's matrix its own product is added."""
    model, values = stock(base), load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, down in values.items():
        if not name.endswith("lora_A.weight"):
            continue
        delta = values[name.replace("lora_A", "lora_B")] @ down * config["lora_alpha"] / config["r"]
        parts = name.split(".")
        experts, index, which = model.model.layers[int(parts[4])].mlp.experts, int(parts[7]), parts[8]
        rows = {"w1": slice(0, 48), "w3": slice(48, 96), "w2": slice(None)}[which]
        (experts.down_proj if which == "w2" else experts.gate_up_proj).data[index, rows] += delta
    return logits_of(model)


@pytest.mark.parametrize("odd", ["", "use_rslora", pytest.param("alpha_pattern", marks=pytest.mark.slow)])
def test_experts_of_transformers_4_keep_their_strength_or_are_refused(odd: str, tmp_path: Path) -> None:
    base, folder, _ = saved(tmp_path, "mixtral", {"r": 4, "target_modules": Q})
    of_transformers_4(folder)
    if not odd:
        expected = by_hand(base, folder)
        assert (loaded(base, folder) - expected).abs().max() < TOLERANCE
        assert (merged(folder, tmp_path / "merged") - expected).abs().max() < TOLERANCE
        return
    config = json.loads((folder / "adapter_config.json").read_text())
    config[odd] = True if odd == "use_rslora" else {"w1": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"written with transformers 4 .* where its {odd} has another effect"):
        loaded(base, folder)


@pytest.mark.parametrize("tied", ["llama", pytest.param("llama-tied", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "ends",
    [
        {"target_modules": [*Q, *BOTH]},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"modules_to_save": BOTH})),
    ],
    ids=str,
)
def test_a_resized_vocabulary_is_merged_as_it_was_trained(tied: str, ends: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(tied, num_hidden_layers=2).save_pretrained(tmp_path / "base")
    base = stock(tmp_path / "base")
    base.resize_token_embeddings(102, mean_resizing=False)
    config = config_of("lora", **{"target_modules": Q, **ends})
    model = trained(base, config)
    expected = logits_of(model)
    model.save_pretrained(tmp_path / "adapter")
    found = merged(tmp_path / "adapter", tmp_path / "merged")
    assert found.shape[-1] == 102
    assert (found - expected).abs().max() < TOLERANCE
    assert (loaded(tmp_path / "base", tmp_path / "adapter") - expected).abs().max() < TOLERANCE


def test_keys_of_a_run_are_options_of_peft() -> None:
    fields = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, "trainable_token_indices": [3, 5]}
    for given in ({}, fields):
        made = lora_config(**AdapterSection.model_validate(given).model_dump(exclude={"type", "path"}))
        expected = peft.LoraConfig(r=16, lora_alpha=32, target_modules="auto", task_type="CAUSAL_LM", **given)
        assert made == expected


# The base elsewhere ---------------------------------------------------------------------------------------------------


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Path, Path]:
    """A base that has moved since its adapter was saved, and that adapter."""
    base, folder, _ = saved(tmp_path, "llama", {"r": 4, "target_modules": Q}, vocab_size=512, pad_token_id=None)
    load_tokenizer("bytes").save_pretrained(base)
    shutil.move(base, tmp_path / "elsewhere")
    return tmp_path / "elsewhere", folder


def test_a_base_that_has_moved_is_named_and_can_be_given(moved: tuple[Path, Path], tmp_path: Path) -> None:
    base, folder = moved
    uses: tuple[Callable[..., object], ...] = (
        lambda **given: GenerationModel(str(folder), precision="fp32", **given),
        lambda **given: run_export(
            ModelToRead(str(folder), **given), tmp_path / "merged", precision="fp32", merge=True
        ),
    )
    for use in uses:
        with pytest.raises(ModelError, match=rf"{tmp_path}/base, cannot be used: .*; give it: --base BASE"):
            use()
        use(base=str(base))
    said: list[str] = []
    model = GenerationModel(str(folder), base=str(base))
    assert run_generation(model, "So", said.append, Sampling(2)).tokens
    expected = logits_of(peft.PeftModel.from_pretrained(stock(base), str(folder)))
    assert (logits_of(stock(tmp_path / "merged")) - expected).abs().max() < TOLERANCE


def test_the_command_line_takes_the_base_of_an_adapter_only(moved: tuple[Path, Path], tmp_path: Path) -> None:
    base, folder = moved
    arguments = ["export", str(folder), str(tmp_path / "out"), "--merge", "--base", str(base)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (tmp_path / "out/config.json").exists()
    arguments = ["export", str(base), str(tmp_path / "other"), "--base", str(base)]
    with pytest.raises(MegaTrainError, match="is not an adapter's folder, so it has no base; give no base"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.slow
def test_a_run_over_a_base_that_has_moved_names_the_one_it_trained_over(
    moved: tuple[Path, Path], tmp_path: Path
) -> None:
    base, folder = moved
    (tmp_path / "text.txt").write_text("So shaken as we are, so wan with care. " * 60)
    tree = {
        "model": {"path": str(base)},
        "adapter": {"path": str(folder)},
        "data": {"sources": str(tmp_path / "text.txt"), "sequence_length": 32, "cache": str(tmp_path / "cache")},
        "train": {"steps": 1, "global_batch_size": 2, "learning_rate": 1e-3, "sample_tokens": 0},
        "output": {"folder": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(yaml.dump(tree))
    model = run_training(load_config(tmp_path / "run.yaml"), Console(quiet=True))
    assert json.loads((model / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
