"""Results do not depend on what a forward keeps: graphs, inputs, offloaded or dropped ones, in any mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from tempfile import gettempdir
from typing import Any, get_args
from unittest.mock import Mock
from weakref import ReferenceType, ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.engine.executor import Action
from megatrain.engine.step_state import pack, unpack
from megatrain.errors import CorruptRegion, DiskFull, MegaTrainError, ModelError, StreamFailed
from megatrain.memory import Disk, Lease
from megatrain.schedule import Access, Op, Schedule, Use
from megatrain.spec import Keep, Numerics, Precision, Work
from megatrain.testing import KINDS, SimDevice, random_fault
from tests.disk_faults import DiskFault, failing
from tests.tiny import batch, equal, tiny_model, unequal_batches

KEEPS: tuple[Keep, ...] = get_args(Keep)
FAMILIES = ("llama", "llama-tied", "mixtral-balanced", "gpt2")
"""The second has a tied head, the third experts and a router loss, the last dropout."""
DROPOUT = {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.1}
LAYERS = 4
MIXED: tuple[tuple[Keep, ...], ...] = (("offload",), ("drop", "input"), ("drop", "offload", "graph"), ("drop",))
ON_DISK: tuple[tuple[Keep, ...], ...] = (("disk", "offload"), ("drop",), ("disk",), ("offload_attention",))


def engine(
    family: str,
    device: str | SimDevice,
    precision: Precision,
    policy: Policy,
    frozen: int = 0,
    disk: str | Disk = gettempdir(),  # noqa: B008  # where it is does not matter
) -> Engine:
    """A model whose embedding and lowest `frozen` layers are frozen."""
    layers = {"n_layer": LAYERS, **DROPOUT} if family == "gpt2" else {"num_hidden_layers": LAYERS}
    model = tiny_model(family, **layers)
    stack = "transformer.h" if family == "gpt2" else "model.layers"
    if frozen:
        model.get_input_embeddings().requires_grad_(False)
    for layer in range(frozen):
        model.get_submodule(f"{stack}.{layer}").requires_grad_(False)
    clip = None if policy.update == "during_backward" else 0.5
    return Engine.from_model(
        model,
        device,
        numerics=Numerics(precision, loss_chunk_tokens=5),
        optimizer=AdamW(lr=1e-2),
        max_grad_norm=clip,
        policy=policy,
        seed=4,
        verify=False,
        disk=disk,
    )


def results(made: Engine) -> dict[str, Tensor]:
    """All gradients of a step, the loss of another, and the weights after it."""
    found = {f"gradient {name}": gradient for name, gradient in made.gradients(unequal_batches(3)).items()}
    found["loss"] = torch.tensor(made.step(unequal_batches(3)).loss, dtype=torch.float64)
    return found | made.master_weights()


@cache
def recomputed(family: str, precision: Precision, update: str, frozen: int) -> dict[str, Tensor]:
    """The reference run: every input is kept."""
    policy = Policy(update=update, shares_memory=True)  # type: ignore[arg-type]
    with engine(family, "cpu", precision, policy, frozen) as made:
        return results(made)


Mixture = tuple[int, int, Precision, Policy]
"""Frozen layers, seed, precision, policy."""


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    row = st.lists(st.sampled_from(KEEPS), min_size=1, max_size=3).map(tuple)
    precision: Precision = draw(st.sampled_from(["bf16", "fp32"]))
    policy = Policy(
        update="next_forward" if precision == "bf16" else "during_backward",
        activations_by_layer=tuple(draw(st.lists(row, min_size=1, max_size=LAYERS))),
        offload_slots=draw(st.integers(1, 4)),
        recompute_slots=draw(st.sampled_from([None, 1, 2])),
        weight_slots=draw(st.integers(1, 3)),
        shard_nbytes=3000,
    )
    return draw(st.sampled_from([0, 0, 2])), draw(st.integers(0, 10**6)), precision, policy


def _compare(family: str, mixture: Mixture) -> None:
    """On the simulated device, and on the cpu with and without shared memory."""
    frozen, seed, precision, policy = mixture
    frozen = 0 if family == "llama-tied" else frozen
    expected = recomputed(family, precision, policy.update, frozen)
    for device, shares in ((f"sim:{seed}", False), ("cpu", seed % 2 == 0)):
        with engine(family, device, precision, replace(policy, shares_memory=shares), frozen) as made:
            assert equal(results(made), expected), device


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in ("llama-tied", "mixtral-balanced", "gpt2") else pytest.mark.slow)
        for each in FAMILIES
    ],
)
@settings(max_examples=1)
@given(mixture=mixtures())
def test_any_mixed_policy_gives_the_same_bits(family: str, mixture: Mixture) -> None:
    _compare(family, mixture)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=100)
@given(family=st.sampled_from(FAMILIES), mixture=mixtures())
def test_a_hundred_mixed_policies_give_the_same_bits(family: str, mixture: Mixture) -> None:
    _compare(family, mixture)


@pytest.mark.parametrize("shares", [False, True])
def test_what_waits_on_the_disk_gives_the_same_bits(shares: bool) -> None:
    """With dropped inputs above it, outputs, and few slots of any kind."""
    policy = Policy(activations_by_layer=ON_DISK, offload_slots=1, disk_staging_slots=1, shard_nbytes=3000)
    for device in ("cpu",) if shares else ("cpu", "sim:3"):
        with engine("gpt2", device, "bf16", replace(policy, shares_memory=shares)) as made:
            assert equal(results(made), recomputed("gpt2", "bf16", "next_forward", 0)), device
            kinds = {op.kind for each in made.parts.schedules.known.values() for op in each.ops}
            assert {"READ", "WRITE"} <= kinds
            assert ("RELOAD" in kinds) != shares
            assert made.parts.disk.written_nbytes > 0


def test_dropout_is_active_in_these_runs() -> None:
    policy = Policy(update="during_backward", shares_memory=True)
    with engine("gpt2", "cpu", "fp32", policy) as made, made.parts.ported.evaluation_mode():
        quiet = made.gradients(unequal_batches(3))
    expected = recomputed("gpt2", "fp32", "during_backward", 0)
    assert not any(torch.equal(gradient, expected[f"gradient {name}"]) for name, gradient in quiet.items())


# Memory ---------------------------------------------------------------------------------------------------------------


def watched(made: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Op, int]]:
    """(op, outputs of prologue and layers whose memory, whoever holds it, is there behind the op), as it runs."""
    seen: list[tuple[Op, int]] = []
    outputs: list[ReferenceType[torch.UntypedStorage]] = []
    ported, executor = made.parts.ported, made.parts.streamer.executor
    run = executor.run

    def noting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            result = inner(*args, **named)
            outputs.append(ref(result[0].untyped_storage()))
            return result

        return wrapped

    def watching(schedule: Schedule, actions: Sequence[Action], release: Callable[[Access], None]) -> None:
        def also(op: Op, lease: Lease, action: Action, ended: Sequence[Access]) -> None:
            action(op, lease)
            for access in ended:
                release(access)
            if op.stream == "compute":
                seen.append((op, sum(output() is not None for output in outputs)))

        pairs = zip(actions, schedule.ended, strict=True)
        run(schedule, [partial(also, action=action, ended=ended) for action, ended in pairs])

    monkeypatch.setattr(ported, "prologue", noting(ported.prologue))
    monkeypatch.setattr(ported, "layer", noting(ported.layer))
    monkeypatch.setattr(executor, "run", watching)
    return seen


@pytest.mark.parametrize("rows", [(), (("graph",),), MIXED, (("offload",),), (("input",), ("drop",)), (("drop",),)])
def test_held_activations_match_schedule_and_ledger(
    rows: tuple[tuple[Keep, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input by input on the device, op by op; and all told in each tier."""
    policy = Policy(activations_by_layer=rows, recompute_slots=1)
    with engine("llama", "cpu", "fp32", policy) as made:
        schedule = made.parts.prepare(Work((16,) * 3))
        seen = watched(made, monkeypatch)
        made.gradients([batch(2, 8, seed) for seed in range(3)])
        table = made.diagnostics.memory_table()
        assert made.parts.pool.ledger.nbytes("host") == schedule.peak_nbytes("host")
    for tier in ("host", "device"):
        held = sum(nbytes for (where, _), nbytes in table.items() if where == tier)
        assert held == schedule.arena_nbytes(tier)  # type: ignore[arg-type]
    inputs = [
        name
        for name in schedule.lifetimes
        if schedule.buffers[name].use in (Use.INPUTS, Use.RECOMPUTED_INPUTS, Use.GRAPHS)
    ]
    numbers = {id(op): index for index, op in enumerate(schedule.ops)}
    for op, count in seen:
        index = numbers[id(op)]
        alive = [name for name in inputs if schedule.lifetimes[name][0] <= index < schedule.lifetimes[name][1]]
        boundaries = {tuple(name.split("/")[2].split(".")[:2]) for name in alive}  # of a graph, the input that it has
        assert count == len(boundaries), op.name


