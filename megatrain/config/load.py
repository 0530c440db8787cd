"""Load a configuration from YAML and `key=value` overrides, and save it.

Errors that pydantic finds become one line: file and line number, what is wrong, and the nearest known key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatrain.config.described_keys import describe_keys, section_of
from megatrain.config.keys import Config, Section
from megatrain.errors import ConfigError
from megatrain.system.paths import missing, read_text, shown, usable_path, written_or_refused

# YAML -----------------------------------------------------------------------------------------------------------------
#
# Nested dicts, with the line of each key. Floats are those of YAML 1.2, because PyYAML reads `3e-4` as a string.
# Duplicate keys are errors.


class _Yaml(yaml.SafeLoader):
    """Safe YAML whose floats need no dot (`3e-4`), as in YAML 1.2."""

    close = yaml.SafeLoader.dispose


class YamlDumper(yaml.SafeDumper):
    """Quotes strings that `_Yaml` would read as floats, and escapes Unicode line breaks."""


def _represented(dumper: YamlDumper, text: str) -> yaml.Node:
    """`text` as a YAML scalar. PyYAML single-quotes Unicode line breaks, and then reads them back as spaces."""
    style = '"' if any(character in text for character in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


YamlDumper.add_representer(str, _represented)


for _kind in (_Yaml, YamlDumper):  # tried after YAML 1.1's rules, so it sees only what those leave as strings
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file as nested dicts, and the position of each dotted key as `file:line`."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"cannot be read ({reason})", where=str(path), fix="give a YAML file") from error
    places: dict[str, str] = {}
    tree = parse(text, f"{path}:{{line}}", places)
    if not isinstance(tree, dict):
        raise ConfigError("contains no keys", where=str(path), fix="write one with `megatrain init`")
    return tree, places


def parse(text: str, where: str, places: dict[str, str]) -> Any:
    """Parse `text` as YAML and note each key's position in `places`.

    where: position for messages; `{line}` in it becomes the line number. Raises `ConfigError` for malformed YAML.
    """
    try:
        with closing(_Yaml(text)) as loader:
            root = loader.get_single_node()
            if root is None:
                return None
            _note_places(root, "", where, places)
            return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where.replace("{line}", str(mark.line + 1 if mark else 1))
        marks = any(word in f"{error.context} {error.problem}" for word in ("alias", "anchor", "tag"))
        fix = "put text that begins with *, & or ! in quotes" if marks else "correct the line"
        raise ConfigError(f"malformed YAML ({error.problem})", where=place, fix=fix) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason, place = str(error).splitlines()[0], where.replace(":{line}", "")
        raise ConfigError(f"malformed YAML ({reason})", where=place, fix="correct it") from None


def _note_places(node: yaml.Node, prefix: str, where: str, places: dict[str, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        place = where.replace("{line}", str(key.start_mark.line + 1))
        name = f"{prefix}{key.value}"
        if name in seen:
            raise ConfigError(f"key {name} is given twice", where=place, fix="remove one of them")
        seen.add(name)
        places[name] = place
        _note_places(value, f"{name}.", where, places)


def put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set a nested key, replacing values on the way that are not dicts."""
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value


# The tree of keys -----------------------------------------------------------------------------------------------------
#


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the YAML file `path` and apply dotted `key=value` overrides in order; the last one for a key wins.

    Relative paths are relative to the working directory. Raises `ConfigError`, with file and line, for any mistake.
    """
    path = usable_path(path)
    tree, places = read(path)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError("is not KEY=VALUE", where=repr(shown(override)), fix="write, e.g., train.steps=100")
        place = f"override {shown(override)!r}"
        put(tree, key.split("."), text if text.startswith("*") else parse(text, place, {}))  # a glob, not an alias
        for inner in [one for one in places if one.startswith(f"{key}.")]:
            del places[inner]
        places[key] = place
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise complaint(error, path, places) from None


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration so that `load_config` returns an equal one.

    Raises `ConfigError` if the file cannot be written.
    """
    keys = yaml.dump(config.model_dump(mode="json"), Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
    text = "# Every key of this run, defaults included. `megatrain train --keys` explains them.\n" + keys
    fix = "free some space, or choose another output.folder"
    with written_or_refused(path, ConfigError, fix, makes_folder=True) as draft:
        draft.write_text(text, encoding="utf-8")


# What is wrong --------------------------------------------------------------------------------------------------------


PLANNED = ("homes", "placement", "placements")
"""Fields of `Policy` that are not configuration keys: where state lives."""

FAR = 0.8
"""Similarity, from 0 to 1, from which a key of another section is suggested for an unknown key; 0.6 in its own."""


def complaint(error: ValidationError, path: Path, places: Mapping[str, str]) -> ConfigError:
    """The first of pydantic's errors, in one line. Unknown keys come first, because they may cause other errors."""
    mistakes = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    first = mistakes[0]
    key, kind, message = _dotted(first["loc"]), first["type"], first["msg"]
    where = next((places[part] for part in _prefixes(key) if part in places), str(path))
    keys = {_dotted(one["loc"]) for one in mistakes}
    more = f" ({len(keys) - 1} more to correct)" if len(keys) > 1 else ""
    if kind == "extra_forbidden":
        return ConfigError(f"unknown key {key}{more}", where=where, fix=_nearest(key))
    if kind == "missing" and isinstance(first["loc"][-1], str):
        return ConfigError(f"{key} is missing{more}", where=where, fix=f"set it in the file or as {key}=VALUE")
    if kind == "missing":
        message = "has too few values"
    if kind in ("too_short", "too_long"):
        most = first["ctx"].get("max_length")
        message = "is empty; give at least one" if most is None else f"has too many values; give {most}"
    if kind == "model_type":
        message = "needs keys below it"
    for prefix in ("Value error, ", "Input ", "Value ", "Tuple "):
        message = message.removeprefix(prefix)
    for python, words in (("valid tuple", "list"), ("valid dictionary", "mapping of keys to values")):
        message = message.replace(python, words)
    given = (
        "" if kind in ("value_error", "missing", "too_long", "too_short") else f", not {_as_written(first['input'])}"
    )
    if isinstance(first["input"], bool) and kind in ("string_type", "literal_error"):
        given += ", as YAML reads yes, no, on and off; put a text in quotes"
    return ConfigError(f"{key}{': ' if key else ''}{message}{given}{more}", where=where)


def _as_written(value: object) -> str:
    """As YAML has it where Python has another word."""
    return next(
        (word for word, same in (("null", None), ("true", True), ("false", False)) if value is same), repr(value)
    )


def _dotted(loc: tuple[int | str, ...]) -> str:
    """The dotted key of a pydantic location, without list indices and names of union types."""
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
    """Advice for an unknown key: our name for it, or the most similar key."""
    section, _, name = key.rpartition(".")
    if instead := answer(name):
        return instead
    if section == "policy" and name in PLANNED:
        return "the planner decides where state lives, within memory.*; from Python, Policy(placements=...) does"
    known = [each.key for each in describe_keys()] + list(Config.model_fields)
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    elsewhere = {one.rpartition(".")[2]: one for one in known}
    joined = {one.replace(".", "_"): one for one in known}
    for names, cutoff in ((joined, 1.0), (siblings, 0.6), (elsewhere, FAR)):
        if nearest := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return f"did you mean {names[nearest[0]]}?"
    return f"the keys of {section or 'the file'} are {', '.join(siblings)}"


# Other names of keys --------------------------------------------------------------------------------------------------


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
