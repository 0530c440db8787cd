"""Measures the peak host memory of training with AdamW and Muon (or Lion), in bytes a parameter.

    python -m bench.optimizer_memory [--layers N] [--optimizers NAME ...] [--json FILE]

Each trains a fresh Llama shape in bf16 on the cpu, in a process of its own, one after the other: 1,024 wide, with a
vocabulary so small that nearly all parameters are matrices of layers, and layers so small beside the whole that what
passes through (gradients and directions of a layer, activations of 64 tokens) hardly counts. 80 layers are a billion
parameters. The bytes are the most that the process has had (`VmHWM`) less those before the model was built; the model,
loading and two steps with clipping are in them. Muon makes one Newton-Schulz iteration, which takes the memory of five.
Left out: checkpoints, and other tiers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.tiers import peak_nbytes, shape
from megatrain import AdamW, Engine, Lion, Muon, Policy
from megatrain.device.cpu import CpuDevice
from megatrain.formatting import amount
from megatrain.model import FreshSource, port_model
from megatrain.optim import Optimizer
from megatrain.train.options import SourceInUnits

VOCABULARY, TOKENS = 2048, 64
OPTIMIZERS: Mapping[str, Optimizer] = {"adamw": AdamW(), "muon": Muon(ns_steps=1), "lion": Lion()}


def measured(name: str, hidden: int, layers: int) -> dict[str, Any]:
    """Parameters, losses and memory of a process that trains with an optimizer."""
    optimizer = OPTIMIZERS[name]
    optimizer.warm_up()  # what is compiled and loaded is no memory of the model
    before = peak_nbytes()
    source = FreshSource({**shape(hidden, layers), "vocab_size": VOCABULARY}, seed=0)
    split = SourceInUnits(source, port_model(source.model, torch.bfloat16))
    policy = Policy(update="next_forward", activations="recompute", shares_memory=True)
    options: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": 1.0, "policy": policy, "verify": False}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    with Engine.from_source(split, device=CpuDevice(), **options) as engine:
        losses = [engine.step([{"input_ids": ids, "labels": ids}]).loss for _ in range(2)]
        table = engine.diagnostics.memory_table()
    params = [param for unit in engine.structure.units for param in unit.params]
    numel, peak = sum(param.numel for param in params), peak_nbytes()
    return {
        "parameters": numel,
        "share_of_matrices": sum(param.numel for param in params if param.matrices) / numel,
        "before_nbytes": before,
        "peak_nbytes": peak,
        "bytes_a_parameter": (peak - before) / numel,
        "ledger_bytes_a_parameter": sum(table.values()) / numel,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="host memory by optimizer")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adamw", "muon"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.optimizers:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results[name] = pool.apply(measured, (name, arguments.hidden, arguments.layers))
        one, first = results[name], next(iter(results.values()))
        one["to_the_first"] = one["bytes_a_parameter"] / first["bytes_a_parameter"]
        peak, base = amount(one["peak_nbytes"]), amount(one["before_nbytes"])
        print(f"{name}: {one['parameters']:,} parameters, peak {peak} over {base}", end=": ")
        print(f"{one['bytes_a_parameter']:.2f} bytes a parameter", end=" ")
        print(
            f"({one['ledger_bytes_a_parameter']:.2f} in the ledger), {one['to_the_first']:.3f} of the first", flush=True
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
