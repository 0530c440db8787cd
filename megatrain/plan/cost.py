"""Prices of ops: floating-point operations, bytes, and from them seconds on a described machine.

An op costs the products that its unit's real parameters make at its number of tokens, its attention, what passes
through memory on the way, and the kernels that it launches. Copies cost bytes over a bandwidth. `Calibration` corrects
the prices by measured times, by kind of op and of unit, where there are any. Useful operations (`step_flops`) are the
*necessary* ones: two per parameter and token in the forward and four in the backward, less where parameters are frozen;
what a policy recomputes costs time but is no useful work. Left out: contention between streams, but for cores that
compute and the optimizer share (`replay`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from statistics import median

from megatrain.layout import Layout, layout_of
from megatrain.plan.rates import (
    attention_seconds,
    bus_bandwidths,
    disk_bandwidths,
    elementwise_seconds,
    optimizer_bandwidth,
    packing_bandwidth,
    product_seconds,
)
from megatrain.schedule import Op, Timeline
from megatrain.schedule.activations import STORES
from megatrain.schedule.replay import DISK_STREAMS
from megatrain.schedule.sums import accumulator_nbytes
from megatrain.schedule.workspace import runs_in_chunks
from megatrain.spec import Hardware, ModelSpec, ParamSpec, Policy, UnitSpec, Work

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
between its thread and the one that runs ops. Measured in smallest ops: `python -m bench.gates --turns`."""

SOFTMAX_PASSES = 6
"""Times that the float32 logits of a chunk are read or written for loss and gradient."""


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
    *,
    one_processor: bool = False,
) -> Calibration:
    """Compare a measured timeline with the uncalibrated prices of the same ops; of several, of one schedule, each op's
    median.

    `one_processor`: as in `replay`; ops that were under way at the same time then share it.
    """
    timelines = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    spent = [_own_seconds(each) if one_processor else _seconds(each) for each in timelines]
    measured: dict[tuple[str, str], float] = defaultdict(float)
    predicted: dict[tuple[str, str], float] = defaultdict(float)
    for op, *seconds in zip(timelines[0].schedule.ops, *spent, strict=True):
        key = op.kind, model.units[op.unit].kind
        measured[key] += median(seconds)
        predicted[key] += price(op)
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
    model: ModelSpec, policy: Policy, work: Work, hardware: Hardware, calibration: Calibration | None = None
) -> Callable[[Op], float]:
    """A price for each op of a schedule of (model, policy, work) on `hardware`, in seconds."""
    prices = _Prices(model, policy, work, hardware)
    if calibration is None:
        return prices.seconds
    return lambda op: prices.seconds(op) * calibration.factor(op, model)


def forward_seconds(
    model: ModelSpec, policy: Policy, work: Work, hardware: Hardware, calibration: Calibration | None = None
) -> Callable[[int, int, str], float]:
    """(layer, tokens of a micro-batch, what its forward has stored: a word of `STORES` or none) -> seconds in which its
    backward computes it again."""
    prices, known = _Prices(model, policy, work, hardware), {}
    factor = 1.0 if calibration is None else calibration.of("BACKWARD", "layer")

    def seconds(layer: int, tokens: int, kept: str) -> float:
        key = shape_of(model.units[layer]), tokens, kept
        if key not in known:
            known[key] = factor * work.repeats * prices.again(model.units[layer], tokens, kept)
        return known[key]

    return seconds


