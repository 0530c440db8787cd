"""Measures the host memory of LoRA: base weights read from the model's own files, against held in host memory.

    python -m bench.adapter_memory [--in-memory | --drive MB/S] [--hidden N --layers N] [--tokens N] [--folder FOLDER]

Random weights of a Llama shape are written to `--folder` in bfloat16, once, 5.9 GB by default, and go when it ends
(`--keep` leaves them). A LoRA of rank 8 on the query and value projections trains over them on the cpu. What it holds
is the process's anonymous memory, at its peak and between steps, less what there was before the engine: activations of
so few tokens are megabytes, and what is mapped of files or in the page cache is nobody's. The floor of a step is the
larger of compute (what its ops took on the compute stream) and of reading the step's bytes alone, the same way,
measured right behind each step. On a cpu compute decides; `--drive 50` lets files give 50 MB a second at the most, so
that reading does. Left out: a GPU, where weights pass through by shard and not by layer.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoConfig

from bench.loading import write_folder
from bench.tiers import VOCABULARY, shape
from megatrain import AdamW, Engine, Policy
from megatrain.device.cpu import CpuDevice
from megatrain.formatting import amount, duration
from megatrain.memory.model_files import ModelFiles
from megatrain.spec import Placement
from megatrain.spec.layout import layout_of

TURNS = 3
"""A step, and then its reads alone; behind two steps whose memory is looked at."""
SAMPLED_EVERY = 0.02


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


def measure(folder: Path, tokens: int, *, in_memory: bool, drive: float | None) -> dict[str, Any]:
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
        files = None if in_memory else engine.parts.pool.files
        if files is not None and drive is not None:
            monkey: Any = files
            monkey.read = slowed(files.read, drive)
        steps = []
        with peak() as most:
            steps += [_step(engine, small) for _ in range(2)]
            kept = anonymous_nbytes() - before
        reads, reading = [] if files is None else _reads(engine), []
        for _ in range(TURNS):
            steps.append(_step(engine, small))
            if files is not None:
                reading.append(_reading_seconds(files, reads))
        seconds, computing, losses = map(list, zip(*steps, strict=True))
        found: dict[str, Any] = {
            "base_parameters": numel,
            "trained_parameters": engine.structure.trained_numel,
            "tokens_per_step": tokens,
            "peak_nbytes": most[0] - before,
            "between_steps_nbytes": kept,
            "loaded_nbytes": loaded,
            "nbytes_per_base_parameter": kept / numel,
            "ledger_nbytes": sum(
                nbytes for (tier, _), nbytes in engine.diagnostics.memory_table().items() if tier == "host"
            ),
            "seconds": median(seconds[-TURNS:]),
            "compute_seconds": median(computing[-TURNS:]),
            "losses": losses,
        }
        if files is not None:
            floors = [max(each) for each in zip(computing[-TURNS:], reading, strict=True)]
            found |= {
                "read_nbytes": sum(nbytes for _, nbytes in reads),
                "reading_seconds": median(reading),
                "direct": files.direct,
                "to_floor": median(step / floor for step, floor in zip(seconds[-TURNS:], floors, strict=True)),
            }
    return found


def slowed(read: Callable[..., None], megabytes_per_second: float) -> Callable[..., None]:
    """`ModelFiles.read` on a drive that gives so much and no more, to all threads together."""
    lock, free = threading.Lock(), [0.0]

    def paced(name: str, start: int, memory: torch.Tensor, *label: str) -> None:
        with lock:
            free[0] = max(free[0], time.perf_counter()) + memory.nbytes / (megabytes_per_second * 1e6)
            until = free[0]
        read(name, start, memory, *label)
        time.sleep(max(0.0, until - time.perf_counter()))

    return paced


def _step(engine: Engine, batch: dict[str, torch.Tensor]) -> tuple[float, float, float]:
    """Seconds of a step and of its compute, and its loss."""
    began = time.perf_counter()
    loss = engine.step([batch]).loss
    seconds = time.perf_counter() - began
    assert engine.diagnostics.timeline is not None
    computing = engine.diagnostics.timeline.busy_seconds("compute")
    print(f"step of {duration(seconds)}, compute {duration(computing)}", flush=True)
    return seconds, computing, loss


def _reads(engine: Engine) -> list[tuple[str, int]]:
    """What a step reads of each unit and how many bytes that is, in order."""
    layouts = [layout_of(unit) for unit in engine.structure.units]
    sizes = [2 * (layout.size - layout.files_start) for layout in layouts]
    backward = range(engine.structure.epilogue - 2, engine.structure.lowest_trained - 1, -1)  # the last two are there
    return [(f"file/weights/{unit}", sizes[unit]) for unit in [*range(len(sizes)), *backward]]


def _reading_seconds(files: ModelFiles, reads: list[tuple[str, int]]) -> float:
    """With nothing beside it, one unit after the other."""
    memory = torch.empty(max(nbytes for _, nbytes in reads), dtype=torch.uint8)
    began = time.perf_counter()
    for name, nbytes in reads:
        files.read(name, 0, memory[:nbytes])
    seconds = time.perf_counter() - began
    print(f"its reads alone {duration(seconds)}", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--in-memory", action="store_true", help="hold the base instead of reading it")
    how.add_argument("--drive", type=float, metavar="MB/S", help="the most that files give")
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
            config = AutoConfig.for_model(**shape(arguments.hidden, arguments.layers))
            with get_context("spawn").Pool(1) as process:  # so that what it takes is none of ours
                process.apply(write_folder, (config, folder))
        found = measure(folder, arguments.tokens, in_memory=arguments.in_memory, drive=arguments.drive)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    text = json.dumps(found, indent=1)
    print(f"{amount(found['peak_nbytes'])} at the peak over {found['base_parameters']:,} parameters\n{text}")
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
