"""The planner's mixtures against fixed activation plans, over bus bandwidth and device memory, on a virtual clock.

    python -m bench.elastic [--docs FOLDER]

An 8B shape in sequences of 4,096 on an H200 whose bus and device memory are others: 65,536 tokens per step, and where
weights alone do not hide behind that, 262,144. A fixed plan treats all layers alike and is otherwise planned as freely
(micro-batch, slots, placements): all graphs, all chosen outputs (selective), all inputs (recomputed), all inputs in the
host (offloaded), an input kept every K layers. The bound is the elastic plan of the same memory and compute with a bus
of infinite speed. Whether tokens per step exceed the knee is computed for each corner (`knees`). The elastic plan's
schedule is also executed, on the simulator's virtual clock.

Writes `plots/elastic-*.svg` and the table of docs/benchmarks/planning.md. Nothing here is measured: each number is a
schedule of ours at a described machine's prices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path

from bench.plots import Axis, Line, linear, plot
from bench.scaling import ENOUGH_HOST, GB, filled
from bench.shapes import llama_shape
from megatrain.errors import DoesNotFit
from megatrain.plan import Plan, Question, contention, find_plan, machine, op_seconds
from megatrain.spec import Hardware, Keep, ModelSpec
from megatrain.testing import executed_timeline

TOKENS, MORE_TOKENS, LENGTH = 65_536, 262_144, 4096
BUS = (4, 16, 64, 256)
"""GB/s of each direction."""

MEMORY = (8, 16, 32, 80, 141)
"""GB of the device."""

CORNERS = [(bus, memory, TOKENS) for memory in MEMORY for bus in BUS]
CORNERS += [(BUS[0], memory, MORE_TOKENS) for memory in MEMORY]

INFINITE = 1e6
"""GB/s."""

REACHED = 0.95
"""Of the speed with an infinite bus: what is claimed above the knee."""

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
    """Seconds of a step at one bandwidth and memory; `None` and a fixed plan's absence: it does not fit."""

    bus: float
    memory: float
    tokens: int
    elastic: float | None
    executed: float | None
    """On the simulator's virtual clock."""
    fixed: dict[str, float]
    bound: float | None
    kept: dict[str, float]
    """Share of the layers by what is kept of them."""
    weights_knee: float
    """Tokens per step from which weights and gradients alone hide."""
    knee: float | None
    """Tokens per step from which inputs hide besides, of as many layers as would leave with an infinite bus; `None`
    where no number of tokens is enough."""

    @property
    def reached(self) -> float:
        """Of the speed with an infinite bus."""
        return self.bound / self.elastic if self.bound and self.elastic else 0.0

    @property
    def best_fixed(self) -> float:
        return min(self.fixed.values(), default=inf)

    @property
    def above_knee(self) -> bool:
        return self.knee is not None and self.tokens >= self.knee


def described(bus: float, memory: float) -> Hardware:
    rates = dict.fromkeys(("fetch_bandwidth", "grad_bandwidth"), bus * GB)
    plain = replace(machine("h200"), host_nbytes=ENOUGH_HOST, device_nbytes=round(memory * GB), disk_nbytes=None)
    return replace(plain, duplex_fetch_bandwidth=None, duplex_grad_bandwidth=None, **rates)  # type: ignore[arg-type]


def found(question: Question) -> Plan | None:
    """The best plan, if any fits."""
    try:
        return find_plan(question)
    except DoesNotFit:
        return None


@lru_cache(maxsize=1)
def bounded(model: ModelSpec, memory: float, tokens: int) -> Plan | None:
    """With a bus of infinite speed: what corners of one memory share."""
    return found(Question(model, described(INFINITE, memory), tokens, min(LENGTH, tokens)))


def executed_seconds(plan: Plan) -> float:
    """Of the plan's step on the simulator, whose streams run in any order that the events allow."""
    price = op_seconds(
        plan.question.model, plan.numerics, plan.policy, plan.work, plan.question.hardware, plan.question.calibration
    )
    shared = contention(plan.question.model, plan.numerics, plan.question.hardware)
    return executed_timeline(plan.timeline.schedule, price, 1, shared).seconds


