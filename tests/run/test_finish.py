"""The check that closes a run: the saved model, loaded as any user would, has the engine's loss."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from megatrain.config import Config
from megatrain.dist import ALONE
from megatrain.errors import ExportError
from megatrain.run import finish
from megatrain.run.finish import verify_trained
from megatrain.spec import Limits
from megatrain.train.diagnostics import Diagnostics
from megatrain.train.engine import Engine
from tests.model.test_pretrained import CODE
from tests.run.test_training import configuration, train
from tests.tiny import FAMILIES, tiny_model

WIDE = {"max_position_embeddings": 128}


def identity(path: Path, count: int = 40) -> Path:
    """Short questions about who answers, as LLaMA-Factory's identity data has them."""
    rows = [{"instruction": f"who is {n}?", "input": "", "output": f"I am {n % 5}!"} for n in range(count)]
    path.write_text(json.dumps(rows))
    return path


def sharegpt(path: Path, count: int = 40) -> Path:
    turns = [(f"{n}?", f"{n % 7}!" * (1 + n % 3)) for n in range(count)]
    rows = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in turns]
    path.write_text(json.dumps(rows))
    return path


def fine_tuning(tmp_path: Path, data: Path, precision: str, model: dict[str, Any] | None = None) -> Config:
    """A run on samples that are packed, the held-out ones too."""
    fields = (model or configuration(tmp_path).model.config) | WIDE  # type: ignore[operator]
    return configuration(
        tmp_path,
        model={"config": fields},
        data={"sources": [str(data)], "chat_template": "none", "sequence_length": 128, "validation_fraction": 0.3},
        train={"precision": precision, "steps": 12, "eval_every": 0},
    )


def proof(told: str) -> tuple[float, float]:
    """What the closing check found: the stock model's loss and the engine's."""
    (line,) = [line for line in told.splitlines() if "from_pretrained" in line]
    theirs, ours = (float(part.split()[0].rstrip(",")) for part in line.replace("engine", "loss").split("loss ")[1:])
    return theirs, ours


