"""A forward in less device memory than its largest unit takes: the same numbers, and nothing used that is gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from megatrain import Engine, Policy
from megatrain.engine.passing import PassingCall
from megatrain.errors import DoesNotFit, MegaTrainError, PlanError, RaceDetected, ScheduleError
from megatrain.layout import layout_of
from megatrain.schedule import RING, Op, passing
from megatrain.spec import Gates, Home, Precision, Transit
from megatrain.testing import Fault, SimDevice
from tests.system.test_gates import calls_under_way, engine
from tests.tiny import equal, tiny_model, unequal_batches

FROZEN = ("*",)
PASSING = Policy("fp32", gates="rows", shard_nbytes=3000, loss_chunk_tokens=9, forward_nbytes=9000)
"""The largest unit takes 30,976 bytes."""


def found(made: Engine) -> dict[str, Tensor]:
    """The loss of two micro-batches, the logits of one and the text that follows it."""
    batches = unequal_batches(2)
    ids = batches[1]["input_ids"]
    losses = torch.tensor([made.evaluate(batches)], dtype=torch.float64)
    written = made.generate(ids, max_new_tokens=1)
    return {"losses": losses, "logits": made.logits({"input_ids": ids}), "written": written}


@cache
def plainest(family: str, precision: Precision) -> dict[str, Tensor]:
    with engine("cpu", Policy(precision, shares_memory=True, loss_chunk_tokens=9), family, FROZEN) as made:
        return found(made)


def least(family: str, policy: Policy) -> int:
    """Bytes that a refusal names."""
    with pytest.raises(PlanError) as caught:
        engine("cpu", replace(policy, forward_nbytes=1), family, FROZEN)
    return int(caught.value.fix.split()[1].replace(",", ""))


def largest(made: Engine) -> int:
    return max(layout_of(unit).size for unit in made.spec.units) * made.policy.weight_nbytes


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], policy: Policy) -> None:
    """To the bit, or to rounding where matrices come by rows."""
    if policy.gates == "shard":
        assert equal(got, expected)
    else:
        near = {"rtol": 1e-5, "atol": 1e-5} if policy.precision == "fp32" else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(got["losses"], expected["losses"], **near)
        torch.testing.assert_close(got["logits"], expected["logits"], **near)


@pytest.mark.parametrize(
    ("family", "gates"), [("llama-tied", "rows"), ("gpt2", "shard"), ("gpt2", "rows"), ("qwen3-moe", "rows")]
)
def test_kinds_of_models_find_the_same(family: str, gates: Gates) -> None:
    """Tied heads, biases, matrices that are stored the other way around, and experts."""
    policy = replace(PASSING, gates=gates, forward_nbytes=26_000)
    with engine("cpu", policy, family, FROZEN) as made:
        assert_same(found(made), plainest(family, "fp32"), policy)
        assert made.memory_table()["device", "weights"] < largest(made)


@settings(max_examples=settings.default.max_examples // 8)
@given(
    family=st.sampled_from(["llama", "llama-tied", "gpt2", "mixtral-balanced", "gemma2", "qwen3-moe"]),
    precision=st.sampled_from(["bf16", "fp32"]),
    gates=st.sampled_from(["shard", "rows"]),
    shard=st.sampled_from([1000, 3000, 5000, 10**9]),
    spare=st.sampled_from([0, 1000, 20_000, 10**9]),
    transit=st.sampled_from(["locked", "slabs"]),
    resident=st.sampled_from([(), (0,), (2, 4)]),
    seed=st.integers(0, 10**6),
)
def test_a_forward_in_less_than_a_unit_finds_the_same(
    family: str,
    precision: Precision,
    gates: Gates,
    shard: int,
    spare: int,
    transit: Transit,
    resident: tuple[int, ...],
    seed: int,
) -> None:
    units = 6 if family == "gemma2" else 5
    homes = tuple(Home(weights="device" if unit in resident else "host") for unit in range(units))
    policy = Policy(precision, shard_nbytes=shard, gates=gates, transit=transit, homes=homes, loss_chunk_tokens=9)
    policy = replace(policy, forward_nbytes=least(family, policy) + spare)
    for device in (f"sim:{seed}", "cpu"):
        with engine(device, policy, family, FROZEN) as made:
            assert_same(found(made), plainest(family, precision), policy)
    assert not calls_under_way()


@pytest.mark.parametrize(
    ("family", "changes", "gates", "share"),
    [
        ("llama", {"vocab_size": 2048}, "rows", 0.25),
        ("llama-tied", {"vocab_size": 2048}, "rows", 0.25),
        ("llama", {}, "shard", 0.7),
        ("qwen3-moe", {}, "rows", 0.4),
    ],
)
def test_the_device_leases_what_the_schedule_says_and_less_than_a_unit(
    family: str, changes: dict[str, int], gates: Gates, share: float
) -> None:
    """Of models whose embedding is their largest unit, and of those where a layer is. Counted where memory is lent."""
    ring = 60_000 if changes else 20_000
    model = tiny_model(family, **changes)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    policy = replace(PASSING, gates=gates, shard_nbytes=12_000 if changes else 3000, forward_nbytes=ring)
    device = SimDevice(3)
    most = 0
    with Engine.from_model(model, device, "fp32", policy=policy, verify=False) as made:
        lend = device.lend

        @contextmanager
        def counting(task: Op, memory: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
            nonlocal most
            with lend(task, memory) as held:
                weights = {n: held[n].numel() for n in held if n.startswith(("device/weights/", "device/hi/"))}
                most = max(most, sum(weights.values()))
                yield held  # type: ignore[misc]

        device.lend = counting  # type: ignore[method-assign, assignment]
        made.evaluate(unequal_batches(1))
        made.generate(unequal_batches(1)[0]["input_ids"], max_new_tokens=1)
        schedules = list(made._schedules.known.values())
        assert most == max(each.buffers[RING].nbytes for each in schedules) <= policy.forward_nbytes
        assert made.memory_table()["device", "weights"] == most
        assert most < share * largest(made)


@pytest.mark.parametrize(("frozen", "chunk", "ring"), [((), 0, 20_000), (("*q_proj*",), 4, 45_000)])
def test_an_engine_that_trains_may_evaluate_so_too(frozen: tuple[str, ...], chunk: int, ring: int) -> None:
    """What comes back to its weights, or has them in another order than that of use, keeps a layer whole."""
    batches, results = unequal_batches(1), []
    for nbytes in (0, ring):
        policy = replace(PASSING, gates="shard", mlp_chunk_tokens=chunk, forward_nbytes=nbytes)
        with engine("sim:3", policy, "llama", frozen) as made:
            results.append([made.step(batches).loss, made.evaluate(batches), made.step(batches).loss])
    assert results[0] == results[1]


def test_an_engine_takes_it_up_and_gives_it_up_between_runs() -> None:
    batches, losses = unequal_batches(2), []
    with engine("sim:4", replace(PASSING, gates="shard", forward_nbytes=0), "llama", FROZEN) as made:
        for ring in (0, 20_000, 17_000, 0):
            made.adopt(replace(made.policy, forward_nbytes=ring))
            losses.append(made.evaluate(batches))
            assert (made.memory_table()["device", "weights"] <= ring) == (ring > 0)
    assert len(set(losses)) == 1
    with engine("sim:4", PASSING, "llama", FROZEN) as made, pytest.raises(PlanError, match=r"policy\.forward_nbytes"):
        made.adopt(replace(made.policy, forward_nbytes=9500))  # by rows, numbers are round by what is cut


@pytest.mark.parametrize("device", ["sim:1", "cpu"])
def test_a_weight_that_is_read_once_more_after_it_was_given_up_is_named(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a layer came back to a weight that the first look had seen it leave; others lie there now."""
    honest = passing.blocks_of

    def hasty(*args: object) -> list[passing.Block]:
        return [replace(each, until=max(i, each.until - 3)) for i, each in enumerate(honest(*args))]  # type: ignore[arg-type]

    monkeypatch.setattr(passing, "blocks_of", hasty)
    policy = replace(PASSING, gates="shard", forward_nbytes=40_000)
    with engine(device, policy, "gpt2", FROZEN) as made:
        with pytest.raises(ScheduleError, match=r"weight is read once more .*forward_nbytes=0"):
            made.evaluate(unequal_batches(2))
        assert not calls_under_way()


