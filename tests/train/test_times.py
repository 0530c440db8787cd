"""Whether a step leaves the times of its ops: always where that costs nothing, elsewhere while somebody asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain import Engine
from megatrain.device.cpu import CpuDevice
from megatrain.errors import NonFinite
from tests.tiny import tiny_model, unequal_batches


class Untimed(CpuDevice):
    """A device on which times are had for the asking, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.timed = False


def test_times_are_recorded_only_on_request() -> None:
    device = Untimed()
    with Engine.from_model(tiny_model(), device, verify=False) as engine:
        engine.step(unequal_batches())
        assert engine.diagnostics.timeline is None
        engine.diagnostics.record_timeline = True
        engine.step(unequal_batches())
        assert engine.diagnostics.timeline is not None
        engine.evaluate(unequal_batches())
        assert not device.timed, "only steps are asked for"
        engine.diagnostics.record_timeline = False
        engine.step(unequal_batches())
        assert engine.diagnostics.timeline is None


@pytest.mark.parametrize("make", [CpuDevice, Untimed])
def test_a_finished_trace_changes_nothing(make: type[CpuDevice], tmp_path: Path) -> None:
    device = make()
    before = device.timed
    with Engine.from_model(tiny_model(), device, verify=False) as engine:
        engine.diagnostics.trace(tmp_path / "trace.json", steps=1)
        for _ in range(3):
            engine.step(unequal_batches())
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert device.timed == before
        assert (engine.diagnostics.timeline is not None) == before


def test_a_step_that_fails_leaves_the_device_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise NonFinite("on purpose")

    device = Untimed()
    with Engine.from_model(tiny_model(), device, verify=False) as engine:
        engine.diagnostics.record_timeline = True
        monkeypatch.setattr(engine.parts.optimizer, "norm", failing)
        with pytest.raises(NonFinite):
            engine.step(unequal_batches())
        assert not device.timed
