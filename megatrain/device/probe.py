"""What a device does in a second: products, attention, copies within it and to and from the host, launches.

Everything is submitted through the protocol and timed by its events, so that one code serves every device. Works take
turns in rounds, and a result is the lower quartile over the rounds: what slows a machine for a while slows a round of
each and does not count. Functions stay about within the seconds that they are given. They leave out the host (the
optimizer pass, the disk), and what a device sustains once it is hot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from statistics import median, quantiles
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.device.base import Device, Errand, Interval, Work
from megatrain.errors import OutOfDeviceMemory
from megatrain.spec import AttentionRate, Precision, ProductRate

Key = TypeVar("Key")
Made = TypeVar("Made")
Job = Callable[[], object]
Shape = tuple[int, int, int]

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROUNDS = 8
MOST_RUNS = 20_000
"""Runs of a job in one round, where a single one is too short to be timed."""
RUN_SECONDS = {"cpu": 0.003, "cuda": 0.25}
"""How long a job runs in one round, at most: on a cpu short enough to fall between two turns of other processes, on a
GPU long enough for its clocks to settle."""


def _shapes(tokens: Iterable[int], weights: Iterable[tuple[int, int]]) -> list[Shape]:
    """[m, k] x [k, n], from small to large."""
    return sorted(((m, k, n) for m, (k, n) in product(tokens, weights)), key=prod)


_WEIGHTS = ((256, 256), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096))
PRODUCTS = {
    "cpu": _shapes((64, 256, 1024, 4096), _WEIGHTS),
    "cuda": _shapes((64, 256, 1024, 4096, 16384), (*_WEIGHTS, (8192, 8192), (2048, 32768))),
}
LENGTHS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
ATTENTION_TOKENS = {"cpu": 1024, "cuda": 16384}
HEADS = {"cpu": 4, "cuda": 16}
HEAD_SIZE = 128
COPIED_WITHIN = {"cpu": 128 << 20, "cuda": 512 << 20}
"""Bytes of a copy within device memory: more than caches hold."""
LAYER = {"cpu": (1024, 1024), "cuda": (8192, 4096)}
"""Tokens and width of what stands for a layer without its products."""
PIECE = 64 << 20
"""Bytes of one copy between host and device: the largest shard of a policy, by default."""
PIECES_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes per second between host and device, each way alone and both at once."""

    pinned: bool
    """Whether the memory of `allocate_host` is page-locked; all but the last two are of that memory, either way."""
    fetch: float
    grad: float
    duplex_fetch: float
    duplex_grad: float
    pageable_fetch: float
    pageable_grad: float


def seconds_in_turn(
    device: Device, jobs: Mapping[Key, Job], seconds: float, stream: str = "compute"
) -> dict[Key, float]:
    """Seconds of one run of each job on `stream`, measured in about `seconds` for all of them.

    `jobs` go from quick to slow: the first that takes more than its share of the time or of the memory, and all behind
    it, are left out; but never the very first.
    """
    began = time.perf_counter()
    share = seconds / len(jobs)
    turn = min(share / ROUNDS, RUN_SECONDS[device.torch_device.type])
    runs: dict[Key, int] = {}
    samples: dict[Key, list[float]] = {}
    with _timed(device):
        for key, job in jobs.items():
            try:
                once = _run(device, job, 1, stream)  # the first use of a kernel may take longer
                if once <= share or not runs:
                    once = min(once, _run(device, job, 1, stream))
            except OutOfDeviceMemory:
                if not runs:
                    raise
                break
            if runs and (once > share or time.perf_counter() - began > seconds / 2):
                break
            runs[key] = max(1, min(MOST_RUNS, int(turn / max(once, 1e-9))))
            samples[key] = [once]
        rounds = 0
        while rounds < 2 or time.perf_counter() - began < seconds:
            rounds += 1
            for key, count in runs.items():
                samples[key].append(_run(device, jobs[key], count, stream))
    return {key: _lower_quartile(values) for key, values in samples.items()}