class _Prices:
    """Computed once per kind of op, unit and size; a schedule has many alike."""

    def __init__(self, model: ModelSpec, policy: Policy, work: Work, hardware: Hardware) -> None:
        self.model, self.policy, self.work, self.hardware = model, policy, work, hardware
        self._known: dict[tuple[object, ...], float] = {}
        self._shapes: dict[object, int] = {}
        self._shape_of: dict[int, int] = {}
        """Unit -> number of its shape: quicker to look up than the shape itself."""
        self._copies = hardware.device_bandwidth or float("inf")
        self._launch = hardware.launch_seconds or 0.0
        self._fresh = hardware.fresh_bandwidth if hardware.shares_memory and hardware.fresh_bandwidth else float("inf")
        self._disk = disk_bandwidths(hardware)
        self._bus, self._packing = bus_bandwidths(hardware, policy.transit), packing_bandwidth(hardware)

    def seconds(self, op: Op) -> float:
        match op.kind:
            case "FETCH" | "RELOAD":
                return self._launch + op.nbytes / self._bus[0]
            case "GRAD" | "OFFLOAD":
                return self._launch + op.nbytes / self._bus[1] + self._cast(op)
            case "PLACE":
                return self._launch + 2 * op.nbytes / self._copies
            case "PACK" | "UNPACK":
                return op.nbytes / self._packing
            case "READ":
                return self._launch + op.nbytes / self._disk[0]
            case "WRITE":
                return self._launch + op.nbytes / self._disk[1]
            case "ADD":
                return sum(a.stop - a.start for a in (*op.reads, *op.writes)) / self.hardware.host_bandwidth
            case "NORM":
                read = sum(access.stop - access.start for access in op.reads)
                return read / (self.hardware.norm_bandwidth or self.hardware.host_bandwidth)
            case "UPDATE":
                touched = update_nbytes(layout_of(self.model.units[op.unit]), self.policy)
                if op.stream == "compute":  # where the whole state is on the device
                    return touched / self._copies
                return touched / optimizer_bandwidth(self.hardware, self.policy.host_threads)
        kept = _kept_for(op)
        unit, tokens = self.model.units[op.unit], self.work.tokens[op.micro]
        first = op.kind == "LOSS" and op.micro == 0
        if op.unit not in self._shape_of:
            self._shape_of[op.unit] = self._shapes.setdefault(shape_of(unit), len(self._shapes))
        shape = self._shape_of[op.unit]
        key = op.kind, shape, tokens, kept, first, op.unit > self.model.lowest_trained
        if key not in self._known:
            self._known[key] = self.work.repeats * self._compute(op, unit, tokens, kept)
            self._known[key] += self._fresh_nbytes(op, tokens) / self._fresh
        return self._known[key] * op.share + self._turning(op)

    def _cast(self, op: Op) -> float:
        """What a gradient takes to get the dtype that crosses the bus: read in one, written in the other."""
        (read,), casts = op.reads, op.writes[1:]
        moved = sum(read.stop - read.start + cast.stop - cast.start for cast in casts)
        return len(casts) * self._launch + moved / self._copies

    def _turning(self, op: Op) -> float:
        """What a call takes beyond its work where it is in phases (`schedule.phases`)."""
        return self._launch * (TURN_KERNELS * (op.shard >= 0) + CALL_KERNELS * (op.shard == 0))

    def _fresh_nbytes(self, op: Op, tokens: int) -> float:
        """Memory that the op is the first to touch, in a device that computes in host memory.

        What is freed there stays with the process and is used again; but a block as large as a chunk's logits, which
        torch wants aligned, does not fit the hole that the last one has left.
        """
        if op.kind != "LOSS" or op.micro:
            return 0.0
        return min(self.policy.loss_chunk_tokens, tokens) * self.model.vocab_size * self.policy.weight_nbytes

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
        shares = {"chosen": unit.profile.chosen_share, "attention": unit.profile.spared_share}
        products = sum(self._product(param, tokens) for param in _multiplied(self.model, unit))
        attention, _ = self._attention(unit, tokens)
        again = (1 - shares.get(kept, 0.0)) * products + (0.0 if kept else attention)
        return again + self._passing(unit, tokens)[0] + self._kernels(unit)

    def _backward(self, index: int, unit: UnitSpec, tokens: int) -> float:
        """Twice the products (one of them only for what trains), attention's own, and the gradients added up."""
        products = 0.0
        for param in _multiplied(self.model, unit):
            products += self._product(param, tokens, inner=True)
            products += self._product(param, tokens, outer=True) if param.trainable else 0.0
        _, attention = self._attention(unit, tokens)
        added = self._adding(index, unit) + self._chunks(unit, tokens)
        return products + attention + self._passing(unit, tokens)[1] + added + 2 * self._kernels(unit)

    def _chunks(self, unit: UnitSpec, tokens: int) -> float:
        """Token-wise parts that run in chunks compute each once more, and sum their weights' gradients in float32."""
        if not runs_in_chunks(unit, self.policy, tokens):
            return 0.0
        chunks, numel = -(-tokens // self.policy.mlp_chunk_tokens), unit.profile.chunk_numel
        products = sum(self._product(param, tokens) for param in _multiplied(self.model, unit))
        again = (products + self._passing(unit, tokens)[0]) * numel / max(1, unit.numel)
        return again + chunks * (numel * (8 + self.policy.weight_nbytes) / self._copies + 3 * self._kernels(unit))

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
        return count * product_seconds(self.hardware, self.policy.precision, *shape)

    def _attention(self, unit: UnitSpec, tokens: int) -> tuple[float, float]:
        profile = unit.profile
        if not profile.attention_flops:
            return 0.0, 0.0
        length = self.work.length or tokens
        seen = max(1, round(2 * profile.attended(length) - 1))  # as long a sequence, fully attended, has as much to do
        width = max(1, round(profile.attention_flops / 4))
        return attention_seconds(self.hardware, self.policy.precision, tokens, seen, width)

    def _passing(self, unit: UnitSpec, tokens: int) -> tuple[float, float]:
        """What layers do besides products and attention is about proportional to the bytes that autograd keeps."""
        nbytes = self._kept(unit, tokens) * (COMPILED_SHARE if self.policy.kernels == "compile" else 1.0)
        return elementwise_seconds(self.hardware, self.policy.precision, nbytes)

    def _kept(self, unit: UnitSpec, tokens: int) -> int:
        """Bytes that autograd keeps of a unit."""
        length = self.work.length or tokens
        return unit.profile.kept(max(1, tokens // length), length)

    def _kernels(self, unit: UnitSpec) -> float:
        return self._launch * (KERNELS + KERNELS_PER_PARAM * len(unit.params))

    def _adding(self, index: int, unit: UnitSpec) -> float:
        """A unit's gradient is written by its products, then read and added to the sum."""
        numel = layout_of(unit).trained.size
        each = accumulator_nbytes(self.model, self.policy, self.work, index)
        return numel * (2 * self.policy.weight_nbytes + 2 * each) / self._copies

    def _loss(self, unit: UnitSpec, tokens: int) -> float:
        """Head and cross-entropy, chunk by chunk, with each chunk's backward; the last chunk may be smaller."""
        chunks, rest = divmod(tokens, min(self.policy.loss_chunk_tokens, tokens))
        seconds = chunks * self._chunk(unit, min(self.policy.loss_chunk_tokens, tokens))
        return seconds + (self._chunk(unit, rest) if rest else 0.0)

    def _chunk(self, unit: UnitSpec, chunk: int) -> float:
        products = added = 0.0
        for param in _multiplied(self.model, unit):
            products += self._product(param, chunk) + self._product(param, chunk, inner=True)
            if param.trainable:
                products += self._product(param, chunk, outer=True)
                each = 2 * self.policy.weight_nbytes + 2 * 4
                added += param.numel * each / self._copies
        softmax, _ = elementwise_seconds(self.hardware, "fp32", SOFTMAX_PASSES * 4 * chunk * self.model.vocab_size)
        return products + added + softmax + 3 * self._kernels(unit)

    def _lookup(self, op: Op, tokens: int) -> float:
        """An embedding reads a row per token; its gradient is as large as the table."""
        rows = 2 * tokens * self.model.hidden_size * self.policy.weight_nbytes / self._copies
        if op.kind == "FORWARD":
            return rows + self._launch * PROLOGUE_KERNELS
        again = self._launch * (PROLOGUE_KERNELS + 2 * KERNELS)  # nothing of its forward has been kept
        return 3 * rows + self._adding(op.unit, self.model.units[op.unit]) + again


def _kept_for(op: Op) -> str:
    """What a backward finds of its layer beside the input, `graph` or one of `STORES`; empty for nothing."""
    found = (access.buffer.split("/")[1] for access in op.reads if op.kind == "BACKWARD")
    return next((word for word in found if word == "graph" or word in STORES), "")


def update_nbytes(layout: Layout, policy: Policy) -> int:
    """Read and written by the optimizer pass over what trains in a unit: gradient, weights, low bits, m and v."""
    masters = 0 if policy.precision == "fp32" else 2 if policy.masters == "split" else 4
    return layout.trained.size * (policy.grad_nbytes + 2 * (policy.weight_nbytes + masters + 8))


@lru_cache(maxsize=4096)
def shape_of(unit: UnitSpec) -> tuple[object, ...]:
    """What units that cost the same have in common."""
    params = tuple((param.shape, param.active, param.trainable) for param in unit.params)
    return unit.kind, params, unit.profile
