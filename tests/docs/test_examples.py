"""What the documents show runs as it is printed."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from transformers import AutoModelForCausalLM

from megatrain import Engine
from megatrain.cli import app, main
from megatrain.config import describe_keys, load_config
from tests.run.test_chats import chats
from tests.run.test_recipes import TINY
from tests.tiny import batch, tiny_model

ROOT = Path(__file__).parents[2]


EXAMPLES = ("README.md", "docs/index.md", "docs/guides/python.md", "docs/guides/adapters.md", "docs/testing.md")


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", EXAMPLES)
def test_python_examples_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(document, "python")
    assert found
    for block in found:
        exec(compile(block, document, "exec"), {})


def test_checkpoint_averaging_example_gives_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    states = []
    with Engine.from_model(tiny_model(), precision="fp32", verify=False) as engine:
        for _ in range(3):
            engine.step([batch(2, 8, 0)])
            engine.save("runs/new/checkpoints").wait()
            states.append(engine.master_weights())
    (block,) = blocks("docs/guides/batch-size.md", "python")
    exec(compile(block, "batch-size.md", "exec"), {})
    found = AutoModelForCausalLM.from_pretrained("runs/new/mean").state_dict()
    assert all(torch.allclose(found[name], sum(each[name] for each in states) / 3) for name in states[0])
    assert not torch.equal(found["lm_head.weight"], states[-1]["lm_head.weight"])
    assert not {"optimizer", "manifest.json"} & {path.name for path in Path("runs/new/mean").iterdir()}


def console_commands() -> list[list[str]]:
    """What README and start page show to be typed, as words."""
    shown = [block for document in ("README.md", "docs/index.md") for block in blocks(document, "console")]
    return [shlex.split(line[2:]) for block in shown for line in block.splitlines() if line[:2] == "$ "]


def test_documented_commands_run_without_touching_existing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed, behind a finished quickstart, but for the size of the model."""
    commands = console_commands()
    assert commands
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    finished = tmp_path / "runs" / "quickstart"
    for name in ("model/config.json", "checkpoints/step-00000600/manifest.json", "metrics.jsonl", "status.json"):
        (finished / name).parent.mkdir(parents=True, exist_ok=True)
        (finished / name).write_text("{}")
    before = tree(finished)
    monkeypatch.chdir(tmp_path)
    for program, *arguments in commands:
        assert program == "megatrain"
        quick = ["model.config.num_hidden_layers=1", "model.config.hidden_size=48", "train.eval_batches=1"]
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *quick])
        assert ended.value.code == 0
    assert tree(finished) == before
    written = {path.parent.parent.name for path in tmp_path.glob("runs/*/model/config.json")} - {"quickstart"}
    assert len(written) == len(commands)


def typed() -> set[str]:
    """The command lines of `megatrain` in all documents but the log, and in the notes of configurations and images."""
    paths = [
        ROOT / "README.md",
        *(path for folder in ("docs", "docker", "configs") for path in (ROOT / folder).rglob("*.*")),
    ]
    text = "\n".join(
        path.read_text() for path in paths if path.suffix in (".md", ".yaml", ".Dockerfile") and path.stem != "log"
    )
    lines = re.findall(
        r"^[#$ ]*(?:docker run .* )?(megatrain(?:-cpu)? [a-z]+ .*)", text.replace("\\\n", " "), re.MULTILINE
    )
    return {*lines, *re.findall(r"`(megatrain [a-z]+ [^`]+)`", text)}


def test_documented_commands_have_the_options_of_today() -> None:
    command: Any = typer.main.get_command(app)
    lines = typed()
    assert len(lines) > 40
    for line in lines:
        _, verb, *words = shlex.split(line.partition(" < ")[0], comments=True)
        command.commands[verb].make_context(verb, words)  # raises for an option or argument that there is not


@pytest.mark.slow
def test_readme_goes_from_chat_data_to_a_chat_in_five_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As printed, but for a small fresh model, and on this machine."""
    (block,) = [each for each in blocks("README.md", "text") if each.startswith("megatrain init")]
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert [verb for verb, *_ in commands] == ["init", "train", "train", "generate"]
    (tmp_path / "data").mkdir()
    chats(tmp_path / "data" / "chats.jsonl")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **TINY}))
    small = {"meta-llama/Llama-3.1-8B-Instruct": ["config.json", "--from-scratch"], "--hardware": [], "rtx-4090": []}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    for words in commands:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([part for word in words for part in small.get(word, [word])])
        assert ended.value.code == 0, capfd.readouterr().err
    assert capfd.readouterr().out.endswith("\n"), "an answer, whatever it is"
    assert {"model", "metrics.jsonl", "checkpoints"} <= {path.name for path in (tmp_path / "runs" / "new").iterdir()}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_examples_write_to_separate_folders() -> None:
    examples = [load_config(path) for path in sorted((ROOT / "configs").glob("*.yaml"))]
    examples += [load_config(ROOT / words[2], words[3:]) for words in console_commands() if words[1] == "train"]
    folders = [config.output.folder for config in examples]
    assert len(set(folders)) == len(folders) > 5
    assert not any(config.output.overwrite for config in examples)


PAGES = [path for path in sorted((ROOT / "docs").glob("*/*.md")) if path.parent.name != "contributing"]
KEYS = {each.key for each in describe_keys()}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
HOLDERS = {key.rpartition(".")[0] for key in KEYS if "." in key}
"""Sections, and sections within sections."""


def keys_in(values: dict[str, Any], holder: str = "") -> set[str]:
    """The keys that YAML sets, by their whole names."""
    names = {holder + name: value for name, value in values.items()}
    inside = [keys_in(value, f"{name}.") for name, value in names.items() if name in HOLDERS]
    return {name for name in names if name not in HOLDERS}.union(*inside)


@pytest.mark.parametrize("document", ["README.md", "docs/index.md", *(str(path.relative_to(ROOT)) for path in PAGES)])
def test_documented_keys_exist(document: str) -> None:
    """In YAML blocks, and as `section.key` in the text."""
    text = (ROOT / document).read_text()
    named = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+)(?:[:=][^`\n]*)?`", text))
    named |= set(re.findall(rf"(?<![\w/])((?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+)=", text))
    for block in blocks(document, "yaml"):
        named |= keys_in(yaml.safe_load(block))
    assert not {each for each in named if not each.endswith(".yaml")} - KEYS
