"""The default policy of an engine that is created without a plan.

The work of its steps is not known before the first of them, so only the activation plan waits for it.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.spec import ModelSpec, Numerics, Policy, Work

MOST_OF_FREE_MEMORY = 0.5
"""Share of the free memory that kept graphs may take: gradients and kernels need some too."""


def choose_policy(*, shares_memory: bool, clips: bool, host_threads: int) -> Policy:
    """The default policy. Clipping by the global norm needs every gradient before the first update."""
    return Policy(
        shares_memory=shares_memory,
        update="next_forward" if clips else "during_backward",
        host_threads=host_threads,
    )


def fit_activations(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, free_nbytes: int) -> Policy:
    """Keep every layer's graph if they fit well into `free_nbytes`, else recompute."""
    kept = 0
    for tokens in work.tokens:
        length = min(work.length or tokens, tokens)
        chunk = numerics.mlp_chunk_tokens
        kept += sum(model.units[layer].profile.kept(tokens // length, length, chunk) for layer in model.layers)
    keeps = kept <= MOST_OF_FREE_MEMORY * free_nbytes
    return replace(policy, activations="keep" if keeps else "recompute")
