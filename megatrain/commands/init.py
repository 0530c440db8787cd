"""`megatrain init`: write a configuration to start from, with the plan's figures as comments.

It needs to know the model, the data and the machine; all other settings are as in `configs/`, and sizes come from the
plan. Data must be there, but its rows are only checked when training starts. The text is validated before it is
written. Another trainer's YAML can be translated instead. Existing configurations are never changed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.commands.plan import LENGTH, TOKENS_PER_STEP, adapter_keys, fewer_tokens, find_hardware, find_model
from megatrain.config import load_config
from megatrain.config.other_trainers import translate
from megatrain.data import about_tokens, begins_with_text, holds_samples, require_source, source_called
from megatrain.data.sample_formats import Schema
from megatrain.errors import ConfigError, DataError, DeviceError
from megatrain.formatting import amount, counted, counted_epochs, duration
from megatrain.plan import Plan, Question, find_plan, load_hardware
from megatrain.spec import Limits, Precision
from megatrain.system.paths import usable_path, written_or_refused

STEPS, EPOCHS = 1000, 3
"""Most steps over plain text, and epochs over samples or less text."""
ENOUGH_STEPS = 100
"""Fewest steps in these epochs: with little data the tokens per step are reduced."""


@dataclass(frozen=True)
class Answers:
    """The user's answers that a configuration is made from."""

    model: str
    data: tuple[str, ...]
    from_scratch: bool = False
    hardware: str | None = None
    sequence_length: int | None = None
    steps: int | None = None
    """`None`: as many as suit the data."""
    folder: str = "runs/new"
    disk: tuple[str, ...] = ()
    adapter: str | None = None
    precision: Precision = "bf16"
    trust_remote_code: bool = False


def write_recipe(answers: Answers, target: Path) -> Plan:
    """Plan for `answers`, write the configuration to `target`, and return the plan.

    Raises `ConfigError` if `target` exists, `DataError` if data is missing or unreadable, and the planner's errors,
    e.g. `DoesNotFit` if one sequence does not fit.
    """
    _refuse_existing(target)
    if not answers.data:
        raise ConfigError("is empty", where="--data", fix="name a file, a folder, or a data set on the hub")
    is_chat = _is_chat(answers)
    tokens = about_tokens(answers.data, "bytes" if answers.from_scratch else "")
    plan = _planned(answers, tokens if answers.steps is None else None)
    _write(recipe_text(answers, plan, is_chat=is_chat, tokens=tokens), target)
    return plan


def write_translation(source: Path, target: Path, hardware: str | None) -> list[str]:
    """Translate the LLaMA-Factory or Axolotl YAML `source` to `target`, and return lines about keys that differ.

    Those lines also stand at the top of the file. hardware: machine to plan for, a built-in name or a file; `None` is
    this machine. Reads no model and no data. Raises `ConfigError` if `target` exists, and as `translate` does.
    """
    _refuse_existing(target)
    translation = translate(source)
    on_cpu = _has_no_gpu() if hardware is None else load_hardware(hardware).shares_memory
    machine = {"device": "cpu" if on_cpu else "cuda:0", **({"hardware": hardware} if hardware else {})}
    translation.tree["train"] |= machine
    head = f"Translated from {source.name} by `megatrain init --from`; change what you like."
    _write(translation.text([head, "`megatrain train --keys` explains every key."]), target)
    return translation.lines()


def _has_no_gpu() -> bool:
    from megatrain.device import open_device  # imports torch: mistakes are reported first

    try:
        open_device("cuda:0").close()
    except DeviceError:
        return True
    return False


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise ConfigError("already exists", where=str(target), fix="name another file, or remove it")


def _write(text: str, target: Path) -> None:
    """Write `text` atomically, after checking that it loads."""
    with written_or_refused(target, ConfigError, "name a file in another folder", makes_folder=True) as draft:
        draft.write_text(text, encoding="utf-8")
        load_config(draft)


