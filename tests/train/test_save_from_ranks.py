"""Ranks that write one checkpoint together leave the files that one rank writes, or nothing; and loads read no more.

Ranks are threads here, each with its part of a state of arbitrary bits; `tests/integration` has engines, and
`tests/run/test_ranks.py` processes that are killed.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.checkpoint import manifest, range_writer
from megatrain.checkpoint import save as save_module
from megatrain.checkpoint.manifest import FileSum, full_check
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.checkpoint.save import (
    CheckpointFacts,
    PlannedCheckpoint,
    PreviousCheckpoint,
    StateReader,
    write_checkpoint,
)
from megatrain.checkpoint.tensor_pieces import TensorPiece
from megatrain.dist import World
from megatrain.errors import CheckpointError, MegaTrainError, RankError
from megatrain.model import port_model
from megatrain.optim import HostArrays, StateArrays
from megatrain.spec.layout import Layout, Ownership, layout_of
from megatrain.train import save_from_ranks
from megatrain.train.save_from_ranks import Agree, SharedFiles, write_together
from tests.integration.test_ranks import files_in
from tests.ranks import together, worlds
from tests.saved import save, units_of
from tests.tiny import tiny_model

BLOCK = 4096
MOST = 3 * 1024
"""Elements of a shard at most: with two or three ranks one or two shards in each parameter of the tiny models."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which most are written by several ranks, which hear of each other often."""
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(save_from_ranks, "AT_ONCE_NBYTES", 1 << 16)
    monkeypatch.setattr(save_module, "SMALLEST", 1)


@cache
def planned_of(family: str) -> PlannedCheckpoint:
    """`odd`: the files hold experts one by one, and buffers of three dtypes; a unit and a half are frozen."""
    model = tiny_model("mixtral" if family == "odd" else family)
    if family == "odd":
        model.model.layers[0].requires_grad_(False)
        model.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
        model.model.layers[1].mlp.register_buffer("seen", torch.tensor([3, 4]))
        model.model.layers[0].mlp.register_buffer("scale", torch.tensor([0.5, 2.0]))
        model.model.register_buffer("flag", torch.tensor(True))
    return PlannedCheckpoint(port_model(model, torch.bfloat16), shard_nbytes=40_000)


def refuse_to_gather(*_: int) -> np.ndarray:
    raise CheckpointError("the test gathers nothing", where="rank 0")


class Rank:
    """What one rank owns of the state that follows from a seed."""

    def __init__(self, world: World, planned: PlannedCheckpoint, seed: int) -> None:
        self.world, self.planned, self.seed = world, planned, seed
        self.layouts = [layout_of(unit) for unit in planned.spec.over(world.size).units]
        self.owned = Ownership(world.rank, MOST)
        self.states = [self._own(layout, of) for layout, of in zip(self.layouts, units_of(planned, seed), strict=True)]
        self.written: list[int] = []
        self.doubts = self.linked = 0
        self.why = ""

    @property
    def state(self) -> StateReader:
        return StateReader(self._read, self.layouts, self.owned, self.written.append)

    def _read(self, unit: int, array: int, start: int, stop: int) -> np.ndarray:
        state = self.states[unit]
        return (state.hi, *state.moments)[array][start:stop]

    def _own(self, layout: Layout, state: Mapping[str, Any]) -> HostArrays:
        whole = {kind: np.zeros(layout.size, np.float32) for kind in ("master", "m", "v")}
        for field in layout.fields:
            for kind, values in whole.items():
                if (tensor := getattr(state[field.name], kind)) is not None:
                    values[field.start : field.stop] = tensor.reshape(-1).numpy()
        own = {kind: np.zeros(layout.own_size, np.float32) for kind in whole}
        for piece in self.owned.pieces(layout):
            for kind, values in own.items():
                values[piece.own] = whole[kind][piece.start : piece.stop]
        trained = layout.trained.own_size
        return StateArrays(own["master"], None, (own["m"][:trained], own["v"][:trained]))

    def save(self, folder: Path, step: int = 1, earlier: Path | None = None) -> Path:
        """As `Saver` does it, without the way by rank 0."""

        def by_all(agree: Agree, staging: Path | None, files: Sequence[Shard]) -> Mapping[str, FileSum] | None:
            target = folder / f"step-{step:08}"
            name, names = agree(lambda: (staging.name if staging else "", [shard.name for shard in files]))[0]
            here = target.with_name(name)
            shared = SharedFiles(self.world, agree, self.planned, self.state, lambda nbytes: None, target)
            self.why = shared.why_not(here)
            if self.why:
                return None
            try:
                return shared.write(here, names)
            finally:
                self.doubts += shared.lost_writes

        def lead(agree: Agree) -> Path:
            known = None if earlier is None else PreviousCheckpoint(earlier, frozen="1")
            if known is not None:
                known.begin(frozen=str(self.seed))
            facts, together = CheckpointFacts(step, {"step": 1}), partial(by_all, agree)
            nothing = StateReader(refuse_to_gather, self.layouts)
            path = write_checkpoint(folder, self.planned, nothing, facts, earlier=known, together=together)
            self.linked = 0 if known is None else known.linked_nbytes
            return path

        return write_together(self.world, lead, lambda agree: by_all(agree, None, ()))


