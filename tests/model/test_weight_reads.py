"""What counts as reading a tensor."""

from __future__ import annotations

import torch
from torch import nn

from megatrain.model.weight_reads import OrderOfUse, ReadByProducts, Uses, in_order_of_use


def test_reads_are_traced_through_views() -> None:
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


def test_reads_are_traced_through_functorch_wrappers() -> None:
    """As when a model makes its mask by `vmap`."""
    weights = {name: torch.ones(4, 4) for name in "ab"}
    order = OrderOfUse(weights)
    with Uses(order.reading):
        torch.vmap(lambda row: row * 2)(weights["b"])
        torch.vmap(torch.vmap(lambda value, other: value + other))(weights["a"], torch.ones(4, 4))
    assert order.names == ["b", "a"]


class Reading(nn.Module):
    """Weights that are read in uncommon ways; `wide` has as many outputs as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "router": (6, 8),
            "wide": (6, 8),
            "by_token": (6, 8),
            "stacked": (6 * 5, 8),
            "thirds": (3 * 8, 8),
            "unequal": (8 + 16, 8),
            "table": (7, 8),
            "vector": (1, 8),
            "scale": (4, 8),
            "blocks": (2, 4, 4),
        }
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weights
        chosen = torch.softmax((x.double() @ w["router"].double().t()).view(4, 2, 3).flatten(1), -1).topk(2).indices
        gathered = (x @ w["by_token"].t()).gather(1, chosen)
        of_experts = [x @ matrix.t() for matrix in w["stacked"].view(6, 5, 8)]
        read = [x @ w["wide"].t(), *of_experts, gathered, x @ w["vector"].t(), x * w["scale"]]
        read += [x @ part.t() for part in (*w["thirds"].split(8), *w["unequal"].split([8, 16]))]
        read += [torch.einsum("tbi,bio->tbo", x.view(4, 2, 4), w["blocks"])]
        read += [(x @ x.t()).topk(2).values, nn.functional.embedding(chosen, w["table"]) @ x.t()]
        return torch.cat([each.flatten() for each in read])


def test_weights_are_matrices_as_products_read_them() -> None:
    layer = Reading()
    weights = {name.removeprefix("weights."): weight.detach() for name, weight in layer.named_parameters()}
    with torch.no_grad(), ReadByProducts(weights) as reads:
        layer(torch.zeros(4, 8))
    assert {name: tuple(matrices) for name, matrices in reads.matrices().items()} == {
        "wide": (1, False),
        "stacked": (6, False),
        "thirds": (3, False),
        "unequal": (1, False),
        "blocks": (2, True),
    }
