"""What the cpu does with freed memory: a used gradient's is free for graphs, and all goes back at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatrain import Engine, Policy
from megatrain.device.cpu import CpuDevice, CpuHostMemory
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
FRESH = """
import resource
import numpy as np
from megatrain.device.cpu import CpuDevice
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        np.ones(10 << 20, np.float32)  # 40 MiB, above what the C library maps afresh
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
device = CpuDevice()
device.tidy()
np.ones(10 << 20, np.float32)
kept = faults()
device.close()
print(kept, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is another")
def test_large_blocks_are_reused_while_a_device_is_open() -> None:
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", FRESH], capture_output=True, text=True, cwd=ROOT)
    kept, after = map(int, out.stdout.split())
    assert kept < 10, out
    assert after > 50, out


def test_gradient_memory_is_free_between_update_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the numbers are those of a device that never frees it."""
    monkeypatch.setattr("megatrain.device.cpu.MOST_KEPT", 1)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    batch = [{"input_ids": ids, "labels": ids}]
    policy = Policy(shares_memory=True)

    def losses(device: CpuDevice) -> tuple[list[float], int]:
        torch.manual_seed(0)
        with Engine.from_model(tiny_model(), device, "fp32", policy=policy, verify=False) as engine:
            found = [engine.step(batch).loss for _ in range(3)]
            engine.weights.flush()
            absent = len(engine.parts.pool._absent)
            found.append(engine.step(batch).loss)
            assert not engine.parts.pool._absent
        device.close()
        return found, absent

    class KeepingHost(CpuHostMemory):
        def discard(self, memory: torch.Tensor) -> bool:
            return False

    keeper = CpuDevice()
    keeper.host = KeepingHost()
    freeing, keeping = losses(CpuDevice()), losses(keeper)
    assert freeing[0] == keeping[0]
    assert freeing[1] > 3
    assert keeping[1] == 0
