"""Products whose matrix comes row by row, and what counts as reading a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine.rows import BY_ROWS, Blocks, splits
from megatrain.model.uses import OrderOfUse, Uses, in_order_of_use


def arriving(weight: Tensor, home: Tensor, cuts: list[int], turned: bool = False) -> Blocks:
    """Rows that were NaN until they are given."""
    for start, stop in zip([0, *cuts], [*cuts, len(home)], strict=True):
        with torch.no_grad():
            weight.data[start:stop] = home[start:stop]
        rows = weight.detach()[start:stop]
        yield start, stop, rows.transpose(-2, -1) if turned else rows


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_begins_with_the_rows_that_are_there(bias: bool) -> None:
    home, x = torch.randn(12, 6), torch.randn(2, 5, 6)
    results = []
    for by_rows in (False, True):
        weight = (torch.full_like(home, torch.nan) if by_rows else home.clone()).requires_grad_()
        start, shift = x.clone().requires_grad_(), torch.ones(12, requires_grad=True)
        args = (start, weight, shift if bias else None)
        if by_rows:
            out = BY_ROWS[functional.linear](arriving(weight, home, [4, 5]), args, {})
        else:
            out = functional.linear(*args)
        out.square().sum().backward()
        results.append([out, start.grad, weight.grad, *([shift.grad] if bias else [])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("padding", [None, -1])
def test_an_embedding_by_rows_has_the_same_bits(padding: int | None) -> None:
    home, ids = torch.randn(9, 4), torch.tensor([[0, 8, 3, 3], [5, 1, 8, 7]])
    results = []
    for by_rows in (False, True):
        weight = (torch.full_like(home, torch.nan) if by_rows else home.clone()).requires_grad_()
        if by_rows:
            out = BY_ROWS[functional.embedding](arriving(weight, home, [2, 5]), (ids, weight, padding), {})
        else:
            out = functional.embedding(ids, weight, padding)
        out.square().sum().backward()
        results.append((out, weight.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("blocks", [[(0, 8)], [(0, 3), (3, 5), (5, 8)]])
@pytest.mark.parametrize("wrong", [-1, 8])
def test_an_id_without_a_row_is_an_error_as_in_one_piece(wrong: int, blocks: list[tuple[int, int]]) -> None:
    table = torch.ones(8, 4)
    rows = ((start, stop, table[start:stop]) for start, stop in blocks)
    with pytest.raises(IndexError):
        BY_ROWS[functional.embedding](rows, (torch.tensor([2, wrong, 7]), table), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [True, False])
def test_experts_that_come_one_by_one_have_the_same_bits_on_the_cpu(turned: bool, dtype: torch.dtype) -> None:
    """Also experts without a token; what is stored the other way around, and tokens that are nobody's."""
    torch.manual_seed(0)
    home = torch.randn(5, 24, 16).to(dtype)
    x, ends = torch.randn(23, 24 if turned else 16).to(dtype), torch.tensor([4, 4, 11, 17, 20], dtype=torch.int32)
    results = []
    for by_rows in (False, True):
        weight = (torch.full_like(home, torch.nan) if by_rows else home.clone()).requires_grad_()
        start = x.clone().requires_grad_()
        of, kwargs = (start, weight if turned else weight.transpose(-2, -1)), {"offs": ends}
        assert splits(torch._grouped_mm, of, kwargs) is not None
        if by_rows:
            out = BY_ROWS[torch._grouped_mm](arriving(weight, home, [1, 2, 4], not turned), of, kwargs)
        else:
            out = functional.grouped_mm(*of, **kwargs)
        out[:20].square().sum().backward()
        assert start.grad is not None
        results.append([out[:20], start.grad[:20], weight.grad])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_only_whole_matrices_in_their_own_order_come_by_rows() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    assert splits(functional.linear, (x, weight), {}) is weight
    assert splits(functional.linear, (x, torch.ones(3, 4).t()), {}) is None
    assert splits(functional.embedding, (torch.zeros(1, dtype=torch.long), weight, None, 1.0), {}) is None
    assert splits(torch.matmul, (x, weight.t()), {}) is None
    experts, ends = torch.ones(2, 3, 5), {"offs": torch.tensor([1, 2], dtype=torch.int32)}
    rows = splits(torch._grouped_mm, (x, experts), ends)
    assert rows is not None
    assert (rows.shape, rows.data_ptr()) == ((2, 15), experts.data_ptr())
    assert splits(torch._grouped_mm, (x, experts), ends | {"out_dtype": torch.float32}) is None
    assert splits(torch._grouped_mm, (x.t(), x), ends) is None, "the gradient of experts is no product by experts"
    assert splits(torch._grouped_mm, (x, torch.ones(4, 3, 5)[::2]), ends) is None


def test_shapes_and_views_read_nothing_and_what_is_made_of_a_view_does() -> None:
    weights = {name: torch.ones(4, 4) for name in "abc"}
    order = OrderOfUse(weights)
    with Uses(order.reading):
        assert weights["c"].shape[0] == weights["c"].dim() * 2
        turned, second = weights["b"].t(), weights["a"][1]
        assert order.names == []
        torch.ones(1, 4) @ turned
        assert order.names == ["b"]
        _ = second + 1
        _ = weights["b"][torch.tensor([0])]
        _ = weights["c"][torch.tensor(1)]
    assert order.names == ["b", "a"]
    assert in_order_of_use(["a", "b", "c"], order.names) == ["b", "a", "c"]


def test_what_a_transformation_wraps_is_seen_where_it_lies() -> None:
    """As when a model makes its mask by `vmap`."""
    weights = {name: torch.ones(4, 4) for name in "ab"}
    order = OrderOfUse(weights)
    with Uses(order.reading):
        torch.vmap(lambda row: row * 2)(weights["b"])
        torch.vmap(torch.vmap(lambda value, other: value + other))(weights["a"], torch.ones(4, 4))
    assert order.names == ["b", "a"]
