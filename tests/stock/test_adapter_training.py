"""Adapters begun and continued here train, are saved and are read as by `peft` and `torch.optim.AdamW`.

`peft` says what is right: losses of its model under plain PyTorch, the names and shapes in its file, and the logits of
what it loads. An option that cannot be trained is refused when the engine is made, never when it saves.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatrain import AdamW, Engine
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import MegaTrainError, ModelError
from tests.tiny import VOCAB, stock_gradients, tiny_model, unequal_batches

BATCHES = unequal_batches()
IDS = BATCHES[1]["input_ids"]
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.0}
OPTIONS: dict[str, Any] = {"precision": "fp32", "optimizer": AdamW(**ADAMW), "max_grad_norm": None, "verify": False}
TOLERANCE = 1e-5
RESIZED = VOCAB + 8
EMBED, HEAD = "embed_tokens", "lm_head"
Base = Callable[[str], Path]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """The folder of a tiny model of a family."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            layers = {"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 2}
            tiny_model(family, **layers).save_pretrained(made[family])
        return made[family]

    return folder


def loaded(folder: Path, vocabulary: int = VOCAB) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    if vocabulary != VOCAB:
        torch.manual_seed(5)  # of the new rows
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    return model


def config_of(family: str, kind: str = "LoraConfig", **fields: Any) -> Any:
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "down_proj"]
    fields = {"target_modules": targets, **({"r": 4} if kind == "LoraConfig" else {}), **copy.deepcopy(fields)}
    return getattr(peft, kind)(task_type="CAUSAL_LM", **fields)


def fresh(folder: Path, config: Any, vocabulary: int = VOCAB) -> Any:
    """A `PeftModel` as `get_peft_model` makes it after seed 7."""
    model = loaded(folder, vocabulary)
    torch.manual_seed(7)
    return peft.get_peft_model(model, copy.deepcopy(config)).train()


def read(folder: Path, adapter: Path, vocabulary: int = VOCAB) -> Any:
    return peft.PeftModel.from_pretrained(loaded(folder, vocabulary), str(adapter), is_trainable=True).train()


def stock_losses(model: Any, steps: int = 3) -> list[float]:
    inner, losses = model.get_base_model(), []
    optimizer = torch.optim.AdamW([each for each in inner.parameters() if each.requires_grad], **ADAMW)
    for _ in range(steps):
        loss, gradients = stock_gradients(inner, BATCHES)
        losses.append(loss)
        for name, parameter in inner.named_parameters():
            parameter.grad = gradients[name] if parameter.requires_grad else None
        optimizer.step()
        inner.zero_grad()
    return losses


def our_losses(engine: Engine, steps: int = 3) -> list[float]:
    return [engine.step(BATCHES).loss for _ in range(steps)]


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in peft.load_peft_weights(str(folder), device="cpu").items()}


def near(expected: Sequence[float]) -> Any:
    return pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def assert_trains_as_stock(
    folder: Path, config: Any, tmp_path: Path, vocabulary: int = VOCAB, begins: Sequence[str] = ("memory", "files")
) -> None:
    """From the first step to an adapter that is continued here, whether it was saved here or by `peft`."""
    stock = fresh(folder, config, vocabulary)
    expected = stock_losses(stock)
    stock.save_pretrained(tmp_path / "stock")
    begun: dict[str, Callable[[], Engine]] = {
        "memory": lambda: Engine.from_model(fresh(folder, config, vocabulary), **OPTIONS),
        "files": lambda: Engine.from_pretrained(folder, adapter=copy.deepcopy(config), seed=7, **OPTIONS),
    }
    saved = [tmp_path / "stock"]
    for begin in begins:
        with begun[begin]() as engine:
            assert our_losses(engine) == near(expected)
            checkpoint = engine.save(tmp_path / f"{begin}-checkpoint").wait()
            saved.append(engine.save_pretrained(tmp_path / begin))
            logits = engine.logits({"input_ids": IDS})
            then = our_losses(engine, 1)
            engine.restore(checkpoint)
            assert our_losses(engine, 1) == then
        assert shapes_in(saved[-1]) == shapes_in(tmp_path / "stock")
        assert torch.allclose(logits_of(read(folder, saved[-1], vocabulary)), logits, atol=TOLERANCE)
        with Engine.from_checkpoint(checkpoint, verify=False, precision="fp32", max_grad_norm=None) as engine:
            assert our_losses(engine, 1) == then
    expected = stock_losses(read(folder, tmp_path / "stock", vocabulary))
    for each in saved:
        with Engine.from_pretrained(folder, adapter=each, **OPTIONS) as engine:
            assert our_losses(engine) == near(expected)
            assert shapes_in(engine.save_pretrained(tmp_path / "again")) == shapes_in(each)


