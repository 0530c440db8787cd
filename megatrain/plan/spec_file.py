"""Saves and reads model specifications: `megatrain plan MODEL --json FILE`, then `megatrain plan FILE`.

With a saved specification, a plan for another machine needs neither the model's files nor transformers. Files are not
trusted: missing keys and impossible values are refused by name. Equal profiles of units are stored once, in a list, and
units refer to them by index. The rest of the file is written by `report.as_content`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from megatrain.errors import MegaTrainError, ModelError
from megatrain.spec import LayerProfile, ModelSpec
from megatrain.spec.validate_fields import checked


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
        profiles = checked(fields.get("profiles", ()), tuple[LayerProfile, ...], ModelError, "profiles")
        numbered = dict(enumerate(profiles))
        for unit in (units := [dict(unit) for unit in fields["units"]]):
            unit.pop("looks_up", None)  # which former versions wrote
            if type(unit["profile"]) is int:
                unit["profile"] = numbered[unit["profile"]]
            if isinstance(unit["params"], list):  # not told is not none: Muon refuses such a model
                unit["params"] = [{"products": -1, **param} for param in unit["params"]]
        model: ModelSpec = checked({**fields, "units": units}, ModelSpec, ModelError, "model")
        if not model.name.isprintable():
            raise ValueError(f"{model.name!r:.40} is not a name")
        for side in model.sides:
            if not side.users or [side.source, *side.users] != sorted({side.source, *side.users}):
                raise ValueError(f"a side value of unit {side.source} is read by {side.users}")
    except (KeyError, TypeError, ValueError, RecursionError, MegaTrainError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"is not a valid model specification: {detail:.200}",
            where=where,
            fix="write one with `megatrain plan MODEL --json FILE`",
        ) from error
    return model
