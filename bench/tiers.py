"""A step with state on the disk: seconds, bytes moved, peak memory, and what drive and processor could do at best.

    python -m bench.tiers --host 12GB [--hidden N --layers N] [--tokens N] [--steps N] [--folder FOLDER] [--json FILE]
                          [--precision bf16|fp32] [--beside CHECKOUT --turns N]

A fresh Llama shape trains on the cpu with no more host memory than `--host`; what that has no room for goes to
`--folder`. Without `--tokens`, the step has the fewest with which the plan is hardly longer than its busiest stream.
Without `--clip`, units are updated as their gradients land, so that the disk is busy in both passes. The floor of a
step is the larger of compute (what its ops took on the compute stream in the same steps) and of the bytes that it read
and wrote at the drive's own speed, both ways at once, measured here through the disk room. Left out: the same step with
all state in host memory, which has no room for it (the tests compare the numbers of both at small size).

`--host least` is the least budget that a refusal names, with all state on the disk. `--beside` runs the same with the
package of another checkout of this repository, in turns with this one, and gives the ratios of this one's figures to
that one's. `--precision fp32` is for processors on which products in bf16 would hide all else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatrain import AdamW, Engine
from megatrain.device.cpu import CpuDevice
from megatrain.errors import DoesNotFit
from megatrain.formatting import amount, duration
from megatrain.memory import Disk
from megatrain.model import FreshSource, port_model
from megatrain.plan import Plan, Question, available_threads, find_plan, loads, peak_table
from megatrain.plan.host_resources import available_disk_nbytes
from megatrain.plan.question import RESERVE_NBYTES
from megatrain.run.this_machine import this_machine
from megatrain.spec import Limits, ModelSpec
from megatrain.spec.limits import parse_nbytes
from megatrain.train.options import SourceInUnits

LENGTH, VOCABULARY = 64, 32_000
REGION_NBYTES = 256 << 20
HARDLY_LONGER = 1.1
"""Of a step, than its busiest stream, where the plan chooses its tokens."""
LEAST = "least"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COMPARED = ("seconds", "processor_seconds", "peak_process_nbytes", "moved_nbytes")


def shape(hidden: int, layers: int) -> dict[str, Any]:
    """The Hugging Face configuration; 2560 wide with 30 layers it has 2.5 billion parameters."""
    return {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 27 // 10 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 128),
        "num_key_value_heads": max(1, hidden // 128),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def drive_bandwidth(folder: Path, seconds: float = 6.0) -> float:
    """Bytes per second, read plus written, of the disk room while it does both at once."""
    memory = [torch.zeros(REGION_NBYTES, dtype=torch.uint8) for _ in range(2)]
    disk = Disk([folder])
    disk.provide({name: (REGION_NBYTES, name) for name in ("read", "write")})
    disk.write("read", memory[0])
    disk.write("write", memory[1])
    before, began = disk.read_nbytes + disk.written_nbytes, time.perf_counter()

    def repeat(call: Callable[[str, torch.Tensor], None], name: str, memory: torch.Tensor) -> None:
        while time.perf_counter() - began < seconds:
            call(name, memory)

    writer = threading.Thread(target=repeat, args=(disk.write, "write", memory[1]))
    writer.start()
    repeat(disk.read, "read", memory[0])
    writer.join()
    speed = (disk.read_nbytes + disk.written_nbytes - before) / (time.perf_counter() - began)
    disk.close()
    return speed


def planned(spec: ModelSpec, device: CpuDevice, arguments: argparse.Namespace) -> Plan:
    """The plan for a budget, less what the process itself takes, or for the least of which there is one."""
    folder, tokens, own = arguments.folder, arguments.tokens, peak_nbytes()
    drive = drive_bandwidth(folder, 2.0) / 2
    hardware = replace(
        this_machine(device, arguments.precision),
        disk_nbytes=available_disk_nbytes(folder),
        disk_duplex_read_bandwidth=drive,
        disk_duplex_write_bandwidth=drive,
    )
    asked: dict[str, Any] = {"precision": arguments.precision, "clips": arguments.clip}
    asked["overrides"] = {"host_threads": available_threads()}
    own += RESERVE_NBYTES  # what kernels and threads take beside the ledger
    rows = [max(1, tokens // LENGTH)] if tokens else [1 << power for power in range(6)]
    for count in rows:
        question = Question(spec, hardware, count * LENGTH, LENGTH, **asked)
        nbytes = least_nbytes(question) if arguments.host == LEAST else parse_nbytes(arguments.host, "--host") - own
        plan = find_plan(replace(question, limits=Limits(host_nbytes=nbytes)))
        if plan.seconds < HARDLY_LONGER * max(load.busy_seconds for load in loads(plan)):
            break
    return plan


def least_nbytes(question: Question) -> int:
    """The host memory without which there is no plan, as its refusal says."""
    try:
        find_plan(replace(question, limits=Limits(host_nbytes=1)))
    except DoesNotFit as error:
        return error.needed["host"]
    raise AssertionError("a plan in one byte")


def peak_nbytes() -> int:
    """The most memory that this process has had, mapped libraries included, the page cache not."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="12GB", help=f"budget of host memory, of the whole process, or '{LEAST}'")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, help="of a step; by default what hides the disk")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--clip", action="store_true", help="by the global norm")
    parser.add_argument("--steps", type=int, default=2, help="measured ones, after one that warms up")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    found = in_turns(arguments) if arguments.beside else measure(arguments)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def in_turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both checkouts' figures, by turn, and the median over turns of the ratios within a turn."""
    given = sys.argv[1:]
    turns: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        for _ in range(arguments.turns):
            turns.append({})
            for name, checkout in (("beside", arguments.beside), ("here", Path(__file__).parents[1])):
                one = [sys.executable, __file__, *without(given, "--beside", "--turns", "--json"), "--json", str(file)]
                package = os.environ | {"PYTHONPATH": str(checkout.resolve())}
                subprocess.run(one, env=package, check=True, stdout=sys.stderr)
                turns[-1][name] = json.loads(file.read_text())
    ratios = {key: [turn["here"][key] / turn["beside"][key] for turn in turns] for key in COMPARED}
    return {"ratios": {key: median(each) for key, each in ratios.items()}, "by_turn": ratios, "turns": turns}


