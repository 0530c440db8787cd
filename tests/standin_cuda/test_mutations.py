"""Every class of wait in `device/cuda.py` is needed, and the stand-in finds each one that is missing.

A copy of the file is changed in one place and run as the device of a few training steps. A missing wait shows as a
reported race, as a number that is not finite, or as bits that differ from those of the unchanged file. On a real GPU it
would show by chance, if at all, so these tests need the stand-in.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.device.base import Errand, Event, Task, Work
from megatrain.device.worker import HostEvent, WorkerStream
from megatrain.engine.streamer import ACTIONS
from megatrain.errors import MegaTrainError
from megatrain.spec import Numerics, Placement
from tests import standin_cuda
from tests.tiny import equal, tiny_model, unequal_batches

STANDIN = standin_cuda.installed()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(STANDIN is None, reason="needs the stand-in: make test-cuda")]

SOURCE = Path(importlib.import_module("megatrain.device.cuda").__file__ or "")
LATE = 0.02
"""Seconds that host work takes longer than it needs."""

MIXED = (
    Placement(),
    Placement("device"),
    Placement("device", "device", "device"),
    Placement(),
    Placement(),
    Placement(),
)


@dataclass(frozen=True)
class Mutation:
    """What is taken out of the file."""

    text: str
    instead: str
    occurrence: int = 0
    """Which of several places, counted from 0."""

    def applied_to(self, source: str) -> str:
        parts = source.split(self.text)
        assert len(parts) > self.occurrence + 1, f"device/cuda.py has no {self.text!r} any more: say what it is now"
        before, after = parts[: self.occurrence + 1], parts[self.occurrence + 1 :]
        return self.text.join(before) + self.instead + self.text.join(after)


MUTATIONS = {
    "compute does not wait for copies": Mutation("_order_behind(self._stream, waits)", "pass", 0),
    "copies do not wait for compute": Mutation("_order_behind(self._stream, waits)", "pass", 1),
    "streams do not wait for each other": Mutation("stream.wait_event(self.ended)", "pass"),
    "a stream does not wait for the host": Mutation("            event.wait()\n", "            pass\n"),
    "the host does not wait for the device": Mutation("self.ended.synchronize()", "pass"),
    "compute runs on another stream": Mutation(
        "with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):\n            self._thread",
        "with nullcontext():\n            self._thread",
    ),
    "copies run on another stream": Mutation("torch.cuda.set_stream(self._stream)", "pass"),
    "an event is recorded before its work": Mutation(
        "            work()\n            self.ended = stream.record_event(self._pool.take())\n",
        "            self.ended = stream.record_event(self._pool.take())\n            work()\n",
    ),
    "an event is recorded again while it is under way": Mutation(
        "self._used.append((times, event))", "self._free[times].append(event)"
    ),
    "calls in phases run on another stream": Mutation("return self._compute.as_current()", "return nullcontext()"),
}


def device_of(source: str, name: str) -> Any:
    """An open device of the class that this text of `device/cuda.py` defines."""
    module = ModuleType(name)
    sys.modules[name] = module  # where dataclasses look
    try:
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)
        return module.CudaDevice(0)
    finally:
        del sys.modules[name]


def make_late(host: WorkerStream) -> None:
    """Have each piece of host work begin late: who does not wait for it is early for certain, not by chance."""
    submit = host.submit

    def late(task: Task, work: Work, waits: Sequence[Event] = ()) -> HostEvent:
        def run() -> None:
            time.sleep(LATE)
            work()

        return submit(task, run, waits)

    host.submit = late  # type: ignore[method-assign]


def trained(device: Any) -> dict[str, Tensor]:
    """Weights after steps over phases, offloaded inputs, units in every tier, and a change of policy."""
    make_late(device.stream("host"))
    model = tiny_model(attn_implementation="eager", num_hidden_layers=4)
    how: dict[str, Any] = {"weight_slots": 1, "grad_slots": 1, "shard_nbytes": 2048}
    numerics, rows = Numerics(loss_chunk_tokens=8), (("offload", "graph"), ("input",), ("drop",), ("graph", "input"))
    gated = Policy(wait_for="shard", activations_by_layer=rows, placements=MIXED, **how)
    plain = Policy(activations="keep", transfer="pinned", **how | {"weight_slots": 2})
    with Engine.from_model(
        model, device, "bf16", AdamW(lr=1e-2), 0.5, gated, verify=False, numerics=numerics
    ) as engine:
        for _ in range(2):
            engine.step(unequal_batches(2))
        engine.adopt(plain)
        for _ in range(2):
            engine.step(unequal_batches(3))
        found = engine.master_weights()
    device.close()
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    found = trained(device_of(SOURCE.read_text(), "unchanged"))
    assert STANDIN.violations(clear=True) == []
    return found


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_wait_that_is_taken_out_is_found(name: str, expected: dict[str, Tensor]) -> None:
    device = device_of(MUTATIONS[name].applied_to(SOURCE.read_text()), "changed")
    assert went_wrong(device, expected)


def went_wrong(device: Any, expected: dict[str, Tensor]) -> bool:
    """Whether training on this device reports a race, fails, or ends in other bits."""
    try:
        wrong = not equal(trained(device), expected)
    except MegaTrainError:  # not finite, say
        wrong = True
    finally:
        device.close()
        torch.cuda.synchronize()
    return bool(STANDIN.violations(clear=True)) or wrong


@pytest.mark.parametrize("action", ["forward", "loss", "backward", "copy", "update"])
def test_an_op_that_runs_on_another_stream_than_its_own_is_found(
    action: str, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = {run for run in ACTIONS.values() if run.__name__ == action}
    elsewhere = torch.cuda.Stream()

    def misplaced(*args: Any) -> None:
        with torch.cuda.stream(elsewhere):
            whole(*args)

    for kind, known in list(ACTIONS.items()):
        if known is whole:
            monkeypatch.setitem(ACTIONS, kind, misplaced)
    assert went_wrong(device_of(SOURCE.read_text(), "unchanged"), expected)


ENDS = {
    "device memory is given back": Mutation(
        "torch.cuda.synchronize(self.torch_device)  # then nothing uses it", "pass  # then nothing uses it"
    ),
    "host memory is unlocked": Mutation(
        "torch.cuda.synchronize(self._device)  # no copy is running", "pass  # no copy is running"
    ),
    "the device is closed": Mutation("        torch.cuda.synchronize(device)\n        torch._C", "        torch._C"),
}


@pytest.mark.parametrize("name", ENDS)
def test_memory_that_is_given_back_under_a_copy_is_found(name: str) -> None:
    for source, found in ((SOURCE.read_text(), False), (ENDS[name].applied_to(SOURCE.read_text()), True)):
        device = device_of(source, "changed")
        here, there = device.host.allocate(4096, "test"), device.allocate(4096, "test")
        copied = device.stream("fetch").submit(Errand("copy"), partial(there.copy_, here, non_blocking=True))
        copied.submitted.wait()
        if name == "device memory is given back":
            device.free(there, "test")
            del there
        elif name == "host memory is unlocked":
            device.host.free(here, "test")
        device.close()
        assert bool(STANDIN.violations(clear=True)) == found
        torch.cuda.synchronize()
