"""Whether the gradient of a prologue's weights depends on their values: not where they are only looked up and summed.

Most prologues are an embedding, some with positions added, with a constant factor or with dropout. All of these are
linear in the weights: what autograd keeps of them is ids, masks and constants. So their backward pass needs no weights,
and none are brought back for it. It is read off the graph of a tiny run. Only operations that are known to be linear in
their inputs count, and a product only if no more than one of its factors depends on a weight; anything else, a norm
say, is taken to need the values. And since a factor may depend on weights where autograd does not see it, three runs
with weights that are all the same number must show that the output is linear in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatrain.model.ports import PortedModel

LINEAR = frozenset(
    (
        *("AccumulateGrad", "EmbeddingBackward0", "AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0"),
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward1"),
        *("ExpandBackward0", "SliceBackward0", "SelectBackward0", "TransposeBackward0", "TBackward0", "CloneBackward0"),
        *("PermuteBackward0", "NativeDropoutBackward0", "AliasBackward0", "IndexBackward0", "IndexSelectBackward0"),
        *("CatBackward0", "StackBackward0"),
    )
)
"""Names of autograd's nodes whose gradient reads none of their inputs."""

PRODUCTS = {"MulBackward0": ([0], [1]), "DivBackward0": ([0],)}
"""Nodes -> which inputs may depend on weights, and no others."""


TOLERANCE = 1e-2
"""By which a sum with constants may be rounded."""


def only_looks_up(ported: PortedModel, hidden: Tensor, inputs: Mapping[str, Tensor]) -> bool:
    """Whether the prologue's output `hidden`, with its graph down to the weights, is linear in them.

    inputs: what it has been run on. Tables that are changed when they are looked up (`max_norm`) do not count.
    """
    changes = any(getattr(each, "max_norm", None) is not None for each in ported.skeleton.modules())
    return not changes and _is_linear(hidden) and _grows_as_weights(ported, inputs)


def _grows_as_weights(ported: PortedModel, inputs: Mapping[str, Tensor]) -> bool:
    found = []
    with torch.no_grad(), ported.evaluation_mode():
        for number in (0.0, 1.0, 2.0):
            told = ported.placeholders.items()
            weights = {name: torch.full((), number, dtype=zero.dtype).expand(zero.shape) for name, zero in told}
            found.append(ported.prologue(weights, inputs)[0].float())
    none, once, twice = found
    return torch.allclose(twice - none, 2 * (once - none), rtol=TOLERANCE, atol=TOLERANCE)


def _is_linear(hidden: Tensor) -> bool:
    """Whether each node of a graph is linear in what depends on weights."""
    if hidden.grad_fn is None:
        return False
    seen: set[Any] = set()
    left: list[Any] = [hidden.grad_fn]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        inputs = [each for each, _ in node.next_functions]
        depend = [place for place, each in enumerate(inputs) if each is not None]
        name = node.name().removeprefix("torch::autograd::")
        if name not in LINEAR and depend not in PRODUCTS.get(name, ()):
            return False
        left += [inputs[place] for place in depend]
    return True
