"""One slot and a read-ahead buffer instead of whole slots: same bits, less memory, no read after release."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain import Engine, Policy
from megatrain.engine.resumable_call import ResumableCall
from megatrain.errors import MegaTrainError, ScheduleError
from megatrain.schedule import CALLS
from megatrain.schedule.passes import phases
from megatrain.schedule.passes.weight_slots import ONE_BUFFER
from megatrain.spec import IN_HOST, Keep, Numerics, Placement, Precision, Transfer, WaitFor
from megatrain.spec.layout import layout_of
from megatrain.testing import SimDevice
from tests.integration.test_phased_calls import (
    DRAWN,
    PHASED,
    ROWS,
    SMALL,
    a_step_fails_and_is_done_again,
    calls_under_way,
    engine,
    plainest,
    results,
)
from tests.kinds import stock_model, tiny_config
from tests.tiny import equal, unequal_batches

AHEAD = replace(PHASED, read_ahead_nbytes=4096)
KEPT: dict[str, tuple[tuple[Keep, ...], ...]] = ROWS | {"dropped": (("input",), ("drop",), ("drop",))}


@settings(max_examples=DRAWN)
@given(
    family=st.sampled_from(["llama", "llama-tied", "gpt2", "mixtral-balanced", "gemma4"]),
    precision=st.sampled_from(["bf16", "fp32"]),
    rows=st.sampled_from(sorted(KEPT)),
    wait_for=st.sampled_from(["unit", "shard"]),
    shard=st.sampled_from([SMALL, 2048, 10**9]),
    ahead=st.sampled_from([1, 700, 4096, 20_000, 10**9]),
    update=st.sampled_from(["next_forward", "during_backward"]),
    micro_batches=st.integers(1, 3),
    transfer=st.sampled_from(["pinned", "pageable"]),
    chunk=st.sampled_from([0, 4]),
    resident=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_read_ahead_changes_no_bit(
    family: str,
    precision: Precision,
    rows: str,
    wait_for: WaitFor,
    shard: int,
    ahead: int,
    update: str,
    micro_batches: int,
    transfer: Transfer,
    chunk: int,
    resident: bool,
    seed: int,
) -> None:
    """Under random policies: with dropout, router losses, token chunks, and weights that stay on the device."""
    placements = (IN_HOST, IN_HOST, Placement(weights="device"), IN_HOST, IN_HOST) if resident else ()
    policy = Policy(
        shard_nbytes=shard,
        read_ahead_nbytes=ahead,
        wait_for=wait_for,
        activations_by_layer=KEPT[rows],
        update=update,  # type: ignore[arg-type]
        transfer=transfer,
        placements=placements,
    )
    expected = plainest(precision, update, family, micro_batches, chunk)
    numerics = Numerics(precision, loss_chunk_tokens=5, mlp_chunk_tokens=chunk)
    for device in (f"sim:{seed}", "cpu"):
        with engine(device, policy, family, numerics=numerics) as made:
            assert equal(results(made, micro_batches), expected), device
    assert not calls_under_way()


@pytest.mark.few(1)
@pytest.mark.parametrize("frozen", [("*layers.0*", "*norm*"), ("*q_proj*", "*layers.1.*")])
def test_frozen_shards_stay_until_the_end_of_a_call(frozen: tuple[str, ...]) -> None:
    batches = unequal_batches(2)
    found = []
    for device, policy in (("cpu", Policy(shares_memory=True)), ("sim:3", AHEAD)):
        with engine(device, policy, "llama", frozen) as made:
            losses = [made.step(batches).loss for _ in range(2)]
            found.append((losses, made.master_weights()))
    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])


def test_one_slot_and_the_read_ahead_hold_one_unit_and_the_first_shards() -> None:
    with engine("sim:2", AHEAD, "llama") as made:
        made.step(unequal_batches(2))
        spec, held = made.structure, made.diagnostics.memory_table()
    ahead = held["device", "read-ahead"]
    assert held["device", "weight slots"] == 4 * max(layout_of(unit).size for unit in spec.units)
    assert 0.5 * AHEAD.read_ahead_nbytes < ahead <= AHEAD.read_ahead_nbytes


def test_shards_are_fetched_into_places_freed_by_the_running_backward() -> None:
    """On a device that computes only when nothing else can run."""
    device = SimDevice(temperament="starve")
    device._starved = "compute"
    with engine(device, replace(AHEAD, activations_by_layer=(("input",),)), "llama") as made:
        made.gradients(unequal_batches(2))
    turns = [i for i, name in enumerate(device.order) if name.startswith("BACKWARD u2 m1")]
    came = [name for name in device.order[turns[0] : turns[-1]] if name.startswith("FETCH u1")]
    assert len(came) >= 4, came


def test_a_ring_place_is_filled_by_one_shard() -> None:
    shards = SimDevice(6, cost=lambda task: float(task.name.startswith("FETCH")))
    with engine(shards, replace(AHEAD, shard_nbytes=1000), "llama") as made:
        made.gradients(unequal_batches(1))
        timeline = made.parts.streamer.timeline
    assert timeline is not None
    begun = {op.name: start for op, start in zip(timeline.schedule.ops, timeline.starts, strict=True)}
    assert begun["FORWARD u0 m0 s0"] == 1.0
    shard = next(i for i, op in enumerate(timeline.schedule.ops) if op.name == "FETCH u1 s0")
    assert begun["FORWARD u1 m0 s0"] <= timeline.ends[shard] + 1


@pytest.mark.parametrize("rows", ["graphs", "inputs"])
def test_weights_read_without_waiting_are_detected(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResumableCall, "before_reads", lambda self, ranges: None)
    with (
        engine("sim:1", replace(AHEAD, activations_by_layer=ROWS[rows]), "llama") as made,
        pytest.raises(MegaTrainError, match="nan"),
    ):
        made.step(unequal_batches(1))


@pytest.mark.parametrize("device", ["sim:1", "cpu"])
def test_reads_after_release_name_the_weight(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the schedule released weights before a forward had finished with them: all shards but the last."""
    honest = phases._windows

    def released(*call: Any, **how: Any) -> list[phases.Window]:
        windows = honest(*call, **how)
        if call[0].kind == "layer" and call[1].kind == "FORWARD" and len(windows) > 1:
            windows[-1] = [(windows[-2][0][1], windows[-1][0][1])]
        return windows

    monkeypatch.setattr(phases, "_windows", released)
    with engine(device, AHEAD, "llama") as made:
        with pytest.raises(ScheduleError, match=r"proj\.weight is read again .*read_ahead_nbytes=0"):
            made.step(unequal_batches(2))
        assert not calls_under_way()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "at",
    [
        "PLACE u2 s0",
        "BACKWARD u2 m1 s2",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("FETCH u2 s3", "FORWARD u1 m1 s3")),
    ],
)
def test_a_failure_is_raised_and_leaves_nothing_behind(at: str) -> None:
    a_step_fails_and_is_done_again(AHEAD, at)


