"""A bus that becomes slow in the middle of a run, in real time: what the re-planner recovers, and how soon.

    python -m bench.replanning [--turns N] [--results FILE]

The device computes on this machine's processor in memory of its own; what crosses its bus is copied by the threads of
two streams, each of which then sleeps for as long as a bus of the given speed would take. All times are measured, none
is simulated. A run of `Replanner` is given a bus that falls to a 24th between two steps. The newly optimal step
time is the best of several mixtures measured at that speed with the same engine, the one that the planner finds with
times measured there among them, right behind the run. A machine that others use, or that warms up, differs by a tenth
from one minute to the next, so all of it is done a few times, and the median of each step counts. Losses are compared
with those of a run in plain host memory, bit for bit. It leaves out a disk that becomes slow: what is kept on it is
decided before training, and is not planned anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatrain import AdamW, Engine, Policy
from megatrain.device.base import Event, Stream, Task, Work
from megatrain.device.cpu import CpuDevice
from megatrain.device.worker import worker_of
from megatrain.plan import Choice, Plan, Question, calibrate, contention, examine, find_plan, op_seconds
from megatrain.run.replan import Replanner
from megatrain.schedule import Op
from megatrain.spec import Hardware, Keep, Limits

RESULTS = Path(__file__).parent / "results" / "replanning.json"

LAYERS, WIDTH, LENGTH, ROWS, MICRO_BATCH = 8, 64, 512, 16, 4

QUICK = 0.5
"""Of a layer's forward: the time in which its inputs cross the bus, before it falls."""

FALLS_TO = 1 / 24

BEFORE, AFTER, ROUNDS, TURNS = 4, 4, 2, 3
"""Steps ahead of the fall and behind it; rounds in which each mixture is measured; times that all is done."""

ENOUGH = 1 << 40
"""Bytes of memory."""

MIXTURES: dict[str, tuple[tuple[Keep, ...], ...]] = {
    "all offloaded": (("offload",),),
    "half offloaded": (("offload",), ("drop",)),
    "every 2nd": (("input",), ("drop",)),
    "every 4th": (("input",), ("drop",), ("drop",), ("drop",)),
    "a quarter offloaded": (("offload",), ("drop",), ("input",), ("drop",)),
}


class ThrottledDevice(CpuDevice):
    """A cpu that has memory of its own, behind a bus of `bandwidth` bytes per second each way."""

    name = "throttled"
    shares_memory = False

    def __init__(self, bandwidth: float) -> None:
        super().__init__()
        self.bandwidth = bandwidth

    def stream(self, name: str) -> Stream:
        if name not in ("fetch", "grad"):
            return super().stream(name)
        return ThrottledStream(self, worker_of(self._workers, name))

    def free_nbytes(self) -> int:
        return ENOUGH


@dataclass(frozen=True)
class ThrottledStream:
    """Copies that take their time, on a thread."""

    device: ThrottledDevice
    inner: Stream

    def submit(self, task: Task, work: Work, waits: Sequence[Event] = ()) -> Event:
        nbytes = task.nbytes if isinstance(task, Op) else 0

        def slowly() -> None:
            due = time.perf_counter() + nbytes / self.device.bandwidth
            work()
            time.sleep(max(0.0, due - time.perf_counter()))

        return self.inner.submit(task, slowly, waits)


@dataclass(frozen=True)
class Outcome:
    """Seconds of each step; of each mixture, and the best of them, at the slow bus."""

    bandwidth: float
    """Bytes per second each way, before the fall."""
    seconds: list[float]
    fell_before: int
    """The step, counted from 0, ahead of which the bus fell."""
    changes: dict[int, str]
    """What was changed behind which step."""
    mixtures: dict[str, float]
    best: float
    recovered: list[float]
    """Of the newly optimal speed, by step from the fall on."""
    equal: bool
    """Whether all losses are those of a run in host memory."""


def tiny(width: int, layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def batches(step: int, rows: int, length: int) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 256, (rows, length), generator=drawn)
    return [{"input_ids": each, "labels": each} for each in ids.split(MICRO_BATCH)]


def made(model: PreTrainedModel, device: Any, policy: Policy) -> Engine:
    return Engine.from_model(model, device, "fp32", AdamW(lr=1e-3), max_grad_norm=0.5, policy=policy, verify=False)


def planned(engine: Engine, bandwidth: float, rows: int, length: int) -> Plan:
    """Within as much memory as the leanest of `MIXTURES` that offloads little takes, on this machine as it is roughly:
    what is measured corrects it."""
    hardware = Hardware("throttled", ENOUGH, ENOUGH, bandwidth, bandwidth, 5e9, 4e10, device_bandwidth=5e9)
    slots = {"weight_slots": 2, "grad_slots": 2, "shard_nbytes": 1 << 20, "placements": ()}
    overrides = {"micro_batch": MICRO_BATCH, "loss_chunk_tokens": 512, **slots}
    asked = Question(engine.parts.ported.spec, hardware, rows * length, length, "fp32", overrides=overrides)
    room = find_plan(replace(asked, overrides={**overrides, "activations_by_layer": MIXTURES["a quarter offloaded"]}))
    return find_plan(replace(asked, limits=Limits(device_nbytes=room.nbytes["device"])))


