"""`Limits`: what a run may take of each tier. It decides what is refused and where state lies, and no number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatrain.errors import PlanError
from megatrain.spec.fields import Bounds, check_fields

Nbytes = Annotated[int, Bounds(0, 1 << 60)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of each tier, `None` where nobody has set any: then it is what the machine has."""

    device_nbytes: Nbytes | None = None
    host_nbytes: Nbytes | None = None
    disk_nbytes: Nbytes | None = None
    """0 leaves the disk alone."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "limits.")

    def of(self, tier: str) -> int | None:
        """The bytes of a tier by its name."""
        return {"device": self.device_nbytes, "host": self.host_nbytes, "disk": self.disk_nbytes}[tier]