@pytest.mark.parametrize(("keep", "tier", "stay"), [("offload", "host", 2), ("disk", "disk", 2 + 2)])
def test_growing_and_shrinking_micro_batches_fit(keep: Keep, tier: str, stay: int) -> None:
    """Memory for offloaded inputs is as large as the largest so far, which changes no result."""
    sizes = [(1, 6), (3, 9), (2, 4), (1, 12)]
    plain, away = (Policy(activations_by_layer=rows) for rows in ((), ((keep,),)))
    with engine("llama", "cpu", "fp32", plain) as left, engine("llama", "sim:3", "fp32", away) as right:
        for number, (rows, length) in enumerate(sizes):
            batches = [batch(rows, length, number), batch(1, 5, number)]
            assert equal(left.gradients(batches), right.gradients(batches))
        nbytes = right.diagnostics.memory_table()[tier, "offloaded inputs"]
        assert nbytes == (LAYERS * 2 - stay) // 2 * (27 + 5) * 32 * 4


def test_regions_of_another_size_are_given_again() -> None:
    """Steps of two and of three micro-batches have schedules of their own, for inputs of other sizes."""
    plain, away = (Policy(activations_by_layer=rows) for rows in ((), (("disk",),)))
    with engine("llama", "cpu", "fp32", plain) as left, engine("llama", "sim:3", "fp32", away) as right:
        for count, length in ((3, 9), (2, 4), (3, 9), (2, 11)):
            batches = [batch(1, length, number) for number in range(count)]
            assert equal(left.gradients(batches), right.gradients(batches))


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_step_whose_inputs_fail_on_the_disk_leaves_it_usable(device: str, tmp_path: Path) -> None:
    """First a full drive as the second input leaves, then a changed bit as the first returns, then an interrupt."""
    policy = Policy(activations_by_layer=(("disk",),), disk_staging_slots=1, shares_memory=device == "cpu")
    with engine("llama", "cpu", "bf16", Policy(shares_memory=True)) as calm:
        calm.step(unequal_batches())
        expected = calm.master_weights()
    calls = failing(DiskFault("full", at=1), DiskFault("flip", at=0, on="read"))
    with engine("llama", device, "bf16", policy, disk=Disk([tmp_path], calls=calls)) as made:
        before = made.master_weights()
        for error in (DiskFull, CorruptRegion):
            with pytest.raises(error, match="offloaded inputs of model"):
                made.step(unequal_batches())
            assert equal(made.master_weights(), before)
        with pytest.raises((KeyboardInterrupt, StreamFailed)), pytest.MonkeyPatch.context() as patched:
            patched.setattr(made.parts.pool.disk, "read_together", Mock(side_effect=KeyboardInterrupt))
            made.step(unequal_batches())
        made.step(unequal_batches())
        assert equal(made.master_weights(), expected)


