"""Models with images train as the stock code does, wherever their weights are: gradients, the norm, and ten steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatrain import AdamW, Engine, Policy
from megatrain.dist import World
from megatrain.errors import ConfigError
from megatrain.hf import StreamedTrainer
from megatrain.spec import Numerics, Placement
from megatrain.train.parity import truth
from tests.kinds import case_of
from tests.ranks import together, worlds
from tests.stock.image_models import KINDS, image_batch, image_model, text_batch
from tests.tiny import equal, relative_error, tiny_model

pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings
FP32 = Numerics("fp32", loss_chunk_tokens=5)
SMALL = Policy(shard_nbytes=2048)
FLOOR = 1e-3
"""Least scale of an error, relative to the largest gradient: biases of keys have gradients that are only rounding."""


def kinds(*fast: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "kind", [case_of(kind, *(() if kind in fast else (pytest.mark.slow,))) for kind in KINDS]
    )


def made(model: nn.Module, device: str = "cpu", policy: Policy | None = None, **more: Any) -> Engine:
    shares = device == "cpu" and policy is None
    options = {"policy": policy or replace(SMALL, shares_memory=shares), "numerics": FP32, "verify": False, **more}
    return Engine.from_model(model, device, **options)


def mixed(kind: str, seed: int = 0) -> list[dict[str, Tensor]]:
    """Two micro-batches with an image and one without."""
    return [image_batch(kind, seed), text_batch(seed + 1), image_batch(kind, seed + 2)]


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    floor = FLOOR * max(float(value.norm()) for value in expected.values())
    distances = {name: float((found[name] - value).norm().nan_to_num(math.inf)) for name, value in expected.items()}
    return {name: distances[name] / max(float(value.norm()), floor) for name, value in expected.items()}


def away(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The distance of two gradients of all parameters, relative to the norm."""
    norms = (float((found[name].double() - value.double()).norm()) for name, value in expected.items())
    return math.hypot(*norms) / math.hypot(*(float(value.norm()) for value in expected.values()))


def truth_with(threads: int, model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The stock model's gradients, computed by so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return truth(model, batches)[1]
    finally:
        torch.set_num_threads(before)


def in_float64(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The stock model's gradients without rounding."""
    exact: Any = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # grouped products have no float64
    wide = [{name: each.double() if each.is_floating_point() else each for name, each in of.items()} for of in batches]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)  # of routers that compute in float32 whatever their weights are
        return truth(exact, wide)[1]


@kinds("llava")
def test_every_gradient_and_the_norm_equal_the_stock_models(kind: str) -> None:
    """To 1e-6, and where the stock model's own rounding is more than half of that, as in biases of keys, which have no
    gradient but rounding, to twice that with one thread or two; all of them together are no further from float64
    than the stock model's."""
    model, batches = image_model(kind), mixed(kind)
    loss, expected = truth(model, batches)
    tower = [name for name in expected if "vi" in name.split(".")[1] and expected[name].any()]
    assert len(tower) > 5, "the images must have trained something"
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in expected.values()))
    with made(model, "sim:3") as engine:
        gradients, exact = engine.gradients(batches), in_float64(model, batches)
        roundings = [
            errors(of_threads, exact) for of_threads in (expected, *(truth_with(n, model, batches) for n in (1, 2)))
        ]
        for name, error in errors(gradients, expected).items():
            assert error < max(1e-6, *(2 * rounding[name] for rounding in roundings)), name
        assert away(gradients, expected) < 5e-7
        assert away(gradients, exact) < 1.1 * away(expected, exact)
        assert engine.evaluate(batches) == pytest.approx(loss, rel=1e-6)
        found = engine.step(batches)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(norm, rel=1e-6)


@kinds()
def test_ten_steps_leave_what_ten_of_torch_leave(kind: str) -> None:
    settings = AdamW(lr=1e-3, eps=1e-6, weight_decay=0.1)
    stock = image_model(kind)
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
    with made(image_model(kind), "sim:4", optimizer=settings, max_grad_norm=0.5) as engine:
        for number in range(10):
            batches = mixed(kind, 10 * number) if number % 3 else [text_batch(number), text_batch(number + 50)]
            engine.step(batches)
            gradients = stock_gradients_or_none(stock, batches)
            for name, parameter in stock.named_parameters():
                parameter.grad = gradients[name]
            nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
            optimizer.step()
        found = engine.master_weights()
    for name, parameter in stock.named_parameters():
        if not name.endswith("k_proj.bias"):  # whose gradients are rounding, and AdamW makes steps of any gradient
            assert relative_error(found[name], parameter) < 1e-4, name


