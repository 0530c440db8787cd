"""The simulated device is worse than a GPU: it finds every missing wait, and every failure ends well."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.device import Errand
from megatrain.device.base import Task
from megatrain.errors import (
    BrokenPromise,
    Deadlock,
    DeviceError,
    MegaTrainError,
    NonFinite,
    OutOfDeviceMemory,
    RaceDetected,
    StreamFailed,
)
from megatrain.plan import contention, op_seconds
from megatrain.schedule import Access, Schedule, build_flush, build_forward, build_step, replay
from megatrain.schedule.contents import USED
from megatrain.spec import Hardware, Numerics, Work
from megatrain.spec.contention import Contention
from megatrain.spec.layout import layout_of
from megatrain.testing import (
    KINDS,
    TEMPERAMENTS,
    Fault,
    SimDevice,
    executed_timeline,
    random_fault,
    run_idle,
    surviving_waits,
    without_each_wait,
)
from tests.small import small_spec
from tests.tiny import equal, tiny_model, unequal_batches

FIVE = [
    (Policy(shard_nbytes=300), "none", False),
    (Policy(shard_nbytes=300), "all", True),
    (Policy(weight_slots=1, grad_slots=1, activations="keep"), "all", False),
    (Policy(weight_slots=3, grad_slots=3, update="during_backward"), "none", True),
    (Policy(update="during_backward", shares_memory=True), "none", False),
]


def varied_schedule(seed: int) -> Schedule:
    """A schedule of a policy that the seed draws."""
    draw = random.Random(seed)
    policy = Policy(
        weight_slots=draw.randint(1, 4),
        grad_slots=draw.randint(1, 4),
        shard_nbytes=draw.choice([1, 200, 1 << 20]),
        activations=draw.choice(["keep", "recompute"]),
        update=draw.choice(["next_forward", "during_backward"]),
        shares_memory=draw.random() < 0.2,
    )
    if not policy.shares_memory:
        policy = replace(policy, streamed_updates=draw.choice([0.0, 0.5, 1.0]))
    of, work = small_spec(draw.randint(1, 5), tied=draw.random() < 0.5), Work((4,) * draw.randint(1, 3))
    if draw.random() < 0.1:
        return build_forward(of, Numerics(), policy, work)
    if policy.update == "next_forward" and draw.random() < 0.1:
        return build_flush(of, Numerics(), policy)
    pending = policy.update == "next_forward" and draw.random() < 0.5
    return build_step(of, Numerics(), policy, work, "all" if pending else "none")


# Races ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(len(FIVE)))
def test_removing_any_single_wait_is_detected(case: int) -> None:
    """The kill rate over all waits of five policies is 100%."""
    policy, pending, tied = FIVE[case]
    schedule = build_step(small_spec(tied=tied), Numerics(), policy, Work((4, 4)), pending)  # type: ignore[arg-type]
    assert sum(map(len, schedule.waits)) >= 5
    assert surviving_waits(schedule, range(1)) == []


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 5300), marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_five_thousand_seeds_over_varied_policies_have_no_race(seeds: range) -> None:
    for seed in seeds:
        run_idle(varied_schedule(seed), SimDevice(seed))


def test_race_reports_name_ops_bytes_parameter_and_missing_wait() -> None:
    policy = Policy(shard_nbytes=1 << 20)
    with Engine.from_model(tiny_model(), "sim:0", policy=policy) as engine:
        engine.step(unequal_batches())
        key = ("step", 2, False, engine.policy)
        whole = engine.parts.schedules.known[key]
        ops = whole.ops
        fetch = max(i for i, op in enumerate(ops) if op.name == "FETCH u1 s0")
        index = next(i for i, waits in enumerate(whole.waits) if fetch in waits)
        waits = [tuple(w for w in each if w != fetch) if i == index else each for i, each in enumerate(whole.waits)]
        engine.parts.schedules.known[key] = replace(whole, waits=tuple(waits))
        engine.weights.flush()
        with pytest.raises(RaceDetected) as caught:
            engine.step(unequal_batches())
    said = str(caught.value)
    assert "unit model.layers.0, model.layers.0.input_layernorm.weight" in said
    assert "FETCH u1 s0 on stream fetch" in said
    assert f"{ops[index].name} on stream compute" in said
    assert "bytes [0:" in said
    assert f"op {index} ({ops[index].name}) must wait for op {fetch} (FETCH u1 s0)" in said


def test_races_are_found_even_with_correct_values() -> None:
    device = SimDevice(0)
    span = Access("host/x", 0, 8, USED)
    device.stream("host").submit(Errand("write", writes=[span]), lambda: None)
    device.stream("host").submit(Errand("then"), lambda: None).wait()
    device.stream("compute").submit(Errand("read", reads=[span]), lambda: None)
    device.synchronize()  # ordered: the foreground had waited for it
    device.stream("host").submit(Errand("write", writes=[span]), lambda: None)
    device.stream("compute").submit(Errand("read", reads=[span]), lambda: None)
    with pytest.raises(RaceDetected, match="nothing orders them"):
        device.synchronize()


def test_disjoint_and_read_only_accesses_do_not_race() -> None:
    device = SimDevice(0)
    for stream, start in (("host", 0), ("compute", 8)):
        mine, shared = Access("host/x", start, start + 8, USED), Access("host/y", 0, 8, USED)
        device.stream(stream).submit(Errand(stream, reads=[shared], writes=[mine]), lambda: None)
    device.synchronize()


def test_a_missing_wait_also_gives_a_wrong_number_on_some_seed() -> None:
    """The detector is not the only net: poison and order show it in the values."""
    expected = _weights_after(SimDevice(0), lambda schedule: schedule)
    wrong = 0
    for seed in range(6):

        def without_fetch_waits(schedule: Schedule) -> Schedule:
            waits = tuple(
                tuple(w for w in each if schedule.ops[w].kind != "FETCH") if op.kind == "FORWARD" else each
                for op, each in zip(schedule.ops, schedule.waits, strict=True)
            )
            return replace(schedule, waits=waits)

        device = SimDevice(seed)
        device._races.watch = lambda *_: None  # type: ignore[method-assign]
        try:
            wrong += not equal(_weights_after(device, without_fetch_waits), expected)
        except (NonFinite, StreamFailed):
            wrong += 1
    assert wrong >= 3


def _weights_after(device: SimDevice, change: object) -> dict[str, Tensor]:
    with Engine.from_model(tiny_model(), device, policy=Policy(shard_nbytes=2000)) as engine:
        engine.parts.prepare(Work((20, 18)))
        engine.parts.schedules.known = {key: change(schedule) for key, schedule in engine.parts.schedules.known.items()}  # type: ignore[operator]
        engine.step(unequal_batches())
        return engine.master_weights()


def test_the_hostile_device_covers_all_behaviours_reproducibly() -> None:
    assert {SimDevice(seed).temperament for seed in range(8)} == set(TEMPERAMENTS)
    schedule = varied_schedule(2)
    for seed in range(8):
        first, second = SimDevice(seed), SimDevice(seed)
        run_idle(schedule, first)
        run_idle(schedule, second)
        assert first.order == second.order


def test_late_copies_come_last_and_eager_overwrites_come_early() -> None:
    schedule = build_step(small_spec(6), Numerics(), Policy(weight_slots=3), Work((4,)), "all")
    late, eager = SimDevice(0, temperament="late"), SimDevice(0, temperament="eager")
    run_idle(schedule, late)
    run_idle(schedule, eager)
    assert late.order.index("FETCH u1 s0") > late.order.index("UPDATE u7")
    assert eager.order.index("FETCH u1 s0") < eager.order.index("UPDATE u7")


# Memory ---------------------------------------------------------------------------------------------------------------


def test_undeclared_accesses_are_caught() -> None:
    device = SimDevice(0)
    memory = {"device/a": device.allocate(8, "x"), "device/b": device.allocate(8, "x")}
    span = Access("device/a", 0, 4, USED)
    with device.lend(Errand("init", writes=[span]), memory) as held:
        held["device/a"][:4] = 1
    with device.lend(Errand("look", reads=[span]), memory) as held:
        assert held["device/a"].tolist() == [1, 1, 1, 1, 255, 255, 255, 255], "undeclared bytes read as NaN"
        assert set(held) == {"device/a"}
    wrong, careless = Errand("w", reads=[span]), Errand("r", reads=[span])
    with pytest.raises(BrokenPromise, match="does not declare"), device.lend(wrong, memory) as held:
        held["device/a"][5] = 1
    with pytest.raises(BrokenPromise, match="only to read"), device.lend(careless, memory) as held:
        held["device/a"][0] = 7
    assert (memory["device/a"] == 255).all(), "the host sees NaN where the device holds numbers"
    with device.lend(Errand("look", reads=[span]), memory) as held:
        assert held["device/a"][:4].tolist() == [1, 1, 1, 1], "and the device still holds them"


def test_freed_memory_is_poisoned_and_reused() -> None:
    device = SimDevice(0, capacity=8)
    memory = device.allocate(8, "x")
    memory[:] = 1
    device.free(memory, "x")
    assert memory.view(torch.float32).isnan().all()
    device.allocate(8, "y")
    with pytest.raises(OutOfDeviceMemory, match="it holds"):
        device.allocate(1, "z")


def test_the_host_cannot_read_device_memory() -> None:
    with Engine.from_model(tiny_model(), "sim:0") as engine, pytest.raises(DeviceError, match="through a lease"):
        engine.parts.pool.memory("device/weight_slots/layer0")


# Failures -------------------------------------------------------------------------------------------------------------

EXPECTED = {
    "raise": StreamFailed,
    "copy": StreamFailed,
    "read": StreamFailed,
    "short": StreamFailed,
    "memory": OutOfDeviceMemory,
    "hang": Deadlock,
}


def clip_of(update: str) -> float | None:
    return 0.5 if update == "next_forward" else None


def fresh(device: SimDevice, update: str) -> Engine:
    policy = Policy(shard_nbytes=4000, update=update)  # type: ignore[arg-type]
    return Engine.from_model(tiny_model(), device, "bf16", AdamW(lr=1e-2), clip_of(update), policy)


@cache
def calm_steps(update: str) -> tuple[Schedule, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The schedule of a step, and the weights after one, two and three that nothing disturbs."""
    batches = unequal_batches()
    with fresh(SimDevice(0), update) as calm:
        calm.step(batches)
        after_one = calm.master_weights()
    with fresh(SimDevice(0), update) as calm:
        calm.step(batches)
        calm.step(batches)
        after_two = calm.master_weights()
        calm.step(batches)
        kind = "step" if clip_of(update) is None else "pending step"
        return calm.parts.schedules.known[kind, 2, False, calm.policy], after_one, after_two, calm.master_weights()