def without(arguments: list[str], *names: str) -> list[str]:
    """Arguments of the command line without these, and without the values that follow them."""
    dropped = {place + more for place, word in enumerate(arguments) if word in names for more in (0, 1)}
    return [word for place, word in enumerate(arguments) if place not in dropped]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    source = FreshSource(shape(arguments.hidden, arguments.layers), seed=0)
    ported = port_model(source.model, DTYPES[arguments.precision])
    device = CpuDevice()
    plan = planned(ported.spec, device, arguments)
    print(f"{plan.work.tokens} tokens, predicted {duration(plan.seconds)}, {amount(plan.nbytes['disk'])} on disk")
    disk = Disk([arguments.folder])
    began = time.perf_counter()
    options: dict[str, Any] = {"optimizer": AdamW(lr=1e-4), "max_grad_norm": 1.0 if arguments.clip else None}
    options |= {"precision": arguments.precision, "policy": plan.policy, "limits": plan.question.limits}
    with Engine.from_source(SourceInUnits(source, ported), device=device, verify=False, disk=disk, **options) as engine:
        loaded = time.perf_counter() - began
        seconds, processor, computing, losses, moved = [], [], [], [], 0
        for step in range(arguments.steps + 2):  # the first has nothing pending, the second warms up
            batches = _batches(plan, step)
            before, began, used = disk.read_nbytes + disk.written_nbytes, time.perf_counter(), time.process_time()
            losses.append(engine.step(batches).loss)
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
            moved = disk.read_nbytes + disk.written_nbytes - before
            assert engine.diagnostics.timeline is not None
            computing.append(engine.diagnostics.timeline.busy_seconds("compute"))
            print(f"step {step}: {duration(seconds[-1])}, compute {duration(computing[-1])}, {amount(moved)} moved")
        table = engine.diagnostics.memory_table()
    speed = drive_bandwidth(arguments.folder)
    took, compute = median(seconds[2:] or seconds), median(computing[2:] or computing)
    floor = max(compute, moved / speed)
    return {
        "parameters": ported.spec.numel,
        "precision": arguments.precision,
        "tokens_per_step": sum(plan.work.tokens),
        "state_nbytes": 12 * ported.spec.numel,
        "host_budget": arguments.host,
        "limit_nbytes": plan.question.limits.host_nbytes,
        "peak_process_nbytes": peak_nbytes(),
        "planned_at_peak": {use: nbytes for (tier, use), nbytes in peak_table(plan).items() if tier == "host"},
        "ledger_nbytes": {tier: sum(n for (of, _), n in table.items() if of == tier) for tier in ("host", "disk")},
        "seconds": took,
        "processor_seconds": median(processor[2:] or processor),
        "predicted_seconds": plan.seconds,
        "compute_seconds": compute,
        "moved_nbytes": moved,
        "drive_bandwidth_both_ways": speed,
        "disk_seconds": moved / speed,
        "to_floor": took / floor,
        "all_seconds": seconds,
        "loading_seconds": loaded,
        "losses": losses,
        "policy": {"micro_batches": plan.work.micro_batches, "disk_staging_slots": plan.policy.disk_staging_slots},
    }


def _batches(plan: Plan, step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    shapes = [(tokens // LENGTH, LENGTH) for tokens in plan.work.tokens]
    ids = [torch.randint(VOCABULARY, each, generator=generator) for each in shapes]
    return [{"input_ids": each, "labels": each} for each in ids]


if __name__ == "__main__":
    main()
