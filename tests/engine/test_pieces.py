"""Parts of the engine against slow references, and the overhead of the executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.launches import counting_calls
from megatrain.device.cpu import CpuDevice
from megatrain.engine import Executor, sequences_of
from megatrain.engine.chunked_loss import (
    ChunkedHead,
    cross_entropy,
    cross_entropy_loss,
    cross_entropy_loss_and_gradient,
)
from megatrain.engine.gradient_accumulation import GradientAccumulator, SumBuffer
from megatrain.engine.weights import BoundWeights, UnitBinder, UnitWeights, save_weights_by_name
from megatrain.memory import Ledger, Pool
from megatrain.schedule import build_step
from megatrain.spec import ModelSpec, Numerics, ParamSpec, Policy, UnitSpec, Work
from megatrain.spec.layout import layout_of
from tests.references import reference_cross_entropy

UNIT = UnitSpec("layer", "layer", (ParamSpec("l.a", (6, 5)), ParamSpec("l.b", (7,)), ParamSpec("l.c", (5, 4))))
LAYOUT = layout_of(UNIT)


@given(st.integers(1, 9), st.integers(2, 50), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_cross_entropy_equals_autograd_through_torchs(tokens: int, vocab: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (10 * torch.randn(tokens, vocab, generator=generator)).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    loss, gradient = cross_entropy(logits, targets, 0.25)
    expected_loss, expected = reference_cross_entropy(logits, targets, 0.25)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7)


def test_blocked_cross_entropy_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = torch.randn(10, 16), torch.randint(0, 16, (10,))
    whole = cross_entropy(logits, targets, 1.0)
    monkeypatch.setattr("megatrain.engine.chunked_loss.LOSS_BLOCK_NUMEL", {"cpu": 48})
    blocks = cross_entropy(logits, targets, 1.0)
    assert torch.equal(blocks[1], whole[1])
    torch.testing.assert_close(blocks[0], whole[0])


def test_chunked_loss_equals_one_piece_and_skips_masked_tokens() -> None:
    weight = torch.randn(16, 8)
    hidden, targets = torch.randn(12, 8), torch.randint(0, 16, (12,))
    targets[[0, 5, 11]] = -100
    positions = (targets != -100).nonzero().squeeze(-1)
    results = []
    for chunk in (2, 100):
        leaf = weight.clone().requires_grad_()
        seen: list[int] = []

        def head(part: Tensor, leaf: Tensor = leaf, seen: list[int] = seen) -> Tensor:
            seen.append(len(part))
            return part @ leaf.T

        loss, gradient = cross_entropy_loss_and_gradient(
            ChunkedHead(head, [leaf], hidden, positions, targets[positions], chunk), 1 / 9
        )
        assert sum(seen) == 9
        assert not gradient[[0, 5, 11]].any()
        alone = cross_entropy_loss(
            ChunkedHead(lambda part: part @ weight.T, [], hidden, positions, targets[positions], chunk)
        )
        torch.testing.assert_close(alone, loss)
        results.append((loss, gradient, leaf.grad))
    for left, right in zip(*results, strict=True):
        assert left is not None
        torch.testing.assert_close(left, right)


HEADS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "product": (lambda x, w: x @ w.T, True),
    "view of a product": (lambda x, w: (x[None] @ w.T)[0], True),
    "scaled": (lambda x, w: x @ w.T * 0.5, True),
    "capped": (lambda x, w: (x @ w.T).tanh(), False),
    "capped, as a view": (lambda x, w: (x[None] @ w.T).tanh()[0], False),
    "scaled by a weight": (lambda x, w: (x @ w.T) * w.sum(), True),
    "narrowed": (lambda x, w: (x @ torch.cat([w, w]).T)[:, : len(w)], False),
}
"""Heads, and whether the memory of their logits is free before their backward."""


@pytest.mark.parametrize("name", HEADS)
def test_the_gradient_of_logits_takes_their_memory_where_no_backward_reads_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, free = HEADS[name]
    hidden, weight, targets = torch.randn(12, 8), torch.randn(16, 8), torch.randint(0, 16, (12,))
    shared: list[bool] = []

    def noting(logits: Tensor, targets: Tensor, scale: float, into: Tensor | None) -> tuple[Tensor, Tensor]:
        loss, gradient = cross_entropy(logits, targets, scale, into)
        shared.append(gradient.data_ptr() == logits.data_ptr())
        return loss, gradient

    monkeypatch.setattr("megatrain.engine.chunked_loss.cross_entropy", noting)
    leaf = weight.clone().requires_grad_()
    chunked = ChunkedHead(lambda x: run(x, leaf), [leaf], hidden, torch.arange(12), targets, 5)
    loss, gradient = cross_entropy_loss_and_gradient(chunked, 0.25)
    expected = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    alone = torch.nn.functional.cross_entropy(run(*expected), targets, reduction="sum")
    (alone * 0.25).backward()
    assert shared == [free] * 3
    results = (loss.float(), gradient, leaf.grad)
    torch.testing.assert_close(results, (alone.detach(), *(x.grad for x in expected)))


class _KeptOnContext(torch.autograd.Function):
    """A cap whose backward reads its output, not by way of `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.capped = x.tanh()
        return ctx.capped

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 - ctx.capped * ctx.capped)


def _with_z_loss(x: Tensor, w: Tensor) -> Tensor:
    logits = x @ w.T
    logits.register_hook(lambda gradient: gradient + 0.25 * 1e-2 * logits.detach())
    return logits


def _under_hooks(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
        return (x @ w.T).tanh()


READING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a function that keeps them itself": lambda x, w: _KeptOnContext.apply(x @ w.T),  # type: ignore[no-untyped-call]
    "a gradient hook": _with_z_loss,
    "autograd, under hooks of the head's own": _under_hooks,
}


@pytest.mark.parametrize("name", READING)
def test_logits_that_anything_reads_in_the_backward_stay(name: str) -> None:
    run, (hidden, weight) = READING[name], (torch.randn(12, 8), torch.randn(16, 8))
    targets, leaf = torch.randint(0, 16, (12,)), weight.clone().requires_grad_()
    chunked = ChunkedHead(lambda x: run(x, leaf), [leaf], hidden, torch.arange(12), targets, 5)
    _, gradient = cross_entropy_loss_and_gradient(chunked, 0.25)
    expected = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    (torch.nn.functional.cross_entropy(run(*expected), targets, reduction="sum") * 0.25).backward()
    torch.testing.assert_close((gradient, leaf.grad), tuple(x.grad for x in expected))


def test_logits_that_a_hook_on_the_head_keeps_stay_as_they_were() -> None:
    hidden, head, targets = torch.randn(12, 8), torch.nn.Linear(8, 16, bias=False), torch.randint(0, 16, (12,))
    kept: list[Tensor] = []
    head.register_forward_hook(lambda _, inputs, output: kept.append(output.detach()))
    cross_entropy_loss_and_gradient(ChunkedHead(head, [head.weight], hidden, torch.arange(12), targets, 5), 0.25)
    torch.testing.assert_close(torch.cat(kept), (hidden @ head.weight.T).detach())


def test_a_head_that_changes_what_its_backward_reads_is_an_error() -> None:
    """As it is for plain PyTorch."""
    hidden, weight, targets = torch.randn(12, 8), torch.randn(16, 8).requires_grad_(), torch.randint(0, 16, (12,))
    chunked = ChunkedHead(lambda x: (x @ weight.T).tanh().mul_(2), [weight], hidden, torch.arange(12), targets, 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy_loss_and_gradient(chunked, 0.25)


def test_logits_are_materialised_only_chunk_by_chunk() -> None:
    """Peak memory does not grow with tokens x vocabulary."""
    vocab, width, chunk = 4096, 8, 32
    weight = torch.randn(vocab, width)

    def largest(tokens: int) -> int:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Watching(TorchDispatchMode):
            largest = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                out = func(*args, **(kwargs or {}))
                for tensor in out if isinstance(out, tuple | list) else [out]:
                    if isinstance(tensor, Tensor):
                        self.largest = max(self.largest, tensor.untyped_storage().nbytes())
                return out

        leaf = weight.clone().requires_grad_()
        targets = torch.randint(0, vocab, (tokens,))
        with Watching() as watching:
            hidden = torch.randn(tokens, width)
            chunked = ChunkedHead(lambda part: part @ leaf.T, [leaf], hidden, torch.arange(tokens), targets, chunk)
            cross_entropy_loss_and_gradient(chunked, 1.0)
        return watching.largest

    assert largest(64) == largest(1024) <= 4 * vocab * max(chunk, width)


def test_a_kept_graph_survives_its_slot_being_poisoned_bit_for_bit() -> None:
    """Weights that autograd saves are kept by name, and read from the slot that the unit is in at backward."""
    placement = torch.randn(LAYOUT.size)
    binder = UnitBinder(UNIT, "l.")
    start = torch.randn(3, 6)

    def run(leaves: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh((x @ leaves["a"]).pow(2) @ leaves["c"]) * leaves["b"][:4].exp()

    plain = binder.leaves(placement.clone())
    expected_in = start.clone().requires_grad_()
    run(plain, expected_in).sum().backward()

    slot, bound_at = placement.clone(), placement.clone()
    bound = BoundWeights(UnitWeights(slot))
    leaves, x = binder.leaves(slot), start.clone().requires_grad_()
    with save_weights_by_name(bound):
        output = run(leaves, x)
    slot.fill_(float("nan"))
    other_slot = torch.cat([torch.full((32,), float("nan")), bound_at])[32:]  # at another offset
    bound.weights = UnitWeights(other_slot)
    torch.autograd.backward([output], [torch.ones_like(output)], inputs=[x, *leaves.values()])
    assert torch.equal(x.grad, expected_in.grad)  # type: ignore[arg-type]
    for name, leaf in plain.items():
        assert torch.equal(leaves[name].grad, leaf.grad)  # type: ignore[arg-type]


def test_gradient_sums_reset_and_zero_untouched_ranges() -> None:
    flat = torch.full((LAYOUT.size,), float("nan"))
    total = GradientAccumulator()
    total.sum_in(SumBuffer(LAYOUT, flat))
    for dtype in (torch.float32, torch.bfloat16):
        leaf = torch.zeros(6, 5, dtype=dtype, requires_grad=True)
        leaf.grad = torch.ones(6, 5, dtype=dtype)
        total.accumulate("l.a", leaf)
    total.finish()
    fields = LAYOUT.by_name
    assert torch.equal(flat[fields["l.a"].start : fields["l.a"].stop], torch.full((30,), 2.0))
    assert flat.sum() == 60.0, "everything else is zero"


def test_the_executor_makes_at_most_26_calls_per_op() -> None:
    """For ops that do nothing, in a schedule with every kind of op: Python's calls and C's, the worker thread's
    included. There are 24."""
    layers = tuple(UnitSpec(f"l{i}", "layer", (ParamSpec(f"l{i}.w", (4, 8)),)) for i in range(40))
    ends = (UnitSpec("p", "prologue", (ParamSpec("e", (9, 8)),)), UnitSpec("h", "epilogue", (ParamSpec("h", (9, 8)),)))
    model = ModelSpec("m", (ends[0], *layers, ends[1]), hidden_size=8, vocab_size=9)
    schedule = build_step(model, Numerics(), Policy(), Work((4,) * 4), "all")
    with counting_calls() as calls_of:
        device = CpuDevice()
        pool = Pool(device, Ledger())
        pool.provide(schedule.buffers.values())
        executor = Executor(device, pool)
        actions = [lambda op, lease: None] * len(schedule.ops)
        executor.run(schedule, actions)  # the first binds what later ones find
        calls = calls_of(lambda: executor.run(schedule, actions))
    device.close()
    assert 15 * len(schedule.ops) < calls < 26 * len(schedule.ops)  # fewer, if C's or the thread's were not counted


def test_sequence_lengths_exclude_padding_and_split_packed_rows() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    assert sequences_of({"input_ids": ids}) == [(2, 5)]
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert sequences_of({"input_ids": ids, "attention_mask": mask}) == [(1, 3), (1, 5)]
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 0, 1]])
    packed = {"input_ids": ids, "position_ids": positions}
    assert sorted(sequences_of(packed)) == [(1, 1), (1, 3), (3, 2)]
    assert sorted(sequences_of({**packed, "attention_mask": mask})) == [(1, 3), (1, 5)]
    assert sequences_of({"input_ids": ids, "position_ids": torch.arange(5).unsqueeze(0)}) == [(2, 5)]
