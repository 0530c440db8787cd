"""An exported folder is a Hugging Face model with the masters' values, and appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain import AdamW, Engine
from megatrain.errors import ExportError
from megatrain.model import PortedModel
from tests.tiny import FAMILIES, equal, tiny_model, unequal_batches


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained_loads_exactly_the_masters(family: str, tmp_path: Path) -> None:
    with Engine.from_model(tiny_model(family), precision="bf16", optimizer=AdamW(lr=1e-2)) as engine:
        engine.step(unequal_batches())
        folder = engine.save_pretrained(tmp_path / "model")
        masters = engine.master_weights()
        loss = engine.evaluate(unequal_batches())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert equal({name: p.detach() for name, p in model.named_parameters()}, masters)
    with Engine.from_model(model.eval(), precision="bf16") as engine:
        assert engine.evaluate(unequal_batches()) == loss


def test_a_failed_export_leaves_nothing_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.from_model(tiny_model()) as engine:
        folder = engine.save_pretrained(tmp_path / "model")
        before = sorted(path.name for path in folder.iterdir())

        def full(self: PortedModel, masters: object, folder: Path) -> None:
            (folder / "half").write_text("half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(PortedModel, "write_pretrained", full)
        with pytest.raises(ExportError, match="No space left on device"):
            engine.save_pretrained(folder)
        with pytest.raises(ExportError):
            engine.save_pretrained(tmp_path / "other")
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_holds_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with Engine.from_model(tiny_model()) as engine:
        with pytest.raises(ExportError, match="not a model folder"):
            engine.save_pretrained(tmp_path)
        folder = engine.save_pretrained(tmp_path / "model")
        (folder / "dataset.bin").write_text("years of work")
        with pytest.raises(ExportError, match=r"holds 'dataset.bin', which is not part of a model"):
            engine.save_pretrained(folder)
        with pytest.raises(ExportError, match="is a file"):
            engine.save_pretrained(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").exists()
    assert (folder / "dataset.bin").exists()


def test_an_export_replaces_the_model_that_was_there(tmp_path: Path) -> None:
    with Engine.from_model(tiny_model()) as engine:
        folder = engine.save_pretrained(tmp_path / "model")
        (folder / "stale.json").write_text("{}")
        engine.save_pretrained(folder)
    assert not (folder / "stale.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_when_the_last_rename_fails_the_old_model_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.from_model(tiny_model()) as engine:
        folder = engine.save_pretrained(tmp_path / "model")
        plain = Path.rename

        def failing(self: Path, target: Path) -> Path:
            if self.name.endswith(".part"):
                raise OSError(5, "Input/output error")
            return plain(self, target)

        monkeypatch.setattr(Path, "rename", failing)
        with pytest.raises(ExportError, match="Input/output error"):
            engine.save_pretrained(folder)
    assert (folder / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