def run(layers: int = LAYERS, width: int = WIDTH, rows: int = ROWS, length: int = LENGTH) -> Outcome:
    """The whole experiment."""
    model, steps = tiny(width, layers), BEFORE + AFTER
    with made(model, "cpu", Policy(shares_memory=True)) as plain:
        expected = [plain.step(batches(step, rows, length)).loss for step in range(steps)]
        forward = layer_seconds(plain, layers)
    bandwidth = rows * length * width * 4 / (QUICK * forward)
    device = ThrottledDevice(bandwidth)
    losses, seconds, changes = [], [], {}
    with made(model, device, Policy()) as engine:
        plan = planned(engine, bandwidth, rows, length)
        engine.adopt(plan.policy)
        replanner = Replanner(engine, plan, warm_up=1)
        for step in range(steps):
            if step == BEFORE:
                device.bandwidth = bandwidth * FALLS_TO
            found, spent = timed_step(engine, step, rows, length)
            losses.append(found)
            seconds.append(spent)
            if changed := replanner(step):
                changes[step] = changed.changes
        mixtures = measured(engine, plan, rows, length)
    device.close()
    best = min(mixtures.values())
    recovered = [best / each for each in seconds[BEFORE:]]
    return Outcome(bandwidth, seconds, BEFORE, changes, mixtures, best, recovered, losses == expected)


def layer_seconds(engine: Engine, layers: int) -> float:
    """The forward of a layer over all micro-batches, in the last step."""
    timeline = engine.diagnostics.timeline
    assert timeline is not None
    ops = zip(timeline.schedule.ops, timeline.starts, timeline.ends, strict=True)
    return sum(end - start for op, start, end in ops if op.kind == "FORWARD" and op.unit) / layers


def timed_step(engine: Engine, step: int, rows: int, length: int) -> tuple[float, float]:
    """The loss, and the seconds of the ops from the first to the last."""
    loss = engine.step(batches(step, rows, length)).loss
    assert engine.diagnostics.timeline is not None
    return loss, engine.diagnostics.timeline.seconds


def measured(engine: Engine, plan: Plan, rows: int, length: int) -> dict[str, float]:
    """Seconds of a step by mixture, the median of a few, at the speed that the bus has now; in rounds, so that a
    machine that drifts is the same for all."""
    now, question = engine.policy, plan.question
    price = op_seconds(question.model, engine.numerics, now, plan.work, question.hardware)
    assert engine.diagnostics.timeline is not None
    fixed = {name: getattr(now, name) for name in ("weight_slots", "grad_slots", "shard_nbytes", "placements")}
    shared = contention(question.model, engine.numerics, question.hardware)
    timed = replace(question, calibration=calibrate(question.model, engine.diagnostics.timeline, price, shared))
    again = find_plan(replace(timed, overrides={**question.overrides, **fixed})).policy
    policies = {"as replanned": now, "planned at this bus": again}
    for name, kept in MIXTURES.items():
        policies[name] = replace(now, activations="recompute", activations_by_layer=kept)
    policies = {
        name: replace(now, activations=each.activations, activations_by_layer=each.activations_by_layer)
        for name, each in policies.items()
        if examine(question, Choice(engine.numerics, each), MICRO_BATCH).taken.fits(question.budgets())
    }
    spent: dict[str, list[float]] = {name: [] for name in policies}
    for number in range(ROUNDS):
        for name, policy in policies.items():
            engine.adopt(policy)
            times = [timed_step(engine, 100 + 10 * number + each, rows, length)[1] for each in range(3)]
            spent[name] += times[1:]  # the first has no updates to apply
    engine.adopt(now)
    return {name: median(times) for name, times in spent.items()}


def lines(found: Outcome) -> list[str]:
    """What came out, for people."""
    falls = found.fell_before
    return [
        f"the bus: {found.bandwidth / 1e6:.0f} MB/s each way, then {found.bandwidth * FALLS_TO / 1e6:.0f}",
        "seconds of each step: "
        + " ".join(f"{each:.2f}" for each in found.seconds[:falls])
        + " | the bus falls | "
        + " ".join(f"{each:.2f}" for each in found.seconds[falls:]),
        *(f"behind step {step}: {change}" for step, change in found.changes.items()),
        "at the slow bus: " + ", ".join(f"{name} {each:.2f} s" for name, each in found.mixtures.items()),
        "of the newly optimal speed, from the fall on: " + " ".join(f"{each:.0%}" for each in found.recovered),
        f"losses as in host memory, bit for bit: {'yes' if found.equal else 'NO'}",
    ]


def typical(turns: Sequence[Outcome]) -> list[float]:
    """Of the newly optimal speed, by step from the fall on: the median of the turns."""
    return [median(each) for each in zip(*(turn.recovered for turn in turns), strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description="a bus that becomes slow in the middle of a run, in real time")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    turns: list[Outcome] = []
    for _ in range(arguments.turns):
        turns.append(run())
        print("\n".join(lines(turns[-1])), end="\n\n", flush=True)
    shares = typical(turns)
    found = {"recovered": shares, "turns": [asdict(turn) for turn in turns]}
    arguments.results.write_text(json.dumps(found, indent=1) + "\n")
    print("median of the turns, by step from the fall on: " + " ".join(f"{each:.0%}" for each in shares))
    return 0 if all(turn.equal for turn in turns) else 1


if __name__ == "__main__":
    sys.exit(main())
