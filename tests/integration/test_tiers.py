"""Where state lives changes no number: host, disk and device, moved between steps, on the cpu and on the simulator."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain import AdamW, Engine, Policy
from megatrain.device.sim import SimDevice
from megatrain.errors import CorruptRegion, DiskError, DoesNotFit
from megatrain.memory import Disk
from megatrain.plan import Question, contention, find_plan, op_seconds
from megatrain.schedule import Op, Schedule
from megatrain.schedule.passes import pieces
from megatrain.spec import Hardware, Limits, Numerics, Part, Placement, Precision, Work
from megatrain.spec.hardware import whole_sectors
from megatrain.spec.layout import layout_of
from tests import tiny
from tests.adapted import adapted
from tests.disk_faults import DiskFault, failing, failing_later
from tests.tiny import batch, equal, tiny_model, unequal_batches

UNITS = 5  # of the tiny model: prologue, three layers, epilogue
ON_DEVICE, CACHED = Placement("device", "device", "device"), Placement("device")
ON_DISK = Placement("disk", "disk", "disk", "disk")
SPLITS: dict[str, tuple[Placement, ...]] = {
    "moments": (Placement(moments="disk"),) * UNITS,
    "moments of one layer": (Placement(), Placement(moments="disk"), Placement(), Placement(), Placement()),
    "low bits": (Placement(low_bits="disk"),) * UNITS,
    "weights": (Placement(weights="disk"),) * UNITS,
    "weights of the ends": (
        Placement(weights="disk"),
        Placement(),
        Placement(),
        Placement(),
        Placement(weights="disk"),
    ),
    "gradients": (Placement(gradients="disk"),) * UNITS,
    "everything": (ON_DISK,) * UNITS,
    "all but one": (ON_DISK, Placement(), *(ON_DISK,) * 3),
    "moments and low bits": (Placement(low_bits="disk", moments="disk"),) * UNITS,
    "a different one each": (
        Placement("disk"),
        Placement(low_bits="disk"),
        Placement(moments="disk"),
        Placement(gradients="disk"),
        Placement(),
    ),
}
RESIDENT: dict[str, tuple[Placement, ...]] = {
    "weights kept": (CACHED,) * UNITS,
    "weights kept, moments on disk": (Placement("device", "host", "disk"),) * UNITS,
    "all resident": (ON_DEVICE,) * UNITS,
    "one layer resident": (Placement(), ON_DEVICE, ON_DISK, Placement(), Placement()),
    "ends resident": (ON_DEVICE, Placement(), CACHED, Placement(), ON_DEVICE),
    "the larger end resident": (Placement(), Placement(), Placement(), Placement(), ON_DEVICE),
}


def results(engine: Engine) -> dict[str, Tensor]:
    """Gradients, losses and weights after two steps, the second of which begins with what the first one wrote."""
    found = {f"gradient {name}": g for name, g in engine.gradients(unequal_batches(2)).items()}
    losses = [engine.step(unequal_batches(2)).loss for _ in range(2)]
    found["losses"] = torch.tensor([*losses, engine.evaluate(unequal_batches(2))], dtype=torch.float64)
    return found | engine.master_weights()


def made_model(family: str) -> PreTrainedModel:
    """The tiny model of the family, or of a Llama with an adapter over it."""
    return adapted() if family == "adapter" else tiny_model(family)


def engine(device: str, precision: Precision, policy: Policy, disk: Path | Disk, family: str = "llama") -> Engine:
    clip = None if policy.update == "during_backward" else 0.5
    optimizer = AdamW(lr=1e-2)
    return Engine.from_model(
        made_model(family),
        device,
        precision,
        optimizer,
        clip,
        policy,
        seed=4,
        verify=False,
        disk=disk if isinstance(disk, Disk) else [disk],
        numerics=Numerics(precision, loss_chunk_tokens=5),
    )


def run(device: str, precision: Precision, policy: Policy, disk: Path, family: str = "llama") -> dict[str, Tensor]:
    with engine(device, precision, policy, disk, family) as made:
        return results(made)


def usual(update: str, **fields: object) -> Policy:
    return Policy(update=update, shard_nbytes=3000, **fields)  # type: ignore[arg-type]


WAYS = [("bf16", "next_forward"), ("fp32", "during_backward"), ("bf16", "during_backward"), ("fp32", "next_forward")]
FAMILIES = ("llama", "llama-tied")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("precision", "update", "family", "part"),
    [
        (*WAYS[0], "llama", slice(0, None, 4)),
        (*WAYS[1], "llama-tied", slice(1, None, 4)),
        *(pytest.param(*way, family, slice(None), marks=pytest.mark.slow) for way, family in product(WAYS, FAMILIES)),
    ],
)
def test_ten_splits_between_host_and_disk_give_the_same_bits(
    precision: Precision, update: str, family: str, part: slice, tmp_path: Path
) -> None:
    """Each on both devices; in the quick suite on the cpu or the simulator, with one of the families."""
    expected = run("cpu", precision, usual(update, shares_memory=True), tmp_path, family)
    for number, placements in list(enumerate(SPLITS.values()))[part]:
        fields = {"placements": placements, "disk_staging_slots": 1 + number % 3}
        if part == slice(None) or number % 4 < 2:
            shared = usual(update, shares_memory=True, **fields)
            assert equal(run("cpu", precision, shared, tmp_path, family), expected), placements
        if part == slice(None) or number % 4 > 1:
            assert equal(run(f"sim:{number}", precision, usual(update, **fields), tmp_path, family), expected), (
                placements
            )


@pytest.mark.few(1)
@pytest.mark.parametrize(("device", "weight_slots"), [("sim:0", 2), ("sim:3", 1)])
def test_weights_on_the_disk_pass_in_shards_and_pieces(
    device: str, weight_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends have several pieces. With two slots for layers, an update brings fresh weights to the device."""
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 1)
    monkeypatch.setitem(tiny.FAMILIES, "wide", {**tiny.FAMILIES["llama"], "vocab_size": 3 * pieces.NORM_BLOCK // 32})
    expected = run("cpu", "bf16", usual("next_forward", shares_memory=True), tmp_path, "wide")
    policy = usual("next_forward", placements=SPLITS["everything"], weight_slots=weight_slots)
    with engine(device, "bf16", policy, tmp_path, "wide") as made:
        assert equal(results(made), expected)
        made.step([batch(1, 6, 0)])
        ops = made.parts.schedules.get("pending step", Work((6,))).ops
    updated = [op.shard for op in ops if op.kind == "UPDATE" and op.unit == 0]
    fetched = [op for op in ops if op.kind == "FETCH" and op.unit == 0 and op.reads[0].buffer.startswith("host/piece")]
    assert updated == [0, 1, 2]
    assert [op.shard for op in fetched] == (updated if weight_slots == 2 else [])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("precision", "update", "part"),
    [
        (*WAYS[0], slice(0, None, 4)),
        (*WAYS[1], slice(1, None, 4)),
        *(pytest.param(*way, slice(None), marks=pytest.mark.slow) for way in WAYS[:2]),
    ],
)
def test_resident_state_uses_the_same_arithmetic(
    precision: Precision, update: str, part: slice, tmp_path: Path
) -> None:
    """On the simulator, whose arithmetic is the cpu's, to the bit; the norm's sum has another order, in float64."""
    expected = run("cpu", precision, usual(update, shares_memory=True), tmp_path)
    for number, placements in list(enumerate(RESIDENT.values()))[part]:
        assert equal(run(f"sim:{number}", precision, usual(update, placements=placements), tmp_path), expected), (
            placements
        )


@pytest.mark.parametrize("moves", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_state_moves_between_tiers_while_training(moves: int, tmp_path: Path) -> None:
    """Moves between random splits, a step after each: the same losses and weights as if nothing had moved."""
    plain = usual("next_forward")
    with engine("cpu", "bf16", plain, tmp_path) as still:
        expected = [still.step(unequal_batches(2)).loss for _ in range(moves)]
        weights = still.master_weights()
    draw = random.Random(5)
    with engine("sim:3", "bf16", plain, tmp_path) as moving:
        found = []
        for _ in range(moves):
            placements = tuple(draw.choice([ON_DEVICE, CACHED, _random_home(draw)]) for _ in range(UNITS))
            moving.adopt(usual("next_forward", placements=placements, disk_staging_slots=draw.randint(1, 3)))
            found.append(moving.step(unequal_batches(2)).loss)
        assert found == expected
        assert equal(moving.master_weights(), weights)


def _random_home(draw: random.Random) -> Placement:
    tiers = ("host", "disk")
    return Placement(*(draw.choice(tiers) for _ in range(4)))  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("device", "update"),
    [
        ("cpu", "during_backward"),
        ("sim:2", "next_forward"),
        pytest.param("cpu", "next_forward", marks=pytest.mark.slow),
        pytest.param("sim:2", "during_backward", marks=pytest.mark.slow),
    ],
)
def test_frozen_bases_are_never_written_to_disk(device: str, update: str, tmp_path: Path) -> None:
    """The bits of a run in host memory; what the drive takes in a step is what trains, by the sector."""
    expected = run("cpu", "bf16", usual(update, shares_memory=True), tmp_path, "adapter")
    policy = usual(update, shares_memory=device == "cpu", placements=SPLITS["everything"])
    assert equal(run(device, "bf16", policy, tmp_path, "adapter"), expected)
    disk = Disk([tmp_path])
    with engine(device, "bf16", policy, disk, "adapter") as made:
        units = [layout.trained.size for layout in map(layout_of, made.structure.units)]
        assert units[0] == units[-1] == 0 < min(units[1:-1])
        assert made.structure.numel > 5 * made.structure.trained_numel
        made.step(unequal_batches(2))
        before = disk.written_nbytes
        made.step(unequal_batches(2))
        parts = [2, 2, 8, *([2] if update == "next_forward" else [])]  # of an element: low bits and moments too
        each = sum(whole_sectors(size * nbytes) for size in units for nbytes in parts)
        assert disk.written_nbytes - before == each


def copies(schedule: Schedule, kind: str) -> Mapping[str, int]:
    """Buffer outside -> how often the schedule moves each byte of it."""
    nbytes = Counter[str]()
    for op in schedule.ops:
        for access in (op.writes if kind == "WRITE" else op.reads) if op.kind == kind else ():
            nbytes[access.buffer] += access.stop - access.start
    assert all(moved % schedule.buffers[name].nbytes == 0 for name, moved in nbytes.items())
    return {name: moved // schedule.buffers[name].nbytes for name, moved in nbytes.items()}


@pytest.mark.parametrize("micro_batches", [1, 5])
def test_disk_state_is_moved_once_and_weights_read_at_most_twice_a_step(micro_batches: int, tmp_path: Path) -> None:
    policy = usual("next_forward", shares_memory=True, placements=SPLITS["everything"])
    with engine("cpu", "bf16", policy, tmp_path) as made:
        made.step([batch(1, 6, 0)])
        schedule = made.parts.schedules.get("pending step", Work((6,) * micro_batches))
    reads, writes = copies(schedule, "READ"), copies(schedule, "WRITE")
    assert {count for name, count in reads.items() if schedule.buffers[name].part is not Part.WEIGHTS} == {1}
    assert max(reads.values()) <= 2
    assert set(writes.values()) == {1}
    assert len(writes) == 4 * UNITS


@pytest.mark.slow
@pytest.mark.parametrize("halves", [(2, 7), range(2, 8)])
def test_more_device_memory_never_makes_an_executed_step_slower(halves: Iterable[int]) -> None:
    """Planned for each budget, and run on the simulator's clock at the planner's prices; the numbers stay the same."""
    machine = Hardware("sim", 1 << 30, 1 << 34, 2e7, 2e7, 1e11, 1e9, device_bandwidth=1e11, disk_nbytes=0)
    model = tiny_model(num_hidden_layers=6)
    with Engine.from_model(model, "sim:0", verify=False) as made:
        spec = made.parts.ported.spec
    question = Question(spec, machine, tokens_per_step=16, length=8)
    least = find_plan(replace(question, overrides={"placements": (), "weight_slots": 1, "grad_slots": 1})).nbytes[
        "device"
    ]
    seconds, losses = [], []
    for budget in (half * least // 2 for half in halves):
        plan = find_plan(replace(question, limits=Limits(device_nbytes=budget)))
        price = op_seconds(spec, plan.numerics, plan.policy, plan.work, machine)
        shared = contention(spec, plan.numerics, machine)
        device = SimDevice(
            3,
            cost=lambda task, price=price: price(task) if isinstance(task, Op) else 0.0,
            contention=replace(
                shared,
                dram_nbytes=lambda task, nbytes=shared.dram_nbytes: nbytes(task) if isinstance(task, Op) else 0.0,
            ),
        )
        limits = plan.question.limits
        batches = [batch(plan.micro_batch, 8, number) for number in range(plan.work.micro_batches)]
        with Engine.from_model(model, device, policy=plan.policy, limits=limits, verify=False) as made:
            losses.append([made.step(batches).loss for _ in range(2)])
            made.step(batches)
            assert made.diagnostics.timeline is not None
            seconds.append(made.diagnostics.timeline.seconds)
        assert seconds[-1] == pytest.approx(plan.seconds, rel=0.02)
    assert all(after <= 1.001 * before for before, after in pairwise(seconds)), seconds
    assert seconds[-1] < 0.7 * seconds[0], "memory is good for something"


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:5", marks=pytest.mark.slow)])
def test_a_third_of_the_memory_and_a_folder_give_the_same_numbers(device: str, tmp_path: Path) -> None:
    """State three times as large as the host's budget: the same losses and weights, within the budget."""
    plain = usual("during_backward", shares_memory=device == "cpu")

    def deep(limits: Limits | None = None) -> Engine:
        model, how = tiny_model(num_hidden_layers=12), AdamW(lr=1e-2)
        return Engine.from_model(model, device, "bf16", how, None, plain, verify=False, disk=[tmp_path], limits=limits)

    with deep() as made:
        assert made.policy.placements == ()
        state = 12 * made.structure.numel
        expected = results(made)
    with deep(Limits(host_nbytes=state // 3)) as made:
        table = made.diagnostics.memory_table()
        tiers = ("host", "device") if device == "cpu" else ("host",)
        assert sum(nbytes for (tier, _), nbytes in table.items() if tier in tiers) <= state // 3
        assert table["disk", "optimizer state"] > 0
        assert equal(results(made), expected)
    with pytest.raises(DoesNotFit, match=r"needs at least .* of host memory, even with state on the disk"):
        deep(Limits(host_nbytes=1000))


OTHER_WAYS = [("short", "read"), ("short", "write"), ("flip", "read")]


def _storm(seeds: range, folder: Path, family: str = "llama") -> int:
    """A disk that fails once at a random request: a typed error, and the step done again as if nothing had been."""
    placements = SPLITS["everything"]
    policy = usual("next_forward", placements=placements)
    with engine("cpu", "bf16", usual("next_forward", shares_memory=True), folder, family) as calm:
        expected = [calm.step(unequal_batches(2)).loss for _ in range(3)]
        weights = calm.master_weights()
    struck = 0
    for seed in seeds:
        draw = random.Random(seed)
        kind, on = draw.choice([("read", "read"), ("write", "write"), ("full", "write"), *OTHER_WAYS])
        part, unit = draw.choice(["weights", "low_bits", "moments", "gradients"]), draw.randrange(UNITS)
        fault = DiskFault(kind, f"disk/{part}/{unit}", on, after=draw.randint(0, 4))  # type: ignore[arg-type]
        calls, is_loaded = failing_later(fault)

        shared = replace(policy, shares_memory=True)
        device = "cpu" if seed % 2 else f"sim:{seed}"
        placed = shared if device == "cpu" else policy
        with engine(device, "bf16", placed, Disk([folder], calls=calls), family) as made:
            is_loaded.set()
            found: list[float] = []
            while len(found) < 3:
                try:
                    found.append(made.step(unequal_batches(2)).loss)
                except DiskError:
                    struck += 1
                assert made.parts.pool.leases == 0
            assert found == expected, fault
            try:
                last = made.master_weights()
            except DiskError:
                struck += 1
                last = made.master_weights()
            assert equal(last, weights), fault
    return struck


@pytest.mark.timeout(120)
def test_a_disk_that_fails_once_costs_an_error_and_no_number(tmp_path: Path) -> None:
    assert _storm(range(3), tmp_path) >= 1
    assert _storm(range(3), tmp_path, "adapter") >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_hundred_failures_of_the_disk(tmp_path: Path) -> None:
    assert _storm(range(300), tmp_path) >= 100
    assert _storm(range(100), tmp_path, "adapter") >= 25


def test_data_damaged_on_disk_is_never_used(tmp_path: Path) -> None:
    fault = DiskFault("flip", "disk/moments/2", "write", after=1)
    policy = usual("next_forward", shares_memory=True, placements=SPLITS["moments"])
    model, optimizer = tiny_model(), AdamW(lr=1e-2)
    with Engine.from_model(
        model, "cpu", "bf16", optimizer, 0.5, policy, verify=False, disk=Disk([tmp_path], calls=failing(fault))
    ) as made:
        with pytest.raises(CorruptRegion, match=r"moments of .*layers\.1"):
            for _ in range(4):
                made.step(unequal_batches(2))
        with pytest.raises(CorruptRegion):  # and it stays refused
            made.step(unequal_batches(2))


# What a review found -------------------------------------------------------------------------------------------------


def test_units_larger_than_their_staging_buffers_work(tmp_path: Path) -> None:
    """The epilogue lives on the device here, and of the ends only the smaller prologue passes through host memory."""
    placements = (ON_DISK, Placement(), Placement(), Placement(), ON_DEVICE)
    expected = run("cpu", "bf16", usual("next_forward", shares_memory=True), tmp_path)
    assert equal(run("sim:3", "bf16", usual("next_forward", placements=placements), tmp_path), expected)


def test_stale_state_is_not_taken_for_current(tmp_path: Path) -> None:
    """The disk refuses the second part that is moved there, and then gives the first one only when asked again."""
    plain = usual("next_forward", shares_memory=True)
    moved = replace(plain, placements=(Placement(moments="disk"),) * UNITS)
    faults = [DiskFault("write", "disk/moments/1", "write"), DiskFault("read", "disk/moments/0", "read")]
    with engine("cpu", "fp32", plain, tmp_path) as straight:
        expected = [straight.step(unequal_batches(2)).loss for _ in range(4)]
    disk = Disk([tmp_path], calls=failing(*faults))
    made = Engine.from_model(
        tiny_model(),
        "cpu",
        "fp32",
        AdamW(lr=1e-2),
        0.5,
        plain,
        seed=4,
        verify=False,
        disk=disk,
        numerics=Numerics("fp32", loss_chunk_tokens=5),
    )
    with made:
        losses = [made.step(unequal_batches(2)).loss for _ in range(2)]
        with pytest.raises(DiskError):
            made.adopt(moved)
        assert made.policy == plain
        losses += [made.step(unequal_batches(2)).loss for _ in range(2)]
    assert losses == expected
