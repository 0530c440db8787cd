"""What a prologue with an encoder of images holds is what schedule and plan say, and what does not fit is refused."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor, nn
from transformers import TrainingArguments

from megatrain import Engine, Policy
from megatrain.commands.plan import Options, run_plan
from megatrain.data.processor import Processor
from megatrain.data.tokenizer import load_tokenizer
from megatrain.device.sim import SimDevice
from megatrain.dist import World
from megatrain.engine.batch import TEXT_ENTRIES
from megatrain.errors import DoesNotFit
from megatrain.hf import StreamedTrainer
from megatrain.model import freeze_parameters, port_model
from megatrain.model.encoder_stack import stream_encoder
from megatrain.model.profile_prologue import see, values_of, values_per_token
from megatrain.plan import Question, find_plan
from megatrain.run.data import Encoding, largest_image_row
from megatrain.spec import Hardware, Limits, ModelSpec
from tests.held import followed
from tests.integration.test_live import SCALARS
from tests.ranks import together, worlds
from tests.run.test_training import train
from tests.small import small_spec
from tests.stock import image_models
from tests.stock.image_models import IMAGE, image_model
from tests.stock.image_processors import image_model_of, image_processor
from tests.stock.test_image_chats import run_of
from tests.tiny import equal

pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings

SIDE, PATCHES = 32, 64
"""Of an image: its side in pixels, and its patches."""
PARTS = {"llava": PATCHES, "qwen2_5_vl": PATCHES // 4, "gemma3": 4}
"""The tokens of an image."""
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 1024}
DEEP = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
VISION: dict[str, dict[str, Any]] = {
    "llava": {"image_size": SIDE},
    "qwen2_5_vl": {"depth": 4, "num_heads": 4, "out_hidden_size": WIDE["hidden_size"]},
    "gemma3": {"image_size": SIDE},
}
RECOMPUTE = Policy(activations_by_layer=(("input",),))
SIMPLE = {"loss_chunk_tokens": 64, "activations": "recompute", "activations_by_layer": (), "placements": ()}
SPACIOUS, SCARCE = 1 << 30, 4 << 20
"""Device memory with room for anything here, and with room for text alone."""
MACHINE = Hardware("m", 1 << 40, 1 << 40, 1e10, 1e10, 1e13, 1e11, device_bandwidth=1e12, launch_seconds=1e-6)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose towers are half as wide as their text, and twice as deep."""
    monkeypatch.setattr(image_models, "TEXT", image_models.TEXT | WIDE)
    monkeypatch.setattr(image_models, "TOWER", image_models.TOWER | DEEP)
    for kind, vision in VISION.items():
        known = image_models.KINDS[kind]
        text, top = dict(known.text), dict(known.top)
        if "rope_parameters" in text:
            text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [4, 6, 6]}
        if "image_seq_length" in top:
            top["image_seq_length"] = PATCHES
        wider = replace(known, text=text, vision=known.vision | vision, top=top)
        monkeypatch.setitem(image_models.KINDS, kind, wider)


