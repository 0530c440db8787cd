"""Every key with its default and its meaning, as `megatrain train --keys` shows them. Left out: their types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from megatrain.config.keys import Config, Section


def describe_keys() -> list[tuple[str, str, str]]:
    """(dotted key, default, meaning) of every key, in order; the default of a required key is empty."""
    return list(_keys(Config, ""))


def _keys(section: type[Section], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        nested = section_of(field.annotation)
        if nested is None:
            default = "" if field.is_required() else _flow(field.default)
            yield f"{prefix}{name}", default, " ".join((field.description or "").split())
        else:
            yield from _keys(nested, f"{prefix}{name}.")


def _flow(value: object) -> str:
    """A default on one line, as YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    return str(yaml.safe_dump(plain, default_flow_style=True, width=1000)).removesuffix("\n").removesuffix("\n...")


def section_of(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None
