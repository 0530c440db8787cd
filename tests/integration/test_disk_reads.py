"""Saving or exporting state that lies on the disk reads hardly more bytes than it writes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatrain import AdamW, Engine, Policy
from megatrain.memory import Disk
from megatrain.memory import disk as disk_module
from megatrain.optim import Lion, Muon, Optimizer
from megatrain.spec import Part, Placement, Precision
from tests.tiny import tiny_model

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 2048}
"""Layers of four million elements, a quarter of those of a model of 500 million parameters."""
BLOCK_NBYTES, GRAIN_NBYTES = 1 << 20, 64 << 10
"""A quarter of the usual, so as small beside these layers as they are beside those."""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", [AdamW(), Lion(), Muon()], ids=lambda optimizer: optimizer.NAME)
def test_saves_and_exports_read_little_more_than_they_need(
    optimizer: Optimizer, precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of state on the disk, every byte of which has been written."""
    monkeypatch.setattr(disk_module, "GRAIN_NBYTES", GRAIN_NBYTES)
    disk, placement = Disk([tmp_path], block_nbytes=BLOCK_NBYTES), Placement("disk", "disk", "disk")
    model, policy = tiny_model(**SIZES), Policy(placements=(placement,) * 4)
    with Engine.from_model(model, "cpu", precision, optimizer, None, policy, verify=False, disk=disk) as engine:
        for unit in engine.parts.store.units:
            for number, size in enumerate(unit.layout.own_state_sizes):
                unit.write(Part.MOMENTS, 0, np.ones(size, np.float32), number)
        read = [disk.read_nbytes]
        engine.save(tmp_path / "checkpoints").wait()
        read.append(disk.read_nbytes)
        engine.save_pretrained(tmp_path / "model")
        read.append(disk.read_nbytes)
        params = [param for unit in engine.structure.units for param in unit.params]
    of_save, of_export = (after - before for before, after in pairwise(read))
    masters_nbytes = 4 * sum(param.numel for param in params)
    state_nbytes = masters_nbytes + 4 * sum(param.numel * len(param.state) for param in params)
    assert state_nbytes <= of_save <= 1.06 * state_nbytes
    assert masters_nbytes <= of_export <= 1.15 * masters_nbytes