TIED = {"ensure_weight_tying": True}
FAST = ("a tied embedding",)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "a tied embedding": ("qwen3-tied", {"modules_to_save": [EMBED], **TIED}, VOCAB),
    "an adapted head": ("qwen3-tied", {"target_modules": ["q_proj", HEAD]}, VOCAB),
    "some tokens, tied": ("qwen3-tied", {"trainable_token_indices": [3, 5]}, VOCAB),
    "new tokens": ("qwen3", {"trainable_token_indices": [VOCAB, VOCAB + 1]}, RESIZED),
    "a tied head": ("qwen3-tied", {"modules_to_save": [HEAD], **TIED}, VOCAB),
    "tied ends": ("qwen3-tied", {"modules_to_save": [EMBED, HEAD], **TIED}, VOCAB),
    "tied ends with DoRA": ("qwen3-tied", {"modules_to_save": [EMBED], "use_dora": True, **TIED}, VOCAB),
    "nothing to tie": ("qwen3", {"modules_to_save": [EMBED, HEAD], **TIED}, VOCAB),
    "an untied embedding": ("qwen3-tied", {"modules_to_save": [EMBED]}, VOCAB),
    "untied ends": ("qwen3-tied", {"modules_to_save": [EMBED, HEAD]}, VOCAB),
    "a norm": ("qwen3-tied", {"modules_to_save": ["norm"]}, VOCAB),
    "an adapted embedding": ("qwen3", {"target_modules": ["q_proj", EMBED], "use_dora": True}, VOCAB),
    "adapted ends": ("qwen3-tied", {"target_modules": ["q_proj", EMBED, HEAD]}, VOCAB),
    "an adapted head, a whole embedding": (
        "qwen3",
        {"target_modules": ["q_proj", HEAD], "modules_to_save": [EMBED]},
        VOCAB,
    ),
    "all-linear": ("qwen3", {"target_modules": "all-linear"}, VOCAB),
    "some tokens": ("qwen3", {"trainable_token_indices": [3, 5]}, VOCAB),
    "some tokens, tied on request": ("qwen3-tied", {"trainable_token_indices": [3, 5], **TIED}, VOCAB),
    "some tokens of the head too": ("qwen3", {"trainable_token_indices": {EMBED: [3, 5], HEAD: [4, 5]}}, VOCAB),
    "tokens untied": ("qwen3-tied", {"trainable_token_indices": {EMBED: [3, 5], HEAD: [4, 5]}}, VOCAB),
    "tokens, and a whole head": ("qwen3", {"trainable_token_indices": [3], "modules_to_save": [HEAD]}, VOCAB),
    "some tokens of gpt2": ("gpt2", {"trainable_token_indices": [3, 5], "fan_in_fan_out": True}, VOCAB),
    "all biases": ("gpt2", {"bias": "all", "fan_in_fan_out": True}, VOCAB),
    "LoRA's biases": ("gpt2", {"bias": "lora_only", "lora_bias": True, "fan_in_fan_out": True}, VOCAB),
    "a tied wte": ("gpt2", {"modules_to_save": ["wte"], "fan_in_fan_out": True, **TIED}, VOCAB),
    "an adapted wte": ("gpt2", {"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True}, VOCAB),
    "experts": (
        "qwen3-moe",
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "rank_pattern": {"q_proj": 2}},
        VOCAB,
    ),
    "experts alone": ("qwen3-moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}, VOCAB),
    "patterns": (
        "qwen3",
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 16}, "use_rslora": True},
        VOCAB,
    ),
    "one layer": ("qwen3", {"layers_to_transform": [1], "init_lora_weights": False}, VOCAB),
    "but one layer": ("qwen3", {"exclude_modules": r".*layers\.1.*", "init_lora_weights": "gaussian"}, VOCAB),
    "orthogonal": ("qwen3", {"init_lora_weights": "orthogonal"}, VOCAB),
    "resized": ("qwen3", {}, RESIZED),
    "resized and tied": ("qwen3-tied", {}, RESIZED),
    "resized, a tied embedding": ("qwen3-tied", {"modules_to_save": [EMBED], **TIED}, RESIZED),
    "resized, whole ends": ("qwen3", {"modules_to_save": [EMBED, HEAD]}, RESIZED),
    "resized, adapted ends": ("qwen3", {"target_modules": ["q_proj", EMBED, HEAD]}, RESIZED),
    "new tokens, tied": ("qwen3-tied", {"trainable_token_indices": [VOCAB, VOCAB + 1]}, RESIZED),
    "norms": ("qwen3", {"kind": "LNTuningConfig", "target_modules": ["input_layernorm"]}, VOCAB),
    "norms, and a head": (
        "qwen3",
        {"kind": "LNTuningConfig", "target_modules": ["input_layernorm"], "modules_to_save": [HEAD]},
        VOCAB,
    ),
    "IA3": (
        "qwen3-tied",
        {"kind": "IA3Config", "feedforward_modules": ["down_proj"], "modules_to_save": [EMBED]},
        VOCAB,
    ),
    "OFT": ("qwen3-tied", {"kind": "OFTConfig", "oft_block_size": 4, "modules_to_save": [EMBED]}, VOCAB),
    "LoHa": ("qwen3", {"kind": "LoHaConfig", "r": 4, "modules_to_save": ["norm"]}, VOCAB),
}


