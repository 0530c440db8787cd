"""The default policy of an engine that is created without a plan.

The activation plan is chosen later, before the first step, when the sizes of its micro-batches are known.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.schedule.passes.workspace import backward_nbytes, forward_nbytes
from megatrain.spec import ModelSpec, Numerics, Policy, Work

MOST_OF_FREE_MEMORY = 0.5
"""Share of the free memory that kept graphs may take. Gradients and kernels need some, too."""


def choose_policy(*, shares_memory: bool, clips: bool, host_threads: int) -> Policy:
    """The default policy. Clipping by the global norm needs every gradient before the first update."""
    return Policy(
        shares_memory=shares_memory,
        update="next_forward" if clips else "during_backward",
        host_threads=host_threads,
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
