"""One call on a GPU machine: tokens/s, useful TFLOP/s, stall share and bytes for Llama shapes of growing size.

    python -m bench.gpu [--out FOLDER] [--seconds N]

For each rung the engine streams the model from host memory; where it fits on the device, plain PyTorch trains the same
model there beside it, with the same tokens (float32 parameters, bfloat16 autocast, fused AdamW, clipping). Nothing is
printed that was not measured in this run. Ends early, with what it has, when `--seconds` are over.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LADDER: dict[str, dict[str, int]] = {
    "160M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1.5B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 26, "num_attention_heads": 16},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
LENGTH = 2048
STEPS = 3


@dataclass(frozen=True)
class Rung:
    """One contender on one size of model."""

    size: str
    contender: str
    tokens_per_step: int
    tokens_per_second: float
    useful_tflops: float
    stall_share: float
    device_peak_nbytes: int
    host_nbytes: int
    loss: float


def shape(size: str) -> dict[str, Any]:
    heads = LADDER[size]["num_attention_heads"]
    return {**LADDER[size], "num_key_value_heads": heads, "vocab_size": 32000, "max_position_embeddings": LENGTH}


def batches(rows: int, count: int) -> list[dict[str, torch.Tensor]]:
    ids = [torch.randint(0, 32000, (rows, LENGTH)) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


def build(size: str) -> PreTrainedModel:
    """A fresh float32 model in host memory, initialised on the device because that is fast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**shape(size)))
    fresh: PreTrainedModel = model.cpu().train()
    return fresh


def streamed(size: str, rows: int, count: int) -> Rung:
    import megatrain

    model = build(size)
    engine = megatrain.Engine.from_model(model, "cuda:0", "bf16", megatrain.AdamW(lr=1e-4))
    del model
    gc.collect()
    work = batches(rows, count)
    engine.step(work)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    began, stalled = time.perf_counter(), 0.0
    for _ in range(STEPS):
        out = engine.step(work)
        stalled += out.stall_seconds
    seconds = (time.perf_counter() - began) / STEPS
    tokens = sum(each["input_ids"].numel() for each in work)
    rung = Rung(
        size,
        f"megatrain ({engine.policy.activations})",
        tokens,
        tokens / seconds,
        engine.step_flops(work) / seconds / 1e12,
        stalled / STEPS / seconds,
        torch.cuda.max_memory_allocated(),
        sum(n for (tier, _), n in engine.memory_table().items() if tier == "host"),
        out.loss,
    )
    engine.close()
    return rung


def plain(size: str, rows: int, count: int, flops_per_step: float) -> Rung:
    model = torch.nn.Module.cuda(build(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    work = [{key: value.cuda() for key, value in each.items()} for each in batches(rows, count)]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for each in work:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**each, use_cache=False).loss / len(work)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    step()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        loss = step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / STEPS
    tokens = sum(each["input_ids"].numel() for each in work)
    peak = torch.cuda.max_memory_allocated()
    return Rung(size, "plain", tokens, tokens / seconds, flops_per_step / seconds / 1e12, 0.0, peak, 0, loss)


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description="the GPU ladder")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--seconds", type=float, default=420.0, help="start no rung after this long")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    began = time.monotonic()
    rungs: list[Rung] = []
    for size, (rows, count) in {"160M": (16, 2), "1.5B": (8, 4), "7B": (8, 4)}.items():
        for contender in ("streamed", "plain"):
            if time.monotonic() - began > arguments.seconds:
                print(f"{size} {contender}: no time left")
                continue
            try:
                if contender == "streamed":
                    rung = streamed(size, rows, count)
                else:
                    mine = rungs[-1]
                    rung = plain(
                        size, rows, count, mine.useful_tflops * 1e12 * mine.tokens_per_step / mine.tokens_per_second
                    )
                rungs.append(rung)
                print(rung, flush=True)
            except (torch.OutOfMemoryError, MemoryError) as error:
                print(f"{size} {contender}: does not fit ({str(error).splitlines()[0]})")
            release()
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    (arguments.out / "gpu.json").write_text(
        json.dumps({"machine": machine, "rungs": [asdict(r) for r in rungs]}, indent=2)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