def _fail_somewhere(kind: str, seeds: range, update: str) -> None:
    """After any failure: the right error, no lease out, each unit whole, and a next step that works or refuses."""
    clip, batches = clip_of(update), unequal_batches()
    schedule, after_one, after_two, after_three = calm_steps(update)
    for seed in seeds:
        device = SimDevice(seed)
        with fresh(device, update) as engine:
            engine.step(batches)
            fault = random_fault(schedule, kind, seed)  # type: ignore[arg-type]
            device.faults.append(fault)
            with pytest.raises(MegaTrainError) as caught:
                engine.step(batches)
            assert isinstance(caught.value, EXPECTED[kind]), f"seed {seed}: {caught.value!r}"
            assert str(fault.at) in str(caught.value)
            assert "\n" not in str(caught.value)
            assert engine.parts.pool.leases == 0
            assert not device.faults
            counts = engine.diagnostics.applied_updates()
            assert set(counts.values()) <= {0, 1, 2}
            if clip is not None:
                assert equal(engine.master_weights(), after_one), f"seed {seed}"
                engine.step(batches)
                assert equal(engine.master_weights(), after_two), f"seed {seed}: as if nothing was"
                continue
            for unit, spec in enumerate(engine.structure.units):
                expected = after_one if counts[spec.name] == 1 else after_two
                for param in spec.params:
                    assert torch.equal(engine.parts.store.master(param.name), expected[param.name]), (
                        f"unit {unit} is torn"
                    )
            if len(set(counts.values())) > 1:
                for refused in (engine.step, engine.evaluate, engine.gradients):
                    with pytest.raises(NonFinite, match="has updated only these units"):
                        refused(batches)
                continue
            engine.step(batches)
            expected = after_two if set(counts.values()) == {1} else after_three
            assert equal(engine.master_weights(), expected), f"seed {seed}: a whole step counts, none does not"


