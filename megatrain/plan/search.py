"""Choosing a policy. A first choice by rules; the planner that replays candidates takes this room over."""

from __future__ import annotations

from dataclasses import replace

from megatrain.spec import ModelSpec, Policy, Precision, Work

GRAPH_NBYTES_PER_HIDDEN = {"bf16": 40, "fp32": 72}
"""Rough bytes that autograd keeps per token, layer and unit of hidden size: about 34 in half precision for a
transformer with a 4x MLP (Korthikanti et al. 2022, without the attention matrix), rounded up."""

MOST_OF_FREE_MEMORY = 0.5
"""Share of the free memory that kept graphs may take: the estimate is rough, and running out ends the run."""


def choose_policy(precision: Precision, *, shares_memory: bool, clips: bool, host_threads: int) -> Policy:
    """The default policy. Clipping by the global norm needs every gradient before the first update."""
    return Policy(
        precision=precision,
        shares_memory=shares_memory,
        update="next_forward" if clips else "during_backward",
        host_threads=host_threads,
    )


def fit_activations(model: ModelSpec, policy: Policy, work: Work, free_nbytes: int) -> Policy:
    """Keep every layer's graph if a rough estimate of them fits well into `free_nbytes`, else recompute."""
    per_token = GRAPH_NBYTES_PER_HIDDEN[policy.precision] * model.hidden_size * len(model.layers)
    keeps = per_token * sum(work.tokens) <= MOST_OF_FREE_MEMORY * free_nbytes
    return replace(policy, activations="keep" if keeps else "recompute")
