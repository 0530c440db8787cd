"""What fits on which machine: known models on described machines, as the planner sees them.

    python -m bench.fits [--adapters | --drive | --files | --floors | --muon] [--docs FILE ...]

Each cell is what `megatrain plan MODEL --hardware NAME` answers: the step is the largest of 65,536 tokens, or half as
many and so on, that fits, in sequences of 4,096 tokens, with exact gradient clipping and checkpoints. `--docs` replaces
the table between its marks in the files that are named. Nothing here is measured: machines are described by their
makers' figures, and speeds are replays. The fields of the models are those of their published `config.json`; no
network is used. It takes six minutes of processor time. It leaves out what limits each step, which `megatrain plan`
says.

`--adapters` makes another table: for GPUs and sizes of host memory, without a disk and with the base in memory, the
largest of some bases over which `megatrain plan MODEL --adapter lora:16` finds a plan for one sequence. That takes four
minutes. `--drive` plans for models with state on a drive, with 65,536 and 131,072 tokens a step, beside the most that
the planner's sums allow: tokens of the fastest mixture that fits, were each pass as short as its busiest stream. It
takes three. `--files` plans for larger bases on a GPU of 24 GB, what the host has no room for being read from the
model's files, taken to be in bfloat16. That takes ten. `--floors` shows the least host memory with all state on the
disk, as a refusal of one sequence on an H200 names it, in one minute. `--muon` plans for models that 64 or 128 GB of
host memory do not hold easily, with AdamW and with Muon; bytes a parameter are those of all state, gradients and
directions in host memory and below, without what only passes through. That takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.scaling import filled, most_tokens_that_fit
from megatrain.commands.plan import LENGTH, TOKENS_PER_STEP, find_model
from megatrain.errors import DoesNotFit
from megatrain.formatting import amount, at_least
from megatrain.optim import AdamW, Muon, described
from megatrain.plan import Plan, Question, find_plan, machine, survey
from megatrain.schedule import Use
from megatrain.schedule.replay import DISK_STREAMS
from megatrain.spec import Hardware, Limits, ModelSpec

GB = 10**9

MACHINES: dict[str, tuple[str, int | None]] = {
    "laptop: 8 GB GPU, 32 GB RAM": ("laptop", None),
    "RTX 4090: 24 GB, 64 GB RAM": ("rtx-4090", 64 * GB),
    "RTX 4090: 24 GB, 128 GB RAM": ("rtx-4090", None),
    "RTX 5090: 32 GB, 192 GB RAM": ("rtx-5090", None),
    "H200: 141 GB, 1.5 TB RAM": ("h200", None),
}
"""Column -> described machine, and its host memory where it is another than described."""

_LLAMA: dict[str, Any] = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256}
_QWEN: dict[str, Any] = {"model_type": "qwen3", "num_key_value_heads": 8, "vocab_size": 151_936, "head_dim": 128}
_ALL: dict[str, Any] = {"max_position_embeddings": 32_768}


def _sizes(width: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (width, inner, layers, heads), strict=True))


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": _QWEN | _sizes(2048, 6144, 28, 16) | {"tie_word_embeddings": True},
    "Qwen3-4B": _QWEN | _sizes(2560, 9728, 36, 32) | {"tie_word_embeddings": True},
    "Llama-3.1-8B": _LLAMA | _sizes(4096, 14_336, 32, 32),
    "Qwen3-14B": _QWEN | _sizes(5120, 17_408, 40, 40),
    "Qwen3-30B-A3B (experts)": _QWEN
    | _sizes(2048, 6144, 48, 32)
    | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8},
    "Qwen3-32B": _QWEN | _sizes(5120, 25_600, 64, 64),
    "Llama-3.3-70B": _LLAMA | _sizes(8192, 28_672, 80, 64),
}
"""Row -> the fields of its `config.json` that decide sizes."""


def model_called(name: str) -> ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(_ALL | MODELS[name]))
        return replace(find_model(str(file), "bf16"), name=name)


def machine_called(name: str) -> Hardware:
    described, host_nbytes = MACHINES[name]
    found = machine(described)
    return found if host_nbytes is None else replace(found, host_nbytes=host_nbytes)


def planned(model: ModelSpec, hardware: Hardware, most: int = TOKENS_PER_STEP) -> Plan | None:
    """The plan of the most tokens a step that fit, up to `most`; `None` where not one sequence does."""
    return most_tokens_that_fit(Question(model, hardware, most, LENGTH, saves=True))


def cell(plan: Plan | None) -> str:
    """Planned tokens per second, marked where part of the state lies on the disk."""
    if plan is None:
        return "no"
    speed = plan.tokens_per_second
    text = f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}"
    return f"{text} (disk)" if any(placement.uses_disk for placement in plan.policy.placements) else text


def table() -> list[str]:
    machines = {name: machine_called(name) for name in MACHINES}
    lines = [f"| planned tokens/s | {' | '.join(machines)} |", "|---" * (1 + len(machines)) + "|"]
    for name in MODELS:
        model = model_called(name)
        cells = [cell(planned(model, hardware)) for hardware in machines.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


# Bases of adapters ----------------------------------------------------------------------------------------------------

ADAPTER = "lora:16"
BASES = (
    "Qwen/Qwen3-4B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "openai/gpt-oss-120b",
    "Qwen/Qwen3-235B-A22B",
)
"""Ascending."""
GPUS = {"8 GB (laptop)": "laptop", "16 GB (RTX 5080)": "rtx-5080", "24 GB (RTX 4090)": "rtx-4090"}
HOST_GB = (32, 64, 128, 192, 256, 512)


def fits(base: ModelSpec, hardware: Hardware) -> bool:
    try:
        find_plan(Question(base, hardware, LENGTH, LENGTH, saves=True, limits=Limits(disk_nbytes=0)))
    except DoesNotFit:
        return False
    return True


def adapters_table() -> list[str]:
    lines = [f"| GPU | {' | '.join(f'{gb} GB RAM' for gb in HOST_GB)} |", "|---" * (1 + len(HOST_GB)) + "|"]
    bases = [find_model(name, "bf16", adapter=ADAPTER).with_in_files(()) for name in BASES]
    for gpu, name in GPUS.items():
        largest, cells = 0, []  # of the bases; more memory never holds less
        for gb in HOST_GB:
            hardware = replace(machine(name), host_nbytes=gb * GB)
            while largest < len(bases) and fits(bases[largest], hardware):
                largest += 1
            cells.append(BASES[largest - 1].partition("/")[2] if largest else "none")
        lines.append(f"| {gpu} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


# Bases in their files -------------------------------------------------------------------------------------------------

LARGE = ("meta-llama/Llama-3.3-70B-Instruct", "openai/gpt-oss-120b", "Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3")
HOSTS = (64, 128)


def files_table() -> list[str]:
    """For each base and size of host memory, on an RTX 4090 with the drive that is described with it."""
    heads = "base | host memory | planned tokens/s | tokens a step | stays in files | read a step"
    lines = [f"| {heads} |", "|---" * 6 + "|"]
    for name in LARGE:
        model = find_model(name, "bf16", adapter=ADAPTER)
        for gb in HOSTS:
            hardware = replace(machine("rtx-4090"), host_nbytes=gb * GB)
            limits = Limits(disk_nbytes=0)
            plan = most_tokens_that_fit(Question(model, hardware, TOKENS_PER_STEP, LENGTH, saves=True, limits=limits))
            lines.append(f"| {name.partition('/')[2]} | {gb} GB | {files_cells(plan)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def files_cells(plan: Plan | None) -> str:
    if plan is None:
        return "does not fit | | | "
    buffers = plan.timeline.schedule.buffers.values()
    there = amount(sum(buffer.nbytes for buffer in buffers if buffer.tier == "file"))
    speed, tokens = f"{plan.tokens_per_second:,.0f}", f"{sum(plan.work.tokens):,}"
    return f"{speed} | {tokens} | {there} | {amount(plan.read_from_files_nbytes)}"


# Beside a drive -------------------------------------------------------------------------------------------------------

BESIDE_A_DRIVE = (
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Qwen/Qwen3-235B-A22B",
    "openai/gpt-oss-120b",
)
STEPS = (TOKENS_PER_STEP, 2 * TOKENS_PER_STEP)
"""Tokens a step, or as many as fit."""


def drive_table() -> list[str]:
    """On an RTX 4090 with 64 GB of host memory and a drive of 4 TB that is as fast as the one described with it."""
    heads = "model | tokens a step | planned tokens/s | at most | the drive is busy | written per billion tokens"
    lines = [f"| {heads} |", "|---" * 6 + "|"]
    hardware = replace(machine("rtx-4090"), host_nbytes=64 * GB, disk_nbytes=4000 * GB)
    for name in BESIDE_A_DRIVE:
        model = find_model(name, "bf16")
        plans = {plan.work: plan for step in STEPS if (plan := planned(model, hardware, step))}
        for plan in plans.values():
            lines.append(f"| {name.partition('/')[2]} | {drive_cells(plan)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def drive_cells(plan: Plan) -> str:
    tokens, question = sum(plan.work.tokens), plan.question
    (promised,) = survey(question, [question.budgets()])
    most = f"{tokens / promised.least_seconds():,.0f}" if promised else ""
    busy = max(map(plan.busy_seconds, DISK_STREAMS)) / plan.seconds
    written = amount(round(plan.written_nbytes * GB / tokens))
    return f"{tokens:,} | {plan.tokens_per_second:,.0f} | {most} | {busy:.0%} | {written}"


# The least host memory ------------------------------------------------------------------------------------------------

FLOORS = (
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "openai/gpt-oss-120b",
    "meta-llama/Llama-3.1-405B",
    "deepseek-ai/DeepSeek-V3",
)


def floors_table() -> list[str]:
    """For each model, the least host memory with all state on the disk, and the bytes of its largest layer's state."""
    lines = ["| model | least host memory | state of its largest layer |", "|---|---|---|"]
    limits = Limits(host_nbytes=1, disk_nbytes=20_000 * GB)
    for name in FLOORS:
        model = find_model(name, "bf16")
        try:
            find_plan(Question(model, machine("h200"), LENGTH, LENGTH, saves=True, limits=limits))
        except DoesNotFit as error:
            layer_nbytes = 12 * max(model.units[layer].numel for layer in model.layers)
            cells = f"{at_least(error.needed['host'])} | {amount(layer_nbytes)}"
            lines.append(f"| {name.partition('/')[2]} | {cells} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


# Muon beside AdamW ----------------------------------------------------------------------------------------------------

BY_MUON = (("meta-llama/Llama-3.1-8B", 64), ("Qwen/Qwen3-32B", 128), ("meta-llama/Llama-3.3-70B-Instruct", 128))
"""Model, and GB of host memory beside an RTX 4090 and the drive that is described with it."""
STAYS = (Use.WEIGHTS, Use.OPTIMIZER_STATE, Use.GRADIENTS, Use.DIRECTIONS)


def muon_table() -> list[str]:
    """For each of `BY_MUON`, its plan with AdamW and with Muon."""
    heads = "model | host memory | optimizer | planned tokens/s | tokens a step | bytes a parameter | on the disk"
    lines = [f"| {heads} | written a step |", "|---" * 8 + "|"]
    for name, gb in BY_MUON:
        for optimizer in (AdamW(), Muon()):
            model = described(find_model(name, "bf16"), optimizer)
            plan = planned(model, replace(machine("rtx-4090"), host_nbytes=gb * GB))
            cells = f"{name.partition('/')[2]} | {gb} GB | {type(optimizer).__name__} | {muon_cells(plan)}"
            lines.append(f"| {cells} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def muon_cells(plan: Plan | None) -> str:
    if plan is None:
        return "no | | | | "
    schedule, speed = plan.timeline.schedule, f"{plan.tokens_per_second:,.0f}"
    stays = [buffer for buffer in schedule.buffers.values() if buffer.use in STAYS and buffer.tier != "device"]
    of_each = sum(buffer.nbytes for buffer in stays) / plan.question.model.numel
    on_disk = sum(buffer.nbytes for buffer in stays if buffer.tier == "disk")
    written = amount(plan.written_nbytes) if plan.written_nbytes else "nothing"
    return f"{speed} | {sum(plan.work.tokens):,} | {of_each:.2f} | {amount(on_disk)} | {written}"


def main() -> int:
    parser = argparse.ArgumentParser(description="what fits on which machine, by the planner")
    parser.add_argument("--adapters", action="store_true", help="the largest bases of adapters")
    parser.add_argument(
        "--drive", action="store_true", help="models with state on a drive, with 65,536 and 131,072 tokens a step"
    )
    parser.add_argument("--files", action="store_true", help="larger bases of adapters, read from their files")
    parser.add_argument("--floors", action="store_true", help="the least host memory of large models")
    parser.add_argument("--muon", action="store_true", help="Muon beside AdamW")
    parser.add_argument("--docs", type=Path, nargs="*", default=(), help="files in which to replace the table")
    arguments = parser.parse_args()
    by = "bench.fits"
    if arguments.files:
        name, lines, by = "files", files_table(), "bench.fits --files"
    elif arguments.drive:
        name, lines, by = "drive", drive_table(), "bench.fits --drive"
    elif arguments.floors:
        name, lines, by = "floors", floors_table(), "bench.fits --floors"
    elif arguments.muon:
        name, lines, by = "muon", muon_table(), "bench.fits --muon"
    else:
        name, lines = ("adapters", adapters_table()) if arguments.adapters else ("machines", table())
    for file in arguments.docs:
        file.write_text(filled(file.read_text(), {name: lines}, by=by))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
