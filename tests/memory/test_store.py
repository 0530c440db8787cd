"""Buffers, leases, and the exact state of each unit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from megatrain.device.cpu import CpuDevice
from megatrain.device.sim import SimDevice
from megatrain.errors import DeviceError, DoesNotFit, OutOfDeviceMemory
from megatrain.memory import LeasedBuffers, Ledger, Pool, Store
from megatrain.memory.checksum import checksum
from megatrain.schedule import Buffer, Use, build_step
from megatrain.schedule.passes.state_buffers import state_name, state_nbytes
from megatrain.spec import ModelSpec, Numerics, ParamSpec, Part, Policy, Precision, UnitSpec, Work
from megatrain.spec.layout import Ownership

MODEL = ModelSpec(
    "m",
    (
        UnitSpec("p", "prologue", (ParamSpec("e", (9, 8)),)),
        UnitSpec("l", "layer", (ParamSpec("l.w", (4, 8)), ParamSpec("l.b", (3,)))),
        UnitSpec("h", "epilogue", (ParamSpec("h", (9, 8)),)),
    ),
    hidden_size=8,
    vocab_size=9,
)


def store(precision: Precision, model: ModelSpec = MODEL) -> Store:
    numerics, policy = Numerics(precision), Policy()
    pool = Pool(CpuDevice(), Ledger())
    pool.provide(build_step(model, numerics, policy, Work((1,))).buffers.values())
    return Store(model, numerics, policy, pool)


def load(state: Store, values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        state.write_master(name, value)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_masters_round_trip_bit_for_bit(precision: Precision) -> None:
    state = store(precision)
    values = {p.name: torch.randn(p.shape) for unit in MODEL.units for p in unit.params}
    values["l.b"] = torch.tensor([1e-42, -0.0, 3.3e38])  # a denormal, a signed zero, a large one
    load(state, values)
    for name, value in values.items():
        assert torch.equal(state.master(name).view(torch.int32), value.view(torch.int32))
    assert list(state.names()) == list(values)
    assert not state.units[1].read(Part.MOMENTS, 0, 2 * state.units[1].trained).any()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_view_shares_the_weights_memory(precision: Precision) -> None:
    state = store(precision)
    values = {p.name: torch.randn(p.shape) for unit in MODEL.units for p in unit.params}
    load(state, values)
    for name, value in values.items():
        view = state.view(name)
        assert view is not None
        assert torch.equal(view, value if precision == "fp32" else value.to(torch.bfloat16))
        view.fill_(0.5)
        assert torch.equal(state.master(name).to(view.dtype), view)


PARTLY = ModelSpec(
    "m",
    (
        UnitSpec("p", "prologue", (ParamSpec("e", (9, 8), trainable=False),)),
        UnitSpec("l", "layer", (ParamSpec("l.w", (4, 8), trainable=False), ParamSpec("l.b", (3,)))),
        UnitSpec("h", "epilogue", (ParamSpec("h", (9, 8)),)),
    ),
    hidden_size=8,
    vocab_size=9,
)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_frozen_weights_are_kept_in_compute_dtype_and_rounding_is_reported(precision: Precision) -> None:
    state = store(precision, PARTLY)
    values = {p.name: torch.randn(p.shape) for unit in PARTLY.units for p in unit.params}
    values["l.w"] = values["l.w"].to(torch.bfloat16).float()
    load(state, values)
    assert state.rounded == ({"e"} if precision == "bf16" else set())
    spare = torch.empty(max(unit.spare_nbytes for unit in state.units), dtype=torch.uint8)
    for unit, layout in enumerate(state.layouts):
        whole = state.units[unit].in_float32(0, 0, layout.size, spare)
        for field in layout.fields:
            exact = values[field.name].to(torch.bfloat16).float() if field.name in state.rounded else values[field.name]
            assert torch.equal(state.master(field.name), exact)
            assert torch.equal(torch.from_numpy(whole[field.start : field.stop].copy()).view(field.shape), exact)
    state.write_master("e", torch.ones(9, 8))
    assert not state.rounded


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_frozen_checksum_is_the_one_that_checkpoints_hold(precision: Precision) -> None:
    """Of the values as float32, in pieces of 4,194,304 of them."""
    rows = (1 << 22) // 8 + 3
    large = UnitSpec("p", "prologue", (ParamSpec("e", (rows, 8), trainable=False),))
    state = store(precision, replace(PARTLY, units=(large, *PARTLY.units[1:])))
    values = torch.arange(rows * 8).remainder(256).float()
    state.write_master("e", values.view(rows, 8))
    pieces = values[: 1 << 22], values[1 << 22 :], torch.zeros(32)  # and the layer's, which is still zero
    expected = checksum(piece.numpy().view(np.uint8) for piece in pieces)
    assert state.frozen_checksum() == f"{expected:016x}"


def test_a_frozen_parameter_takes_two_bytes_in_bf16_and_four_in_fp32() -> None:
    for precision, each in (("bf16", 2), ("fp32", 4)):
        state = store(precision, PARTLY)  # type: ignore[arg-type]
        names = [state_name("host", part, 0) for part in Part]
        assert sum(state.pool.buffers[name].nbytes for name in names if name in state.pool.buffers) == each * 96


def test_the_streamed_weight_is_the_rounded_master() -> None:
    state = store("bf16")
    value = torch.randn(4, 8)
    load(state, {p.name: value if p.name == "l.w" else torch.zeros(p.shape) for u in MODEL.units for p in u.params})
    streamed = torch.from_numpy(state.units[1].read(Part.WEIGHTS, 0, 32).view("int16")).view(torch.bfloat16).view(4, 8)
    assert torch.equal(streamed, value.to(torch.bfloat16))  # no ties among random numbers


def test_writing_a_parameter_leaves_its_neighbours() -> None:
    state = store("bf16")
    state.write_master("l.w", torch.ones(4, 8))
    state.write_master("l.b", torch.full((3,), 2.0))
    assert state.master("l.w").eq(1).all()
    assert state.units[1].read(Part.WEIGHTS, 35, 64).sum() == 0, "the gap stays zero"


def test_leases_are_returned_after_failures() -> None:
    schedule = build_step(MODEL, Numerics(), Policy(), Work((1,)))
    pool = Pool(CpuDevice(), Ledger())
    pool.provide(schedule.buffers.values())
    op = next(op for op in schedule.ops if op.kind == "FETCH")
    with pytest.raises(RuntimeError), LeasedBuffers(pool, op) as held:
        assert set(held) == {access.buffer for access in (*op.reads, *op.writes)}
        assert pool.leases == 1
        with pytest.raises(DeviceError, match="1 leases are in use"):
            pool.provide([Buffer("device/new", "device", 8, Use.NORMS)])
        raise RuntimeError
    assert pool.leases == 0


def test_device_memory_is_only_reached_through_a_lease() -> None:
    pool = Pool(CpuDevice(), Ledger())
    pool.provide([Buffer("device/slot", "device", 8, Use.NORMS)])
    with pytest.raises(DeviceError, match="can only be used through a lease"):
        pool.memory("device/slot")


def test_buffers_grow_and_are_reused() -> None:
    pool = Pool(CpuDevice(), Ledger())
    pool.provide([Buffer("host/a", "host", 8, Use.NORMS)])
    first = pool.memory("host/a")
    pool.provide([Buffer("host/a", "host", 8, Use.NORMS), Buffer("host/b", "host", 4, Use.NORMS, arena=False)])
    assert pool.memory("host/a") is first
    pool.provide([Buffer("host/a", "host", 16, Use.NORMS)])
    assert pool.ledger.table() == {("host", "norms"): 16}


def test_a_refused_allocation_records_nothing() -> None:
    pool = Pool(CpuDevice(), Ledger({"host": 10}))
    pool.provide([Buffer("host/a", "host", 6, Use.NORMS)])
    with pytest.raises(DoesNotFit, match="needs 11 B of host memory, 1 B more than its budget of 10 B"):
        pool.provide([Buffer("host/b", "host", 5, Use.NORMS)])
    assert pool.ledger.nbytes("host") == 6


def test_device_buffers_count_against_the_host_where_there_is_one_memory() -> None:
    buffers = [Buffer("host/a", "host", 6, Use.NORMS), Buffer("device/b", "device", 5, Use.NORMS)]
    Ledger({"host": 10}).require(buffers)
    with pytest.raises(DoesNotFit, match="needs 11 B of host memory"):
        Ledger({"host": 10}, one_memory=True).require(buffers)


def test_a_buffer_whose_growth_failed_is_recreated() -> None:
    device = SimDevice(capacity=100)
    pool = Pool(device, Ledger())
    small, large = (Buffer("device/slot", "device", nbytes, Use.NORMS) for nbytes in (60, 120))
    pool.provide([small])
    with pytest.raises(OutOfDeviceMemory):
        pool.provide([large])
    assert pool.ledger.nbytes("device") == 0 == 100 - device.free_nbytes()
    pool.provide([small])
    assert pool.ledger.nbytes("device") == 60 == 100 - device.free_nbytes()


class Ranks:
    """Runs the same on every rank, each in a thread, and gathers what they give."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._given, self._ranks = threading.Barrier(ranks, timeout=60), {}, ranks

    def gather(self, rank: int, own: torch.Tensor) -> torch.Tensor:
        self._given[rank] = own
        self._barrier.wait()
        whole = torch.stack([self._given[other] for other in range(self._ranks)])
        self._barrier.wait()
        return whole

    def run(self, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        with ThreadPoolExecutor(self._ranks) as threads:
            return list(threads.map(work, range(self._ranks)))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_parts_together_hold_every_bit(precision: Precision, ranks: int) -> None:
    """Of a unit with several shards, the last of them frozen."""
    wide = ParamSpec("l.w", (90, 77)), ParamSpec("l.b", (3,)), ParamSpec("l.f", (70, 30), trainable=False)
    units = MODEL.units[0], UnitSpec("l", "layer", wide), MODEL.units[2]
    model, numerics, policy = ModelSpec("m", units, 8, 9).over(ranks), Numerics(precision), Policy(shard_nbytes=7000)
    stores: list[Store] = []
    together = Ranks(ranks)
    for rank in range(ranks):
        pool = Pool(CpuDevice(), Ledger())
        pool.provide(build_step(model, numerics, policy, Work((1,)), rank=rank).buffers.values())
        held = pool.ledger.table()
        state = sum(held.get(("host", use), 0) for use in ("weights", "optimizer state", "gradients", "norms"))
        assert state == state_nbytes(model, numerics, policy)["host"]
        owned = Ownership(rank, policy.shard_nbytes // numerics.weight_nbytes)
        stores.append(Store(model, numerics, policy, pool, owned, partial(together.gather, rank)))
    values = {p.name: torch.randn(p.shape) for unit in units for p in unit.params}
    values["l.f"] = values["l.f"].to(torch.bfloat16).float()  # frozen: held as the bfloat16 that is computed with
    for store in stores:
        load(store, values)
    for name, value in values.items():
        for whole in together.run(lambda rank, name=name: stores[rank].master(name)):  # type: ignore[misc]
            assert torch.equal(whole.view(torch.int32), value.view(torch.int32))
        assert all(store.view(name) is None for store in stores)
    stores[0].write_master("l.w", torch.full((90, 77), torch.nan))
    assert stores[0].non_finite() == ["l.w"]
    assert stores[1].non_finite() == []
