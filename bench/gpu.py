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

from megatrain.errors import MegaTrainError

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
    with megatrain.Engine.from_model(model, "cuda:0", "bf16", megatrain.AdamW(lr=1e-4)) as engine:
        del model
        gc.collect()
        work = batches(rows, count)
        for _ in range(2):  # the second is the first with pending updates
            engine.step(work)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began, stalled = time.perf_counter(), 0.0
        for _ in range(STEPS):
            out = engine.step(work)
            stalled += out.stall_seconds
        seconds = (time.perf_counter() - began) / STEPS
        tokens = rows * count * LENGTH
        return Rung(
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


def step_flops(size: str, rows: int, count: int) -> float:
    """Necessary operations of a step, as the engine counts them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatrain.plan import step_flops as necessary
    from megatrain.spec import ModelSpec, ParamSpec, UnitSpec

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape(size)))
    groups: dict[str, list[ParamSpec]] = {"prologue": [], "epilogue": []}
    for name, parameter in model.named_parameters():
        layer = ".".join(name.split(".")[:3]) if ".layers." in name else "prologue" if "embed" in name else "epilogue"
        groups.setdefault(layer, []).append(ParamSpec(name, tuple(parameter.shape)))
    ends = [UnitSpec(kind, kind, tuple(groups.pop(kind))) for kind in ("prologue", "epilogue")]
    layers = [UnitSpec(name, "layer", tuple(params)) for name, params in groups.items()]
    spec = ModelSpec(size, (ends[0], *layers, ends[1]), LADDER[size]["hidden_size"], 32000)
    return necessary(spec, [(rows * count, LENGTH)])


def plain(size: str, rows: int, count: int) -> Rung:
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
    useful = step_flops(size, rows, count) / seconds / 1e12
    return Rung(size, "plain", tokens, tokens / seconds, useful, 0.0, peak, 0, loss)


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
                rung = (streamed if contender == "streamed" else plain)(size, rows, count)
            except (torch.OutOfMemoryError, MemoryError, MegaTrainError) as error:
                print(f"{size} {contender}: does not fit ({str(error).splitlines()[0]})", flush=True)
            else:
                rungs.append(rung)
                print(rung, flush=True)
                write(arguments.out, rungs)  # after each, so that a later failure loses nothing
            release()
    return 0


def write(folder: Path, rungs: list[Rung]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    result = {"machine": machine, "rungs": [asdict(rung) for rung in rungs]}
    (folder / "gpu.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
