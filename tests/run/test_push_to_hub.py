"""Models on the hub: what is uploaded, the card, what is refused; against a local server that speaks its endpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from megatrain.cli import main
from megatrain.data import load_tokenizer
from megatrain.errors import ExportError
from megatrain.run.push_to_hub import push
from tests.fake_hub import ADDRESS, Hub
from tests.run.test_training import configuration, train
from tests.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:Use .content:DeprecationWarning")  # how the hub's client uploads


def card_of(hub: Hub) -> tuple[dict[str, Any], str]:
    """What the hub reads of the card, and the card."""
    text = hub.files["README.md"].decode()
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert match
    return yaml.safe_load(match[1]), text


def test_a_finished_run_pushes_a_loadable_model_with_a_card(hub: Hub, tmp_path: Path) -> None:
    said = train(configuration(tmp_path, output={"folder": str(tmp_path / "run"), "push": "someone/small"}))
    assert f"pushed to {hub.endpoint}/someone/small" in said
    assert hub.private
    there = tmp_path / "downloaded"
    there.mkdir()
    for name, content in hub.files.items():
        (there / name).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(there)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert all(bool((each == other).all()) for each, other in zip(loaded.parameters(), own.parameters(), strict=True))
    read, text = card_of(hub)
    assert read["library_name"] == "transformers"
    assert "megatrain" in read["tags"]
    for part in ("learning rate", "training loss", "validation loss", "megatrain train", "from_pretrained"):
        assert part in text, part


def test_a_model_folder_is_pushed_unchanged(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    tiny_model(vocab_size=300).save_pretrained(run / "model")
    load_tokenizer("bytes").save_pretrained(run / "model")
    tree = {
        "model": {"path": "org/base"},
        "data": {"sources": ["org/chats", str(tmp_path / "mine.jsonl"), "data/of-the-run.jsonl", "of/the-run"]},
    }
    (run / "config.yaml").write_text(yaml.dump(tree))
    (run / "metrics.jsonl").write_text("")
    hub.publish("org/chats", {})
    with pytest.raises(SystemExit) as left:
        main(["export", str(run), "--push", "someone/other"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"{hub.endpoint}/someone/other\n"
    assert set(hub.files) == {path.name for path in (run / "model").iterdir()} | {"README.md"}
    read, _ = card_of(hub)
    assert (read["base_model"], read["datasets"]) == ("org/base", ["org/chats"])
    with pytest.raises(SystemExit):
        main(["export", str(run), str(tmp_path / "half"), "--push", "someone/half"])
    assert "bfloat16" in (tmp_path / "half" / "config.json").read_text()
    assert hub.files["model.safetensors"] == (tmp_path / "half" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["export", "x"], "error: TARGET: is missing; name the folder to write, or give --push\n"),
        (["export", "x", "--push", "a b"], "error: --push: "),
        (["export", "x", "--push", "a/b", "--merge"], "error: --merge: needs a folder to write to; give TARGET\n"),
        (["export", "no/such", "--push", "a/b"], "error: model no/such: is not a local folder; give TARGET"),
    ],
)
def test_unpushable_folders_are_a_one_line_error(
    arguments: list[str], told: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(told)
    assert hub.files == {}


def test_unknown_hub_users_are_refused_before_the_run(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.utils._auth._get_token_from_file", lambda: None)
    with pytest.raises(
        ExportError, match=r"output\.push: you are not logged in to the hub; log in with `hf auth login`"
    ):
        train(configuration(tmp_path, output={"folder": str(tmp_path / "run"), "push": "someone/small"}))
    assert not (tmp_path / "run").exists()


def test_an_unreachable_hub_at_the_end_is_a_one_line_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"{ADDRESS}:1")
    with pytest.raises(ExportError, match=r"output\.push: could not be pushed \(.*; push again"):
        push(Path("model"), "someone/small", "output.push")


def test_a_refusing_hub_does_not_fail_the_run(hub: Hub, tmp_path: Path) -> None:
    hub.refuses = True
    with pytest.raises(ExportError, match=r"output\.push: the hub refuses someone/small"):
        train(configuration(tmp_path, output={"folder": str(tmp_path / "run"), "push": "someone/small"}))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