def product_rates(device: Device, precision: Precision, seconds: float) -> tuple[ProductRate, ...]:
    """Rates of products as a linear layer runs them, at those of `PRODUCTS` that are quick and small enough."""
    shapes = [shape for shape in PRODUCTS[device.torch_device.type] if _has_room(device, precision, shape)]
    left = _normal(device, precision, max(m * k for m, k, _ in shapes))
    right = _normal(device, precision, max(k * n for _, k, n in shapes))

    def linear(m: int, k: int, n: int) -> Job:
        x, weight = left[: m * k].view(m, k), right[: k * n].view(n, k)
        return lambda: functional.linear(x, weight)

    with torch.no_grad():
        measured = seconds_in_turn(device, {shape: linear(*shape) for shape in shapes}, seconds)
    return tuple(ProductRate(precision, *shape, 2.0 * prod(shape) / spent) for shape, spent in measured.items())


def attention_rates(device: Device, precision: Precision, seconds: float) -> tuple[AttentionRate, ...]:
    """Rates of PyTorch's own causal attention, forward and backward, at those of `LENGTHS` that are quick enough."""
    kind = device.torch_device.type
    counts = {length: max(1, ATTENTION_TOKENS[kind] // length) for length in LENGTHS[kind]}
    numel = max(count * length for length, count in counts.items()) * HEADS[kind] * HEAD_SIZE
    operands = [_normal(device, precision, numel) for _ in range(4)]

    def attention(length: int, backward: int) -> Job:
        shape = (counts[length], HEADS[kind], length, HEAD_SIZE)
        *inputs, gradient = (each[: prod(shape)].view(shape).detach() for each in operands)
        if backward:
            inputs = [each.requires_grad_() for each in inputs]

        def run() -> None:
            out = functional.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
            if backward:
                torch.autograd.grad(out, inputs, gradient)

        return run

    jobs = {(length, way): attention(length, way) for length in counts for way in (1, 0)}
    with torch.enable_grad():
        measured = seconds_in_turn(device, jobs, seconds)
    rows = []
    for length, count in counts.items():
        if (length, 1) in measured:
            needed = 2.0 * count * length * length * HEADS[kind] * HEAD_SIZE
            forward = measured.get((length, 0), measured[length, 1] / 3)
            backward = max(measured[length, 1] - forward, forward)  # a difference of two measurements: not below that
            rows.append(AttentionRate(precision, length, HEAD_SIZE, needed / forward, 2 * needed / backward))
    return tuple(rows)


def copy_bandwidth(device: Device, seconds: float) -> float:
    """Bytes per second, read plus written, of a copy within device memory."""
    nbytes = COPIED_WITHIN[device.torch_device.type]
    if not device.shares_memory:
        nbytes = min(nbytes, device.free_nbytes() // 8)
    source, target = (_on_compute(device, lambda: _bytes(device, nbytes)) for _ in range(2))
    return 2 * nbytes / seconds_in_turn(device, {0: lambda: target.copy_(source)}, seconds)[0]


def elementwise_bandwidth(device: Device, precision: Precision, seconds: float) -> float:
    """Bytes that autograd keeps of a layer, per second of what its forward does besides products and attention.

    The layer is like Llama's: two norms computed in float32, rotary positions, a gated activation three times as wide,
    two residuals. What products and attention would keep (their inputs and outputs) counts among the bytes kept.
    """
    tokens, width = LAYER[device.torch_device.type]
    hidden, up = (_normal(device, precision, tokens * n).view(tokens, n) for n in (width, 3 * width))
    for each in (hidden, up):
        each.requires_grad_()
    scale = _on_compute(device, lambda: torch.ones(width, device=device.torch_device, dtype=DTYPES[precision]))

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def rotated(x: Tensor) -> Tensor:
        return x * hidden + torch.cat([-x[:, width // 2 :], x[:, : width // 2]], -1) * hidden

    def layer() -> list[Tensor]:
        normed = norm(hidden)
        query, key = rotated(normed), rotated(normed)
        middle = hidden + query
        last = norm(middle)
        activated = functional.silu(up) * up
        return [normed, query, key, middle, last, activated, middle + last]

    with torch.enable_grad():
        kept = _on_compute(device, lambda: _kept_nbytes(layer))
        return kept / seconds_in_turn(device, {0: layer}, seconds)[0]


def _kept_nbytes(layer: Callable[[], list[Tensor]]) -> int:
    """Bytes of all that autograd saves in `layer` and of all that it returns, each storage once."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        alive.append(tensor)  # so that no address is used twice
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        for out in layer():
            save(out)
    return sum(sizes.values())


def launch_seconds(device: Device, seconds: float) -> float:
    """Seconds that the smallest op takes when many follow each other."""
    one = _on_compute(device, lambda: torch.zeros(1, device=device.torch_device))
    return seconds_in_turn(device, {0: lambda: one.add_(1.0)}, seconds)[0]


def copy_rates(device: Device, seconds: float, piece: int = PIECE) -> CopyRates:
    """Rates of copies of `piece` bytes between host and device, on the streams that the engine uses for them.

    Raises `OutOfDeviceMemory` where two pieces do not fit on the device.
    """
    with ExitStack() as held, _timed(device):

        def on_device() -> Tensor:
            memory = device.allocate(piece, "probe")
            held.callback(device.free, memory, "probe")
            return memory

        def on_host() -> Tensor:
            memory = device.allocate_host(piece, "probe")
            held.callback(device.free_host, memory, "probe")
            return memory.fill_(1)

        there = [on_device(), on_device()]
        staged = [on_host(), on_host()]
        pageable = [torch.ones(piece, dtype=torch.uint8) for _ in range(2)]
        fetch, grad = ("fetch", there[0], staged[0]), ("grad", staged[1], there[1])
        slow_fetch, slow_grad = ("fetch", there[0], pageable[0]), ("grad", pageable[1], there[1])
        share = seconds / 5
        (alone,), (back,) = (_lane_rates(device, [lane], share) for lane in (fetch, grad))
        both = _lane_rates(device, [fetch, grad], share)
        (slow,), (slow_back,) = (_lane_rates(device, [lane], share) for lane in (slow_fetch, slow_grad))
        return CopyRates(staged[0].is_pinned(), alone, back, both[0], both[1], slow, slow_back)


Lane = tuple[str, Tensor, Tensor]
"""A stream's name, and where its copies go and come from."""


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
    return [median(rates) for rates in zip(*rounds[1:], strict=True)]  # the first touches memory for the first time


def _shared_rates(intervals: Sequence[Sequence[Interval]], nbytes: Sequence[int]) -> list[float]:
    """Bytes per second of each lane in the window in which all are busy; over the whole time if there is none."""
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


@contextmanager
def _timed(device: Device) -> Iterator[None]:
    """Events tell when their work ran."""
    before = device.timed
    if not before:
        device.timed = True
    try:
        yield
    finally:
        if not before:
            device.timed = False


def _run(device: Device, job: Job, runs: int, stream: str) -> float:
    """Seconds of one of `runs` runs in a row."""

    def repeat() -> None:
        for _ in range(runs):
            job()

    event = device.stream(stream).submit(Errand("probe"), repeat)
    device.synchronize()
    began, ended = event.interval()
    return (ended - began) / runs


def _on_compute(device: Device, make: Callable[[], Made]) -> Made:
    """What `make` makes on the compute stream, whose memory it then is."""
    made: list[Made] = []
    device.stream("compute").submit(Errand("probe: operands"), lambda: made.append(make()))
    device.synchronize()
    return made[0]


def _normal(device: Device, precision: Precision, numel: int) -> Tensor:
    """Random numbers, which cost a device more power than zeros do; the user's random state is left alone."""

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


def _lower_quartile(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else quantiles(values, n=4, method="inclusive")[0]
