"""Validates dataclasses that users construct (a policy, an optimizer), or store in files, against their annotations.

`check_fields` in a `__post_init__` refuses a wrong type, or a number outside the annotation's `Bounds`, with a typed
error that names the field. Equivalent values are stored as plain Python: numpy integers and floats, lists for tuples,
and what JSON holds of a dataclass, a mapping from names of fields, for an instance. Bools, numbers and text are never
converted into each other.

Annotations may use `bool`, `int`, `float`, `str`, classes, `Literal`, `None`, unions and tuples of these, and
`Annotated` with `Bounds`. Classes themselves check rules that involve several fields.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megatrain.errors import MegaTrainError

LONGEST = 60
"""Maximum characters of a wrong value in a message."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """In `Annotated`: the range of a number, or of a tuple's length."""

    least: float
    most: float = math.inf

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"{self.least} or more"
        exponent = int(self.most).bit_length() - 1
        return f"{self.least:g} to {f'2**{exponent}' if self.most == 2.0**exponent > 1e6 else f'{self.most:g}'}"


Check = Callable[[Any], Any]
"""Returns the value to store. Raises `_Wrong`."""


class _Wrong(Exception):
    """`value` is not `expected`; `path` leads from the field to it, `[2][0]` say."""

    def __init__(self, value: object, expected: str, path: str = "") -> None:
        super().__init__()
        self.value, self.expected, self.path = value, expected, path


def check_fields(instance: object, error: type[MegaTrainError], prefix: str = "") -> None:
    """Check all fields of a dataclass instance, frozen or not, and store plain values.

    Raises `error`, naming the first wrong field after `prefix`.
    """
    name = ""
    try:
        for name, check in _checks_of(type(instance)):
            value = getattr(instance, name)
            plain = check(value)
            if plain is not value:
                object.__setattr__(instance, name, plain)
    except _Wrong as wrong:
        raise _refusal(wrong, error, prefix + name) from None


def checked(value: object, kind: Any, error: type[MegaTrainError], where: str) -> Any:
    """The value in its stored form if it matches the annotation `kind`; else raises `error`, at `where`."""
    try:
        return _check_of(kind)[0](value)
    except _Wrong as wrong:
        raise _refusal(wrong, error, where) from None


def _refusal(wrong: _Wrong, error: type[MegaTrainError], where: str) -> MegaTrainError:
    return error(f"{shown(wrong.value)} is not valid", where=where + wrong.path, fix=f"use {wrong.expected}")