@pytest.mark.parametrize("case", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in CASES])
def test_an_adapter_trains_is_saved_and_goes_on_as_in_peft(case: str, base: Base, tmp_path: Path) -> None:
    family, fields, vocabulary = CASES[case]
    begins = ("memory", "files") if vocabulary == VOCAB else ("memory",)
    assert_trains_as_stock(base(family), config_of(family, **fields), tmp_path, vocabulary, begins)


RESIZED_AND_ADAPTED = {
    "an adapted embedding": {"target_modules": ["q_proj", EMBED]},
    "an adapted head": {"target_modules": ["q_proj", HEAD]},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RESIZED_AND_ADAPTED)
def test_new_rows_are_saved_of_the_end_that_is_not_adapted_too(case: str, base: Base, tmp_path: Path) -> None:
    """`peft` saves those of the adapted end alone, and nobody can read them back."""
    folder, config = base("qwen3"), config_of("qwen3", **RESIZED_AND_ADAPTED[case])
    with Engine.from_model(fresh(folder, config, RESIZED), **OPTIONS) as engine:
        engine.step(BATCHES)
        saved, logits = engine.save_pretrained(tmp_path / "adapter"), engine.logits({"input_ids": IDS})
        then = our_losses(engine, 1)
    again = AutoModelForCausalLM.from_pretrained(folder)
    again.resize_token_embeddings(RESIZED)  # other new rows than before
    assert torch.allclose(logits_of(peft.PeftModel.from_pretrained(again, str(saved))), logits, atol=TOLERANCE)
    with Engine.from_pretrained(folder, adapter=saved, **OPTIONS) as engine:
        assert our_losses(engine, 1) == near(then)
    fresh(folder, config, RESIZED).save_pretrained(tmp_path / "stock")
    assert shapes_in(tmp_path / "stock").items() < shapes_in(saved).items()
    with pytest.raises(ModelError, match=r"its vocabulary was resized, and its file lacks \S+\.weight; "):
        Engine.from_pretrained(folder, adapter=tmp_path / "stock", **OPTIONS)


@pytest.mark.parametrize("end", [EMBED, pytest.param(HEAD, marks=pytest.mark.slow)])
def test_adapters_that_share_memory_are_refused_when_the_engine_is_made(end: str, base: Base) -> None:
    """Of two tied layers: two parameters over one memory, which `torch.optim.AdamW` updates twice a step."""
    folder, config = base("qwen3-tied"), config_of("qwen3-tied", target_modules=["q_proj", end], **TIED)
    with pytest.raises(ModelError, match=r"lm_head\.lora_A.* shares memory with .*; leave ensure_weight_tying out"):
        Engine.from_pretrained(folder, adapter=config, **OPTIONS)
    with pytest.raises(ModelError, match=r"lm_head\.lora_A.* shares memory with .*; leave ensure_weight_tying out"):
        Engine.from_model(fresh(folder, config), **OPTIONS)


