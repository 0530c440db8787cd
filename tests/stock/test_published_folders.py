"""A folder is loaded as the class that it was published for, and what that class does not read is carried over."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from megatrain import Engine, Policy
from megatrain.checkpoint.save import PlannedCheckpoint
from megatrain.commands.export import run_export
from megatrain.commands.generate import GenerationModel, run_generation
from megatrain.config import Config
from megatrain.hf import streamed
from megatrain.model import PretrainedSource, port_model
from megatrain.model.architecture import model_class_of
from megatrain.model.tiny import ordinary_tokens
from megatrain.run.sampling import Sampling
from megatrain.run.training import run_training
from tests.integration.test_architectures import config_of, twin
from tests.kinds import case_of
from tests.ranks import together, worlds
from tests.stock.image_models import IMAGE, KINDS, VOCABULARY, image_model, text_batch
from tests.tiny import equal, tiny_model
from tests.train.test_save_from_ranks import Rank

pytestmark = pytest.mark.filterwarnings("ignore:.*requires torchvision")
TEMPLATE = "{{ messages[0]['content'] }}"
WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
WORDS[IMAGE], WORDS[-1] = "<image>", "<|endoftext|>"


# The class ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_vl", "mistral3", "mistral4", "kimi_k25", "minimax_m3_vl", "gemma3", "qwen3_5"])
def test_a_config_without_architectures_is_the_whole_model(kind: str) -> None:
    found = model_class_of(AutoConfig.for_model(kind))
    assert found is not None
    assert found.__name__ == MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text", "gemma3_text", "mixtral"])
def test_a_config_of_text_is_the_causal_language_model(kind: str) -> None:
    found = model_class_of(AutoConfig.for_model(kind))
    assert found is not None
    assert found.__name__ == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]


@pytest.mark.parametrize("named", ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_architectures_decide_between_two_classes(named: str) -> None:
    found = model_class_of(AutoConfig.for_model("qwen3_5", architectures=[named]))
    assert found is not None
    assert found.__name__ == named


# Whole folders --------------------------------------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>")
    rules = tokenizers.Tokenizer(words)
    rules.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<image>"]}
    return PreTrainedTokenizerFast(tokenizer_object=rules, chat_template=TEMPLATE, **special)


def published(kind: str, folder: Path) -> Path:
    """A small model of this kind as its publisher would save it, with a processor's files."""
    image_model(kind).save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    more = {"patch_size": 4, "vision_feature_select_strategy": "default", "chat_template": TEMPLATE}
    LlavaProcessor(images, tokenizer(), num_additional_image_tokens=1, **more).save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text('{"fps": 2.0}\n')
    return folder


def configuration(tmp_path: Path, model: Path, **changed: dict[str, Any]) -> Config:
    text = " ".join(WORDS[3 + number % 40] for number in range(4000))
    (tmp_path / "corpus.txt").write_text(text)
    tokenizer().save_pretrained(tmp_path / "words")  # some kinds read every folder of theirs as their usual tokenizer
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "verify": False},
        "data": {"sources": [str(tmp_path / "corpus.txt")], "sequence_length": 16, "cache": str(tmp_path / "cache")},
        "train": {"steps": 10, "micro_batch_size": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "precision": "fp32"}
        | {"sample_tokens": 2},
        "checkpoint": {"every": 0},
        "output": {"folder": str(tmp_path / "run"), "trackers": [], "precision": "fp32"},
    }
    tree["data"]["tokenizer"] = str(tmp_path / "words")
    for section, values in changed.items():
        tree.setdefault(section, {}).update(values)
    return Config.model_validate(tree)


