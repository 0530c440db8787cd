"""What counts as reading a tensor."""

from __future__ import annotations

import torch

from megatrain.model.weight_reads import OrderOfUse, Uses, in_order_of_use


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