def rows_of(kind: str, rows: int, images: int = 2, text: int = 40, seed: int = 0) -> dict[str, Tensor]:
    """Padded rows of text with images in it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, IMAGE, (rows, text), generator=generator)
    parts = [torch.full((rows, PARTS[kind]), IMAGE), torch.full((rows, 1), 5)] * images
    ids = torch.cat([ids[:, :3], *parts, ids[:, 3:]], 1)
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    labels = ids.masked_fill((ids == IMAGE) | (mask == 0), -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if kind == "qwen2_5_vl":
        side = SIDE // 4
        batch |= {"mm_token_type_ids": (ids == IMAGE).int(), "image_grid_thw": torch.tensor([[1, side, side]])}
        batch["image_grid_thw"] = batch["image_grid_thw"].repeat(rows * images, 1)
        return batch | {"pixel_values": torch.randn(rows * images * PATCHES, 48, generator=generator)}
    batch |= {"token_type_ids": (ids == IMAGE).long()} if kind == "gemma3" else {}
    return batch | {"pixel_values": torch.randn(rows * images, 3, SIDE, SIDE, generator=generator)}


def seen(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """A micro-batch as arguments of the model's forward, and the number of its images' values."""
    row = {name: each for name, each in batch.items() if name != "labels"}
    return row, values_of(row, TEXT_ENTRIES)


def model_of(kind: str, frozen: str) -> nn.Module:
    model = image_model(kind)
    if frozen:
        freeze_parameters(model, [frozen])
    return model


CASES = [
    ("llava", "bf16", ""),
    pytest.param("qwen2_5_vl", "fp32", "vision", marks=pytest.mark.slow),
    pytest.param("llava", "fp32", "vision", marks=pytest.mark.slow),
    pytest.param("qwen2_5_vl", "bf16", "", marks=pytest.mark.slow),
    pytest.param("gemma3", "bf16", "", marks=pytest.mark.slow),
    pytest.param("gemma3", "fp32", "vision", marks=pytest.mark.slow),
    pytest.param("llava", "bf16", "language", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("kind", "precision", "frozen"), CASES)
@pytest.mark.usefixtures("wide")
def test_a_planned_step_with_images_holds_what_the_plan_says(
    kind: str, precision: Any, frozen: str, streams: bool
) -> None:
    """For two micro-batches of three rows: prologue and encoder are within what the schedule has, and the peak is
    within 5%."""
    batches = [rows_of(kind, 3, seed=seed) for seed in range(2)]
    row, values = seen(rows_of(kind, 1))
    ported = port_model(model_of(kind, frozen), {"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
    if streams:
        stream_encoder(ported, row, values)
    ported.compute_on(torch.device("cpu"))
    see(ported, row, values)
    length = batches[0]["input_ids"].shape[1]
    plan = find_plan(question_of(ported.spec, length, values_per_token(ported), precision))
    with (
        followed() as ops,
        Engine.from_model(
            model_of(kind, frozen),
            SimDevice(1),
            numerics=plan.numerics,
            policy=plan.policy,
            verify=False,
            image_row=row if streams else None,
        ) as engine,
    ):
        see(engine.parts.ported, row, values)
        assert engine.parts.ported.spec == ported.spec  # measured: so schedules know what they hold
        assert bool(engine.parts.ported.spec.encoders) == streams
        engine.evaluate(batches[:1])
        engine.step(batches)
        ops.clear()
        engine.step(batches)
    for op, live, declared in ops:
        assert 0 < op.unit <= ported.spec.epilogue or live <= declared + SCALARS, op.name
    timeline = engine.diagnostics.timeline
    assert timeline is not None
    peak = max(live for _, live, _ in ops) + timeline.schedule.arena_nbytes("device")
    assert peak <= plan.nbytes["device"] <= 1.05 * peak


def question_of(spec: ModelSpec, length: int, values: float, precision: Any, device: int | None = None) -> Question:
    """Six sequences, three in a micro-batch."""
    more: dict[str, Any] = {"overrides": {**SIMPLE, "micro_batch": 3}, "batching": "padded"}
    limits = Limits() if device is None else Limits(device)
    return Question(spec, MACHINE, 6 * length, length, precision, values_per_token=values, limits=limits, **more)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("wide")
def test_layers_of_an_encoder_run_again_in_backward_to_the_same_bits(kind: str, precision: Any) -> None:
    """Dropout included. Their graphs exist one at a time, and those of four are more than the rest."""
    found, peaks = [], []
    for again in (True, False):
        model = image_model(kind)
        for name, module in model.named_modules():
            for dropout in ("dropout", "attention_dropout"):
                if "vis" in name and isinstance(getattr(module, dropout, None), float):
                    setattr(module, dropout, 0.1)
        batches = [rows_of(kind, 2, images=6), image_models.text_batch(1)]
        with (
            followed() as ops,
            Engine.from_model(model, SimDevice(1), precision, policy=RECOMPUTE, verify=False) as engine,
        ):
            engine.parts.ported.encoders = engine.parts.ported.encoders if again else ()
            found.append(engine.gradients(batches))
        peaks.append(max(live for op, live, _ in ops if op.kind == "BACKWARD" and not op.unit))
    assert sum("vis" in name and bool(value.any()) for name, value in found[0].items()) > 20
    assert equal(*found)
    assert peaks[0] < 0.6 * peaks[1]


@pytest.mark.usefixtures("wide")
def test_images_take_memory_and_time_in_a_plan_and_are_refused_where_only_text_fits() -> None:
    ported = port_model(image_model("llava"), torch.bfloat16)
    see(ported, *seen(rows_of("llava", 1)))
    spec, length, values = ported.spec, 200, 4 * values_per_token(ported)  # as of an encoder with large patches
    text = find_plan(question_of(spec, length, 0.0, "bf16"))
    images = find_plan(question_of(spec, length, values, "bf16"))
    assert images.nbytes["device"] > 1.2 * text.nbytes["device"]
    flops = 6 * length * values * (spec.units[0].profile.of("images").value_flops_backward)
    assert images.seconds - text.seconds > flops / MACHINE.flops
    find_plan(question_of(spec, length, 0.0, "bf16", text.nbytes["device"]))
    with pytest.raises(DoesNotFit):
        find_plan(question_of(spec, length, values, "bf16", text.nbytes["device"]))


@pytest.mark.parametrize(("kind", "tokens", "images"), [("llava", 50, 13), ("qwen2_5_vl", 50, 4), ("gemma3", 3, 1)])
def test_a_full_row_has_images_as_large_as_fit_and_as_many(kind: str, tokens: int, images: int) -> None:
    """Llava's images take 4 tokens, Qwen's up to 16 by their size, Gemma's 10 with marks and line ends."""
    row = Processor(image_processor(kind), kind).full_row(tokens)
    assert row["input_ids"].shape == (1, images * {"llava": 4, "qwen2_5_vl": 16, "gemma3": 10}[kind])
    assert len(row.get("image_grid_thw", row["pixel_values"])) == images


