"""A step as other systems take it, by replay beside ours: ZeRO-3 offload, MegaTrain as published, all in memory.

    python -m bench.zero3 MODEL [--hardware NAME] [--tokens-per-step N] [--length L] [--precision bf16|fp32] [--no-clip]

MODEL is what `megatrain plan` takes. Nothing here is measured: each system is a schedule of our own ops at a described
machine's prices, at the best choices that fit it, with the optimizer's pass behind the backward pass.

* *ZeRO-3 offload* (Rajbhandari et al. 2021): each micro-batch goes through the whole model before the next, computing
  layers again, so that weights cross the bus twice and gradients once per micro-batch; these are summed in host memory
  in float32. Masters are whole beside the weights: 18 bytes per parameter.
* *MegaTrain as published* (arXiv 2604.05091): layer-major, every k-th boundary kept, three loads of every weight; 12
  bytes per parameter, without float32 masters (whose traffic is not charged to it).
* *in memory*: weights, gradients and optimizer state (16 to 18 bytes per parameter) lie on the device, and so does the
  optimizer's work. Where that does not fit, its speed is still shown: that of a model that fits.

It leaves out what a replay cannot know: how near each system comes to its own schedule.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatrain.commands.plan import LENGTH, TOKENS_PER_STEP, find_hardware, find_model
from megatrain.errors import MegaTrainError
from megatrain.formatting import amount, duration
from megatrain.plan import (
    Choice,
    Plan,
    Question,
    contention,
    estimate,
    find_plan,
    op_seconds,
    optimizer_bandwidth,
    step_flops,
)
from megatrain.plan.estimates import coarse, cut, shallow
from megatrain.plan.placement import ON_DEVICE
from megatrain.schedule import Access, Op, Schedule, replay
from megatrain.schedule.build import Builder
from megatrain.schedule.contents import Gradient
from megatrain.schedule.passes.gradients import Gradients
from megatrain.schedule.passes.prefetch import Visit
from megatrain.schedule.passes.updates import Updates
from megatrain.spec import ModelSpec, Numerics, Policy, Work
from megatrain.train.progress import describe_activations

FEW, ONE_MORE = 3, 4
"""Micro-batches that a micro-batch-major step is replayed with; each further one costs as much as the last."""

INTERVALS = (2, 4, 8, 16)
"""Of kept boundaries, in layers. At 1 every boundary would be kept, and weights loaded twice."""

LOW_BITS_NBYTES = 2
"""Per parameter in bf16: ours has these beside the weight that streams, a whole master twice as many."""


Numbers = tuple[float, float, float, float]
"""Seconds of a step, those of compute, and peak bytes of the device and of the host."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step of one system takes with one set of choices. `fits` is false where that is more than there is."""

    name: str
    choices: str
    seconds: float
    compute_seconds: float
    device_nbytes: float
    host_nbytes: float
    fits: bool = True


def compare(plan: Plan) -> list[Taken]:
    """Ours, then the others, for a machine whose device has memory of its own, and a question without saves."""
    sizes = plan.nbytes["device"], plan.nbytes["host"]
    words = f"{_batches(plan.question, plan.micro_batch)}, {describe_activations(plan.policy)}"
    ours = Taken("this plan", words, plan.seconds, plan.timeline.busy_seconds("compute"), *sizes)
    return [ours, best(zero_offload(plan), plan), best(published(plan), plan), in_memory(plan)]


def best(found: Sequence[Taken], plan: Plan) -> Taken:
    """The quickest that fits; where none does, that with too much in the host, else with too much on the device."""
    budgets = plan.question.budgets()
    on_device = [each for each in found if each.device_nbytes <= budgets["device"]]
    if fits := [each for each in on_device if each.host_nbytes <= budgets["host"]]:
        return min(fits, key=lambda each: each.seconds)
    return replace(min(on_device or found, key=lambda each: each.seconds), fits=False)


