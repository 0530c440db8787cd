"""Every configuration key in words, for `megatrain train --keys`, error messages and the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from megatrain.config.keys import Config, Section


class Described(NamedTuple):
    """A key as `--keys` lists it."""

    key: str
    """With dots: `train.steps`."""
    kind: str
    """Accepted values: `whole number of 1 or more, or null`, or the choices separated by bars."""
    default: str
    """As YAML; empty where the key is required."""
    meaning: str


def describe_keys() -> list[Described]:
    return list(_keys(Config, ""))


def _keys(section: type[Section], prefix: str) -> Iterator[Described]:
    for name, field in section.model_fields.items():
        nested = section_of(field.annotation)
        if nested is None:
            default = "" if field.is_required() else _as_yaml(field.default)
            meaning = " ".join((field.description or "").split())
            yield Described(f"{prefix}{name}", _kind(field.annotation, field.metadata), default, meaning)
        else:
            yield from _keys(nested, f"{prefix}{name}.")


KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "anything"}


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inside[0], _flat_metadata(inside[1:]))
    if origin is Literal:
        return " | ".join(map(str, inside))
    if origin in (Union, UnionType):
        words = [_kind(each) for each in inside if each is not NoneType]
        return ", or ".join([*words, *(["null"] if NoneType in inside else [])])
    if origin is tuple:
        kinds = [_kind(each) for each in inside if each is not Ellipsis]
        return f"list of: {kinds[0]}" if Ellipsis in inside else f"{len(kinds)} of: {kinds[0]}"
    if origin is dict:
        return "names and their values"
    return f"{KINDS[annotation]}{_bounds(metadata, whole=annotation is int)}"


def _flat_metadata(metadata: Sequence[Any]) -> list[Any]:
    """`metadata` with each `Field` replaced by the bounds in it."""
    return [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else [each])]


def _bounds(metadata: Sequence[Any], *, whole: bool) -> str:
    """`of 0 or more`, `above 0`, `from 0 to 1`, `from 0 to below 1`."""
    names = ("ge", "gt", "le", "lt")
    bounds = {name: getattr(rule, name) for rule in metadata for name in names if hasattr(rule, name)}
    low, high = bounds.get("ge"), bounds.get("le")
    if whole and "gt" in bounds:
        low = bounds["gt"] + 1
    least = None if low is None and "gt" not in bounds else f"above {bounds['gt']:g}" if low is None else f"{low:g}"
    most = f"{high:,.10g}" if high is not None else f"below {bounds['lt']:,.10g}" if "lt" in bounds else None
    if least is None:
        return ""
    if most is None:
        return f" {least}" if low is None else f" of {least} or more"
    return f" {least}, {most} at most" if low is None else f" from {least} to {most}"


def _as_yaml(value: object) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return str(yaml.safe_dump(plain, default_flow_style=True, width=1000)).removesuffix("\n").removesuffix("\n...")


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a key holds, also for `Section | None`; `None` for a plain value."""
    kinds = [
        kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Section)
    ]
    return kinds[0] if kinds else None
