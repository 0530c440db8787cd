"""Where the elements of a conversion come from is known without memory, and is where the library has moved them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    ErnieSplitAndDecoupleTextVisionExperts,
    Interleave,
    PermuteForRope,
    SplitModulelist,
    Transpose,
)

from megatrain.model import MovedElements

SHAPES = {"x": (4, 6, 8), "y": (4, 6, 8)}
CONFIG = AutoConfig.for_model("llama", hidden_size=8, num_attention_heads=2)
ONE, TWO = ["a"], ["a", "b"]
CHAINS: dict[str, tuple[Sequence[ConversionOps], list[str], list[str]]] = {
    "experts apart": ([Chunk(1), SplitModulelist(0)], ONE, ["gate.*", "up.*"]),
    "experts joined": ([Concatenate(1)], TWO, ["w"]),
    "rows by turns": ([Concatenate(1), Interleave(1, inverse=True)], TWO, ["w"]),
    "rows apart": ([Interleave(0), Chunk(1)], ONE, ["gate", "up"]),
    "columns by turns": ([Interleave(2)], ONE, ["w"]),
    "transposed": ([Transpose(1, 2)], ONE, ["w"]),
    "transposed, then joined": ([Transpose(0, 2), Concatenate(0)], ONE, ["w"]),
    "text and vision": ([ErnieSplitAndDecoupleTextVisionExperts()], TWO, ["gate.*", "up.*"]),
}


def converted(chain: Sequence[ConversionOps], given: Mapping[str, Tensor], names: list[str]) -> list[Tensor]:
    values: dict[str, Any] = {name: [value] for name, value in given.items()}
    for op in chain:
        values = op.convert(values, source_patterns=[*values], target_patterns=names, config=CONFIG)
    return [value[0] if isinstance(value, list) else value for value in values.values()]


Convert = Callable[[Mapping[str, Tensor]], list[Tensor]]


def moved(convert: Convert, shapes: Mapping[str, tuple[int, ...]]) -> tuple[MovedElements, list[Tensor]]:
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with torch.no_grad(), MovedElements(empty) as elements:
        return elements, convert(empty)


def assert_known(
    convert: Callable[[Mapping[str, Tensor]], list[Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    elements, results = moved(convert, shapes)
    for result, expected in zip(results, convert(values), strict=True):
        assert elements.are_known(result)
        flat = expected.reshape(-1)
        for first, last in ((0, flat.numel()), (5, 6), (3, flat.numel() - 7), (flat.numel(), flat.numel())):
            parts = [torch.empty(0)]
            for name, start, length, step in elements.runs(result, first, last):
                parts.append(values[name].view(-1)[start : start + (length - 1) * step + 1 : step])
            assert torch.equal(torch.cat(parts), flat[first:last])


@pytest.mark.parametrize("chain", CHAINS)
def test_elements_are_where_the_librarys_conversions_move_them(chain: str) -> None:
    ops, given, names = CHAINS[chain]
    assert_known(lambda values: converted(ops, values, names), dict(zip(given, SHAPES.values(), strict=False)))


def test_rotary_rows_are_followed() -> None:
    op = PermuteForRope(inverse=True)
    assert_known(lambda values: converted([op], values, ["w"]), {"a": (16, 8)})


def test_a_parameter_as_it_is_is_one_run() -> None:
    elements, (result,) = moved(lambda values: [values["x"]], {"x": (3, 5)})
    assert list(elements.runs(result)) == [("x", 0, 15, 1)]


def test_experts_of_any_size_are_as_many_runs_as_there_are() -> None:
    """A layer of 1.5 trillion elements, which nothing could number one by one."""
    shape = {"x": (256, 2 << 16, 1 << 16)}
    elements, results = moved(lambda values: converted([Chunk(1), SplitModulelist(0)], values, ["g.*", "u.*"]), shape)
    assert len(results) == 512
    assert [len(list(elements.runs(result))) for result in results] == [1] * 512


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2,
        lambda x: x.mul_(2),
        lambda x: torch.cat([x, x + 1]),
        lambda x: x.to(torch.bfloat16),
        lambda x: (x + 1).transpose(0, 1).contiguous(),
        lambda x: x.flip(0),
    ],
)
def test_what_is_computed_is_not_taken_for_moved(compute: Callable[[Tensor], Tensor]) -> None:
    elements, (result,) = moved(lambda values: [compute(values["x"])], {"x": (3, 5)})
    assert not elements.are_known(result)
