"""Planned speed of an 8B model in 24 GiB of device memory, with and without outputs of layers in host memory.

    python -m bench.offloading

Sequences of 8,192 tokens, 4 and 16 per step. "In memory" is the same step with weights, gradients and optimizer state
on the device and all graphs kept, whether that fits or not (`bench.zero3`). "Fused" is the first with fused functions
in place of the library's (`policy.kernels`), its share of that same speed in memory, and its MFU: the step's necessary
operations over what the device's peak would do in that time. "Most" is the upper bound of that MFU: fused functions
with everything in memory. The last columns say what is full: compute in the step, and the way to host memory
in the forward pass. Every number is planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from unittest.mock import patch

from bench.shapes import llama_shape
from bench.zero3 import in_memory
from megatrain.plan import Plan, Question, activation_plan, find_plan, machine
from megatrain.plan.cost import step_flops
from megatrain.schedule import Timeline
from megatrain.spec import NOT_OFFLOADED, SAVED_BY, Limits

LENGTH, SEQUENCES = 8192, (4, 16)
DEVICE_NBYTES = 24 << 30
MACHINES = ("gh200", "h100-pcie", "a100-sxm", "h200", "h100")


@dataclass(frozen=True)
class Row:
    """Tokens per second of one machine and number of sequences."""

    machine: str
    sequences: int
    planned: float
    inputs_only: float
    """Where nothing but inputs of layers is offloaded."""
    fused: float
    """Planned with fused functions; all others are without."""
    fused_mfu: float
    most_mfu: float
    """With fused functions and everything in memory."""
    in_memory: float
    kept: Mapping[str, float]
    """Kind -> share of the layers and micro-batches that keep it."""
    compute: float
    """Share of the step in which compute is busy."""
    way_out: float
    """Share of the forward pass in which something leaves."""

    def share(self, speed: float) -> float:
        """Of the speed in memory."""
        return speed / self.in_memory


def compared(name: str, sequences: int) -> Row:
    limits = Limits(device_nbytes=DEVICE_NBYTES)
    question = Question(llama_shape("8B", 32, 4096), machine(name), sequences * LENGTH, LENGTH, limits=limits)
    plan, plain = find_plan(question), inputs_only(question)
    fused = find_plan(replace(question, overrides={"kernels": "fused"}))
    speed = question.tokens_per_step / in_memory(plan).seconds
    kept = dict(sorted(plan.policy.kept_shares.items(), key=lambda item: -item[1]))
    busy = plan.timeline.utilisation("compute"), leaving(plan.timeline)
    planned, without, faster = (each.tokens_per_second for each in (plan, plain, fused))
    flops = step_flops(question.model, [(sequences, LENGTH)]) / (sequences * LENGTH)
    peak = question.hardware.peak_flops or math.inf
    mfu, most = (rate * flops / peak for rate in (faster, question.tokens_per_step / in_memory(fused).seconds))
    return Row(name, sequences, planned, without, faster, mfu, most, speed, kept, *busy)


def leaving(timeline: Timeline) -> float:
    """Share of the forward pass in which something is on its way to host memory."""
    spans = list(zip(timeline.schedule.ops, timeline.starts, timeline.ends, strict=True))
    forward = [(start, end) for op, start, end in spans if op.kind == "FORWARD"]
    begin, finish = min(start for start, _ in forward), max(end for _, end in forward)
    inside = (min(end, finish) - max(start, begin) for op, start, end in spans if op.stream == "grad")
    return sum(each for each in inside if each > 0) / (finish - begin)


def inputs_only(question: Question) -> Plan:
    """The plan where outputs stay on the device or are computed again."""
    best = activation_plan.Mixtures.best
    with patch.object(
        activation_plan.Mixtures, "best", lambda *given, **how: best(*given, **how | {"outputs_stay": True})
    ):
        plan = find_plan(question)
    assert not {keep for keep in NOT_OFFLOADED if keep in SAVED_BY} & plan.policy.kept_shares.keys()
    return plan


def main() -> None:
    heads = "planned tokens/s | sequences | outputs offloaded too | inputs only | fused | MFU | most | in memory"
    heads += " | kept | compute | way out"
    print(f"| {heads} |\n{'|---' * 11}|")
    for name in MACHINES:
        for sequences in SEQUENCES:
            row = compared(name, sequences)
            speeds = (f"{each:,.0f} ({row.share(each):.2f})" for each in (row.planned, row.inputs_only, row.fused))
            kept = ", ".join(f"{share:.0%} {kind}" for kind, share in row.kept.items())
            shares = [f"{each:.0%}" for each in (row.fused_mfu, row.most_mfu, row.compute, row.way_out)]
            cells = name, sequences, *speeds, *shares[:2], f"{row.in_memory:,.0f}", kept, *shares[2:]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
