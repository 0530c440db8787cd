"""Measures what a call in phases takes beyond the same call in one piece, on this machine.

    python -m bench.phased_calls

That is its thread, each turn between the threads, and each torch function that is watched; beside the smallest op, in
which `plan.cost` prices them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.engine.resumable_call import NO_PAUSES, PausePoints, ResumableCall
from megatrain.memory import Lease
from megatrain.model.weight_reads import Uses
from megatrain.plan.cost import PHASED_CALL_KERNELS, SWITCH_KERNELS
from megatrain.schedule import Access, Op
from megatrain.schedule.contents import Weights
from megatrain.spec import ParamSpec, UnitSpec
from megatrain.spec.layout import layout_of

PHASES, FUNCTIONS, ROUNDS = 32, 256, 40


# Turns ---------------------------------------------------------------------------------------------------------------


def turns() -> list[str]:
    """Microseconds and smallest ops of what a call in phases takes, as rows of a table."""
    spent: dict[str, list[float]] = {}
    cases = {"one": (1, 0, True), "many": (PHASES + 1, 0, True), "watched": (1, FUNCTIONS, True)}
    cases |= {"nothing": (0, 0, False), "functions": (0, FUNCTIONS, False)}
    for _ in range(ROUNDS):  # in turn, so that what slows the machine for a while falls on all of them
        for name, case in cases.items():
            spent.setdefault(name, []).append(_seconds(*case))
    found = {name: median(each) for name, each in spent.items()}
    launch = (found["functions"] - found["nothing"]) / FUNCTIONS
    per_function = (found["watched"] - found["one"]) / FUNCTIONS - launch
    layer = functions_of_a_layer()
    rows = {
        "the smallest op": launch,
        "a call in phases, its thread": found["one"] - found["nothing"],
        "each turn": (found["many"] - found["one"]) / PHASES,
        "each torch function that is watched": per_function,
        f"those of a Llama layer ({layer})": layer * per_function,
    }
    lines = ["| | microseconds | smallest ops |", "|---|---|---|"]
    lines += [f"| {name} | {seconds * 1e6:.1f} | {seconds / launch:.1f} |" for name, seconds in rows.items()]
    return [*lines, f"\npriced as {PHASED_CALL_KERNELS} smallest ops a call and {SWITCH_KERNELS} a turn"]


def _seconds(phases: int, functions: int, gated: bool) -> float:
    """Of one call that runs so many of the smallest op, in so many phases, meeting a weight in each."""
    unit = UnitSpec("layer", "layer", tuple(ParamSpec(f"w{i}", (8,)) for i in range(max(1, phases))))
    layout, flat, one = layout_of(unit), torch.zeros(layout_of(unit).size), torch.zeros(1)

    def run(op: Op, lease: Lease, phases: PausePoints) -> None:
        with phases.waiting_for(flat) if gated else nullcontext():
            for field in layout.fields:
                phases.before_read(field.start, field.stop)
            for _ in range(functions):
                one.add_(1.0)

    stops = [*(4 * field.stop for field in layout.fields[:-1]), 4 * layout.size]
    reads = [(Access("slot", 0, stop, Weights(0)),) for stop in stops]
    ops = [Op("FORWARD", "compute", 0, 0, shard=i, reads=each) for i, each in enumerate(reads)]
    call = ResumableCall(ops, layout, nullcontext, run)
    begun = time.perf_counter()
    if gated:
        for op in ops:
            call.run_phase(op, {})
    else:
        run(ops[0], {}, NO_PAUSES)
    spent = time.perf_counter() - begun
    if gated:
        call.cancel()
    return spent


def functions_of_a_layer() -> int:
    """Torch functions that the forward of one Llama layer calls on tensors' elements."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64}
    counts = []
    for layers in (1, 2):
        config = AutoConfig.for_model("llama", num_hidden_layers=layers, **sizes)
        count = 0

        def counted(func: object, tensors: Sequence[Tensor]) -> None:
            nonlocal count
            count += 1

        with Uses(counted), torch.no_grad():
            AutoModelForCausalLM.from_config(config)(torch.zeros(1, 8, dtype=torch.long), use_cache=False)
        counts.append(count)
    return counts[1] - counts[0]


def main() -> int:
    argparse.ArgumentParser(description="what a call in phases takes on this machine").parse_args()
    print("\n".join(turns()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