@pytest.mark.parametrize(
    ("option", "message"),
    [({"modules_to_save": ["lm_heed"]}, "names lm_heed, and the model has no such module; name modules"),
     ({"trainable_token_indices": [3, VOCAB]}, "index .* out of bounds .*; peft refuses this setting over this model")],
)  # fmt: skip
def test_names_and_tokens_that_the_model_lacks_are_refused(option: dict[str, Any], message: str, base: Base) -> None:
    with pytest.raises(ModelError, match=message):
        Engine.from_pretrained(base("qwen3"), adapter=config_of("qwen3", **option), **OPTIONS)


@pytest.mark.parametrize("case", ["new tokens", pytest.param("a tied embedding", marks=pytest.mark.slow)])
def test_a_frozen_embedding_in_bfloat16_is_saved_as_it_was_held(case: str, base: Base, tmp_path: Path) -> None:
    family, fields, vocabulary = CASES[case]
    folder, config = base(family), config_of(family, **fields)
    with Engine.from_model(fresh(folder, config, vocabulary), precision="bf16", verify=False) as engine:
        engine.step(BATCHES)
        saved, checkpoint = engine.save_pretrained(tmp_path / "adapter"), engine.save(tmp_path / "checkpoints").wait()
        then = our_losses(engine, 2)
    assert shapes_in(saved) == shapes_in(checkpoint)
    with Engine.from_checkpoint(checkpoint, verify=False) as engine:
        assert our_losses(engine, 2) == then


def trained(tmp_path: Path, streams: bool, model: Any, checkpoint: str | None = None) -> Any:
    """A script around `transformers.Trainer`, which saves a checkpoint on its way, and the model at its end."""
    from transformers import Trainer, TrainingArguments

    from megatrain.hf import streamed

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, VOCAB, (12, 8)).tolist()]
    args: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "adam_epsilon": 1e-4, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "report_to": "none",
        "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    more = {"engine_options": {"verify": False}} if streams else {}
    kind: Any = streamed(Trainer) if streams else Trainer
    trainer = kind(model=model, args=TrainingArguments(**args), train_dataset=rows, **more)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(tmp_path / "final"))
    return trainer


