"""A rank that goes on from a checkpoint reads what it owns of it, and holds no more than that and a unit meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.checkpoint import Checkpoint, PlannedCheckpoint, open_checkpoint, quick_check
from megatrain.device.cpu import CpuDevice
from megatrain.memory import Ledger, Pool, Store
from megatrain.model import PretrainedSource, port_model
from megatrain.model.pretrained import Shards
from megatrain.schedule import build_step
from megatrain.spec import Numerics, Policy, Precision, Work
from megatrain.spec.layout import Ownership
from megatrain.train.restore import read_moments
from tests.saved import save, units_of
from tests.tiny import tiny_model

RANKS = 4
MOST = RANKS << 18
"""Elements of a shard: a rank's piece of it is a MiB of a file, of which pages around it are some hundredths."""
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 2048}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, PlannedCheckpoint]:
    planned = PlannedCheckpoint(port_model(tiny_model("llama", **SIZES), torch.bfloat16))
    folder = save(tmp_path_factory.mktemp("saved"), planned=planned)
    return open_checkpoint(folder, quick_check), planned


class Meter:
    """What a process has touched of the files in a folder, and its anonymous memory at the most, in bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._mapped = str(folder), 0
        self.read = self.peak = 0
        self.before = self.anonymous()

    def anonymous(self) -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    def look(self, *, ends: bool = False) -> None:
        """ends: what is mapped now will not be touched any more."""
        self.peak = max(self.peak, self.anonymous() - self.before)
        if ends:
            for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
                if self._folder in mapping.partition("\n")[0]:
                    self.read += int(re.search(r"Rss:\s+(\d+) kB", mapping)[1]) << 10  # type: ignore[index]


def store_of(rank: int, planned: PlannedCheckpoint, precision: Precision) -> Store:
    spec, numerics, policy = planned.spec.over(RANKS), Numerics(precision), Policy(shard_nbytes=MOST * 4)
    pool = Pool(CpuDevice(), Ledger())
    pool.provide(build_step(spec, numerics, policy, Work((1,)), rank=rank).buffers.values())
    return Store(spec, numerics, policy, pool, Ownership(rank, MOST))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_rank_reads_its_own_ranges_of_a_checkpoint_alone(
    precision: Precision, checkpoint: tuple[Checkpoint, PlannedCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, planned = checkpoint
    rank = 1
    store = store_of(rank, planned, precision)
    meter = Meter(opened.folder)
    honest_open, honest_write, honest_moments = Shards.open, Store.write_master, Checkpoint.moments

    @contextmanager
    def open_(self: Shards, names: Iterable[str], *how: Any) -> Iterator[dict[str, Any]]:
        with honest_open(self, names, *how) as slices:
            yield slices
            meter.look(ends=True)

    def write(self: Store, name: str, value: Tensor) -> None:
        honest_write(self, name, value)
        meter.look()

    def moments(self: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
        meter.look(ends=True)  # of the one before
        return honest_moments(self, names)

    monkeypatch.setattr(Shards, "open", open_)
    monkeypatch.setattr(Store, "write_master", write)
    monkeypatch.setattr(Checkpoint, "moments", moments)
    PretrainedSource(opened.folder).fill(store, store.names_by_unit(read=True))
    read_moments(opened, store)
    own_nbytes = planned.nbytes / RANKS
    assert own_nbytes <= meter.read < 1.35 * own_nbytes, "pages around the ends of pieces, and headers"
    largest_unit = max(unit.numel for unit in planned.spec.units) * 4 / RANKS
    assert meter.peak <= 1.05 * own_nbytes + largest_unit
    for number, whole in enumerate(units_of(planned, 1)):
        spare = torch.empty(store.spare_nbytes(number), dtype=torch.uint8)
        state, layout = store.float32_state(number, spare), store.layouts[number]
        for field in layout.fields:
            for piece in store.owned.within(layout, field.start, field.stop):
                part, saved = slice(piece.start - field.start, piece.stop - field.start), whole[field.name]
                for own, all_of_it in ((state.hi, saved.master), (state.m, saved.m), (state.v, saved.v)):
                    assert all_of_it is not None
                    assert own[piece.own].tobytes() == all_of_it.reshape(-1)[part].numpy().tobytes()
