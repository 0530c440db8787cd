"""A rank that goes on from a checkpoint reads what it owns of it, and holds no more than that and a unit meanwhile."""

from __future__ import annotations

import ctypes
import gc
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.checkpoint.folder import open_checkpoint
from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.manifest import quick_check
from megatrain.checkpoint.save import PlannedCheckpoint
from megatrain.device.cpu import CpuDevice
from megatrain.device.host_memory import trim
from megatrain.memory import Ledger, Pool, Store, unit_state
from megatrain.model import PretrainedSource, port_model
from megatrain.model.pretrained import Shards
from megatrain.optim import AdamW
from megatrain.schedule import build_step
from megatrain.spec import Numerics, Policy, Precision, Work
from megatrain.spec.layout import Ownership
from megatrain.train.restore import read_moments
from tests.saved import ParamState, State, reader_of, save
from tests.tiny import tiny_model

RANKS = 4
MOST = RANKS << 18
"""Elements of a shard: a rank's piece of it is a MiB of a file, of which pages around it are some hundredths."""
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 2048}
EXPERTS = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 2048}


def states(planned: PlannedCheckpoint) -> Iterator[State]:
    """The state of unit after unit, finite."""
    generator = torch.Generator().manual_seed(1)
    for unit in planned.spec.units:
        yield {
            param.name: ParamState(*(torch.rand(param.shape, generator=generator) for _ in range(3)))
            for param in unit.params
        }


def checkpoint_of(folder: Path, family: str, **sizes: int) -> tuple[Checkpoint, PlannedCheckpoint]:
    model = tiny_model(family, **sizes)
    planned = PlannedCheckpoint(port_model(model, torch.bfloat16))
    return open_checkpoint(
        save(folder, planned=planned, state=reader_of(planned, states(planned))), quick_check
    ), planned


SET_HUGE_PAGES_OFF = 41  # of `prctl`: PR_SET_THP_DISABLE


class Meter:
    """What a process reads of the files in a folder, and its anonymous memory at the most, in bytes.

    Meanwhile no page is huge. numpy asks for huge ones, and how many the system has depends on what else runs: they
    would make some MiB more or less of the same arrays.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._read_here, self.peak = str(folder), 0, 0
        self.mapped: list[Any] = []
        """Holds all that is mapped until it is asked for."""
        control = ctypes.CDLL(None).prctl
        assert control(SET_HUGE_PAGES_OFF, 1, 0, 0, 0) == 0
        weakref.finalize(self, control, SET_HUGE_PAGES_OFF, 0, 0, 0, 0)
        gc.collect()
        trim()
        self._calls_before, self._held_before = self._number("io", "rchar"), self._number("status", "RssAnon") << 10

    def look(self) -> None:
        gc.collect(1)  # or garbage that waits for its collection would count
        trim()  # or what the C library keeps of freed blocks below 32 MiB would count, if nothing before has left any
        self.peak = max(self.peak, (self._number("status", "RssAnon") << 10) - self._held_before)

    def read(self) -> int:
        """By calls, and by pages of mapped files."""
        by_calls = self._number("io", "rchar") - self._calls_before - self._read_here
        mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", self._text("smaps"))
        held = (re.search(r"Rss:\s+(\d+) kB", each) for each in mappings if self._folder in each.partition("\n")[0])
        return by_calls + sum(int(each[1]) << 10 for each in held if each is not None)

    def _text(self, name: str) -> str:
        text = Path("/proc/self", name).read_text()
        self._read_here += len(text)
        return text

    def _number(self, name: str, key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+)", self._text(name))
        assert found is not None
        return int(found[1])


def store_of(rank: int, planned: PlannedCheckpoint, precision: Precision) -> Store:
    spec, numerics, policy = planned.spec.over(RANKS), Numerics(precision), Policy(shard_nbytes=MOST * 4)
    pool = Pool(CpuDevice(), Ledger())
    pool.provide(build_step(spec, numerics, policy, Work((1,)), rank=rank).buffers.values())
    return Store(spec, numerics, policy, pool, Ownership(rank, MOST))


def load(opened: Checkpoint, store: Store) -> None:
    PretrainedSource(opened.folder).fill(store, store.names_by_unit(read=True))
    read_moments(opened, store, AdamW())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "precision"),
    [("llama", "fp32"), ("mixtral", "fp32"), pytest.param("llama", "bf16", marks=pytest.mark.slow)],
)
def test_each_rank_reads_only_its_own_checkpoint_ranges(
    family: str, precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, planned_small = checkpoint_of(tmp_path / "small", family)
    load(small, store_of(1, planned_small, precision))  # what a process takes for its first load, of any size
    opened, planned = checkpoint_of(tmp_path / "large", family, **(SIZES if family == "llama" else EXPERTS))
    store = store_of(1, planned, precision)
    meter = Meter(opened.folder)
    honest_open, honest_write, honest_moments = Shards.open, Store.write_master, Checkpoint.moments
    honest_loaded = PretrainedSource._loaded

    @contextmanager
    def open_(self: Shards, names: Iterable[str], *how: Any) -> Iterator[dict[str, Any]]:
        with honest_open(self, names, *how) as slices:
            meter.mapped.append(dict(slices))
            yield slices

    @contextmanager
    def loaded(self: PretrainedSource, keys: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        with honest_loaded(self, keys) as values:
            meter.look()  # at what the library has put together
            yield values

    def write(self: Store, name: str, value: Tensor) -> None:
        honest_write(self, name, value)
        meter.look()

    def moments(self: Checkpoint, name: str, arrays: Sequence[str]) -> list[Tensor]:
        meter.look()
        saved = honest_moments(self, name, arrays)
        meter.mapped.append(saved)
        return saved

    monkeypatch.setattr(unit_state, "AT_ONCE", 1 << 18)  # as small beside these units as it is beside large ones
    monkeypatch.setattr(Shards, "open", open_)
    monkeypatch.setattr(PretrainedSource, "_loaded", loaded)
    monkeypatch.setattr(Store, "write_master", write)
    monkeypatch.setattr(Checkpoint, "moments", moments)
    load(opened, store)
    own_nbytes = planned.nbytes / RANKS
    largest_unit = max(unit.numel for unit in planned.spec.units) * 4
    assert own_nbytes <= meter.read() < 1.25 * own_nbytes, "pages around the ends of pieces, and headers"
    assert meter.peak <= 1.05 * own_nbytes + largest_unit / (1 if family == "mixtral" else RANKS)
    for number, whole in enumerate(states(planned)):
        unit, layout = store.units[number], store.layouts[number]
        memory = torch.empty(4 * layout.own_size, dtype=torch.uint8)
        for field in layout.fields:
            for piece in store.owned.within(layout, field.start, field.stop):
                part, saved = slice(piece.start - field.start, piece.stop - field.start), whole[field.name]
                for array, all_of_it in enumerate((saved.master, saved.m, saved.v)):
                    assert all_of_it is not None
                    own = unit.in_float32(array, piece.own.start, piece.own.stop, memory)
                    assert own.tobytes() == all_of_it.reshape(-1)[part].numpy().tobytes()
