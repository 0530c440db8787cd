"""What a checkpoint costs: steps beside a save, the speed of a save against plain direct writes, memory, and a resume.

    python -m bench.checkpointing [--parameters 3e8] [--tokens 2048] [--rounds 5] [--precision bf16|fp32]
                                  [--part train|resume] [--folder FOLDER] [--json FILE]

A Llama of about that size trains with an exact norm on the cpu. Each round, in turn: a step; a save with a step beside
it (the flush before the save counts as part of that step); a step; a save while nothing else runs; and as many bytes
written to a plain file with the same number of threads, past the page cache, allocated before and forced to the disk
after. Ratios are formed within a round, that of steps to the mean of those before and after, and the median is told.
Peak memory is the largest resident size during a save (`VmHWM`) above that before. At the end a new engine is made of
the checkpoint, every byte checked first. Checksums of each parameter's master and moments, by name, and the next loss
are compared with those of the engine that wrote it, so no second copy of the state is ever in memory.

With `--part train` the checkpoint stays in FOLDER and FILE says what is in it; `--part resume`, a process of its own,
goes on from there. `--rounds 0` leaves the comparison out.

The claims: a step beside a save at most 1.25 times a normal one, a save at 0.8 of direct writes at least, and no more
memory than the largest unit, masters and moments in float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.loading import config_of
from bench.step import _resident
from megatrain import Engine, Policy
from megatrain.checkpoint import manifest, range_writer
from megatrain.checkpoint.folder import open_checkpoint
from megatrain.memory.checksum import checksum
from megatrain.optim import AdamW
from megatrain.spec import Precision

WRITERS = 4
STEP_RATIO, SPEED_RATIO = 1.25, 0.8
MOST_NBYTES = 256 << 20
"""That a save takes beside the state."""


def batches(tokens: int, vocabulary: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """One micro-batch of rows of 512 tokens, or of fewer."""
    length = min(tokens, 512)
    ids = torch.randint(0, vocabulary, (tokens // length, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": ids, "labels": ids}]


def direct_write_seconds(folder: Path, nbytes: int) -> float:
    """Of so many bytes to a file of their own, which is removed again."""
    path, block = folder / "direct", manifest.BLOCK_NBYTES
    memory = mmap.mmap(-1, block)
    memory.write(os.urandom(1 << 20) * (block >> 20))
    began = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0), 0o666)
    try:
        range_writer._allocate(file, nbytes)
        with ThreadPoolExecutor(WRITERS) as threads:
            starts = range(0, nbytes - block + 1, block)
            list(threads.map(lambda start: os.pwrite(file, memory, start), starts))
        os.fsync(file)
        return time.perf_counter() - began
    finally:
        os.close(file)
        path.unlink()


def measure(parameters: float, tokens: int, rounds: int, precision: Precision, folder: Path) -> dict[str, Any]:
    """Train, save and resume below `folder`; seconds and bytes."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        trained = train_part(parameters, tokens, rounds, precision, Path(temporary))
        gc.collect()
        return trained | resume_part(trained, Path(temporary))


def _options(precision: Precision) -> dict[str, Any]:
    policy = Policy(shares_memory=True, activations="recompute")
    return {"precision": precision, "policy": policy, "verify": False}


def train_part(parameters: float, tokens: int, rounds: int, precision: Precision, work: Path) -> dict[str, Any]:
    """Train and save; one checkpoint stays in `work`, and in the result what is to be found in it."""
    config = config_of(parameters, experts=0)
    rows: list[dict[str, float]] = []
    began = time.perf_counter()
    with Engine.from_config(config.to_dict(), **_options(precision)) as engine:
        made = time.perf_counter()
        data = [batches(tokens, config.vocab_size, seed) for seed in range(2 * rounds + 4)]
        largest = max(unit.numel for unit in engine.parts.ported.spec.units)
        for _ in range(2 if rounds else 1):  # the second begins with what the first has left pending, as all others do
            engine.step(data[0])
        if rounds:
            engine.save(work).wait()  # the first one plans, and takes the memory that all others use
        for number in range(rounds):
            rows.append(_round(engine, data[2 * number : 2 * number + 2], work))
        last = engine.save(work)
        path = last.wait()
        for other in work.iterdir():
            if other != path:
                shutil.rmtree(other)
        states, expected = state_sums(engine), engine.step(data[-1]).loss
    return {
        "parameters": engine.parts.ported.spec.numel,
        "precision": precision,
        "tokens_per_step": tokens,
        "checkpoint_nbytes": open_checkpoint(path, lambda _: []).manifest.nbytes,
        "largest_unit_nbytes": 12 * largest,
        "init_seconds": made - began,
        "last_save_seconds": last.seconds,
        "rounds": rows,
        **({name: median(row[name] for row in rows) for name in rows[0]} if rows else {}),
        "tensors": len(states),
        "kept": {"path": str(path), "states": states, "loss": expected, "seed": 2 * rounds + 3},
    }


