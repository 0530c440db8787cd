"""What a device is measured to do is finite, within its time, and leaves nothing behind."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from math import isfinite
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.device import Device, open_device, probe
from megatrain.device.cpu import CpuDevice, CpuHostMemory
from megatrain.device.worker import WorkerStream
from megatrain.errors import OutOfDeviceMemory
from megatrain.spec.hardware import PRODUCT_KINDS, ProductKind, ProductRate


@pytest.fixture
def cpu() -> Iterator[Device]:
    device = open_device("cpu")
    yield device
    device.close()


class AcceleratorHost(CpuHostMemory):
    """Host memory that notes the addresses of what is allocated in `held`."""

    def __init__(self, held: list[int]) -> None:
        super().__init__()
        self.held = held

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        memory = super().allocate(nbytes, owner)
        self.held.append(memory.data_ptr())
        return memory

    def free(self, memory: torch.Tensor, owner: str) -> None:
        self.held.remove(memory.data_ptr())
        super().free(memory, owner)


class Accelerator(CpuDevice):
    """A cpu that copies on threads, to and from memory of its own, as a GPU would, and may not page-lock."""

    name = "accelerator"
    shares_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        self.host = AcceleratorHost(self.held)
        self._copies = {name: WorkerStream(name) for name in ("fetch", "grad")}

    def stream(self, name: str):  # type: ignore[no-untyped-def]
        return self._copies.get(name) or super().stream(name)

    def allocate(self, nbytes: int, owner: str) -> torch.Tensor:
        memory = super().allocate(nbytes, owner)
        self.held.append(memory.data_ptr())
        return memory

    def free(self, memory: torch.Tensor, owner: str) -> None:
        self.held.remove(memory.data_ptr())

    def free_nbytes(self) -> int:
        return 4 << 30

    def synchronize(self) -> None:
        for copies in self._copies.values():
            copies.drain()
        super().synchronize()

    def close(self) -> None:
        for copies in self._copies.values():
            copies.close()
        super().close()


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    device = Accelerator()
    yield device
    device.close()


def measured(jobs: dict[str, probe.Job]) -> probe.Measurement:
    return probe.Measurement(jobs, dict)


def take(device: Device, measurement: probe.Measurement, seconds: float) -> Any:
    """What one measurement finds on its own."""
    return probe.measure_in_turn(device, {"": measurement}, {"": seconds})[""]


def test_probe_jobs_take_turns_and_slow_ones_are_dropped(cpu: Device) -> None:
    turns: list[str] = []

    def job(name: str, seconds: float):  # type: ignore[no-untyped-def]
        return lambda: (turns.append(name), time.sleep(seconds))

    jobs = {name: job(name, seconds) for name, seconds in (("a", 0.002), ("b", 0.004), ("slow", 0.5), ("last", 0.001))}
    host = probe.Measurement({"c": job("c", 0.001)}, lambda spent: spent["c"], "host")
    began = time.perf_counter()
    found = probe.measure_in_turn(cpu, {"one": measured(jobs), "other": host}, {"one": 0.4, "other": 0.01})
    assert time.perf_counter() - began < 10
    assert list(found["one"]) == ["a", "b"]
    assert 0.002 <= found["one"]["a"] < found["one"]["b"] < 0.1
    assert 0.001 <= found["other"] < 0.1
    assert "".join(turns).count("abc") >= 2
    assert "last" not in turns


def test_a_cpu_is_measured_with_freed_memory_kept_as_in_steps(cpu: CpuDevice) -> None:
    """With fresh pages for each result, elementwise ops would take two to five times as long as in a step."""
    kept: list[bool] = []
    take(cpu, measured({"a": lambda: kept.append(cpu._keeping is not None)}), 0.01)  # type: ignore[dict-item]
    assert kept
    assert all(kept)


def test_a_slow_first_use_of_a_kernel_ends_no_measurement(cpu: Device) -> None:
    """A GPU loads or compiles a kernel then."""
    used = set[str]()

    def job(name: str) -> probe.Job:
        return lambda: time.sleep(0.001 if name in used else (used.add(name), 0.3)[1])  # type: ignore[func-returns-value]

    found = take(cpu, measured({name: job(name) for name in "abc"}), 0.3)
    assert list(found) == ["a", "b", "c"]
    assert all(seconds < 0.1 for seconds in found.values())


class Products(TorchDispatchMode):
    """Records the operands' shapes and strides of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.seen.append(tuple((tuple(each.shape), each.stride()) for each in args))
        return func(*args, **(kwargs or {}))


