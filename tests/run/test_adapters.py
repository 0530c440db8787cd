"""A run that trains an adapter: from its configuration to a folder that stock `peft` loads, killed and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from megatrain.commands.export import run_export
from megatrain.commands.generate import GenerationModel, run_generation
from megatrain.config import load_config
from megatrain.errors import ConfigError
from megatrain.run.sampling import Sampling
from megatrain.run.training import run_training
from tests.tiny import equal, tiny_model

TEXT = "So shaken as we are, so wan with care, find we a time for frighted peace to pant. " * 60


@pytest.fixture
def base(tmp_path: Path) -> Path:
    from megatrain.data.tokenizer import load_tokenizer

    tiny_model("llama", vocab_size=512, pad_token_id=None).save_pretrained(tmp_path / "base")
    load_tokenizer("bytes").save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "base"


def run(base: Path, folder: str = "run", steps: int = 4, **changes: Any) -> Path:
    where = base.parent
    tree: dict[str, Any] = {
        "model": {"path": str(base)},
        "adapter": {"type": "lora", "r": 4, "alpha": 8, "dropout": 0.1, "target_modules": "all-linear"},
        "data": {"sources": str(where / "text.txt"), "sequence_length": 32, "cache": str(where / "cache")},
        "train": {
            "steps": steps,
            "global_batch_size": 2,
            "learning_rate": 1e-2,
            "lr_scheduler": "constant",
            "sample_tokens": 5,
        },
        "checkpoint": {"every": 2},
        "output": {"folder": str(where / folder)},
    }
    (where / "run.yaml").write_text(yaml.dump({**tree, **changes}))
    return run_training(load_config(where / "run.yaml"), Console(quiet=True))


def test_a_run_saves_an_adapter_that_loads_generates_and_merges(base: Path) -> None:
    saved = run(base)
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert (saved / "tokenizer_config.json").exists()
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(saved))
    assert all(each.any() for name, each in stock.named_parameters() if "lora_B" in name)
    said: list[str] = []
    assert run_generation(GenerationModel(str(saved.parent)), "So", said.append, Sampling(4)).tokens
    merged = run_export(str(saved.parent), base.parent / "merged", precision="fp32", merge=True)
    expected = dict(stock.merge_and_unload().named_parameters())
    found = dict(AutoModelForCausalLM.from_pretrained(merged).named_parameters())
    assert equal(found, {name: each.detach() for name, each in expected.items()})


def test_an_adapter_run_resumes_bit_for_bit_from_small_checkpoints(base: Path) -> None:
    whole = run(base, "whole", 4)
    run(base, "cut", 2)
    names = {path.name for path in (base.parent / "cut/checkpoints/step-00000002").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    resumed = run(base, "cut", 4, resume="auto")
    ours, theirs = (peft.load_peft_weights(str(each), device="cpu") for each in (resumed, whole))
    assert equal(ours, theirs)
    again = run(base, "again", 1, adapter={"path": str(whole)})
    assert peft.load_peft_weights(str(again), device="cpu").keys() == theirs.keys()
    with pytest.raises(ConfigError, match="trained an adapter, but this one trains a whole model"):
        run(base, "cut", 6, resume="auto", adapter=None)
    other = {"type": "lora", "r": 4, "alpha": 8, "dropout": 0.5, "target_modules": "all-linear"}
    with pytest.raises(ConfigError, match=r"other settings, which cannot change: adapter.dropout 0.1 -> 0.5"):
        run(base, "cut", 6, resume="auto", adapter=other, accept_changes=True)


@pytest.mark.slow
def test_fresh_models_can_have_an_adapter(base: Path) -> None:
    fields = {**tiny_model("llama", vocab_size=512).config.to_dict(), "dtype": None}
    fields = {key: fields[key] for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size")}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    data = {"sources": str(base.parent / "text.txt"), "sequence_length": 32, "tokenizer": "bytes"}
    data["cache"] = str(base.parent / "cache")
    saved = run(base, model={"config": fields}, data=data, output={"folder": str(base.parent / "o")})
    assert (saved / "adapter_model.safetensors").exists()
    assert torch.isfinite(next(iter(peft.load_peft_weights(str(saved), device="cpu").values()))).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        pytest.param({"trainable_token_indices": [3, 32, 101]}, marks=pytest.mark.slow),
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, marks=pytest.mark.slow),
    ],
)
def test_an_adapter_over_a_tied_embedding_goes_on_and_resumes(base: Path, fields: dict[str, Any]) -> None:
    tied = tiny_model("llama-tied", vocab_size=512, pad_token_id=None)
    tied.save_pretrained(base)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **fields})
    peft.get_peft_model(tied, config).save_pretrained(base.parent / "begun")
    adapter = {"path": str(base.parent / "begun")}
    whole = run(base, "whole", 4, adapter=adapter)
    run(base, "cut", 2, adapter=adapter)
    resumed = run(base, "cut", 4, adapter=adapter, resume="auto")
    ours, theirs = (peft.load_peft_weights(str(each), device="cpu") for each in (resumed, whole))
    begun = peft.load_peft_weights(str(base.parent / "begun"), device="cpu")
    assert equal(ours, theirs)
    assert {name: each.shape for name, each in ours.items()} == {name: each.shape for name, each in begun.items()}
    assert not equal(ours, begun)
    if "modules_to_save" in fields:
        both = (f"base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head"))
        assert torch.equal(*(ours[name] for name in both))
