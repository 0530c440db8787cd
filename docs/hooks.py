"""Generates reference pages for `mkdocs build`: configuration keys, the command line and the trainer options.

mkdocs calls these functions by their names (`hooks` in mkdocs.yml). Nothing is written into `docs/`.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from megatrain.cli import app
from megatrain.config import describe_keys
from megatrain.hf.training_options import describe_options

SECTIONS = {
    "model": "Which model, and where its weights come from.",
    "data": "The training data; see the [guide to data](../guides/data.md).",
    "train": "The run; see [batch size and learning rate](../guides/batch-size.md).",
    "policy": "How the model is streamed: the planner's choice unless set; see [memory](../concepts/memory.md).",
    "numerics": "Settings that change numbers by rounding; see [numerics](../concepts/numerics.md).",
    "limits": "Limits that refuse a run; see [memory and disk](../guides/memory.md).",
    "memory": "Budgets, `24GB` or a share of what there is, `80%`; see [memory and disk](../guides/memory.md).",
    "disk": "The disk tier; see [memory and disk](../guides/memory.md).",
    "lm_eval": "Tasks of EleutherAI's harness; see [validation](../guides/validation.md).",
    "checkpoint": "See [checkpoints and resume](../guides/resume.md).",
    "output": "The files that a run writes.",
    "": "Keys of the whole run.",
}
"""Section of the configuration -> a line about it. A new section needs none."""


def on_files(files: Files, config: Any) -> Files:
    pages = {"keys": keys_page(), "cli": command_line_page(), "trainer": trainer_page()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def keys_page() -> str:
    lines = [
        "# Configuration keys",
        "",
        "Every key of a run with its type, default and meaning, as `megatrain train --keys` prints them. Set a key in",
        "the YAML file, or after the file name on the command line: `megatrain train CONFIG train.steps=100`. An",
        "unknown key is refused, and the error names the nearest one.",
    ]
    for section, keys in groupby(describe_keys(), key=lambda each: each[0].rpartition(".")[0]):
        lines += ["", f"## {section or 'resume and others'}", "", SECTIONS.get(section, ""), ""]
        lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        for key, kind, default, meaning in keys:
            shown = f"`{default}`" if default else "*required*"
            lines.append(f"| `{key}` | {_cell(kind)} | {_cell(shown)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def command_line_page() -> str:
    group: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "Each command's help, as `megatrain COMMAND --help` prints it. A user's mistake is one line on stderr and exit",
        "code 2; Ctrl-C is 130; a traceback is a bug.",
    ]
    for name, command in group.commands.items():
        context = command.make_context(name, [], parent=_context(group), resilient_parsing=True)
        lines += ["", f"## megatrain {name}", "", "```text", command.get_help(context).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def trainer_page() -> str:
    lines = [
        "# Options of the trainer",
        "",
        "How `megatrain.hf.streamed` treats each training argument; see its [guide](../guides/trainer.md). Its checks",
        "use this table. *Same as stock*: the library's own code reads the option, as in a stock run, or the engine",
        "does the same. *No effect*: the option changes no result. An option of a later library version that is not",
        "listed is refused as soon as it is set. Fields of your own subclass of the arguments are not checked.",
    ]
    for kind, rows in describe_options().items():
        lines += ["", f"## {kind}", "", "| option | here | why, and what to do instead |", "|---|---|---|"]
        lines += [f"| `{name}` | {here} | {_cell(why)} |" for name, here, why in rows]
    return "\n".join(lines) + "\n"


def _context(group: Any) -> Any:
    return group.make_context("megatrain", [], resilient_parsing=True)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