@pytest.mark.filterwarnings("default")  # the libraries' own warnings, which change with each release
@pytest.mark.parametrize(
    "case",
    ["a tied embedding", *(pytest.param(each, marks=pytest.mark.slow) for each in ("resized", "some tokens, tied"))],
)
def test_a_streamed_trainer_saves_the_stock_trainers_files(case: str, base: Base, tmp_path: Path) -> None:
    family, fields, vocabulary = CASES[case]
    folder, config, logs, files = base(family), config_of(family, **fields), [], []
    for streams in (False, True):
        torch.manual_seed(0)
        where = tmp_path / str(streams)
        trainer = trained(where, streams, fresh(folder, config, vocabulary))
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        files.append([peft.load_peft_weights(str(where / each), device="cpu") for each in ("final", "checkpoint-2")])
    assert logs[1] == near(logs[0])
    for ours, theirs in zip(files[1], files[0], strict=True):
        assert {name: each.shape for name, each in ours.items()} == {name: each.shape for name, each in theirs.items()}
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)
    torch.manual_seed(0)
    checkpoint = str(tmp_path / "True/checkpoint-2")
    again = trained(tmp_path / "again", True, fresh(folder, config, vocabulary), checkpoint)
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == logs[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("by_name", [False, True])
def test_a_chat_template_cloned_by_trl_adds_rows_that_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    """TRL resizes the vocabulary, trains the new tokens' rows and the head, and `peft` saves both embeddings."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from megatrain.hf import streamed

    monkeypatch.setenv("CI", "1")  # no telemetry
    tiny_model("llama", vocab_size=257).save_pretrained(tmp_path / "base")
    load_tokenizer("bytes").save_pretrained(tmp_path / "base")
    chats = load_tokenizer("bytes")
    chats.add_tokens(["<|im_start|>", "<|im_end|>"])
    chats.eos_token = "<|im_end|>"
    chats.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chats.save_pretrained(tmp_path / "chats")
    says = [[{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(8)]
    losses, files = [], []
    for streams in (False, True):
        args = {
            "output_dir": str(tmp_path / str(streams)), "max_steps": 3, "per_device_train_batch_size": 2,
            "learning_rate": 1e-2, "adam_epsilon": 1e-4, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "use_cpu": True, "bf16": False, "chat_template_path": str(tmp_path / "chats"),
        }  # fmt: skip
        torch.manual_seed(0)
        kind: Any = streamed(SFTTrainer) if streams else SFTTrainer
        trainer = kind(
            model=str(tmp_path / "base") if by_name else loaded(tmp_path / "base"),
            args=SFTConfig(**args),
            train_dataset=Dataset.from_list([{"messages": each} for each in says]),
            processing_class=AutoTokenizer.from_pretrained(tmp_path / "base"),
            peft_config=config_of("llama"),
            **({"engine_options": {"verify": False}} if streams else {}),
        )
        trainer.train()
        trainer.save_model(str(tmp_path / str(streams) / "final"))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        files.append(peft.load_peft_weights(str(tmp_path / str(streams) / "final"), device="cpu"))
    assert losses[1] == near(losses[0])
    assert len(files[0]["base_model.model.model.embed_tokens.token_adapter.base_layer.weight"]) == 320
    assert {name: each.shape for name, each in files[1].items()} == {
        name: each.shape for name, each in files[0].items()
    }
    assert all(torch.allclose(files[1][name], theirs, atol=1e-4) for name, theirs in files[0].items())
    with Engine.from_pretrained(tmp_path / "base", adapter=tmp_path / "True/final", **OPTIONS) as engine:
        assert engine.structure.vocab_size == 320


# Any combination ------------------------------------------------------------------------------------------------------

TARGETS: list[Any] = [["q_proj"], ["q_proj", EMBED], ["q_proj", HEAD], ["q_proj", EMBED, HEAD], "all-linear"]
COMBINATIONS = st.fixed_dictionaries(
    {"target_modules": st.sampled_from(TARGETS)},
    optional={
        "modules_to_save": st.sampled_from([[EMBED], [HEAD], [EMBED, HEAD], ["norm"]]),
        "ensure_weight_tying": st.booleans(),
        "trainable_token_indices": st.sampled_from([[3, 5], {EMBED: [3], HEAD: [3]}, {EMBED: [3], HEAD: [4]}]),
        "use_dora": st.booleans(),
        "use_rslora": st.booleans(),
        "rank_pattern": st.just({"q_proj": 2}),
        "init_lora_weights": st.sampled_from([False, "gaussian", "orthogonal", "mica"]),
        "layers_to_transform": st.just([1]),
    },
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    family=st.sampled_from(["qwen3", "qwen3-tied"]), vocabulary=st.sampled_from([VOCAB, RESIZED]), fields=COMBINATIONS
)
def test_any_combination_is_refused_at_the_start_or_trains_and_is_saved_as_in_peft(
    family: str, vocabulary: int, fields: dict[str, Any], base: Base, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, tmp_path = base(family), tmp_path_factory.mktemp("combination")
    try:
        config = config_of(family, **fields)
        expected = stock_losses(stock := fresh(folder, config, vocabulary))
    except (ValueError, RuntimeError, KeyError, AttributeError, TypeError):  # what `peft` cannot train
        return
    if not all(map(math.isfinite, expected)):  # DoRA over a tied head and new rows
        return
    stock.save_pretrained(tmp_path / "stock")
    try:
        engine = Engine.from_model(fresh(folder, config, vocabulary), **OPTIONS)
    except MegaTrainError:
        return
    with engine:
        assert our_losses(engine) == near(expected)
        engine.save(tmp_path / "checkpoint").wait()
        saved, logits = engine.save_pretrained(tmp_path / "ours"), engine.logits({"input_ids": IDS})
    assert shapes_in(tmp_path / "stock").items() <= shapes_in(saved).items()
    try:
        again = logits_of(read(folder, saved, vocabulary))
    except (KeyError, RuntimeError):  # and what it cannot read of its own either
        with pytest.raises((KeyError, RuntimeError)):
            read(folder, tmp_path / "stock", vocabulary)
        return
    assert torch.allclose(again, logits, atol=TOLERANCE)
    try:
        engine = Engine.from_pretrained(folder, adapter=saved, **OPTIONS)
    except MegaTrainError:
        return
    with engine:
        assert our_losses(engine) == near(stock_losses(read(folder, saved, vocabulary)))
