"""Tasks of lm_eval: what the harness asks is answered as the stock model would; the harness itself is a stand-in here.

`python -m pytest tests/run/test_lm_eval.py` also runs a task of the real harness, where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain import Engine, Policy
from megatrain.config.keys import LmEvalSection
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import ConfigError
from megatrain.run.lm_eval_tasks import Scoring, Tasks, score
from tests.run.test_training import lines, train
from tests.run.test_validation import falling, run_of
from tests.tiny import tiny_model

ASKED = [
    Scoring([5, 6, 7], [8, 9]),
    Scoring([1], [2, 3, 4, 5, 6]),
    Scoring(list(range(1, 30)), [3]),
    Scoring([7, 7], [7]),
]


def test_lm_eval_scores_equal_the_stock_models_for_any_batching() -> None:
    model = tiny_model()
    expected = []
    for each in ASKED:
        ids = torch.tensor([[*each.context, *each.continuation]])
        with torch.no_grad():
            said = model.eval()(input_ids=ids).logits[0].log_softmax(-1)[len(each.context) - 1 : -1]
        rest = torch.tensor(each.continuation)
        expected.append((float(said.gather(1, rest[:, None]).sum()), bool((said.argmax(-1) == rest).all())))
    with Engine.from_model(model, "cpu", "fp32", policy=Policy(), verify=False) as engine:
        for rows in (1, 4):
            found = score(engine, ASKED, rows, 40)
            assert [each[0] for each in found] == pytest.approx([each[0] for each in expected], rel=1e-5)
            assert [each[1] for each in found] == [each[1] for each in expected]
        likeliest = int(engine.logits({"input_ids": torch.tensor([[5, 6]])})[0, -1].argmax())
        assert score(engine, [Scoring([5, 6], [likeliest])], 1, 40)[0][1]


class TemplateLM:
    """What is used of the harness's own: `loglikelihood` in terms of tokens."""

    def loglikelihood(self, requests: list[Any]) -> Any:
        pairs = [each.args for each in requests]
        return self._loglikelihood_tokens([(p, self.tok_encode(p[0]), self.tok_encode(p[1])) for p in pairs])  # type: ignore[attr-defined]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    asked: dict[str, Any] = {}

    def simple_evaluate(model: Any, tasks: list[str], **how: Any) -> dict[str, Any]:
        asked.update(how, tasks=tasks)
        print("a bar", file=sys.stderr)
        said, _ = model.loglikelihood([SimpleNamespace(args=("two and ", "two"))])[0]
        text = model.generate_until([SimpleNamespace(args=("one", {"until": ["zz"], "max_gen_toks": 3}))])[0]
        whole = model.loglikelihood_rolling([SimpleNamespace(args=("some text",))])[0]
        scores = {"alias": "capitals", "acc,none": said, "acc_stderr,none": 0.1, "words,none": float(len(text))}
        return {"results": {"capitals": scores | {"rolling,strict": whole}}}

    class TaskManager:
        all_tasks = ("capitals", "rivers")

        def __init__(self, include_path: str | None) -> None:
            asked["folder"] = include_path

        def load(self, names: list[str]) -> None:
            print("a bar", file=sys.stderr)
            if "rivers" in names:
                raise ConnectionError("cannot reach the hub")

    def windows(token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int) -> Any:
        yield [prefix_token, *token_list[:-1]], token_list

    made = {
        "lm_eval": {},
        "lm_eval.evaluator": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.utils": {
            "get_rolling_token_windows": windows,
            "make_disjoint_window": lambda pair: (pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1]),
        },
    }
    for name, content in made.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def test_lm_eval_tasks_run_on_schedule_and_at_the_end(
    tmp_path: Path, harness: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"tasks": "capitals", "every": 2, "limit": 5, "folder": str(tmp_path)}
    said = train(run_of(tmp_path, train={"steps": 3, "eval_every": 0}, lm_eval=section))
    found = [line for line in lines(tmp_path / "run") if line["event"] == "scored"]
    assert [line["step"] for line in found] == [2, 3]
    assert list(found[0]["scores"]) == ["capitals/acc", "capitals/words", "capitals/rolling strict"]
    assert found[0]["scores"]["capitals/rolling strict"] < found[0]["scores"]["capitals/acc"] < 0
    assert "capitals/acc -" in said
    assert (harness["limit"], harness["tasks"], harness["folder"]) == (5, ["capitals"], str(tmp_path))
    assert harness["random_seed"] is None
    assert "a bar" not in capsys.readouterr().err


def test_tasks_are_asked_of_the_state_that_is_left_in_model(
    tmp_path: Path, harness: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    falling([2.0, 1.0, 3.0, 4.0], monkeypatch)
    early = {"steps": 9, "eval_every": 1, "early_stopping_patience": 2, "sample_tokens": 0}
    config = run_of(tmp_path, train=early, lm_eval={"tasks": "capitals"}, output={"best": True})
    assert "the model is the state after step 2" in " ".join(train(config).split())
    found = [line["step"] for line in lines(tmp_path / "run") if line["event"] == "scored"]
    assert found == [2], "once, and not of the last state, after which training ended early"


def test_a_missing_harness_task_or_data_set_is_refused_early(
    harness: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"lm_eval\.tasks: there is no task 'capital'"):
        Tasks(LmEvalSection(tasks=("capital",)))
    with pytest.raises(ConfigError, match=r"lm_eval: failed \(ConnectionError: cannot reach the hub\)"):
        Tasks(LmEvalSection(tasks=("rivers",)))
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    with pytest.raises(ConfigError, match=r"cannot be imported.*pip install megatrain\[eval\]"):
        Tasks(LmEvalSection(tasks=("capitals",)))


TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="only the extra `eval` has it")
def test_custom_lm_eval_tasks_run(tmp_path: Path) -> None:
    rows = [{"country": name, "choices": [" Rome", " Oslo"], "answer": 0} for name in ("Italy", "Latium")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "capitals.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    tasks = Tasks(LmEvalSection(tasks=("capitals",), folder=str(tmp_path / "tasks")))
    with Engine.from_model(tiny_model(vocab_size=257), "cpu", "fp32", policy=Policy(), verify=False) as engine:
        found = tasks.run(3, engine, load_tokenizer("bytes"), 2, 64)
    assert found.step == 3
    assert 0 <= found.scores["capitals/acc"] <= 1
