"""Measures the host memory of LoRA: base weights read from the model's own files, against held in host memory.

    python -m bench.adapter_memory [--in-memory] [--hidden N --layers N] [--tokens N] [--folder FOLDER] [--json FILE]

Random weights of a Llama shape are written to `--folder` in bfloat16, once, 5.9 GB by default, and go when it ends
(`--keep` leaves them). A LoRA of rank 8 on the query and value projections trains over them on the cpu. What it holds
is the process's anonymous memory, at its peak and between steps, less what there was before the engine: activations of
so few tokens are megabytes, and what is mapped of files or in the page cache is nobody's. The floor of a step is the
larger of compute (what its ops took on the compute stream) and of reading the step's bytes alone, the same way,
measured right behind it. Left out: a GPU, where weights pass through by shard and not by layer.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from bench.tiers import VOCABULARY, shape
from megatrain import AdamW, Engine, Policy
from megatrain.config import let_idle_threads_sleep
from megatrain.device.cpu import CpuDevice
from megatrain.memory.model_files import ModelFiles
from megatrain.model import FreshSource
from megatrain.plan.report import amount, duration
from megatrain.spec import Placement
from megatrain.spec.layout import layout_of

STEPS = 2
"""Measured ones, after one that warms up."""
SAMPLED_EVERY = 0.02


def write_base(folder: Path, hidden: int, layers: int) -> None:
    """A model of random weights in bfloat16, a file for each layer; all layers have the same values."""
    model = FreshSource(shape(hidden, layers), seed=0).model
    model.config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, torch.Tensor] = {}
    units: dict[str, dict[str, torch.Tensor]] = {}
    where: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        unit = f"layer-{parts[2]}" if parts[1] == "layers" else "ends"
        units.setdefault(unit, {})[name] = parameter
        where[name] = f"model-{unit}.safetensors"
    for unit, parameters in units.items():
        tensors = {}
        for name, weight in parameters.items():
            key = name.rpartition(".layers.")[2].partition(".")[2] or name
            if key not in drawn:
                values = torch.randn(weight.shape, generator=generator, dtype=torch.bfloat16) * 0.02
                drawn[key] = values if weight.dim() > 1 else torch.ones_like(values)
            tensors[name] = drawn[key]
        save_file(tensors, folder / f"model-{unit}.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def anonymous_nbytes() -> int:
    """What the process holds that no file holds for it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most of it in the block, looked at from time to time: the last entry of the list, behind the block."""
    found, over = [anonymous_nbytes()], threading.Event()

    def look() -> None:
        while not over.wait(SAMPLED_EVERY):
            found[0] = max(found[0], anonymous_nbytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def measure(folder: Path, tokens: int, *, in_memory: bool) -> dict[str, Any]:
    units = json.loads((folder / "config.json").read_text())["num_hidden_layers"] + 2
    placements = () if in_memory else (Placement(weights="file"),) * units
    policy = Policy(shares_memory=True, placements=placements, update="during_backward")
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    how: dict[str, Any] = {"optimizer": AdamW(lr=1e-4), "max_grad_norm": None, "policy": policy, "verify": False}
    small = {"input_ids": torch.randint(VOCABULARY, (1, tokens)), "labels": torch.randint(VOCABULARY, (1, tokens))}
    gc.collect()
    before = anonymous_nbytes()
    with Engine.from_pretrained(folder, adapter=lora, device=CpuDevice(), **how) as engine:
        loaded = anonymous_nbytes() - before
        numel = engine.structure.numel - engine.structure.trained_numel
        seconds, computing, losses = [], [], []
        with peak() as most:
            for _ in range(1 + STEPS):
                began = time.perf_counter()
                losses.append(engine.step([small]).loss)
                seconds.append(time.perf_counter() - began)
                assert engine.timeline is not None
                computing.append(engine.timeline.busy_seconds("compute"))
                print(f"step of {duration(seconds[-1])}, compute {duration(computing[-1])}", flush=True)
            kept = anonymous_nbytes() - before
        found: dict[str, Any] = {
            "base_parameters": numel,
            "trained_parameters": engine.structure.trained_numel,
            "tokens_per_step": tokens,
            "peak_nbytes": most[0] - before,
            "between_steps_nbytes": kept,
            "loaded_nbytes": loaded,
            "nbytes_per_base_parameter": kept / numel,
            "ledger_nbytes": sum(nbytes for (tier, _), nbytes in engine.memory_table().items() if tier == "host"),
            "seconds": median(seconds[1:]),
            "compute_seconds": median(computing[1:]),
            "losses": losses,
        }
        files = engine._pool.files
        if not in_memory and files is not None:
            found |= _reading(engine, files)
            floor = max(median(computing[1:]), found["reading_seconds"])
            found["to_floor"] = median(seconds[1:]) / floor
    return found


def _reading(engine: Engine, files: ModelFiles) -> dict[str, Any]:
    """What a step reads, and how long it takes with nothing beside it, one unit after the other."""
    layouts = [layout_of(unit) for unit in engine.structure.units]
    sizes = [2 * (layout.size - layout.files_start) for layout in layouts]
    memory = torch.empty(max(sizes), dtype=torch.uint8)
    backward = range(engine.structure.epilogue - 2, engine.structure.lowest_trained - 1, -1)  # the last two are there
    order = [*range(len(sizes)), *backward]
    began = time.perf_counter()
    for unit in order:
        files.read(f"file/weights/{unit}", 0, memory[: sizes[unit]])
    return {
        "read_nbytes": sum(sizes[unit] for unit in order),
        "reading_seconds": time.perf_counter() - began,
        "direct": files.direct,
    }


def main() -> None:
    let_idle_threads_sleep()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-memory", action="store_true", help="hold the base instead of reading it")
    parser.add_argument("--folder", type=Path, help="where the base is written, or is from an earlier --keep")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=56)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--keep", action="store_true", help="leave the base where it is")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="megatrain-base-"))
    try:
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            writing = get_context("spawn").Process(
                target=write_base, args=(folder, arguments.hidden, arguments.layers)
            )  # so that what it takes is none of ours
            writing.start()
            writing.join()
        found = measure(folder, arguments.tokens, in_memory=arguments.in_memory)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    text = json.dumps(found, indent=1)
    print(f"{amount(found['peak_nbytes'])} at the peak over {found['base_parameters']:,} parameters\n{text}")
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
