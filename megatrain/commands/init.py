"""`megatrain init`: write a configuration to start from, with the plan's figures as comments.

It needs to know the model, the data and the machine; all other settings are as in `configs/`, and sizes come from the
plan. Data must be there, but its rows are only checked when training starts. The text is validated before it is
written. Another trainer's YAML can be translated instead. Existing configurations are never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.commands.plan import TOKENS_PER_STEP, adapter_keys, fewer_tokens, find_hardware, find_model, length_for
from megatrain.config import load_config
from megatrain.config.llama_factory import translate
from megatrain.config.translation import Translation
from megatrain.data.detect_kind import begins_with_text, holds_samples, require_source, source_called
from megatrain.data.files import about_tokens
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
    """The user's answers that a configuration is made from, as the options of `megatrain init` are called."""

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
    """Translate the LLaMA-Factory YAML `source` to `target`, and return lines about keys that differ.

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
    memory = [
        f"{amount(nbytes)} of {amount(hardware.capacities[tier])} {tier}"
        for tier, nbytes in plan.nbytes.items()
        if nbytes and hardware.capacities[tier]
    ]
    verb = "Trains a fresh" if answers.from_scratch else "Fine-tunes" if is_chat else "Goes on training"
    steps, length, takes = _length(answers, plan, tokens, is_chat=is_chat)
    head = [
        f"{verb} {answers.model} on {', '.join(answers.data)}. Written by `megatrain init`; change what you like.",
        "`megatrain train --keys` explains every key.",
        "",
        f"Planned for {hardware.name}:",
        f"  a step of {counted(question.tokens_per_step, 'token')} takes {duration(plan.seconds)}:"
        f" {plan.tokens_per_second:,.0f} tokens/s, in micro-batches of {counted(plan.micro_batch, 'sequence')}",
        f"  {takes}",
        f"  memory: {', '.join(memory)}",
    ]
    model: dict[str, Any] = {"config" if answers.from_scratch else "path": answers.model}
    data: dict[str, Any] = {"sources": list(answers.data), "sequence_length": question.length}
    if answers.trust_remote_code:
        model["trust_remote_code"] = True
    if answers.from_scratch:
        data |= {"tokenizer": "bytes"} | ({"chat_template": "chatml"} if is_chat else {})
    rate, decay = _optimizer_keys(answers, is_chat=is_chat)
    train = {
        **length,
        "global_batch_size": question.tokens_per_step // question.length,
        "learning_rate": rate,
        "warmup_steps": max(1, steps // 30),
        "weight_decay": decay,
        "precision": answers.precision,
        "device": "cpu" if hardware.shares_memory else "cuda:0",
        "hardware": answers.hardware,
    }
    tree = {"model": model, "data": data, "train": train, "output": {"folder": answers.folder}}
    tree |= {} if answers.adapter is None else {"adapter": adapter_keys(answers.adapter)}
    tree |= {"disk": {"folders": list(answers.disk)}} if answers.disk else {}
    return Translation(tree).text(head)


def _optimizer_keys(answers: Answers, *, is_chat: bool) -> tuple[float, float]:
    """(learning rate, weight decay)"""
    if answers.adapter is not None:
        return 2e-4, 0.0
    if answers.from_scratch:
        return 6e-4, 0.1
    return (1e-5, 0.0) if is_chat else (2e-5, 0.1)


def _length(answers: Answers, plan: Plan, tokens: int | None, *, is_chat: bool) -> tuple[int, dict[str, int], str]:
    """The approximate number of steps, the key that sets it, and a comment with the time."""
    in_step = plan.question.tokens_per_step
    passes = None if tokens is None else -(-EPOCHS * tokens // in_step)
    if answers.steps is not None or (not is_chat and (passes is None or passes > STEPS)):
        steps = answers.steps or STEPS
        takes = "take" if steps > 1 else "takes"
        if tokens is not None:
            takes = f"{'are' if steps > 1 else 'is'} about {counted_epochs(steps * in_step / tokens, 2)} and {takes}"
        return steps, {"steps": steps}, f"{counted(steps, 'step')} {takes} {duration(plan.seconds * steps)}"
    key = {"epochs": EPOCHS}
    if passes is None:
        return STEPS, key, f"how long {EPOCHS} epochs take depends on the size of the data"
    takes = f"about {counted(passes, 'step')} and take {duration(plan.seconds * passes)}"
    return passes, key, f"{EPOCHS} epochs are {takes}"


def _planned(answers: Answers, tokens: int | None) -> Plan:
    """The plan with `TOKENS_PER_STEP`, or fewer if they do not fit or the data is small."""
    options: dict[str, Any] = {"adapter": answers.adapter, "trust_remote_code": answers.trust_remote_code}
    spec = find_model(answers.model, answers.precision, **options)
    length = length_for(spec, answers.sequence_length)
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
