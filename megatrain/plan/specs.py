"""Model specifications that were saved with a plan: `megatrain plan MODEL --json FILE`, then `megatrain plan FILE`.

So a plan for another machine needs neither the model's files nor the library that reads them. A file is taken apart
with care: what is missing or absurd in it is refused by name. It leaves out writing (`report.as_content`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

from megatrain.errors import MegaTrainError, ModelError
from megatrain.spec import LayerProfile, ModelSpec, Moment, ParamSpec, UnitSpec

MOMENTS = tuple(field.name for field in fields_of(LayerProfile) if field.name.endswith("moments"))
OTHERS = ("masked", "several", "padded", "packed")
"""Profiles within a profile."""
DEEPEST = 2
"""Of profiles: with masks, and of those for several rows."""
MOST = 1e15
"""Of bytes and operations: what is beyond is a mistake."""


def read_model(content: Any, where: str) -> ModelSpec:
    """The model of a saved plan's content. Raises `ModelError` for what is no specification."""
    try:
        fields = dict(content["model"])
        units = tuple(_unit(unit) for unit in fields["units"])
        return ModelSpec(
            _line(fields["name"]),
            units,
            _count(fields["hidden_size"]),
            _count(fields["vocab_size"]),
            None if fields.get("max_positions") is None else _count(fields["max_positions"]),
            _text(fields.get("attention", "sdpa")),
        )
    except (KeyError, TypeError, ValueError, MegaTrainError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"holds no model that can be planned for: {detail:.120}",
            where=where,
            fix="write one with `megatrain plan MODEL --json FILE`",
        ) from error


def _unit(fields: Mapping[str, Any]) -> UnitSpec:
    params = tuple(
        ParamSpec(
            _text(each["name"]),
            tuple(_count(size) for size in each["shape"]),
            _number(each.get("active", 1.0), most=1.0),
            _flag(each.get("trainable", True)),
            _held(each.get("held", 0)),
        )
        for each in fields["params"]
    )
    return UnitSpec(
        _text(fields["name"]),
        fields["kind"],
        params,
        tuple(map(_text, fields.get("borrows", ()))),
        _profile(fields.get("profile", {})),
        _flag(fields.get("looks_up", False)),
    )


def _profile(fields: Mapping[str, Any], depth: int = 0) -> LayerProfile:
    given = dict(fields)
    window = given.get("window")
    apart = ("window", "chunk_numel", *MOMENTS, *OTHERS)
    amounts = [field.name for field in fields_of(LayerProfile) if field.name not in apart]
    told: dict[str, Any] = {name: tuple(map(_moment, given.get(name, ()))) for name in MOMENTS}
    told |= {
        name: _number(given.get(name, 0.0), **({"most": 1.0} if "share" in name.split("_")[1:] else {}))
        for name in amounts
    }
    if depth < DEEPEST:
        told |= {name: _profile(given[name], depth + 1) for name in OTHERS if given.get(name)}
    return LayerProfile(
        window=None if window is None else _count(window),
        chunk_numel=_count(given["chunk_numel"]) if given.get("chunk_numel") else 0,
        **told,
    )


def _moment(fields: Mapping[str, Any]) -> Moment:
    amounts: dict[str, Any] = {
        field.name: _number(fields[field.name]) for field in fields_of(Moment) if field.name != "attends"
    }
    return Moment(**amounts, attends=_flag(fields["attends"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no name")
    return value


def _line(value: Any) -> str:
    if not _text(value).isprintable():
        raise ValueError(f"{value!r:.40} is no name")
    return str(value)


def _held(value: Any) -> int:
    return -1 if value == -1 else int(_number(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.40} is neither true nor false")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _number(value: Any, most: float = MOST) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is not a number from 0 to {most:g}")
    return float(value)
