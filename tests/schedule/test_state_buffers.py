"""The bytes of a model's state are those of the buffers that a schedule names for it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.schedule.ops import Buffer
from megatrain.schedule.passes.disk_staging import Staged
from megatrain.schedule.passes.state_buffers import StateBuffers, state_nbytes
from megatrain.spec import Numerics, Placement, Policy
from tests.small import small_spec

PLACES = st.sampled_from(["host", "disk"])
HOMES = st.one_of(
    st.builds(Placement, st.sampled_from(["host", "disk", "device"]), PLACES, PLACES, PLACES),
    st.just(Placement("device", "device", "device")),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_are_those_of_the_buffers(data: st.DataObject) -> None:
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
    StateBuffers(model, numerics, policy, data.draw(st.sampled_from(["none", "all"])), buffers, staged)
    found = Counter[str]()
    for buffer in buffers.values():
        found[buffer.tier] += buffer.nbytes
    assert +found == +Counter(state_nbytes(model, numerics, policy))
    for part in staged.values():
        assert buffers[part.region].nbytes == part.nbytes
        assert all(buffers[slot].nbytes >= part.nbytes for slot in part.slots)