def _sizes(question: Question) -> list[int]:
    """Sequences of a micro-batch: powers of two, and all at once."""
    return sorted({*(1 << power for power in range(question.sequences.bit_length())), question.sequences})


def _batches(question: Question, rows: int) -> str:
    return (
        f"{-(-question.sequences // rows):,} x {rows:,} sequences" if question.sequences > rows else f"{rows:,} at once"
    )


# Schedules -----------------------------------------------------------------------------------------------------------


class UpdatesLast(Builder):
    """A step of ours, of which all updates come when the backward pass has ended."""

    def __init__(self, model: ModelSpec, numerics: Numerics, policy: Policy, work: Work) -> None:
        super().__init__(model, numerics, policy, work, "none", trains=True)

    def _finished(self, ops: Sequence[Op]) -> Schedule:
        units = [unit for unit in reversed(self.units) if self.trained[unit].size]
        updates = [op for unit in units for op in self.updates.ops(unit, "", "new")]
        return super()._finished([*ops, *updates])


class MicroMajor(UpdatesLast):
    """Each micro-batch passes the whole model before the next."""

    def __init__(self, model: ModelSpec, numerics: Numerics, policy: Policy, work: Work) -> None:
        super().__init__(model, numerics, policy, work)
        self.gradients: EachMicroBatch = EachMicroBatch(model, numerics, policy, work, self.buffers)
        self.updates = Updates(model, numerics, policy, self.buffers, self.gradients, self.state)

    def step(self) -> Schedule:
        visits: list[Visit] = []
        for micro in range(self.work.micro_batches):
            self.gradients.micro = micro
            one = range(micro, micro + 1)
            visits += [self._forward_visit(unit, one) for unit in self.units[:-1]]
            visits += [self._loss_visit(one), *self._backward_visits(one)]
        return self._emit(visits)

    def _gradient_out(self, unit: int) -> list[Op]:
        """The norm is that of the last sum."""
        ops = super()._gradient_out(unit)
        return ops if self.gradients.is_last else [op for op in ops if op.kind != "NORM"]