def saved_by(size: int, folder: Path, family: str = "llama", seed: int = 1, **how: Any) -> list[Rank]:
    def work(world: World) -> Rank:
        rank = Rank(world, planned_of(family), seed)
        rank.save(folder, **how)
        return rank

    return together(worlds(size, seed=size), work)


@pytest.mark.parametrize(("family", "sizes"), [("llama", (2, 3)), ("odd", (3,))])
def test_any_number_of_ranks_writes_the_same_files(family: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Byte for byte; and of a file that nothing trains the next checkpoint has a link."""
    planned = planned_of(family)
    alone = save(tmp_path / "1", planned=planned)
    for size in sizes:
        ranks = saved_by(size, tmp_path / str(size), family)
        there = tmp_path / str(size) / alone.name
        assert files_in(there) == files_in(alone)
        assert full_check(there) == []
        assert [rank.written for rank in ranks] == [list(planned.order)] * size
        assert not any(rank.why or rank.doubts for rank in ranks)
        assert [path.name for path in there.parent.iterdir()] == [there.name]


def test_frozen_files_are_linked_if_unchanged_on_all_ranks(tmp_path: Path) -> None:
    planned = planned_of("odd")
    saved_by(3, tmp_path, "odd")
    before = tmp_path / "step-00000001"
    ranks = saved_by(3, tmp_path, "odd", step=2, earlier=before)
    frozen = [shard.name for shard in planned.frozen_weights]
    assert ranks[0].linked >= sum(shard.nbytes for shard in planned.frozen_weights)
    after = tmp_path / "step-00000002"
    linked = [path.name for path in after.rglob("*.safetensors") if path.stat().st_nlink > 1]
    assert sorted(linked) == sorted(frozen)
    assert len(frozen) > 1
    weights = {name for name in files_in(before) if name.endswith(".safetensors")}
    assert all(files_in(after)[name] == files_in(before)[name] for name in weights)
    ranks = saved_by(3, tmp_path, "odd", seed=2, step=3, earlier=after)
    assert not [path for path in tmp_path.glob("step-00000003/*.safetensors") if path.stat().st_nlink > 1]
    alone = save(tmp_path / "1", 3, 2, planned=planned, training={"step": 1})
    assert files_in(tmp_path / "step-00000003") == files_in(alone)


def test_ranks_without_a_shared_folder_detect_it(tmp_path: Path) -> None:
    def work(world: World) -> str:
        rank = Rank(world, planned_of("llama"), 1)
        with pytest.raises(MegaTrainError, match="gathers nothing"):
            rank.save(tmp_path / str(world.rank // 2))
        return rank.why

    (tmp_path / "1").mkdir()
    assert together(worlds(3), work) == ["the ranks do not share its folder"] * 3


def test_every_rank_syncs_its_writes_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, forced = os.fsync, set[tuple[str, str]]()

    def fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if not list(tmp_path.rglob("manifest.json")):
            forced.add((threading.current_thread().name, path.name))
        honest(file)

    monkeypatch.setattr(os, "fsync", fsync)
    saved_by(2, tmp_path)
    planned = planned_of("llama")
    files = {Path(shard.name).name for shard in (*planned.weights, *planned.moments)}
    for rank in range(2):
        assert files <= {name for thread, name in forced if thread == f"rank {rank}"}


def test_what_a_conversion_computes_is_not_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = copy(planned_of("odd"))
    planned.__dict__.pop("are_moved", None)  # known from another test
    honest = planned.written.tensors

    def tensors(unit: int, masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value * 2 if "experts" in name else value for name, value in honest(unit, masters).items()}

    monkeypatch.setattr(planned, "written", copy(planned.written))
    monkeypatch.setattr(planned.written, "tensors", tensors)

    def work(world: World) -> str:
        rank = Rank(world, planned, 1)
        with pytest.raises(MegaTrainError, match="gathers nothing"):
            rank.save(tmp_path)
        return rank.why

    assert together(worlds(2), work) == ["converting its tensors does more than move their elements"] * 2


def failing(size: int, folder: Path) -> list[tuple[str, int]]:
    """What each rank is told of a save that fails, and how often it was told not to trust the folder."""

    def work(world: World) -> tuple[str, int]:
        rank = Rank(world, planned_of("llama"), 2)
        with pytest.raises(MegaTrainError) as failure:
            rank.save(folder, step=2)
        return str(failure.value), rank.doubts

    return together(worlds(size), work)


def test_a_full_disk_on_one_rank_is_reported_on_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path, planned=planned_of("llama"))
    spoil_unit(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    told = failing(3, tmp_path)
    line = f"{tmp_path}/step-00000002: cannot be written (No space left on device); free some space"
    assert told == [(f"rank 1: CheckpointError: {line}", 0), (line, 0), (f"rank 1: CheckpointError: {line}", 0)]
    assert full_check(before) == []
    assert list(tmp_path.iterdir()) == [before]


def test_an_abandoned_save_does_not_disable_shared_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = range_writer.sums_of_blocks

    def sums_of_blocks(*given: Any) -> list[int]:
        if threading.current_thread().name == "rank 1":
            raise RuntimeError("given up")
        return honest(*given)

    monkeypatch.setattr(range_writer, "sums_of_blocks", sums_of_blocks)

    def work(world: World) -> tuple[str, int]:
        rank = Rank(world, planned_of("llama"), 2)
        with pytest.raises((RuntimeError, RankError)) as failure:
            rank.save(tmp_path)
        return str(failure.value), rank.doubts

    told = together(worlds(3), work)
    assert told == [("rank 1: RuntimeError: given up", 0), ("given up", 0), ("rank 1: RuntimeError: given up", 0)]
    assert not list(tmp_path.iterdir())


def test_a_rank_dying_during_a_save_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path, planned=planned_of("llama"))
    spoil_unit(monkeypatch, SystemExit())

    def work(world: World) -> str:
        try:
            Rank(world, planned_of("llama"), 2).save(tmp_path, step=2)
        except RankError as error:
            return str(error)
        except SystemExit:
            world.close()  # as the end of a process does
        return ""

    told = together(worlds(3), work)
    assert [bool(line) for line in told] == [True, False, True]
    assert full_check(before) == []
    assert list(tmp_path.iterdir()) == [before]


def spoil_unit(monkeypatch: pytest.MonkeyPatch, failure: BaseException | None) -> None:
    """Rank 1 fails in the midst of what it writes, or leaves a piece out."""
    honest = PlannedCheckpoint.pieces

    def pieces(self: PlannedCheckpoint, unit: int, state: StateReader, wants: Any) -> Iterator[TensorPiece]:
        for number, piece in enumerate(honest(self, unit, state, wants)):
            if state.owned is not None and state.owned.rank == 1 and unit == 2 and number == 3:
                if failure is None:
                    continue
                raise failure
            yield piece

    monkeypatch.setattr(PlannedCheckpoint, "pieces", pieces)


@pytest.mark.parametrize("spoilt", ["lost", "flipped", "elsewhere", "left out"])
def test_lost_writes_are_found_before_the_manifest_is_written(
    spoilt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, number = range_writer.write_all, itertools.count()

    def write(file: range_writer.OpenFile, data: memoryview, start: int) -> None:
        if next(number) != 20:
            return honest(file, data, start)
        match spoilt:
            case "flipped":
                honest(file, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:])), start)
            case "elsewhere":
                honest(file, data, start + 4)

    if spoilt == "left out":
        spoil_unit(monkeypatch, None)
    monkeypatch.setattr(range_writer, "write_all", write)
    told = failing(2, tmp_path)
    assert all("safetensors holds between byte" in line and doubts == 1 for line, doubts in told)
    assert not list(tmp_path.iterdir())
