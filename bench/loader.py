"""How many tokens a second the loader gives, beside what the step of a small model on this machine's cpu takes.

    python -m bench.loader [--window N] [--workers N] [--json FILE]

Samples are encoded chats, packed best-fit, from two files mixed by weight. The claim: 20 times what a step consumes,
with memory that does not grow.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch

from megatrain.data.encode import EncodedSample
from megatrain.data.loader import Loader
from megatrain.data.packing import PackedRows
from megatrain.data.sample_cache import SampleFile, write_samples

VOCABULARY = 320
MODEL = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 4096,
    "vocab_size": VOCABULARY,
}
"""That of the quickstart, whose steps are quick."""


def samples(path: Path, count: int, seed: int, longest: int) -> SampleFile:
    """`count` samples of lengths as chats have them, a third of the tokens trained."""
    generator = np.random.default_rng(seed)

    def each() -> Any:
        for number in range(count):
            length = int(np.clip(generator.lognormal(5.0, 0.8), 8, longest))
            trained = generator.random(length) < 1 / 3
            trained[0], trained[-1] = False, True
            yield EncodedSample(generator.integers(0, VOCABULARY, length).astype(np.int32), trained, str(number))

    return write_samples(path, each(), VOCABULARY, {})


def loader_tokens_per_second(folder: Path, window: int, workers: int, seconds: float, count: int) -> dict[str, float]:
    """Tokens a second, and by how many bytes memory has grown between the first steps and the last."""
    sources = [
        PackedRows(samples(folder / f"{seed}.bin", count, seed, window), np.arange(count), window, 0) for seed in (1, 2)
    ]
    loader = Loader(sources, micro_batch=4, micro_batches=4, seed=0, weights=[3.0, 1.0]).read_ahead(workers)
    process = psutil.Process()
    for _ in islice(loader, 5):
        pass
    before, began, tokens = process.memory_info().rss, time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        tokens += sum(batch["input_ids"].numel() for batch in next(loader))
    spent = time.perf_counter() - began
    grown = process.memory_info().rss - before
    loader.close()
    return {"tokens_per_second": tokens / spent, "grown_nbytes": grown, "efficiency": sources[0].efficiency}


def step_tokens_per_second(window: int, seconds: float) -> float:
    """Tokens a second of the engine's float32 step of the small model, the loader left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import megatrain

    fields: dict[str, Any] = dict(MODEL)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    ids = torch.randint(0, VOCABULARY, (4, window), generator=torch.Generator().manual_seed(0))
    micro_batches = [{"input_ids": ids, "labels": ids}]
    with megatrain.Engine.from_model(
        AutoModelForCausalLM.from_config(config), device="cpu", precision="fp32", optimizer=megatrain.AdamW(lr=1e-4)
    ) as engine:
        engine.step(micro_batches)
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            engine.step(micro_batches)
            steps += 1
        return steps * ids.numel() / (time.perf_counter() - began)


def measure(window: int, workers: int, seconds: float, count: int) -> dict[str, float]:
    """Both, and their ratio."""
    with TemporaryDirectory() as folder:
        found = loader_tokens_per_second(Path(folder), window, workers, seconds, count)
    step = step_tokens_per_second(window, seconds)
    return {**found, "step_tokens_per_second": step, "ratio": found["tokens_per_second"] / step}


def main() -> None:
    parser = argparse.ArgumentParser(description="the loader beside a step")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.window, arguments.workers, arguments.seconds, arguments.samples)
    print(f"loader {found['tokens_per_second']:,.0f} tokens/s, packed to {found['efficiency']:.1%}")
    print(f"step   {found['step_tokens_per_second']:,.0f} tokens/s: the loader is {found['ratio']:.0f} times as quick")
    print(f"memory grew by {found['grown_nbytes'] / 2**20:.1f} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
