"""Streams keep their order and their promises, on the cpu and on the simulated device."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatrain.device import Device, Errand, matmul_flops, open_device
from megatrain.device.cpu import CpuDevice
from megatrain.device.sim import SimDevice
from megatrain.errors import DeviceError, NonFinite, OutOfDeviceMemory, StreamFailed

DEVICES = ["cpu", "sim:0", "sim:1", "sim:2"]


@pytest.mark.parametrize("name", ["", "tpu", "cpu:1", "sim:x", "cuda:-1"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="is not a device"):
        open_device(name)


@pytest.mark.parametrize(("name", "fix"), [("mps", "use cpu"), ("xpu:0", "use cpu"), ("rocm", "use cuda:0")])
def test_a_device_that_pytorch_has_and_that_is_none_here_is_called_unsupported(name: str, fix: str) -> None:
    with pytest.raises(DeviceError, match=f"'{name}' is not supported; {fix}"):
        open_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_an_absent_gpu_is_refused() -> None:
    with pytest.raises(DeviceError, match="no CUDA device; use cpu"):
        open_device("cuda:0")


@pytest.mark.parametrize("name", DEVICES)
def test_streams_are_fifo_and_events_order_them(name: str) -> None:
    device = open_device(name)
    seen: list[str] = []
    compute, host = device.stream("compute"), device.stream("host")
    first = host.submit(Errand("a"), lambda: (time.sleep(0.02), seen.append("a"))[1])
    host.submit(Errand("b"), lambda: seen.append("b"))
    compute.submit(Errand("c"), lambda: seen.append("c"), [first])
    device.synchronize()
    assert sorted(seen) == ["a", "b", "c"]
    assert seen.index("a") < min(seen.index("b"), seen.index("c"))
    device.close()


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.timeout(30)
def test_a_failed_op_skips_its_dependents_and_is_raised_once(name: str) -> None:
    device = open_device(name)
    seen: list[str] = []
    host, compute = device.stream("host"), device.stream("compute")

    def broken() -> None:
        raise ValueError("broken on purpose")

    failed = host.submit(Errand("UPDATE u3"), broken)
    host.submit(Errand("UPDATE u4"), lambda: seen.append("behind it"))
    with pytest.raises(StreamFailed, match=r"op UPDATE u3 on stream host: ValueError: broken on purpose") as caught:
        compute.submit(Errand("FORWARD u3"), lambda: seen.append("after it"), [failed])
        device.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)
    assert seen == []
    if isinstance(device, CpuDevice):
        with pytest.raises(StreamFailed):
            device.synchronize()  # the foreground collects what the worker still holds
    device.synchronize()
    host.submit(Errand("UPDATE u5"), lambda: seen.append("later"))
    device.synchronize()
    assert seen == ["later"], "a device recovers"
    device.close()


@pytest.mark.parametrize("name", DEVICES)
def test_megatrain_errors_propagate_unchanged(name: str) -> None:
    device = open_device(name)

    def broken() -> None:
        raise NonFinite("the gradient is not finite")

    device.stream("host").submit(Errand("NORM u0"), broken)
    with pytest.raises(NonFinite):
        device.synchronize()
    device.close()


@pytest.mark.parametrize("name", DEVICES)
def test_randomness_is_a_function_of_the_seed(name: str) -> None:
    device = open_device(name)
    device.seed(5)
    first = torch.rand(3)
    torch.rand(7)
    device.seed(5)
    assert torch.equal(torch.rand(3), first)
    device.close()


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("nbytes", [0, 1, 4097])
def test_host_memory_has_the_requested_size_and_is_zero(name: str, nbytes: int) -> None:
    device = open_device(name)
    for allocate in (device.host.allocate, device.host.allocate_pageable):
        memory = allocate(nbytes, "x")
        assert memory.numel() == nbytes
        assert not memory.any()
        device.host.free(memory, "x")
    device.close()


def test_host_memory_starts_as_zeros_and_device_memory_of_the_simulator_as_nan() -> None:
    device = open_device("sim:0")
    assert not device.host.allocate(64, "x").any()
    assert device.allocate(64, "x").view(torch.float32).isnan().all()
    assert device.allocate(64, "x").view(torch.bfloat16).isnan().all()


def test_the_simulators_capacity_is_enforced() -> None:
    device = SimDevice(capacity=100)
    device.allocate(60, "weights")
    assert device.free_nbytes() == 40
    with pytest.raises(OutOfDeviceMemory, match=r"41 B for grads .* it holds: weights 60 B"):
        device.allocate(41, "grads")


def test_the_simulators_order_depends_only_on_its_seed() -> None:
    def order(seed: int) -> list[str]:
        device = SimDevice(seed)
        for i in range(6):
            for stream in ("compute", "fetch", "grad"):
                device.stream(stream).submit(Errand(f"{stream}{i}"), lambda: None)
        device.synchronize()
        return device.order

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) == 10


def test_waiting_for_an_unsubmitted_op_is_a_deadlock_error() -> None:
    device, other = SimDevice(), SimDevice()
    never = other.stream("host").submit(Errand("never"), lambda: None)
    device.stream("compute").submit(Errand("FORWARD u1"), lambda: None, [never])
    with pytest.raises(DeviceError, match="deadlock: FORWARD u1 on stream compute waits for never"):
        device.synchronize()


def test_the_cpu_device_measures_compute_waits() -> None:
    device = CpuDevice()
    slow = device.stream("host").submit(Errand("slow"), lambda: time.sleep(0.05))
    device.stream("compute").submit(Errand("FORWARD u0"), lambda: None, [slow])
    assert 0.03 < device.stalled_seconds() < 1.0
    assert device.stalled_seconds() == 0.0
    device.close()


def test_cpu_compute_runs_in_the_foreground_and_host_work_on_threads() -> None:
    device = CpuDevice()
    threads: dict[str, int] = {}
    for stream in ("compute", "host"):
        device.stream(stream).submit(Errand(stream), lambda s=stream: threads.__setitem__(s, threading.get_ident()))
    device.synchronize()
    assert threads["compute"] == threading.get_ident() != threads["host"]
    device.close()


@pytest.mark.parametrize("name", ["cpu", "sim:0"])
def test_the_measured_peak_is_positive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.device.probe.LARGEST", {"cpu": 128})
    device: Device = open_device(name)
    assert 1e8 < matmul_flops(device, torch.bfloat16) < 1e15
    device.close()


# Measured: one thread with AVX2 alone in bfloat16, two threads in float32, an H200.
@pytest.mark.parametrize(("flops", "largest"), [(0.58e9, 512), (150e9, 2048), (700e12, 8192)])
def test_a_slow_processor_times_small_products_alone(
    flops: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def seconds(device: Device, dtype: torch.dtype, size: int, rounds: int) -> float:
        sizes.append(size)
        return 6.0 * size**3 / flops

    monkeypatch.setattr("megatrain.device.probe.LARGEST", {"cpu": 8192})
    monkeypatch.setattr("megatrain.device.probe._products_seconds", seconds)
    device = CpuDevice()
    assert matmul_flops(device, torch.bfloat16) == pytest.approx(flops)
    device.close()
    assert max(sizes) == largest
