"""YAMLs of LLaMA-Factory by our keys: what they mean there they mean here, and none is dropped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.config import load_config
from megatrain.config.llama_factory import translate
from megatrain.config.translation import Translation
from megatrain.errors import ConfigError
from megatrain.optim import AdamW, Muon
from megatrain.run.planner_inputs import optimizer_for

LLAMA_FACTORY: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "stage": "sft",
    "dataset": "one,two",
    "output_dir": "saves/x",
    "learning_rate": 2e-5,
}


def translated(tmp_path: Path, base: dict[str, Any], **more: Any) -> Translation:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(base | more, sort_keys=False))
    return translate(tmp_path / "theirs.yaml")


def flat(found: Translation) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, section in found.tree.items() for key, value in section.items()}


@pytest.mark.parametrize(
    ("base", "more", "expected"),
    [
        (LLAMA_FACTORY, {}, {
            "data.sources": ["data/dataset_info.json#one", "data/dataset_info.json#two"],
            "data.sequence_length": 2048, "data.validation_fraction": 0.0, "data.packing": "grouped",
            "train.epochs": 3.0, "train.global_batch_size": 8, "train.lr_scheduler": "linear",
            "train.min_lr_ratio": 0.0, "train.weight_decay": 0.0, "train.betas": [0.9, 0.999],
            "adapter.r": 8, "adapter.alpha": 16, "adapter.target_modules": ["all-linear"], "checkpoint.every": 500,
        }),
        (LLAMA_FACTORY, {"finetuning_type": "full", "max_steps": 40, "per_device_train_batch_size": 2,
                         "gradient_accumulation_steps": 4, "neat_packing": True, "cutoff_len": 4096},
         {"train.steps": 40, "train.global_batch_size": 8, "data.packing": "best_fit", "data.sequence_length": 4096}),
        (LLAMA_FACTORY, {"lora_rank": 4, "lora_target": "q_proj,v_proj", "additional_target": "lm_head",
                         "use_dora": True, "lora_dropout": 0.1},
         {"adapter.r": 4, "adapter.alpha": 8, "adapter.target_modules": ["q_proj", "v_proj"],
          "adapter.modules_to_save": ["lm_head"], "adapter.use_dora": True, "adapter.dropout": 0.1}),
        (LLAMA_FACTORY, {"stage": "dpo", "pref_beta": 0.3, "gradient_accumulation_steps": 2},
         {"train.objective": "dpo", "train.beta": 0.3, "train.global_batch_size": 32}),
        (LLAMA_FACTORY, {"stage": "dpo", "pref_loss": "simpo"},
         {"train.objective": "simpo", "train.beta": 0.1, "train.simpo_gamma": 0.5}),
        (LLAMA_FACTORY, {"stage": "dpo", "pref_loss": "ipo", "adapter_name_or_path": "saves/sft"},
         {"train.objective": "dpo", "train.dpo_loss": "ipo", "adapter.path": "saves/sft",
          "train.dpo_reference": "base"}),
        (LLAMA_FACTORY, {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1},
         {"train.lr_scheduler": "constant", "train.warmup_ratio": 0.1}),
        (LLAMA_FACTORY, {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5},
                         "warmup_steps": 7}, {"train.min_lr_ratio": 0.5, "train.warmup_steps": 7}),
        (LLAMA_FACTORY, {"lr_scheduler_type": "warmup_stable_decay", "learning_rate": 0.0,
                         "lr_scheduler_kwargs": {"num_decay_steps": 9, "min_lr": 0.5}},
         {"train.lr_scheduler": "wsd", "train.decay_steps": 9, "train.min_lr_ratio": 0.5}),
        (LLAMA_FACTORY, {"stage": "dpo", "kto_chosen_weight": 3.0}, {"train.objective": "dpo"}),
        (LLAMA_FACTORY, {"eval_dataset": "three", "eval_strategy": "steps", "eval_steps": 20, "flash_attn": "fa2",
                         "mask_history": True, "save_total_limit": 3, "report_to": ["wandb", "tensorboard"],
                         "dataset_dir": "elsewhere", "enable_thinking": False},
         {"data.validation": ["elsewhere/dataset_info.json#three"], "train.eval_every": 20,
          "model.attention": "flash_attention_2", "data.train_on": "last", "checkpoint.keep_last": 3,
          "output.trackers": ["wandb", "tensorboard"], "data.chat_template_kwargs": {"enable_thinking": False}}),
        (LLAMA_FACTORY, {"dataset_dir": "ONLINE", "dataset": "org/a, org/b", "mix_strategy": "interleave_under",
                         "interleave_probs": "0.25, 0.75"},
         {"data.sources": ["org/a", "org/b"], "data.weights": [0.25, 0.75]}),
        (LLAMA_FACTORY, {"dataset_dir": "ONLINE", "dataset": "org/a", "streaming": True, "max_steps": 9},
         {"data.streaming": True, "train.steps": 9}),
        (LLAMA_FACTORY, {"streaming": True}, {"data.streaming": None}),
        (LLAMA_FACTORY, {"bf16": False, "fp16": False}, {"train.precision": "fp32"}),
        (LLAMA_FACTORY, {"stage": "kto", "kto_chosen_weight": 0.5, "per_device_train_batch_size": 4,
                         "gradient_accumulation_steps": 2},
         {"train.objective": "kto", "train.beta": 0.1, "train.kto_desirable_weight": 0.5, "train.micro_batch_size": 8,
          "train.gradient_accumulation_steps": 2, "train.global_batch_size": None}),
        (LLAMA_FACTORY, {"loraplus_lr_ratio": 4.0}, {"train.learning_rates": None}),
        (LLAMA_FACTORY, {"train_from_scratch": True},
         {"model.path": None, "model.config": "org/model", "data.tokenizer": "org/model"}),
        (LLAMA_FACTORY, {"stage": "pt", "packing": True}, {"data.packing": None, "data.bos": False}),
        (LLAMA_FACTORY, {"stage": "pt", "packing": False}, {"data.bos": None}),
        (LLAMA_FACTORY, {"stage": "sft"}, {"data.bos": None}),
        (LLAMA_FACTORY, {"save_strategy": False, "eval_strategy": False, "val_size": 0.1},
         {"checkpoint.every": 0, "train.eval_every": 0}),
        (LLAMA_FACTORY, {"stage": "dpo", "ref_model": "org/model"}, {"train.dpo_reference": None}),
    ],
)  # fmt: skip
def test_translated_keys_keep_their_meaning(
    tmp_path: Path, base: dict[str, Any], more: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = translated(tmp_path, base, **more)
    resume = {"resume": found.tree.pop("resume")} if "resume" in found.tree else {}
    got = flat(found)
    assert {key: got.get(key) for key in expected} == expected
    assert ("adapter.r" in got or "adapter.path" in got) == (
        (base is LLAMA_FACTORY and more.get("finetuning_type") != "full") or "adapter" in more
    )
    found.tree |= resume
    (tmp_path / "ours.yaml").write_text(found.text(["A head."]))
    assert load_config(tmp_path / "ours.yaml").model_dump(exclude_unset=True).keys() == found.tree.keys()
    assert not found.unknown


NOISE: dict[str, Any] = {
    "deepspeed": "ds_z3.json", "fsdp": ["full_shard"], "gradient_checkpointing": True, "val_size": 500,
    "max_samples": 10, "lr_scheduler_type": "polynomial", "optim": "adafactor", "save_strategy": "epoch",
    "resume_from_checkpoint": "last", "report_to": "swanlab", "pref_beta": 0.1, "made_up": 3, "made_up_too": False,
    "plot_loss": True, "load_in_4bit": True, "rope_scaling": "linear", "warmup_steps": 0, "logging_steps": None,
    "streaming": False, "do_eval": False, "lora_dropout": 0.0, "fp16": True, "optim_args": "a=b",
    "tf32": True, "disable_shuffling": True, "evaluation_strategy": "epoch", "moe_aux_loss_coef": 0.01,
}  # fmt: skip


def test_no_key_is_dropped_silently(tmp_path: Path) -> None:
    """One changes the configuration, or is told of; unknown ones by their name."""
    for name, value in NOISE.items():
        without, found = translated(tmp_path, LLAMA_FACTORY), translated(tmp_path, LLAMA_FACTORY, **{name: value})
        told = [line.strip().partition("=")[0] for line in found.lines()]
        unset = [line for line in found.lines() if line.startswith("Not set there") and name in line]
        assert found.tree != without.tree or name in told or unset, name
    found = translated(tmp_path, LLAMA_FACTORY, **NOISE)
    assert {"made_up=3", "made_up_too=false"} <= set(found.unknown)
    assert all(re.match(r"\S+=.+?: \S", line) for line in (*found.left_out, *found.notes))


def test_unrepresentable_learning_rates_are_reported(tmp_path: Path) -> None:
    found = translated(tmp_path, LLAMA_FACTORY, lr_scheduler_kwargs={"min_lr": 10**400})
    assert [line for line in found.left_out if line.endswith("nothing reads min_lr")]


def test_untranslated_keys_have_a_reason(tmp_path: Path) -> None:
    said = "\n".join(translated(tmp_path, LLAMA_FACTORY, **NOISE).lines())
    for line in (
        "deepspeed=ds_z3.json: state streams from host memory by itself",
        "val_size=500: is a number of samples; data.validation_fraction is a share",
        "save_strategy=epoch: checkpoint.every counts steps",
        "lr_scheduler_type=polynomial: train.lr_scheduler is constant, linear, cosine, wsd",
        "optim=adafactor: AdamW is used instead",
        "report_to=swanlab: output.trackers can be tensorboard, wandb, trackio",
        "pref_beta=0.1: has no effect with the rest of the file as it is",
        "fp16=true: bfloat16 takes its place",
        "load_in_4bit=true: a frozen base is held in bfloat16",
    ):
        assert line in said


@pytest.mark.parametrize(
    ("base", "more"),
    [
        (LLAMA_FACTORY, {"group_by_length": True}),
    ],
)  # fmt: skip
def test_keys_that_are_heeded_are_not_reported_as_left_out(
    tmp_path: Path, base: dict[str, Any], more: dict[str, Any]
) -> None:
    assert translated(tmp_path, base, **more).left_out == translated(tmp_path, base).left_out


@pytest.mark.parametrize(
    ("base", "more", "what"),
    [
        (LLAMA_FACTORY, {"optim": "galore_adamw"}, "optim=galore_adamw: AdamW is used instead"),
        (LLAMA_FACTORY, {"use_muon": True}, "use_muon=true: matrices of layers are updated so there and here"),
        (LLAMA_FACTORY, {"lr_scheduler_type": "warmup_stable_decay"}, "the decay is linear here, cosine there"),
        (LLAMA_FACTORY, {"stage": "pt", "packing": False}, "packing=false: texts are cut into full sequences, without"),
    ],
)  # fmt: skip
def test_differences_in_meaning_are_told(tmp_path: Path, base: dict[str, Any], more: dict[str, Any], what: str) -> None:
    found = translated(tmp_path, base, **more)
    assert re.search(what, "\n".join((*found.left_out, *found.notes)))


@pytest.mark.parametrize(
    ("base", "more", "what"),
    [
        (LLAMA_FACTORY, {"stage": "ppo"}, r"theirs.yaml:2: stage=ppo is not supported; pt, sft, dpo and kto"),
        (LLAMA_FACTORY, {"cutoff_len": "long"}, "data.sequence_length: should be a valid integer, not 'long'"),
        (LLAMA_FACTORY, {"finetuning_type": "oft"}, "finetuning_type=oft is not supported"),
        (LLAMA_FACTORY, {"stage": "dpo", "pref_loss": "hinge"}, "pref_loss=hinge is not a loss supported here"),
        (LLAMA_FACTORY, {"do_predict": True}, "do_predict=true asks for predictions"),
        (LLAMA_FACTORY, {"learning_rate": "fast"}, "learning_rate=fast is not a finite number"),
        (LLAMA_FACTORY, {"dataset": None}, "dataset=null is required"),
        (LLAMA_FACTORY, {"per_device_train_batch_size": "auto"}, "per_device_train_batch_size=auto is not a fin"),
        (LLAMA_FACTORY, {"stage": "rm"}, "stage=rm is not supported; only language models"),
        (LLAMA_FACTORY, {"adapter_name_or_path": "a,b"}, "adapter_name_or_path=a,b is not one adapter"),
        (LLAMA_FACTORY, {"lr_scheduler_kwargs": [1]}, r"lr_scheduler_kwargs=\[1\] is not a mapping"),
        (LLAMA_FACTORY, {"mask_history": "no"}, "mask_history='no' is neither true nor false"),
        (LLAMA_FACTORY, {"bf16": "false"}, "bf16='false' is neither true nor false"),
        (LLAMA_FACTORY, {"dataset": [{"a": "b"}]}, "dataset=.* is neither a name nor a list of names"),
        (LLAMA_FACTORY, {"lora_target": True}, "lora_target=true is neither a name nor a list of names"),
        ({"model": {"path": "x"}}, {}, "is not a LLaMA-Factory YAML: it has no model_name_or_path"),
        ({"base_model": "org/model", "datasets": []}, {}, "is an Axolotl YAML, which is not translated; write its"),
        ({"model": "org/model", "train_dataset": "d.yaml"}, {}, "is for LLaMA-Factory's v1, which is not supported"),
        (LLAMA_FACTORY, {"mixture_of_depths": "convert"}, "mixture_of_depths=convert changes the model, which is not"),
        (LLAMA_FACTORY, {"use_dft_loss": True}, "use_dft_loss=true trains with another loss, which is not supported"),
        (LLAMA_FACTORY, {"stage": "dpo", "ref_model": "org/other"}, "ref_model=org/other is another model than the"),
        (LLAMA_FACTORY, {"stage": "kto", "ref_model_adapters": "a"}, "ref_model_adapters=a is not supported"),
        (LLAMA_FACTORY, {"adapter_name_or_path": "a", "create_new_adapter": True}, "beside an adapter is not supp"),
    ],
)  # fmt: skip
def test_settings_that_would_change_the_run_are_refused(
    tmp_path: Path, base: dict[str, Any], more: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        translated(tmp_path, base, **more)


def test_muon_has_the_settings_that_it_has_there(tmp_path: Path) -> None:
    """Of src/llamafactory/third_party/muon: one rate and one decay for all that trains, and `optim` is not read."""
    given = {"use_muon": True, "optim": "galore_adamw", "weight_decay": 0.2, "adam_beta2": 0.95, "bf16": True}
    found = translated(tmp_path, LLAMA_FACTORY, **given)
    assert not [line for line in found.left_out if line.startswith(("optim", "use_muon"))]
    (tmp_path / "ours.yaml").write_text(found.text([]))
    adamw = AdamW(2e-5, (0.9, 0.95), 1e-8, 0.2)
    assert optimizer_for(load_config(tmp_path / "ours.yaml").train) == Muon(2e-5, 0.2, adamw=adamw)
    assert "use_muon" in translated(tmp_path, LLAMA_FACTORY, use_muon=False).unset
