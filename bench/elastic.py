"""The planner's mixtures against fixed activation plans, by replay, over bus bandwidth and device memory.

    python -m bench.elastic [--docs FOLDER] [--quick]

An 8B shape, 65,536 tokens per step in sequences of 4,096, on an H200 whose bus and device memory are others. A fixed
plan treats all layers alike and is otherwise planned as freely (micro-batch, slots, homes): all graphs, all chosen
outputs (selective), all inputs (recomputed), all inputs in the host (offloaded), an input kept every K layers. The
bound is the elastic plan of the same memory and compute with a bus of infinite speed. Writes `plots/elastic-*.svg` and
the table of docs/planning.md. Nothing here is measured: each number is a schedule of ours at a described machine's
prices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.plots import Axis, Line, linear, plot
from bench.scaling import ENOUGH_HOST, GB, filled
from bench.shapes import llama_shape
from megatrain.errors import DoesNotFit
from megatrain.plan import Question, find_plan, machine
from megatrain.spec import Hardware, Keep

TOKENS, LENGTH = 65_536, 4096
BUS = (4, 16, 64, 256)
"""GB/s of each direction."""

MEMORY = (8, 16, 32, 80, 141)
"""GB of the device."""

INFINITE = 1e6
"""GB/s."""

FIXED: dict[str, tuple[tuple[Keep, ...], ...]] = {
    "all graphs": (("graph",),),
    "selective": (("chosen",),),
    "attention": (("attention",),),
    "recomputed": (("input",),),
    "offloaded": (("offload",),),
    "every 2nd": (("input",), ("drop",)),
    "every 4th": (("input",), ("drop",), ("drop",), ("drop",)),
}


@dataclass(frozen=True)
class Point:
    """Seconds of a step at one bandwidth and memory; a fixed plan that does not fit is absent."""

    bus: float
    memory: float
    elastic: float
    fixed: dict[str, float]
    bound: float
    kept: dict[str, float]
    """Share of the layers by what is kept of them."""

    @property
    def reached(self) -> float:
        """Of the speed with an infinite bus."""
        return self.bound / self.elastic

    @property
    def best_fixed(self) -> float:
        return min(self.fixed.values(), default=float("inf"))


def described(bus: float, memory: float) -> Hardware:
    rates = dict.fromkeys(("fetch_bandwidth", "grad_bandwidth"), bus * GB)
    plain = replace(machine("h200"), host_nbytes=ENOUGH_HOST, device_nbytes=round(memory * GB), disk_nbytes=None)
    return replace(plain, duplex_fetch_bandwidth=None, duplex_grad_bandwidth=None, **rates)  # type: ignore[arg-type]


def seconds(question: Question) -> tuple[float, dict[str, float]]:
    """Of the best plan, and what it keeps; infinite where none fits."""
    try:
        plan = find_plan(question)
    except DoesNotFit:
        return float("inf"), {}
    return plan.seconds, plan.policy.kept_shares


def point(bus: float, memory: float, *, layers: int = 32, width: int = 4096, tokens: int = TOKENS) -> Point:
    """One corner of the sweep."""
    model = llama_shape("8B", layers, width)
    question = Question(model, described(bus, memory), tokens, min(LENGTH, tokens))
    found, kept = seconds(question)
    fixed = {name: seconds(replace(question, pinned={"activation_rows": rows}))[0] for name, rows in FIXED.items()}
    bound, _ = seconds(replace(question, hardware=described(INFINITE, memory)))
    return Point(bus, memory, found, {name: each for name, each in fixed.items() if each < float("inf")}, bound, kept)


def table(points: Sequence[Point]) -> list[str]:
    rows = [
        "| bus | memory | elastic | best fixed | the others, to elastic | of an infinite bus | keeps |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in points:
        where = f"| {each.bus:g} GB/s | {each.memory:g} GB |"
        if not each.fixed and each.elastic == float("inf"):
            rows.append(f"{where} does not fit | | | | |")
            continue
        best = min(each.fixed, key=lambda name: each.fixed[name], default="none")
        others = ", ".join(f"{name} {each.fixed[name] / each.elastic:.2f}" for name in each.fixed if name != best)
        kept = ", ".join(f"{share:.0%} {keep}" for keep, share in each.kept.items())
        fixed = f"{best} {each.best_fixed / each.elastic:.3f}x" if each.fixed else "none fits"
        rows.append(f"{where} {each.elastic:.2f} s | {fixed} | {others} | {each.reached:.1%} | {kept} |")
    return rows


def plots(points: Sequence[Point]) -> dict[str, str]:
    """Share of the infinite bus's speed, and the gain over the best fixed plan, over bandwidth; a line per memory."""
    across = Axis("bus, each way (GB/s)", sorted({float(each.bus) for each in points}), log=True)
    there = [each for each in points if each.elastic < float("inf")]
    reached, gained = [], []
    for memory in sorted({each.memory for each in there}):
        mine = sorted((each for each in there if each.memory == memory), key=lambda each: each.bus)
        reached.append(Line(f"{memory:g} GB", [(float(each.bus), 100 * each.reached) for each in mine]))
        more = [(float(each.bus), 100 * (each.best_fixed / each.elastic - 1)) for each in mine if each.fixed]
        gained.append(Line(f"{memory:g} GB", more))
    most = max((y for line in gained for _, y in line.points), default=1.0)
    title = f"8B, {TOKENS:,} tokens per step; an H200 with other memory and bus"
    return {
        "elastic-bound": plot(title, across, linear("of the speed with an infinite bus (%)", 100), reached),
        "elastic-gain": plot(title, across, linear("quicker than the best fixed plan (%)", max(1.0, most)), gained),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="mixtures against fixed activation plans, by replay")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of planning.md and plots/")
    parser.add_argument("--quick", action="store_true", help="every second bandwidth and memory, to look at")
    arguments = parser.parse_args()
    step = 3 if arguments.quick else 1
    points = []
    for memory in MEMORY[::step]:
        for bus in BUS[::step]:
            points.append(point(bus, memory))
            print(table(points)[-1], flush=True)
    for name, text in plots(points).items():
        (arguments.docs / "plots" / f"{name}.svg").write_text(text)
    page = arguments.docs / "planning.md"
    page.write_text(filled(page.read_text(), {"elastic": table(points)}, "bench.elastic"))
    worst = max(each.elastic / each.best_fixed for each in points if each.fixed)
    print(f"elastic over the best fixed plan, at most: {worst:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
