"""Choosing a policy. A first choice by rules; the planner that replays candidates takes this room over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatrain.plan.report import memory_table
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


def nearest_that_fits(model: ModelSpec, policy: Policy, work: Work, budgets: Mapping[str, int]) -> str:
    """In words: the smallest change of the policy that keeps every tier within its budget (bytes), if there is one."""
    changes: dict[str, dict[str, Any]] = {
        "one weight slot and one gradient slot would fit": {"weight_slots": 1, "grad_slots": 1},
        "no clipping (max_grad_norm=None) would fit": {"update": "during_backward"},
        "no clipping, and one slot each, would fit": {"update": "during_backward", "weight_slots": 1, "grad_slots": 1},
    }
    for words, change in changes.items():
        table = memory_table(model, replace(policy, **change), work)
        needed = {tier: sum(n for (of, _), n in table.items() if of == tier) for tier in ("device", "host")}
        if policy.shares_memory:
            needed["host"] += needed.pop("device")
        if all(needed.get(tier, 0) <= nbytes for tier, nbytes in budgets.items()):
            return words
    return "no other policy of this model fits"
