"""Measures a device: products, attention, copies within it and to and from the host, launches.

Everything is submitted through the device protocol and timed by its events, so the same code measures every
device. Measurements alternate in rounds (`measure_in_turn`), and a result is the mean of the middle half of its
rounds: a slow phase of the machine affects all of them, as it would affect a step, and brief interruptions do not
count. Functions roughly keep to the seconds that they are given. The host (optimizer pass, disk) is measured
elsewhere, and sustained speeds of a hot device are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from statistics import fmean, median
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.device.base import Device, Errand, Interval, Work, timed
from megatrain.errors import OutOfDeviceMemory
from megatrain.spec import Precision
from megatrain.spec.hardware import PRODUCT_KINDS, AttentionRate, ElementwiseRate, ProductKind, ProductRate

Made = TypeVar("Made")
Job = Callable[[], object]
Shape = tuple[int, int, int]

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROUNDS = 8
FIRST_USE = 20
"""The first run of a job, which loads or compiles its kernel, may take so many times its share of time."""
MOST_RUNS = 20_000
"""Runs of a job in one round, if a single run is too short to time."""
RUN_SECONDS = {"cpu": 0.003, "cuda": 0.25}
"""Maximum seconds of a job in one round: on a CPU short enough to fit between other processes' time slices, on a GPU
long enough for its clocks to settle."""


def _shapes(rows: Iterable[int], others: Iterable[tuple[int, int]]) -> list[Shape]:
    """Shapes [m, k] x [k, n] of products of all kinds, from small to large. rows: m. others: (k, n)."""
    return sorted(((m, k, n) for m, (k, n) in product(rows, others)), key=prod)


_WEIGHTS = ((256, 256), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096))
PRODUCTS = {
    "cpu": _shapes((64, 256, 1024, 4096), _WEIGHTS),
    "cuda": _shapes((64, 256, 1024, 4096, 16384), (*_WEIGHTS, (8192, 8192), (2048, 32768))),
}
LENGTHS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
ATTENTION_TOKENS = {"cpu": 1024, "cuda": 16384}
HEADS = {"cpu": (8, 64), "cuda": (16, 128)}
"""Number and size of attention heads: those of models that are trained there."""
COPIED_WITHIN = {"cpu": 128 << 20, "cuda": 512 << 20}
"""Bytes of a copy within device memory, larger than caches."""
ELEMENTWISE_SHAPES = {"cpu": ((64, 64), (256, 256), (1024, 1024)), "cuda": ((8192, 4096),)}
"""Tokens and widths of layers without their products. On a CPU, threads share ops of more than 32,768 elements, and
waking them takes longer than a small op does. On a GPU, `launch_seconds` prices small ops."""
PIECE = 64 << 20
"""Bytes of one copy between host and device: a policy's default shard size."""
PIECES_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes per second between host and device, in each direction alone and in both at once."""

    pinned: bool
    """Whether memory of `host.allocate`, used for all but the last two figures, is page-locked."""
    fetch: float
    grad: float
    duplex_fetch: float
    duplex_grad: float
    pageable_fetch: float
    pageable_grad: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Jobs by key, from fast to slow, and a function from the seconds of those that ran to the result."""

    jobs: Mapping[Any, Job]
    result: Callable[[Mapping[Any, float]], Any]
    stream: str = "compute"


