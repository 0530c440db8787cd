"""Encoders of images whose layers are streamed compute what the stock code computes, to the bits of one prologue, and
hold one layer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from megatrain import Engine, Policy
from megatrain.engine.batch import TEXT_ENTRIES
from megatrain.errors import MegaTrainError
from megatrain.model import freeze_parameters, port_model
from megatrain.model.encoder_stack import stream_encoder
from megatrain.model.profile_prologue import see, values_of, values_per_token
from megatrain.schedule import build_step
from megatrain.spec import ModelSpec, Numerics, Work
from megatrain.train.parity import truth
from tests.ranks import together, worlds
from tests.stock import image_models
from tests.stock.image_models import DEEP, IMAGE, KINDS, image_batch, image_model, text_batch
from tests.stock.test_images import FP32, POLICIES, SMALL, errors, kinds, made, mixed
from tests.tiny import equal

pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings
IN_PROLOGUE = ("gemma4_unified",)
"""It has no list of layers."""


def row_of(kind: str) -> dict[str, Tensor]:
    return {name: each for name, each in image_batch(kind, 0).items() if name != "labels"}


def streamed(model: nn.Module, kind: str, device: str = "sim:3", policy: Policy | None = None, **more: Any) -> Engine:
    engine = made(model, device, policy, image_row=row_of(kind), **more)
    assert engine.structure.encoders
    return engine


@kinds("qwen3_vl", "inkling2")  # which has side values, too
def test_every_gradient_and_the_norm_equal_the_stock_models(kind: str) -> None:
    """In a step with a micro-batch without an image, and with two rows and images in one."""
    model, batches = image_model(kind), mixed(kind)
    if kind in IN_PROLOGUE:
        with made(model, image_row=row_of(kind)) as engine:
            assert not engine.structure.encoders
        return
    batches.append({name: torch.cat([each, each]) for name, each in batches[2].items()})
    loss, expected = truth(model, batches)
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in expected.values()))
    with made(model) as whole, streamed(model, kind) as engine, streamed(model, kind, "cpu") as here:
        gradients = engine.gradients(batches)
        off = errors(gradients, expected)
        assert max(off.values()) < 1e-5, max(off, key=lambda name: off[name])
        assert equal(gradients, whole.gradients(batches))
        assert equal(gradients, here.gradients(batches))
        assert engine.evaluate(batches) == pytest.approx(loss, rel=1e-6)
        found = engine.step(batches)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(norm, rel=1e-5)


FROZEN = {
    "none": (),
    "encoder": ("*visual*",),
    "start": ("*patch_embed*",),
    "layers": ("*blocks*",),
    "text": ("*language_model*", "lm_head*"),
    "all but layer 1": ("*language_model*", "lm_head*", "*merger*", "*patch_embed*", "*blocks.0.*"),
}
OFFLOADING = {
    "drop and offload": replace(SMALL, activations_by_layer=(("drop",), ("offload", "input")), grad_slots=3),
    "during backward": replace(SMALL, update="during_backward"),
    "pageable": replace(SMALL, transfer="pageable"),
}


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        pytest.param(name, frozen, marks=() if (name, frozen) == ("drop and offload", "layers") else pytest.mark.slow)
        for name in (POLICIES | OFFLOADING)
        for frozen in FROZEN
    ],
)
def test_no_policy_changes_a_bit(name: str, frozen: str, tmp_path: Path) -> None:
    """Of gradients and four steps, with and without images, where the decoder gets what several encoder layers make."""
    kind, policy, found = "qwen3_vl", (POLICIES | OFFLOADING)[name], list[dict[str, Tensor]]()
    during, disk = policy.update == "during_backward", [tmp_path] if name == "disk" else ()
    norm = {"max_grad_norm": None if during else 1.0}
    for streams in (False, True):
        model = image_model(kind)
        freeze_parameters(model, FROZEN[frozen])
        if streams:
            policy = replace(policy, placements=policy.placements[:1] * 7)
            engine = streamed(model, kind, "sim:5", policy, disk=disk, **norm)
        else:
            engine = made(model, policy=replace(SMALL, shares_memory=True, update=policy.update), **norm)
        with engine:
            gradients = engine.gradients(mixed(kind))
            for number in range(4):
                engine.step([image_batch(kind, number), text_batch(3)] if number % 2 else [text_batch(number)])
            found.append(gradients | {f"then {key}": value for key, value in engine.master_weights().items()})
    assert equal(*found)


@pytest.mark.slow
def test_an_adapter_of_encoder_and_text_trains_to_the_same_bits() -> None:
    found = []
    for streams in (False, True):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "qkv", "proj"])
        torch.manual_seed(7)
        model = peft.get_peft_model(image_model("qwen2_5_vl"), config).train()  # type: ignore[arg-type]
        with (streamed if streams else lambda model, _: made(model))(model, "qwen2_5_vl") as engine:
            engine.step(mixed("qwen2_5_vl", 1))
            found.append(engine.gradients(mixed("qwen2_5_vl")))
    assert sum("visual.blocks" in name and bool(value.any()) for name, value in found[1].items()) >= 8
    assert equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_an_encoder(size: int) -> None:
    """Also where one has no image."""
    model, batches = image_model("qwen2_5_vl"), [*mixed("qwen2_5_vl")[:2], text_batch(7)]
    _, expected = truth(model, batches)

    def of_rank(world: Any) -> dict[str, Tensor]:
        with streamed(model, "qwen2_5_vl", world=world, policy=SMALL) as engine:
            engine.step(batches[world.rank :: world.size])
        with streamed(model, "qwen2_5_vl", world=world, policy=SMALL) as engine:
            return engine.gradients(batches[world.rank :: world.size])

    for found in together(worlds(size, 1), of_rank):
        assert max(errors(found, expected).values()) < 1e-5


def test_checkpoints_and_exports_are_those_of_one_prologue(tmp_path: Path) -> None:
    kind, batches = "qwen2_5_vl", mixed("qwen2_5_vl", 5)
    with made(image_model(kind)) as engine:
        engine.step(mixed(kind))
        checkpoint = engine.save(tmp_path / "checkpoint").wait()
        engine.step(batches)
        expected = engine.master_weights()
        engine.save_pretrained(tmp_path / "whole")
    resumed = Engine.from_checkpoint(checkpoint, verify=False, numerics=FP32, image_row=row_of(kind))
    with resumed as engine:
        assert engine.structure.encoders
        engine.step(batches)
        assert equal(engine.master_weights(), expected)
        engine.save_pretrained(tmp_path / "streamed")
    names = [file.name for file in (tmp_path / "whole").glob("*.safetensors")]
    assert names
    assert all(
        (tmp_path / "whole" / name).read_bytes() == (tmp_path / "streamed" / name).read_bytes() for name in names
    )


def test_logits_and_texts_of_images_are_those_of_one_prologue() -> None:
    """Text alone does not fetch the encoder."""
    found, more, model = [], {"max_new_tokens": 3, "do_sample": False}, image_model("qwen3_vl").eval()
    row = row_of("qwen3_vl")
    for engine in (made(model), streamed(model, "qwen3_vl")):
        with engine:
            found.append({"text": engine.generate(**row, **more), "logits": engine.logits(row)})
            engine.logits({"input_ids": row["input_ids"][:, :3]})
            schedule = engine.parts.streamer._running
            assert schedule is not None
            assert not {op.unit for op in schedule.ops} & {*engine.structure.encoder}
    assert equal(*found)


def test_an_encoder_that_runs_twice_for_a_micro_batch_is_refused() -> None:
    """As of images and videos."""
    batch = image_batch("qwen2_5_vl", 0)
    ids = torch.cat([batch["input_ids"], torch.tensor([[51, 7]])], 1)
    batch |= {"input_ids": ids, "labels": ids.masked_fill(ids >= IMAGE, -100)}
    batch |= {"pixel_values_videos": batch["pixel_values"], "video_grid_thw": batch["image_grid_thw"]}
    batch["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == 51).int()
    with made(image_model("qwen2_5_vl")) as engine:
        engine.step([batch])
    with (
        streamed(image_model("qwen2_5_vl"), "qwen2_5_vl") as engine,
        pytest.raises(MegaTrainError, match="the encoder of images: runs other than once for a micro-batch"),
    ):
        engine.step([batch])


# Memory ---------------------------------------------------------------------------------------------------------------


def measured(kind: str, depth: int, *, frozen: bool) -> tuple[ModelSpec, Work]:
    """A model whose tower is deeper and wider than its text, and two micro-batches with an image of 64 patches."""
    known = KINDS[kind]
    vision = DEEP | {"depth": depth, "hidden_size": 64, "intermediate_size": 192, "num_heads": 4, "window_size": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(image_models.KINDS, kind, replace(known, vision=known.vision | vision, tokens=16))
        model = image_model(kind)
        batch = image_batch(kind, 0)
    batch |= {"pixel_values": torch.randn(64, 48), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    row = {name: each for name, each in batch.items() if name != "labels"}
    freeze_parameters(model, ["*visual*"] if frozen else [])
    ported, values = port_model(model, torch.float32), values_of(row, TEXT_ENTRIES)
    stream_encoder(ported, row, values)
    see(ported, row, values)
    tokens = row["input_ids"].numel()
    return ported.spec, Work((tokens, tokens), tokens, beyond_text=True, values_per_token=values_per_token(ported))


@pytest.mark.parametrize("frozen", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_streamed_encoder_holds_one_of_its_layers_however_deep_it_is(frozen: bool) -> None:
    """Beside what text alone holds: its weights in two slots, its gradient, and what it computes for one micro-batch;
    the test of plans (`tests/integration/test_image_memory.py`) shows that this is what steps hold."""

    def peak(spec: ModelSpec, work: Work) -> int:
        return build_step(spec, Numerics("fp32"), Policy(shard_nbytes=2048), work).peak_nbytes("device")

    spec, work = measured("qwen2_5_vl", 6, frozen=frozen)
    until, (start, *layers) = spec.units[: spec.epilogue + 1], spec.units[spec.epilogue + 1 :]
    text, of_text = replace(spec, units=until, encoders=0), replace(work, beyond_text=False, values_per_token=0.0)
    values, layer = work.tokens[0] * work.values_per_token, layers[-1]
    weights = layer.numel * 4 * (2 if frozen else 3)
    computed = (layer.profile.forward if frozen else layer.profile.backward).nbytes(False, 0, 0, values=values)
    assert peak(spec, work) - peak(text, of_text) <= weights + computed
    deeper = replace(spec, units=(*until, start, *layers, *layers), encoders=1 + 2 * len(layers))
    assert peak(deeper, work) == peak(spec, work)
    prologue = replace(until[0], params=(*until[0].params, *(param for unit in layers for param in unit.params)))
    whole = replace(text, units=(prologue, *until[1:]))
    assert peak(whole, of_text) > peak(spec, work) + weights
