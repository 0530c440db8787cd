"""The bytes of a model's state are those of the buffers that a schedule names for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.schedule import Op, build_step, check, replay
from megatrain.schedule.ops import Access, Buffer, Use
from megatrain.schedule.passes.disk_staging import Staged
from megatrain.schedule.passes.state_buffers import StateBuffers, state_nbytes
from megatrain.spec import IN_HOST, ModelSpec, Numerics, Part, Placement, Policy, Work
from megatrain.spec.layout import layout_of
from tests.small import large_spec, small_spec

PLACES = st.sampled_from(["host", "disk"])
HOMES = st.one_of(
    st.builds(Placement, st.sampled_from(["host", "disk", "device"]), PLACES, PLACES, PLACES),
    st.just(Placement("device", "device", "device")),
)


@settings(max_examples=60 if settings.default.max_examples > 100 else 20, deadline=None)
@given(st.data())
def test_op_bytes_equal_their_buffers(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 5))
    model = small_spec(layers=layers, tied=data.draw(st.booleans()))
    numerics = Numerics(data.draw(st.sampled_from(["bf16", "fp32"])))
    policy = Policy(
        read_ahead_nbytes=data.draw(st.sampled_from([0, 100])),
        update=data.draw(st.sampled_from(["next_forward", "during_backward"])),
        disk_staging_slots=data.draw(st.integers(1, 3)),
        placements=tuple(data.draw(st.lists(HOMES, min_size=layers + 2, max_size=layers + 2))),
    )
    buffers: dict[str, Buffer] = {}
    staged: dict[str, Staged] = {}
    on_drive: dict[str, tuple[Access, ...]] = {}
    StateBuffers(model, numerics, policy, data.draw(st.sampled_from(["none", "all"])), buffers, staged, on_drive)
    found = Counter[str]()
    for buffer in buffers.values():
        found[buffer.tier] += buffer.nbytes
    assert +found == +Counter(state_nbytes(model, numerics, policy))
    for part in staged.values():
        assert buffers[part.region].nbytes == part.nbytes
        assert all(buffers[slot].nbytes >= part.nbytes for slot in part.slots)


@pytest.mark.parametrize("shape", [{}, {"weight_slots": 1}, {"read_ahead_nbytes": 1 << 26}])
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_no_host_buffer_holds_a_layers_weights_on_their_way(update: str, shape: dict[str, int]) -> None:
    """With all state on the disk, and a device with memory of its own. Ops are linear in layers."""
    counts = []
    for layers in (4, 5, 6):
        model, numerics = large_spec(layers), Numerics("bf16")
        places = (Placement("disk", "disk", "disk", "disk"),) * len(model.units)
        policy = Policy(update=update, placements=places, **shape)  # type: ignore[arg-type]
        schedule = build_step(model, numerics, policy, Work((4,)), "all" if update == "next_forward" else "none")
        check(schedule)
        least = min(layout_of(unit).size for unit in model.units) * numerics.weight_nbytes
        host = [b for b in schedule.buffers.values() if b.tier == "host" and b.part is not Part.GRADIENTS]
        assert 0 < max(buffer.nbytes for buffer in host) < least
        counts.append(len(schedule.ops))
    assert counts[2] - counts[1] == counts[1] - counts[0]


def over_files(layers: int = 5, in_host: tuple[str, ...] = ("a", "b")) -> ModelSpec:
    """Of each unit `a` trains and the others are frozen. All but `in_host` of a layer, and all of the ends, lies in
    files."""
    model = small_spec(layers=layers)
    units = (replace(u, params=tuple(replace(p, trainable=p.name[-1] == "a") for p in u.params)) for u in model.units)
    names = {p.name for u in model.units for p in u.params if not p.name.endswith(in_host)}
    return replace(model, units=tuple(units)).with_in_files(names)


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("shard_nbytes", [100, 600, 1 << 20])
def test_file_backed_weights_take_only_staging_memory(shard_nbytes: int, *, shares_memory: bool) -> None:
    """A step is proven; what is in files is read in each pass and never written; bytes are those that are foretold."""
    model, numerics = over_files(), Numerics("bf16")
    for update in ("next_forward", "during_backward"):
        policy = Policy(
            shares_memory=shares_memory,
            update=update,  # type: ignore[arg-type]
            shard_nbytes=shard_nbytes,
            placements=(Placement("file"),) * len(model.units),
        )
        schedule = build_step(model, numerics, policy, Work((4, 4)), "all" if update == "next_forward" else "none")
        check(schedule)
        assert not any(schedule.buffers[access.buffer].tier == "file" for op in schedule.ops for access in op.writes)
        kinds = Counter(op.kind for op in schedule.ops)
        assert kinds["WRITE"] == 0 < kinds["READ"]
        read = Counter[str]()
        for op in schedule.ops:
            for access in op.reads if op.kind == "READ" else ():
                read[access.buffer] += access.stop - access.start
        layer = 2 * 16 * 8  # of `c`
        assert read["file/weights/2"] == 2 * layer, "in the forward and in the backward pass"
        in_host = replace(policy, placements=())
        foretold, plain = (state_nbytes(model, numerics, each) for each in (policy, in_host))
        own = [b for b in schedule.buffers.values() if b.is_state or b.use is Use.DISK_STAGING]
        assert foretold["file"] == sum(b.nbytes for b in own if b.tier == "file")
        before = build_step(model, numerics, in_host, Work((4, 4)))
        host, host_before = (sum(b.nbytes for b in s.buffers.values() if b.tier == "host") for s in (schedule, before))
        assert host - host_before == foretold["host"] - plain["host"]


def from_files(op: Op) -> bool:
    """Whether it copies what a READ has just brought."""
    return op.kind == "FETCH" and op.reads[0].buffer.startswith("host/weight_staging")


def test_shards_from_files_are_read_while_the_shard_before_is_copied() -> None:
    """They take turns in the staging buffers, so a step takes hardly longer than its slower stream."""
    policy = Policy(shard_nbytes=32, placements=(Placement("file"),) * 8)
    schedule = build_step(over_files(6), Numerics("bf16"), policy, Work((4,)))
    timeline = replay(schedule, lambda op: 1.0 if op.kind == "READ" else 0.9 * from_files(op))
    assert timeline.busy_seconds("read") > 0.9 * timeline.seconds


def test_reloads_do_not_wait_for_the_weights_of_the_next_layer() -> None:
    """In the backward pass, a layer's four calls take longer than reading the next one, so compute does not wait."""
    placements = (IN_HOST, *(Placement("file"),) * 12, IN_HOST)
    policy = Policy(shard_nbytes=32, placements=placements, activations_by_layer=(("offload",),), offload_slots=2)
    schedule = build_step(over_files(12, in_host=("a",)), Numerics("bf16"), policy, Work((4,) * 4))
    shards = sum(op.kind == "READ" and op.unit == 6 for op in schedule.ops) // 2
    prices = {"READ": 1.0, "BACKWARD": 1.2 * shards / 4}
    timeline = replay(schedule, lambda op: prices.get(op.kind, 0.0))
    starts = [start for op, start in zip(schedule.ops, timeline.starts, strict=True) if op.kind == "BACKWARD"]
    assert timeline.busy_seconds("compute") > 0.95 * (timeline.seconds - starts[0])
