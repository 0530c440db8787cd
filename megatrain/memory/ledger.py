"""The ledger: bytes by tier and use, computed from a schedule's buffers and checked against budgets before
allocating.

Prediction and allocation read the same list (`Schedule.buffers`), so they cannot diverge. What autograd keeps
inside a layer is not included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatrain.errors import DoesNotFit
from megatrain.formatting import amount, at_least, at_most
from megatrain.schedule import Buffer, nbytes_by_use


class Ledger:
    """Bytes by (tier, use), within `budgets` (tier -> bytes; a tier without one is unlimited).

    `one_memory`: the device computes in host memory, so its buffers count against the host's budget.
    """

    def __init__(self, budgets: Mapping[str, int] | None = None, *, one_memory: bool = False) -> None:
        self.budgets = dict(budgets or {})
        self._one_memory = one_memory
        self._buffers: dict[str, Buffer] = {}

    def require(self, buffers: Iterable[Buffer]) -> None:
        """Raise `DoesNotFit`, listing the uses, if adding these arena buffers would exceed a tier's budget."""
        after = self._buffers | {each.name: each for each in buffers if each.arena and each.peer is None}
        for tier, budget in self.budgets.items():
            counted = ("host", "device") if self._one_memory and tier == "host" else (tier,)
            needed = sum(buffer.nbytes for buffer in after.values() if buffer.tier in counted)
            if needed > budget:
                lacks = f"{at_least(needed - budget)} more than its budget of {at_most(budget)}"
                raise DoesNotFit(
                    f"needs {at_least(needed)} of {tier} memory, {lacks}",
                    where="memory",
                    fix=f"it would hold {_in_words(after.values(), tier)}",
                    needed={tier: needed},
                )

    def enter(self, buffer: Buffer) -> None:
        """Add an allocated buffer."""
        self._buffers[buffer.name] = buffer

    def strike(self, name: str) -> None:
        """Remove a freed buffer."""
        self._buffers.pop(name, None)

    def nbytes(self, tier: str) -> int:
        """Bytes held in a tier."""
        buffers = list(self._buffers.values())  # a snapshot: other threads ask while buffers change
        return sum(buffer.nbytes for buffer in buffers if buffer.tier == tier)

    @property
    def nbytes_in_host_memory(self) -> int:
        """Bytes held in host memory, those of a device that computes there included."""
        return self.nbytes("host") + (self.nbytes("device") if self._one_memory else 0)

    def table(self) -> dict[tuple[str, str], int]:
        """(tier, use) -> bytes, largest first within each tier."""
        return nbytes_by_use(list(self._buffers.values()))  # a snapshot, as above


def _in_words(buffers: Iterable[Buffer], tier: str) -> str:
    uses = {use: nbytes for (of, use), nbytes in nbytes_by_use(buffers).items() if of == tier}
    return ", ".join(f"{use} {amount(nbytes)}" for use, nbytes in uses.items())
