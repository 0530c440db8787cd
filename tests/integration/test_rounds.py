"""A step split into rounds gives the same bits as an unsplit one, and holds one round's activations at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.shapes import llama_shape
from megatrain import AdamW, Engine, Policy
from megatrain.errors import PlanError
from megatrain.plan import Choice, Question, estimate, examine, machine
from megatrain.plan.placement import resident_placements
from megatrain.schedule import Schedule, Use, build_step, check
from megatrain.spec import IN_HOST, Limits, Numerics, Placement, Precision, Transfer, WaitFor, Work
from megatrain.spec.layout import layout_of
from tests.integration.test_phased_calls import SMALL, engine, plainest, results
from tests.integration.test_read_ahead import KEPT
from tests.small import small_spec
from tests.tiny import batch, equal, tiny_model

ON_DEVICE, ON_DISK = Placement("device", "device", "device"), Placement("disk", "disk", "disk", "disk")


@settings(max_examples=max(1, settings.default.max_examples // 8))
@given(
    family=st.sampled_from(["llama", "mixtral-balanced", "gemma4"]),
    precision=st.sampled_from(["bf16", "fp32"]),
    rows=st.sampled_from(sorted(KEPT)),
    wait_for=st.sampled_from(["unit", "shard"]),
    shard=st.sampled_from([SMALL, 2048, 10**9]),
    ahead=st.sampled_from([0, 700, 4096]),
    grad_slots=st.integers(1, 3),
    update=st.sampled_from(["next_forward", "during_backward"]),
    transfer=st.sampled_from(["pinned", "pageable"]),
    resident=st.sampled_from([IN_HOST, Placement("device"), ON_DEVICE]),
    in_round=st.integers(1, 2),
    seed=st.integers(0, 10**6),
)
def test_rounds_change_no_bit(
    family: str,
    precision: Precision,
    rows: str,
    wait_for: WaitFor,
    shard: int,
    ahead: int,
    grad_slots: int,
    update: str,
    transfer: Transfer,
    resident: Placement,
    in_round: int,
    seed: int,
) -> None:
    layers = tiny_model(family).config.num_hidden_layers
    policy = Policy(
        shard_nbytes=shard,
        read_ahead_nbytes=ahead,
        grad_slots=grad_slots,
        wait_for=wait_for,
        activations_by_layer=KEPT[rows],
        update=update,  # type: ignore[arg-type]
        transfer=transfer,
        placements=(IN_HOST, IN_HOST, resident, *[IN_HOST] * (layers - 1)) if resident != IN_HOST else (),
        micro_batches_per_round=in_round,
    )
    numerics = Numerics(precision, loss_chunk_tokens=5)
    with engine(f"sim:{seed}", policy, family, numerics=numerics) as made:
        assert equal(results(made, 3), plainest(precision, update, family, 3))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("device", "precision", "in_round"),
    [
        ("cpu", "bf16", 1),
        ("cpu", "fp32", 2),
        ("sim:3", "bf16", 2),
        pytest.param("cpu", "bf16", 2, marks=pytest.mark.slow),
        pytest.param("cpu", "fp32", 1, marks=pytest.mark.slow),
        pytest.param("sim:3", "bf16", 1, marks=pytest.mark.slow),
    ],
)
def test_rounds_change_no_bit_with_state_on_disk(
    device: str, precision: Precision, in_round: int, tmp_path: Path
) -> None:
    batches = [batch(1, 6 + number, number) for number in range(5)]
    found = []
    for number, size in enumerate((0, in_round)):
        policy = Policy(placements=(ON_DISK,) * 5, micro_batches_per_round=size, shares_memory=device == "cpu")
        folder = tmp_path / str(number)
        folder.mkdir()
        with Engine.from_model(
            tiny_model(), device, precision, AdamW(lr=1e-2), 0.5, policy, seed=3, verify=False, disk=[folder]
        ) as made:
            losses = [made.step(batches).loss for _ in range(2)]
            found.append((losses, made.master_weights()))
    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])


def use_nbytes(schedule: Schedule, use: Use) -> int:
    """The most bytes for one use at one time."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, op in enumerate(schedule.ops):
        for access in (*op.reads, *op.writes):
            if schedule.buffers[access.buffer].use is use:
                first.setdefault(access.buffer, index)
                last[access.buffer] = index
    return max(
        sum(schedule.buffers[name].nbytes for name in first if first[name] <= index <= last[name])
        for index in range(len(schedule.ops))
    )


