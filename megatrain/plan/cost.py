"""Prices of ops: floating-point operations, bytes, and from them seconds on a described machine.

The price of an op is its bytes over a bandwidth or its operations over a rate: a first-order model, which measured
times replace where there are any. Operations are the *necessary* ones: two per parameter and token in the forward and
four in the backward; what a policy recomputes costs time but is no useful work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.schedule import USED, Op
from megatrain.spec import Hardware, ModelSpec, Policy, Work


def step_flops(model: ModelSpec, sequences: Sequence[tuple[int, int]]) -> float:
    """Necessary floating-point operations of one step (forward and backward) over `sequences`: (count, length) pairs.

    Per token 6 for each parameter of a matrix product (Kaplan et al. 2020), and for causal attention
    6 x layers x hidden size x length (half of the full square). A parameter of experts counts by its active share. An
    embedding is looked up, not multiplied; a tied one counts, once, for the head.
    """
    multiplied = sum(
        param.numel * param.active
        for unit in model.units
        for param in unit.params
        if len(param.shape) > 1 and (unit.kind != "prologue" or param.name in model.units[-1].borrows)
    )
    flops = 0.0
    for count, length in sequences:
        flops += 6.0 * count * length * (multiplied + len(model.layers) * model.hidden_size * length)
    return flops


def op_seconds(model: ModelSpec, policy: Policy, work: Work, hardware: Hardware) -> Callable[[Op], float]:
    """A price for each op of a schedule of (model, policy, work) on `hardware`, in seconds."""
    active = [sum(p.numel * p.active for p in unit.params if len(p.shape) > 1) for unit in model.units]
    active[0] = 0.0  # an embedding is looked up
    if model.tied:
        active[-1] += sum(p.numel for p in model.units[0].params if p.name in model.units[-1].borrows)
    backward = 6.0 if policy.activations == "recompute" else 4.0

    def price(op: Op) -> float:
        match op.kind:
            case "FORWARD":
                return 2.0 * active[op.unit] * work.tokens[op.micro] / hardware.flops
            case "LOSS":
                return 6.0 * active[op.unit] * work.tokens[op.micro] / hardware.flops
            case "BACKWARD":
                return backward * active[op.unit] * work.tokens[op.micro] / hardware.flops
            case "FETCH":
                return op.nbytes / hardware.fetch_bandwidth
            case "GRAD":
                return op.nbytes / hardware.grad_bandwidth
            case "NORM":
                return sum(access.stop - access.start for access in op.reads) / hardware.host_bandwidth
            case "UPDATE":
                touched = [access for access in (*op.reads, *op.writes) if access.content != USED]
                return sum(access.stop - access.start for access in touched) / hardware.host_bandwidth

    return price
