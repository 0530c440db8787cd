"""Validation: sources of one's own, the end of a run by its loss, the best state, metrics of one's own."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from megatrain import DPO, Engine, Policy
from megatrain.checkpoint.folder import open_checkpoint
from megatrain.config import load_config, save_config
from megatrain.data.packing import REFERENCE
from megatrain.data.tokenizer import load_tokenizer
from megatrain.dist import World
from megatrain.dist.watch import PROMPT
from megatrain.errors import ConfigError
from megatrain.run import training
from megatrain.run.evaluation import Evaluation, evaluated, scored
from megatrain.train.checkpoints import LowestLoss
from megatrain.train.events import Evaluated
from tests.ranks import together, worlds
from tests.run.test_preferences import dpo_run, preferences
from tests.run.test_training import configuration, lines, train
from tests.tiny import batch, equal, tiny_model


def run_of(tmp_path: Path, **changed: dict[str, Any]) -> Any:
    tree: dict[str, dict[str, Any]] = {
        "model": {"verify": False},
        "train": {"steps": 4, "sample_tokens": 0, "eval_every": 1, "eval_batches": None},
        "output": {"folder": str(tmp_path / "run"), "verify_export": False},
    }
    for section, values in changed.items():
        tree[section] = {**tree.get(section, {}), **values}
    return configuration(tmp_path, **tree)


def texts(tmp_path: Path) -> dict[str, str]:
    named = {"easy": "aaaa " * 90, "hard": "q9#zK!" * 20}
    for name, text in named.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return {name: str(tmp_path / f"{name}.txt") for name in named}


def status(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "run" / "status.json").read_text()))


def test_per_source_losses_average_by_tokens_to_the_total(tmp_path: Path) -> None:
    sources = texts(tmp_path)
    config = run_of(tmp_path, data={"validation": list(sources.values())}, train={"steps": 1})
    assert dict(config.data.validation) == sources
    assert config.data.validation_fraction == 0
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    said = train(config)
    (found,) = [line for line in lines(tmp_path / "run") if line["event"] == "evaluated"]
    windows = {"easy": 450 // 32, "hard": 120 // 32}
    assert found["loss"] == pytest.approx(
        sum(windows[name] * loss for name, loss in found["by_source"].items()) / sum(windows.values())
    )
    assert found["by_source"]["easy"] != pytest.approx(found["by_source"]["hard"], rel=1e-3)
    for name, loss in found["by_source"].items():
        assert f"{name}: loss {loss:.3f}, perplexity {math.exp(loss):.4g}" in said
    assert "none held out" in said
    assert status(tmp_path)["validation_losses"] == found["by_source"]


def test_per_source_losses_do_not_depend_on_rounds_or_ranks() -> None:
    model, making = tiny_model(), threading.Lock()
    sources = {"a": [batch(2, 5 + index % 3, seed=index) for index in range(5)], "b": [batch(1, 7, seed=9)]}
    every = [each for batches in sources.values() for each in batches]

    def measured(world: Any) -> tuple[Evaluated, float]:
        with making:
            engine = Engine.from_model(model, "cpu", "fp32", policy=Policy(), verify=False, world=world)
        with engine:
            return evaluated(3, engine, sources, None, 2), engine.evaluate(every[world.rank :: world.size])

    alone = measured(worlds(1)[0])
    assert alone[0].loss == pytest.approx(alone[1], rel=1e-6)
    assert list(alone[0].by_source) == ["a", "b"]
    for found, _ in together(worlds(2), measured):
        assert found.loss == pytest.approx(alone[0].loss, rel=1e-6)
        assert found.by_source == pytest.approx(alone[0].by_source, rel=1e-6)


def test_pair_losses_are_weighted_by_pairs() -> None:
    def pair(rows: int, seed: int) -> dict[str, Any]:
        found = batch(rows, 6, seed=seed)
        return {**found, REFERENCE: found["labels"].float().mean(dim=1) * 0 - 20}

    batches = [pair(2, 1), pair(6, 2)]
    with Engine.from_model(tiny_model(), "cpu", "fp32", policy=Policy(), verify=False) as engine:
        found = evaluated(0, engine, {"pairs": batches}, DPO(0.5), 1)
        whole = engine.measure(batches, DPO(0.5))
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)
    assert found.metrics == pytest.approx(whole.metrics, rel=1e-5)
    assert found.by_source == {}


def test_preference_validation_uses_its_own_files(tmp_path: Path) -> None:
    own = str(preferences(tmp_path / "own.jsonl", 8))
    data = {
        "sources": [str(preferences(tmp_path / "preferences.jsonl"))],
        "validation": own,
        "validation_fraction": 0.0,
    }
    said = train(dpo_run(tmp_path, data=data, train={"steps": 2, "eval_batches": None}))
    found = [line for line in lines(tmp_path / "run") if line["event"] == "evaluated"]
    assert found[-1]["rewards/accuracies"] >= 0
    assert "own: 8 samples" in " ".join(said.split()) or "own: 16 samples" in " ".join(said.split())
    assert "8 of its samples are trained on too" in " ".join(said.split())


def falling(losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation loss is these, one after another."""
    rest: Iterator[float] = iter(losses)
    monkeypatch.setattr(training, "evaluated", lambda step, *_: Evaluated(step, next(rest)))


