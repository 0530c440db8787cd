"""Layers that wait for weights shard by shard give the same bits in any order of streams, and read no shard early."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain import AdamW, Engine, Policy
from megatrain.engine.resumable_call import ResumableCall
from megatrain.engine.step_state import StepState
from megatrain.errors import BrokenPromise, MegaTrainError, StreamFailed
from megatrain.model import PortedModel
from megatrain.spec import Keep, Numerics, Precision, Transfer
from megatrain.testing import Fault, SimDevice
from tests.kinds import KINDS
from tests.tiny import equal, relative_error, stock_gradients, tiny_model, unequal_batches

ROWS: dict[str, tuple[tuple[Keep, ...], ...]] = {
    "graphs": (("graph",),),
    "inputs": (("input",),),
    "stored": (("chosen", "input"), ("attention",)),
    "mixed": (("offload", "graph"), ("drop",), ("graph", "drop")),
}


THOROUGH = settings.default.max_examples > 100
SMALL = 300 if THOROUGH else 1000
"""Bytes of a small shard. A schedule takes time with the square of their number."""
DRAWN = settings.default.max_examples // 8 if THOROUGH else 1
"""Number of random policies, each compared on the cpu and on the simulated device."""


FP32 = Numerics("fp32", loss_chunk_tokens=5)


def engine(
    device: str | SimDevice, policy: Policy, family: str, freeze: tuple[str, ...] = (), numerics: Numerics = FP32
) -> Engine:
    clip = None if policy.update == "during_backward" else 0.5
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.1} if family == "gpt2" else {}
    model = tiny_model(family, **dropout)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in freeze))
    return Engine.from_model(
        *(model, device, numerics.precision, AdamW(lr=1e-2)),
        numerics=numerics,
        max_grad_norm=clip,
        policy=policy,
        seed=4,
        verify=False,
    )


def results(made: Engine, micro_batches: int = 3) -> dict[str, Tensor]:
    """Gradients, the loss of a step, and loss and weights after it."""
    batches = unequal_batches(micro_batches)
    found = {f"gradient {name}": gradient for name, gradient in made.gradients(batches).items()}
    found["losses"] = torch.tensor([made.step(batches).loss, made.evaluate(batches)], dtype=torch.float64)
    return found | made.master_weights()


@cache
def plainest(precision: Precision, update: str, family: str, micro_batches: int, chunk: int = 0) -> dict[str, Tensor]:
    numerics = Numerics(precision, loss_chunk_tokens=5, mlp_chunk_tokens=chunk)
    policy = Policy(shares_memory=True, update=update)  # type: ignore[arg-type]
    with engine("cpu", policy, family, numerics=numerics) as made:
        return results(made, micro_batches)


@settings(max_examples=DRAWN)
@given(
    family=st.sampled_from(["llama", "llama-tied", "gpt2", "mixtral-balanced"]),
    precision=st.sampled_from(["bf16", "fp32"]),
    rows=st.sampled_from(sorted(ROWS)),
    slots=st.integers(1, 3),
    shard=st.sampled_from([SMALL, 2048, 5000, 10**9]),
    update=st.sampled_from(["next_forward", "during_backward"]),
    micro_batches=st.integers(1, 3),
    transfer=st.sampled_from(["pinned", "pageable"]),
    chunk=st.sampled_from([0, 4]),
    seed=st.integers(0, 10**6),
)
def test_waiting_for_shards_changes_no_bit(
    family: str,
    precision: Precision,
    rows: str,
    slots: int,
    shard: int,
    update: str,
    micro_batches: int,
    transfer: Transfer,
    chunk: int,
    seed: int,
) -> None:
    """Under random policies, token chunks included."""
    policy = Policy(
        weight_slots=slots,
        grad_slots=slots,
        shard_nbytes=shard,
        wait_for="shard",
        activations_by_layer=ROWS[rows],
        update=update,  # type: ignore[arg-type]
        transfer=transfer,
    )
    expected = plainest(precision, update, family, micro_batches, chunk)
    numerics = Numerics(precision, loss_chunk_tokens=5, mlp_chunk_tokens=chunk)
    for device in (f"sim:{seed}", "cpu"):
        with engine(device, policy, family, numerics=numerics) as made:
            assert equal(results(made, micro_batches), expected), device
    assert not calls_under_way()


PHASED = Policy(wait_for="shard", shard_nbytes=2048, weight_slots=1)


def openmp_threads() -> int:
    """Threads that an OpenMP loop of the calling thread would use. (Asking torch would set them first.)"""
    with open("/proc/self/maps") as maps:
        library = next((line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line), None)
    if library is None:
        pytest.skip("torch is built without OpenMP")
    return int(ctypes.CDLL(library).omp_get_max_threads())


@pytest.mark.parametrize(
    ("rows", "caller"),
    [
        ("graphs", "another thread"),
        ("inputs", "the main thread"),
        pytest.param("graphs", "the main thread", marks=pytest.mark.slow),
        pytest.param("inputs", "another thread", marks=pytest.mark.slow),
    ],
)
def test_model_code_uses_the_configured_number_of_threads(
    rows: str, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP has a count for each thread. It determines speed and, by the order of sums, bits."""
    found: set[tuple[str, int]] = set()
    layer = PortedModel.layer

    def counting(*args: Any, **kwargs: Any) -> Any:
        found.add((threading.current_thread().name, openmp_threads()))
        return layer(*args, **kwargs)

    monkeypatch.setattr(PortedModel, "layer", counting)
    before = torch.get_num_threads()
    try:
        for count in (3, 5):
            found.clear()
            torch.set_num_threads(count)
            with engine("sim:1", replace(PHASED, activations_by_layer=ROWS[rows]), "llama") as made:
                if caller == "the main thread":
                    made.step(unequal_batches(2))
                else:
                    stepping = threading.Thread(target=made.step, args=(unequal_batches(2),))
                    stepping.start()
                    stepping.join()
            assert len({name for name, _ in found}) == 2, "both calls in phases and calls in one piece"
            assert {threads for _, threads in found} == {count}
    finally:
        torch.set_num_threads(before)


