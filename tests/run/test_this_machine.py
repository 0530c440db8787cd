"""The machine at hand is the one that was probed, the described one, or a rough one; never another in silence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import megatrain.run.this_machine
from megatrain.commands import plan
from megatrain.device import Device, matmul_flops
from megatrain.device.cpu import CpuDevice
from megatrain.errors import DeviceError, PlanError
from megatrain.plan import available_host_nbytes, machine, optimizer_bandwidth, save_hardware
from megatrain.plan.machines import machine_of_device
from megatrain.run.this_machine import probed_machine, this_machine

FREE = 20 << 30


@dataclass(eq=False)
class Card:
    """As much of a GPU as a description asks about."""

    model: str = "NVIDIA H200"
    name: str = "cuda:0"
    shares_memory: bool = False
    host: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(lockable_nbytes=None))
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_open: bool = True

    def free_nbytes(self) -> int:
        return FREE

    def close(self) -> None:
        self.is_open = False


def card(model: str = "NVIDIA H200") -> Device:
    return cast(Device, Card(model))


@pytest.fixture(autouse=True)
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file of a probe would be."""
    monkeypatch.setattr(megatrain.run.this_machine, "PROBED", tmp_path / "hardware.json")
    return tmp_path / "hardware.json"


@pytest.fixture
def cpu() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def test_a_saved_probe_is_used_with_the_memory_free_now(cpu: CpuDevice, probed: Path) -> None:
    mine = replace(machine("laptop"), name="my own", shares_memory=True, host_nbytes=1 << 50, device_nbytes=1 << 50)
    save_hardware(mine, probed)
    assert probed_machine() == mine
    found = this_machine(cpu, "bf16")
    assert (found.name, found.flops, found.shares_memory) == ("my own", mine.flops, True)
    assert found.host_nbytes == found.device_nbytes < 1 << 50


def test_probes_of_other_devices_are_ignored(probed: Path) -> None:
    save_hardware(replace(machine("laptop"), shares_memory=True), probed)
    found = this_machine(card(), "bf16")
    assert found.name == "NVIDIA H200, not probed"
    assert found.products == machine("h200").products
    assert (found.flops, found.device_nbytes) == (machine("h200").flops, FREE)


def test_a_described_machine_updates_on_the_threads_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rented GPU often comes with fewer cores than its machine has."""
    monkeypatch.setattr(megatrain.run.this_machine, "available_threads", lambda: 6)
    whole, found = machine("h200"), this_machine(card(), "bf16")
    assert found.host_bandwidth == optimizer_bandwidth(found, 0) == optimizer_bandwidth(whole, 6)
    assert found.host_bandwidth < whole.host_bandwidth / 4
    assert "6 threads here" in dict(found.sources)["host_bandwidth"]
    monkeypatch.setattr(megatrain.run.this_machine, "available_threads", lambda: 96)
    assert this_machine(card(), "bf16").host_bandwidth == whole.host_bandwidth


def test_unknown_machines_are_described_by_one_matmul(cpu: CpuDevice) -> None:
    for device in (cpu, card("NVIDIA Nothing 9000")):
        found = this_machine(device, "fp32")
        assert found.name.endswith(", not probed")
        assert found.flops == found.flops_fp32 == matmul_flops(device, torch.float32)
        in_bf16 = this_machine(device, "bf16")
        assert in_bf16.flops == matmul_flops(device, torch.bfloat16)
        assert in_bf16.flops_fp32 == (found.flops if device.shares_memory else in_bf16.flops)
        assert found.shares_memory == device.shares_memory
        assert 0 < found.host_nbytes <= 2 * available_host_nbytes()
        sources = dict(found.sources)
        assert "measured" in sources["flops"]
        assert "megatrain probe" in sources["host_bandwidth"]


def test_a_named_machine_uses_this_hosts_memory(cpu: CpuDevice) -> None:
    assert this_machine(cpu, "bf16", "h200").device_nbytes < 1 << 50
    assert this_machine(card(), "bf16", "laptop").device_nbytes == FREE
    with pytest.raises(PlanError, match="unknown machine 'h20'"):
        this_machine(cpu, "bf16", "h20")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("\x00\xff", "is not JSON"),
        ('{"name": "x"}', "device_bytes, host_bytes, .*: are missing"),
        ('{"name": "x", "of_another_version": 1}', "unknown key 'of_another_version'"),
        (None, "cannot be read"),
    ],
)
def test_an_unreadable_probe_is_one_line_for_plan_and_train(
    cpu: CpuDevice, probed: Path, content: str | None, complaint: str
) -> None:
    if content is None:
        probed.mkdir()
    else:
        probed.write_text(content)
    for ask in (lambda: plan.find_hardware(None), lambda: this_machine(cpu, "bf16")):
        with pytest.raises(PlanError, match=complaint) as caught:
            ask()
        assert str(caught.value).startswith(str(probed))
        assert str(caught.value).endswith("; run `megatrain probe` again, or remove the file")
        assert "\n" not in str(caught.value)
    assert plan.find_hardware("laptop") == machine("laptop")  # who names a machine does not need it
    assert this_machine(cpu, "bf16", "laptop").name == machine("laptop").name


@pytest.mark.parametrize("model", ["NVIDIA H200", "NVIDIA Nothing 9000"])
def test_plan_refuses_an_undescribed_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Card(model)
    monkeypatch.setattr("megatrain.device.open_device", lambda name: opened)
    if machine_of_device(model):
        assert plan.find_hardware(None).name == "NVIDIA H200, not probed"
    else:
        with pytest.raises(PlanError, match="there is no description of a NVIDIA Nothing 9000; run `megatrain probe"):
            plan.find_hardware(None)
    assert not opened.is_open


def test_plan_without_a_gpu_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_device(name: str) -> Any:
        if name != "cpu":
            raise DeviceError("there is none", where=name)
        return CpuDevice()

    monkeypatch.setattr("megatrain.device.open_device", open_device)
    found = plan.find_hardware(None, "fp32")
    assert found.shares_memory
    assert "in fp32" in dict(found.sources)["flops"]
