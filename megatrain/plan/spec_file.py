"""Saves and reads model specifications: `megatrain plan MODEL --json FILE`, then `megatrain plan FILE`.

With a saved specification, a plan for another machine needs neither the model's files nor transformers. Files are not
trusted: missing keys and impossible values are refused by name. Equal profiles of units are stored once, in a list, and
units refer to them by index. The rest of the file is written by `report.as_content`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from megatrain.errors import MegaTrainError, ModelError
from megatrain.spec import Growth, LayerProfile, ModelSpec, ParamSpec, SideValue, UnitSpec
from megatrain.spec.layer_profile import Outputs, Peak

DEEPEST = 3
"""Deepest nesting of profiles within profiles: for a CPU, with masks, and for several rows."""
MOST = 1e15
"""Largest number of bytes or operations; more is a mistake."""


def as_fields(spec: ModelSpec) -> dict[str, Any]:
    """The specification for `json.dump`. `read_model` reads it as `content["model"]`."""
    numbers: dict[LayerProfile, int] = {}
    profiles = [numbers.setdefault(unit.profile, len(numbers)) for unit in spec.units]
    bare = replace(spec, units=tuple(replace(unit, profile=LayerProfile()) for unit in spec.units))
    fields = asdict(bare)
    for unit, number in zip(fields["units"], profiles, strict=True):
        unit["profile"] = number
    return {**fields, "profiles": [asdict(profile) for profile in numbers]}


def read_model(content: Any, where: str) -> ModelSpec:
    """The model in the content of a saved plan. Raises `ModelError` if it is not a valid specification.

    where: the file, for the error.
    """
    try:
        fields = dict(content["model"])
        profiles = [_profile(each) for each in fields.get("profiles", ())]
        units = tuple(_unit(unit, profiles) for unit in fields["units"])
        return ModelSpec(
            _line(fields["name"]),
            units,
            _count(fields["hidden_size"]),
            _count(fields["vocab_size"]),
            None if fields.get("max_positions") is None else _count(fields["max_positions"]),
            _text(fields.get("attention", "sdpa")),
            _flag(fields.get("base_apart", False)),
            tuple(_side(each, len(units)) for each in fields.get("sides", ())),
            int(_number(fields.get("encoders", 0))),
            _number(fields.get("encoded_per_value", 0.0)),
            tuple(_count(place) for place in fields.get("taps", ())),
        )
    except (KeyError, TypeError, ValueError, MegaTrainError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"is not a valid model specification: {detail:.120}",
            where=where,
            fix="write one with `megatrain plan MODEL --json FILE`",
        ) from error


def _unit(fields: Mapping[str, Any], profiles: Sequence[LayerProfile]) -> UnitSpec:
    """profiles: those of the model, to which a unit may refer by index."""
    given = fields["profile"]
    if isinstance(given, int) and not 0 <= given < len(profiles):
        raise ValueError(f"there is no profile {given}")
    params = tuple(
        ParamSpec(
            _text(each["name"]),
            tuple(_count(size) for size in each["shape"]),
            _number(each.get("active", 1.0), most=1.0),
            _flag(each.get("trainable", True)),
            _held(each.get("held", 0)),
            _flag(each.get("file_backed", False)),
        )
        for each in fields["params"]
    )
    return UnitSpec(
        _text(fields["name"]),
        fields["kind"],
        params,
        tuple(map(_text, fields.get("borrows", ()))),
        profiles[given] if isinstance(given, int) else _profile(given),
        _flag(fields.get("looks_up", False)),
    )


def _side(given: Any, units: int) -> SideValue:
    source, users = (
        int(_number(given["source"], units)),
        tuple(int(_number(each, units - 1)) for each in given["users"]),
    )
    if not users or [source, *users] != sorted({source, *users}):
        raise ValueError(f"a side value of unit {source} is read by {users}")
    most = _number(given["most_per_token"])
    return SideValue(source, users, _flag(given["differentiable"]), _growth(given["size"]), most)


def _profile(given: Any, depth: int = 0) -> LayerProfile:
    if depth > DEEPEST:
        raise ValueError("profiles are nested too deeply")
    window, graph, outputs = given["window"], given["graph_in_chunks"], given["outputs"]
    peaks = ("forward", "backward", "backward_in_chunks", "balance")
    fields: dict[str, Any] = {"attention_flops": _number(given["attention_flops"])}
    fields |= {name: _number(given.get(name, 0.0)) for name in ("value_flops", "value_flops_backward")}
    fields |= {name: _growth(given[name]) for name in ("graph", "arguments", "row_arguments")}
    fields |= {name: _peak(given[name]) for name in peaks}
    return LayerProfile(
        window=None if window is None else _count(window),
        graph_in_chunks=None if graph is None else _growth(graph),
        block=_count(given["block"]),
        chunk_numel=int(_number(given["chunk_numel"])),
        outputs=_outputs(outputs),
        others=tuple((_text(name), _profile(other, depth + 1)) for name, other in given["others"]),
        **fields,
    )


def _outputs(given: Any) -> Outputs:
    peaks, shares = ("chosen_offloaded", "attention_offloaded"), ("chosen_share", "spared_share")
    found: dict[str, Any] = {name: _peak(given[name]) for name in peaks if name in given}
    amounts = {name: each for name, each in given.items() if name not in peaks}
    found |= {name: _number(each, 1.0 if name in shares else MOST) for name, each in amounts.items()}
    return Outputs(**found)


def _peak(given: Any) -> Peak:
    device, host = (tuple(map(_growth, given[on])) for on in ("device", "host"))
    return Peak(device, host)


def _growth(given: Any) -> Growth:
    amounts: dict[str, Any] = {name: _number(each) for name, each in given.items() if name != "with_kernel"}
    return Growth(**amounts, with_kernel=_flag(given["with_kernel"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a name")
    return value


def _line(value: Any) -> str:
    if not _text(value).isprintable():
        raise ValueError(f"{value!r:.40} is not a name")
    return str(value)


def _held(value: Any) -> int:
    return -1 if value == -1 else int(_number(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.40} is neither true nor false")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def _number(value: Any, most: float = MOST) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is not a number from 0 to {most:g}")
    return float(value)