def knees(bound: Plan, bus: float) -> tuple[float, float | None]:
    """Tokens per step from which a bus of `bus` GB/s each way hides behind compute: weights alone, and inputs besides.

    In each pass and each way, W bytes go whatever the tokens are, A bytes for each token, and compute takes C seconds
    for each. W + A T <= bus C T from T = W / (bus C - A) on; where A >= bus C there is no such T. W is all weights, and
    all gradients; A and C are those of `bound`, the plan that the same memory allows with an infinite bus, but inputs
    that would have found room on the device do not count: for an infinite bus it makes no difference.
    """
    tokens, compute = bound.question.tokens_per_step, [0.0, 0.0]
    seen: set[tuple[int, int]] = set()
    weights: dict[tuple[int, str], int] = {}
    inputs: dict[tuple[int, str], int] = {}
    ops = bound.timeline.schedule.ops
    turn = max(index for index, op in enumerate(ops) if op.kind == "LOSS")
    for index, op in enumerate(ops):
        late = op.kind in ("GRAD", "RELOAD") or (op.kind == "FETCH" and (op.unit, op.shard) in seen)
        way = int(late), "out" if op.kind in ("GRAD", "OFFLOAD") else "in"
        if op.stream == "compute":
            compute[index > turn] += bound.timeline.ends[index] - bound.timeline.starts[index]
        elif op.kind in ("FETCH", "GRAD"):
            weights[way] = weights.get(way, 0) + op.nbytes
            seen |= {(op.unit, op.shard)} if op.kind == "FETCH" else set()
        elif op.kind in ("RELOAD", "OFFLOAD"):
            inputs[way] = inputs.get(way, 0) + op.nbytes
    away = max(inputs.values(), default=0)
    lacking = bound.nbytes["device"] + away - bound.question.budgets()["device"]
    share = min(1.0, max(0.0, lacking / away)) if away else 0.0
    alone, besides = 0.0, 0.0
    for turned, side in ((turned, side) for turned in (0, 1) for side in ("in", "out")):
        hidden = bus * GB * compute[turned] / tokens
        fixed, each = weights.get((turned, side), 0), share * inputs.get((turned, side), 0) / tokens
        alone = max(alone, fixed / hidden)
        besides = max(besides, (fixed / (hidden - each) if hidden > each else inf) if fixed + each else 0.0)
    return alone, besides if besides < inf else None


def point(
    bus: float,
    memory: float,
    tokens: int = TOKENS,
    model: ModelSpec | None = None,
    others: Sequence[str] = tuple(FIXED),
) -> Point:
    """One corner of the sweep, beside these fixed plans."""
    model = model or llama_shape("8B", 32, 4096)
    question = Question(model, described(bus, memory), tokens, min(LENGTH, tokens))
    plan, bound = found(question), bounded(model, memory, tokens)
    alike = {name: found(replace(question, overrides={"activations_by_layer": FIXED[name]})) for name in others}
    fixed = {name: each.seconds for name, each in alike.items() if each is not None}
    if plan is None or bound is None:
        return Point(bus, memory, tokens, None, None, fixed, None, {}, 0.0, None)
    alone, besides = knees(bound, bus)
    kept = plan.policy.kept_shares
    return Point(bus, memory, tokens, plan.seconds, executed_seconds(plan), fixed, bound.seconds, kept, alone, besides)