@pytest.mark.slow
def test_the_plan_of_a_configuration_is_of_rows_full_of_images(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(run_of(tmp_path).model_dump(mode="json")))
    outlook = run_plan(str(config), console, Options(hardware="rtx-4090"))
    assert outlook.plan.question.values_per_token == 3 * 8 * 8 / 4, "an image of 8 x 8 pixels is four tokens"
    assert f"{200 * 3 * 8 * 8 // 4:,} values in a sequence" in console.file.getvalue()  # type: ignore[attr-defined]


def test_images_read_ahead_are_not_left_to_the_plan() -> None:
    question = question_of(small_spec(), 64, 10.0, "fp32")
    ahead = replace(question, read_ahead=5)
    assert ahead.images_nbytes == 5 * 6 * 64 * 10 * 4
    assert question.budgets()["host"] - ahead.budgets()["host"] == ahead.images_nbytes
    assert question.budgets()["device"] == ahead.budgets()["device"]


def test_a_run_plans_for_the_row_with_the_most_images_and_refuses_it_before_the_first_step(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    tokenizer, model = load_tokenizer(config.tokenizer), image_model_of("llava")
    row = largest_image_row(config, tokenizer, 288, model, Encoding({"moment": "2026-01-01T00:00:00"}))
    assert row is not None
    assert row["input_ids"].shape == row["attention_mask"].shape == (1, 200)
    assert row["pixel_values"].shape == (2, 3, 8, 8), "chats have no, one or two images"
    assert not row["attention_mask"][0, -1]
    said = train(config)
    assert f"images      {2 * 3 * 8 * 8} values in a sequence" in said
    with pytest.raises(DoesNotFit):
        train(run_of(tmp_path, memory={"host": "1.5MB"}, output={"folder": str(tmp_path / "small")}))
    assert not (tmp_path / "small").exists()


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_made_in_python_refuses_images_that_do_not_fit_before_the_first_step(count: int) -> None:
    """It prices the first micro-batch that has some; with several ranks, all price that of one."""
    images, text = rows_of("llava", 3), image_models.text_batch(0, rows=3, length=40)
    model, spec = image_model("llava"), dict[int, ModelSpec]()

    def stepped(world: World, capacity: int, batch: dict[str, Tensor]) -> int:
        """Bytes that are free after a step, or that it would have needed."""
        with Engine.from_model(model, SimDevice(1, capacity=capacity), verify=False, world=world) as engine:
            try:
                engine.step([batch if world.rank == 0 else text])
            except DoesNotFit as error:
                return error.needed["device"] if engine.steps == 0 else -1
            spec[world.rank] = engine.parts.ported.spec
            return engine.parts.device.free_nbytes()

    def on_all(capacity: int, batch: dict[str, Tensor]) -> int:
        (found,) = set(together(worlds(count, 1), lambda world: stepped(world, capacity, batch)))
        return found

    state = SPACIOUS - on_all(SPACIOUS, images)
    assert len(set(spec.values())) == 1
    needed = on_all(state + 1, images)
    on_all(state + needed, images)
    assert on_all(state + needed - 1, images) == needed
    assert on_all(state + needed - 1, text) == needed - 1


@pytest.mark.slow
@pytest.mark.usefixtures("wide")
def test_a_streamed_trainer_refuses_images_that_do_not_fit_before_the_first_step(tmp_path: Path) -> None:
    usual: dict[str, Any] = {"max_steps": 1, "use_cpu": True, "report_to": "none", "remove_unused_columns": False}
    trainer = StreamedTrainer(
        image_model("llava"),
        TrainingArguments(str(tmp_path), **usual),
        data_collator=lambda rows: rows_of("llava", len(rows)),
        train_dataset=[{"number": number} for number in range(8)],  # type: ignore[arg-type]
        engine_options={"device": SimDevice(1, capacity=SCARCE), "verify": False},
    )
    with pytest.raises(DoesNotFit, match=r"the images of a micro-batch take .* use fewer rows in a micro-batch"):
        trainer.train()
    assert trainer.engine.steps == 0
