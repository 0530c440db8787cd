"""How a step grows with depth, tokens, parameters and devices, by replay: plots and tables of benchmarks/planning.md.

    python -m bench.scaling [--docs FOLDER]

Nothing here is measured: each number is a schedule of ours, priced for a machine of the library. Plots go to
`FOLDER/plots`, tables replace what stands between their marks in `FOLDER/planning.md`. Machines are taken with as much
host memory as a model needs, but for the plans of real sizes (`plans`, `published`), where they are taken as they are.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from bench.plots import Axis, Line, linear, plot
from bench.shapes import llama_shape
from bench.zero3 import compare
from megatrain.errors import DoesNotFit
from megatrain.formatting import amount, duration
from megatrain.plan import (
    Choice,
    Plan,
    Question,
    changes,
    examine,
    find_plan,
    hidden_from,
    loads,
    machine,
    machine_names,
    peak_table,
    step_flops,
    survey,
)
from megatrain.spec import WEIGHT_NBYTES, Hardware, ModelSpec, Numerics, Policy
from megatrain.spec.hardware import ElementwiseRate

LENGTH = 4096
GB = 1e9
ENOUGH_HOST = 10**14

DEVICES = {"laptop": "8 GB", "rtx-4090": "24 GB", "h100": "80 GB", "h200": "141 GB"}
"""Machine -> how a plot calls it, by its device memory."""

SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {  # name -> layers, width, and what differs from a plain shape
    "7B": (28, 3584, {"feed_forward": 18_944, "vocabulary": 152_064, "key_value_heads": 4}),
    "14B": (48, 5120, {"feed_forward": 13_824, "vocabulary": 152_064}),
    "32B": (64, 5120, {"feed_forward": 27_648, "vocabulary": 152_064}),
    "70B": (80, 8192, {}),
    "105B": (78, 10_240, {}),
    "110B": (82, 10_240, {}),
    "120B": (90, 10_240, {}),
    "250B": (73, 16_384, {}),
    "405B": (126, 16_384, {"feed_forward": 53_248}),
    "1T": (121, 25_600, {}),
}
"""7B, 14B and 32B are Qwen2.5's, 70B and 405B Llama 3's; the others are made up."""


def shape(name: str) -> ModelSpec:
    layers, width, rest = SHAPES[name]
    return llama_shape(name, layers, width, **rest)


def with_enough_host(name: str) -> Hardware:
    return replace(machine(name), host_nbytes=ENOUGH_HOST)


def most_tokens_that_fit(question: Question) -> Plan | None:
    """The plan for as many tokens as the question asks for, or half as many, and so on, down to one sequence."""
    while True:
        try:
            return find_plan(question)
        except DoesNotFit:
            if question.sequences == 1:
                return None
            question = replace(question, tokens_per_step=question.sequences // 2 * question.length)


def useful_flops(plan: Plan) -> float:
    return step_flops(plan.question.model, [(plan.question.sequences, plan.question.length)]) / plan.seconds


# Depth -------------------------------------------------------------------------------------------------------------

DEPTHS = (8, 16, 32, 64, 96, 128, 160)
DEEP_WIDTH, DEEP_TOKENS = 8192, 16_384


def depth(depths: Sequence[int] = DEPTHS) -> dict[str, str]:
    """Step time and device memory of one policy over the number of layers."""
    seconds, kept, rest = [], [], []
    for layers in depths:
        model = llama_shape("deep", layers, DEEP_WIDTH)
        plan = examine(
            Question(model, with_enough_host("h200"), DEEP_TOKENS, LENGTH),
            Choice(Numerics(), Policy(shard_nbytes=1 << 28)),
            1,
        )
        seconds.append((float(layers), plan.seconds))
        inputs = peak_table(plan)["device", "inputs of layers"]
        kept.append((float(layers), inputs / GB))
        rest.append((float(layers), (plan.nbytes["device"] - inputs) / GB))
    ticks = Axis("layers", [0, 32, 64, 96, 128, 160])
    title = f"Width {DEEP_WIDTH:,}, {DEEP_TOKENS:,} tokens per step, one policy, H200"
    memory = [Line("inputs of layers", kept), Line("everything else", rest)]
    return {
        "depth-time": plot(title, ticks, linear("step (s)", seconds[-1][1]), [Line("step", seconds)]),
        "depth-memory": plot(title, ticks, linear("device memory (GB)", max(kept[-1][1], rest[-1][1])), memory),
    }


# Tokens ------------------------------------------------------------------------------------------------------------

TOKENS = tuple(512 << power for power in range(10))
TOKENS_LENGTH = 512


def formula(hardware: Hardware) -> tuple[float, float]:
    """Tokens per step from which the forward hides weights, and the update: 2 P T operations against bytes.

    2 P bytes of weights cross the bus; with clipping, the update of the last step passes over 26 P bytes beside it.
    """
    return hardware.flops / hardware.fetch_bandwidth, 13 * hardware.flops / hardware.host_bandwidth


def tokens(counts: Sequence[int] = TOKENS) -> dict[str, str]:
    """Share of the device's rate that is useful, over tokens per step, with the knee of the formula marked."""
    model, lines = llama_shape("8B", 32, 4096), []
    for name, words in DEVICES.items():
        hardware, points = with_enough_host(name), []
        for count in counts:
            question = Question(model, hardware, count, TOKENS_LENGTH)
            (found,) = survey(question, [question.budgets()])
            if found is not None:
                useful = step_flops(model, [(question.sequences, TOKENS_LENGTH)]) / found.seconds
                points.append((float(count), 100 * useful / hardware.flops))
        lines.append(Line(words, points, mark=min(max(formula(hardware)), float(counts[-1]))))
    across = Axis("tokens per step", [float(count) for count in counts], log=True, show=_kilo)
    title = f"8B, sequences of {TOKENS_LENGTH}; dashed: the formula's knee"
    return {"tokens": plot(title, across, linear("useful, % of large products", 80), lines)}


