"""Chooses the policy of an engine that is created without a plan, and what to change in it to fit into memory.

The activation plan is chosen later, before the first step, when the sizes of its micro-batches are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatrain.plan.estimates import memory_table
from megatrain.schedule import build_step
from megatrain.schedule.passes.pinned_staging import pinned_nbytes
from megatrain.schedule.passes.workspace import backward_nbytes, forward_nbytes
from megatrain.spec import ModelSpec, Numerics, Policy, Work

MOST_OF_FREE_MEMORY = 0.5
"""Share of the free memory that kept graphs may take. Gradients and kernels need some, too."""

TIERS = ("device", "host", "disk")


def choose_policy(*, shares_memory: bool, clips: bool, host_threads: int) -> Policy:
    """The default policy. Clipping by the global norm needs every gradient before the first update."""
    return Policy(
        shares_memory=shares_memory, update="next_forward" if clips else "during_backward", host_threads=host_threads
    )


def images_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work) -> int:
    """Bytes that the prologue takes for the images of a micro-batch; 0 without images, or where they are unmeasured."""
    if not work.values_per_token or model.units[0].profile.of("images") is model.units[0].profile:
        return 0
    needed = forward_nbytes if model.lowest_trained else backward_nbytes
    return max(needed(model, numerics, policy, work, 0, tokens) for tokens in work.tokens)


def fit_activations(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, free_nbytes: int) -> Policy:
    """The policy that keeps the graphs of all layers if they take at most `MOST_OF_FREE_MEMORY`, else recomputes."""
    kept = images_nbytes(model, numerics, policy, work)
    for tokens in work.tokens:
        length = min(work.length or tokens, tokens)
        chunk = numerics.mlp_chunk_tokens
        kept += sum(model.units[layer].profile.kept(tokens // length, length, chunk) for layer in model.layers)
    keeps = kept <= MOST_OF_FREE_MEMORY * free_nbytes
    return replace(policy, activations="keep" if keeps else "recompute")


def fit_lock_limit(model: ModelSpec, numerics: Numerics, policy: Policy, limit: int) -> Policy:
    """The policy, changed to pin at most `limit` bytes.

    Of these, the first that does: as it is; without streamed updates; nothing pinned.
    """
    if policy.shares_memory:
        return policy
    unstreamed = replace(policy, streamed_updates=0.0)
    for candidate in (policy, unstreamed):
        schedule = build_step(model, numerics, candidate, Work.of_two_rounds(candidate.micro_batches_per_round))
        if pinned_nbytes(schedule.buffers.values(), candidate.transfer) <= limit:
            return candidate
    return replace(unstreamed, transfer="pageable")


def nearest_that_fits(
    model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, budgets: Mapping[str, int]
) -> str:
    """The smallest change of the policy that keeps every tier within its budget (bytes), in words.

    Only what is allocated for the whole run is compared, and a step takes more than that. So a change must take less
    than the policy that failed, and no more of any tier, but host memory instead of the disk.
    """
    tried: dict[str, dict[str, Any]] = {
        "all state in host memory would fit": {"placements": ()},
        "one weight slot and one gradient slot would fit": {"weight_slots": 1, "grad_slots": 1},
        "no clipping (max_grad_norm=None) would fit": {"update": "during_backward"},
        "no clipping, and one slot each, would fit": {"update": "during_backward", "weight_slots": 1, "grad_slots": 1},
    }
    failed = _needed(model, numerics, policy, work)
    for words, change in tried.items():
        needed = _needed(model, numerics, replace(policy, **change), work)
        takes_more = any(
            nbytes > failed[tier] for tier, nbytes in needed.items() if tier != "host" or "placements" not in change
        )
        if needed != failed and not takes_more and all(needed.get(tier, 0) <= most for tier, most in budgets.items()):
            return words
    return "no other policy of this model fits"


def _needed(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work) -> dict[str, int]:
    """Tier -> bytes that are allocated for the whole run."""
    table = memory_table(model, numerics, policy, work)
    needed = {tier: sum(n for (of, _), n in table.items() if of == tier) for tier in TIERS}
    if policy.shares_memory:
        needed["host"] += needed.pop("device")
    return needed