def table(points: Sequence[Point]) -> list[str]:
    rows = [
        "| bus | memory | tokens | knee: weights | and inputs | elastic | best fixed | the others, to elastic "
        "| of an infinite bus | keeps |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in points:
        where = f"| {each.bus:g} GB/s | {each.memory:g} GB | {each.tokens:,} |"
        if each.elastic is None:
            rows.append(f"{where} | | does not fit | | | | |")
            continue
        best = min(each.fixed, key=lambda name: each.fixed[name], default="none")
        others = ", ".join(f"{name} {each.fixed[name] / each.elastic:.2f}" for name in each.fixed if name != best)
        kept = ", ".join(f"{share:.0%} {keep}" for keep, share in each.kept.items())
        fixed = f"{best} {each.best_fixed / each.elastic:.3f}x" if each.fixed else "none fits"
        besides = "none" if each.knee is None else f"{each.knee:,.0f}"
        reached = f"**{each.reached:.1%}**" if each.above_knee else f"{each.reached:.1%}"
        rows.append(
            f"{where} {each.weights_knee:,.0f} | {besides} | {each.elastic:.2f} s | {fixed} | {others} | {reached} "
            f"| {kept} |"
        )
    return rows


def claims(points: Sequence[Point]) -> list[str]:
    """What the sweep says, in lines; each names the corner that is worst for it."""
    there = [each for each in points if each.elastic is not None and each.executed is not None]
    with_fixed = [each for each in there if each.fixed]
    above = [each for each in there if each.above_knee]
    lines = []
    if with_fixed:
        worst = max(with_fixed, key=lambda each: (each.elastic or 0.0) / each.best_fixed)
        ratio = (worst.elastic or 0.0) / worst.best_fixed
        lines.append(f"elastic over the best fixed plan, at most: {ratio:.4f} ({_where(worst)})")
    if above:
        worst = min(above, key=lambda each: each.reached)
        enough = sum(each.reached >= REACHED for each in above)
        lines.append(
            f"above the knee: {enough} of {len(above)} corners reach {REACHED:.0%} of an infinite bus; the least "
            f"{worst.reached:.1%} ({_where(worst)})"
        )
    others = [each for each in there if not each.above_knee and each.tokens >= each.weights_knee]
    if others:
        each = min(others, key=lambda each: each.reached)
        lines.append(
            f"above the knee of weights, below that of inputs: {len(others)} corners, at least {each.reached:.1%} "
            f"({_where(each)})"
        )
    if there:
        apart = max(abs((each.executed or 0.0) / (each.elastic or 1.0) - 1) for each in there)
        lines.append(f"executed on the virtual clock, to replayed, off by at most: {apart:.1e}")
    return lines


def _where(each: Point) -> str:
    return f"{each.bus:g} GB/s, {each.memory:g} GB, {each.tokens:,} tokens"


def plots(points: Sequence[Point]) -> dict[str, str]:
    """Share of the infinite bus's speed, and the gain over the best fixed plan, over bandwidth; a line per memory."""
    across = Axis("bus, each way (GB/s)", sorted({float(each.bus) for each in points}), log=True)
    there = [each for each in points if each.elastic is not None and each.tokens == TOKENS]
    reached, gained = [], []
    for memory in sorted({each.memory for each in there}):
        mine = sorted((each for each in there if each.memory == memory), key=lambda each: each.bus)
        reached.append(Line(f"{memory:g} GB", [(float(each.bus), 100 * each.reached) for each in mine]))
        more = [(float(each.bus), 100 * (each.best_fixed / (each.elastic or 1.0) - 1)) for each in mine if each.fixed]
        gained.append(Line(f"{memory:g} GB", more))
    most = max((y for line in gained for _, y in line.points), default=1.0)
    title = f"8B, {TOKENS:,} tokens per step; an H200 with other memory and bus"
    return {
        "elastic-bound": plot(title, across, linear("of the speed with an infinite bus (%)", 100), reached),
        "elastic-gain": plot(title, across, linear("quicker than the best fixed plan (%)", max(1.0, most)), gained),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="mixtures against fixed activation plans, by bus and memory")
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"), help="folder of planning.md and plots/")
    arguments = parser.parse_args()
    points = []
    for where in CORNERS:
        points.append(point(*where))
        print(table(points)[-1], flush=True)
    for name, text in plots(points).items():
        (arguments.docs / "plots" / f"{name}.svg").write_text(text)
    page = arguments.docs / "planning.md"
    lines = [*table(points), "", *(f"- {line}" for line in claims(points))]
    page.write_text(filled(page.read_text(), {"elastic": lines}, "bench.elastic"))
    print("\n".join(claims(points)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