def _kilo(count: float) -> str:
    return f"{count / 1024:g}k"


def knees(names: Sequence[str] = ()) -> list[str]:
    """Table: the formula beside what a plan says, for every machine; compute is products and attention alone, as the
    formula has it."""
    rows = ["| machine | weights | update | formula | by the plan |", "|---|---|---|---|---|"]
    model = llama_shape("70B", 80, 8192)
    for name in names or [name for name in machine_names() if machine(name).devices == 1]:
        free = tuple(ElementwiseRate(precision, inf, inf) for precision in WEIGHT_NBYTES)
        hardware = replace(with_enough_host(name), device_nbytes=ENOUGH_HOST, elementwise=free)
        plan = find_plan(
            Question(model, hardware, 16_384, TOKENS_LENGTH, overrides={"activations": "recompute", "placements": ()})
        )
        weights, update = formula(hardware)
        count = hidden_from(plan)
        planned = "never" if count is None else f"{count:,}"
        rows.append(f"| {name} | {weights:,.0f} | {update:,.0f} | {max(weights, update):,.0f} | {planned} |")
    return rows


# Parameters --------------------------------------------------------------------------------------------------------

SIZES = ("7B", "14B", "32B", "70B", "120B", "250B", "405B", "1T")
SIZES_TOKENS = 65_536


