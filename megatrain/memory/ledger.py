"""The ledger: bytes per tier and owner, predicted from a schedule's buffers and compared with budgets before
allocating.

Prediction and allocation read the same list (`Schedule.buffers`), so they cannot drift apart. What autograd keeps
inside a layer is not in it; the ledger says so rather than guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatrain.errors import DoesNotFit
from megatrain.schedule import Buffer, nbytes_by_owner

GIB = 1 << 30


class Ledger:
    """Bytes by (tier, owner), within `budgets` (tier -> bytes; a missing tier is unlimited)."""

    def __init__(self, budgets: Mapping[str, int] | None = None) -> None:
        self.budgets = dict(budgets or {})
        self._buffers: dict[str, Buffer] = {}

    def record(self, buffers: Iterable[Buffer]) -> None:
        """Enter arena buffers; one of a known name replaces it.

        Raises `DoesNotFit` with the table, entering nothing, when a tier would go over its budget.
        """
        after = dict(self._buffers)
        after.update({buffer.name: buffer for buffer in buffers if buffer.arena})
        for tier, budget in self.budgets.items():
            needed = sum(buffer.nbytes for buffer in after.values() if buffer.tier == tier)
            if needed > budget:
                over = needed - budget
                raise DoesNotFit(
                    f"needs {needed:,} bytes of {tier} memory, {over:,} more than its budget of {budget:,}",
                    where=f"policy.{tier}_budget_nbytes",
                    fix=f"raise it or train a smaller model; it would hold {_in_words(after.values(), tier)}",
                )
        self._buffers = after

    def forget(self) -> None:
        """Strike out everything (the memory has been given back)."""
        self._buffers.clear()

    def nbytes(self, tier: str) -> int:
        """Bytes held in a tier."""
        return sum(buffer.nbytes for buffer in self._buffers.values() if buffer.tier == tier)

    def table(self) -> dict[tuple[str, str], int]:
        """(tier, owner) -> bytes, largest first within each tier."""
        return nbytes_by_owner(self._buffers.values())


def _in_words(buffers: Iterable[Buffer], tier: str) -> str:
    owners = {owner: nbytes for (of, owner), nbytes in nbytes_by_owner(buffers).items() if of == tier}
    return ", ".join(f"{owner} {nbytes / GIB:.2f} GiB" for owner, nbytes in owners.items())
