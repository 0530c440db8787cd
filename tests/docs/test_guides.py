"""Examples in the guides on data, validation, preferences, generation and sharing run as printed, on tiny models."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.cli import main
from megatrain.data.tokenizer import load_tokenizer
from tests.docs.test_examples import blocks
from tests.fake_hub import Hub
from tests.run.test_chats import chats
from tests.run.test_lm_eval import harness  # noqa: F401
from tests.run.test_recipes import TINY
from tests.run.test_training import lines

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SMALL = {
    "data": {"sequence_length": 64},
    "train": {"steps": 2, "epochs": None, "device": "cpu", "sample_tokens": 2, "eval_batches": 1},
    "output": {"folder": "run", "trackers": [], "verify_export": False},
}
PLACES = {"meta-llama/Llama-3.1-8B-Instruct": "base", "cuda:0": "cpu"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a tiny model, chats and preferences, as the guides have them."""
    monkeypatch.chdir(tmp_path)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY)).save_pretrained("base")
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained("base")
    Path("data").mkdir()
    for name in ("chats", "math", "code"):
        chats(Path("data", f"{name}.jsonl"))
    Path("data", "dialogs.jsonl").write_text(Path("data", "chats.jsonl").read_text().replace('"messages"', '"dialog"'))
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}!", "rejected": "no"} for n in range(40)]
    Path("data", "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0, arguments


def written(tree: dict[str, Any], **changed: dict[str, Any]) -> str:
    """The file of a run as shown, but for its size, and its model where none is shown."""
    merged = {"model": {"path": "base"}, **tree}
    for section, values in [*SMALL.items(), *changed.items()]:
        merged[section] = {**merged.get(section, {}), **values}
    merged["model"]["path"] = PLACES.get(merged["model"]["path"], merged["model"]["path"])
    Path("run.yaml").write_text(yaml.safe_dump(merged))
    return "run.yaml"


def shown(document: str, says: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The one YAML block of a guide of which that is true."""
    (tree,) = filter(says, map(yaml.safe_load, blocks(f"docs/guides/{document}", "yaml")))
    found: dict[str, Any] = tree
    return found


def commands(document: str) -> Sequence[list[str]]:
    """What a guide has typed, as words, but for other programs and for files that a shell reads from."""
    text = [line.split(" < ")[0] for block in blocks(f"docs/guides/{document}", "text") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in text]
    return [[PLACES.get(word, word) for word in each[1:]] for each in words if each[:1] == ["megatrain"]]


def events(folder: str, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(Path(folder)) if line["event"] == kind]


@pytest.mark.slow
def test_data_is_mixed_with_the_hubs_by_weight_and_columns_are_renamed(hub: Hub) -> None:
    hub.publish("org/dataset", {"train.jsonl": Path("data", "math.jsonl").read_bytes()})
    run("train", written(shown("data.md", lambda tree: "weights" in tree["data"]), output={"folder": "mixed"}))
    run("train", written(shown("data.md", lambda tree: "columns" in tree["data"]), output={"folder": "renamed"}))
    assert [len(events(folder, "stepped")) for folder in ("mixed", "renamed")] == [2, 2]


def test_a_data_set_on_the_hub_is_streamed(hub: Hub) -> None:
    rows = "".join(json.dumps({"text": f"row {n} " * 9}) + "\n" for n in range(300))
    hub.publish("org/corpus", {f"data/{part}.jsonl.gz": gzip.compress(rows.encode()) for part in range(2)})
    run("train", written(shown("data.md", lambda tree: tree["data"].get("streaming"))))
    assert len(events("run", "stepped")) == 2


def test_validation_by_source_with_metrics_and_tasks(harness: dict[str, Any]) -> None:  # noqa: F811
    """The harness is a stand-in (`tests.run.test_lm_eval`)."""
    tree = shown("validation.md", lambda tree: "validation" in tree.get("data", {}))
    metrics = shown("validation.md", lambda tree: "metrics" in tree.get("train", {}))
    tasks = shown("validation.md", lambda tree: "lm_eval" in tree)
    (code,) = blocks("docs/guides/validation.md", "python")
    Path("my_metrics.py").write_text(code)
    tree["train"] |= metrics["train"]
    run("train", written({**tree, **tasks}, train={"eval_every": 1, "eval_batches": 2}, lm_eval={"every": 1}))
    for measured, kept in zip(events("run", "evaluated"), events("run", "scored")[::2], strict=True):
        assert set(measured["by_source"]) == {"math", "code"}
        assert kept["scores"]["worst"] > 0
    assert "capitals/acc" in events("run", "scored")[1]["scores"]


def test_preferences_are_trained_as_shown() -> None:
    tree = shown("preferences.md", lambda tree: tree["train"]["objective"] == "dpo")
    run("train", written(tree, train={"global_batch_size": 4}))
    assert "rewards/margins" in events("run", "stepped")[-1]


@pytest.mark.slow  # three runs and ten commands
@pytest.mark.parametrize("adapter", [None, {"type": "lora", "r": 2}], ids=["all", "adapter"])
def test_runs_their_models_and_exports_chat(
    adapter: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("train", written({"data": {"sources": "data/chats.jsonl"}} | ({"adapter": adapter} if adapter else {})))
    run("export", "run", "exported", *(["--merge"] if adapter else []))
    capsys.readouterr()
    answers = []
    for folder in ("run", "run/model", "exported"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("1?\nand 2?\n"))
        run("generate", folder, "--chat", "--system", "be brief", "--temperature", "0", "--max-new-tokens", "4")
        answers.append(capsys.readouterr().out)
    assert all(answers)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_models_of_runs_are_asked_and_exported_as_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"data": {"sources": "data/chats.jsonl"}}
    run("train", written(tree, output={"folder": "runs/new"}))
    run("train", written({**tree, "adapter": {"type": "lora", "r": 2}}, output={"folder": "runs/adapter"}))
    written(tree)
    asked = [*commands("generate.md"), *commands("sharing.md")]
    assert len(asked) >= 6
    for words in asked:
        monkeypatch.setattr(sys, "stdin", io.StringIO("1?\n"))
        shutil.rmtree("exported", ignore_errors=True)  # which two sections of a guide write
        capsys.readouterr()
        run(*words, *(["--max-new-tokens", "2"] if words[0] == "generate" else []))
        said = capsys.readouterr().out
        assert said.endswith("\n")
    assert {path.name for path in Path("exported").iterdir()} >= {"config.json", "model.safetensors"}
    assert Path("merged", "model.safetensors").exists()
