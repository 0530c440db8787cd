"""Predicted against measured: seconds and peak memory of a step, over shapes and policies, after a probe.

    python -m bench.prediction [--seconds 30] [--kinds] [--json FILE]

The machine is probed first, in the same process, so that both sides see the same machine. Each case is a fresh
Llama-shaped model on the cpu; its step is predicted by replaying the very schedule that runs, then measured several
times after two that warm up. A machine may drift by more than what is to be shown, so measured seconds are given at
the speed that the machine had in the probe, by small jobs that ran beside both (`pace`), as their median with the
spread of the steps beside it; as the clock had them they are under `clock`. Of memory, the peak of the schedule is
compared with what the ledger holds and what torch allocates beside it while a step runs. Exits 1 where a prediction of
time is off by more than `--tolerance`, or one of memory by more than 5% or by too little. It leaves out GPUs
(`bench.gpu`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.pace import Pace, Paced, Shares, at_the_probes_speed
from megatrain import Engine
from megatrain.commands.probe import PRECISIONS, probe
from megatrain.plan import Choice, Question, calibrate, examine, op_seconds
from megatrain.schedule import Timeline
from megatrain.spec import Hardware, Policy, Precision
from megatrain.spec.hardware import ElementwiseRate


@dataclass(frozen=True)
class Case:
    """A shape, a policy and how a step is cut."""

    hidden: int
    layers: int
    precision: Precision = "bf16"
    activations: str = "recompute"
    rows: int = 4
    length: int = 256
    micro_batch: int = 2
    clips: bool = True
    vocabulary: int = 8192

    def __str__(self) -> str:
        clips = "" if self.clips else " no clip"
        shape = f"{self.hidden} x {self.layers} {self.precision} {self.activations}"
        return f"{shape} {self.rows}/{self.micro_batch} of {self.length}{clips}"


CASES = (
    Case(384, 6, "fp32"),
    Case(384, 6, "fp32", "keep"),
    Case(384, 10, "fp32"),
    Case(512, 4, "fp32", micro_batch=4),
    Case(512, 4, "fp32", micro_batch=1),
    Case(512, 6, "fp32", "keep", clips=False),
    Case(768, 3, "fp32", rows=2, length=512, micro_batch=1),
    Case(768, 3, "fp32", "keep"),
    Case(256, 4),
    Case(256, 4, activations="keep"),
)
WARM_UP, CALIBRATING, STEPS = 2, 2, 5
"""Steps of a case: not counted; measured and used to calibrate; measured in all."""

MEMORY_TOLERANCE = 0.05
"""By which a predicted peak may be above the real one."""


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step at the probe's speed, and bytes at its peak."""

    case: Case
    predicted: float
    calibrated: float
    """Predicted with prices corrected by some of the measured steps, for the others."""
    measured: float
    spread: tuple[float, float]
    """Of the quickest and the slowest step that was measured."""
    after_calibration: float
    """Measured, of the steps that were not used to calibrate."""
    clock: float
    """Measured by the clock: the median of steps, whatever the speed of the machine."""
    slowdown: float
    """Median over steps of how much slower the machine was than in the probe."""
    predicted_nbytes: int
    ledger_nbytes: int
    """Of `allocated_nbytes`, what the ledger knows of: all but what autograd and the kernels take for a while."""
    allocated_nbytes: int
    by_kind: dict[str, tuple[float, float]]
    """Kind of op -> measured over predicted seconds, and its share of the predicted step."""

    @property
    def time_ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def memory_ratio(self) -> float:
        return self.predicted_nbytes / self.allocated_nbytes


