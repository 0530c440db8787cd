"""A training step against plain PyTorch in memory: tokens per second and peak memory, as ratios.

    python -m bench.step [--out FOLDER] [--pairs N] [--tokens N]

The model is a 125M-class Llama (12 layers, 768 wide, 32k vocabulary), the work 4 sequences of 512 tokens. *Plain* keeps
float32 parameters, computes under bfloat16 autocast and updates with the fused AdamW after clipping. *Ours* is
`megatrain.Engine` in `bf16`, once keeping graphs and once recomputing.

Each contender lives in a process of its own, so that peak memory is its own: the largest resident size while training
(sampled by the kernel, `VmHWM`, reset after construction) above the resident size before the model is built. The
processes take turns, one step each, so that the machine's drift hits all alike; the ratio is formed turn by turn and
its median reported.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CONTENDERS = ("plain", "keep", "recompute")
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 1024,
}
TINY = {**SHAPE, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SEQUENCES, LENGTH = 4, 512


def compare(shape: Mapping[str, Any], sequences: int, length: int, pairs: int, warm_up: int = 2) -> dict[str, Any]:
    """Run all contenders in turn; medians of the ratios to plain, and each one's absolute figures."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # who waits for a turn must not spin while another has its own
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    processes = []
    for name in CONTENDERS:
        ours, theirs = context.Pipe()
        process = context.Process(target=_contend, args=(name, shape, sequences, length, theirs), daemon=True)
        process.start()
        ends[name] = ours
        processes.append(process)
        ours.recv()  # built: one after the other, so that construction does not compete
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    losses: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in range(warm_up + pairs):
        for name in CONTENDERS:
            ends[name].send("step")
            took, loss = ends[name].recv()
            losses[name].append(loss)
            if turn >= warm_up:
                seconds[name].append(took)
    peaks = {}
    for name in CONTENDERS:
        ends[name].send("peak")
        peaks[name] = ends[name].recv()
        ends[name].send("stop")
    for process in processes:
        process.join(timeout=30)
    return {
        "machine": platform.processor() or platform.machine(),
        "tokens_per_step": sequences * length,
        "turns": pairs,
        "contenders": {
            name: {
                "tokens_per_second": sequences * length / statistics.median(seconds[name]),
                "peak_nbytes": peaks[name],
                "speed_to_plain": statistics.median(
                    plain / own for plain, own in zip(seconds["plain"], seconds[name], strict=True)
                ),
                "memory_to_plain": peaks[name] / peaks["plain"],
                "first_loss": losses[name][0],
                "last_loss": losses[name][-1],
            }
            for name in CONTENDERS
        },
    }


def _contend(name: str, shape: Mapping[str, Any], sequences: int, length: int, pipe: Connection) -> None:
    """One process: build, then a step whenever asked."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import megatrain.train.engine
    from megatrain.optim import warm_up

    assert megatrain.train.engine
    warm_up()  # start-up is over when everything has been imported and compiled
    torch.set_num_threads(2)
    torch.manual_seed(0)
    ids = torch.randint(0, shape["vocab_size"], (sequences, length))
    before = _resident("VmRSS")
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).float().train()
    step = _plain(model, ids) if name == "plain" else _ours(name, model, ids)
    del model
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM: construction is not what is measured
    pipe.send("built")
    while (order := pipe.recv()) != "stop":
        if order == "peak":
            pipe.send(_resident("VmHWM") - before)
            continue
        began = time.perf_counter()
        loss = step()
        pipe.send((time.perf_counter() - began, loss))


def _plain(model: Any, ids: Any) -> Callable[[], float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def _ours(plan: str, model: Any, ids: Any) -> Callable[[], float]:
    import megatrain

    policy = megatrain.Policy(precision="bf16", activations=plan, shares_memory=True)  # type: ignore[arg-type]
    optimizer = megatrain.AdamW(lr=1e-3, weight_decay=0.1)
    engine = megatrain.Engine.from_model(model, precision="bf16", optimizer=optimizer, policy=policy)
    return lambda: engine.step([{"input_ids": ids, "labels": ids}]).loss


def _resident(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"no {field} in /proc/self/status")


def show(result: dict[str, Any]) -> str:
    """The comparison as a table."""
    lines = [f"{'':<10} {'tokens/s':>9} {'speed':>7} {'peak MiB':>9} {'memory':>7}"]
    for name, figures in result["contenders"].items():
        lines.append(
            f"{name:<10} {figures['tokens_per_second']:>9.0f} {figures['speed_to_plain']:>6.2f}x "
            f"{figures['peak_nbytes'] / (1 << 20):>9.0f} {figures['memory_to_plain']:>6.2f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=None, help="folder for step.json")
    parser.add_argument("--pairs", type=int, default=5, help="counted turns")
    arguments = parser.parse_args()
    result = compare(SHAPE, SEQUENCES, LENGTH, arguments.pairs)
    print(show(result))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "step.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