def sizes(names: Sequence[str] = SIZES) -> tuple[dict[str, str], list[str]]:
    """MFU over parameters on four devices, as a plot and a table with the tokens per step that fit."""
    lines = []
    rows = ["| model | " + " | ".join(DEVICES.values()) + " |", "|---|" + "---|" * len(DEVICES)]
    cells: dict[str, list[str]] = {name: [] for name in names}
    for device, words in DEVICES.items():
        points = []
        for name in names:
            model = shape(name)
            plan = most_tokens_that_fit(Question(model, with_enough_host(device), SIZES_TOKENS, LENGTH))
            if plan is None:
                cells[name].append("does not fit")
                continue
            share = useful_flops(plan) / (plan.question.hardware.peak_flops or plan.question.hardware.flops)
            points.append((model.numel / GB, 100 * share))
            cells[name].append(f"{sum(plan.work.tokens):,} tokens, {plan.tokens_per_second:,.1f}/s, MFU {share:.0%}")
        lines.append(Line(words, points))
    rows += [f"| {shape(name).name} | " + " | ".join(each) + " |" for name, each in cells.items()]
    ticks = [5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
    across = Axis("parameters (billions)", ticks, log=True)
    title = f"At most {SIZES_TOKENS:,} tokens per step, sequences of {LENGTH:,}"
    return {"sizes": plot(title, across, linear("MFU (%)", 60), lines)}, rows


# Plans -------------------------------------------------------------------------------------------------------------


def plans(names: Sequence[str] = ("105B", "110B", "120B")) -> list[str]:
    """Table: the largest models on the machines as they are, with and without clipping."""
    rows = [
        "| model | on | clips | tokens/step | device | host | step | tokens/s | TFLOP/s | MFU | limit | stall |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        for machine_name in ("h200", "b200"):
            for clips in (True, False):
                question = Question(shape(name), machine(machine_name), 131_072, LENGTH, clips=clips)
                plan = most_tokens_that_fit(question)
                how = f"| {name} | {machine_name} | {'yes' if clips else 'no'} |"
                if plan is None:
                    rows.append(f"{how} does not fit |" + " |" * 8)
                    continue
                device, host, limit = plan.nbytes["device"], plan.nbytes["host"], loads(plan)[0].name
                flops, peak = useful_flops(plan), plan.question.hardware.peak_flops or plan.question.hardware.flops
                rows.append(
                    f"{how} {sum(plan.work.tokens):,} | {amount(device)} | {amount(host)} | {duration(plan.seconds)} |"
                    f" {plan.tokens_per_second:,.0f} | {flops / 1e12:,.0f} | {flops / peak:.0%} | {limit} |"
                    f" {plan.timeline.stall_seconds() / plan.seconds:.1%} |"
                )
    return rows


PUBLISHED = {"7B": "256 to 284 (7B to 32B)", "14B": "266, and 183 without double buffering", "32B": "256 to 284"}
PUBLISHED_TOKENS = 65_536


def published(names: Sequence[str] = ("7B", "14B", "32B")) -> list[str]:
    """Table: useful TFLOP/s on GH200 by replay, beside figures that others have measured and published."""
    rows = [
        "| model | this plan | one weight slot | ZeRO-3 offload | MegaTrain as published | in memory | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        question = Question(shape(name), machine("gh200"), PUBLISHED_TOKENS, LENGTH)
        plan = find_plan(question)
        single = find_plan(replace(question, overrides={"weight_slots": 1}))
        cells = [f"{useful_flops(plan) / 1e12:,.0f}", f"{useful_flops(single) / 1e12:,.0f}"]
        for taken in compare(plan)[1:]:
            fits, ratio = "" if taken.fits else ", does not fit", taken.seconds / plan.seconds
            cells.append(f"{useful_flops(plan) / ratio / 1e12:,.0f} ({ratio:.2f}x our step{fits})")
        rows.append(f"| {name} | " + " | ".join(cells) + f" | {PUBLISHED[name]} |")
    return rows


def example() -> list[str]:
    """What helps most where something is short, of changes that leave the clipping."""
    rows = ["| machine | limit | share of the critical path | change | gain |", "|---|---|---|---|---|"]
    for name in ("laptop", "rtx-4090", "h200"):
        question = Question(llama_shape("8B", 32, 4096), with_enough_host(name), 4096, 512)
        plan = find_plan(question)
        first = loads(plan)[0]
        of_the_machine = [change for change in changes(question, plan) if "max_grad_norm" not in change.name]
        best = max(of_the_machine, key=lambda change: change.ratio or 0.0)
        share = first.chain_seconds / plan.seconds
        rows.append(f"| {name} | {first.name} | {share:.0%} | {best.name} | {(best.ratio or 0) - 1:+.0%} |")
    return rows


# Files -------------------------------------------------------------------------------------------------------------


def filled(text: str, tables: dict[str, list[str]], by: str = "bench.scaling") -> str:
    """`text` with each table between its marks. Raises `KeyError` if there are no marks for any of them."""

    def fill(match: re.Match[str]) -> str:
        body = "\n".join(tables[match[1]])
        return f"<!-- {by}: {match[1]} -->\n{body}\n<!-- end -->"

    names = "|".join(map(re.escape, tables))
    text, found = re.subn(rf"<!-- {re.escape(by)}: ({names}) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)
    if not found:
        raise KeyError(by)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="plots and tables of docs/benchmarks/planning.md, by replay")
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"), help="folder of planning.md and plots/")
    arguments = parser.parse_args()
    by_size, size_rows = sizes()
    plots = depth() | tokens() | by_size
    tables = {"knees": knees(), "sizes": size_rows, "plans": plans(), "published": published(), "example": example()}
    (arguments.docs / "plots").mkdir(parents=True, exist_ok=True)
    for name, text in plots.items():
        (arguments.docs / "plots" / f"{name}.svg").write_text(text)
    page = arguments.docs / "planning.md"
    if page.exists():
        page.write_text(filled(page.read_text(), tables))
    for name, rows in tables.items():
        print(f"\n{name}\n" + "\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
