"""New tokens per second through the streaming engine: with the cache, without it, and by the stock model in memory.

    python -m bench.generate [--new N] [--prompt N] [--turns N] [--json FILE]

The model has the shape of `configs/quickstart.yaml` and random weights, in bfloat16 on the cpu. Without a cache each
token costs a forward over the whole text; with it, a forward over one token and what walking the schedule costs. The
stock model is `transformers`' own `generate`, cached, with all weights in memory. The contenders take turns, and a
ratio is the median over turns of the ratio within one, so that what slows the machine for a while slows all.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from torch import Tensor

from megatrain import Engine
from megatrain.plan.host_resources import processor_name
from tests.tiny import causal_lm_from_config

QUICKSTART = Path(__file__).parents[1] / "configs/quickstart.yaml"


def compare(shape: dict[str, Any], prompt: int, new: int, turns: int) -> dict[str, Any]:
    """Seconds of each contender in each turn for `new` tokens after `prompt`, as tokens per second and ratios."""
    stock: Any = causal_lm_from_config(shape, seed=0).requires_grad_(False).eval()
    ids = torch.randint(0, shape["vocab_size"], (1, prompt), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with Engine.from_model(stock, verify=False) as engine:
        stock.to(torch.bfloat16)
        contenders: dict[str, Callable[[], Tensor]] = {
            "cached": lambda: engine.generate(ids, **options),
            "uncached": lambda: engine.generate(ids, use_cache=False, **options),
            "stock": lambda: stock.generate(ids, attention_mask=torch.ones_like(ids), **options),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(1 + turns):
            for name, contender in contenders.items():
                began = time.perf_counter()
                assert contender().shape == (1, prompt + new)
                seconds[name] += [time.perf_counter() - began] if turn else []  # the first turn warms up
    return {
        "machine": processor_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in stock.parameters()),
        "prompt": prompt,
        "new": new,
        "turns": turns,
        "tokens_per_second": {name: new / median(times) for name, times in seconds.items()},
        "cached_to_uncached": _speed(seconds["cached"], seconds["uncached"]),
        "cached_to_stock": _speed(seconds["cached"], seconds["stock"]),
    }


def _speed(ours: list[float], theirs: list[float]) -> float:
    return median(other / own for own, other in zip(ours, theirs, strict=True))


def show(result: dict[str, Any]) -> str:
    head = (
        f"{result['parameters'] / 1e6:.1f}M parameters, {result['new']} tokens after {result['prompt']}, "
        f"{result['threads']} threads, {result['turns']} turns"
    )
    lines = [f"  {name:9} {speed:8.1f} tokens/s" for name, speed in result["tokens_per_second"].items()]
    last = f"cached is {result['cached_to_uncached']:.2f}x uncached and {result['cached_to_stock']:.2f}x stock"
    return "\n".join([head, *lines, last])


def main() -> None:
    parser = argparse.ArgumentParser(description="new tokens per second, cached, uncached and stock")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens that are generated")
    parser.add_argument("--turns", type=int, default=3, help="times that each contender runs")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    shape = yaml.safe_load(QUICKSTART.read_text())["model"]["config"]
    result = compare(shape, arguments.prompt, arguments.new, arguments.turns)
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