def test_an_engine_switches_to_a_ring_and_back_between_steps() -> None:
    batches = unequal_batches(2)
    with engine("cpu", replace(PHASED, wait_for="shard"), "llama") as made:
        expected = [made.step(batches).loss for _ in range(4)]
    with engine("sim:4", PHASED, "llama") as made:
        losses = []
        for ahead in (0, 4096, 1000, 0):
            made.adopt(replace(made.policy, read_ahead_nbytes=ahead))
            losses.append(made.step(batches).loss)
            assert (ONE_BUFFER in made.parts.store.pool.buffers) == (ahead > 0)
    assert losses == expected


def test_an_engine_switches_gates_on_and_off_between_steps() -> None:
    batches = unequal_batches(2)
    with engine("cpu", replace(PHASED, wait_for="unit"), "llama") as made:
        expected = [made.step(batches).loss for _ in range(4)]
    with engine("sim:4", replace(PHASED, wait_for="unit"), "llama") as made:
        losses = []
        for wait_for in ("unit", "shard", "unit", "shard"):
            made.adopt(replace(made.policy, wait_for=wait_for))
            losses.append(made.step(batches).loss)
    assert losses == expected


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("wait_for", "rows"),
    [
        ("unit", "graphs"),
        ("shard", "inputs"),
        pytest.param("unit", "inputs", marks=pytest.mark.slow),
        pytest.param("shard", "graphs", marks=pytest.mark.slow),
    ],
)
def test_a_tied_head_reloads_the_embedding_beside_its_weights(rows: str, wait_for: WaitFor) -> None:
    """All of them in one buffer: an op that reads one does not wait for the other."""
    batches, kept = unequal_batches(2), ROWS[rows]
    with engine("cpu", Policy(shares_memory=True), "llama-tied") as made:
        expected = [made.step(batches).loss for _ in range(3)], made.master_weights()
    with engine(
        "sim:7", replace(AHEAD, wait_for=wait_for, shard_nbytes=2000, activations_by_layer=kept), "llama-tied"
    ) as made:
        found = [made.step(batches).loss for _ in range(3)], made.master_weights()
        fetched = [op.unit for op in next(iter(made.parts.schedules.known.values())).ops if op.kind == "FETCH"]
    assert found[0] == expected[0]
    assert equal(found[1], expected[1])
    assert fetched.count(0) == 3 * len(layout_of(made.structure.units[0]).shards(2000 // 4))


def test_a_layer_that_waits_for_shards_is_still_one_call() -> None:
    with engine("sim:4", AHEAD, "llama") as made:
        made.step(unequal_batches(1))
        ops = next(iter(made.parts.schedules.known.values())).ops
    kinds = [op.kind for op in ops if op.stream == "compute"]
    assert any(kinds[i] == "PLACE" and {kinds[i - 1], kinds[i + 1]} <= set(CALLS) for i in range(1, len(kinds) - 1))


def test_what_an_autograd_function_in_python_saves_is_not_read() -> None:
    """BLOOM's activation is such a function (as is PhiMoE's router), and function modes see what it saves."""
    model = stock_model(tiny_config("bloom"), 0)
    numerics, found = Numerics("fp32", loss_chunk_tokens=5), []
    for device, policy in (("cpu", Policy(shares_memory=True)), ("sim:3", replace(AHEAD, activations="keep"))):
        with Engine.from_model(model, device, numerics=numerics, policy=policy, verify=False) as made:
            found.append(made.gradients(unequal_batches(2)))
    assert equal(*found)
