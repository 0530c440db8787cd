"""The ledger: bytes per tier and use, predicted from a schedule's buffers and compared with budgets before
allocating.

Prediction and allocation read the same list (`Schedule.buffers`), so they cannot drift apart. What autograd keeps
inside a layer is not in it; the ledger says so rather than guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatrain.errors import DoesNotFit
from megatrain.schedule import Buffer, nbytes_by_use


class Ledger:
    """Bytes by (tier, use), within `budgets` (tier -> bytes; a missing tier is unlimited).

    `one_memory`: the device computes in host memory, so that its buffers count against the host's budget.
    """

    def __init__(self, budgets: Mapping[str, int] | None = None, *, one_memory: bool = False) -> None:
        self.budgets = dict(budgets or {})
        self.one_memory = one_memory
        self._buffers: dict[str, Buffer] = {}

    def require(self, buffers: Iterable[Buffer]) -> None:
        """Raise `DoesNotFit`, with the table, if these arena buffers would take a tier over its budget."""
        after = self._buffers | {each.name: each for each in buffers if each.arena and each.peer is None}
        for tier, budget in self.budgets.items():
            counted = ("host", "device") if self.one_memory and tier == "host" else (tier,)
            needed = sum(buffer.nbytes for buffer in after.values() if buffer.tier in counted)
            if needed > budget:
                raise DoesNotFit(
                    f"needs {needed:,} bytes of {tier} memory, {needed - budget:,} more than its budget of {budget:,}",
                    where="memory",
                    fix=f"it would hold {_in_words(after.values(), tier)}",
                )

    def enter(self, buffer: Buffer) -> None:
        """The buffer has been allocated."""
        self._buffers[buffer.name] = buffer

    def strike(self, name: str) -> None:
        """The buffer has been given back."""
        self._buffers.pop(name, None)

    def nbytes(self, tier: str) -> int:
        """Bytes held in a tier."""
        buffers = list(self._buffers.values())  # at once: other threads ask while buffers change
        return sum(buffer.nbytes for buffer in buffers if buffer.tier == tier)

    def table(self) -> dict[tuple[str, str], int]:
        """(tier, use) -> bytes, largest first within each tier."""
        return nbytes_by_use(list(self._buffers.values()))  # at once: other threads ask while buffers change


def _in_words(buffers: Iterable[Buffer], tier: str) -> str:
    uses = {use: nbytes for (of, use), nbytes in nbytes_by_use(buffers).items() if of == tier}
    return ", ".join(f"{use} {nbytes:,}" for use, nbytes in uses.items())