def shown(value: object) -> str:
    """A value on one short line, for messages."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever a foreign object raises
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


_known: dict[type, tuple[tuple[str, Check], ...]] = {}


def _checks_of(kind: type) -> tuple[tuple[str, Check], ...]:
    """The fields of a dataclass with their checks, cached."""
    if kind not in _known:
        hints = get_type_hints(kind, include_extras=True)
        _known[kind] = tuple((field.name, _check_of(hints[field.name])[0]) for field in fields(kind))
    return _known[kind]


def _check_of(kind: Any) -> tuple[Check, str]:
    """(check of an annotation, description of its values)."""
    bounds = None
    if get_origin(kind) is Annotated:
        kind, *rules = get_args(kind)
        bounds = next((rule for rule in rules if isinstance(rule, Bounds)), None)
    origin = get_origin(kind)
    if origin is Literal:
        return _one_of(get_args(kind))
    if origin in (Union, types.UnionType):
        return _any_of([_check_of(each) for each in get_args(kind)])
    if origin is tuple:
        return _tuple_of(get_args(kind), bounds)
    if kind in (int, float):
        return _number(kind, bounds)
    return _instance_or_fields_of(kind) if isinstance(kind, type) and is_dataclass(kind) else _instance_of(kind)


def _one_of(allowed: Sequence[Any]) -> tuple[Check, str]:
    expected = _listed([str(each) for each in allowed])

    def check(value: Any) -> Any:
        if isinstance(value, str):
            for each in allowed:
                if each == value:
                    return each
        raise _Wrong(value, expected)

    return check, expected


def _any_of(options: Sequence[tuple[Check, str]]) -> tuple[Check, str]:
    expected = _listed([each for _, each in options])
    takes_none = any(called == "None" for _, called in options)

    def check(value: Any) -> Any:
        if value is None and takes_none:
            return value
        for each, _ in options:
            try:
                return each(value)
            except _Wrong as wrong:
                if wrong.path:
                    raise
        raise _Wrong(value, expected)

    return check, expected


def _tuple_of(kinds: Sequence[Any], bounds: Bounds | None) -> tuple[Check, str]:
    if kinds[-1] is Ellipsis:
        check_each, called = _check_of(kinds[0])
        several, counts = None, bounds or Bounds(0)
        # Instances of a class that validates itself need no check; numbers have bounds, and a bool is an int.
        valid = {kinds[0]} if isinstance(kinds[0], type) and kinds[0] not in (int, float) else set()
        expected = f"a tuple{f' of {bounds}' if bounds else ''}, each {called}"
    else:
        several = [_check_of(each)[0] for each in kinds]
        counts, valid = Bounds(len(kinds), len(kinds)), set()
        expected = f"{len(kinds)} values, {_listed([_check_of(each)[1] for each in kinds], 'and')}"

    def check(value: Any) -> Any:
        if not isinstance(value, tuple | list) or not counts.least <= len(value) <= counts.most:
            raise _Wrong(value, expected)
        if type(value) is tuple and {*map(type, value)} == valid:
            return value
        plain = []
        for place, each in enumerate(value):
            try:
                plain.append(several[place](each) if several else check_each(each))
            except _Wrong as wrong:
                raise _Wrong(wrong.value, wrong.expected, f"[{place}]{wrong.path}") from None
        same = type(value) is tuple and all(one is other for one, other in zip(plain, value, strict=True))
        return value if same else tuple(plain)

    return check, expected


def _number(kind: type, bounds: Bounds | None) -> tuple[Check, str]:
    """An integer, or any finite number."""
    furthest = math.inf if kind is int else sys.float_info.max
    least = max(bounds.least, -furthest) if bounds else -furthest
    most = min(bounds.most, furthest) if bounds else furthest
    named = "a whole number" if kind is int else "a finite number"
    expected = f"{named}, {bounds}" if bounds else named
    builtin: tuple[type, ...] = (int,) if kind is int else (int, float)
    alike = Integral if kind is int else Real

    def check(value: Any) -> Any:
        known = type(value) in builtin
        if not known and (isinstance(value, bool) or not isinstance(value, alike)):
            raise _Wrong(value, expected)
        try:
            plain = value if known else int(value) if isinstance(value, Integral) else float(value)
        except OverflowError:
            raise _Wrong(value, expected) from None
        if not least <= plain <= most:  # also refuses NaN
            raise _Wrong(value, expected)
        return plain

    return check, expected


def _instance_of(kind: Any) -> tuple[Check, str]:
    expected = {bool: "true or false", str: "a text", type(None): "None"}.get(kind, f"a {kind.__name__}")

    def check(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if kind is bool and type(value).__name__ == "bool" and hasattr(value, "item"):  # numpy's
            return bool(value)
        raise _Wrong(value, expected)

    return check, expected


def _instance_or_fields_of(kind: type) -> tuple[Check, str]:
    """An instance of a dataclass, or a mapping from names of its fields; other names are ignored."""
    expected = f"a {kind.__name__}"

    def check(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise _Wrong(value, expected)
        given: dict[str, Any] = {}
        for name, check_one in _checks_of(kind):
            if name not in value:
                continue
            try:
                given[name] = check_one(value[name])
            except _Wrong as wrong:
                raise _Wrong(wrong.value, wrong.expected, f".{name}{wrong.path}") from None
        needed = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
        if lacking := [name for name in needed if name not in given]:
            raise _Wrong(dict(value), f"{expected} with {', '.join(lacking)}")
        return kind(**given)

    return check, expected


def _listed(names: Sequence[str], word: str = "or") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