def calls_under_way() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "megatrain-call"]


@pytest.mark.parametrize("rows", ["graphs", "inputs"])
def test_a_layer_computes_while_shards_arrive_and_gradients_leave(rows: str) -> None:
    late, busy = SimDevice(temperament="late"), SimDevice(temperament="starve")
    busy._starved = "compute"
    for device in (late, busy):
        with engine(device, replace(PHASED, activations_by_layer=ROWS[rows]), "llama") as made:
            made.gradients(unequal_batches(1))
    assert sum(name.startswith("FETCH u2") for name in late.order) > 8
    begun = late.order.index("FORWARD u2 m0 s0")
    assert sum(name.startswith("FETCH u2") for name in late.order[:begun]) == 1, "one shard, and not the unit"
    ended = max(i for i, name in enumerate(busy.order) if name.startswith("BACKWARD u2 m0"))
    assert sum(name.startswith("GRAD u2") for name in busy.order[:ended]) > 8


@pytest.mark.parametrize("rows", ["graphs", "inputs"])
def test_weights_read_without_waiting_are_detected(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that have not arrived are NaN on the simulated device."""
    monkeypatch.setattr(ResumableCall, "before_reads", lambda self, ranges: None)
    with (
        engine("sim:1", replace(PHASED, activations_by_layer=ROWS[rows]), "llama") as made,
        pytest.raises(MegaTrainError, match="nan"),
    ):
        made.step(unequal_batches(1))


def test_models_that_build_masks_with_vmap_train() -> None:
    """Tensors inside a transformation have no memory; the tensors they wrap do."""
    fields = {**KINDS["gemma3_text"], "sliding_window": 4, "use_bidirectional_attention": True}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **fields)).train()
    _, expected = stock_gradients(model, unequal_batches(2))
    policy = replace(PHASED, shard_nbytes=1000)
    with Engine.from_model(model, "sim:1", "fp32", policy=policy, verify=False) as made:
        found = made.gradients(unequal_batches(2))
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-5


def test_gradients_released_early_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ResumableCall,
        "gradient_complete",
        lambda self, name: self._completed_by[self._phase] and self._wait_for_phase(self._last),
    )
    with engine("sim:1", PHASED, "llama") as made, pytest.raises(BrokenPromise):
        made.gradients(unequal_batches(1))


@pytest.mark.few(3)
@pytest.mark.parametrize("at", ["FETCH u2 s3", "FETCH u4 s1", "GRAD u1 s2", "BACKWARD u2 m0 s4", "FORWARD u1 m1 s1"])
def test_a_failure_inside_a_call_is_raised_and_leaves_nothing_behind(at: str) -> None:
    a_step_fails_and_is_done_again(PHASED, at)


def a_step_fails_and_is_done_again(policy: Policy, at: str) -> None:
    """A failure at this op is raised, ends the running call, and loses nothing but the step."""
    batches = unequal_batches(2)
    with engine("cpu", replace(PHASED, wait_for="unit"), "llama") as made:
        expected = [made.step(batches).loss for _ in range(2)]
    device = SimDevice(5)
    with engine(device, policy, "llama") as made:
        losses = [made.step(batches).loss]
        device.faults.append(Fault("raise", at))
        with pytest.raises(MegaTrainError):
            made.step(batches)
        assert not calls_under_way()
        losses.append(made.step(batches).loss)
    assert losses == expected


@pytest.mark.parametrize(
    ("rows", "at"),
    [
        pytest.param("graphs", "FETCH u2 s3", marks=pytest.mark.slow),
        ("inputs", "BACKWARD u2 m0 s4"),
        ("graphs", ""),
        pytest.param("inputs", "", marks=pytest.mark.slow),
    ],
)
def test_a_call_releases_its_step(rows: str, at: str) -> None:
    """Slots and activations are freed at once, without the garbage collector; after a failed step, slots are."""
    device = SimDevice(5, faults=[Fault("raise", at)] if at else [])
    with engine(device, replace(PHASED, activations_by_layer=ROWS[rows]), "llama") as made:
        gc.collect()
        gc.disable()
        try:
            slots = [
                weakref.ref(memory) for name, memory in made.parts.pool._memory.items() if name.startswith("device/")
            ]
            with pytest.raises(StreamFailed) if at else nullcontext():
                made.step(unequal_batches(2))
            found = [each for each in gc.get_objects() if type(each) is StepState]
            made.adopt(replace(made.policy, weight_slots=2))
            assert not any(each() is not None for each in slots)
        finally:
            gc.enable()
    assert at or not found, "a failure is raised with its frames, which refer to the step"


def test_failure_to_start_a_thread_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    batches = unequal_batches(1)
    with engine("sim:3", PHASED, "llama") as made:
        made.evaluate(batches)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(StreamFailed, match="can't start new thread"):
                made.step(batches)
        assert equal(results(made, 1), plainest("fp32", "next_forward", "llama", 1))


def test_ctrl_c_in_the_middle_of_a_call_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ResumableCall.run_phase

    def run_phase(self: ResumableCall, op: object, lease: object) -> None:
        honest(self, op, lease)  # type: ignore[arg-type]
        if self._phase == 1:
            raise KeyboardInterrupt

    with engine("cpu", PHASED, "llama") as made:
        monkeypatch.setattr(ResumableCall, "run_phase", run_phase)
        with pytest.raises(KeyboardInterrupt):
            made.step(unequal_batches(1))
        assert not calls_under_way()
        monkeypatch.setattr(ResumableCall, "run_phase", honest)
        expected = plainest("fp32", "next_forward", "llama", 1)
        assert equal(results(made, 1), expected)
