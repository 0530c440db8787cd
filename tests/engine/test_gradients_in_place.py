"""Gradients computed in their sums have autograd's bits, whatever else a weight is used for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain import Engine, Policy
from megatrain.engine.autograd import EMBEDDING_OPTIONS, GradientsInPlace
from megatrain.engine.context import OpContext
from megatrain.engine.gradient_accumulation import GradientAccumulator, SumBuffer
from megatrain.spec import Numerics, ParamSpec, UnitSpec
from megatrain.spec.layout import layout_of
from tests.tiny import tiny_model, unequal_batches

ROWS, WIDTH = 48, 32
UNIT = UnitSpec("unit", "layer", (ParamSpec("w", (ROWS, WIDTH)),))
IDS = torch.tensor([[3, 5, 3, 0], [47, 5, 3, 11]])
Use = Callable[[Tensor, Tensor], Tensor]


def embedding(x: Tensor, w: Tensor) -> Tensor:
    return functional.embedding(IDS, w, padding_idx=5).sum() * 3


def linear(x: Tensor, w: Tensor) -> Tensor:
    return functional.linear(x, w).square().sum()


USES: dict[str, Use] = {
    "linear": linear,
    "embedding": embedding,
    "both": lambda x, w: linear(x, w) + embedding(x, w),
    "linear twice": lambda x, w: linear(x, w) + linear(x * 2, w),
    "embedding twice": lambda x, w: embedding(x, w) * embedding(x, w),
    "linear and exp": lambda x, w: linear(x, w) + w.exp().sum(),
    "linear with bias": lambda x, w: functional.linear(x, w, torch.ones(ROWS)).square().sum(),
    "bias by keyword": lambda x, w: functional.linear(x, w, bias=torch.ones(ROWS)).square().sum(),
    "options by position": lambda x, w: functional.embedding(IDS, w, 5 - ROWS, 1.0).square().sum(),
    "padding by position": lambda x, w: functional.embedding(IDS, w, 5 - ROWS).square().sum(),
    "scaled by frequency": lambda x, w: functional.embedding(IDS, w, scale_grad_by_freq=True).square().sum(),
}


def test_options_of_an_embedding_are_in_torchs_order() -> None:
    names = tuple(inspect.signature(functional.embedding).parameters)
    assert names == ("input", "weight", *EMBEDDING_OPTIONS)


def total_of(uses: list[Use], dtype: torch.dtype, in_place: bool) -> Tensor:
    """The gradient of a weight summed over backward passes, one for each use."""
    torch.manual_seed(0)
    layout = layout_of(UNIT).trained
    flat = torch.full((layout.size,), float("nan"), dtype=dtype)
    memory = SumBuffer(layout, flat)
    total, weight = GradientAccumulator(), torch.randn(ROWS, WIDTH)
    for use in uses:
        leaf, x = weight.clone().requires_grad_(), torch.randn(2, 7, WIDTH, requires_grad=True)
        total.register_hooks([("w", leaf)])
        with GradientsInPlace([("w", leaf)], total) if in_place else nullcontext():
            loss = use(x, leaf)
        total.sum_in(memory)
        loss.backward()
        assert leaf.grad is None
    total.finish()
    return flat


class Ops(TorchDispatchMode):
    """Lists the matrix products that run, with their shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if "mm" in str(op):
            self.found.append(f"{op} {[tuple(each.shape) for each in args]}")
        return op(*args, **(kwargs or {}))


def test_noncontiguous_rows_use_the_library_matmul() -> None:
    """As in Jamba after its convolution. One product per sample would have other bits, and no policy would keep its
    output."""
    leaf = torch.randn(ROWS * WIDTH + 8)[8:].view(ROWS, WIDTH).requires_grad_()  # a view of its unit, as all weights
    x = torch.randn(2, WIDTH + 3, 7, requires_grad=True)[:, :WIDTH].transpose(1, 2)
    found = []
    for in_place in (
        nullcontext(),
        GradientsInPlace([("w", leaf)], GradientAccumulator()),
    ):
        with Ops() as ops, in_place:
            functional.linear(x, leaf)
        found.append(ops.found)
    assert found[0] == found[1] == [f"aten.mm.default {[(14, WIDTH), (WIDTH, ROWS)]}"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("second", ["nothing", "linear", "embedding"])
@pytest.mark.parametrize("use", USES)
def test_in_place_sums_equal_added_autograd_terms_bitwise(use: str, second: str, dtype: torch.dtype) -> None:
    uses = [USES[use], *([USES[second]] if second != "nothing" else [])]
    assert torch.equal(total_of(uses, dtype, in_place=True), total_of(uses, dtype, in_place=False))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_autograd_accumulates_in_place_with_the_same_bits(
    precision: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numerics, policy = Numerics(precision, loss_chunk_tokens=8), Policy(shares_memory=True)  # type: ignore[arg-type]
    same_memory: list[bool] = []
    take = GradientAccumulator.accumulate

    def watched(self: GradientAccumulator, name: str, leaf: Tensor) -> None:
        if leaf.grad is not None and name in self._claimed:
            same_memory.append(leaf.grad.data_ptr() == self._views[name].data_ptr())
        take(self, name, leaf)

    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = tiny_model(tie_word_embeddings=tied)
        with Engine.from_model(model, "cpu", numerics=numerics, policy=policy, verify=False) as engine:
            return engine.gradients(unequal_batches()[:1])

    monkeypatch.setattr(GradientAccumulator, "accumulate", watched)
    found = gradients()
    assert same_memory
    assert all(same_memory)
    monkeypatch.setattr(OpContext, "in_place", lambda self, trained, unit: nullcontext())
    expected = gradients()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("pops", [0, 1])
def test_ctrl_c_within_torchs_own_bookkeeping_of_modes_stays_one(pops: int) -> None:
    """Python functions of torch pop the mode for a moment; an interrupt there left it popped."""
    model, wanted = tiny_model(), False

    def interrupt(*_: object) -> None:
        if wanted:
            for _ in range(pops):
                torch.overrides._pop_mode()
            raise KeyboardInterrupt

    model.model.layers[1].register_forward_pre_hook(interrupt)
    keeps = Policy(shares_memory=True, activations="keep")
    engines = [Engine.from_model(of, verify=False, policy=keeps) for of in (model, tiny_model())]
    with engines[0] as engine, engines[1] as other:
        for each in (engine, other):
            each.step(unequal_batches())
        wanted = True
        with pytest.raises(KeyboardInterrupt):
            engine.step(unequal_batches())
        assert torch.overrides._get_current_function_mode_stack() == []
        wanted = False
        assert engine.step(unequal_batches()) == replace(other.step(unequal_batches()), stall_seconds=ANY)
