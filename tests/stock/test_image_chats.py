"""Chats with images: micro-batches are what the stock processor makes, and train as the stock model does."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from megatrain import Engine
from megatrain.config import Config
from megatrain.data.encode import EncodeOptions, Encoder
from megatrain.data.loader import Loader
from megatrain.data.packing import SampleRows
from megatrain.data.processor import Processor, load_processor, refuse_without_tower
from megatrain.data.sample_cache import SampleFile, prepare_samples
from megatrain.data.sample_formats import Schema
from megatrain.data.sample_sources import Source
from megatrain.errors import DataError, ModelError, SampleError
from megatrain.hf import streamed
from megatrain.model.forward_arguments import arguments_of
from megatrain.spec import Numerics
from megatrain.train.parity import truth
from tests.run.test_ranks import launched
from tests.run.test_training import configuration, train
from tests.run.test_training import losses as losses_of
from tests.stock.image_processors import (
    IDS,
    chat,
    image_chats,
    image_model_of,
    image_processor,
    picture,
    tokenizer,
    write_chats,
    write_pictures,
)
from tests.stock.test_images import errors
from tests.tiny import BYTE_LLAMA, relative_error, tiny_model

pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings
KINDS = ["llava", "qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow)]


def encoder_of(kind: str, **options: Any) -> Encoder:
    processor, words = Processor(image_processor(kind), kind), tokenizer()
    words.chat_template = processor.chat_template
    return Encoder(words, EncodeOptions(**{"max_tokens": 400, **options}), processor=processor)


def encoded(path: Path, encoder: Encoder, images: str = "images", **more: Any) -> SampleFile:
    source = Source(str(path), Schema(images=images))
    return prepare_samples(source, encoder, cache=path.parent / "cache", **more)


def rows_of(file: SampleFile, encoder: Encoder, micro_batch: int = 2) -> SampleRows:
    return SampleRows(file, np.arange(len(file)), micro_batch, processor=encoder.processor)


def steps(rows: SampleRows, count: int = 2, skip: int = 0, workers: int = 0) -> list[list[dict[str, Tensor]]]:
    loader = Loader(rows, micro_batch=2, micro_batches=2, seed=3).read_ahead(workers)
    found = [next(loader) for _ in range(count)]
    state = loader.state_dict()
    loader.close()
    if not skip:
        return found
    again = Loader(rows, micro_batch=2, micro_batches=2, seed=3)
    again.load_state_dict(state)
    return [next(again) for _ in range(skip)]


def by_stock(kind: str, folder: Path, rows: Sequence[dict[str, Any]]) -> Any:
    """What the stock processor makes of these rows as one batch."""
    conversations = []
    for row in rows:
        images = iter(row["images"])
        conversations.append([])
        for message in row["messages"]:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            filled = [
                {"type": "image", "image": Image.open(folder / next(images))} if part["type"] == "image" else part
                for part in parts
            ]
            conversations[-1].append({**message, "content": filled})
    return image_processor(kind).apply_chat_template(
        conversations,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "right", "add_special_tokens": False},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_is_what_the_stock_processor_makes_and_answers_are_its_targets(kind: str, tmp_path: Path) -> None:
    written, encoder = image_chats(tmp_path), encoder_of(kind)
    rows = rows_of(encoded(write_chats(tmp_path, written), encoder), encoder)
    words = encoder.tokenizer
    for step in steps(rows, 3):
        for batch in step:
            answers = [words.decode(row[row >= 0]) for row in batch["labels"]]
            numbers = [int(answer.split()[2].split(".")[0]) // 7 for answer in answers]
            expected = by_stock(kind, tmp_path, [written[number] for number in numbers])
            assert batch.keys() - {"labels"} == expected.keys()
            for number, row in enumerate(numbers):
                assert answers[number] == f"It is {row * 7}.<stop>{'Yes.' * (1 + row % 2)}<stop>"
            length = expected["input_ids"].shape[1]
            real = expected["attention_mask"].bool()
            for name in expected:
                if name in ("pixel_values", "image_grid_thw"):
                    assert torch.equal(batch[name], expected[name]), name
                else:
                    assert torch.equal(batch[name][:, :length][real], expected[name][real]), name
            assert not (batch["labels"] == IDS["<image>"]).any()


@pytest.mark.parametrize("device", ["cpu", "sim:3"])
@pytest.mark.parametrize("kind", [pytest.param("llava", marks=pytest.mark.slow), *KINDS[1:]])
def test_loss_and_every_gradient_equal_the_stock_models(kind: str, device: str, tmp_path: Path) -> None:
    encoder = encoder_of(kind)
    rows = rows_of(encoded(write_chats(tmp_path, image_chats(tmp_path)), encoder), encoder)
    model, (batches,) = image_model_of(kind), steps(rows, 1)
    loss, expected = truth(model, batches)
    assert sum("vis" in name and bool(value.any()) for name, value in expected.items()) > 5
    with Engine.from_model(model, device, numerics=Numerics("fp32"), verify=False) as engine:
        off = errors(engine.gradients(batches), expected)
        assert max(off.values()) < 1e-5
        found = engine.step(batches)
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in expected.values()))
    assert (found.loss, found.grad_norm) == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5))


def test_a_resumed_loader_gives_the_same_bits_with_any_number_of_threads(tmp_path: Path) -> None:
    encoder = encoder_of("qwen2_5_vl")
    rows = rows_of(encoded(write_chats(tmp_path, image_chats(tmp_path)), encoder), encoder)
    whole, resumed = steps(rows, 4, workers=2), steps(rows, 2, skip=2)
    for before, after in zip(whole[2:], resumed, strict=True):
        for one, other in zip(before, after, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def png(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed).save(file, "png")
    return file.getvalue()


def forms(folder: Path) -> dict[str, tuple[Path, str]]:
    """The same chat in every form that data have: (source, column)."""
    (name,) = write_pictures(folder, 1)
    data, text = (folder / name).read_bytes(), "What is it?"
    address = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    told = {"type": "text", "text": text}

    def with_part(**part: Any) -> dict[str, Any]:
        return chat([part, told], "Noise.")

    rows: dict[str, dict[str, Any]] = {
        "part": with_part(type="image") | {"pictures": [name]},
        "no place": chat(text, "Noise.") | {"pictures": [name]},
        "llava": {
            "pictures": name,
            "conversations": [{"from": "human", "value": f"<image>{text}"}, {"from": "gpt", "value": "Noise."}],
        },
        "own path": with_part(type="image", image=name),
        "own url": with_part(type="image_url", image_url={"url": f"file://{folder / name}"}),
        "base64": with_part(type="image_url", image_url={"url": address}),
        "completion": {
            "prompt": [{"role": "user", "content": [{"type": "image"}, told]}],
            "completion": "Noise.",
            "pictures": [name],
        },
    }
    found = {}
    for number, (form, row) in enumerate(rows.items()):
        found[form] = write_chats(folder, [row], f"{number}.jsonl"), "pictures"
    turns = [{"role": "user", "content": f"<image>{text}"}, {"role": "assistant", "content": "Noise."}]
    table = datasets.Dataset.from_dict(
        {"messages": [turns], "pictures": [[{"bytes": data, "path": None}]]},
        features=datasets.Features(
            {
                "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
                "pictures": datasets.List(datasets.Image()),
            }
        ),
    )
    table.save_to_disk(folder / "saved")
    table.to_parquet(folder / "table.parquet")
    return found | {"saved": (folder / "saved", "pictures"), "parquet": (folder / "table.parquet", "pictures")}


def test_all_forms_of_data_give_one_micro_batch(tmp_path: Path) -> None:
    encoder = encoder_of("llava")
    batches = {}
    for form, (path, column) in forms(tmp_path).items():
        rows = rows_of(encoded(path, encoder, column), encoder, 1)
        (batches[form],) = next(Loader(rows, micro_batch=1, micro_batches=1, seed=0))
    first = batches.pop("part")
    assert first["pixel_values"].shape == (1, 3, 8, 8)
    for form, batch in batches.items():
        assert batch.keys() == first.keys(), form
        assert all(torch.equal(batch[name], first[name]) for name in first), form


def broken(folder: Path, kind: str) -> dict[str, Any]:
    """A row that cannot be trained."""
    (name,) = write_pictures(folder, 1)
    question = [{"type": "image"}, {"type": "text", "text": "What?"}]
    (folder / "text.png").write_text("no image")
    changes: dict[str, dict[str, Any]] = {
        "missing": {"images": ["none.png"]},
        "no image": {"images": ["text.png"]},
        "two for one": {"images": [name, name]},
        "one for two": {**chat([{"type": "image"}, *question], "x"), "images": [name]},
        "address": {"images": ["https://example.org/x.png"]},
        "a number": {"images": [3]},
        "its token": {**chat([*question, {"type": "text", "text": "<image>"}], "x"), "images": []},
        "text": {"text": "Words.", "messages": None},
    }
    return {**chat(question, "Noise."), **changes[kind]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"chats\.jsonl:2: image .*/none\.png cannot be read \(No such file or directory\); correct"),
        ("no image", r"chats\.jsonl:2: image .*/text\.png cannot be read \(it is not a known kind of image\)"),
        ("two for one", r"chats\.jsonl:2: 2 images in 'images', and 1 places for them in the text"),
        ("one for two", r"chats\.jsonl:2: more places for images in the text than images in the row"),
        ("address", r"chats\.jsonl:2: image https://example\.org/x\.png is an address; download it"),
        ("a number", r"chats\.jsonl:2: an image is int, not a path or bytes"),
        ("its token", r"chats\.jsonl:2: more places for images"),
        ("text", r"chats\.jsonl:2: a sample in text format, but the file begins with chat samples"),
    ],
)
def test_a_row_that_cannot_be_trained_is_named_before_training(kind: str, message: str, tmp_path: Path) -> None:
    path = write_chats(tmp_path, [chat("Hello?", "Yes."), broken(tmp_path, kind)])
    with pytest.raises(SampleError, match=message):
        encoded(path, encoder_of("llava"))
    file = encoded(path, encoder_of("llava"), bad="leave_out")
    assert len(file) == 1


def test_an_image_that_changes_after_encoding_is_named(tmp_path: Path) -> None:
    encoder, rows = encoder_of("qwen2_5_vl"), image_chats(tmp_path)[1:2]
    path = write_chats(tmp_path, rows)
    image = tmp_path / rows[0]["images"][0]
    file = encoded(path, encoder)
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SampleError, match=r"chats\.jsonl:1: image .*png cannot be read \("):
        rows_of(file, encoder).row(0).processor.micro_batch([file.image_text(0)], [file.sample(0)[0]], 400)  # type: ignore
    with pytest.raises(DataError, match=r"chats\.jsonl:1: image .*png has changed since the samples were encoded"):
        encoded(path, encoder)
    picture(1, 200, 8).save(image)
    with pytest.raises(DataError, match=r"chats\.jsonl:1: the processor gives other tokens than when the sample was"):
        next(Loader(rows_of(file, encoder, 1), micro_batch=1, micro_batches=1, seed=0))
    image.unlink()
    with pytest.raises(DataError, match=r"chats\.jsonl:1: image .*png cannot be read \(No such file"):
        encoded(path, encoder)


def test_samples_are_cut_behind_their_images_only(tmp_path: Path) -> None:
    path = write_chats(tmp_path, [chat("Hello?", "Yes."), *image_chats(tmp_path)[1:2]])
    whole, tokens = encoded(path, encoder_of("llava")), encoder_of("llava")
    length, first = int(whole.lengths[1]), len("<turn>user\n") - 5 + 4
    cut = encoded(path, encoder_of("llava", max_tokens=length - 12))
    assert cut.lengths.tolist() == [int(whole.lengths[0]), length - 12]
    batch = next(Loader(rows_of(cut, tokens, 2), micro_batch=2, micro_batches=1, seed=0))[0]
    assert batch["pixel_values"].shape[0] == int((batch["input_ids"] == IDS["<image>"]).sum()) // 4 == 1
    with pytest.raises(DataError, match=r"no sample is left to train on .left out: .* 1 with an image beyond 8 tokens"):
        encoded(path, encoder_of("llava", max_tokens=first - 1 - 1))


def test_models_and_folders_without_images_are_refused(tmp_path: Path) -> None:
    processor, model = Processor(image_processor("llava"), "x"), tiny_model("llama")
    with pytest.raises(ModelError, match="model LlamaForCausalLM: takes no images: its forward has no pixel_values"):
        refuse_without_tower(processor, type(model).__name__, arguments_of(model, ()))
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"data\.images needs a processor of images, and this is a Tokeni"):
        load_processor(str(tmp_path))
    image_processor("llava").save_pretrained(tmp_path / "whole")
    assert load_processor(str(tmp_path / "whole")).entries() == ["pixel_values"]


# TRL ------------------------------------------------------------------------------------------------------------------


def sft(kind: str, streams: bool, folder: Path, **changes: Any) -> Any:
    """A run of TRL's `SFTTrainer` over chats with a column of images, which its collator processes."""
    from trl import SFTConfig, SFTTrainer

    folder.mkdir()
    rows = image_chats(folder)
    for row in rows:
        row["images"] = [str(folder / name) for name in row["images"]]
        row["messages"][0]["content"] = row["messages"][0]["content"][-1]["text"]
    turn = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    types = datasets.Features({"messages": [turn], "images": datasets.List(datasets.Image())})
    data = datasets.Dataset.from_list(rows, features=types)
    usual: dict[str, Any] = {
        **{"output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3},
        **{"gradient_accumulation_steps": 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True},
        **{"use_cpu": True, "bf16": False, "max_length": None, "save_strategy": "no", "max_grad_norm": 0.5},
        **{"gradient_checkpointing": False, "eval_strategy": "steps", "eval_steps": 2},
    }
    trainer: Any = (streamed(SFTTrainer) if streams else SFTTrainer)(
        model=image_model_of(kind),
        args=SFTConfig(**{**usual, **changes}),
        train_dataset=data,
        eval_dataset=data.select(range(3)),
        processing_class=image_processor(kind),
        **({"engine_options": {"verify": False}} if streams else {}),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("llava", {}, marks=pytest.mark.slow),
        ("qwen2_5_vl", {}),  # whose forward takes no number of items: a mean of micro-batches' means
        pytest.param("qwen2_5_vl", {"loss_type": "dft"}, marks=pytest.mark.slow),
        pytest.param("gemma3", {}, marks=pytest.mark.slow),
    ],
)
def test_a_streamed_sft_trainer_logs_and_leaves_what_the_stock_one_does(
    kind: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")  # no telemetry from TRL
    stock, ours = (sft(kind, streams, tmp_path / str(streams), **changes) for streams in (False, True))
    seen = 0
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        for name in theirs.keys() & {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name
            seen += 1
    assert seen >= 11
    weights = dict(ours.model.named_parameters())
    for name, value in stock.model.named_parameters():
        if not name.endswith(("k_proj.bias", "qkv.bias")):  # whose gradients are rounding, and AdamW makes steps of any
            assert relative_error(weights[name], value) < 1e-4, name


# A run ----------------------------------------------------------------------------------------------------------------


def run_of(folder: Path, **changed: dict[str, Any]) -> Config:
    """The configuration of a run over chats with images, whose model and processor are in `folder`."""
    if not (folder / "base").exists():
        image_model_of("llava").save_pretrained(folder / "base")
        image_processor("llava").save_pretrained(folder / "base")
        write_chats(folder, image_chats(folder, 12))
    data = {"sources": [str(folder / "chats.jsonl")], "images": "images", "sequence_length": 200, "tokenizer": None}
    usual = {"micro_batch_size": 2, "precision": "fp32", "learning_rate": 1e-3, "sample_prompts": ["", "Why?"]}
    sections = {"data": data, "model": {"path": str(folder / "base"), "config": None, "verify": False}, "train": usual}
    for section, values in changed.items():
        sections[section] = {**sections.get(section, {}), **values}
    return configuration(folder, **sections)


def test_a_run_trains_images_says_so_and_saves_what_the_stock_class_reads(tmp_path: Path) -> None:
    said = train(run_of(tmp_path, checkpoint={"every": 2}))
    assert "12 samples" in said
    assert "What is 0?" in said
    assert "loaded with from_pretrained, has loss" in said
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "run/model", dtype=torch.float32)
    before = image_model_of("llava").state_dict()
    assert saved.state_dict().keys() == before.keys()
    moved = [name for name, value in saved.state_dict().items() if not torch.equal(value, before[name])]
    assert any("vision_tower" in name for name in moved)
    assert load_processor(str(tmp_path / "run/model")).entries() == ["pixel_values"]
    begun = {"resume": str(tmp_path / "run/checkpoints/step-00000002"), "output": {"folder": str(tmp_path / "more")}}
    train(Config.model_validate({**run_of(tmp_path).model_dump(), **begun}))
    assert losses_of(tmp_path / "more") == losses_of(tmp_path / "run")[2:]


@pytest.mark.slow
def test_two_ranks_have_the_losses_and_weights_of_one(tmp_path: Path) -> None:
    """Chats have no, one or two images, so that ranks have unlike micro-batches."""
    one, two = (
        run_of(tmp_path, output={"folder": str(tmp_path / name), "verify_export": False}) for name in ("one", "two")
    )
    train(one)
    process = launched(2, two, "--ranks")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert losses_of(two.folder) == pytest.approx(losses_of(one.folder), rel=1e-6)
    alone, both = (load_file(each.folder / "model" / "model.safetensors") for each in (one, two))
    for name, value in alone.items():
        if not name.endswith("k_proj.bias"):  # whose gradients are rounding, and AdamW makes steps of any
            assert relative_error(both[name], value) < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"adapter": {"r": 2}}, {"train": {"freeze": ["vision"]}}, {"train": {"precision": "bf16"}}],
    ids=["adapter", "frozen", "bf16"],
)
def test_a_run_with_a_frozen_tower_an_adapter_or_bf16(changed: dict[str, Any], tmp_path: Path) -> None:
    said = train(run_of(tmp_path, **changed))
    assert "loaded with from_pretrained, has loss" in said
    assert all(math.isfinite(loss) for loss in losses_of(tmp_path / "run"))


def test_a_run_refuses_what_does_not_go_with_images(tmp_path: Path) -> None:
    for data, what in (({"packing": "best_fit"}, "padded, not packed"), ({"streaming": True}, "cannot be streamed")):
        with pytest.raises(ValueError, match=what):
            run_of(tmp_path, data=data, train={"steps": 1})
    (tmp_path / "base/processor_config.json").unlink()
    with pytest.raises(DataError, match=r"base: data\.images needs a processor, and none could be loaded"):
        train(run_of(tmp_path))
    with pytest.raises(ModelError, match="LlamaForCausalLM: takes no images: its forward has no pixel_values"):
        image_processor("llava").save_pretrained(tmp_path / "words")
        fresh = {"path": None, "config": {**BYTE_LLAMA, "vocab_size": 288}}
        train(run_of(tmp_path, model=fresh, data={"tokenizer": str(tmp_path / "words"), "sequence_length": 64}))