@pytest.mark.parametrize(
    ("data", "precision"),
    [
        pytest.param(identity, "bf16", marks=pytest.mark.slow),
        (sharegpt, "fp32"),
        pytest.param(identity, "fp32", marks=pytest.mark.slow),
        pytest.param(sharegpt, "bf16", marks=pytest.mark.slow),
    ],
)
def test_a_packed_fine_tune_finishes(
    tmp_path: Path, data: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache of keys and values the library would take the samples of a row for one: several percent off."""
    batches: list[Any] = []
    honest = Engine.evaluate
    monkeypatch.setattr(Engine, "evaluate", lambda self, given: batches.extend(given) or honest(self, given))
    theirs, ours = proof(train(fine_tuning(tmp_path, data(tmp_path / "samples.json"), precision)))
    assert int((batches[-1]["position_ids"] == 0).sum()) > len(batches[-1]["position_ids"]), "rows hold several samples"
    assert theirs == pytest.approx(ours, rel=1e-3 if precision == "bf16" else 2e-4)


def test_the_router_auxiliary_loss_is_in_both_losses(tmp_path: Path) -> None:
    model = FAMILIES["mixtral-balanced"] | {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
    theirs, ours = proof(train(fine_tuning(tmp_path, sharegpt(tmp_path / "samples.json"), "fp32", model)))
    assert theirs == pytest.approx(ours, rel=2e-4)


@pytest.mark.slow
def test_models_with_remote_code_are_verified_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    train(configuration(tmp_path, train={"steps": 1, "sample_tokens": 0}))
    folder = tmp_path / "run" / "model"
    (folder / "homemade.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "homemade.HomemadeConfig", "AutoModelForCausalLM": "homemade.HomemadeForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "homemade", "auto_map": names}))
    own = configuration(tmp_path, train={"steps": 1, "sample_tokens": 0}, output={"folder": str(tmp_path / "own")})
    model = own.model.model_copy(update={"config": None, "path": str(folder), "trust_remote_code": True})
    theirs, ours = proof(train(own.model_copy(update={"model": model})))
    assert theirs == pytest.approx(ours, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "ours", "bf16", "fp32", "agree"),
    [
        ("fp32", 2.0, None, 2.0001, True),
        ("fp32", 2.0, None, 2.001, False),
        ("fp32", 0.00100, None, 0.00105, True),  # rounding of logits does not shrink with the loss
        ("fp32", 0.001, None, 0.01, False),
        ("bf16", 2.0, 2.01, 3.0, True),
        ("bf16", 0.5, 0.55, 0.53, True),  # few targets: the stock model is as far from itself in float32
        ("bf16", 0.5, 0.55, 0.549, False),
        ("bf16", 2.0, 4.0, 4.01, False),
        ("fp32", 2.0, None, float("nan"), False),
    ],
)
def test_differences_beyond_rounding_are_defects(
    tmp_path: Path,
    precision: str,
    ours: float,
    bf16: float | None,
    fp32: float,
    agree: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {"bf16": bf16, "fp32": fp32}
    monkeypatch.setattr(finish, "_stock_loss", lambda config, batch, saved, how: said[how])
    engine = cast(Engine, _Says(ours))
    config = configuration(tmp_path, train={"precision": precision})
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    if agree:
        verify_trained(config, engine, batch, tmp_path, Console(file=io.StringIO()))
    else:
        with pytest.raises(ExportError, match="they should agree"):
            verify_trained(config, engine, batch, tmp_path, Console(file=io.StringIO()))


def test_the_final_check_is_skipped_with_a_message_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Diagnostics, "host_nbytes_left", lambda self: 10_000)
    told = train(configuration(tmp_path, train={"steps": 1, "sample_tokens": 0}))
    assert "the saved model was not reloaded" in told
    assert "10.0 kB are left" in told


def test_memory_left_is_free_memory_within_the_budget() -> None:
    budget = 1 << 20
    with Engine.from_model(tiny_model(), "cpu", "fp32", limits=Limits(host_nbytes=budget), verify=False) as engine:
        held = sum(
            nbytes for (tier, _), nbytes in engine.diagnostics.memory_table().items() if tier in ("host", "device")
        )
        assert engine.diagnostics.host_nbytes_left() == budget - held
    with Engine.from_model(tiny_model(), "cpu", "fp32", verify=False) as engine:
        assert engine.diagnostics.host_nbytes_left() > budget


class _Says:
    """An engine of which only the loss is asked."""

    world = ALONE

    def __init__(self, loss: float) -> None:
        self.loss, self.structure, self.diagnostics = loss, self, self
        self.numel, self.vocab_size = 100, 10

    def evaluate(self, batches: Any) -> float:
        return self.loss

    def host_nbytes_left(self) -> int:
        return 1 << 40


def test_the_card_tells_the_losses_of_steps_that_the_model_has_made(tmp_path: Path) -> None:
    """Also after a rollback, from lines that are torn or of another version, and up to the step that is saved."""
    config = configuration(tmp_path)
    assert finish._losses(config, 4) == {}
    told = [
        *({"event": "stepped", "step": step, "loss": loss} for step, loss in ((1, 3.0), (2, 2.0), (3, 77.0))),
        {"event": "evaluated", "step": 3, "loss": 9.0},
        {"event": "rolledback", "step": 3, "to": 2},
        {"event": "stepped", "step": 3, "loss": 1.0},
        {"event": "stepped", "step": 4, "loss": None},
        {"event": "evaluated", "step": 3, "loss": 1.5},
        {"event": "stepped", "step": 5, "loss": 50.0},
        {"event": "evaluated", "step": 5, "loss": 60.0},
    ]
    config.folder.mkdir()
    lines = [json.dumps(line) for line in told]
    (config.folder / "metrics.jsonl").write_text("\n".join([*lines, "[]", '{"event": "stepped", "step": 4, "lo']))
    facts = {"training loss": "2.0000, mean of the last 3 steps", "validation loss": "1.5000 after step 3"}
    assert finish._losses(config, 4) == facts
