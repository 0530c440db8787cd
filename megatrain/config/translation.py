"""Translate another trainer's YAML to ours, and report every key that is not taken over as it is.

`other_trainers.yaml` says what a key is called here, or why it has no counterpart; error messages use it too. Keys that
need more (sizes, lengths, rates, validation) are taken out first, by a function per subject (`llama_factory`). For keys
that a file leaves out the other trainer's default is written, because ours may differ.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatrain.config.described_keys import describe_keys
from megatrain.config.keys import Config
from megatrain.config.load import YamlDumper, answer, keys_here, put, tables
from megatrain.errors import ConfigError

TABLES = tables()
OF_PREFERENCES = tuple(
    f"train.{name}"
    for name in (
        "beta",
        "dpo_loss",
        "dpo_label_smoothing",
        "simpo_gamma",
        "kto_desirable_weight",
        "kto_undesirable_weight",
    )
)


@dataclass
class Translation:
    """A configuration by our keys, and what became of all other keys."""

    tree: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Keys that were taken over but mean something different here, `key=value: difference`."""
    left_out: list[str] = field(default_factory=list)
    """Keys that were not taken over, `key=value: why`."""
    unknown: list[str] = field(default_factory=list)
    """Keys of unknown meaning, `key=value`."""
    unset: list[str] = field(default_factory=list)
    """Keys that are null, or switches that are off."""

    def text(self, head: Sequence[str]) -> str:
        """The configuration as YAML, below comments: the lines `head`, then `lines()`."""
        comments = [f"# {line}".rstrip() for line in (*head, *(("", *self.lines()) if self.lines() else ()))]
        sections = [{name: self.tree[name]} for name in Config.model_fields if self.tree.get(name)]
        options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 110}
        keys = [yaml.dump(section, Dumper=YamlDumper, **options).rstrip("\n") for section in sections]
        return "\n\n".join(["\n".join(comments), *keys]) + "\n"

    def lines(self) -> list[str]:
        """A report for the user on all keys that were not simply taken over, under headings."""
        parts = {"Taken over, but:": self.notes, "Left out:": self.left_out, "Of no known meaning:": self.unknown}
        report = [line for head, lines in parts.items() if lines for line in (head, *(f"  {each}" for each in lines))]
        return [*report, f"Not set there: {', '.join(self.unset)}"] if self.unset else report


class Reader:
    """Translates one YAML: holds the keys not yet translated and the result so far."""

    def __init__(self, path: Path, given: Mapping[str, Any], places: Mapping[str, str]) -> None:
        self.translation = Translation({"model": {}, "data": {}, "train": {}})
        self.path, self.places = path, places
        self.given = {name: value for name, value in given.items() if value is not None}
        self.said = dict(self.given)
        self.translation.unset = [name for name, value in given.items() if value is None]
        self.defaults = TABLES["defaults"]
        self.came_from: dict[str, str] = {}
        self._taken: set[str] = set()
        self._accounted: set[str] = set()
        for name in TABLES["other_runs"].keys() & self.given.keys():
            if self.given[name]:
                self.refuse(name, f"{TABLES['other_runs'][name]}, which is not supported", "remove it to train without")

    def take(self, name: str) -> Any:
        """Take the value of a key out of the file, or its default. Account for it with `put` or `leave` afterwards."""
        self._taken.add(name)
        return self.given.pop(name, self.defaults.get(name))

    def number(self, name: str) -> Any:
        """As `take`. Raises `ConfigError` if the value is not a finite number."""
        value = self.take(name)
        if value is not None and not is_number(value):
            self.refuse(name, "is not a finite number")
        return value

    def switch(self, name: str) -> bool:
        """As `take`, false if unset. Raises `ConfigError` for anything but true, false, 1 or 0; also for "true"."""
        value = self.take(name)
        if value not in (None, 0, 1):
            self.refuse(name, "is neither true nor false", "write it without quotes")
        return bool(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """As `take`, empty if unset. Raises `ConfigError` if the value is not a mapping."""
        value = self.take(name)
        if not isinstance(value, dict | None):
            self.refuse(name, "is not a mapping")
        return dict(value or {})

    def texts(self, name: str, value: Any) -> list[str]:
        """A list, or what a text holds between commas. Raises `ConfigError` for what is neither."""
        listed = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        names = [
            str(part).strip() for part in listed if isinstance(part, str | int | float) and not isinstance(part, bool)
        ]
        if len(names) < len(listed) or "" in names:
            self.refuse(name, "is neither a name nor a list of names", "give names, with commas between")
        return names

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set our `key`, translated from the other trainer's key or keys `names`."""
        put(self.translation.tree, key.split("."), value)
        self.came_from[key] = self.places.get(names[0], str(self.path))
        self.account(*names)

    def ours(self, key: str) -> Any:
        """The value that our `key` has been given, `None` if none."""
        section, _, name = key.partition(".")
        return self.translation.tree.get(section, {}).get(name) if name else self.translation.tree.get(section)

    @property
    def prefers(self) -> bool:
        return "objective" in self.translation.tree["train"]

    def account(self, *names: str) -> None:
        """Mark keys as translated: their meaning is in a key that was put."""
        self._accounted.update(names)

    def note(self, name: str, what: str) -> None:
        """Report a difference in the meaning of a key that was taken over, if the file has it."""
        if name in self.said:
            self.translation.notes.append(f"{self._shown(name)}: {what}")

    def leave(self, name: str, why: str) -> None:
        """Report why a key is left out, if the file has it and it was not translated."""
        self.given.pop(name, None)
        if name in self.said and name not in self._accounted:
            self._accounted.add(name)
            self.translation.left_out.append(f"{self._shown(name)}: {why}")

    def refuse(self, name: str, what: str, fix: str = "") -> NoReturn:
        """Raise `ConfigError` at the key."""
        raise ConfigError(f"{self._shown(name)} {what}", where=self.places.get(name, str(self.path)), fix=fix)

    def by_the_table(self) -> None:
        """Translate the remaining keys by the tables, and report every key that is still unaccounted for."""
        known, tree = {each.key for each in describe_keys()}, self.translation.tree
        silent = {name: value for name, value in self.defaults.items() if name not in self._taken}
        for name, value in (silent | self.given).items():
            key, is_switch, choice = keys_here().get(name, "").partition("=")
            if value is True and choice and self.ours(key) == choice:
                self.account(name)  # another key says it too
            is_free = key in known and key not in self.came_from
            is_read = "adapter" in tree if key.startswith("adapter.") else key not in OF_PREFERENCES or self.prefers
            if value is False or not is_free or not is_read:
                continue
            if not is_switch:
                self.put(key, value, name)
            elif value is True:
                self.put(key, choice, name)
        for name, value in self.said.items():
            if name in self._accounted:
                continue
            if name in self.given and not answer(name):
                self.translation.unknown.append(self._shown(name))
            elif not value:
                self.translation.unset.append(name)
            elif name not in self.given:
                self.leave(name, "has no effect with the rest of the file as it is")
            else:
                self.leave(name, answer(name))

    def _shown(self, name: str) -> str:
        text = yaml.dump(self.said.get(name), Dumper=YamlDumper, default_flow_style=True, width=10_000)
        text = text.removesuffix("\n").removesuffix("\n...")
        return f"{name}={text if len(text) <= 60 else text[:57] + '...'}"


def is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) <= sys.float_info.max