def test_a_failed_activation_transfer_is_an_error_without_wrong_numbers() -> None:
    policy = Policy(activations_by_layer=MIXED, offload_slots=1, shard_nbytes=4000)
    with engine("llama", SimDevice(0), "bf16", policy) as calm:
        calm.step(unequal_batches())
        schedule = calm.parts.schedules.known["step", 2, False, calm.policy]
        after_one = calm.master_weights()
    for seed, (kind, op) in enumerate(zip(KINDS, cycle(("OFFLOAD", "RELOAD")), strict=False)):
        copies = replace(schedule, ops=tuple(each for each in schedule.ops if each.kind == op), waits=())
        device = SimDevice(seed, faults=[random_fault(copies, kind, seed)])
        with engine("llama", device, "bf16", policy) as made:
            with pytest.raises(MegaTrainError, match=f"{op} u"):
                made.step(unequal_batches())
            assert made.parts.pool.leases == 0
            assert not device.faults
            made.step(unequal_batches())
            assert equal(made.master_weights(), after_one)


def test_plans_can_change_between_steps() -> None:
    plain = Policy()
    with engine("gpt2", "cpu", "bf16", replace(plain, shares_memory=True)) as made:
        expected = [made.step(unequal_batches(3)).loss for _ in range(4)]
    with engine("gpt2", "sim:5", "bf16", plain) as made:
        found = []
        for rows in ((), MIXED, (("offload",),), (("drop",),)):
            made.adopt(replace(plain, activations_by_layer=rows))  # type: ignore[arg-type]
            found.append(made.step(unequal_batches(3)).loss)
        assert ("host", "offloaded inputs") not in made.diagnostics.memory_table(), "given back"
    assert found == expected


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_an_input_comes_back_with_its_strides() -> None:
    memory = torch.zeros(4 * 60, dtype=torch.uint8)
    for hidden in (torch.randn(3, 4, 5), torch.randn(4, 3, 5).transpose(0, 1), torch.randn(3, 1, 5).expand(3, 4, 5)):
        back = unpack(memory, pack(hidden, memory, "layer"))
        assert torch.equal(back, hidden)
        assert back.stride() == hidden.clone().stride()


def test_an_input_larger_than_planned_is_refused() -> None:
    with pytest.raises(ModelError, match=r"takes 240 bytes \(torch.float32\), but 120 were planned"):
        pack(torch.zeros(3, 4, 5), torch.zeros(120, dtype=torch.uint8), "layer 3")
