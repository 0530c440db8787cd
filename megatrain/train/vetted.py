"""Architectures that are known to be computed right, and the check of one that is met for the first time.

`short_check` is what an engine calls before it trains a model. A good answer is remembered in this process and in a
file, a failure never. What the check compares is in `train.verify`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from megatrain.errors import ModelError, typed_line
from megatrain.model.likeness import HOOKS
from megatrain.model.twin import StockConfig, StockModel, dropout_rates, shrink, twin_from, with_dropout
from megatrain.train.cases import short_cases, short_settings
from megatrain.train.verify import MakeEngine, compare, replay_finding


@dataclass(frozen=True, slots=True)
class Checked:
    """How an architecture stands: `remembered` from an earlier check, `checked` now, or `unchecked`, and `why`."""

    state: Literal["remembered", "checked", "unchecked"]
    why: str = ""


NOT_ASKED = Checked("unchecked", "the check was switched off")

CACHE = Path("~/.cache/megatrain/verified")


def short_check(model: nn.Module, make_engine: MakeEngine, cache_folder: Path | None = None) -> Checked:
    """Compare on the cpu, with padding, two micro-batches and every activation plan; raise `ModelError` on a mismatch.

    What is checked is the twin of `type(model)` and its config, whatever the size of `model`. A good answer is
    remembered in this process and as a file in `cache_folder` (`CACHE` if not given; without a usable one the check is
    made each time), for as long as the class, its source, the small config, the attention kernel, the libraries and
    MegaTrain itself are the same. A failure is never remembered. A model that is not what its class and config make
    (see `customised`) may behave in ways that its twin does not show, so nothing is remembered for it either.

    No answer is `unchecked`: the class cannot be made small, or the twin (unlike the model) cannot be streamed.
    """
    if not isinstance(model, StockModel):
        return Checked("unchecked", "not a transformers model")
    folder = Path(os.path.expanduser(cache_folder or CACHE))
    ordinary = not customised(model)
    at_sight = folder, _digest(type(model), model.config, _kernel(model))
    if ordinary and at_sight in _SEEN:
        return Checked("remembered")
    try:
        small = shrink(model.config, type(model))
    except ModelError as error:
        return Checked("unchecked", error.what)
    path = folder / f"{_digest(type(model), small, _kernel(model))}.json"
    remembered = ordinary and os.path.isfile(path)  # false where its folder may not be entered
    answer = Checked("remembered") if remembered else _check(model, small, make_engine)
    if answer.state == "unchecked":
        return answer
    if not ordinary:
        return Checked("unchecked", "its class is computed right; hooks and code of this model's own are not compared")
    _SEEN.add(at_sight)
    _remember(path, type(model))
    return answer


def _check(model: StockModel, small: StockConfig, make_engine: MakeEngine) -> Checked:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # whatever the caller's default device is
        return _compared(model, small, make_engine)


def _compared(model: StockModel, small: StockConfig, make_engine: MakeEngine) -> Checked:
    kind, kernel = type(model), _kernel(model)
    twin = twin_from(with_dropout(small, 0.0), 0, kernel, kind)
    try:
        report = compare(twin, make_engine, short_cases(twin), short_settings(), enough=1)
        if any(dropout_rates(small)):
            moving = twin_from(small, 0, kernel, kind)
            replayed = replay_finding(moving, make_engine, short_cases(moving)[-1], short_settings())
            report = replace(report, findings=(*report.findings, replayed))
    except ModelError as refusal:
        return Checked("unchecked", refusal.what)
    except Exception as error:  # of the model's own code, in the engine's hands
        what = f"a small model of its kind fails in the engine: {typed_line(error)}"
        raise ModelError(what, where=f"model {kind.__name__}", fix="please report it") from error
    report.raise_if_wrong()
    return Checked("checked")


_SEEN: set[tuple[Path, str]] = set()
"""Cache folder and digest of what this process knows to be right."""


def customised(model: nn.Module) -> bool:
    """Whether a model may act otherwise than its class and config say.

    That is so with hooks, a `forward` of an instance's own or put into a class from outside, or modules that are
    neither torch's nor of the package that the model's class is from (adapters, replaced layers).
    """
    home = type(model).__module__.partition(".")[0]
    for module in model.modules():
        if "forward" in vars(module) or any(vars(module)[hooks] for hooks in HOOKS):
            return True
        for part in (type(module), type(module).forward):
            if part.__module__.partition(".")[0] not in ("torch", "transformers", home):
                return True
    return False


def _kernel(model: StockModel) -> str:
    return str(model.config._attn_implementation)


def _digest(kind: type, config: StockConfig, kernel: str) -> str:
    """SHA-256 of all that an answer depends on."""
    parts = [
        f"{kind.__module__}.{kind.__qualname__}",
        json.dumps(config.to_dict(), sort_keys=True, default=str),
        kernel,
        str(config._experts_implementation),
        *(version(library) for library in ("transformers", "torch")),
        _source_of(kind),
        _own_sources(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _source_of(kind: type) -> str:
    """Digest of the file that defines a class; empty where there is none (a class made in a session)."""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


@cache
def _own_sources() -> str:
    """Digest of MegaTrain's own source files."""
    package = Path(__file__).resolve().parent.parent
    every = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        every.update(path.read_bytes())
    return every.hexdigest()


def _remember(path: Path, kind: type) -> None:
    """Write an answer down, whole or not at all; a folder that cannot be written to only means another check."""
    told = {"model": kind.__qualname__, "transformers": version("transformers"), "torch": version("torch")}
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(told))
        draft.replace(path)
    except OSError:
        return