def test_early_stopping_ends_the_run_and_keeps_the_best_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = {"steps": 9, "early_stopping_patience": 2, "early_stopping_threshold": 0.5}
    early |= {"sample_tokens": 3, "sample_prompts": ["a", "b"]}
    config = run_of(tmp_path, train=early, output={"best": True}, checkpoint={"every": 100, "keep_last": 1})
    falling([3.0, 2.0, 1.9, 2.5], monkeypatch)
    said = " ".join(train(config).split())
    assert "step 4 stops early: the validation loss has not fallen by more than 0.5 in 2 measurements" in said
    assert "the model is the state after step 3, with the lowest validation loss" in said
    assert status(tmp_path)["state"] == "finished"
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000004"]
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    best = load_file(tmp_path / "run" / "checkpoints" / "step-00000003" / "model.safetensors")
    assert equal(dict(saved), dict(best))
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| validation loss | 1.9000 after step 3 |" in card
    assert "mean of the last 3 steps" in card, "those that the model has seen"
    drawn = [(line["step"], line["prompt"]) for line in lines(tmp_path / "run") if line["event"] == "sampled"]
    assert drawn == [(3, "a"), (3, "b")], "of the state in model/, once"

    again = config.model_copy(update={"resume": "auto"})
    said = " ".join(train(again).split())
    assert "finished run of 4 steps, ended by its validation loss; increase train.early_stopping_patience" in said
    falling([1.0, 2.0, 2.0, 2.0], monkeypatch)
    longer = again.model_copy(update={"train": config.train.model_copy(update={"early_stopping_patience": 3})})
    said = " ".join(train(longer).split())
    assert "goes on after step 4" in said
    assert status(tmp_path)["step"] == 8, "a gain in step 5, and three without"


def test_resuming_after_early_stopping_starts_a_new_best_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of(tmp_path, train={"steps": 9, "early_stopping_patience": 1}, output={"best": True})
    falling([1.0, 2.0], monkeypatch)
    train(config)
    assert status(tmp_path)["step"] == 2
    falling([4.0, 3.0, 5.0], monkeypatch)
    output = config.output.model_copy(update={"folder": str(tmp_path / "other")})
    said = " ".join(train(config.model_copy(update={"resume": str(tmp_path / "run"), "output": output})).split())
    assert "step 5 stops early" in said
    assert "the model is the state after step 4, with the lowest validation loss" in said


def test_losses_on_former_validation_data_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own := tmp_path / "own.txt").write_text("aaaa " * 90)
    kept = {"every": 1, "keep_last": 1, "keep_best": 1}
    of = {"data": {"validation": str(own)}, "output": {"best": True}, "checkpoint": kept}
    config = run_of(tmp_path, **of, train={"steps": 2, "sample_tokens": 2})
    falling([1.0, 1.1], monkeypatch)
    assert "the model is the state after step 1," in " ".join(train(config).split())
    drawn = [line["step"] for line in lines(tmp_path / "run") if line["event"] == "sampled"]
    assert drawn == [2, 1], "of the last state, and of the one in model/"
    own.write_text("q9#zK!" * 20)
    falling([4.0, 3.0, 5.0], monkeypatch)
    longer = run_of(tmp_path, **of, train={"steps": 5}).model_copy(update={"resume": "auto"})
    assert "the model is the state after step 4," in " ".join(train(longer).split())
    there = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert there == ["step-00000004", "step-00000005"]
    kept_state = open_checkpoint(tmp_path / "run" / "checkpoints" / there[-1]).training["run"]["validation"]
    (again := LowestLoss(of=kept_state["of"])).restore(kept_state, 5)
    assert (again.since, again.step, again.loss, again.waited) == (2, 4, 3.0, 1)