class EachMicroBatch(Gradients):
    """The gradient of each micro-batch goes home, and is added there to the sum of those before."""

    micro = 0

    @property
    def is_last(self) -> bool:
        return self.micro == self._work.micro_batches - 1

    def _term(self, unit: int) -> Gradient:
        """The gradient of one micro-batch; the last one's completes the unit's, so the proofs know it by that name."""
        return Gradient(unit, "" if self.is_last else f"micro{self.micro}")

    def add(self, unit: int, reads: list[Access], writes: list[Access]) -> None:
        """A tied table gets two terms of a micro-batch, every other unit one."""
        parts = 2 if unit == 0 and self._model.tied else 1
        place, done = self.sum(unit), self._terms[unit]
        if done:
            reads.append(place._replace(content=replace(self._term(unit), terms=done)))
        self._terms[unit] = (done + 1) % parts
        writes.append(place._replace(content=replace(self._term(unit), terms=done + 1 if done + 1 < parts else None)))

    def is_whole(self, unit: int) -> bool:
        """That of a micro-batch leaves."""
        return True

    def restore_partial(self, unit: int) -> list[Op]:
        return []

    def leave(self, unit: int) -> list[Op]:
        micro, trained, out = self.micro, self._trained[unit], self._numerics.grad_nbytes
        source, term, home = self.sum(unit), self._term(unit), self.landed(unit)
        each, landing = self._each[unit], self._in_turns(unit, "host")
        ops: list[Op] = []
        for shard in trained.shards(max(1, self._policy.shard_nbytes // each)):
            start, stop = source.start + shard.start * each, source.start + shard.stop * each
            read = Access(source.buffer, start, stop, term)
            write = Access(landing, shard.start * out, shard.stop * out, term)
            ops.append(Op("GRAD", "grad", unit, micro, shard=shard.index, reads=(read,), writes=(write,)))
        before = (home._replace(content=Gradient(unit, terms=micro)),) if micro else ()
        total = home._replace(content=Gradient(unit, terms=None if self.is_last else micro + 1))
        whole = Access(landing, home.start, home.stop, term)
        return [*ops, Op("REDUCE", "host", unit, micro, reads=(whole, *before), writes=(total,))]


def _replayed(question: Question, builder: UpdatesLast, masters: int) -> Numbers:
    """A step, whole. masters: see `_beside`."""
    schedule, policy, hardware = builder.step(), builder.policy, question.hardware
    price = op_seconds(builder.model, builder.numerics, policy, builder.work, hardware, question.calibration)
    nbytes = _beside(builder.numerics, masters)
    passes = 2 * nbytes / optimizer_bandwidth(hardware, policy.host_threads)

    def seconds(op: Op) -> float:
        if op.kind == "REDUCE":  # a sum over micro-batches in host memory
            return _touched_nbytes(op) / hardware.host_bandwidth
        return price(op) + (passes * builder.trained[op.unit].size if op.kind == "UPDATE" else 0)

    shared = contention(builder.model, builder.numerics, hardware)

    def dram_nbytes(op: Op) -> float:
        return _touched_nbytes(op) if op.kind == "REDUCE" else shared.dram_nbytes(op)

    timeline = replay(schedule, seconds, replace(shared, dram_nbytes=dram_nbytes))
    host = schedule.peak_nbytes("host") + nbytes * sum(layout.size for layout in builder.layouts)
    return timeline.seconds, timeline.busy_seconds("compute"), schedule.peak_nbytes("device"), host


def _touched_nbytes(op: Op) -> float:
    """Bytes that an op reads and writes."""
    return float(sum(access.stop - access.start for access in (*op.reads, *op.writes)))


def _beside(numerics: Numerics, masters: int) -> int:
    """Bytes per parameter more than ours, of masters that are whole (1) or not there (-1), in bf16."""
    return masters * LOW_BITS_NBYTES if numerics.precision == "bf16" else 0


def _sum(parts: Iterable[tuple[float, Numbers]]) -> Numbers:
    """The weighted sum of what several replays take."""
    weighted = [[weight * amount for amount in taken] for weight, taken in parts]
    seconds, compute, device, host = (sum(column) for column in zip(*weighted, strict=True))
    return seconds, compute, device, host


# Systems -------------------------------------------------------------------------------------------------------------


def zero_offload(plan: Plan) -> list[Taken]:
    """For each size of a micro-batch. Linear in micro-batches and in layers of each kind."""
    question, found = plan.question, []
    plain = replace(plan.policy, placements=(), activations_by_layer=(), activations="recompute", update="next_forward")
    policy = replace(plain, weight_slots=2, read_ahead_nbytes=0, grad_slots=2)
    numerics = replace(plan.numerics, grad_precision="fp32")
    for rows in _sizes(question):
        count, exact = question.sequences / rows, cut(question, rows)
        weights = {FEW: ONE_MORE - count, ONE_MORE: count - FEW} if count > ONE_MORE else {exact.micro_batches: 1.0}
        parts = []
        for micro_batches, times in weights.items():
            alike = Work((rows * question.length,) * micro_batches, question.length)
            work = exact if micro_batches == exact.micro_batches else alike
            for weight, model in shallow(question.model):
                parts.append((times * weight, _replayed(question, MicroMajor(model, numerics, policy, work), 1)))
        found.append(Taken("ZeRO-3 offload", f"{_batches(question, rows)}, recomputes each layer", *_sum(parts)))
    return found


def published(plan: Plan) -> list[Taken]:
    """For each micro-batch the closest interval that fits: it computes least again."""
    question, layers, found = plan.question, len(plan.question.model.layers), []
    policy = replace(plan.policy, placements=(), activations="recompute", update="next_forward")
    numerics = replace(plan.numerics, grad_precision=None)
    for rows in _sizes(question):
        for interval in INTERVALS:
            kept = replace(policy, activations_by_layer=(("input",), *(("drop",),) * (min(interval, layers) - 1)))
            taken = _replayed(question, UpdatesLast(question.model, numerics, kept, coarse(question, rows)), -1)
            words = f"{_batches(question, rows)}, a boundary kept every {interval} layers"
            found.append(Taken("MegaTrain as published", words, *taken))
            if best(found[-1:], plan).fits:
                break
    return found


def in_memory(plan: Plan) -> Taken:
    """As it fits; else the quickest, with the bytes of the most modest.

    Time is that of all micro-batches, memory that of one: activations of another do not exist beside it.
    """
    question, found = plan.question, []
    model, bandwidth = question.model, question.hardware.device_bandwidth or float("inf")
    plain = replace(plan.policy, placements=(ON_DEVICE,) * len(model.units), streamed_updates=0.0)
    plain = replace(plain, activations_by_layer=(), update="next_forward", micro_batches_per_round=0)
    stores = model.units[1].profile.outputs.chosen_nbytes > 0
    ways: list[dict[str, Any]] = [
        {"activations_by_layer": ((kept,),)} for kept in (("chosen", "attention") if stores else ())
    ]
    ways = [{"activations": "keep"}, {"activations": "recompute"}, *ways]
    for rows in _sizes(question):
        numerics = replace(plan.numerics, grad_precision="fp32" if rows < question.sequences else None)
        for way in ways:
            chosen = Choice(numerics, plain).change(**way)
            taken, masters = estimate(question, chosen, rows), _beside(numerics, 1)
            one = estimate(replace(question, tokens_per_step=rows * question.length), chosen, rows)
            passes = 2 * masters * model.trained_numel / bandwidth
            words = f"{_batches(question, rows)}, {describe_activations(chosen.policy)}"
            nbytes = one.nbytes["device"] + masters * model.numel
            found.append(Taken("in memory", words, taken.seconds + passes, taken.busy["compute"], nbytes, 0))
    quickest = best(found, plan)
    return quickest if quickest.fits else replace(quickest, device_nbytes=min(each.device_nbytes for each in found))


# What is shown -------------------------------------------------------------------------------------------------------


def table(plan: Plan) -> list[str]:
    """What does not fit is shown with the speed that it would have if it did."""
    question = plan.question
    useful = step_flops(question.model, [(question.sequences, question.length)])
    heads = ("system", "choices", "step", "tokens/s", "TFLOP/s", "device", "host", "stall", "to ours")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in compare(plan):
        cells = [
            each.name if each.fits else f"{each.name} (does not fit)",
            each.choices,
            duration(each.seconds),
            f"{question.sequences * question.length / each.seconds:,.0f}",
            f"{useful / each.seconds / 1e12:,.3g}",
            amount(each.device_nbytes),
            amount(each.host_nbytes),
            f"{1 - each.compute_seconds / each.seconds:.1%}",
            f"{each.seconds / plan.seconds:.2f}x",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="a step as other systems take it, by replay beside ours")
    parser.add_argument("model", help="folder, hub name, config.json or a saved plan")
    parser.add_argument("--hardware", help="a described machine (h200, rtx-4090, ...) or a file; this one without")
    parser.add_argument("--tokens-per-step", type=int, default=TOKENS_PER_STEP)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--no-clip", dest="clips", action="store_false")
    arguments = parser.parse_args(given)
    try:
        hardware = find_hardware(arguments.hardware, arguments.precision)
        if hardware.shares_memory:
            parser.error(f"{hardware.name} computes in host memory: nothing streams there")
        model = find_model(arguments.model, arguments.precision)
        asked = arguments.tokens_per_step, arguments.length, arguments.precision, arguments.clips
        print("\n".join(table(find_plan(Question(model, hardware, *asked)))))
    except MegaTrainError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