def resume_part(trained: dict[str, Any], work: Path) -> dict[str, Any]:
    """Go on from the checkpoint that `train_part` has left; what to add to its result."""
    kept, rows, unit = trained["kept"], trained["rounds"], trained["largest_unit_nbytes"]
    began = time.perf_counter()
    checkpoint = open_checkpoint(Path(kept["path"]))
    checked = time.perf_counter()
    with Engine.from_checkpoint(checkpoint, **_options(trained["precision"])) as again:
        resumed = time.perf_counter()
        vocabulary = again.parts.ported.spec.vocab_size
        same_state = state_sums(again) == kept["states"]
        same = again.step(batches(trained["tokens_per_step"], vocabulary, kept["seed"])).loss == kept["loss"]
    holds = {"resume": same and same_state}
    found: dict[str, Any] = {}
    if rows:
        found["peak_to_unit"] = max(row["peak_nbytes"] for row in rows) / unit
        holds["step"] = trained["step_ratio"] <= STEP_RATIO
        holds["speed"] = trained["speed_ratio"] >= SPEED_RATIO
        holds["memory"] = max(row["peak_nbytes"] for row in rows) <= MOST_NBYTES
    found |= {"check_seconds": checked - began, "load_seconds": resumed - checked, "kept": None}
    return {**found, "same_state": same_state, "same_loss": same, "holds": holds}


def state_sums(engine: Engine) -> dict[str, int]:
    """Parameter and part of its state (master, m, v) -> checksum, unit after unit."""
    engine.weights.flush()
    store, found = engine.parts.store, {}
    spare = torch.empty(4 * max(param.numel for unit in store.model.units for param in unit.params), dtype=torch.uint8)
    for unit in store.units:
        for place in unit.layout.fields:
            parts = ("master", *AdamW.STATE) if place.start < unit.trained else ("master",)
            for array, part in enumerate(parts):
                memory = unit.in_float32(array, place.start, place.stop, spare).view(np.uint8)
                words = memory.nbytes - memory.nbytes % 8
                rest = np.frombuffer(memory[words:].tobytes().ljust(8, b"\0"), np.uint8)
                found[f"{place.name}.{part}"] = checksum([memory[:words], rest])
    return found


def _round(engine: Engine, data: Sequence[list[dict[str, torch.Tensor]]], folder: Path) -> dict[str, float]:
    before_it = _seconds(lambda: engine.step(data[0]))
    waited = engine.saver.gate.waited_seconds
    began = time.perf_counter()
    save = engine.save(folder)
    engine.step(data[1])
    beside, over = time.perf_counter() - began, save.is_over
    save.wait()
    after_it = _seconds(lambda: engine.step(data[0]))
    plain = (before_it + after_it) / 2  # what else the machine does comes and goes
    engine.weights.flush()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    alone = engine.save(folder)
    alone.wait()
    peak = _resident("VmHWM") - before
    written = direct_write_seconds(folder, alone.nbytes)
    engine.step(data[0])  # so that the next round begins with a pending update
    return {
        "step_seconds": plain,
        "step_beside_save_seconds": beside,
        "step_ratio": beside / plain,
        "save_beside_step_seconds": save.seconds,
        "save_ended_within_step": float(over),
        "waited_seconds": engine.saver.gate.waited_seconds - waited,
        "save_seconds": alone.seconds,
        "save_nbytes_per_second": alone.nbytes / alone.seconds,
        "direct_nbytes_per_second": alone.nbytes / written,
        "speed_ratio": written / alone.seconds,
        "peak_nbytes": float(max(peak, 0)),
    }


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def show(result: dict[str, Any]) -> str:
    """The measurement in words."""
    gib, holds = 1 << 30, {name: "holds" if held else "misses" for name, held in result["holds"].items()}
    nbytes = result["checkpoint_nbytes"]
    lines = [
        f"{result['parameters'] / 1e6:,.0f}M parameters, a checkpoint of {nbytes / gib:.2f} GiB",
        f"the last save took {result['last_save_seconds']:.1f} s, "
        f"{nbytes / result['last_save_seconds'] / gib:.2f} GiB/s",
    ]
    if result["rounds"]:
        step = f"a step takes {result['step_seconds']:.2f} s, one beside a save "
        save = f"a save takes {result['save_seconds']:.2f} s, {result['save_nbytes_per_second'] / gib:.2f} GiB/s"
        peak = f"{result['peak_nbytes'] / (1 << 20):,.0f} MiB above, {result['peak_to_unit']:.2f}x of a unit"
        beside = f"{result['step_beside_save_seconds']:.2f} s: {result['step_ratio']:.2f}x"
        lines += [
            f"{step}{beside} ({holds['step']} {STEP_RATIO})",
            f"{save}: {result['speed_ratio']:.2f}x of direct writes ({holds['speed']} {SPEED_RATIO})",
            f"peak memory {peak}",
        ]
    lines.append(
        f"checked in {result['check_seconds']:.1f} s, loaded in {result['load_seconds']:.1f} s, "
        f"{result['tensors']} tensors of state {'are the same' if result['same_state'] else 'DIFFER'}, "
        f"the next loss {'is the same' if result['same_loss'] else 'DIFFERS'}"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=3e8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--part", choices=("both", "train", "resume"), default="both")
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if given.part == "both":
        result = measure(given.parameters, given.tokens, given.rounds, given.precision, given.folder)
    elif given.part == "train":
        result = train_part(given.parameters, given.tokens, given.rounds, given.precision, given.folder)
    else:
        result = json.loads(given.json.read_text())
        result |= resume_part(result, given.folder)
    if given.part != "train":
        print(show(result))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
