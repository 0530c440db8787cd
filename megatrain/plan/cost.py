"""Prices ops on a described machine: from floating-point operations and bytes to seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from math import exp, inf, log, log2, prod
from statistics import median
from typing import get_args

from megatrain.plan.collective_cost import (
    SUM_PASSES,
    collective_nbytes,
    gather_seconds,
    link_shares,
    reduce_seconds,
    shared_seconds,
    through_host_nbytes,
    touched_in_host_nbytes,
)
from megatrain.schedule import Op, Timeline, replay
from megatrain.schedule.contents import Direction, LayerGraph, Saved
from megatrain.schedule.ops import CALLS, COLLECTIVES, UpdateStep
from megatrain.schedule.passes.gradients import accumulator_nbytes
from megatrain.schedule.passes.pieces import LOW_BITS_NBYTES, STATE_NBYTES, arrays_of, groups_of, touched_nbytes
from megatrain.schedule.passes.workspace import runs_in_chunks
from megatrain.schedule.replay import DISK_STREAMS
from megatrain.spec import (
    WEIGHT_NBYTES,
    Hardware,
    Kernels,
    ModelSpec,
    Numerics,
    ParamSpec,
    Policy,
    Precision,
    Transfer,
    UnitSpec,
    Work,
)
from megatrain.spec.contention import NO_CONTENTION, Contention
from megatrain.spec.hardware import AttentionRate, ProductKind, ProductRate
from megatrain.spec.layout import Layout, MatrixGroup, layout_of, symmetric_blocks
from megatrain.spec.model import NewtonSchulz

# Rates ----------------------------------------------------------------------------------------------------------------
#
# Seconds of matrix products, attention, elementwise ops and the optimizer pass, and bandwidths, on a described machine.
#
# A product costs its operations at the machine's rate plus its bytes at the device's bandwidth, and at least a launch:
# this is why small and thin products are slow on any device. If products have been measured, the estimate is corrected
# by the ratio of measured to estimated time, interpolated between the measured shapes. So a measured shape gets exactly
# its measured time. Contention between streams is added by `contention`.


ASSUMED_DISK = 1e9
"""Bytes per second of a drive that has not been measured."""

ASSUMED_COPY = 8e9
"""Bytes per second that one thread copies within host memory, if not measured."""

ATTENTION_SHARE = 0.5
"""Rate of attention over that of large products, if not measured; assumed."""

ATTENTION_BACKWARD = 2.5
"""Operations of attention in the backward pass over those in the forward, if not measured: five products to two, since
kernels recompute the scores (FlashAttention's papers count in this way). Measured rows count two, so that their rate is
lower by as much."""

ELEMENTWISE_PASSES = 4.3
"""Times that eager PyTorch kernels move the bytes that autograd saves of a layer, if not measured. Fitted by `python -m
bench.published` to published results of other systems that run transformers' layers eagerly. The same fit also found
the rate of products, which agrees with the library of machines (1.01)."""

ELEMENTWISE_BACKWARD = 2
"""Elementwise time in the backward pass over that in the forward, if not measured; assumed, also in that fit."""

MEASURED_OVER_PLANNED = 0.91, 1.11
"""Measured over planned speed on a described machine. Four fifths of the published results that were not used in the
fit are in this range (`python -m bench.published`: 15 results, by replays of the other systems' schedules)."""


def product_seconds(
    hardware: Hardware, precision: Precision, m: int, k: int, n: int, kind: ProductKind = "output"
) -> float:
    """Seconds of one matrix product [m, k] x [k, n]. If none of its kind has been measured, those of outputs count."""
    estimate = _estimated_seconds(hardware, precision, m, k, n)
    total = correction = 0.0
    for row in _product_rows(hardware, precision, kind) or _product_rows(hardware, precision, "output"):
        ratio = 2.0 * row.m * row.k * row.n / row.flops / _estimated_seconds(hardware, precision, row.m, row.k, row.n)
        squared = log2(m / row.m) ** 2 + log2(k / row.k) ** 2 + log2(n / row.n) ** 2  # octaves between the shapes
        if squared == 0:
            return estimate * ratio
        weight = squared**-2
        total, correction = total + weight, correction + weight * log(ratio)
    return estimate * exp(correction / total) if total else estimate


def _product_rows(hardware: Hardware, precision: Precision, kind: ProductKind) -> list[ProductRate]:
    return [row for row in hardware.products if row.kind == kind and row.precision == precision]


def product_flops(hardware: Hardware, precision: Precision) -> float:
    """FLOP/s of large products."""
    if precision == "bf16":
        return hardware.flops
    return hardware.flops_fp32 or min(hardware.flops, hardware.peak_flops_fp32 or hardware.flops)


def encoder_seconds(hardware: Hardware, precision: Precision, width: int, flops: float) -> float:
    """Seconds of so many operations in products of this width."""
    rows = round(flops / (2 * width * width))
    return product_seconds(hardware, precision, rows, width, width) if rows else 0.0


def attention_seconds(
    hardware: Hardware, precision: Precision, tokens: int, length: int, width: int
) -> tuple[float, float]:
    """(forward, backward) seconds of causal attention over `tokens` in sequences of `length`.

    width: heads x head size. Rates are interpolated between measured lengths; beyond them the nearest is used.
    """
    operations = 2.0 * tokens * length * width
    rows = sorted((row for row in hardware.attention if row.precision == precision), key=lambda row: row.length)
    if not rows:
        rate = ATTENTION_SHARE * product_flops(hardware, precision)
        return operations / rate, ATTENTION_BACKWARD * operations / rate
    low = max((row for row in rows if row.length <= length), key=lambda row: row.length, default=rows[0])
    high = next((row for row in rows if row.length >= length), rows[-1])
    forward = _between(low, high, length, low.forward_flops, high.forward_flops)
    backward = _between(low, high, length, low.backward_flops, high.backward_flops)
    return operations / forward, 2 * operations / backward


def elementwise_seconds(
    hardware: Hardware, precision: Precision, nbytes: float, passes: float = ELEMENTWISE_PASSES
) -> tuple[float, float]:
    """(forward, backward) seconds of everything in a layer except products and attention.

    nbytes: what autograd saves of the layer. passes: times that these bytes move through device memory in the forward
    pass, if no rate is measured.
    """
    if rows := [row for row in hardware.elementwise if row.precision == precision]:
        forward = _seconds_between([(row.nbytes, row.nbytes / row.forward_bandwidth) for row in rows], nbytes)
        return forward, _seconds_between([(row.nbytes, row.nbytes / row.backward_bandwidth) for row in rows], nbytes)
    forward = passes * nbytes / (hardware.device_bandwidth or inf)
    return forward, ELEMENTWISE_BACKWARD * forward


def optimizer_bandwidth(hardware: Hardware, threads: int) -> float:
    """Bytes per second, read plus written, of the optimizer pass on `threads` threads (0: all)."""
    known = hardware.optimizer_bandwidth
    if threads == 0 or not known:
        return hardware.host_bandwidth
    if threads <= known[0][0]:
        return known[0][1] * threads / known[0][0]
    for (fewer, slow), (more, fast) in pairwise(known):
        if threads <= more:
            return slow + (fast - slow) * (threads - fewer) / (more - fewer)
    return known[-1][1]


def duplex_bandwidths(hardware: Hardware) -> tuple[float, float]:
    """(fetches, gradients) in bytes per second while both directions of the bus are in use."""
    fetch = hardware.duplex_fetch_bandwidth or hardware.fetch_bandwidth
    return fetch, hardware.duplex_grad_bandwidth or hardware.grad_bandwidth


def bus_bandwidths(hardware: Hardware, transfer: Transfer) -> tuple[float, float]:
    """(weights, gradients) in bytes per second over the bus, each direction alone."""
    if transfer != "pageable":
        return hardware.fetch_bandwidth, hardware.grad_bandwidth
    copied = copy_bandwidth(hardware)  # the driver copies through its own pinned buffer
    fetch = hardware.pageable_fetch_bandwidth or min(copied, hardware.fetch_bandwidth)
    return fetch, hardware.pageable_grad_bandwidth or min(copied, hardware.grad_bandwidth)


def copy_bandwidth(hardware: Hardware) -> float:
    """Bytes per second that one thread copies within host memory."""
    return hardware.host_copy_bandwidth or ASSUMED_COPY


def disk_bandwidths(hardware: Hardware) -> tuple[float, float]:
    """(reads, writes) in bytes per second, each alone."""
    return hardware.disk_read_bandwidth or ASSUMED_DISK, hardware.disk_write_bandwidth or ASSUMED_DISK


def duplex_disk_bandwidths(hardware: Hardware) -> tuple[float, float]:
    """(reads, writes) in bytes per second while both are in progress, as in a step with state on the disk."""
    read, write = disk_bandwidths(hardware)
    return hardware.disk_duplex_read_bandwidth or read, hardware.disk_duplex_write_bandwidth or write


def host_dram_bandwidth(hardware: Hardware) -> float:
    """Bytes per second of host memory, which all streams share. If not measured, the most that one of them reaches."""
    known = hardware.host_bandwidth, hardware.norm_bandwidth or 0.0, sum(duplex_bandwidths(hardware))
    return hardware.host_dram_bandwidth or max(known)


def _estimated_seconds(hardware: Hardware, precision: Precision, m: int, k: int, n: int) -> float:
    seconds = 2.0 * m * k * n / product_flops(hardware, precision)
    if hardware.device_bandwidth is not None:
        seconds += WEIGHT_NBYTES[precision] * (m * k + k * n + m * n) / hardware.device_bandwidth
    return max(seconds, hardware.launch_seconds or 0.0)


def _between(low: AttentionRate, high: AttentionRate, length: int, slow: float, fast: float) -> float:
    """The rate at `length`, interpolated linearly over the logarithm of the length. slow, fast: rates at both ends."""
    if low.length >= high.length:
        return slow
    share = log(length / low.length) / log(high.length / low.length)
    return slow + share * (fast - slow)


def _seconds_between(measured: Iterable[tuple[int, float]], nbytes: float) -> float:
    """Seconds of `nbytes`, linear from zero through the `measured` points (bytes, seconds) and beyond the largest.
    Points at least as slow as a larger one are ignored."""
    points = [(0, 0.0)]
    for size, seconds in sorted(measured, reverse=True):
        if len(points) == 1 or (size < points[1][0] and seconds < points[1][1]):
            points.insert(1, (size, seconds))
    pairs = list(pairwise(points))
    (low, less), (high, more) = next((pair for pair in pairs if nbytes <= pair[1][0]), pairs[-1])
    return less + (nbytes - low) / (high - low) * (more - less)


# Ops ------------------------------------------------------------------------------------------------------------------
#
# Prices of ops: from floating-point operations and bytes to seconds on a described machine.
#
# A call costs the matrix products of its unit's parameters for its number of tokens, attention, elementwise ops, and
# kernel launches. A copy costs its bytes over a bandwidth. `Calibration` corrects prices by measured times, per kind of
# op and of unit. Useful operations (`step_flops`) are only the necessary ones, so recomputation costs time but does not
# count. Contention between streams is in `contention`, and in `replay` for compute and optimizer on the same cores.


MOVED_SHARE: dict[Kernels, float] = {"stock": 1.0, "fused": 0.4}
"""Bytes that elementwise kernels move for each byte saved of a layer, over those of the library's. Fused: of what a
fused layer saves, counted by `python -m bench.fused_layer`."""

KERNELS, KERNELS_PER_PARAM = 12, 3
"""Kernels that a layer's forward launches: so many, and so many more for each parameter. Round numbers, which matter
only if kernels are tiny."""

LAUNCH_RATIO: dict[Kernels, float] = {"stock": 1.0, "fused": 0.37}
"""Kernels that a layer launches, relative to transformers' own layer; fused: the most of the shapes that `python -m
bench.fused_layer` counts, forward and backward."""

CHUNK_KERNEL_SHARE = 0.8
"""Kernels that a chunk of a layer's token-wise parts launches, over the layer's: as the calls of functions that each
takes (`tests/train/test_calls.py`). So many since leaves and hooks of a layer are made once for its slot, those of a
chunk each time."""

HEAD_KERNELS = 22
"""Beside those of its parameters, for a chunk of the loss: as many as its calls take. It runs the model's own forward
around the layers, whose masks, positions and containers for outputs cost the host more than its few kernels."""

HOST_LAUNCHES = 10
"""Time that the host takes to submit one kernel of a model (Python, modules, autograd, engine), in multiples of
`launch_seconds`. Fitted to steps of few tokens in `bench/results/gpu.json`: one host; not fitted on CPUs."""

PROLOGUE_KERNELS = 400
"""Time of a prologue in kernel launches: before the first layer, the model's code makes masks and positions with many
small ops and Python. A round number from Llama."""

PHASED_CALL_KERNELS, SWITCH_KERNELS = 220, 3
"""Time in kernel launches that a call in phases adds, for its thread and for watching the functions of a Llama layer;
and of each switch between its thread and the one that runs ops. Measured as multiples of the smallest op by `python -m
bench.phased_calls`."""

SOFTMAX_PASSES = 6
"""Times that the float32 logits of a chunk are read or written for loss and gradient."""

DISPATCH_PASSES = 4
"""Times that hidden states are read or written to dispatch tokens to experts and combine the results, for each expert
of a token. As many again in the backward pass."""

DISPATCH_KERNELS = 12
"""Kernels that a layer's forward launches to sort and count tokens by expert, dispatch and combine them: about those of
transformers' grouped products, which launch no kernel per expert."""


NORMALIZING_PASSES = 4
"""Times that a direction is read or written besides products: its norm, its quotient, and the last iterate."""

DRAM_PASSES = {
    **dict.fromkeys(("FETCH", "GRAD", "RELOAD", "OFFLOAD"), 1),
    **dict.fromkeys(("READ", "WRITE"), 2),  # by the drive, and for the checksum
}
"""Kind of op -> times that its bytes are read from or written to host memory."""

DRAM = "dram"
"""Key for host memory among streams: what all their bytes take at its full bandwidth."""

SAME_DIRECTION = {"RELOAD": "FETCH", "FETCH": "RELOAD", "OFFLOAD": "GRAD", "GRAD": "OFFLOAD"}
"""Kind of op -> the other one that uses the bus in the same direction."""


def step_flops(model: ModelSpec, sequences: Sequence[tuple[int, int]], targets: int | None = None) -> float:
    """Necessary floating-point operations of one step, forward and backward.

    sequences: (count, length) pairs. targets: tokens that need the head; all if `None`.

    Each token costs 6 operations per parameter of a matrix product (Kaplan et al., "Scaling laws for neural language
    models", 2020), and three times the forward operations of causal attention. Parameters of experts count by their
    active share. Embeddings are looked up, not multiplied; a tied one counts once, for the head. A frozen parameter
    costs 4, and 2 below the lowest trained unit, where there is no backward pass.
    """
    layers = head = 0.0
    for index, unit in enumerate(model.units[: model.epilogue + 1]):
        for param in _multiplied(model, unit):
            passes = 1 + (index >= model.lowest_trained) + param.trainable
            numbers = 2.0 * passes * param.numel * param.active
            layers, head = (layers, head + numbers) if unit.kind == "epilogue" else (layers + numbers, head)
    flops = head * (sum(count * length for count, length in sequences) if targets is None else targets)
    for count, length in sequences:
        attention = sum(
            (3.0 if layer >= model.lowest_trained else 1.0)
            * model.units[layer].profile.attention_flops
            * model.units[layer].profile.attended(length)
            for layer in model.layers
        )
        flops += count * length * (layers + attention)
    return flops


def _multiplied(model: ModelSpec, unit: UnitSpec) -> list[ParamSpec]:
    """The parameters of a unit's matrix products, including borrowed (tied) ones."""
    if unit.kind == "prologue":
        return []
    borrowed = [param for param in model.units[0].params if param.name in unit.borrows]
    return [param for param in (*unit.params, *borrowed) if len(param.shape) > 1]


@dataclass(frozen=True)
class Calibration:
    """Measured over predicted seconds by (kind of op, kind of unit); 1 if not measured."""

    factors: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def factor(self, op: Op, model: ModelSpec) -> float:
        return self.of(op.kind, model.units[op.unit].kind)

    def of(self, kind: str, unit: str) -> float:
        """The factor of a kind of op and of unit. If that was not measured, the factor of ops in the same direction of
        the bus."""
        return self.factors.get((kind, unit), self.factors.get((SAME_DIRECTION.get(kind, kind), unit), 1.0))

    def knows(self, kind: str, unit: str) -> bool:
        """Whether this kind itself was measured."""
        return (kind, unit) in self.factors


def calibrate(
    model: ModelSpec,
    timeline: Timeline | Sequence[Timeline],
    price: Callable[[Op], float],
    contention: Contention = NO_CONTENTION,
    *,
    one_processor: bool = False,
) -> Calibration:
    """Compare measured ops with their uncalibrated prices.

    timeline: a measured one, or several of the same schedule; each op then counts with its median.
    contention, one_processor: as in `replay`. They keep mutual slowdown out of the factors: predictions include
    contention, and ops that ran at the same time on one processor share it evenly.
    """
    timelines = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    spent = [_own_seconds(each) if one_processor else _seconds(each) for each in timelines]
    measured: dict[tuple[str, str], float] = defaultdict(float)
    predicted: dict[tuple[str, str], float] = defaultdict(float)
    schedule = timelines[0].schedule
    priced = [price(op) for op in schedule.ops] if one_processor else _seconds(replay(schedule, price, contention))
    for op, expected, *seconds in zip(schedule.ops, priced, *spent, strict=True):
        key = op.kind, model.units[op.unit].kind
        measured[key] += median(seconds)
        predicted[key] += expected
    return Calibration(
        {key: measured[key] / seconds for key, seconds in predicted.items() if seconds and measured[key]}
    )


def _seconds(timeline: Timeline) -> list[float]:
    return [end - start for start, end in zip(timeline.starts, timeline.ends, strict=True)]


def _own_seconds(timeline: Timeline) -> list[float]:
    """Seconds of each op; those in which several ops ran are divided evenly among them. Disk ops count in full."""
    alone = _seconds(timeline)
    changes = []
    for index, op in enumerate(timeline.schedule.ops):
        if op.stream not in DISK_STREAMS and alone[index] > 0:
            alone[index] = 0.0
            changes += [(timeline.starts[index], True, index), (timeline.ends[index], False, index)]
    running: set[int] = set()
    before = 0.0
    for when, starts, index in sorted(changes):  # at the same time, ends come before starts
        for each in running:
            alone[each] += (when - before) / len(running)
        before = when
        if starts:
            running.add(index)
        else:
            running.discard(index)
    return alone


def op_seconds(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    work: Work,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> Callable[[Op], float]:
    """A function that prices each op of a schedule for (model, numerics, policy, work) on `hardware`, in seconds."""
    prices = _Prices(model, numerics, policy, work, hardware)
    if calibration is None:
        return prices.seconds
    return lambda op: prices.seconds(op) * calibration.factor(op, model)


def contention(model: ModelSpec, numerics: Numerics, hardware: Hardware) -> Contention:
    """The bandwidths that streams share on `hardware`. If the device computes in host memory, there are none: streams
    share the cores instead (`one_processor` of `replay`)."""
    if hardware.shares_memory:
        return NO_CONTENTION
    alone = (hardware.fetch_bandwidth, hardware.grad_bandwidth, *disk_bandwidths(hardware))
    both = (*duplex_bandwidths(hardware), *duplex_disk_bandwidths(hardware))
    streams = ("fetch", "grad", *DISK_STREAMS)
    duplex: dict[str, float] = {
        name: min(1.0, slow / fast) for name, slow, fast in zip(streams, both, alone, strict=True) if fast < inf
    }

    def dram_nbytes(op: Op) -> float:
        if passes := DRAM_PASSES.get(op.kind):
            return 0.0 if op.is_within_device else passes * op.nbytes
        if op.kind in CALLS or (op.stream != "host" and op.kind in (*get_args(UpdateStep), "NORM")):
            return 0.0
        if op.kind == "UPDATE":
            return op.share * update_nbytes(layout_of(model.units[op.unit]), numerics)
        if op.kind in ("MOMENTUM", "APPLY"):
            return step_nbytes(op, model, numerics)
        if op.kind == "NORM":
            return sum(access.stop - access.start for access in op.reads)
        if op.stream == "shared":
            return touched_in_host_nbytes(op, model)
        through_host = op.kind in COLLECTIVES and hardware.link_route == "host"
        return through_host_nbytes(hardware, model, op) if through_host else 0.0

    return Contention(host_dram_bandwidth(hardware), dram_nbytes, duplex, link_shares(hardware))


def recompute_seconds(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    work: Work,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> Callable[[int, int, str], float]:
    """(layer, tokens of a micro-batch, `SavedOutputs` or "") -> seconds that the layer's backward pass spends on
    recomputing it, if its forward has saved these outputs."""
    prices, known = _Prices(model, numerics, policy, work, hardware), {}
    factor = 1.0 if calibration is None else calibration.of("BACKWARD", "layer")

    def seconds(layer: int, tokens: int, kept: str) -> float:
        key = unit_cost_key(model.units[layer]), tokens, kept
        if key not in known:
            known[key] = factor * work.repeats * prices.forward(model.units[layer], tokens, kept)
        return known[key]

    return seconds


class _Prices:
    """Prices of ops, cached by kind of op, unit and size, since a schedule has many equal ones."""

    def __init__(self, model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, hardware: Hardware) -> None:
        self.model, self.numerics, self.policy = model, numerics, policy
        self.work, self.hardware = work, hardware
        self._known: dict[tuple[object, ...], float] = {}
        self._shapes: dict[object, int] = {}
        self._lowest = model.lowest_trained
        self._shape_of: dict[int, int] = {}
        """Unit -> number of its shape, which is faster to hash than the shape."""
        self._copies = hardware.device_bandwidth or float("inf")
        self._launch = hardware.launch_seconds or 0.0
        self._fresh = hardware.fresh_bandwidth if hardware.shares_memory and hardware.fresh_bandwidth else float("inf")
        self._disk = (duplex_disk_bandwidths if hardware.shares_memory else disk_bandwidths)(hardware)
        self._bus = bus_bandwidths(hardware, policy.transfer)

    def seconds(self, op: Op) -> float:
        return self._of_call(op) if op.kind in CALLS else self._of_copy(op)

    def _of_copy(self, op: Op) -> float:
        """Seconds of a copy, a collective, a norm or an update."""
        match op.kind:
            case "FETCH" | "RELOAD" | "GRAD" | "OFFLOAD":
                if op.is_within_device:
                    return self._launch + 2 * op.nbytes / self._copies
                casts = self._cast(op) if len(op.writes) > len(op.reads) else 0.0
                return len(op.reads) * self._launch + op.nbytes / self._bus[op.stream == "grad"] + casts
            case "PLACE":
                return self._launch + 2 * op.nbytes / self._copies
            case "READ":
                return self._launch + op.nbytes / self._disk[0]
            case "WRITE":
                return self._launch + op.nbytes / self._disk[1]
            case "NORM":
                read = sum(access.stop - access.start for access in op.reads)
                on_host = self.hardware.norm_bandwidth or self.hardware.host_bandwidth
                return read / (on_host if op.stream == "host" else self._copies)
            case "UPDATE":
                touched = update_nbytes(layout_of(self.model.units[op.unit]), self.numerics)
                if op.stream != "host":
                    return op.share * touched / self._copies
                return op.share * touched / optimizer_bandwidth(self.hardware, self.policy.host_threads)
            case "MOMENTUM" | "APPLY":
                on_host = optimizer_bandwidth(self.hardware, self.policy.host_threads)
                moved = step_nbytes(op, self.model, self.numerics)
                return moved / (on_host if op.stream == "host" else self._copies)
            case "ORTHOGONALIZE":
                group = groups_of(layout_of(self.model.units[op.unit]).trained, self.model)[op.shard]
                shares, form = group.shares(self.model.ranks), self.model.newton_schulz
                return max(share_seconds(self.hardware, form, share) for share in shares)  # all ranks wait for the last
            case _ if op.stream == "shared":
                bandwidth = optimizer_bandwidth(self.hardware, self.policy.host_threads)
                return shared_seconds(op, self.model, bandwidth)
            case "GATHER":
                return self._launch + gather_seconds(self.hardware, self.model.ranks, collective_nbytes(op, self.model))
            case "REDUCE" | "ALLTOALL":
                nbytes, ranks = collective_nbytes(op, self.model), self.model.ranks
                passes = SUM_PASSES if op.kind == "REDUCE" else 2
                after = ranks * self._launch + passes * nbytes / self._copies
                return self._launch + reduce_seconds(self.hardware, ranks, nbytes) + after
        raise AssertionError(f"no price of {op.kind}")

    def _of_call(self, op: Op) -> float:
        kept = _kept_for(op)
        unit, tokens = self.model.units[op.unit], self.work.tokens[op.micro]
        first = op.kind == "LOSS" and op.micro == 0
        if op.unit not in self._shape_of:
            self._shape_of[op.unit] = self._shapes.setdefault(unit_cost_key(unit), len(self._shapes))
        shape = self._shape_of[op.unit]
        key = op.kind, shape, tokens, kept, first, op.unit > self._lowest
        if key not in self._known:
            self._known[key] = self.work.repeats * self._compute(op, unit, tokens, kept)
            self._known[key] += _fresh_nbytes(self.model, self.numerics, op, tokens) / self._fresh
        phases = self._launch * (SWITCH_KERNELS * (op.shard >= 0) + PHASED_CALL_KERNELS * (op.shard == 0))
        return self._known[key] * op.share + phases + 2 * _offloaded_nbytes(op) / self._copies

    def _cast(self, op: Op) -> float:
        """Seconds to cast a gradient on the device to the dtype that crosses the bus."""
        read, casts = op.reads[0], op.writes[len(op.reads) :]
        moved = sum(read.stop - read.start + cast.stop - cast.start for cast in casts)
        return len(casts) * self._launch + moved / self._copies

    def _compute(self, op: Op, unit: UnitSpec, tokens: int, kept: str) -> float:
        if op.kind == "LOSS":
            return self._loss(unit, tokens)
        if unit.kind == "prologue" or op.unit > self.model.epilogue:
            return self._lookup(op, tokens)
        if op.kind == "FORWARD":
            return self.forward(unit, tokens, "")
        recomputed = 0.0 if kept == "graph" else self.forward(unit, tokens, kept)
        return self._backward(op.unit, unit, tokens) + recomputed

    def forward(self, unit: UnitSpec, tokens: int, kept: str) -> float:
        """Seconds of a layer's forward. kept: outputs that an earlier one saved, so need not be computed, or ""."""
        shares = {"chosen": unit.profile.outputs.chosen_share, "attention": unit.profile.outputs.spared_share}
        products = sum(self._product(param, tokens) for param in _multiplied(self.model, unit))
        attention, _ = self._attention(unit, tokens)
        computed = (1 - shares.get(kept, 0.0)) * products + (0.0 if kept else attention)
        computed += self._elementwise(unit, tokens)[0] + self._dispatch(unit, tokens)
        return self._bounded_by_submission(computed, self._launches(unit))

    def _backward(self, index: int, unit: UnitSpec, tokens: int) -> float:
        """Products for the gradients of inputs and of trained weights, attention, elementwise ops, and sums of
        gradients."""
        products = 0.0
        for param in _multiplied(self.model, unit):
            products += self._product(param, tokens, "input gradient")
            products += self._product(param, tokens, "weight gradient") if param.trainable else 0.0
        _, attention = self._attention(unit, tokens)
        added = self._accumulation(index, unit) + self._chunks(unit, tokens)
        others = self._elementwise(unit, tokens)[1] + self._dispatch(unit, tokens)
        submitted = (2 + 3 * CHUNK_KERNEL_SHARE * self._chunk_count(unit, tokens)) * self._launches(unit)
        return self._bounded_by_submission(products + attention + others + added, submitted)

    def _chunks(self, unit: UnitSpec, tokens: int) -> float:
        """Token-wise parts that run in chunks are recomputed, and sum the gradients of their weights in float32."""
        chunks, numel = self._chunk_count(unit, tokens), unit.profile.chunk_numel
        if not chunks:
            return 0.0
        products = sum(self._product(param, tokens) for param in _multiplied(self.model, unit))
        recomputed = (products + self._elementwise(unit, tokens)[0]) * numel / max(1, unit.numel)
        added = numel * (8 + self.numerics.weight_nbytes) / self._copies
        return recomputed + chunks * added

    def _chunk_count(self, unit: UnitSpec, tokens: int) -> int:
        """Chunks that a layer's token-wise parts run in; 0 if they run whole."""
        return -(-tokens // self.numerics.mlp_chunk_tokens) if runs_in_chunks(unit, self.numerics, tokens) else 0

    def _product(self, param: ParamSpec, tokens: int, kind: ProductKind = "output") -> float:
        """Seconds of one of the products of `tokens` with a weight."""
        *experts, n, k = param.shape
        count, rows = 1, tokens
        if param.active < 1:  # a product for each expert
            count, rows = prod(experts), max(1, round(tokens * param.active))
            count = min(count, tokens * max(1, round(count * param.active)))
        else:  # a single product, as of a convolution
            n *= prod(experts)
        shape = {"output": (rows, k, n), "input gradient": (rows, n, k), "weight gradient": (n, rows, k)}[kind]
        return count * product_seconds(self.hardware, self.numerics.precision, *shape, kind)

    def _dispatch(self, unit: UnitSpec, tokens: int) -> float:
        """Seconds in one pass to dispatch tokens to experts and combine the results; 0 without experts."""
        experts = [(prod(param.shape[:-2]), param.active) for param in unit.params if param.active < 1]
        if not experts:
            return 0.0
        chosen = max(1, max(round(count * active) for count, active in experts))
        nbytes = tokens * chosen * self.model.hidden_size * self.numerics.weight_nbytes
        return DISPATCH_PASSES * nbytes / self._copies

    def _attention(self, unit: UnitSpec, tokens: int) -> tuple[float, float]:
        profile = unit.profile
        if not profile.attention_flops:
            return 0.0, 0.0
        length = self.work.length or tokens
        causal = max(1, round(2 * profile.attended(length) - 1))  # length of a causal sequence with as many scores
        width = max(1, round(profile.attention_flops / 4))
        return attention_seconds(self.hardware, self.numerics.precision, tokens, causal, width)

    def _elementwise(self, unit: UnitSpec, tokens: int) -> tuple[float, float]:
        """(forward, backward) seconds of elementwise ops, by the bytes that autograd saves."""
        length = self.work.length or tokens
        saved = unit.profile.kept(max(1, tokens // length), length)
        nbytes = saved * MOVED_SHARE[self.numerics.kernels]
        return elementwise_seconds(self.hardware, self.numerics.precision, nbytes)

    def _bounded_by_submission(self, computed: float, launches: float) -> float:
        """Seconds of kernels and their launches. On a GPU, no less than the host takes to submit them; a CPU computes
        nothing meanwhile."""
        if self.hardware.computes_in_host_memory:
            return computed + HOST_LAUNCHES * launches
        return max(computed + launches, HOST_LAUNCHES * launches)

    def _launches(self, unit: UnitSpec) -> float:
        """Seconds of a unit's kernel launches in one forward."""
        dispatch = DISPATCH_KERNELS if any(param.active < 1 for param in unit.params) else 0
        share = LAUNCH_RATIO[self.numerics.kernels] if unit.kind == "layer" else 1.0
        return self._launch * (share * (KERNELS + KERNELS_PER_PARAM * len(unit.params)) + dispatch)

    def _accumulation(self, index: int, unit: UnitSpec) -> float:
        """Seconds to write a unit's gradient, read it again and add it to the sum."""
        numel = layout_of(unit).trained.size
        sum_nbytes = accumulator_nbytes(self.model, self.numerics, self.work, index)
        return numel * (2 * self.numerics.weight_nbytes + 2 * sum_nbytes) / self._copies

    def _loss(self, unit: UnitSpec, tokens: int) -> float:
        """Head and cross-entropy, forward and backward, by chunks, of which the last may be smaller."""
        chunks, rest = divmod(tokens, min(self.numerics.loss_chunk_tokens, tokens))
        seconds = chunks * self._loss_chunk(unit, min(self.numerics.loss_chunk_tokens, tokens))
        return seconds + (self._loss_chunk(unit, rest) if rest else 0.0)

    def _loss_chunk(self, unit: UnitSpec, chunk: int) -> float:
        """chunk: its tokens."""
        products = added = 0.0
        for param in _multiplied(self.model, unit):
            products += self._product(param, chunk) + self._product(param, chunk, "input gradient")
            if param.trainable:
                products += self._product(param, chunk, "weight gradient")
                element_nbytes = 2 * self.numerics.weight_nbytes + 2 * 4
                added += param.numel * element_nbytes / self._copies
        moved = SOFTMAX_PASSES * 4 * chunk * self.model.vocab_size
        softmax, _ = elementwise_seconds(self.hardware, "fp32", moved, passes=1)
        launches = self._launch * (HEAD_KERNELS + KERNELS_PER_PARAM * len(unit.params))
        return self._bounded_by_submission(products + added + softmax, 3 * launches)

    def _lookup(self, op: Op, tokens: int) -> float:
        """Seconds of the prologue, or of a unit of an encoder. An embedding reads one row per token, but its gradient
        is as large as the table. An encoder takes what products of the hidden size with as many operations take."""
        rows = 2 * tokens * self.model.hidden_size * self.numerics.weight_nbytes / self._copies * (op.unit == 0)
        profile = self.model.units[op.unit].profile.of("images")
        encoder = partial(encoder_seconds, self.hardware, self.numerics.precision, self.model.hidden_size)
        values = tokens * self.work.values_per_token
        if op.kind == "FORWARD":
            return rows + self._launch * PROLOGUE_KERNELS + encoder(profile.value_flops * values)
        recomputed = self._launch * (PROLOGUE_KERNELS + 2 * KERNELS)  # its forward saves nothing
        computed = encoder(profile.value_flops_backward * values)
        return 3 * rows + self._accumulation(op.unit, self.model.units[op.unit]) + recomputed + computed


def _fresh_nbytes(model: ModelSpec, numerics: Numerics, op: Op, tokens: int) -> float:
    """Bytes of new pages that the op touches first, on a device that computes in host memory.

    Freed memory stays with the process and is reused. Only the aligned block of a chunk's logits is too large for the
    gap that the one before left.
    """
    if op.kind != "LOSS" or op.micro:
        return 0.0
    return min(numerics.loss_chunk_tokens, tokens) * model.vocab_size * numerics.weight_nbytes


def _offloaded_nbytes(op: Op) -> int:
    """Bytes of saved outputs that a forward copies to the slots from which they are offloaded."""
    writes = op.writes if op.kind == "FORWARD" else ()
    saved = [each for each in writes if isinstance(each.content, Saved) and each.content.offloaded]
    return sum([each.stop - each.start for each in saved])


def _kept_for(op: Op) -> str:
    """What the forward kept for this backward besides the input: `graph`, one of `SavedOutputs`, or ""."""
    for access in op.reads if op.kind == "BACKWARD" else ():
        match access.content:
            case LayerGraph(unit=unit) if unit == op.unit:  # another may hold a side value
                return "graph"
            case Saved(keep=keep):
                return keep
    return ""


def update_nbytes(layout: Layout, numerics: Numerics) -> int:
    """Bytes that the optimizer pass reads and writes for a unit."""
    return touched_nbytes(arrays_of(layout.trained, numerics), (0, layout.trained.own_size))


def share_seconds(hardware: Hardware, form: NewtonSchulz, share: MatrixGroup) -> float:
    """Seconds to make several matrices orthogonal, one after the other."""
    return sum(stack.stacked * orthogonal_seconds(hardware, form, stack.rows, stack.columns) for stack in share.stacks)


@lru_cache(maxsize=4096)
def orthogonal_seconds(hardware: Hardware, form: NewtonSchulz, rows: int, columns: int) -> float:
    """Seconds of Newton-Schulz iterations on a matrix: three products each, of which two are symmetric, and passes over
    it before and after."""
    m, n = sorted((rows, columns))
    blocks = symmetric_blocks(m)
    shapes = [(stop - start, inner, stop) for start, stop in blocks for inner in (n, m)] + [(m, m, n)]
    products = sum(product_seconds(hardware, form.precision, *shape) for shape in shapes)
    return form.steps * products + NORMALIZING_PASSES * m * n * form.nbytes / (hardware.device_bandwidth or inf)


def step_nbytes(op: Op, model: ModelSpec, numerics: Numerics) -> int:
    """Bytes that MOMENTUM or APPLY reads and writes: of each element a direction, and a gradient and a momentum, or a
    master."""
    nbytes = model.newton_schulz.nbytes
    accesses = op.writes if op.kind == "MOMENTUM" else op.reads
    numel = sum(each.stop - each.start for each in accesses if isinstance(each.content, Direction)) // nbytes
    if op.kind == "MOMENTUM":
        return numel * (nbytes + numerics.grad_nbytes + 2 * STATE_NBYTES)
    low = 0 if numerics.precision == "fp32" else LOW_BITS_NBYTES
    return numel * (nbytes + 2 * (numerics.weight_nbytes + low))


@lru_cache(maxsize=4096)
def unit_cost_key(unit: UnitSpec) -> tuple[object, ...]:
    """Equal for units that cost the same."""
    params = tuple((param.shape, param.active, param.trainable) for param in unit.params)
    return unit.kind, params, unit.profile
