"""Seconds of the pieces of a step on a described machine: products, attention, the optimizer pass.

A product costs its operations at the machine's rate plus its bytes at the device's bandwidth, and never less than a
launch: small and thin products are slow for these reasons on any device. Where products have been measured, that
estimate is corrected by the ratio of measured to estimated time, interpolated between the measured shapes, so that a
measured shape is met exactly and one far from all of them keeps the estimate's form. It leaves out what a layer does
besides products and attention, and contention between streams.
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log, log2

from megatrain.rates import AttentionRate
from megatrain.spec import WEIGHT_NBYTES, Hardware, Precision, Transit

ASSUMED_DISK = 1e9
"""Bytes per second of a drive that has not been measured."""

ASSUMED_COPY = 8e9
"""Bytes per second that one thread copies within host memory, where that has not been measured."""

ATTENTION_SHARE = 0.5
"""Assumed rate of attention, as a share of that of large products, where it has not been measured."""


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
        return operations / rate, 2 * operations / rate
    low = max((row for row in rows if row.length <= length), key=lambda row: row.length, default=rows[0])
    high = next((row for row in rows if row.length >= length), rows[-1])
    forward = _between(low, high, length, low.forward_flops, high.forward_flops)
    backward = _between(low, high, length, low.backward_flops, high.backward_flops)
    return operations / forward, 2 * operations / backward


def elementwise_seconds(hardware: Hardware, precision: Precision, nbytes: float) -> tuple[float, float]:
    """Seconds forward and backward of what a layer does besides products and attention.

    `nbytes` is what autograd keeps of it. Where rates have not been measured it goes at memory's speed, and takes twice
    as long backward.
    """
    for row in hardware.elementwise:
        if row.precision == precision:
            return nbytes / row.forward_bandwidth, nbytes / row.backward_bandwidth
    forward = nbytes / (hardware.elementwise_bandwidth or hardware.device_bandwidth or float("inf"))
    return forward, 2 * forward


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


def bus_bandwidths(hardware: Hardware, transit: Transit) -> tuple[float, float]:
    """Bytes per second of weights and of gradients that cross the bus, each way alone."""
    if transit != "pageable":
        return hardware.fetch_bandwidth, hardware.grad_bandwidth
    copied = packing_bandwidth(hardware)  # the driver does it, through a buffer of its own
    fetch = hardware.pageable_fetch_bandwidth or min(copied, hardware.fetch_bandwidth)
    return fetch, hardware.pageable_grad_bandwidth or min(copied, hardware.grad_bandwidth)


def packing_bandwidth(hardware: Hardware) -> float:
    """Bytes per second that one thread copies into a slab, or out of one."""
    return hardware.host_copy_bandwidth or ASSUMED_COPY


def disk_bandwidths(hardware: Hardware) -> tuple[float, float]:
    """Bytes per second that are read and written while both are under way, as in a step with state on the disk."""
    read = hardware.disk_duplex_read_bandwidth or hardware.disk_read_bandwidth or ASSUMED_DISK
    return read, hardware.disk_duplex_write_bandwidth or hardware.disk_write_bandwidth or ASSUMED_DISK


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
