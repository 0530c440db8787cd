"""`megatrain probe`: measure this machine in under a minute, as a `Hardware` value.

Combines measurements of the device (`device.probe`), the disk (`memory.probe_disk`), the host's optimizer pass
(`optim`) and the operating system's limits (`plan.host_resources`). The time is divided by weights; a stage that
overruns takes time from later ones. Compute and host memory are measured in turn within one stage, so that rates which
a plan compares come from the same moments. `Hardware.sources` says how each value was measured. Not covered: saving
(`plan.machines.save_hardware`), and sustained rates over hours.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.device import Device
from megatrain.device.probe import (
    PIECE,
    Measurement,
    attention_rates,
    copy_bandwidth,
    copy_rates,
    elementwise_rates,
    launch_seconds,
    measure_in_turn,
    product_rates,
)
from megatrain.errors import DeviceError
from megatrain.formatting import counted
from megatrain.memory.probe_disk import disk_speed, refuse_unwritable
from megatrain.optim import AdamW, HostArrays, StateArrays, sum_of_squares, update_on_host
from megatrain.plan.host_resources import (
    available_disk_nbytes,
    available_host_nbytes,
    available_threads,
    lies_in_memory,
    pinnable_nbytes,
    processor_name,
)
from megatrain.plan.machines import machine_of_device
from megatrain.spec import Hardware, Precision
from megatrain.spec.hardware import PRODUCT_KINDS, AttentionRate, ProductKind, ProductRate
from megatrain.system.paths import usable_path

SECONDS = 45.0
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
PASS_NBYTES_PER_PARAM = 26
"""Bytes per parameter read plus written by the optimizer pass with bfloat16 gradients; 14 of them are stored."""
HELD_NBYTES_PER_PARAM = 14
MOST_PARAMS = 32 << 20
FILE_NBYTES = 256 << 20
FRESH_NBYTES = 64 << 20
MOST_LOCKED_NBYTES = 4 << 30
"""Most bytes to page-lock when testing whether the limit is enforced."""
LEAST_FREE_NBYTES = 64 << 20
"""A disk with less free space than this is not measured."""

_OF_PRECISION = {  # weights of the measurements made in turn in each precision
    "output": 5.0,
    "input gradient": 3.0,
    "weight gradient": 3.0,
    "attention": 5.0,
    "elementwise": 2.0,
}
_IN_TURN = {  # weights of all measurements made in turn
    **{f"{name} {precision}": weight for precision in PRECISIONS for name, weight in _OF_PRECISION.items()},
    "device memory": 1.0,
    "launches": 0.5,
    "optimizer": 5.0,
    "norm": 1.0,
    "host memory": 2.0,
    "all of host memory": 1.0,
    "fresh memory": 0.5,
}
_WEIGHTS = {  # weights of the stages
    "in turn": sum(_IN_TURN.values()),
    "copies": 5.0,
    "disk": 8.0,
}


@dataclass
class _Clock:
    """Divides the remaining seconds among the remaining stages by their weights."""

    ends: float
    weights: dict[str, float]

    def deal(self, stage: str) -> float:
        total = sum(self.weights.values())
        weight = self.weights.pop(stage)
        return max(0.0, self.ends - time.perf_counter()) * weight / total


@dataclass
class _Findings:
    """Values for the fields of `Hardware` found so far, and the source of each."""

    say: Callable[[str], None]
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def note(self, source: str, **values: Any) -> None:
        self.values |= values
        self.sources |= dict.fromkeys(values, source)


def probe(
    device: Device, path: Path, seconds: float = SECONDS, say: Callable[[str], None] = lambda line: None
) -> Hardware:
    """Measure `device`, its host, and the disk that holds the folder `path` (which need not exist yet).

    Takes about `seconds`, calls `say` with a line per stage, and leaves no files behind. Raises `DeviceError` for a
    simulated device, whose speed is a setting, and for a path that is not writable.
    """
    if device.name.startswith("sim:"):
        raise DeviceError("is simulated, with no speed to measure", where=device.name, fix="probe cpu or cuda:0")
    folder = _existing(path)
    refuse_unwritable(folder)
    clock = _Clock(time.perf_counter() + seconds, dict(_WEIGHTS))
    if device.shares_memory:
        del clock.weights["copies"]
    findings = _Findings(say)
    threads = available_threads()
    _identity(device, threads, findings)
    _capacities(device, folder, findings)
    _in_turn(device, threads, seconds, clock.deal("in turn"), findings)
    if not device.shares_memory:
        _copies(device, clock, findings)
    _disk(folder, seconds, clock, findings)
    return Hardware(**findings.values, sources=tuple(findings.sources.items()))


def _identity(device: Device, threads: int, findings: _Findings) -> None:
    model = getattr(device, "model", "")
    host = f"{counted(threads, 'thread')} of {processor_name()}"
    when = f"megatrain probe of {device.name}, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
    findings.note(when, name=f"{model}, {host}" if model else host, shares_memory=device.shares_memory)
    known = machine_of_device(model) if model else None
    if known is not None:
        stated = {key: getattr(known, key) for key in ("peak_flops", "peak_flops_fp32")}
        findings.values |= stated
        origins = dict(known.sources)
        findings.sources |= {key: origins[key] for key in stated if key in origins}
    findings.say(findings.values["name"])


def _capacities(device: Device, folder: Path, findings: _Findings) -> None:
    host = available_host_nbytes()
    pinnable, why = _lockable(device, host)
    on_device = host if device.shares_memory else device.free_nbytes()
    findings.note("free when it was probed, within the cgroups' limits", host_nbytes=host)
    findings.note("the host's" if device.shares_memory else "free when it was probed", device_nbytes=on_device)
    findings.note(why, pinnable_nbytes=pinnable)
    disk = available_disk_nbytes(folder)
    where = "in host memory (tmpfs): no disk" if lies_in_memory(folder) else "free when it was probed"
    findings.note(f"{folder}: {where}", disk_nbytes=disk)
    findings.say(
        f"free: {on_device / 1e9:,.1f} GB on the device, {host / 1e9:,.1f} GB in the host, {disk / 1e9:,.1f} GB on disk"
    )
    if pinnable < host and not device.shares_memory:
        findings.say(f"page-locked memory: at most {pinnable / 1e9:,.3g} GB ({why})")
    if lies_in_memory(folder):
        findings.say(f"{folder} is in host memory (tmpfs), not on a disk: a disk tier there would be useless")


def _lockable(device: Device, host_nbytes: int) -> tuple[int, str]:
    """Bytes of host memory that can be page-locked, and how that is known: some drivers ignore the system's limit."""
    limit, why = pinnable_nbytes(host_nbytes), "the limit on locked memory (RLIMIT_MEMLOCK)"
    if device.shares_memory or limit >= host_nbytes or limit > min(MOST_LOCKED_NBYTES, host_nbytes // 4):
        return limit, why
    memory = device.host.allocate(limit + PIECE, "probe")
    try:
        passed = memory.is_pinned()
    finally:
        device.host.free(memory, "probe")
    return (host_nbytes, f"measured: the driver locks more than the limit, {limit:,} bytes") if passed else (limit, why)


def _in_turn(device: Device, threads: int, whole_seconds: float, seconds: float, findings: _Findings) -> None:
    """Measure compute and passes over host memory in turn, for `seconds`; more time allows larger buffers."""
    most = min(MOST_PARAMS, available_host_nbytes() // 8 // HELD_NBYTES_PER_PARAM)
    numel = max(1 << 16, int(most * min(1.0, whole_seconds / SECONDS)))
    measurements = {}
    for precision in PRECISIONS:
        for product, measurement in product_rates(device, precision).items():
            measurements[f"{product} {precision}"] = measurement
        measurements[f"attention {precision}"] = attention_rates(device, precision)
        measurements[f"elementwise {precision}"] = elementwise_rates(device, precision)
    measurements |= {"device memory": copy_bandwidth(device), "launches": launch_seconds(device)}
    measurements |= {**_passes(numel, threads), "host memory": _host_memory(), "fresh memory": _fresh_memory()}
    measurements["all of host memory"] = _all_of_host_memory()
    shares = {name: seconds * weight / sum(_IN_TURN.values()) for name, weight in _IN_TURN.items()}
    results = measure_in_turn(device, measurements, shares)
    for precision in PRECISIONS:
        _products(precision, {kind: results[f"{kind} {precision}"] for kind in PRODUCT_KINDS}, findings)
        _attention(precision, results[f"attention {precision}"], findings)
    _device_memory(results, findings)
    _host(results, numel, device.shares_memory, findings)


def _products(precision: Precision, rows: Mapping[ProductKind, tuple[ProductRate, ...]], findings: _Findings) -> None:
    best = {kind: max(row.flops for row in each[len(each) // 2 :]) for kind, each in rows.items()}  # of larger ones
    key, count = {"bf16": "flops", "fp32": "flops_fp32"}[precision], len(rows["output"])
    findings.note(f"measured: the fastest of the larger half of {count} products", **{key: best["output"]})
    findings.note("measured", products=(*findings.values.get("products", ()), *chain.from_iterable(rows.values())))
    peak = findings.values.get(f"peak_{key}")
    share = f", {best['output'] / peak:.0%} of the datasheet" if peak else ""
    rates = ", ".join(f"{rate / 1e12:.3g} for {kind}s" for kind, rate in best.items())
    findings.say(f"matrix products in {precision} (TFLOP/s): {rates}{share}")


def _attention(precision: Precision, rows: tuple[AttentionRate, ...], findings: _Findings) -> None:
    findings.note("measured: PyTorch's own, causal", attention=(*findings.values.get("attention", ()), *rows))
    for row in rows[-1:]:
        rates = f"{row.forward_flops / 1e12:.3g} forward, {row.backward_flops / 1e12:.3g} backward"
        findings.say(f"attention {precision}: {rates} TFLOP/s at length {row.length}")


def _device_memory(results: Mapping[str, Any], findings: _Findings) -> None:
    bandwidth, launch = results["device memory"], results["launches"]
    rows = {precision: results[f"elementwise {precision}"] for precision in PRECISIONS}
    findings.note("measured: a copy within device memory", device_bandwidth=bandwidth)
    findings.note("measured: layers like Llama's, without their products", elementwise=tuple(chain(*rows.values())))
    findings.note("measured: the smallest op, many in a row", launch_seconds=launch)
    kept = ", ".join(f"{each[-1].forward_bandwidth / 1e9:,.1f} in {precision}" for precision, each in rows.items())
    findings.say(
        f"device memory: {bandwidth / 1e9:,.1f} GB/s copied, kept by elementwise ops {kept}; "
        f"a launch: {launch * 1e6:.1f} us"
    )


def _passes(numel: int, threads: int) -> dict[str, Measurement]:
    """Measurements, in bytes per second, of the optimizer pass by thread count and of the norm on all threads."""
    hi, lo, grad = (np.full(numel, bits, np.uint16) for bits in (0x3F00, 0, 0x3C00))
    m, v = (np.full(numel, value, np.float32) for value in (1e-4, 1e-6))
    state: HostArrays = StateArrays(hi, lo, (m, v))
    scalars = AdamW().scalars(lr=1e-3, step=10)
    segments = [(0, numel, True)]
    update_on_host(state.part(slice(1)), grad[:1], scalars, [(0, 1, True)])  # compiles, perhaps for seconds
    sum_of_squares(grad[:1])

    def update(count: int) -> Callable[[], None]:
        return lambda: update_on_host(state, grad, scalars, segments, count)

    def rates(spent: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        return tuple(sorted((count, PASS_NBYTES_PER_PARAM * numel / each) for count, each in spent.items()))

    counts = sorted({threads, *(1 << power for power in range(threads.bit_length()))}, reverse=True)
    return {
        "optimizer": Measurement({count: update(count) for count in counts}, rates, "host"),
        "norm": Measurement({0: lambda: sum_of_squares(grad, threads)}, lambda spent: grad.nbytes / spent[0], "host"),
    }


def _host_memory() -> Measurement:
    """Measures a copy by one thread, in bytes per second."""
    source = np.ones(min(FILE_NBYTES, available_host_nbytes() // 16), np.uint8)
    target = np.ones_like(source)
    return Measurement({0: lambda: np.copyto(target, source)}, lambda spent: source.nbytes / spent[0], "host")


def _all_of_host_memory() -> Measurement:
    """Measures a copy on all threads, in bytes per second read plus written."""
    source = torch.ones(min(FILE_NBYTES, available_host_nbytes() // 16), dtype=torch.uint8)
    target = torch.ones_like(source)
    return Measurement({0: lambda: target.copy_(source)}, lambda spent: 2 * source.nbytes / spent[0], "host")


def _fresh_memory() -> Measurement:
    """Measures touching new pages once each, in bytes per second."""

    def touch() -> None:
        mapping = mmap.mmap(-1, FRESH_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE] = 1

    return Measurement({0: touch}, lambda spent: FRESH_NBYTES / spent[0], "host")


def _host(results: Mapping[str, Any], numel: int, shares_memory: bool, findings: _Findings) -> None:
    rows, norm, copied = results["optimizer"], results["norm"], results["host memory"]
    fresh, dram = results["fresh memory"], max(results["all of host memory"], rows[-1][1], norm)
    findings.note(f"measured: AdamW over {numel:,} parameters", optimizer_bandwidth=rows, host_bandwidth=rows[-1][1])
    findings.note(f"measured: {numel:,} bfloat16 gradients", norm_bandwidth=norm)
    by_threads = ", ".join(f"{rate / 1e9:.1f} on {count}" for count, rate in rows)
    findings.say(f"optimizer pass: {by_threads} threads, in GB/s; norm: {norm / 1e9:.1f} GB/s")
    findings.note("measured: numpy, one thread", host_copy_bandwidth=copied)
    findings.note("measured: the most of a copy, AdamW and norms, on all threads", host_dram_bandwidth=dram)
    findings.note("measured: pages of new memory, each touched once", fresh_bandwidth=fresh)
    if shares_memory:
        origin = "nothing crosses a bus: a copy within host memory"
        findings.note(origin, fetch_bandwidth=copied, grad_bandwidth=copied)
    copies = f"one thread copies {copied / 1e9:.1f} GB/s, all together move {dram / 1e9:.1f} GB/s"
    findings.say(f"host memory: {copies}, new pages come at {fresh / 1e9:.1f} GB/s")


def _copies(device: Device, clock: _Clock, findings: _Findings) -> None:
    rates = copy_rates(device, clock.deal("copies"))
    kind = "page-locked" if rates.pinned else "pageable (page-locking was refused)"
    findings.note(f"measured: {kind}, alone", fetch_bandwidth=rates.fetch, grad_bandwidth=rates.grad)
    both = f"measured: {kind}, both ways at once"
    findings.note(both, duplex_fetch_bandwidth=rates.duplex_fetch, duplex_grad_bandwidth=rates.duplex_grad)
    pageable = {"pageable_fetch_bandwidth": rates.pageable_fetch, "pageable_grad_bandwidth": rates.pageable_grad}
    findings.note("measured: pageable, alone", **pageable)
    if not rates.pinned:
        findings.note("page-locking was refused", pinnable_nbytes=0)
        findings.say(
            "host memory cannot be page-locked here, so copies are slow; see `ulimit -l` and the container's limits"
        )
    ways = f"in {rates.fetch / 1e9:.1f}, out {rates.grad / 1e9:.1f}"
    at_once = f"at once {rates.duplex_fetch / 1e9:.1f} and {rates.duplex_grad / 1e9:.1f}"
    slow = f"pageable {rates.pageable_fetch / 1e9:.1f} and {rates.pageable_grad / 1e9:.1f}"
    findings.say(f"host and device: {ways}, {at_once}, {slow} GB/s")


def _disk(folder: Path, seconds: float, clock: _Clock, findings: _Findings) -> None:
    free = findings.values["disk_nbytes"]
    if free < LEAST_FREE_NBYTES:
        findings.say(f"disk: {free / 1e6:,.0f} MB free in {folder}, too little to measure")
        return
    nbytes = int(min(FILE_NBYTES, free // 4) * min(1.0, seconds / SECONDS))
    speed = disk_speed(folder, nbytes, clock.deal("disk"))
    best = speed.best
    access = "direct" if speed.direct else "through the page cache, direct I/O was refused"
    source = f"measured: {access}, a file of {speed.file_nbytes >> 20} MiB, {speed.written_nbytes >> 20} MiB written"
    findings.note(source, disk_read_bandwidth=best.read_bandwidth, disk_write_bandwidth=best.write_bandwidth)
    both = {
        "disk_duplex_read_bandwidth": speed.duplex_read_bandwidth,
        "disk_duplex_write_bandwidth": speed.duplex_write_bandwidth,
    }
    findings.note(f"{source}, both ways at once", **both)
    findings.note(source, disk_block_nbytes=best.block_nbytes, disk_depth=best.depth)
    rates = f"{best.read_bandwidth / 1e9:.2f} GB/s read, {best.write_bandwidth / 1e9:.2f} written"
    rates += f", at once {speed.duplex_read_bandwidth / 1e9:.2f} and {speed.duplex_write_bandwidth / 1e9:.2f}"
    findings.say(f"disk: {rates}, {best.depth} blocks of {best.block_nbytes >> 10} KiB at once, {access}")


def _existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    folder = usable_path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
