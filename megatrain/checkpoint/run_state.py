"""`training.json`: a run's state other than tensors; values come back exactly as they were given.

Plain, readable JSON. What JSON lacks becomes a mapping with a single key that starts with a dollar: bytes as
base64, non-finite numbers by name. Values that would not come back unchanged (tuples, say) are refused, naming
their place. What the values mean is up to the caller.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.errors import CheckpointError, DamagedCheckpoint
from megatrain.system.paths import read_json

TRAINING = "training.json"
FORMAT = 1


def write_training(folder: Path, training: Mapping[str, Any]) -> None:
    """Write `training`: scalars, strings, bytes, and lists and dicts of these with string keys.

    Raises `CheckpointError` for any other value, naming where it is.
    """
    fields = {"format": FORMAT, "training": _plain(dict(training), "training")}
    text = json.dumps(fields, indent=1, allow_nan=False)
    (folder / TRAINING).write_text(f"{text}\n")


def read_training(folder: Path) -> dict[str, Any]:
    """Read what `write_training` was given. Raises `DamagedCheckpoint` if the file is missing, damaged or newer."""
    try:
        fields = read_json(folder / TRAINING)
        if fields["format"] > FORMAT:
            what = f"{TRAINING} has format {fields['format']}, but this MegaTrain reads up to {FORMAT}"
            raise DamagedCheckpoint(what, where=str(folder), fix="use the version that wrote it")
        return {key: _given(value) for key, value in fields["training"].items()}
    except OSError as error:
        what = f"{TRAINING} cannot be read ({error.strerror or error})"
        raise DamagedCheckpoint(what, where=str(folder)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{TRAINING} is damaged", where=str(folder)) from error


def _plain(value: Any, place: str) -> Any:
    """Convert a value to JSON."""
    match value:
        case None | bool() | str():
            return value
        case int() if type(value) is int:
            return value
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case list():
            return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
        case dict():
            for key in value:
                if not isinstance(key, str) or key.startswith("$"):
                    raise CheckpointError(f"the key {key!r} cannot be written", where=f"{TRAINING}, {place}")
            return {key: _plain(item, f"{place}.{key}") for key, item in value.items()}
    raise CheckpointError(f"a {type(value).__name__} cannot be written", where=f"{TRAINING}, {place}")


def _given(value: Any) -> Any:
    """Reverse `_plain`."""
    match value:
        case {"$float": str(name)}:
            return float(name)
        case {"$bytes": str(text)}:
            return base64.b64decode(text, validate=True)
        case dict():
            return {key: _given(item) for key, item in value.items()}
        case list():
            return [_given(item) for item in value]
    return value