def test_keys_that_use_the_validation_loss_require_validation(tmp_path: Path) -> None:
    for key, changed in (
        ("train.early_stopping_patience", {"train": {"early_stopping_patience": 1}}),
        ("output.best", {"output": {"best": True}}),
    ):
        with pytest.raises(ValueError, match=f"{key} needs a validation loss; set data.validation"):
            run_of(tmp_path, data={"validation_fraction": 0.0}, **changed)
        without = {section: {**values} for section, values in changed.items()}
        without["train"] = {**without.get("train", {}), "eval_every": 0}
        with pytest.raises(ValueError, match=f"{key} needs a validation loss; set train.eval_every"):
            run_of(tmp_path, **without)


METRICS = """
def several(evaluation):
    return {"step": evaluation.step, "letters": len(evaluation.tokenizer)}

def wrong(evaluation):
    return {"word": "high"}
"""


def test_custom_metrics_are_reported_like_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_metrics.py").write_text(METRICS)
    guide = Path(__file__).parents[2] / "docs" / "guides" / "validation.md"
    (printed,) = re.findall(r"^```python\n# my_metrics.py\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_metrics.py").write_text(printed)
    named = ["my_metrics:worst", "own_metrics:several"]
    said = train(run_of(tmp_path, data={"validation": texts(tmp_path)}, train={"steps": 2, "metrics": named}))
    evaluated_last = [line for line in lines(tmp_path / "run") if line["event"] == "evaluated"][-1]
    assert f"worst {max(evaluated_last['by_source'].values()):.2g}"[:8] in said
    assert "step 2, letters " in said
    (first, last) = [line for line in lines(tmp_path / "run") if line["event"] == "scored"]
    assert first["scores"]["step"] == 1
    assert status(tmp_path)["scores"] == last["scores"]
    for name, complaint in (
        ("own_metrics", "is not module:function"),
        ("own_metrics:none", r"cannot be imported \(AttributeError: module"),
        ("no_such_module:f", r"cannot be imported \(ModuleNotFoundError: No module"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            train(run_of(tmp_path, train={"metrics": name}, output={"folder": str(tmp_path / "other")}))
    third = tmp_path / "third"
    with pytest.raises(ConfigError, match="own_metrics:wrong returned str as 'word'"):
        train(run_of(tmp_path, train={"metrics": "own_metrics:wrong"}, output={"folder": str(third)}))
    done = max(line["step"] for line in lines(third) if line["event"] == "stepped")
    assert [path.name for path in (third / "checkpoints").iterdir()] == [f"step-{done:08}"], "no step is lost for it"


@pytest.mark.slow
def test_ranks_wait_for_a_metric_that_one_of_them_works_out_as_for_what_one_does_for_all() -> None:
    """And not as in a step, where a rank that is later than ten minutes is taken to stand still."""
    is_asked = threading.Event()

    def work(world: World) -> bool:
        def metric(evaluation: Evaluation) -> float:
            return float(world.rank == 0 and is_asked.wait(20))

        class Asked(World):
            def exchange(self, what: str, value: Any) -> Any:
                if what not in PROMPT and self.rank == 1:
                    is_asked.set()
                return super().exchange(what, value)

        asked: Any = SimpleNamespace(world=Asked(world.rank, world.size, world.host))
        found = scored({"mine:late": metric}, Evaluation(1, asked, load_tokenizer("bytes"), {}))
        asked.world.exchange("a stop", False)
        return found.scores == {"late": float(world.rank == 0)}

    assert all(together(worlds(2), work))