def test_the_probe_times_the_products_of_a_layer_and_of_its_autograd(
    cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors without bfloat16 instructions take many times as long for one as for another."""
    x, weight = torch.ones(8, 16, requires_grad=True), torch.ones(32, 16, requires_grad=True)
    shapes: dict[ProductKind, probe.Shape] = {
        "output": (8, 16, 32),
        "weight gradient": (32, 8, 16),
        "input gradient": (8, 32, 16),
    }
    with Products() as layer:
        out = torch.nn.functional.linear(x, weight)
        torch.autograd.grad(out, (x, weight), torch.ones(8, 32))
    monkeypatch.setitem(probe.PRODUCTS, "cpu", list(shapes.values()))
    with Products() as probed:
        for kind, measurement in probe.product_rates(cpu, "fp32").items():
            measurement.jobs[shapes[kind]]()
    assert sorted(probed.seen) == sorted(layer.seen)
    assert len(layer.seen) == 3


def test_the_flops_of_a_device_are_those_of_all_three_products(cpu: Device) -> None:
    x, weight = torch.ones(16, 16, requires_grad=True), torch.ones(16, 16, requires_grad=True)
    with Products() as layer:
        out = torch.nn.functional.linear(x, weight)
        torch.autograd.grad(out, (x, weight), torch.ones(16, 16))
    with Products() as timed:
        probe._products_seconds(cpu, torch.float32, 16, 1)
    assert sorted(timed.seen) == sorted(layer.seen)


def test_short_interruptions_do_not_affect_the_probe() -> None:
    assert probe._middle([1.0]) == 1.0
    assert probe._middle([9.0, 1.0, 2.0, 2.0, 3.0, 2.0, 1.0, 2.0]) == 2.0


def test_the_first_job_always_runs_and_out_of_memory_ends_the_probe(cpu: Device) -> None:
    def too_large() -> None:
        raise OutOfDeviceMemory("no room")

    sleepy = {"sleepy": lambda: time.sleep(0.05), "too large": too_large}
    for jobs, seconds in ((sleepy, 0.01), ({**sleepy, "last": too_large}, 0.5)):
        assert list(take(cpu, measured(jobs), seconds)) == ["sleepy"]
    with pytest.raises(OutOfDeviceMemory):
        take(cpu, measured({"too large": too_large}), 0.01)


def test_a_cpu_probe_measures_matmul_attention_copies_and_launches(
    cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(probe.PRODUCTS, "cpu", [(8, 64, 64), (64, 128, 64), (256, 256, 256)])
    monkeypatch.setitem(probe.LENGTHS, "cpu", (16, 64))
    monkeypatch.setitem(probe.COPIED_WITHIN, "cpu", 1 << 20)
    monkeypatch.setitem(probe.ELEMENTWISE_SHAPES, "cpu", ((8, 16), (32, 64)))
    before = torch.random.get_rng_state()
    for precision in ("bf16", "fp32"):
        products: list[ProductRate] = []
        for kind, measurement in probe.product_rates(cpu, precision).items():
            rows = take(cpu, measurement, 0.1)
            assert [(row.m, row.k, row.n) for row in rows] == probe.PRODUCTS["cpu"][: len(rows)]
            assert {row.kind for row in rows} == {kind}
            products += rows
        assert {row.kind for row in products} == set(PRODUCT_KINDS)
        attention = take(cpu, probe.attention_rates(cpu, precision), 0.1)
        assert [row.length for row in attention] == [16, 64][: len(attention)]
        assert products
        assert attention
        assert {row.precision for row in (*products, *attention)} == {precision}
        rates = [row.flops for row in products]
        rates += [rate for row in attention for rate in (row.forward_flops, row.backward_flops)]
        assert all(isfinite(rate) and 1e5 < rate < 1e15 for rate in rates)
        small, large = take(cpu, probe.elementwise_rates(cpu, precision), 0.5)
        assert small.precision == large.precision == precision
        assert large.nbytes == pytest.approx(16 * small.nbytes, rel=0.1)
        for row in (small, large):
            assert 1e6 < row.backward_bandwidth <= row.forward_bandwidth < 1e13
    assert 1e7 < take(cpu, probe.copy_bandwidth(cpu), 0.05) < 1e13
    assert 1e-8 < take(cpu, probe.launch_seconds(cpu), 0.05) < 1e-2
    assert torch.equal(torch.random.get_rng_state(), before)


def test_saved_activations_are_counted_once() -> None:
    x, y = (torch.ones(8, requires_grad=True) for _ in range(2))
    assert probe._kept_nbytes(lambda: [x * y, x]) == 3 * 8 * 4


def test_counting_saved_activations_leaves_none_behind() -> None:
    """A graph whose saved tensors hold the graph would keep gigabytes of a GPU, and no collection finds it."""
    made: list[weakref.ref[torch.Tensor]] = []

    def layer() -> list[torch.Tensor]:
        x = torch.ones(8, requires_grad=True)
        root = torch.rsqrt(x + 1)  # saves its own output
        made.extend(map(weakref.ref, (x, root)))
        return [x * root]

    probe._kept_nbytes(layer)
    assert [each() for each in made] == [None, None]


def test_the_copy_probe_frees_its_memory(accelerator: Accelerator) -> None:
    rates = probe.copy_rates(accelerator, 0.3, piece=1 << 20)
    assert rates.pinned is False
    for name in ("fetch", "grad", "duplex_fetch", "duplex_grad", "pageable_fetch", "pageable_grad"):
        assert 1e6 < getattr(rates, name) < 1e13, name
    assert accelerator.held == []


def test_duplex_bandwidth_is_measured_while_both_directions_are_busy() -> None:
    # One lane copies 10 bytes a second throughout, the other 5 from second 2 to 6.
    steady = [(float(start), start + 1.0) for start in range(8)]
    late = [(2.0, 4.0), (4.0, 6.0)]
    assert probe._shared_rates([steady, late], [10, 10]) == [10, 5]
    assert probe._shared_rates([steady], [10]) == [10]
    after = [(8.0, 10.0), (10.0, 12.0)]
    assert probe._shared_rates([steady, after], [12, 12]) == [8, 2]