@pytest.mark.parametrize("device", ["sim:1", "cpu"])
def test_a_matrix_that_comes_by_rows_and_is_read_in_another_way_is_named(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a view; a shape reads nothing, nor does a lookup along with the head."""
    plain = functional.linear

    def other(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ weight.t() if weight.shape[0] == 48 else plain(x, weight, bias)

    with engine(device, PASSING, "llama-tied", FROZEN) as made:
        monkeypatch.setattr("torch.nn.functional.linear", other)
        with pytest.raises(ScheduleError, match=r"layers\.0\.mlp\.gate_proj\.weight comes row by row, and is read"):
            made.evaluate(unequal_batches(1))
        assert not calls_under_way()


def test_a_head_that_is_run_more_often_than_its_rows_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("sim:1", PASSING, "llama", FROZEN) as made:
        monkeypatch.setattr("megatrain.train.schedules.head_passes", lambda policy, work: (1,) * work.micro_batches)
        with pytest.raises(ScheduleError, match=r"lm_head\.weight is read once more"):
            made.evaluate(unequal_batches(1))


@pytest.mark.parametrize("gates", ["shard", "rows"])
def test_a_weight_that_is_read_without_its_gate_is_found(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassingCall, "need_all", lambda self, ranges: None)
    policy = replace(PASSING, gates=gates, forward_nbytes=20_000)
    with engine("sim:1", policy, "llama", FROZEN) as made, pytest.raises(MegaTrainError, match="nan"):
        made.evaluate(unequal_batches(1))


def test_a_wait_that_is_missing_is_found_and_the_parameter_named() -> None:
    with engine("sim:0", PASSING, "llama", FROZEN) as made:
        made.evaluate(unequal_batches(1))
        key, whole = next((key, each) for key, each in made._schedules.known.items() if len(key) > 3 and key[3] > 1)
        index = next(i for i, op in enumerate(whole.ops) if op.name == "FORWARD u2 m0 s2")
        waits = [() if i == index else each for i, each in enumerate(whole.waits)]
        made._schedules.known[key] = replace(whole, waits=tuple(waits))
        with pytest.raises(RaceDetected, match=r"unit model\.layers\.1, model\.layers\.1\.self_attn\..*\.weight"):
            made.evaluate(unequal_batches(1))


@pytest.mark.parametrize("at", ["FETCH u2", "FORWARD u1 m0 s3", "LOSS u4 m0 s2", ""])
def test_a_failure_surfaces_and_nothing_is_kept(at: str) -> None:
    """Nor are slots and weights, without the collector of cycles."""
    batches = unequal_batches(1)
    device = SimDevice(5)
    with engine(device, PASSING, "llama", FROZEN) as made:
        expected = made.evaluate(batches)
        if at:
            names = {op.name for each in made._schedules.known.values() for op in each.ops}
            device.faults.append(Fault("raise", max(name for name in names if name.startswith(at))))
            with pytest.raises(MegaTrainError):
                made.evaluate(batches)
        assert not calls_under_way()
        assert made.evaluate(batches) == expected
        gc.collect()
        gc.disable()
        try:
            memory = weakref.ref(made._pool._memory[RING])
            made.evaluate(batches)
            made.close()
            assert memory() is None
        finally:
            gc.enable()


def test_too_few_bytes_are_refused_with_the_number_that_would_do() -> None:
    enough = least("llama", PASSING)
    with engine("sim:1", replace(PASSING, forward_nbytes=enough), "llama", FROZEN) as made:
        made.evaluate(unequal_batches(1))
    with pytest.raises(PlanError, match=rf"use {enough:,} or more"):
        engine("sim:1", replace(PASSING, forward_nbytes=enough - 64), "llama", FROZEN)


def test_a_model_runs_on_a_device_that_holds_none_of_its_units() -> None:
    """By slots it is refused there before anything is allocated."""
    small = 12 << 10
    with pytest.raises(DoesNotFit):
        engine(SimDevice(1, capacity=small), replace(PASSING, forward_nbytes=0), "llama", FROZEN)
    with engine(SimDevice(1, capacity=small), PASSING, "llama", FROZEN) as made:
        assert largest(made) > 2 * small
        assert_same(found(made), plainest("llama", "fp32"), PASSING)


def test_weights_on_the_disk_come_as_often_as_they_are_used(tmp_path: Path) -> None:
    homes = tuple(Home(weights="disk") for _ in range(5))
    model = tiny_model("llama-tied")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    policy = replace(PASSING, homes=homes)
    with Engine.from_model(model, "sim:2", "fp32", policy=policy, disk=[tmp_path], verify=False) as made:
        expected = engine("cpu", replace(PASSING, forward_nbytes=0), "llama-tied", FROZEN)
        with expected:
            assert made.evaluate(unequal_batches(2)) == pytest.approx(expected.evaluate(unequal_batches(2)), rel=1e-6)
