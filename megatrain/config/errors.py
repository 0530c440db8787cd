"""What pydantic finds wrong with a configuration, in one line: the place, and the nearest key that there is.

Left out: malformed files (`load`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain.config.describe import describe_keys, section_of
from megatrain.config.keys import Config, Section
from megatrain.errors import ConfigError

RENAMED = {
    "data.window": "data.sequence_length",
    "data.template": "data.chat_template",
    "data.template_values": "data.chat_template_kwargs",
    "train.lr": "train.learning_rate",
    "train.lr_schedule": "train.lr_scheduler",
    "train.micro_batch": "train.micro_batch_size",
    "train.micro_batches": "train.gradient_accumulation_steps",
    "train.windows_per_step": "train.global_batch_size",
    "train.targets_per_step": "train.target_tokens_per_step",
    "policy.activation_rows": "policy.activations_by_layer",
    "policy.gates": "policy.wait_for",
    "policy.slabs": "policy.pinned_staging_slots",
    "policy.stage_slots": "policy.disk_staging_slots",
}
"""Keys of earlier versions, and what they are now."""

REPLACED = {
    "policy.compile": "policy.kernels (stock or compile)",
    "policy.transit": "policy.transfer (pinned, staged or pageable)",
}
"""Keys of earlier versions whose values were others."""


PLANNED = ("homes", "placement", "placements")
"""What of a policy is no key: where state lives."""

FAR = 0.8
"""How like an unknown key one of another section is to be, of 1, before it is suggested; of its own, 0.6."""

OTHER_TRAINERS = {
    "batch_size": "train.global_batch_size",
    "block_size": "data.sequence_length",
    "cutoff_len": "data.sequence_length",
    "dataset": "data.sources",
    "datasets": "data.sources",
    "eval_steps": "train.eval_every",
    "grad_accum_steps": "train.gradient_accumulation_steps",
    "logging_steps": "train.log_every",
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.lr_scheduler",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "max_steps": "train.steps",
    "micro_batch": "train.micro_batch_size",
    "clip_grad_norm": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "gradient_clip_val": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm",
    "model_name_or_path": "model.path",
    "output_dir": "output.folder",
    "per_device_train_batch_size": "train.micro_batch_size",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "seq_len": "data.sequence_length",
    "train_batch_size": "train.global_batch_size",
    "val_set_size": "data.validation_fraction",
    "window": "data.sequence_length",
}
"""What transformers, LLaMA-Factory, Axolotl and others call a key, wherever it stands."""


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, as nested dicts, that an earlier version wrote, by the keys of now."""
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    for old, new in RENAMED.items():
        (section, before), name = old.split("."), new.split(".")[1]
        if before in (inside := found.get(section) or {}):
            inside.setdefault(name, inside.pop(before))
    return found


def complaint(error: ValidationError, path: Path, places: Mapping[str, str]) -> ConfigError:
    """The first of what pydantic found, in one line. An unknown key comes first: other errors may follow from it."""
    found = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    first = found[0]
    key, kind, message = _dotted(first["loc"]), first["type"], first["msg"]
    where = next((places[part] for part in _prefixes(key) if part in places), str(path))
    keys = {_dotted(one["loc"]) for one in found}
    more = f" ({len(keys) - 1} more to correct)" if len(keys) > 1 else ""
    if kind == "extra_forbidden":
        return ConfigError(f"unknown key {key}{more}", where=where, fix=_nearest(key))
    if kind == "missing" and isinstance(first["loc"][-1], str):
        return ConfigError(f"{key} is missing{more}", where=where, fix=f"set it in the file or as {key}=VALUE")
    if kind == "missing":
        message = "has too few values"
    if kind in ("too_short", "too_long"):
        most = first["ctx"].get("max_length")
        message = "is empty; give one at least" if most is None else f"has too many values; give {most}"
    if kind == "model_type":
        message = "needs keys below it"
    for prefix in ("Value error, ", "Input ", "Value ", "Tuple "):
        message = message.removeprefix(prefix)
    given = "" if kind in ("value_error", "missing", "too_long", "too_short") else f", not {first['input']!r}"
    return ConfigError(f"{key}{': ' if key else ''}{message}{given}{more}", where=where)


def _dotted(loc: tuple[int | str, ...]) -> str:
    """The key, without what pydantic adds to it: positions in a list, names of the types of a union."""
    keys: list[str] = []
    section: type[Section] | None = Config
    for part in loc:
        if section is None or not isinstance(part, str):
            break
        keys.append(part)
        section = section_of(section.model_fields[part].annotation) if part in section.model_fields else None
    return ".".join(keys)


def _prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))


def _nearest(key: str) -> str:
    """What to do about an unknown key: its new name, or the nearest one of its own section, else of all."""
    if now := RENAMED.get(key) or REPLACED.get(key):
        return f"it is {now} now"
    section, _, name = key.rpartition(".")
    if name in OTHER_TRAINERS:
        return f"here it is {OTHER_TRAINERS[name]}"
    if section == "policy" and name in PLANNED:
        return "the planner decides where state lives, within memory.*; from Python, Policy(placements=...) does"
    known = [known for known, _, _ in describe_keys()] + list(Config.model_fields)
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    elsewhere = {one.rpartition(".")[2]: one for one in known}
    for names, cutoff in ((siblings, 0.6), (elsewhere, FAR)):
        if nearest := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return f"did you mean {names[nearest[0]]}?"
    return f"the keys of {section or 'the file'} are {', '.join(siblings)}"
