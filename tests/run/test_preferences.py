"""Whole preference runs: what is told and written, the reference kept and found again, and an exact resume."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from megatrain.config import Config
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import CheckpointError, ConfigError, DataError, SampleError
from megatrain.run import objective
from megatrain.run.objective import FILE
from megatrain.system.locks import alone
from megatrain.train.engine import Engine
from tests.run.test_training import configuration, lines, losses, train
from tests.tiny import equal, tiny_model


def preferences(path: Path, count: int = 40) -> Path:
    """The right answer is a digit, the wrong one a letter; they are of several lengths."""
    rows = [
        {"prompt": f"{n}+{n}=", "chosen": f"{2 * n}" * (1 + n % 2), "rejected": "no" * (1 + n % 3)}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dpo_run(tmp_path: Path, name: str = "run", resume: str | None = None, **changed: Any) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"verify": False},
        "data": {"sources": [str(preferences(tmp_path / "preferences.jsonl"))], "validation_fraction": 0.1},
        "train": {"objective": "dpo", "steps": 6, "sample_tokens": 0, "learning_rate": 3e-3, "eval_every": 2},
        "checkpoint": {"every": 3},
        "output": {"folder": str(tmp_path / name)},
    }
    for section, values in changed.items():
        sections.setdefault(section, {}).update(values)
    return configuration(tmp_path, **sections).model_copy(update={"resume": resume})


def steps(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run) if line["event"] == "stepped"]


def test_dpo_training_increases_the_reported_margin(tmp_path: Path) -> None:
    said = train(dpo_run(tmp_path, train={"steps": 12}))
    assert "a pair in two rows" in said
    assert "4 pairs held out" in said
    assert "loaded with from_pretrained" in said
    found = steps(tmp_path / "run")
    assert found[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "the policy is the reference at first"
    assert found[0]["rewards/margins"] == pytest.approx(0, abs=1e-3)
    assert found[-1]["loss"] < 0.68
    assert found[-1]["rewards/margins"] > 0
    assert found[-1]["rewards/accuracies"] > 0.7
    measured = [line for line in lines(tmp_path / "run") if line["event"] == "evaluated"]
    assert measured[-1]["loss"] < measured[0]["loss"]
    assert measured[-1]["rewards/accuracies"] > 0.7


@pytest.mark.few(1)
@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_reference_free_objectives_increase_the_margin(objective: str, tmp_path: Path) -> None:
    changed = {"objective": objective, "steps": 8, "learning_rate": 1e-2}
    train(dpo_run(tmp_path, train=changed, checkpoint={"every": 0}))
    told = steps(tmp_path / "run")
    assert told[-1]["loss"] < told[0]["loss"]
    assert told[-1]["rewards/margins"] > told[0]["rewards/margins"]
    assert not (tmp_path / "run" / FILE).exists()


def test_a_resumed_preference_run_is_bit_equal_and_reuses_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = {"train": {"lr_scheduler": "constant"}, "output": {"verify_export": False}}
    train(dpo_run(tmp_path, "whole", **constant))
    asked: list[int] = []
    log_probs = Engine.log_probs
    monkeypatch.setattr(Engine, "log_probs", lambda self, batches: asked.append(1) or log_probs(self, batches))
    (cached,) = (tmp_path / "cache").glob("reference-*.npz")
    made = cached.rename(tmp_path / "made elsewhere")

    @contextmanager
    def waited(path: Path) -> Iterator[None]:
        with alone(path):
            made.rename(path)
            yield

    monkeypatch.setattr(objective, "alone", waited)
    train(dpo_run(tmp_path, "part", **{**constant, "train": {"steps": 3, "lr_scheduler": "constant"}}))
    assert not asked, "what another process has asked while this one waited for it is taken"
    train(dpo_run(tmp_path, "part", resume="auto", **constant))
    assert not asked
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    left, right = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("part", "whole"))
    assert equal(left, right)


@pytest.mark.slow
def test_the_reference_of_an_adapter_run_may_be_its_base(tmp_path: Path) -> None:
    """Its first loss tells how far the adapter is from the base already; of what it begins with it is ln 2."""
    tiny_model("llama", vocab_size=512, pad_token_id=None).save_pretrained(tmp_path / "base")
    load_tokenizer("bytes").save_pretrained(tmp_path / "base")
    model, output = {"path": str(tmp_path / "base"), "verify": False, "config": None}, {"verify_export": False}
    lora = {"r": 4, "target_modules": ["all-linear"]}
    train(dpo_run(tmp_path, "first", model=model, adapter=lora, output=output))
    begun = steps(tmp_path / "first")
    assert begun[0]["rewards/margins"] == pytest.approx(0, abs=1e-3), "a fresh adapter is the base"
    goes_on = {"path": str(tmp_path / "first" / "model")}
    found = {}
    for reference in ("start", "base"):
        changed = {"steps": 1, "dpo_reference": reference}
        train(dpo_run(tmp_path, reference, model=model, adapter=goes_on, train=changed, output=output))
        found[reference] = steps(tmp_path / reference)[0]["rewards/margins"]
    assert found["start"] == pytest.approx(0, abs=1e-3)
    assert found["base"] > 0.5 * begun[-1]["rewards/margins"] > 0
    with pytest.raises(ValueError, match="means the model below an adapter"):
        dpo_run(tmp_path, train={"dpo_reference": "base"})


def marked(path: Path, count: int = 40) -> Path:
    """A digit is the right answer, a letter a wrong one; two of three are right."""
    rows = [
        {"prompt": f"{n}+{n}=", "completion": "no" * (1 + n % 3) if n % 3 == 2 else f"{2 * n}", "label": n % 3 != 2}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SHOWN = re.MULTILINE | re.DOTALL
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "preferences.md"


def kto_run(tmp_path: Path, name: str = "run", resume: str | None = None, **train: Any) -> Config:
    data = {"sources": [str(marked(tmp_path / "marked.jsonl"))]}
    return dpo_run(tmp_path, name, resume, data=data, train={"objective": "kto", **train})


@pytest.mark.parametrize("loss", [pytest.param("kto", marks=pytest.mark.slow), "apo_zero_unpaired"])
def test_kto_training_separates_good_and_bad_answers(loss: str, tmp_path: Path) -> None:
    size = {"micro_batch_size": 8} if loss == "kto" else {"micro_batch_size": 5}
    said = train(kto_run(tmp_path, steps=10, kto_loss=loss, beta=0.5, learning_rate=1e-2, **size))
    told = steps(tmp_path / "run")
    assert told[0]["loss"] == pytest.approx(0.5, abs=2e-3), "the policy is the reference at first"
    assert told[-1]["loss"] < 0.48
    margins = [line["rewards/chosen"] - line["rewards/rejected"] for line in told if "rewards/rejected" in line]
    assert margins[-1] > 0.1 > abs(margins[0])
    assert ("an answer and a mismatched one in two rows" in said) == (loss == "kto")
    assert ("kl" in told[-1]) == (loss == "kto")
    assert "4 samples held out" in said
    assert "27 good answers, 13 bad ones; weighted 2.1 to 1, where 1 to 1.34 is advised" in " ".join(said.split())
    measured = [line["loss"] for line in lines(tmp_path / "run") if line["event"] == "evaluated"]
    assert measured[-1] < measured[0]


def test_the_guides_kto_example_trains(tmp_path: Path) -> None:
    """As printed, but for sizes, the model and places."""
    shown = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), SHOWN)
    (rows,) = re.findall(r"^```json\n(.*?)^```", GUIDE.read_text(), SHOWN)
    (tmp_path / "shown.jsonl").write_text(rows * 3)
    (tree,) = [tree for tree in map(yaml.safe_load, shown) if tree["train"]["objective"] == "kto"]
    sizes = {"epochs": None, "steps": 2, "micro_batch_size": 4, "gradient_accumulation_steps": 2}
    chats = {"sources": [str(tmp_path / "shown.jsonl")], "chat_template": "none", "sequence_length": 64}
    changed = {"data": tree["data"] | chats, "train": tree["train"] | sizes}
    said = train(dpo_run(tmp_path, **changed, output={"verify_export": False}))
    assert "6 good answers, 6 bad ones; weighted 0.5 to 1" in " ".join(said.split())
    assert "kl" in steps(tmp_path / "run")[-1]


def test_resuming_without_the_reference_is_refused(tmp_path: Path) -> None:
    train(dpo_run(tmp_path, train={"steps": 3}))
    (tmp_path / "run" / "reference.npz").unlink()
    with pytest.raises(CheckpointError, match="reference model's log-probabilities are missing"):
        train(dpo_run(tmp_path, resume="auto"))


@pytest.mark.slow
def test_another_model_recomputes_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(dpo_run(tmp_path, "a", train={"steps": 1}))
    asked: list[int] = []
    log_probs = Engine.log_probs
    monkeypatch.setattr(Engine, "log_probs", lambda *args, **kw: asked.append(1) or log_probs(*args, **kw))
    train(dpo_run(tmp_path, "b", train={"steps": 1, "seed": 5}))
    assert asked
    assert steps(tmp_path / "b")[0]["rewards/margins"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("changed", "error", "what"),
    [
        ({"train": {"objective": "cross_entropy"}}, ConfigError, r"holds preferences.*train\.objective=dpo"),
        ({"data": {"sources": ["corpus.txt"]}}, DataError, "no 'chosen', which preference samples have"),
        ({"train": {"objective": "kto"}}, SampleError, "no 'label', which unpaired samples have"),
    ],
)
def test_preference_data_and_objective_must_match(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], what: str
) -> None:
    if "data" in changed:
        changed = {"data": {"sources": [str(tmp_path / "corpus.txt")]}}
    with pytest.raises(error, match=what):
        train(dpo_run(tmp_path, **changed))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"train": {"micro_batch_size": 3}}, "must be even"),
        ({"data": {"packing": "best_fit"}}, "pairs cannot be packed"),
        ({"data": {"format": "chat"}}, "needs data.format=preference, not chat"),
        ({"train": {"objective": "cross_entropy"}, "data": {"format": "preference"}}, "needs train.objective=dpo"),
        ({"train": {"dpo_loss": "ipo", "dpo_label_smoothing": 0.1}}, "does not use dpo_label_smoothing"),
        ({"train": {"objective": "orpo", "micro_batch_size": 3}}, "orpo takes pairs"),
        ({"train": {"objective": "orpo", "dpo_loss": "ipo"}}, "objective=orpo does not use dpo_loss"),
        ({"train": {"objective": "kto", "micro_batch_size": 3}}, "kto takes pairs"),
        ({"train": {"objective": "kto"}, "data": {"format": "preference"}}, "needs data.format=unpaired"),
        ({"train": {"objective": "cross_entropy"}, "data": {"format": "unpaired"}}, "needs train.objective=kto"),
        ({"train": {"kto_desirable_weight": 2.0}}, "objective=dpo does not use kto_desirable_weight"),
        ({"train": {"objective": "orpo", "dpo_reference": "base"}}, "objective=orpo does not use dpo_reference"),
        ({"train": {"simpo_gamma": 0.3}}, "objective=dpo does not use simpo_gamma"),
        ({"train": {"objective": "cross_entropy", "beta": 0.3}}, "objective=cross_entropy does not use beta"),
    ],
)
def test_contradictory_preference_keys_are_refused(tmp_path: Path, changed: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        dpo_run(tmp_path, **changed)