def measure_in_turn(
    device: Device, measurements: Mapping[str, Measurement], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Run all measurements in rounds, for about the sum of `seconds` (by name); returns their results by name.

    In each measurement, the first job that takes more than its share of time or memory is skipped, with all after it,
    but never its very first job.
    """
    device.tidy()  # as before steps, which reuse freed memory
    began = time.perf_counter()
    samples: dict[str, dict[Any, list[float]]] = {}
    runs: list[tuple[list[float], Job, int, str]] = []
    with timed(device):
        for name, measurement in measurements.items():
            samples[name] = {}
            for key, (count, once) in _chosen(device, measurement, seconds[name]).items():
                samples[name][key] = [once]
                runs.append((samples[name][key], measurement.jobs[key], count, measurement.stream))
        rounds, total = 0, sum(seconds[name] for name in measurements)
        while rounds < 2 or time.perf_counter() - began < total:
            rounds += 1
            for values, job, count, stream in runs:
                values.append(_run(device, job, count, stream))
    middles = {name: {key: _middle(values) for key, values in by_key.items()} for name, by_key in samples.items()}
    return {name: measurement.result(middles[name]) for name, measurement in measurements.items()}


def _chosen(device: Device, measurement: Measurement, seconds: float) -> dict[Any, tuple[int, float]]:
    """Key -> (runs per round, seconds of one run) of the jobs that are fast enough."""
    began = time.perf_counter()
    share = seconds / len(measurement.jobs)
    turn = min(share / ROUNDS, RUN_SECONDS[device.torch_device.type])
    chosen: dict[Any, tuple[int, float]] = {}
    for key, job in measurement.jobs.items():
        try:
            first = once = _run(device, job, 1, measurement.stream)
            if first <= FIRST_USE * share or not chosen:
                once = min(first, _run(device, job, 1, measurement.stream))
                began += first - once  # what loading or compiling a kernel took does not count
        except OutOfDeviceMemory:
            if not chosen:
                raise
            break
        if chosen and (once > share or time.perf_counter() - began > seconds / 2):
            break
        chosen[key] = max(1, min(MOST_RUNS, int(turn / max(once, 1e-9)))), once
    return chosen


# Measurements ------------------------------------------------------------------------------------------------------


def product_rates(device: Device, precision: Precision) -> dict[ProductKind, Measurement]:
    """Measure each kind of product of linear layers, without those of `PRODUCTS` that are too slow or too large."""
    shapes = [shape for shape in PRODUCTS[device.torch_device.type] if _has_room(device, precision, shape)]
    left = _normal(device, precision, max(m * k for m, k, _ in shapes))
    right = _normal(device, precision, max(k * n for _, k, n in shapes))

    def job(kind: ProductKind, m: int, k: int, n: int) -> Job:
        first, second = left[: m * k], right[: k * n]
        if kind == "output":
            x, weight = first.view(m, k), second.view(n, k)
            return lambda: functional.linear(x, weight)
        gradient, other = first.view(k, m).t() if kind == "weight gradient" else first.view(m, k), second.view(k, n)
        return lambda: gradient @ other

    def result(kind: ProductKind, spent: Mapping[Shape, float]) -> tuple[ProductRate, ...]:
        return tuple(
            ProductRate(precision, *shape, 2.0 * prod(shape) / seconds, kind) for shape, seconds in spent.items()
        )

    return {
        kind: Measurement({shape: job(kind, *shape) for shape in shapes}, partial(result, kind))
        for kind in PRODUCT_KINDS
    }


def attention_rates(device: Device, precision: Precision) -> Measurement:
    """`AttentionRate`s of PyTorch's own causal attention, for the `LENGTHS` that are fast enough."""
    kind = device.torch_device.type
    counts = {length: max(1, ATTENTION_TOKENS[kind] // length) for length in LENGTHS[kind]}
    heads, head_size = HEADS[kind]
    numel = max(count * length for length, count in counts.items()) * heads * head_size
    operands = [_normal(device, precision, numel) for _ in range(4)]

    def attention(length: int, backward: int) -> Job:
        shape = (counts[length], heads, length, head_size)
        *inputs, gradient = (operand[: prod(shape)].view(shape).detach() for operand in operands)
        if backward:
            inputs = [operand.requires_grad_() for operand in inputs]

        @torch.enable_grad()
        def run() -> None:
            out = functional.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
            if backward:
                torch.autograd.grad(out, inputs, gradient)

        return run

    def result(spent: Mapping[tuple[int, int], float]) -> tuple[AttentionRate, ...]:
        rows = []
        for length, count in counts.items():
            if (length, 1) in spent:
                needed = 2.0 * count * length * length * heads * head_size
                forward = spent.get((length, 0), spent[length, 1] / 3)
                backward = _rest(spent[length, 1], forward)
                rows.append(AttentionRate(precision, length, head_size, needed / forward, 2 * needed / backward))
        return tuple(rows)

    return Measurement(
        {(length, backward): attention(length, backward) for length in counts for backward in (1, 0)}, result
    )


def copy_bandwidth(device: Device) -> Measurement:
    """Bytes per second, read plus written, of a copy within device memory."""
    nbytes = COPIED_WITHIN[device.torch_device.type]
    if not device.shares_memory:
        nbytes = min(nbytes, device.free_nbytes() // 8)
    source, target = (_on_compute(device, lambda: _bytes(device, nbytes)) for _ in range(2))
    return Measurement({0: lambda: target.copy_(source)}, lambda spent: 2 * nbytes / spent[0])


def elementwise_rates(device: Device, precision: Precision) -> Measurement:
    """`ElementwiseRate`s of what a Llama-like layer does besides products and attention, for those of
    `ELEMENTWISE_SHAPES` that are fast enough.

    That is two norms computed in float32, rotary positions, a gated activation of triple width, and two residuals.
    What products and attention would keep (their inputs and outputs) counts as kept bytes.
    """
    layers = {
        size: _LayerWithoutProducts(device, precision, *size) for size in ELEMENTWISE_SHAPES[device.torch_device.type]
    }

    def result(spent: Mapping[tuple[tuple[int, int], str], float]) -> tuple[ElementwiseRate, ...]:
        rows = []
        for size, layer in layers.items():
            if both := spent.get((size, "both")):
                forward = spent.get((size, "forward"), both / 3)
                rates = layer.kept_nbytes / forward, layer.kept_nbytes / _rest(both, forward)
                rows.append(ElementwiseRate(precision, *rates, layer.kept_nbytes))
        return tuple(rows)

    jobs = {
        (size, pass_name): getattr(layer, pass_name)
        for size, layer in layers.items()
        for pass_name in ("both", "forward")
    }
    return Measurement(jobs, result)


class _LayerWithoutProducts:
    """A layer without its matrix products and attention, for an input [tokens, width]."""

    def __init__(self, device: Device, precision: Precision, tokens: int, width: int) -> None:
        hidden, up = (_normal(device, precision, tokens * n).view(tokens, n) for n in (width, 3 * width))
        self._scale = _on_compute(device, lambda: torch.ones_like(hidden[0]))
        self._hidden, self._up = hidden.requires_grad_(), up.requires_grad_()
        with torch.enable_grad():
            self.kept_nbytes = _on_compute(device, lambda: _kept_nbytes(self.forward))

    @torch.enable_grad()
    def forward(self) -> list[Tensor]:
        normed = self._norm(self._hidden)
        query, key = self._rotated(normed), self._rotated(normed)
        middle = self._hidden + query
        last = self._norm(middle)
        activated = functional.silu(self._up) * self._up
        return [normed, query, key, middle, last, activated, middle + last]

    @torch.enable_grad()
    def both(self) -> None:
        outputs = self.forward()
        torch.autograd.grad(outputs, [self._hidden, self._up], [output.detach() for output in outputs])

    def _norm(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed: Tensor = self._scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return normed

    def _rotated(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self._hidden + torch.cat([-right, left], -1) * self._hidden


def _rest(both: float, forward: float) -> float:
    """Seconds of the backward as a difference of two measurements, at least those of the forward."""
    return max(both - forward, forward)


def _kept_nbytes(layer: Callable[[], list[Tensor]]) -> int:
    """Bytes of all that autograd saves in `layer` and of all that it returns, each storage once."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        alive.append(tensor)  # so that no address is reused
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an op that saves its own output would hold itself

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        for out in layer():
            save(out)
    alive.clear()  # or the graph, which holds `save`, would hold itself
    return sum(sizes.values())


def launch_seconds(device: Device) -> Measurement:
    """Seconds of the smallest op in a long sequence."""
    one = _on_compute(device, lambda: torch.zeros(1, device=device.torch_device))
    return Measurement({0: lambda: one.add_(1.0)}, lambda spent: spent[0])


def copy_rates(device: Device, seconds: float, piece: int = PIECE) -> CopyRates:
    """Rates of copies of `piece` bytes between host and device, on the streams that the engine uses for them.

    Raises `OutOfDeviceMemory` if two pieces do not fit on the device.
    """
    with ExitStack() as held, timed(device):

        def on_device() -> Tensor:
            memory = device.allocate(piece, "probe")
            held.callback(device.free, memory, "probe")
            return memory

        def on_host() -> Tensor:
            memory = device.host.allocate(piece, "probe")
            held.callback(device.host.free, memory, "probe")
            return memory.fill_(1)

        in_device = [on_device(), on_device()]
        staged = [on_host(), on_host()]
        pageable = [torch.ones(piece, dtype=torch.uint8) for _ in range(2)]
        fetch, grad = ("fetch", in_device[0], staged[0]), ("grad", staged[1], in_device[1])
        slow_fetch, slow_grad = ("fetch", in_device[0], pageable[0]), ("grad", pageable[1], in_device[1])
        share = seconds / 5
        (alone,), (back,) = (_lane_rates(device, [lane], share) for lane in (fetch, grad))
        both = _lane_rates(device, [fetch, grad], share)
        (slow,), (slow_back,) = (_lane_rates(device, [lane], share) for lane in (slow_fetch, slow_grad))
        return CopyRates(staged[0].is_pinned(), alone, back, both[0], both[1], slow, slow_back)


Lane = tuple[str, Tensor, Tensor]
"""(name of the stream, target and source of its copies)."""


def _lane_rates(device: Device, lanes: Sequence[Lane], seconds: float) -> list[float]:
    """Bytes per second of each lane while all of them are busy, the median over rounds."""

    def copy(target: Tensor, source: Tensor) -> Work:
        def run() -> None:
            target.copy_(source, non_blocking=True)

        return run

    began = time.perf_counter()
    sizes = [target.numel() for _, target, _ in lanes]
    rounds: list[list[float]] = []
    while len(rounds) < 2 or time.perf_counter() - began < seconds:
        events = [
            [device.stream(name).submit(Errand(f"probe {name}"), copy(to, of)) for name, to, of in lanes]
            for _ in range(PIECES_IN_A_ROW)
        ]
        device.synchronize()
        intervals = [[row[lane].interval() for row in events] for lane in range(len(lanes))]
        rounds.append(_shared_rates(intervals, sizes))
    return [median(rates) for rates in zip(*rounds[1:], strict=True)]  # the first round touches fresh memory


def _shared_rates(intervals: Sequence[Sequence[Interval]], nbytes: Sequence[int]) -> list[float]:
    """Bytes per second of each lane while all are busy; over the whole time if they never are."""
    opens = max(lane[0][0] for lane in intervals)
    closes = min(lane[-1][1] for lane in intervals)
    if closes <= opens:
        opens = min(lane[0][0] for lane in intervals)
        closes = max(lane[-1][1] for lane in intervals)
    rates = []
    for lane, size in zip(intervals, nbytes, strict=True):
        inside = ((max(began, opens), min(ended, closes), ended - began) for began, ended in lane)
        pieces = sum(max(0.0, closed - opened) / whole for opened, closed, whole in inside if whole > 0)
        rates.append(size * pieces / (closes - opens))
    return rates


# Submitting --------------------------------------------------------------------------------------------------------


def _run(device: Device, job: Job, runs: int, stream: str) -> float:
    """Seconds per run, of `runs` consecutive runs."""

    def repeat() -> None:
        for _ in range(runs):
            job()

    event = device.stream(stream).submit(Errand("probe"), repeat)
    device.synchronize()
    began, ended = event.interval()
    return (ended - began) / runs


def _on_compute(device: Device, make: Callable[[], Made]) -> Made:
    """Call `make` on the compute stream, so that its result's memory belongs to that stream."""
    made: list[Made] = []
    device.stream("compute").submit(Errand("probe: operands"), lambda: made.append(make()))
    device.synchronize()
    return made[0]


def _normal(device: Device, precision: Precision, numel: int) -> Tensor:
    """Random numbers, which take more power than zeros; the user's random state is not changed."""

    def make() -> Tensor:
        generator = torch.Generator(device.torch_device).manual_seed(0)
        block = torch.randn(min(numel, 1 << 20), generator=generator, device=device.torch_device).to(DTYPES[precision])
        return block.repeat(-(-numel // block.numel()))[:numel]

    return _on_compute(device, make)


def _bytes(device: Device, nbytes: int) -> Tensor:
    return torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device)


def _has_room(device: Device, precision: Precision, shape: Shape) -> bool:
    m, k, n = shape
    needed = (m * k + k * n + m * n) * DTYPES[precision].itemsize
    return device.shares_memory or 4 * needed <= device.free_nbytes()


def _middle(values: Sequence[float]) -> float:
    """Mean of the middle half."""
    ordered, aside = sorted(values), len(values) // 4
    return fmean(ordered[aside : len(ordered) - aside])


SMALLEST, LARGEST = 512, {"cpu": 2048, "cuda": 8192}
NEXT_SECONDS = 2.0
FEW_ROUNDS, MANY_ROUNDS, SECONDS = 2, 20, 0.5
"""Rounds of products to time: of each size, and of the last one while they take less than so many seconds."""

_MEASURED: WeakKeyDictionary[Device, dict[torch.dtype, float]] = WeakKeyDictionary()


def matmul_flops(device: Device, dtype: torch.dtype) -> float:
    """FLOPs per second of square products of random matrices, one of each kind; the best of a few rounds.

    Measured on the first call for a device and dtype, and cached as long as the device exists. Without bfloat16
    instructions the largest products take minutes, so sizes double from `SMALLEST` while the next are expected to take
    less than `NEXT_SECONDS`.
    """
    measured = _MEASURED.setdefault(device, {})
    if dtype not in measured:
        measured[dtype] = _measured_flops(device, dtype)
    return measured[dtype]


def _measured_flops(device: Device, dtype: torch.dtype) -> float:
    largest = LARGEST[device.torch_device.type]
    size = min(SMALLEST, largest)
    while 8 * (seconds := _products_seconds(device, dtype, size, FEW_ROUNDS)) < NEXT_SECONDS and size < largest:
        size *= 2
    if FEW_ROUNDS * seconds < SECONDS:
        seconds = min(seconds, _products_seconds(device, dtype, size, MANY_ROUNDS))
    return len(PRODUCT_KINDS) * 2.0 * size**3 / seconds


def _products_seconds(device: Device, dtype: torch.dtype, size: int, rounds: int) -> float:
    """Seconds of square products, one of each kind, in the fastest of `rounds`, or of as many as take `SECONDS`."""
    left, right, out = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(3))
    best, started = float("inf"), time.perf_counter()
    for done in range(rounds):
        began = time.perf_counter()
        if done >= FEW_ROUNDS and began - started > SECONDS:
            break
        for first, second in (left, right.t()), (left, right), (left.t(), right):
            torch.mm(first, second, out=out)
        out[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return best
