"""What pydantic finds wrong with a configuration, in one line: the place, and the nearest key that there is.

Left out: malformed files (`load`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from megatrain.config.describe import describe_keys, section_of
from megatrain.config.keys import Config, Section
from megatrain.config.renamed_keys import OTHER_TRAINERS, RENAMED, REPLACED
from megatrain.errors import ConfigError

PLANNED = ("homes", "placement", "placements")
"""What of a policy is no key: where state lives."""

FAR = 0.8
"""How like an unknown key one of another section is to be, of 1, before it is suggested; of its own, 0.6."""


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
