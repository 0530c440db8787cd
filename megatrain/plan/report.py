"""A plan as a person reads it: bytes by tier and owner."""

from __future__ import annotations

from megatrain.schedule import build_step, nbytes_by_owner
from megatrain.spec import ModelSpec, Policy, Work


def memory_table(model: ModelSpec, policy: Policy, work: Work) -> dict[tuple[str, str], int]:
    """(tier, owner) -> bytes held for the whole run, by tier, largest first: what the ledger will record.

    Activations inside a layer are not in it: they depend on the model's code.
    """
    return nbytes_by_owner(build_step(model, policy, work).buffers.values())
