"""Buffers, leases, and the exact state of each unit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatrain.device.cpu import CpuDevice
from megatrain.device.sim import SimDevice
from megatrain.errors import DeviceError, DoesNotFit, OutOfDeviceMemory
from megatrain.memory import Ledger, Pool, Store
from megatrain.optim import HostArrays, join
from megatrain.optim.split_master import bf16_to_f32
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


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_masters_round_trip_bit_for_bit(precision: Precision) -> None:
    state = store(precision)
    values = {p.name: torch.randn(p.shape) for unit in MODEL.units for p in unit.params}
    values["l.b"] = torch.tensor([1e-42, -0.0, 3.3e38])  # a denormal, a signed zero, a large one
    state.load(values)
    for name, value in values.items():
        assert torch.equal(state.master(name).view(torch.int32), value.view(torch.int32))
    assert list(state.names()) == list(values)
    assert not any(moment.any() for moment in state.unit(1).moments)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_view_shares_the_weights_memory(precision: Precision) -> None:
    state = store(precision)
    values = {p.name: torch.randn(p.shape) for unit in MODEL.units for p in unit.params}
    state.load(values)
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
    state.load(values)
    assert state.rounded == ({"e"} if precision == "bf16" else set())
    spare = torch.empty(max(state.spare_nbytes(unit) for unit in range(3)), dtype=torch.uint8)
    for unit, layout in enumerate(state.layouts):
        whole = state.float32_state(unit, spare)
        for field in layout.fields:
            exact = values[field.name].to(torch.bfloat16).float() if field.name in state.rounded else values[field.name]
            assert torch.equal(state.master(field.name), exact)
            assert torch.equal(torch.from_numpy(whole.hi[field.start : field.stop].copy()).view(field.shape), exact)
    state.write_master("e", torch.ones(9, 8))
    assert not state.rounded


def test_a_frozen_parameter_takes_two_bytes_in_bf16_and_four_in_fp32() -> None:
    for precision, each in (("bf16", 2), ("fp32", 4)):
        state = store(precision, PARTLY)  # type: ignore[arg-type]
        parts = [state_name("host", part, 0) for part in Part if state.pool.has(state_name("host", part, 0))]
        assert sum(state.pool.nbytes(name) for name in parts) == each * 96


def test_the_streamed_weight_is_the_rounded_master() -> None:
    state = store("bf16")
    value = torch.randn(4, 8)
    state.load({p.name: value if p.name == "l.w" else torch.zeros(p.shape) for u in MODEL.units for p in u.params})
    streamed = torch.from_numpy(state.unit(1).hi[:32].view("int16")).view(torch.bfloat16).view(4, 8)
    assert torch.equal(streamed, value.to(torch.bfloat16))  # no ties among random numbers


def test_writing_a_parameter_leaves_its_neighbours() -> None:
    state = store("bf16")
    state.write_master("l.w", torch.ones(4, 8))
    state.write_master("l.b", torch.full((3,), 2.0))
    assert state.master("l.w").eq(1).all()
    assert state.unit(1).hi[35:].sum() == 0, "the gap stays zero"


def test_leases_are_returned_after_failures() -> None:
    schedule = build_step(MODEL, Numerics(), Policy(), Work((1,)))
    pool = Pool(CpuDevice(), Ledger())
    pool.provide(schedule.buffers.values())
    op = next(op for op in schedule.ops if op.kind == "FETCH")
    with pytest.raises(RuntimeError), pool.lease(op) as held:
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


def masters_of(state: HostArrays) -> np.ndarray:
    """Of what a rank owns: both halves where it trains, and the weights alone behind."""
    if state.lo is None:
        return state.hi
    trained = state.lo.size
    return np.concatenate([join(state.hi[:trained], state.lo), bf16_to_f32(state.hi[trained:])])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_parts_together_hold_every_bit(precision: Precision, ranks: int) -> None:
    """Of a unit with several shards, the last of them frozen."""
    wide = ParamSpec("l.w", (90, 77)), ParamSpec("l.b", (3,)), ParamSpec("l.f", (70, 30), trainable=False)
    units = MODEL.units[0], UnitSpec("l", "layer", wide), MODEL.units[2]
    model, numerics, policy = ModelSpec("m", units, 8, 9).over(ranks), Numerics(precision), Policy(shard_nbytes=7000)
    stores: list[Store] = []

    def gather(own: torch.Tensor) -> torch.Tensor:
        (unit,) = {unit for unit in range(3) for store in stores if store._open == unit}
        states = [store.unit(unit) for store in stores]
        parts = [masters_of(state) for state in states]
        assert any(np.array_equal(own.numpy(), part, equal_nan=True) for part in parts)
        return torch.from_numpy(np.stack(parts))

    for rank in range(ranks):
        pool = Pool(CpuDevice(), Ledger())
        pool.provide(build_step(model, numerics, policy, Work((1,)), rank=rank).buffers.values())
        held = pool.ledger.table()
        state = sum(held.get(("host", use), 0) for use in ("weights", "optimizer state", "gradients", "norms"))
        assert state == state_nbytes(model, numerics, policy)["host"]
        owned = Ownership(rank, policy.shard_nbytes // numerics.weight_nbytes)
        stores.append(Store(model, numerics, policy, pool, owned, gather))
    values = {p.name: torch.randn(p.shape) for unit in units for p in unit.params}
    values["l.f"] = values["l.f"].to(torch.bfloat16).float()  # frozen: held as the bfloat16 that is computed with
    for store in stores:
        store.load(values)
    for name, value in values.items():
        for store in stores:
            for other in stores:
                other.unit(store.field(name)[0])
            assert torch.equal(store.master(name).view(torch.int32), value.view(torch.int32))
            assert store.view(name) is None
    stores[0].write_master("l.w", torch.full((90, 77), torch.nan))
    assert stores[0].non_finite() == ["l.w"]
    assert stores[1].non_finite() == []