def test_rounds_hold_one_rounds_activations_and_float32_host_sums() -> None:
    of, work = small_spec(6), Work((8,) * 6)
    plain, rounds = (
        build_step(of, Numerics(), Policy(activations="keep", micro_batches_per_round=size), work) for size in (0, 2)
    )
    kept = [sum(use_nbytes(each, use) for use in (Use.GRAPHS, Use.INPUTS)) for each in (plain, rounds)]
    assert kept[1] < 0.4 * kept[0]
    assert use_nbytes(rounds, Use.BACKWARD_WORKSPACE) == use_nbytes(plain, Use.BACKWARD_WORKSPACE)
    trained = sum(layout_of(unit).trained.size for unit in of.units)
    sums = sum(buffer.nbytes for buffer in rounds.buffers.values() if buffer.use is Use.PARTIAL_GRADIENTS)
    assert sums == rounds.arena_nbytes("host") - plain.arena_nbytes("host") == 4 * trained
    each = {kind: sum(op.nbytes for op in rounds.ops if op.kind == kind) for kind in ("FETCH", "RELOAD", "GRAD")}
    assert each["FETCH"] > 2 * sum(op.nbytes for op in plain.ops if op.kind == "FETCH")
    assert each["RELOAD"] == 2 * 4 * trained
    assert each["GRAD"] == 2 * 4 * trained + 2 * trained


def test_a_tied_head_has_no_rounds() -> None:
    for work in (Work((4, 4)), Work((4,))):  # a policy is refused before the first step, whatever that brings
        with pytest.raises(PlanError, match=r"policy.micro_batches_per_round: a tied head .*; use 0"):
            build_step(small_spec(2, tied=True), Numerics(), Policy(micro_batches_per_round=1), work)


def test_host_memory_holds_offloaded_inputs_of_one_round() -> None:
    of, away = small_spec(6), Policy(activations_by_layer=(("offload",),))
    nbytes = []
    for policy in (away, replace(away, micro_batches_per_round=2)):
        schedule = build_step(of, Numerics(), policy, Work((8,) * 6))
        check(schedule)
        table = [each for each in schedule.buffers.values() if each.use is Use.OFFLOADED_INPUTS]
        nbytes.append(sum(each.nbytes for each in table))
    assert nbytes[1] <= nbytes[0] / 2.5


@pytest.mark.parametrize("in_round", [1, 2, 3])
def test_host_budgets_include_sums_between_rounds(in_round: int, tmp_path: Path) -> None:
    policy, limits = Policy(micro_batches_per_round=in_round), Limits(host_nbytes=520_000)
    with Engine.from_model(tiny_model(), "sim:1", "bf16", policy=policy, disk=[tmp_path], limits=limits) as made:
        made.step([batch(1, 6, number) for number in range(4)])
        held = sum(nbytes for (tier, _), nbytes in made.diagnostics.memory_table().items() if tier == "host")
    assert held <= 520_000


def test_rounds_are_estimated_with_some_layers_on_the_device() -> None:
    question = Question(llama_shape("small", 24, 1024, vocabulary=8000), machine("h200"), 16 * 1024, 1024)
    for whole, kept in ((8, 0), (4, 4)):
        policy = Policy(micro_batches_per_round=1, placements=resident_placements(question.model, whole, kept))
        choice = Choice(Numerics(), policy)
        guessed, found = estimate(question, choice, 2), examine(question, choice, 2)
        for tier in ("device", "host"):
            assert guessed.nbytes[tier] == pytest.approx(found.nbytes[tier], rel=0.02)


@pytest.mark.parametrize(("sequences", "micro_batch", "in_round"), [(13, 4, 1), (16, 1, 5)])
def test_uneven_rounds_are_not_underestimated(sequences: int, micro_batch: int, in_round: int) -> None:
    question = Question(llama_shape("small", 12, 1024, vocabulary=8000), machine("h100"), sequences * 1024, 1024)
    choice = Choice(Numerics(), Policy(micro_batches_per_round=in_round))
    guessed, found = estimate(question, choice, micro_batch), examine(question, choice, micro_batch)
    assert 0.98 * found.seconds < guessed.seconds < 1.3 * found.seconds
