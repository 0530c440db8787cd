"""What a policy costs, on paper. Imports no torch, so that a laptop can plan for a machine it has never seen."""

from megatrain.plan.cost import op_seconds, step_flops
from megatrain.plan.hardware import available_host_nbytes, available_threads
from megatrain.plan.report import memory_table
from megatrain.plan.search import choose_policy, fit_activations, nearest_that_fits

__all__ = [
    "available_host_nbytes",
    "available_threads",
    "choose_policy",
    "fit_activations",
    "memory_table",
    "nearest_that_fits",
    "op_seconds",
    "step_flops",
]