def fields(case: Case) -> dict[str, Any]:
    """The Hugging Face configuration of a case."""
    return {
        "model_type": "llama",
        "hidden_size": case.hidden,
        "intermediate_size": case.hidden * 7 // 2 // 64 * 64,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.hidden // 64,
        "num_key_value_heads": max(1, case.hidden // 256),
        "vocab_size": case.vocabulary,
        "max_position_embeddings": case.length,
        "tie_word_embeddings": False,
    }


def policy_of(case: Case) -> Policy:
    return Policy(
        shares_memory=True,
        activations="keep" if case.activations == "keep" else "recompute",
        update="next_forward" if case.clips else "during_backward",
    )


@dataclass(frozen=True)
class _Measured:
    """One step."""

    clock: float
    seconds: float
    """At the probe's speed."""
    slowdown: float
    timeline: Timeline
    """At the probe's speed."""


def run(case: Case, hardware: Hardware, pace: Pace) -> Outcome:
    """Predict one case and measure it."""
    policy, clip, device = policy_of(case), 1.0 if case.clips else None, Paced(pace)
    with Engine.from_config(
        fields(case), device=device, precision=case.precision, policy=policy, max_grad_norm=clip, verify=False
    ) as engine:
        question = Question(
            engine.parts.ported.spec, hardware, case.rows * case.length, case.length, case.precision, case.clips
        )
        plan = examine(question, Choice(engine.numerics, policy), case.micro_batch)
        batches = _batches(case, plan.work.micro_batches)
        price = op_seconds(engine.parts.ported.spec, engine.numerics, policy, plan.work, hardware)
        products = op_seconds(engine.parts.ported.spec, engine.numerics, policy, plan.work, _without_passes(hardware))

        def share(op: Any) -> float:
            return products(op) / price(op)

        steps = [_step(engine, pace, share, batches()) for _ in range(WARM_UP + STEPS)][WARM_UP:]
        timelines = [step.timeline for step in steps]
        first = calibrate(engine.parts.ported.spec, timelines[:CALIBRATING], price, one_processor=True)
        every = calibrate(engine.parts.ported.spec, timelines, price, one_processor=True)
        corrected = examine(replace(question, calibration=first), Choice(engine.numerics, policy), case.micro_batch)
        given, ledger = batches(), sum(engine.diagnostics.memory_table().values())
        pace.resting = True
        allocated = ledger + allocated_nbytes(lambda: engine.step(given))
        pace.resting = False
    device.close()
    shares = _shares(engine, plan.timeline, price)
    seconds = [step.seconds for step in steps]
    return Outcome(
        case,
        predicted=plan.seconds,
        calibrated=corrected.seconds,
        measured=statistics.median(seconds),
        spread=(min(seconds), max(seconds)),
        after_calibration=statistics.median(seconds[CALIBRATING:]),
        clock=statistics.median(step.clock for step in steps),
        slowdown=statistics.median(step.slowdown for step in steps),
        predicted_nbytes=sum(plan.nbytes.values()),
        ledger_nbytes=ledger,
        allocated_nbytes=allocated,
        by_kind={
            f"{kind} {unit}": (round(factor, 2), round(shares[kind, unit], 4))
            for (kind, unit), factor in every.factors.items()
        },
    )


def _batches(case: Case, count: int) -> Callable[[], list[dict[str, torch.Tensor]]]:
    """Makes the micro-batches of a step, other ones each time."""
    generator = torch.Generator().manual_seed(0)

    def make() -> list[dict[str, torch.Tensor]]:
        shape = case.micro_batch, case.length
        ids = [torch.randint(case.vocabulary, shape, generator=generator) for _ in range(count)]
        return [{"input_ids": each, "labels": each} for each in ids]

    return make


def _without_passes(hardware: Hardware) -> Hardware:
    """A machine on which a layer takes time for products and attention only."""
    at_once = (ElementwiseRate(precision, float("inf"), float("inf")) for precision in PRECISIONS)
    return replace(hardware, elementwise=tuple(at_once))


def _step(engine: Engine, pace: Pace, share: Shares, batches: list[dict[str, torch.Tensor]]) -> _Measured:
    pace.clear()
    pace.sample()
    began, spent = time.perf_counter(), pace.spent
    engine.step(batches)
    clock = time.perf_counter() - began - (pace.spent - spent)
    slowdown, timeline = pace.slowdown(share), engine.diagnostics.timeline
    assert timeline is not None
    return _Measured(clock, clock / slowdown, slowdown, at_the_probes_speed(timeline, slowdown))


def _shares(engine: Engine, timeline: Timeline, price: Callable[[Any], float]) -> Mapping[tuple[str, str], float]:
    """(kind of op, kind of unit) -> its share of the seconds that all ops are priced at."""
    seconds: dict[tuple[str, str], float] = {}
    for op in timeline.schedule.ops:
        key = op.kind, engine.parts.ported.spec.units[op.unit].kind
        seconds[key] = seconds.get(key, 0.0) + price(op)
    total = sum(seconds.values())
    return {key: each / total for key, each in seconds.items()}


def allocated_nbytes(run: Callable[[], object]) -> int:
    """Most bytes that torch had allocated at one time on the cpu while `run` ran, beyond what it had before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events: Any = profiler.profiler
    changes = [(each.start_ns(), each.nbytes()) for each in events.kineto_results.events() if each.name() == "[memory]"]
    allocated = peak = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        allocated += nbytes
        peak = max(peak, allocated)
    return peak


def show(outcome: Outcome, kinds: bool) -> str:
    """A line, and below it measured over predicted by kind of op where `kinds` are wanted."""
    low, high = (each / outcome.measured for each in outcome.spread)
    line = (
        f"{outcome.case!s:<44} {outcome.measured:6.3f} s ({low:4.2f} to {high:4.2f})"
        f"  predicted {outcome.time_ratio:4.2f}x"
        f"  calibrated {outcome.calibrated / outcome.after_calibration:4.2f}x"
        f"  clock {outcome.clock:6.3f} s, slower by {outcome.slowdown:4.2f}"
        f"  peak {outcome.allocated_nbytes / 1e6:6.1f} MB, predicted {outcome.memory_ratio:5.3f}x"
    )
    if kinds:
        each = (f"{kind} {factor:.2f} of {share:.1%}" for kind, (factor, share) in outcome.by_kind.items())
        line += "\n    " + ", ".join(each)
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the probe")
    parser.add_argument("--tolerance", type=float, default=0.10)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    parser.add_argument("--kinds", action="store_true", help="show measured over predicted by kind of op")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    pace = Pace()
    with tempfile.TemporaryDirectory() as folder:
        device = Paced(pace)
        hardware = probe(device, Path(folder), options.seconds)
        device.close()
    pace.set_out()
    outcomes = []
    for case in CASES[: options.cases]:
        outcomes.append(run(case, hardware, pace))
        print(show(outcomes[-1], options.kinds), flush=True)
    if options.json:
        cases = [{name: value for name, value in asdict(each).items() if name != "by_kind"} for each in outcomes]
        options.json.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
    close = [each for each in outcomes if abs(each.time_ratio - 1) <= options.tolerance]
    enough = [each for each in outcomes if 1 <= each.memory_ratio <= 1 + MEMORY_TOLERANCE]
    print(f"{len(close)} of {len(outcomes)} step times within {options.tolerance:.0%}")
    print(f"{len(enough)} of {len(outcomes)} peaks predicted within {MEMORY_TOLERANCE:.0%} and not exceeded")
    return 0 if len(close) == len(enough) == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