def recipe_text(answers: Answers, plan: Plan, *, is_chat: bool, tokens: int | None = None) -> str:
    """The YAML text. is_chat: the data are samples with answers, not plain text. tokens: their approximate number."""
    question, hardware = plan.question, plan.question.hardware
    rows = question.tokens_per_step // question.length
    totals = hardware.capacities
    memory = [
        f"{amount(nbytes)} of {amount(totals[tier])} {tier}"
        for tier, nbytes in plan.nbytes.items()
        if nbytes and totals[tier]
    ]
    verb = "Trains a fresh" if answers.from_scratch else "Fine-tunes" if is_chat else "Goes on training"
    steps, length, takes = _length(answers, plan, tokens, is_chat=is_chat)
    lines = [
        f"# {verb} {answers.model} on {', '.join(answers.data)}. Written by `megatrain init`; change what you like.",
        "# `megatrain train --keys` explains every key.",
        "#",
        f"# Planned for {hardware.name}:",
        f"#   a step of {counted(question.tokens_per_step, 'token')} takes {duration(plan.seconds)}:"
        f" {plan.tokens_per_second:,.0f} tokens/s",
        f"#   {takes}",
        f"#   memory: {', '.join(memory)}",
        f"#   each layer's activations: {plan.policy.activations}",
        "",
        "model:",
        f"  {'config' if answers.from_scratch else 'path'}: {_quoted(answers.model)}",
    ]
    if answers.trust_remote_code:
        lines.append("  trust_remote_code: true")
    lines += ["", "data:", f"  sources: {json.dumps(list(answers.data), ensure_ascii=False)}"]
    if is_chat:
        lines += [
            "  train_on: assistant  # every answer; `last` or `all`",
            "  packing: auto  # whole samples in each sequence",
        ]
    if answers.from_scratch:
        lines.append("  tokenizer: bytes  # built in; name a folder or a hub name for another")
        lines += ["  chat_template: chatml  # the built-in tokenizer has none"] if is_chat else []
    if answers.adapter is not None:
        keys = adapter_keys(answers.adapter)
        adapter = [f"  {key}: {value if key == 'type' else json.dumps(value)}" for key, value in keys.items()]
        lines[lines.index("data:") : lines.index("data:")] = ["adapter:", *adapter, ""]
    rate, decay = (
        ("2e-4", "0.0")
        if answers.adapter is not None
        else ("6e-4", "0.1")
        if answers.from_scratch
        else ("1e-5", "0.0")
        if is_chat
        else ("2e-5", "0.1")
    )
    lines += [
        f"  sequence_length: {question.length}",
        "",
        "train:",
        f"  {length}",
        f"  global_batch_size: {rows}  # {counted(question.tokens_per_step, 'token')}",
        f"  micro_batch_size: null  # the plan's: {plan.micro_batch}",
        f"  learning_rate: {rate}",
        f"  warmup_steps: {max(1, steps // 30)}",
        f"  weight_decay: {decay}",
        f"  precision: {answers.precision}",
        f"  device: {'cpu' if hardware.shares_memory else 'cuda:0'}",
        f"  hardware: {_quoted(answers.hardware) if answers.hardware else 'null  # this machine'}",
    ]
    if answers.disk:
        lines += ["", "disk:", f"  folders: {json.dumps(list(answers.disk), ensure_ascii=False)}"]
    return "\n".join([*lines, "", "output:", f"  folder: {_quoted(answers.folder)}", ""])


def _length(answers: Answers, plan: Plan, tokens: int | None, *, is_chat: bool) -> tuple[int, str, str]:
    """The approximate number of steps, the line with the key that sets it, and a comment with the time."""
    in_step = plan.question.tokens_per_step
    passes = None if tokens is None else -(-EPOCHS * tokens // in_step)
    if answers.steps is not None or (not is_chat and (passes is None or passes > STEPS)):
        steps = answers.steps or STEPS
        takes = "take" if steps > 1 else "takes"
        if tokens is not None:
            takes = f"{'are' if steps > 1 else 'is'} about {counted_epochs(steps * in_step / tokens, 2)} and {takes}"
        return steps, f"steps: {steps}", f"{counted(steps, 'step')} {takes} {duration(plan.seconds * steps)}"
    key = f"epochs: {EPOCHS}  # passes over the data; or `steps`"
    if passes is None:
        return STEPS, key, f"how long {EPOCHS} epochs take depends on the size of the data"
    takes = f"about {counted(passes, 'step')} and take {duration(plan.seconds * passes)}"
    return passes, key, f"{EPOCHS} epochs are {takes}"


def _planned(answers: Answers, tokens: int | None) -> Plan:
    """The plan with `TOKENS_PER_STEP`, or fewer if they do not fit or the data is small."""
    options: dict[str, Any] = {"adapter": answers.adapter, "trust_remote_code": answers.trust_remote_code}
    spec = find_model(answers.model, answers.precision, **options)
    most = spec.max_positions or LENGTH
    length = min(answers.sequence_length or LENGTH, most)
    hardware = find_hardware(answers.hardware, answers.precision)
    rows = max(1, TOKENS_PER_STEP // length)
    while tokens is not None and rows > 1 and EPOCHS * tokens < ENOUGH_STEPS * rows * length:
        rows //= 2
    disk = Limits(disk_nbytes=None if answers.disk else 0)
    question = Question(spec, hardware, rows * length, length, answers.precision, limits=disk, saves=True)
    return find_plan(fewer_tokens(question))


def _is_chat(answers: Answers) -> bool:
    """Whether any source holds samples rather than plain text; what may be on the hub is judged by its name.

    Raises `DataError` for a source that is missing, or a file that cannot be read.
    """
    for name in answers.data:
        require_source(name, Schema())
    for name in answers.data:
        try:
            if holds_samples(name) and not begins_with_text(source_called(name, Schema())):
                return True
        except DataError:
            if usable_path(name, error=DataError).is_file():
                raise
            return True
    return False


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