def stock_gradients_or_none(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor | None]:
    """As `truth`, but `None` where autograd has none."""
    _, gradients = truth(model, batches)  # type: ignore[arg-type]
    with_image = any(len(each) > 2 for each in batches)
    if with_image:
        return {name: value if value.any() else None for name, value in gradients.items()}
    return {name: value if "language_model" in name or "lm_head" in name else None for name, value in gradients.items()}


POLICIES: dict[str, Policy] = {
    "read-ahead": replace(SMALL, wait_for="shard", read_ahead_nbytes=4096, weight_slots=1),
    "by shard": replace(SMALL, wait_for="shard", weight_slots=1),
    "kept": replace(SMALL, activations="keep", grad_slots=1),
    "rounds": replace(SMALL, micro_batches_per_round=1),
    "disk": replace(SMALL, placements=(Placement("disk", "disk", "disk"),) * 4),
    "resident": replace(SMALL, placements=(Placement("device", "device", "device"),) * 4),
    "streamed": replace(SMALL, streamed_updates=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_changes_a_bit_of_a_step_with_images(name: str, tmp_path: Path) -> None:
    found = []
    for device, policy in (("cpu", None), ("sim:5", POLICIES[name])):
        with made(image_model("llava"), device, policy, disk=[tmp_path] if name == "disk" else ()) as engine:
            gradients = engine.gradients(mixed("llava"))
            for number in range(4):
                engine.step([image_batch("llava", number)] if number % 2 else [text_batch(number)])
            found.append(gradients | {f"then {key}": value for key, value in engine.master_weights().items()})
    assert equal(*found)


@pytest.mark.slow
@kinds()
def test_an_image_on_one_rank_is_one_on_all(kind: str) -> None:
    """Gradients of one rank; and what ten steps leave has its loss, with images on either rank, both or none."""
    model, batches = image_model(kind), mixed(kind)[:2]
    _, expected = truth(model, batches)  # type: ignore[arg-type]
    steps = [
        mixed(kind, number)[number % 2 :][:2] if number % 3 else [text_batch(1), text_batch(2)] for number in range(6)
    ]

    def of_rank(world: World) -> tuple[dict[str, Tensor], list[float]]:
        with made(model, "sim:3", SMALL, world=world) as engine:
            gradients = engine.gradients(batches[world.rank :: world.size])
            return gradients, [engine.step(each[world.rank :: world.size]).loss for each in steps]

    (_, alone), *_ = together(worlds(1), of_rank)
    for found, losses in together(worlds(2, 1), of_rank):
        assert max(errors(found, expected).values()) < 1e-5
        assert losses == pytest.approx(alone, rel=1e-6)


# Afterwards -----------------------------------------------------------------------------------------------------------


@kinds("llava", "qwen3_vl")
def test_text_with_images_is_continued_as_by_the_stock_model(kind: str) -> None:
    model, batch = image_model(kind).eval(), image_batch(kind, 1)
    del batch["labels"]
    expected = model.generate(**batch, do_sample=False, max_new_tokens=6)  # type: ignore[operator]
    with made(model, "sim:3") as engine:
        assert torch.equal(engine.generate(**batch, do_sample=False, max_new_tokens=6), expected)
        for name in ("num_beams", "num_return_sequences"):
            with pytest.raises(ConfigError, match="pixel_values goes with one answer and no beams"):
                engine.generate(**batch, **{name: 2}, do_sample=True)


@kinds("qwen3_vl")
def test_a_model_trained_with_images_is_read_whole_by_its_class(kind: str, tmp_path: Path) -> None:
    model = image_model(kind)
    with made(model, "sim:3") as engine:
        for number in range(2):
            engine.step(mixed(kind, number))
        folder, weights = engine.save_pretrained(tmp_path / "model"), engine.master_weights()
        loss = engine.evaluate(mixed(kind))
    read, report = type(model).from_pretrained(folder, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(report.values())
    assert equal(dict(read.named_parameters()), weights)
    assert truth(read.train(), mixed(kind))[0] == pytest.approx(loss, rel=1e-6)


class Attended(LlamaForCausalLM):
    """A text model whose layers get an argument that is computed from an image."""

    def forward(self, input_ids: Any = None, pixel_values: Any = None, **others: Any) -> Any:
        if pixel_values is not None:
            others["seen"] = pixel_values * self.model.eye
        return super().forward(input_ids, **others)


class Attending(LlamaDecoderLayer):
    """A layer that reads that argument."""

    def forward(self, hidden_states: Tensor, seen: Tensor | None = None, **others: Any) -> Tensor:
        hidden: Tensor = super().forward(hidden_states, **others)
        return hidden if seen is None else hidden * (1 + seen.mean())


@pytest.mark.parametrize("device", ["cpu", "sim:2"])
def test_gradients_go_through_arguments_of_layers(device: str) -> None:
    model = Attended(tiny_model("llama").config)
    model.model.eye = nn.Parameter(torch.ones(3))
    for layer in model.model.layers:
        layer.__class__ = Attending
    batches = [text_batch(1) | {"pixel_values": torch.tensor([1.0, 2.0, -3.5])}, text_batch(2)]
    _, expected = truth(model, batches)  # type: ignore[arg-type]
    assert expected["model.eye"].any()
    with made(model, device) as engine:
        assert max(errors(engine.gradients(batches), expected).values()) < 1e-5
    model.model.eye.requires_grad_(False)
    with made(model, device) as engine:
        engine.step(batches)


# A trainer ------------------------------------------------------------------------------------------------------------


def losses(
    kind: str, trainer: Any, folder: Path, resume: Path | None = None, images: Sequence[int] = (), **changes: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and norms in a trainer's log, and the weights that it leaves. images: the rows with one, if not two
    in three."""
    usual: dict[str, Any] = {
        **{"output_dir": str(folder), "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        **{"learning_rate": 1e-3, "max_steps": 3, "logging_steps": 1, "report_to": "none", "disable_tqdm": True},
        **{"use_cpu": True, "remove_unused_columns": False, "save_strategy": "no", "max_grad_norm": 0.5},
        **{"per_device_eval_batch_size": 1, "eval_strategy": "steps", "eval_steps": 3, **changes},
    }

    def batch(rows: list[dict[str, int]]) -> dict[str, Tensor]:
        (number,) = (row["number"] for row in rows)
        with_image = number in images if images else number % 3
        return image_batch(kind, number) if with_image else text_batch(number, length=4 + number)

    numbers = [{"number": number} for number in range(12)]
    arguments = TrainingArguments(**usual)
    options = {"verify": False, "image_row": image_batch(kind, 0)}  # so that the encoder is streamed
    more: dict[str, Any] = {} if trainer is Trainer else {"engine_options": options}
    made = trainer(
        image_model(kind),
        arguments,
        data_collator=batch,
        train_dataset=numbers,  # type: ignore[arg-type]
        eval_dataset=numbers[:4],  # type: ignore[arg-type]
        **more,
    )
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    log = [each[key] for each in made.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in each]
    return log, {name: value.detach().clone() for name, value in made.model.named_parameters()}


@pytest.mark.parametrize("kind", [pytest.param("llava", marks=pytest.mark.slow), "qwen3_5"])
def test_a_streamed_trainer_logs_what_the_stock_one_logs(kind: str, tmp_path: Path) -> None:
    """Also for models that take no `num_items_in_batch`, whose loss is the mean of the micro-batches' means."""
    expected, weights = losses(kind, Trainer, tmp_path)
    found, ours = losses(kind, StreamedTrainer, tmp_path)
    assert found == pytest.approx(expected, rel=2e-4)
    for name, value in weights.items():
        if not name.endswith("k_proj.bias"):
            assert relative_error(ours[name], value) < 1e-4, name


@pytest.mark.parametrize("images", [(1, 4), pytest.param((4, 5), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("first", [StreamedTrainer, pytest.param(Trainer, marks=pytest.mark.slow)])
def test_a_trainer_goes_on_from_a_checkpoint(first: type, images: Sequence[int], tmp_path: Path) -> None:
    """Its own, or a stock trainer's, in which the tower has fewer updates or none, and hence no state."""
    usual: dict[str, Any] = {
        "gradient_accumulation_steps": 1,
        "max_steps": 6,
        "eval_strategy": "no",
        "weight_decay": 0.1,
    }
    usual |= {"save_strategy": "steps", "save_steps": 3, "train_sampling_strategy": "sequential", "images": images}
    expected, weights = losses("llava", Trainer, tmp_path / "stock", **usual)
    losses("llava", first, tmp_path / "first", **usual)
    found, ours = losses("llava", StreamedTrainer, tmp_path / "ours", tmp_path / "first" / "checkpoint-3", **usual)
    assert found == pytest.approx(expected, rel=2e-4)
    assert all(relative_error(ours[n], weights[n]) < 1e-5 for n in weights if not n.endswith("k_proj.bias"))


def test_label_smoothing_of_a_mean_of_means_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing_factor is not supported: Qwen3_5\w+ takes no num_items"):
        losses("qwen3_5", StreamedTrainer, tmp_path, label_smoothing_factor=0.1)
