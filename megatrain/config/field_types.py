"""Field types that several sections of a configuration share, with their validators."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, Strict

from megatrain.errors import ConfigError
from megatrain.system.paths import usable_path


def as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def checked_path(to_write: Literal["", "folder", "file"] = "") -> AfterValidator:
    """Validator for a string that is, or may be, a path. `usable_path` says what is refused."""

    def check(value: Any) -> Any:
        try:
            usable_path(value, to_write=to_write)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    return AfterValidator(check)


PathOrName = Annotated[str, checked_path()]
Folder = Annotated[str, checked_path("folder")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Betas = Annotated[tuple[Fraction, Fraction], Strict(False)]
Names = Annotated[tuple[str, ...], Strict(False), BeforeValidator(as_list)]
Sources = Annotated[tuple[PathOrName, ...], Strict(False), BeforeValidator(as_list), Field(min_length=1)]
Folders = Annotated[tuple[Folder, ...], Strict(False), BeforeValidator(as_list)]

MOST_COUNT, LEAST, MOST = 10**18, 1e-30, 1e30
"""Bounds for whole numbers, and for non-zero floats. Within them no arithmetic on a key overflows."""


def reasonable(value: Any) -> Any:
    """The value. Raises `ValueError` for a float that could overflow."""
    if isinstance(value, float) and value and not LEAST <= abs(value) <= MOST:
        raise ValueError(f"{value:g} is out of range; give 0, or a number from {LEAST:g} to {MOST:g}")
    return value


Rate = Annotated[NonNegativeFloat, AfterValidator(reasonable)]
