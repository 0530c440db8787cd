"""Prices ops on a described machine: from floating-point operations and bytes to seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import exp, inf, log, log2, prod
from statistics import median

from megatrain.plan.collective_cost import (
    SUM_PASSES,
    gather_seconds,
    link_shares,
    reduce_seconds,
    shared_seconds,
    shared_sum_nbytes,
    through_host_nbytes,
)
from megatrain.schedule import Op, Timeline, replay
from megatrain.schedule.contents import LayerGraph, Saved
from megatrain.schedule.ops import CALLS, COLLECTIVES
from megatrain.schedule.passes.gradients import accumulator_nbytes
from megatrain.schedule.passes.state_buffers import MOMENTS_NBYTES, units_alike
from megatrain.schedule.passes.workspace import runs_in_chunks
from megatrain.schedule.replay import DISK_STREAMS
from megatrain.spec import (
    IN_HOST,
    WEIGHT_NBYTES,
    Hardware,
    ModelSpec,
    Numerics,
    ParamSpec,
    Placement,
    Policy,
    Precision,
    Transfer,
    UnitSpec,
    Work,
)
from megatrain.spec.contention import NO_CONTENTION, Contention
from megatrain.spec.hardware import AttentionRate
from megatrain.spec.layout import Layout, layout_of

# Rates ----------------------------------------------------------------------------------------------------------------
#
# Seconds of the pieces of a step on a described machine: products, attention, the optimizer pass.
#
# A product costs its operations at the machine's rate plus its bytes at the device's bandwidth, and never less than a
# launch: small and thin products are slow for these reasons on any device. Where products have been measured, that
# estimate is corrected by the ratio of measured to estimated time, interpolated between the measured shapes, so that a
# measured shape is met exactly and one far from all of them keeps the estimate's form. It leaves out what a layer does
# besides products and attention, and contention between streams.


ASSUMED_DISK = 1e9
"""Bytes per second of a drive that has not been measured."""

ASSUMED_COPY = 8e9
"""Bytes per second that one thread copies within host memory, where that has not been measured."""

ATTENTION_SHARE = 0.5
"""Assumed rate of attention, as a share of that of large products, where it has not been measured."""

ATTENTION_BACKWARD = 2.5
"""Operations of attention backward over forward, where neither has been measured: five products to two, since kernels
compute the scores again (FlashAttention's papers count so). A measured row counts two; its rate is as much lower."""

ELEMENTWISE_PASSES = 4.3
"""Times that PyTorch's kernels, one by one, move the bytes that autograd keeps of a layer, where that has not been
measured: fitted by `python -m bench.published` to what other systems have published that run the library's layers
eagerly, beside the rate of products, which came out as the library of machines has it (1.01)."""

ELEMENTWISE_BACKWARD = 2
"""Elementwise time backward over forward, where it has not been measured; assumed, also in that fit."""

MEASURED_OVER_PLANNED = 0.91, 1.11
"""Measured over planned speed, on a described machine: between these lie four fifths of the published points that were
kept out of the fit (`python -m bench.published`: 15 of them, other systems' schedules replayed as a plan is)."""


def product_seconds(hardware: Hardware, precision: Precision, m: int, k: int, n: int) -> float:
    """Seconds of one matrix product [m, k] x [k, n]."""
    estimate = _estimated_seconds(hardware, precision, m, k, n)
    total = correction = 0.0
    for row in hardware.products:
        if row.precision != precision:
            continue
        ratio = 2.0 * row.m * row.k * row.n / row.flops / _estimated_seconds(hardware, precision, row.m, row.k, row.n)
        squared = log2(m / row.m) ** 2 + log2(k / row.k) ** 2 + log2(n / row.n) ** 2  # octaves between the shapes
        if squared == 0:
            return estimate * ratio
        weight = squared**-2
        total, correction = total + weight, correction + weight * log(ratio)
    return estimate * exp(correction / total) if total else estimate


def product_flops(hardware: Hardware, precision: Precision) -> float:
    """Floating-point operations per second of large products."""
    if precision == "bf16":
        return hardware.flops
    return hardware.flops_fp32 or min(hardware.flops, hardware.peak_flops_fp32 or hardware.flops)


def attention_seconds(
    hardware: Hardware, precision: Precision, tokens: int, length: int, width: int
) -> tuple[float, float]:
    """Seconds of causal attention forward and backward, over `tokens` in sequences of `length`.

    `width` is heads x head size. Between measured lengths rates are interpolated, beyond them the nearest holds.
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
    """Seconds forward and backward of what a layer does besides products and attention.

    `nbytes` is what autograd keeps of it. Where rates have not been measured they pass through memory so many times at
    its speed, and take twice as long backward.
    """
    for row in hardware.elementwise:
        if row.precision == precision:
            return nbytes / row.forward_bandwidth, nbytes / row.backward_bandwidth
    if hardware.elementwise_bandwidth:
        forward = nbytes / hardware.elementwise_bandwidth
    else:
        forward = passes * nbytes / (hardware.device_bandwidth or inf)
    return forward, ELEMENTWISE_BACKWARD * forward


def optimizer_bandwidth(hardware: Hardware, threads: int) -> float:
    """Bytes per second, read plus written, of the optimizer pass on `threads` threads (0: all there are)."""
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
    """Bytes per second of fetches and of gradients while both are under way."""
    fetch = hardware.duplex_fetch_bandwidth or hardware.fetch_bandwidth
    return fetch, hardware.duplex_grad_bandwidth or hardware.grad_bandwidth


def bus_bandwidths(hardware: Hardware, transfer: Transfer) -> tuple[float, float]:
    """Bytes per second of weights and of gradients that cross the bus, each way alone."""
    if transfer != "pageable":
        return hardware.fetch_bandwidth, hardware.grad_bandwidth
    copied = packing_bandwidth(hardware)  # the driver does it, through a buffer of its own
    fetch = hardware.pageable_fetch_bandwidth or min(copied, hardware.fetch_bandwidth)
    return fetch, hardware.pageable_grad_bandwidth or min(copied, hardware.grad_bandwidth)


def packing_bandwidth(hardware: Hardware) -> float:
    """Bytes per second that one thread copies into a pinned staging buffer, or out of one."""
    return hardware.host_copy_bandwidth or ASSUMED_COPY


def disk_bandwidths(hardware: Hardware) -> tuple[float, float]:
    """Bytes per second that are read and written, each alone."""
    return hardware.disk_read_bandwidth or ASSUMED_DISK, hardware.disk_write_bandwidth or ASSUMED_DISK


def duplex_disk_bandwidths(hardware: Hardware) -> tuple[float, float]:
    """The same while both are under way, as in a step with state on the disk."""
    read, write = disk_bandwidths(hardware)
    return hardware.disk_duplex_read_bandwidth or read, hardware.disk_duplex_write_bandwidth or write


def host_dram_bandwidth(hardware: Hardware) -> float:
    """Bytes per second of host memory that all streams share: at the least what any of them was measured to reach."""
    known = hardware.host_bandwidth, hardware.norm_bandwidth or 0.0, sum(duplex_bandwidths(hardware))
    return hardware.host_dram_bandwidth or max(known)


def _estimated_seconds(hardware: Hardware, precision: Precision, m: int, k: int, n: int) -> float:
    seconds = 2.0 * m * k * n / product_flops(hardware, precision)
    if hardware.device_bandwidth is not None:
        seconds += WEIGHT_NBYTES[precision] * (m * k + k * n + m * n) / hardware.device_bandwidth
    return max(seconds, hardware.launch_seconds or 0.0)


def _between(low: AttentionRate, high: AttentionRate, length: int, slow: float, fast: float) -> float:
    """The rate at `length`, on a straight line over the logarithm of the length; the nearest beyond both ends."""
    if low.length >= high.length:
        return slow
    share = log(length / low.length) / log(high.length / low.length)
    return slow + share * (fast - slow)


# Ops ------------------------------------------------------------------------------------------------------------------
#
# Prices of ops: floating-point operations, bytes, and from them seconds on a described machine.
#
# An op costs the products that its unit's real parameters make at its number of tokens, its attention, what passes
# through memory on the way, and the kernels that it launches. Copies cost bytes over a bandwidth. `Calibration`
# corrects the prices by measured times, by kind of op and of unit, where there are any. Useful operations
# (`step_flops`) are the *necessary* ones: two per parameter and token in the forward and four in the backward, less
# where parameters are frozen; what a policy recomputes costs time but is no useful work. Left out: contention between
# streams, but for cores that compute and the optimizer share (`replay`).


COMPILED_SHARE = 1 / 3
"""Fused elementwise kernels move this share of the bytes that the library's do; assumed."""

KERNELS, KERNELS_PER_PARAM = 12, 3
"""Kernels that a layer's forward launches: a round number, and so many for each parameter. It matters where kernels are
tiny."""

PROLOGUE_KERNELS = 400
"""Launches that a prologue is worth: the model's own code makes masks and positions before its first layer, by many
small ops and more Python. A round number from Llama's."""

CALL_KERNELS, TURN_KERNELS = 220, 3
"""Launches that a call in phases is worth, for its thread and for watching a Llama layer's functions, and each turn
between its thread and the one that runs ops. Measured in smallest ops: `python -m bench.phased_calls --turns`."""

SOFTMAX_PASSES = 6
"""Times that the float32 logits of a chunk are read or written for loss and gradient."""

DISPATCH_PASSES = 4
"""Times that the hidden states of tokens, each as often as it has experts, are read or written on their way to experts
and back: gathered, and added where they came from. A backward does the same the other way round."""

DISPATCH_KERNELS = 12
"""Kernels that a layer launches for it, one way: to sort tokens by expert, to count them, and to bring them there and
back; about what the library's code for grouped products has, whose experts are not launched one by one."""


DRAM_PASSES = {
    **dict.fromkeys(("FETCH", "GRAD", "RELOAD", "OFFLOAD"), 1),
    **dict.fromkeys(("PACK", "UNPACK"), 2),
    **dict.fromkeys(("READ", "WRITE"), 2),  # the drive's copy, and the checksum's
}
"""Kind of op -> times that its bytes are read from host memory or written to it."""

DRAM = "dram"
"""Among the seconds of streams: those of host memory, which they share."""

LIKE = {"RELOAD": "FETCH", "FETCH": "RELOAD", "OFFLOAD": "GRAD", "GRAD": "OFFLOAD"}
"""Kinds of ops that go the same way of the bus."""


def step_flops(model: ModelSpec, sequences: Sequence[tuple[int, int]], targets: int | None = None) -> float:
    """Necessary floating-point operations of one step (forward and backward) over `sequences`: (count, length) pairs.

    Per token 6 for each parameter of a matrix product (Kaplan et al. 2020), and three times the forward operations of
    causal attention. A parameter of experts counts by its active share. An embedding is looked up, not multiplied; a
    tied one counts, once, for the head. What is frozen needs no gradient: 4, and 2 below all that trains, where there
    is no backward pass. Only `targets` tokens need the head; all of them do where that is `None`.
    """
    each = head = 0.0
    for index, unit in enumerate(model.units):
        for param in _multiplied(model, unit):
            passes = 1 + (index >= model.lowest_trained) + param.trainable
            numbers = 2.0 * passes * param.numel * param.active
            each, head = (each, head + numbers) if unit.kind == "epilogue" else (each + numbers, head)
    flops = head * (sum(count * length for count, length in sequences) if targets is None else targets)
    for count, length in sequences:
        attention = sum(
            (3.0 if layer >= model.lowest_trained else 1.0)
            * model.units[layer].profile.attention_flops
            * model.units[layer].profile.attended(length)
            for layer in model.layers
        )
        flops += count * length * (each + attention)
    return flops


def _multiplied(model: ModelSpec, unit: UnitSpec) -> list[ParamSpec]:
    """Parameters that this unit's tokens are multiplied with."""
    if unit.kind == "prologue":
        return []
    borrowed = [param for param in model.units[0].params if param.name in unit.borrows]
    return [param for param in (*unit.params, *borrowed) if len(param.shape) > 1]


@dataclass(frozen=True)
class Calibration:
    """Measured over predicted seconds, by (kind of op, kind of unit); 1 where nothing was measured."""

    factors: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def factor(self, op: Op, model: ModelSpec) -> float:
        return self.of(op.kind, model.units[op.unit].kind)

    def of(self, kind: str, unit: str) -> float:
        """Of a kind of op and of unit; what goes the same way of the bus tells for what has not been measured."""
        return self.factors.get((kind, unit), self.factors.get((LIKE.get(kind, kind), unit), 1.0))

    def knows(self, kind: str, unit: str) -> bool:
        """Whether that very kind was measured."""
        return (kind, unit) in self.factors


def calibrate(
    model: ModelSpec,
    timeline: Timeline | Sequence[Timeline],
    price: Callable[[Op], float],
    contention: Contention = NO_CONTENTION,
    *,
    one_processor: bool = False,
) -> Calibration:
    """Compare a measured timeline with the uncalibrated prices of the same ops; of several, of one schedule, each op's
    median.

    `contention`, `one_processor`: as in `replay`. What slows ops down beside each other is no fault of their prices;
    those that were under way at the same time on one processor share it.
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
    """Seconds of each op; those in which several were under way are shared out evenly. The disk's are its own."""
    own = _seconds(timeline)
    changes = []
    for index, op in enumerate(timeline.schedule.ops):
        if op.stream not in DISK_STREAMS and own[index] > 0:
            own[index] = 0.0
            changes += [(timeline.starts[index], True, index), (timeline.ends[index], False, index)]
    alive: set[int] = set()
    before = 0.0
    for when, starts, index in sorted(changes):  # what ends at a moment goes before what starts
        for each in alive:
            own[each] += (when - before) / len(alive)
        before = when
        if starts:
            alive.add(index)
        else:
            alive.discard(index)
    return own


def op_seconds(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    work: Work,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> Callable[[Op], float]:
    """A price for each op of a schedule of (model, numerics, policy, work) on `hardware`, in seconds."""
    prices = _Prices(model, numerics, policy, work, hardware)
    if calibration is None:
        return prices.seconds
    return lambda op: prices.seconds(op) * calibration.factor(op, model)


def contention(model: ModelSpec, numerics: Numerics, hardware: Hardware) -> Contention:
    """What the streams of a step share on `hardware`. Where the device computes in host memory, they run on the same
    cores instead (`replay`'s `one_processor`)."""
    if hardware.shares_memory:
        return NO_CONTENTION
    alone = (hardware.fetch_bandwidth, hardware.grad_bandwidth, *disk_bandwidths(hardware))
    both = (*duplex_bandwidths(hardware), *duplex_disk_bandwidths(hardware))
    streams = ("fetch", "grad", *DISK_STREAMS)
    duplex: dict[str, float] = {
        name: min(1.0, slow / fast) for name, slow, fast in zip(streams, both, alone, strict=True) if fast < inf
    }

    def dram_nbytes(op: Op) -> float:
        if op.kind in CALLS:
            return 0.0
        if op.kind in ("UPDATE", "NORM") and op.stream != "host":
            return 0.0
        if op.kind == "UPDATE":
            return update_nbytes(layout_of(model.units[op.unit]), numerics)
        if op.kind == "NORM":
            return sum(access.stop - access.start for access in op.reads)
        if op.stream == "shared":
            return shared_sum_nbytes(op) if op.kind == "REDUCE" else 0.0
        if op.kind in COLLECTIVES and hardware.link_route == "host":
            return through_host_nbytes(hardware, model.ranks, op)
        return DRAM_PASSES.get(op.kind, 0) * op.nbytes

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
            known[key] = factor * work.repeats * prices.again(model.units[layer], tokens, kept)
        return known[key]

    return seconds


class _Prices:
    """Computed once per kind of op, unit and size; a schedule has many alike."""

    def __init__(self, model: ModelSpec, numerics: Numerics, policy: Policy, work: Work, hardware: Hardware) -> None:
        self.model, self.numerics, self.policy = model, numerics, policy
        self.work, self.hardware = work, hardware
        self._known: dict[tuple[object, ...], float] = {}
        self._shapes: dict[object, int] = {}
        self._lowest = model.lowest_trained
        self._shape_of: dict[int, int] = {}
        """Unit -> number of its shape: quicker to look up than the shape itself."""
        self._copies = hardware.device_bandwidth or float("inf")
        self._launch = hardware.launch_seconds or 0.0
        self._fresh = hardware.fresh_bandwidth if hardware.shares_memory and hardware.fresh_bandwidth else float("inf")
        self._disk = (duplex_disk_bandwidths if hardware.shares_memory else disk_bandwidths)(hardware)
        self._bus, self._packing = bus_bandwidths(hardware, policy.transfer), packing_bandwidth(hardware)

    def seconds(self, op: Op) -> float:
        return self._of_call(op) if op.kind in CALLS else self._of_copy(op)

    def _of_copy(self, op: Op) -> float:
        """Of a copy, a collective, a norm or an update."""
        match op.kind:
            case "FETCH" | "RELOAD" | "GRAD" | "OFFLOAD":
                if op.reads[0].buffer.startswith("device/") and op.writes[0].buffer.startswith("device/"):
                    return self._launch + 2 * op.nbytes / self._copies
                return len(op.reads) * self._launch + op.nbytes / self._bus[op.stream == "grad"] + self._cast(op)
            case "PLACE":
                return self._launch + 2 * op.nbytes / self._copies
            case "PACK" | "UNPACK":
                return op.nbytes / self._packing
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
                return touched / optimizer_bandwidth(self.hardware, self.policy.host_threads)
            case "REDUCE" | "BARRIER" if op.stream == "shared":
                return shared_seconds(op, optimizer_bandwidth(self.hardware, self.policy.host_threads))
            case "GATHER":
                whole = op.writes[0].stop - op.writes[0].start
                return self._launch + gather_seconds(self.hardware, self.model.ranks, whole)
            case "REDUCE":
                terms = op.reads[0].stop - op.reads[0].start
                summed = self.model.ranks * self._launch + SUM_PASSES * terms / self._copies
                return self._launch + reduce_seconds(self.hardware, self.model.ranks, terms) + summed
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
            self._known[key] += self._fresh_nbytes(op, tokens) / self._fresh
        return self._known[key] * op.share + self._turning(op) + self._packing_seconds(op)

    def _packing_seconds(self, op: Op) -> float:
        """Of the outputs that a forward copies to the slot by which they leave the device."""
        if op.kind != "FORWARD":
            return 0.0
        packed = [each for each in op.writes if isinstance(each.content, Saved) and each.content.offloaded]
        return sum([2 * (each.stop - each.start) / self._copies for each in packed])

    def _cast(self, op: Op) -> float:
        """What a gradient takes to get the dtype that crosses the bus: read in one, written in the other."""
        read, casts = op.reads[0], op.writes[len(op.reads) :]
        moved = sum(read.stop - read.start + cast.stop - cast.start for cast in casts)
        return len(casts) * self._launch + moved / self._copies

    def _turning(self, op: Op) -> float:
        """What a call takes beyond its work where it is in phases (`schedule.passes.phases`)."""
        return self._launch * (TURN_KERNELS * (op.shard >= 0) + CALL_KERNELS * (op.shard == 0))

    def _fresh_nbytes(self, op: Op, tokens: int) -> float:
        """Memory that the op is the first to touch, in a device that computes in host memory.

        What is freed there stays with the process and is used again; but a block as large as a chunk's logits, which
        torch wants aligned, does not fit the hole that the last one has left.
        """
        if op.kind != "LOSS" or op.micro:
            return 0.0
        return min(self.numerics.loss_chunk_tokens, tokens) * self.model.vocab_size * self.numerics.weight_nbytes

    def _compute(self, op: Op, unit: UnitSpec, tokens: int, kept: str) -> float:
        if op.kind == "LOSS":
            return self._loss(unit, tokens)
        if unit.kind == "prologue":
            return self._lookup(op, tokens)
        if op.kind == "FORWARD":
            return self._forward(unit, tokens)
        return self._backward(op.unit, unit, tokens) + (0.0 if kept == "graph" else self.again(unit, tokens, kept))

    def _forward(self, unit: UnitSpec, tokens: int) -> float:
        return self.again(unit, tokens, "")

    def again(self, unit: UnitSpec, tokens: int, kept: str) -> float:
        """A layer's forward; kept: what an earlier one has stored."""
        shares = {"chosen": unit.profile.outputs.chosen_share, "attention": unit.profile.outputs.spared_share}
        products = sum(self._product(param, tokens) for param in _multiplied(self.model, unit))
        attention, _ = self._attention(unit, tokens)
        again = (1 - shares.get(kept, 0.0)) * products + (0.0 if kept else attention)
        return again + self._passing(unit, tokens)[0] + self._kernels(unit) + self._dispatch(unit, tokens)

    def _backward(self, index: int, unit: UnitSpec, tokens: int) -> float:
        """Twice the products (one of them only for what trains), attention's own, and the gradients added up."""
        products = 0.0
        for param in _multiplied(self.model, unit):
            products += self._product(param, tokens, inner=True)
            products += self._product(param, tokens, outer=True) if param.trainable else 0.0
        _, attention = self._attention(unit, tokens)
        added = self._adding(index, unit) + self._chunks(unit, tokens)
        passing = self._passing(unit, tokens)[1] + self._dispatch(unit, tokens)
        return products + attention + passing + added + 2 * self._kernels(unit)

    def _chunks(self, unit: UnitSpec, tokens: int) -> float:
        """Token-wise parts that run in chunks compute each once more, and sum their weights' gradients in float32."""
        if not runs_in_chunks(unit, self.numerics, tokens):
            return 0.0
        chunks, numel = -(-tokens // self.numerics.mlp_chunk_tokens), unit.profile.chunk_numel
        products = sum(self._product(param, tokens) for param in _multiplied(self.model, unit))
        again = (products + self._passing(unit, tokens)[0]) * numel / max(1, unit.numel)
        return again + chunks * (numel * (8 + self.numerics.weight_nbytes) / self._copies + 3 * self._kernels(unit))

    def _product(self, param: ParamSpec, tokens: int, *, inner: bool = False, outer: bool = False) -> float:
        """Seconds of tokens x weight; with `inner` of the gradient of its input, with `outer` of the weight's."""
        *experts, n, k = param.shape
        count, each = 1, tokens
        if param.active < 1:  # by expert
            count, each = prod(experts), max(1, round(tokens * param.active))
            count = min(count, tokens * max(1, round(count * param.active)))
        else:  # one kernel for all, as a convolution is
            n *= prod(experts)
        shape = (n, each, k) if outer else (each, n, k) if inner else (each, k, n)
        return count * product_seconds(self.hardware, self.numerics.precision, *shape)

    def _dispatch(self, unit: UnitSpec, tokens: int) -> float:
        """Seconds one way of bringing tokens to experts and back; 0 where there are none."""
        experts = [(prod(param.shape[:-2]), param.active) for param in unit.params if param.active < 1]
        if not experts:
            return 0.0
        chosen = max(1, max(round(count * active) for count, active in experts))
        nbytes = tokens * chosen * self.model.hidden_size * self.numerics.weight_nbytes
        return DISPATCH_PASSES * nbytes / self._copies + DISPATCH_KERNELS * self._launch

    def _attention(self, unit: UnitSpec, tokens: int) -> tuple[float, float]:
        profile = unit.profile
        if not profile.attention_flops:
            return 0.0, 0.0
        length = self.work.length or tokens
        seen = max(1, round(2 * profile.attended(length) - 1))  # as long a sequence, fully attended, has as much to do
        width = max(1, round(profile.attention_flops / 4))
        return attention_seconds(self.hardware, self.numerics.precision, tokens, seen, width)

    def _passing(self, unit: UnitSpec, tokens: int) -> tuple[float, float]:
        """What layers do besides products and attention is about proportional to the bytes that autograd keeps."""
        nbytes = self._kept(unit, tokens) * (COMPILED_SHARE if self.numerics.kernels == "compile" else 1.0)
        return elementwise_seconds(self.hardware, self.numerics.precision, nbytes)

    def _kept(self, unit: UnitSpec, tokens: int) -> int:
        """Bytes that autograd keeps of a unit."""
        length = self.work.length or tokens
        return unit.profile.kept(max(1, tokens // length), length)

    def _kernels(self, unit: UnitSpec) -> float:
        return self._launch * (KERNELS + KERNELS_PER_PARAM * len(unit.params))

    def _adding(self, index: int, unit: UnitSpec) -> float:
        """A unit's gradient is written by its products, then read and added to the sum."""
        numel = layout_of(unit).trained.size
        each = accumulator_nbytes(self.model, self.numerics, self.work, index)
        return numel * (2 * self.numerics.weight_nbytes + 2 * each) / self._copies

    def _loss(self, unit: UnitSpec, tokens: int) -> float:
        """Head and cross-entropy, chunk by chunk, with each chunk's backward; the last chunk may be smaller."""
        chunks, rest = divmod(tokens, min(self.numerics.loss_chunk_tokens, tokens))
        seconds = chunks * self._chunk(unit, min(self.numerics.loss_chunk_tokens, tokens))
        return seconds + (self._chunk(unit, rest) if rest else 0.0)

    def _chunk(self, unit: UnitSpec, chunk: int) -> float:
        products = added = 0.0
        for param in _multiplied(self.model, unit):
            products += self._product(param, chunk) + self._product(param, chunk, inner=True)
            if param.trainable:
                products += self._product(param, chunk, outer=True)
                each = 2 * self.numerics.weight_nbytes + 2 * 4
                added += param.numel * each / self._copies
        passing = SOFTMAX_PASSES * 4 * chunk * self.model.vocab_size
        softmax, _ = elementwise_seconds(self.hardware, "fp32", passing, passes=1)
        return products + added + softmax + 3 * self._kernels(unit)

    def _lookup(self, op: Op, tokens: int) -> float:
        """An embedding reads a row per token; its gradient is as large as the table."""
        rows = 2 * tokens * self.model.hidden_size * self.numerics.weight_nbytes / self._copies
        if op.kind == "FORWARD":
            return rows + self._launch * PROLOGUE_KERNELS
        again = self._launch * (PROLOGUE_KERNELS + 2 * KERNELS)  # nothing of its forward has been kept
        return 3 * rows + self._adding(op.unit, self.model.units[op.unit]) + again


def _kept_for(op: Op) -> str:
    """What a backward finds of its layer beside the input, `graph` or one of `SavedOutputs`; empty for nothing."""
    for access in op.reads if op.kind == "BACKWARD" else ():
        match access.content:
            case LayerGraph():
                return "graph"
            case Saved(keep=keep):
                return keep
    return ""


def update_nbytes(layout: Layout, numerics: Numerics) -> int:
    """Read and written by the optimizer pass over what trains in a unit: gradient, weights, low bits, m and v."""
    low = 0 if numerics.precision == "fp32" else 2
    return layout.trained.own_size * (numerics.grad_nbytes + 2 * (numerics.weight_nbytes + low + 8))


@lru_cache(maxsize=4096)
def unit_cost_key(unit: UnitSpec) -> tuple[object, ...]:
    """Equal for units that cost the same."""
    params = tuple((param.shape, param.active, param.trainable) for param in unit.params)
    return unit.kind, params, unit.profile


# State placed elsewhere -----------------------------------------------------------------------------------------------
#
# What placements other than host memory add to the work of each stream, and what they save, as seconds of a step.
#
# Plain sums of bytes over bandwidths, compared with all state in host memory: enough to tell which placements are worth
# a replay. Left out: whether the streams overlap, which only a replay knows.


LOW_BITS_NBYTES = 2


def placement_seconds(
    model: ModelSpec, numerics: Numerics, policy: Policy, hardware: Hardware, rounds: float = 1.0
) -> tuple[dict[str, float], dict[str, float]]:
    """Stream -> seconds that the policy's placements add, negative where they save some; those behind the forward.
    rounds: of a step."""
    found, late = Counter[str](), Counter[str]()
    for index, placement, count in units_alike(model, policy):
        if placement == IN_HOST:
            continue
        for stream, seconds in _of_unit(model, numerics, policy, hardware, index, placement, rounds).items():
            found[stream] += count * seconds  # type: ignore[assignment]
        for stream, seconds in _of_disk_late(model, numerics, policy, hardware, index, placement, rounds).items():
            late[stream] += count * seconds  # type: ignore[assignment]
    half = {"fetch": 0.5, "grad": 1.0, **({} if policy.update == "next_forward" else {"host": 1.0, "compute": 1.0})}
    behind = {**late, **{stream: share * found.get(stream, 0.0) for stream, share in half.items()}}
    return _with_dram(found, hardware, policy), _with_dram(behind, hardware, policy)


def _with_dram(added: Mapping[str, float], hardware: Hardware, policy: Policy) -> dict[str, float]:
    """With what the bytes that these streams move take of host memory's bandwidth."""
    if hardware.shares_memory:
        return dict(added)
    (fetching, leaving), (reading, writing) = (
        bus_bandwidths(hardware, policy.transfer),
        duplex_disk_bandwidths(hardware),
    )
    packing, optimizer = 2 * packing_bandwidth(hardware), optimizer_bandwidth(hardware, policy.host_threads)
    rates = {"fetch": fetching, "grad": leaving, "pack": packing, "unpack": packing, "host": optimizer}
    rates |= {"read": 2 * reading, "write": 2 * writing}
    moved = sum(seconds * rates.get(stream, 0.0) for stream, seconds in added.items() if seconds)
    return {**added, DRAM: moved / host_dram_bandwidth(hardware)}


def _of_unit(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    hardware: Hardware,
    index: int,
    placement: Placement,
    rounds: float,
) -> dict[str, float]:
    layout = layout_of(model.units[index])
    weights, trained = layout.own_size * numerics.weight_nbytes, layout.trained.own_size
    visits = rounds * (2 if index in model.layers and index >= model.lowest_trained else 1)
    sums = 4 * layout.trained.size * (rounds - 1)  # that wait between rounds
    fetches = visits + int(index == 0 and model.tied and policy.read_ahead_nbytes > 0)  # for the head, from one read
    fetching, leaving = bus_bandwidths(hardware, policy.transfer)
    packing = packing_bandwidth(hardware) if policy.transfer == "staged" else inf
    if placement.on_device:
        touched = update_nbytes(layout, numerics)
        return {
            "fetch": -(fetches * weights + sums) / fetching,
            "pack": -(fetches * weights + sums) / packing,
            "grad": -(trained * numerics.grad_nbytes + sums) / leaving,
            "unpack": -(trained * numerics.grad_nbytes + sums) / packing,
            "host": -touched / optimizer_bandwidth(hardware, policy.host_threads),
            "compute": touched / (hardware.device_bandwidth or inf),
        }
    saved = -(fetches - 1) * weights if placement.weights == "device" else 0
    read_each = _read_nbytes(layout, numerics, placement)
    packed = -fetches * read_each if read_each else saved  # staging buffers are page-locked
    unpacked = -trained * numerics.grad_nbytes if placement.gradients == "disk" else 0
    reads = writes = 0.0
    if placement.moments == "disk":
        reads, writes = MOMENTS_NBYTES * trained, MOMENTS_NBYTES * trained
    if placement.low_bits == "disk" and numerics.precision == "bf16":
        reads, writes = reads + LOW_BITS_NBYTES * trained, writes + LOW_BITS_NBYTES * trained
    if placement.gradients == "disk" and policy.update != "during_backward":
        reads, writes = reads + trained * numerics.grad_nbytes, writes + trained * numerics.grad_nbytes
    reads += visits * read_each
    if placement.weights == "disk":
        writes += trained * numerics.weight_nbytes
    reading, writing = duplex_disk_bandwidths(hardware)
    return {
        "fetch": saved / fetching,
        "pack": packed / packing,
        "unpack": unpacked / packing,
        "read": reads / reading,
        "write": writes / writing,
    }


def _of_disk_late(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    hardware: Hardware,
    index: int,
    placement: Placement,
    rounds: float,
) -> dict[str, float]:
    """Of what a unit's placement has the disk do, what it does from the loss on."""
    layout = layout_of(model.units[index])
    again = index in model.layers and index >= model.lowest_trained
    reading, writing = duplex_disk_bandwidths(hardware)
    read_each = rounds * _read_nbytes(layout, numerics, placement) / reading
    weights = read_each if again else 0.0
    if policy.update == "during_backward":
        all_of_it = _of_unit(model, numerics, policy, hardware, index, placement, rounds)
        return {"read": all_of_it.get("read", 0.0) - read_each, "write": all_of_it.get("write", 0.0)}
    gradients = layout.trained.own_size * numerics.grad_nbytes / writing if placement.gradients == "disk" else 0.0
    return {"read": weights, "write": gradients}


def _read_nbytes(layout: Layout, numerics: Numerics, placement: Placement) -> int:
    """Bytes of a unit's weights that each visit reads from the drive."""
    if placement.weights == "disk":
        return layout.own_size * numerics.weight_nbytes
    return (layout.size - layout.files_start) * numerics.weight_nbytes if placement.weights == "file" else 0