def train(config: Config) -> str:
    console = Console(file=io.StringIO(), width=400)
    run_training(config, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def tower_of(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name in tensors if any(part in name for part in ("vis", "projector"))]


def small_files(folder: Path) -> dict[str, str]:
    names = (
        "processor_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "chat_template.jinja",
    )
    return {name: (folder / name).read_text() for name in names if (folder / name).exists()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("llava", "qwen3_5") else pytest.mark.slow)
        for kind in KINDS
        if kind != "inkling2"  # whose routers refuse weights in bfloat16
    ],
)
def test_training_on_text_keeps_every_tensor_name_and_file(kind: str, tmp_path: Path) -> None:
    source = published(kind, tmp_path / "published")
    said = train(configuration(tmp_path, source, checkpoint={"every": 5}))
    assert "not loaded" not in said
    before, after = tensors_in(source), tensors_in(tmp_path / "run" / "model")
    assert after.keys() == before.keys()
    tower = tower_of(before)
    assert len(tower) > 5
    assert all(torch.equal(before[name], after[name]) for name in tower), "what takes no part is left alone"
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["architectures"] == [
        type(image_model(kind)).__name__
    ]
    for folder in (tmp_path / "run" / "model", tmp_path / "run" / "checkpoints" / "step-00000010"):
        assert small_files(folder) == small_files(source)
        assert tensors_in(folder).keys() >= before.keys()
        assert type(AutoProcessor.from_pretrained(folder)) is LlavaProcessor
        _, info = type(image_model(kind)).from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
    assert AutoModelForImageTextToText.__name__ in (tmp_path / "run" / "model" / "README.md").read_text() or (
        kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    run_generation(GenerationModel(str(tmp_path / "run" / "model")), "w3 w4", lambda text: None, Sampling(most=2))


PUBLISHED = """
gemma4 gemma4_unified gemma3n_text qwen3_vl qwen3_vl_moe mistral4 mistral_large4 kimi_k25 minimax_m3_vl muse_spark
muse_glimmer step3p7 glm5_next internvl lfm2_vl llava smolvlm qwen3_5 qwen3_5_moe glm_moe_dsa hy_v4 zaya gpt_oss
deepseek_v32 deepseek_v4 minimax_m2 mimo_v2_flash qwen4_exp inkling_mm_model nemotron_h_omni molmo2
"""
"""The types of the models that people asked for in 2026."""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the library's own warnings
@pytest.mark.parametrize("kind", [case_of(kind) for kind in PUBLISHED.split()])
def test_a_published_type_trains_from_its_folder_is_read_whole_by_its_class_and_generates(
    kind: str, tmp_path: Path
) -> None:
    model = twin(config_of(kind))
    model.save_pretrained(tmp_path / "published")
    tokens = torch.tensor([ordinary_tokens(model.config)[:9]])
    how: Any = {"device": "cpu", "precision": "fp32", "policy": Policy(shares_memory=True), "verify": False}
    with Engine.from_pretrained(tmp_path / "published", **how) as engine:
        assert type(engine.parts.ported.skeleton) is type(model)
        engine.step([{"input_ids": tokens, "labels": tokens}])
        folder, weights = engine.save_pretrained(tmp_path / "trained"), engine.master_weights()
        found = engine.generate(tokens, do_sample=False, max_new_tokens=4)
    read, report = type(model).from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    assert equal(dict(read.named_parameters()), weights)
    assert not equal(dict(model.named_parameters()), weights)
    assert tensors_in(folder).keys() == tensors_in(tmp_path / "published").keys()
    assert torch.equal(found, read.eval().generate(tokens, do_sample=False, max_new_tokens=4))


def test_an_adapter_over_such_a_folder_is_read_by_peft(tmp_path: Path) -> None:
    source = published("llava", tmp_path / "published")
    adapter = {"type": "lora", "r": 4, "target_modules": ["q_proj"]}
    train(configuration(tmp_path, source, adapter=adapter, train={"steps": 2}))
    folder = tmp_path / "run" / "model"
    assert not (folder / "model.safetensors").exists()
    base = AutoModelForImageTextToText.from_pretrained(source)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    batch = text_batch(0)
    with Engine.from_pretrained(folder, device="cpu", precision="fp32", verify=False) as engine, torch.no_grad():
        assert engine.evaluate([batch]) == pytest.approx(float(theirs(**batch).loss), rel=1e-6)
    text = (folder / "README.md").read_text()
    assert 'base = AutoModelForImageTextToText.from_pretrained("path/to/its/base")' in text
    assert 'model = PeftModel.from_pretrained(base, "path/to/this/folder")' in text


# What the class does not read -----------------------------------------------------------------------------------------

MORE: dict[str, Tensor] = {
    "mtp.layers.0.proj.weight": torch.linspace(-1, 1, 300_000).view(300, 1000).to(torch.bfloat16),
    "mtp.layers.0.norm.weight": torch.linspace(-1, 1, 7),
    "mtp.layers.0.experts.weight": torch.linspace(-1, 1, 24).view(4, 6).to(torch.float8_e4m3fn),
    "mtp.layers.0.experts.order": torch.arange(5),
    "mtp.scale": torch.tensor(float("nan"), dtype=torch.float64),
}


def with_more(folder: Path) -> Path:
    """A model in two files, with layers that predict several tokens, which its class does not read."""
    tiny_model(vocab_size=VOCABULARY).save_pretrained(folder, max_shard_size="60KB")
    tokenizer().save_pretrained(folder)
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    save_file(MORE, folder / "mtp.safetensors", {"format": "pt"})
    held["weight_map"] |= dict.fromkeys(MORE, "mtp.safetensors")
    index.write_text(json.dumps(held))
    return folder


def assert_carried(folder: Path) -> None:
    """Every tensor is there bit for bit, and named in the index if there is one."""
    found = tensors_in(folder)
    for name, value in MORE.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert bytes(found[name].view(-1).view(torch.uint8).numpy()) == bytes(value.view(-1).view(torch.uint8).numpy())
    if len([*folder.glob("*.safetensors")]) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


def test_they_are_told_and_carried_over_from_checkpoint_to_checkpoint(tmp_path: Path) -> None:
    """The published folder is removed while the run goes on, and so is the checkpoint that it is resumed from."""
    source = with_more(tmp_path / "published")
    keeps = {"every": 1, "keep_last": 1}
    said = train(configuration(tmp_path, source, train={"steps": 2}, checkpoint=keeps))
    assert "carried over" in said
    assert "5 tensors are not loaded: mtp.* (5)" in said
    assert_carried(tmp_path / "run" / "model")
    shutil.rmtree(source)
    shutil.copytree(tmp_path / "run" / "model", source)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert_carried(checkpoint)
    longer = configuration(tmp_path, source, train={"steps": 4}, checkpoint=keeps)
    train(longer.model_copy(update={"resume": "auto"}))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000004"
    assert_carried(checkpoint)
    assert_carried(tmp_path / "run" / "model")


@pytest.mark.parametrize("shard_nbytes", [4 << 30, 50_000])
def test_an_engine_copies_them_from_a_folder_that_is_gone(shard_nbytes: int, tmp_path: Path) -> None:
    source = with_more(tmp_path / "published")
    assert set(PretrainedSource(source).unexpected) == set(MORE)
    with Engine.from_pretrained(source, device="cpu", verify=False) as engine:
        shutil.rmtree(source)
        folder = engine.save_pretrained(tmp_path / "out", shard_nbytes=shard_nbytes)
        engine.restore(engine.save(tmp_path / "checkpoints").wait())
    assert_carried(folder)


def test_a_merged_model_has_them_and_an_adapter_has_not(tmp_path: Path) -> None:
    source = with_more(tmp_path / "published")
    lora = peft.LoraConfig(target_modules=["q_proj"])
    with Engine.from_pretrained(source, device="cpu", verify=False, adapter=lora) as engine:
        adapter = engine.save_pretrained(tmp_path / "adapter")
    assert not any("mtp" in name for name in tensors_in(adapter))
    lines: list[str] = []
    assert_carried(run_export(str(adapter), tmp_path / "merged", merge=True, notice=lines.append))
    assert lines == ["copied unchanged: 5 tensors are not loaded: mtp.* (5)"]


def test_a_streamed_trainer_tells_and_saves_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = with_more(tmp_path / "published")
    args = TrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True, max_steps=1)
    rows = [{key: value[0] for key, value in text_batch(seed).items()} for seed in range(8)]
    trainer = streamed(Trainer)(model=str(source), args=args, train_dataset=rows)
    assert "5 tensors are not loaded: mtp.* (5); they are carried over when it is saved" in caplog.text
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert_carried(tmp_path / "saved")
    assert_carried(tmp_path / "run" / "checkpoint-1")


def test_ranks_that_write_a_checkpoint_together_carry_them_over(tmp_path: Path) -> None:
    source = with_more(tmp_path / "published")

    planned = PlannedCheckpoint(port_model(PretrainedSource(source).model, torch.float32))
    together(worlds(2, 1), lambda world: Rank(world, planned, 1).save(tmp_path, step=1))
    assert_carried(tmp_path / "step-00000001")
