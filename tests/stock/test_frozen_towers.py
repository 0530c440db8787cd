"""Models with images: towers and other parts frozen by role, and adapters over the language model, as in peft."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from megatrain import AdamW, Engine
from megatrain.engine.batch import IGNORED
from megatrain.errors import ModelError
from megatrain.model import AdaptedSource, freeze_parameters, lora_config
from megatrain.model.freeze import decoder_of
from megatrain.model.weight_sources import ModelSource
from megatrain.spec import Numerics
from megatrain.train.parity import truth
from tests.stock.image_models import image_model
from tests.stock.test_images import errors, mixed
from tests.tiny import equal, tiny_model

pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings
FP32 = Numerics("fp32")
KINDS = ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.slow), pytest.param("gemma3", marks=pytest.mark.slow)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tower_keeps_its_bits_and_the_rest_trains_as_in_torch(kind: str, device: str) -> None:
    model, batches = image_model(kind), mixed(kind)
    freeze_parameters(model, ["vision"])
    tower = {name: each.detach().clone() for name, each in model.named_parameters() if not each.requires_grad}
    assert len(tower) > 10
    assert all(re.search(r"\bvi", name) for name in tower)
    _, expected = truth(model, batches)
    with Engine.from_model(model, device, numerics=FP32, verify=False, optimizer=AdamW(lr=1e-2)) as engine:
        found = engine.gradients(batches)
        assert not found.keys() & tower.keys()
        assert max(errors(found, {name: expected[name] for name in found}).values()) < 1e-5
        engine.step(batches)
        after = engine.master_weights()
    assert equal({name: after[name] for name in tower}, tower)


def test_roles_divide_a_model_and_one_that_it_lacks_is_refused() -> None:
    sizes = {}
    for role in ("vision", "projector", "language"):
        model = image_model("llava")
        freeze_parameters(model, [role])
        sizes[role] = sum(not each.requires_grad for each in model.parameters())
    assert sum(sizes.values()) == len(list(image_model("llava").parameters()))
    for model, role in (
        (image_model("llava"), "audio"),
        (tiny_model("llama"), "vision"),
        (tiny_model("llama"), "language"),
    ):
        with pytest.raises(
            ModelError, match=f"freeze, model .*: has no {role} part that transformers knows; names look"
        ):
            freeze_parameters(model, [role])


def gradients_of(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of a `PeftModel`, by the names of the model inside it."""
    targets = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
    for batch in batches:
        count = int((batch["labels"][:, 1:] != IGNORED).sum())
        (model(**batch).loss * count / targets).backward()
    named = ((name.removeprefix("base_model.model."), each) for name, each in model.named_parameters())
    return {name: each.grad for name, each in named if each.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_trains_the_language_model_and_peft_reads_it(kind: str, tmp_path: Path) -> None:
    base, batches = image_model(kind), mixed(kind)
    source = AdaptedSource(ModelSource(base), lora_config(r=2, alpha=4.0), seed=5)
    adapted = [name for name, each in source.model.named_parameters() if each.requires_grad]
    assert adapted
    assert all(name.startswith(f"{decoder_of(base)}.") for name in adapted)
    with Engine.from_source(source, device="cpu", numerics=FP32, verify=False, optimizer=AdamW(lr=1e-2)) as engine:
        for _ in range(2):
            engine.step(batches)
        loss, found = engine.evaluate(batches), engine.gradients(batches)
        engine.save_pretrained(tmp_path / "adapter")
    read = PeftModel.from_pretrained(image_model(kind), tmp_path / "adapter", is_trainable=True)
    expected = gradients_of(read.train(), batches)
    named = {name.replace(".default", ""): each for name, each in expected.items()}
    ours = {name.replace(".default", ""): each for name, each in found.items()}
    assert ours.keys() == named.keys()
    assert max(errors(ours, named).values()) < 1e-5
    with torch.no_grad():
        targets = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches]
        losses = [
            float(read(**batch).loss) * count / sum(targets) for batch, count in zip(batches, targets, strict=True)
        ]
    assert loss == pytest.approx(sum(losses), rel=1e-6)
