"""`Limits`: how much a run may use of each tier. Affects what is refused and where state is placed, but no numbers.

Amounts are parsed as people write them: `24GB`, `1.5 TB`, `80GiB`, or a share of what exists, `80%` (the reverse
is `formatting.amount`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from megatrain.errors import ConfigError, PlanError
from megatrain.spec.validate_fields import Bounds, check_fields, shown

Nbytes = Annotated[int, Bounds(0, 1 << 60)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of each tier; `None` means what the machine has."""

    device_nbytes: Nbytes | None = None
    host_nbytes: Nbytes | None = None
    disk_nbytes: Nbytes | None = None
    """0 disables the disk."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "limits.")

    def of(self, tier: str) -> int | None:
        """The limit of a tier by its name."""
        return {"device": self.device_nbytes, "host": self.host_nbytes, "disk": self.disk_nbytes}[tier]


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    f"{letter}I": 1 << 10 * power for power, letter in enumerate("KMGTP", 1)
}
_LEAST, _MOST = 10**6, 10**18


def parse_nbytes(text: str, where: str, total: int | None = None) -> int:
    """Parse an amount into bytes; percentages are of `total` bytes. Raises `ConfigError` for anything else."""
    written = text.strip().upper()
    if total is not None and (share := re.fullmatch(r"(\d+(?:\.\d*)?)\s*%", written)) and 0 < float(share[1]) <= 100:
        return int(float(share[1]) / 100 * total)
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGTP]?I?)B?", written)
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        share_too = "" if total is None else " or 80%"
        raise ConfigError(
            f"{shown(text)} is not an amount of memory", where=where, fix=f"give one such as 24GB{share_too} or 1.5TB"
        )
    nbytes = Decimal(match[1]) * unit
    if not _LEAST <= nbytes <= _MOST:
        degree, fix = ("little", "give 1MB or more") if nbytes < _LEAST else ("much", "give less than 1000PB")
        raise ConfigError(f"{shown(text)} is too {degree} memory", where=where, fix=fix)
    return int(nbytes)
