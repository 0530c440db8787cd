"""What configuration keys are called in earlier versions of MegaTrain and in other training libraries.

The tables are in `other_trainers.yaml`. Errors for unknown keys use them, and configurations in older checkpoints are
read with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml


@cache
def tables() -> dict[str, Any]:
    """The content of `other_trainers.yaml`, whose comments explain its tables."""
    text = resources.files("megatrain.config").joinpath("other_trainers.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@cache
def keys_here() -> Mapping[str, str]:
    """Key of another trainer -> our key, `KEY=VALUE` for a switch, or a hint in words."""
    named = {theirs: ours for ours, names in tables()["known_as"].items() for theirs in names}
    return named | {name: f"{section}.{name}" for section, names in tables()["same_name"].items() for name in names}


@cache
def without_counterpart() -> Mapping[str, str]:
    """Key of another trainer -> why there is none here."""
    return {name: why for why, names in tables()["without_counterpart"].items() for name in names}


def answer(name: str) -> str:
    """What to do instead of setting another trainer's key, in words; "" for an unknown key."""
    return f"in MegaTrain it is {keys_here()[name]}" if name in keys_here() else without_counterpart().get(name, "")


def new_name(key: str) -> str:
    """The present name of an earlier version's key, with its values if they differ; "" for any other key."""
    return str(tables()["renamed"].get(key) or tables()["replaced"].get(key, ""))


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration written by an earlier version, as nested dicts, with the current names of its keys."""
    current = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    for old, new in tables()["renamed"].items():
        (section, before), name = old.split("."), new.split(".")[1]
        if before in (inside := current.get(section) or {}):
            inside.setdefault(name, inside.pop(before))
    return current
