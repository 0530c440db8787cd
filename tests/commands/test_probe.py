"""`probe` finds out about this machine in the time it is given, says how, and leaves nothing behind."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from math import isfinite
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatrain.commands.probe
from megatrain.commands.probe import PRECISIONS, probe
from megatrain.device import open_device
from megatrain.device import probe as device_probe
from megatrain.device.cpu import CpuDevice
from megatrain.errors import DeviceError
from megatrain.plan.cost import product_seconds
from megatrain.plan.machines import load_hardware, machine, save_hardware
from megatrain.plan.report import is_measured
from megatrain.run.this_machine import this_machine
from megatrain.spec import Hardware
from megatrain.spec.hardware import PRODUCT_KINDS

SECONDS = 0.6


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and sizes that fit a short time."""
    monkeypatch.setitem(device_probe.PRODUCTS, "cpu", [(8, 64, 64), (64, 128, 64), (256, 256, 256)])
    monkeypatch.setitem(device_probe.LENGTHS, "cpu", (16, 64))
    monkeypatch.setitem(device_probe.COPIED_WITHIN, "cpu", 1 << 20)
    monkeypatch.setitem(device_probe.ELEMENTWISE_SHAPES, "cpu", ((32, 64),))
    monkeypatch.setattr(megatrain.commands.probe, "MOST_PARAMS", 1 << 20)
    monkeypatch.setattr(megatrain.commands.probe, "FILE_NBYTES", 8 << 20)
    monkeypatch.setattr(megatrain.commands.probe, "FRESH_NBYTES", 1 << 20)


@pytest.fixture
def cpu() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def test_a_cpu_is_probed_and_saved(cpu: CpuDevice, tmp_path: Path) -> None:
    said: list[str] = []
    began = time.perf_counter()
    found = probe(cpu, tmp_path / "runs" / "next", SECONDS, said.append)
    assert time.perf_counter() - began < 30
    assert os.listdir(tmp_path) == []
    assert len(said) >= 8
    sources = dict(found.sources)
    expected_unknown = {"peak_flops", "peak_flops_fp32", "disk_endurance_nbytes"}
    expected_unknown |= {f"{kind}_{way}_bandwidth" for kind in ("duplex", "pageable") for way in ("fetch", "grad")}
    of_ranks = {"devices", "sharing_ranks", "link_route", "slots_in_host", "divided_memory"}
    expected_unknown |= {"shared_bus_bandwidth", "link_bandwidth", "link_seconds", "node_bandwidth"}
    for field in fields(Hardware):
        value = getattr(found, field.name)
        if field.name in of_ranks:  # what one device is not asked about
            assert value == field.default
            continue
        if field.name in expected_unknown:
            assert value is None
            continue
        assert value not in (None, ()), field.name
        assert field.name == "sources" or sources[field.name], field.name
        if isinstance(value, float):
            assert isfinite(value), field.name
            assert value > 0, field.name
    assert found.shares_memory
    assert found.device_nbytes == found.host_nbytes
    assert found.host_bandwidth == found.optimizer_bandwidth[-1][1]
    kinds = {(row.precision, row.kind) for row in found.products}
    assert kinds == set(product(PRECISIONS, PRODUCT_KINDS))
    save_hardware(found, tmp_path / "here.json")
    assert load_hardware(tmp_path / "here.json") == found
    assert product_seconds(found, "bf16", 256, 256, 256) > 0
    assert is_measured(found)
    assert not is_measured(this_machine(cpu, "bf16"))


def test_fresh_memory_is_new_to_the_process_each_time(cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.commands.probe, "FRESH_NBYTES", 64 << 20)
    cpu.tidy()  # from here on, freed memory is kept for reuse
    (touch,) = megatrain.commands.probe._fresh_memory().jobs.values()
    faults = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        touch()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults) >= 32  # even with pages of 2 MiB


class Refusing(CpuDevice):
    """An accelerator by a name that the library knows, whose host memory may not be page-locked."""

    name = "cuda:0"
    model = "NVIDIA GeForce RTX 4090"
    shares_memory = False

    def free_nbytes(self) -> int:
        return 4 << 30


def test_without_permission_to_pin_the_rates_are_those_of_pageable_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = device_probe.copy_rates
    monkeypatch.setattr(
        megatrain.commands.probe, "copy_rates", lambda device, seconds: small(device, seconds, piece=1 << 20)
    )
    said: list[str] = []
    device = Refusing()
    found = probe(device, tmp_path, SECONDS, said.append)
    device.close()
    assert found.pinnable_nbytes == 0
    assert "refused" in dict(found.sources)["pinnable_nbytes"]
    assert "page-locking was refused" in dict(found.sources)["fetch_bandwidth"]
    assert any("page-locked" in line for line in said)
    assert found.duplex_fetch_bandwidth
    assert found.pageable_grad_bandwidth
    described = machine("rtx-4090")
    assert found.peak_flops == described.peak_flops
    assert dict(found.sources)["peak_flops"] == dict(described.sources)["peak_flops"]
    assert not found.shares_memory
    save_hardware(found, tmp_path / "here.json")
    assert load_hardware(tmp_path / "here.json") == found


def test_a_full_disk_is_not_probed(cpu: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.commands.probe, "available_disk_nbytes", lambda folder: 1 << 20)
    said: list[str] = []
    found = probe(cpu, tmp_path, 0.1, said.append)
    assert (found.disk_nbytes, found.disk_read_bandwidth) == (1 << 20, None)
    assert any("too little to measure" in line for line in said)


@pytest.mark.parametrize(
    ("limit", "locks", "found"), [(1 << 20, True, 1 << 36), (1 << 20, False, 1 << 20), (1 << 35, True, 1 << 35)]
)
def test_whether_a_driver_keeps_to_the_limit_on_locked_memory_is_tried(
    limit: int, locks: bool, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the limit is so large that trying would take long, it is believed."""
    monkeypatch.setattr(megatrain.commands.probe, "pinnable_nbytes", lambda host: limit)
    held: list[object] = []

    def allocate(nbytes: int, owner: str) -> object:
        assert limit < nbytes < 1 << 28
        held.append(SimpleNamespace(is_pinned=lambda: locks))
        return held[-1]

    host = SimpleNamespace(allocate=allocate, free=lambda memory, owner: held.remove(memory))
    device = SimpleNamespace(shares_memory=False, host=host)
    nbytes, why = megatrain.commands.probe._lockable(device, 1 << 36)  # type: ignore[arg-type]
    assert nbytes == found
    assert ("measured" in why) == (limit == 1 << 20 and locks)
    assert held == []


def test_a_simulated_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="sim:3: is simulated, with no speed to measure; probe cpu or cuda:0"):
        probe(open_device("sim:3"), tmp_path, SECONDS)


def test_unwritable_output_is_refused_before_measuring(cpu: CpuDevice, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    with pytest.raises(DeviceError, match=r"file: cannot be written .Not a directory.; give a folder") as caught:
        probe(cpu, tmp_path / "file", SECONDS, said.append)
    assert "\n" not in str(caught.value)
    assert said == []
