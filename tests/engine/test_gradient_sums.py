"""Terms of a gradient in another dtype than their sum's are added without a copy of the whole term."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatrain.engine.gradient_accumulation import ELEMENTS_AT_ONCE, GradientAccumulator, SumBuffer
from megatrain.spec import ParamSpec, UnitSpec
from megatrain.spec.layout import layout_of


@pytest.mark.parametrize("shape", [(8192, 513), (3, 2048, 700), (8 * ELEMENTS_AT_ONCE + 3,), (1, 4_000_000), (7,)])
def test_a_narrower_term_is_added_without_a_wide_copy_of_it(shape: tuple[int, ...]) -> None:
    layout = layout_of(UnitSpec("unit", "layer", (ParamSpec("w", shape),)))
    memory = SumBuffer(layout, torch.zeros(layout.size))
    sums = GradientAccumulator()
    sums.sum_in(memory)
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
    leaf = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    largest = 0
    for term in terms:
        leaf.grad = term
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, torch.no_grad():
            sums.accumulate("w", leaf)
        events = profiled.profiler.kineto_results.events()
        largest = max([largest, *(event.nbytes() for event in events if event.name() == "[memory]")])
    assert torch.equal(memory.views["w"], terms[0].float() + terms[1].float())
    assert 0 < largest <= 4 * ELEMENTS_AT_ONCE
