"""A training step against plain PyTorch in memory: tokens per second and peak memory, as ratios.

    python -m bench.step [--out FOLDER | --json FILE] [--pairs N] [--contenders NAME ...] [--shape NAME]
                         [--sequences N] [--length N] [--precision bf16 | fp32] [--no-clip] [--warm-up N]

The model is a 125M-class Llama (12 layers, 768 wide, 32k vocabulary), or has the proportions of one that is published,
the work 4 sequences of 512 tokens. *Plain* keeps float32 parameters, computes under bfloat16 autocast and updates with
the fused AdamW after clipping. Other plain contenders have transformers' gradient checkpointing (not reentrant), the
same with the C library set to keep freed memory, as our cpu device sets it, or `torch.compile`, which needs a C++
compiler. *Ours* is `megatrain.Engine` in `bf16` that keeps graphs, recomputes, or has the policy that `auto` chooses
with all memory that is free, which is told; each also with fused functions of layers (`keep, fused`). *Products alone*
repeats the matrix products and the attention that plain PyTorch calls in a step, and nothing else. No engine that calls
them is faster, so its ratio is the most that the others can reach on this machine. Unless `--contenders` names others,
four are compared: plain, both of ours with fused functions, and products alone.

With `--precision fp32` all of them compute in float32; with `--no-clip` none clips, so that our updates happen during
the backward pass and no gradient waits for the norm.

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
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PLAIN, CHECKPOINTING, AUTO = "plain", "plain PyTorch, gradient checkpointing", "auto"
KEPT, COMPILED = CHECKPOINTING + ", freed memory kept", PLAIN + ", compiled"
BASELINES = (PLAIN, CHECKPOINTING)
PRODUCTS = "products alone"
CONTENDERS = (PLAIN, "keep, fused", "recompute, fused", PRODUCTS)
"""Those that are compared unless others are named."""
OFFERED = (*CONTENDERS, CHECKPOINTING, KEPT, COMPILED, "keep", "recompute", "chosen", AUTO, "auto, fused")
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SMOLLM2_360M = {
    "vocab_size": 49152,
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SMOLLM2_135M = {
    **SMOLLM2_360M,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
SHAPES = {"125m": SHAPE, "smollm2-360m": SMOLLM2_360M, "smollm2-135m": SMOLLM2_135M}
"""The last two are those of HuggingFaceTB/SmolLM2, by their configurations."""
TINY = {
    **SHAPE,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""For tests."""
SEQUENCES, LENGTH = 4, 512


def compare(
    shape: Mapping[str, Any],
    sequences: int,
    length: int,
    pairs: int,
    warm_up: int = 2,
    contenders: Sequence[str] = CONTENDERS,
    precision: str = "bf16",
    clip: float | None = 1.0,
) -> dict[str, Any]:
    """Run all contenders in turn; medians of the ratios to the plain ones, and each one's absolute figures."""
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    processes = []
    for name in contenders:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_contend, args=(name, shape, (sequences, length), precision, clip, theirs), daemon=True
        )
        process.start()
        theirs.close()  # so that the end of the process ends what waits for its answer
        ends[name] = ours
        processes.append(process)
        _answer(ours, name)  # built: one after the other, so that construction does not compete
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm_up + pairs):
        for name in contenders:
            ends[name].send("step")
            took, loss = _answer(ends[name], name)
            losses[name].append(loss)
            if turn >= warm_up:
                seconds[name].append(took)
    told: dict[str, tuple[int, str]] = {}
    for name in contenders:
        ends[name].send("tell")
        told[name] = _answer(ends[name], name)
        ends[name].send("stop")
    for process in processes:
        process.join(timeout=30)
    found: dict[str, dict[str, Any]] = {}
    for name in contenders:
        peak, activations = told[name]
        found[name] = {
            "tokens_per_second": sequences * length / statistics.median(seconds[name]),
            "peak_nbytes": peak,
            "activations": activations,
            "first_loss": losses[name][0],
            "last_loss": losses[name][-1],
        }
        for baseline in (each for each in BASELINES if each in contenders):
            ratios = [theirs / own for theirs, own in zip(seconds[baseline], seconds[name], strict=True)]
            key = "plain" if baseline == PLAIN else "checkpointing"
            found[name][f"speed_to_{key}"] = statistics.median(ratios)
            found[name][f"memory_to_{key}"] = peak / told[baseline][0]
    from megatrain.plan.host_resources import processor_name  # not in the processes that are measured

    return {
        "machine": processor_name(),
        "precision": precision,
        "max_grad_norm": clip,
        "sequences": sequences,
        "tokens_per_step": sequences * length,
        "turns": pairs,
        "contenders": found,
    }


def _answer(pipe: Connection, name: str) -> Any:
    try:
        return pipe.recv()
    except EOFError as error:
        raise RuntimeError(f"{name} has ended, for the reason above") from error