@pytest.mark.few(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("update", ["next_forward", pytest.param("during_backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_failure_is_a_typed_error_and_leaves_valid_state(kind: str, update: str) -> None:
    _fail_somewhere(kind, range(2), update)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_failure_at_a_hundred_random_ops(kind: str, update: str) -> None:
    _fail_somewhere(kind, range(100, 200), update)


def _interrupted_once(synchronize: Callable[[], None]) -> Callable[[], None]:
    interrupts = iter([KeyboardInterrupt])

    def waiting() -> None:
        synchronize()
        for interrupt in interrupts:
            raise interrupt

    return waiting


def test_a_fully_applied_step_counts_even_if_its_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clipping: everything is updated, and then the user's interrupt comes while the streams are waited for."""

    def run(*, interrupted: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
        device = SimDevice(4)
        with Engine.from_model(tiny_model(), device, optimizer=AdamW(lr=1e-2), max_grad_norm=None) as engine:
            engine.step(unequal_batches())
            if interrupted:
                with monkeypatch.context() as patch:
                    patch.setattr(device, "synchronize", _interrupted_once(device.synchronize))
                    with pytest.raises(KeyboardInterrupt):
                        engine.step(unequal_batches())
            else:
                engine.step(unequal_batches())
            engine.step(unequal_batches())
            return engine.master_weights(), engine.diagnostics.applied_updates()

    (weights, counts), (expected, _) = run(interrupted=True), run(interrupted=False)
    assert set(counts.values()) == {3}
    assert equal(weights, expected)


def test_torn_state_is_not_exported(tmp_path: Path) -> None:
    device = SimDevice(4)
    with Engine.from_model(tiny_model(), device, max_grad_norm=None) as engine:
        device.faults.append(Fault("raise", "UPDATE u2"))
        with pytest.raises(StreamFailed):
            engine.step(unequal_batches())
        assert len(set(engine.diagnostics.applied_updates().values())) == 2
        with pytest.raises(NonFinite, match="has updated only these units"):
            engine.save_pretrained(tmp_path / "model")
        assert engine.master_weights()
    assert not (tmp_path / "model").exists()


def test_a_closed_engine_frees_its_memory_on_a_shared_device() -> None:
    device = SimDevice(0)
    for _ in range(3):
        with Engine.from_model(tiny_model(), device) as engine:
            engine.step(unequal_batches())
            assert sum(device._owners.values()) > 0
        assert sum(device._owners.values()) == 0


def test_of_two_failures_the_first_is_raised() -> None:
    device = SimDevice(0)

    def broken(name: str) -> None:
        raise ValueError(name)

    first = device.stream("grad").submit(Errand("g"), lambda: broken("one"))
    with pytest.raises(StreamFailed, match="one"):
        first.wait()
    device.stream("host").submit(Errand("h"), lambda: broken("two"))
    with pytest.raises(StreamFailed, match="one") as caught:
        device.synchronize()
    assert any("two" in note for note in caught.value.__notes__)
    device.synchronize()


def test_a_failure_takes_precedence_over_the_hang_it_causes() -> None:
    device = SimDevice(0, faults=[Fault("hang", "b")])

    def broken() -> None:
        raise ValueError("the cause")

    first = device.stream("host").submit(Errand("a"), broken)
    device.stream("compute").submit(Errand("b"), lambda: None, [first])
    with pytest.raises(StreamFailed, match="the cause"):
        device.synchronize()


def test_host_memory_accesses_are_checked() -> None:
    device = SimDevice(0)
    memory = {"host/a": device.host.allocate(8, "x"), "host/b": device.host.allocate(8, "x")}
    span = Access("host/a", 0, 4, USED)
    task = Errand("GRAD u1", writes=[span])
    with device.lend(task, memory) as held:
        held["host/a"][:4] = 3
    with pytest.raises(BrokenPromise, match="outside what it declares"), device.lend(task, memory) as held:
        held["host/a"][4] = 3


def test_an_undeclared_access_does_not_affect_the_next_op() -> None:
    device = SimDevice(0)
    memory = {"device/a": device.allocate(8, "x"), "device/b": device.allocate(8, "x")}
    spans = [Access("device/a", 0, 8, USED), Access("device/b", 0, 8, USED)]
    with device.lend(Errand("init", writes=spans), memory) as held:
        held["device/a"].zero_()
        held["device/b"].zero_()
    with pytest.raises(BrokenPromise), device.lend(Errand("r", reads=spans), memory) as held:
        held["device/a"][0] = 7
    with device.lend(Errand("next", reads=spans[1:]), memory) as held:
        assert not held["device/b"].any()


def test_deadlock_reports_show_who_waits_for_whom() -> None:
    device = SimDevice(1, faults=[Fault("hang", "FETCH u2 s0")])
    with pytest.raises(Deadlock, match=r"FETCH u2 s0 on stream fetch never ends") as caught:
        run_idle(build_step(small_spec(), Numerics(), Policy(), Work((4,))), device)
    assert "on stream compute waits for FETCH u2 s0" in str(caught.value)
    run_idle(build_step(small_spec(), Numerics(), Policy(), Work((4,))), device)


# Time -----------------------------------------------------------------------------------------------------------------

MACHINES = [
    Hardware("balanced", 1 << 40, 1 << 40, 1e6, 1e6, 1e8, 1e7),
    Hardware("slow bus", 1 << 40, 1 << 40, 1e4, 2e4, 1e8, 1e7),
    Hardware("slow host", 1 << 40, 1 << 40, 1e6, 1e6, 1e8, 1e5),
    replace(
        Hardware("all is shared", 1 << 40, 1 << 40, 1e5, 1e5, 1e8, 3e5),
        host_dram_bandwidth=2e5,
        duplex_grad_bandwidth=6e4,
    ),
]


@pytest.mark.parametrize("hardware", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("case", range(len(FIVE)))
def test_the_executed_timeline_equals_the_replay(case: int, hardware: Hardware) -> None:
    policy, pending, tied = FIVE[case]
    work = Work((40, 24))
    schedule = build_step(small_spec(tied=tied), Numerics(), policy, work, pending)  # type: ignore[arg-type]
    price = op_seconds(small_spec(tied=tied), Numerics(), policy, work, hardware)
    shared = contention(small_spec(tied=tied), Numerics(), hardware)
    predicted = replay(schedule, price, shared)
    assert 0 < predicted.stall_seconds() < predicted.seconds
    assert hardware.host_dram_bandwidth is None or predicted.seconds > 1.01 * replay(schedule, price).seconds
    for seed in range(4):
        executed = executed_timeline(schedule, price, seed, shared)
        assert executed.seconds == pytest.approx(predicted.seconds, rel=0.01)
        assert executed.stall_seconds() == pytest.approx(predicted.stall_seconds(), rel=0.01)
        assert executed.starts == pytest.approx(predicted.starts, rel=0.01, abs=1e-9)


SHARDS = Policy(wait_for="shard", shard_nbytes=2000)
WAYS = {
    "clipping": (Policy(), 1.0),
    "not clipping": (Policy(update="during_backward"), None),
    "by shard": (SHARDS, 1.0),
    "gates and graphs": (replace(SHARDS, activations="keep", weight_slots=1), 1.0),
    "read-ahead": (replace(SHARDS, read_ahead_nbytes=4000, update="during_backward"), None),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_step_takes_the_predicted_time_on_the_virtual_clock(way: str) -> None:
    """With real work and the schedule that the engine really ran, a step after others, and an evaluation."""
    policy, clip = WAYS[way]
    prices = {"FETCH": 3.0, "GRAD": 1.0, "FORWARD": 2.0, "LOSS": 2.0, "BACKWARD": 5.0, "NORM": 0.2, "UPDATE": 4.0}
    prices |= {"PLACE": 0.1}

    def cost(task: Task) -> float:
        return prices[task.name.split()[0]]

    shared = Contention(1.5, lambda task: cost(task) * task.name.startswith(("FETCH", "UPDATE")), {"fetch": 0.8})
    device = SimDevice(6, cost=cost, contention=shared)
    with Engine.from_model(tiny_model(), device, max_grad_norm=clip, policy=policy) as engine:
        for run in (engine.step, engine.step, engine.step, engine.evaluate):
            run(unequal_batches())
            timeline = engine.parts.streamer.timeline
            assert timeline is not None
            predicted = replay(timeline.schedule, lambda op: prices[op.kind], shared)
            assert timeline.seconds == pytest.approx(predicted.seconds, rel=0.01)
            assert timeline.stall_seconds() == pytest.approx(predicted.stall_seconds(), rel=0.01)


# Traces ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_real_and_simulated_runs_write_one_trace_format(device: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Engine.from_model(tiny_model(), device) as engine:
        engine.diagnostics.trace(path, steps=2)
        for _ in range(4):
            engine.step(unequal_batches())
    trace = json.loads(path.read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"compute", "fetch", "grad", "host"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["step"] for event in events} == {0, 1}
    assert {"FORWARD u1 m0", "UPDATE u2", "LOSS u4 m1"} <= {event["name"] for event in events}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    by_stream: dict[int, float] = {}
    for event in events:
        assert event["ts"] >= by_stream.get(event["tid"], 0.0) - 1e-3, "a stream does one thing at a time"
        by_stream[event["tid"]] = event["ts"] + event["dur"]


def test_a_trace_of_calls_in_phases_counts_the_bytes_of_copies_alone(tmp_path: Path) -> None:
    path, policy = tmp_path / "trace.json", Policy(wait_for="shard", weight_slots=1, shard_nbytes=2048)
    with Engine.from_model(tiny_model(), "sim:1", "bf16", policy=policy, verify=False) as engine:
        engine.diagnostics.trace(path, steps=1)
        for _ in range(3):
            engine.step(unequal_batches(2))
        crossed = sum(2 * layout_of(unit).trained.size for unit in engine.structure.units)
    nbytes = {"GRAD": 0, "BACKWARD": 0}
    for event in json.loads(path.read_text())["traceEvents"]:
        kind = event["name"].split()[0]
        nbytes[kind] = nbytes.get(kind, 0) + event["args"].get("nbytes", 0)
    assert (nbytes["GRAD"], nbytes["BACKWARD"]) == (crossed, 0)


def test_there_is_one_mutant_per_wait() -> None:
    schedule = varied_schedule(5)
    assert len(list(without_each_wait(schedule))) == sum(map(len, schedule.waits))