def _contend(
    name: str, shape: Mapping[str, Any], batch: tuple[int, int], precision: str, clip: float | None, pipe: Connection
) -> None:
    """One process: build, then a step whenever asked."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import megatrain.train.engine
    from megatrain.optim import AdamW

    assert megatrain.train.engine
    AdamW().warm_up()  # start-up is over when everything has been imported and compiled
    torch.set_num_threads(2)
    torch.manual_seed(0)
    ids = torch.randint(0, shape["vocab_size"], batch)
    before = _resident("VmRSS")
    model = LlamaForCausalLM(LlamaConfig(**shape)).float().train()
    contend = _products if name == PRODUCTS else _plain if name in (*BASELINES, KEPT, COMPILED) else _ours
    step, activations = contend(name, model, ids, precision, clip)
    del model
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM: construction is not what is measured
    pipe.send("built")
    while (order := pipe.recv()) != "stop":
        if order == "tell":
            pipe.send((_resident("VmHWM") - before, activations()))
            continue
        began = time.perf_counter()
        loss = step()
        pipe.send((time.perf_counter() - began, loss))


Contender = tuple[Callable[[], float], Callable[[], str]]
"""A step, which returns its loss, and what it keeps of the forward."""


def _plain(name: str, model: Any, ids: Any, precision: str, clip: float | None) -> Contender:
    import torch

    from megatrain.device.host_memory import keep_freed

    if name == KEPT:
        keep_freed()
    if name in (CHECKPOINTING, KEPT):
        newer = getattr(model, "activation_checkpointing_enable", None)  # the old name is warned of
        (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    run = torch.compile(model) if name == COMPILED else model

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return float(loss.detach())

    return step, lambda: "keep" if name in (PLAIN, COMPILED) else "recompute"


def _products(name: str, model: Any, ids: Any, precision: str, clip: float | None) -> Contender:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: dict[str, list[Any]] = {}

    class Recorder(TorchDispatchMode):
        """Keeps the arguments of each kind of product once (function, shapes, strides), and counts its calls."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(word in func.__name__ for word in ("mm", "_dot_product_")):
                key = str((func, [(x.shape, x.stride(), x.dtype) if torch.is_tensor(x) else x for x in args], kwargs))
                calls.setdefault(key, [func, args, kwargs or {}, 0])[-1] += 1
            return func(*args, **kwargs or {})

    step, _ = _plain(PLAIN, model, ids, precision, clip)
    with Recorder():  # type: ignore[no-untyped-call]
        loss = step()

    def products() -> float:
        with torch.no_grad():
            for func, args, kwargs, count in calls.values():
                for _ in range(count):
                    func(*args, **kwargs)
        return loss

    return products, lambda: "none"


def _ours(plan: str, model: Any, ids: Any, precision: Any, clip: float | None) -> Contender:
    import megatrain

    policy: Any = AUTO
    plan, _, fuses = plan.partition(", ")
    if plan != AUTO:
        keeps: Any = {"activations": plan} if plan != "chosen" else {"activations_by_layer": (("chosen",),)}
        update: Any = "next_forward" if clip is not None else "during_backward"
        policy = megatrain.Policy(update=update, shares_memory=True, **keeps)
    optimizer = megatrain.AdamW(lr=1e-3, weight_decay=0.1)
    numerics = megatrain.Numerics(precision, kernels="fused" if fuses else "stock")
    engine = megatrain.Engine.from_model(
        model, optimizer=optimizer, max_grad_norm=clip, policy=policy, numerics=numerics
    )
    return lambda: engine.step([{"input_ids": ids, "labels": ids}]).loss, lambda: engine.policy.activations


def _resident(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"no {field} in /proc/self/status")


def show(result: dict[str, Any]) -> str:
    """The comparison as a table."""
    keys = [key for key in ("plain", "checkpointing") if f"speed_to_{key}" in next(iter(result["contenders"].values()))]
    heads = "".join(f" {f'to {key}':>17} {'memory':>7}" for key in keys)
    lines = [f"{'':<38} {'tokens/s':>9} {'peak MiB':>9}{heads}"]
    for name, figures in result["contenders"].items():
        ratios = "".join(f" {figures[f'speed_to_{key}']:>16.2f}x {figures[f'memory_to_{key}']:>6.2f}x" for key in keys)
        told = name if name != AUTO else f"{name}: {figures['activations']}"
        lines.append(
            f"{told:<38} {figures['tokens_per_second']:>9.0f} {figures['peak_nbytes'] / (1 << 20):>9.0f}{ratios}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=None, help="folder for step.json")
    parser.add_argument("--json", type=Path, default=None, help="file for the result")
    parser.add_argument("--no-clip", action="store_true", help="no clipping, so that updates need not wait for a norm")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="125m")
    parser.add_argument("--pairs", type=int, default=5, help="counted turns")
    parser.add_argument("--contenders", nargs="+", choices=OFFERED, default=CONTENDERS)
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument("--warm-up", type=int, default=2, help="turns that are not counted")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    arguments = parser.parse_args()
    work = arguments.sequences, arguments.length, arguments.pairs, arguments.warm_up
    shape, contenders, clip = SHAPES[arguments.shape], arguments.contenders, None if arguments.no_clip else 1.0
    result = {"shape": arguments.shape} | compare(
        shape, *work, contenders=contenders, precision=arguments.precision, clip=clip
    )
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "step.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
