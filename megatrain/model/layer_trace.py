"""The first look at a model's layers: one of each kind is run on zeros, at the place where the model calls it.

It tells in which structure a layer returns the hidden state, which the model's loop may unpack, and whether layers hand
each other anything besides: another value of that structure, or an object that they write into. Only a model whose
layers meet in the hidden state alone can be run layer by layer, so all others are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from megatrain.errors import ModelError
from megatrain.model.peak import SkipLargeProducts, lazy_zeros
from megatrain.model.ports import Capture, PortedModel, Sides, split_hidden
from megatrain.model.profile import window_of
from megatrain.model.router_logits import recorded
from megatrain.model.user_patches import Buffers, code_of
from megatrain.model.weight_reads import OrderOfUse, Uses


class FirstLook(Capture):
    """A capture that learns. To be run with gradients enabled, so that what comes from a layer can be told."""

    def __init__(self, ported: PortedModel) -> None:
        super().__init__(len(ported.ports))
        self._ported = ported
        self.used: dict[object, OrderOfUse] = {}
        """Kind of layer -> the order in which it came to its parameters."""
        self.kinds: list[object] = []
        self.sides: list[Sides] = []
        self._known: dict[tuple[object, object], tuple[Any, Sides]] = {}
        """By kind, and by what functions of the layer's own hold on to."""
        self._handed: list[Any] = []

    def visit(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        self._refuse_what_came_from_a_layer(args, kwargs)
        layer = self._ported.templates[index]
        code, held = code_of(layer)
        kind = (type(layer), *((name, p.shape) for name, p in layer.named_parameters()), window_of(layer), code)
        if (kind, held) not in self._known:
            # Grouped products want real strides.
            zeros = {name: lazy_zeros(p.shape, p.dtype) for name, p in layer.named_parameters()}
            before, buffers = _contents((args, dict(kwargs))), Buffers(layer, self._ported.prefix(index))
            order = OrderOfUse(zeros)
            with torch.no_grad(), recorded() as sides, SkipLargeProducts(), Uses(order.reading):  # type: ignore[no-untyped-call]
                output = functional_call(layer, zeros, args, dict(kwargs))
            with torch.enable_grad(), SkipLargeProducts():  # type: ignore[no-untyped-call]  # code may ask whether they are wanted
                leaves = {name: zero.detach().requires_grad_() for name, zero in zeros.items()}
                functional_call(layer, leaves, args, dict(kwargs))
            if _contents((args, dict(kwargs))) != before:
                raise self._refusal("layers write into an object that they are all called with")
            buffers.refuse_changed(f"model {type(self._ported.skeleton).__name__}")
            self._known[kind, held] = output, tuple(sides)
            self.used.setdefault(kind, order)
        output, sides_of_kind = self._known[kind, held]
        port = self._ported.ports[index]
        port.returns = len(output) if isinstance(output, tuple | list) else None
        port.others = tuple(_marked(value) for value in output[1:]) if isinstance(output, tuple | list) else ()
        self._handed += [value for value in port.others if value is not None]
        self.kinds.append(kind)
        self.sides.append(sides_of_kind)
        return super().visit(index, args, kwargs)

    def _refuse_what_came_from_a_layer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _, call = split_hidden(args, kwargs)
        for value in _leaves((call.args, dict(call.kwargs))):
            came = isinstance(value, Tensor) and value.requires_grad and self._handed
            if came or any(value is handed for handed in self._handed):
                raise self._refusal("layers hand on more than the hidden state")

    def _refusal(self, what: str) -> ModelError:
        return ModelError(f"its {what}", where=f"model {type(self._ported.skeleton).__name__}")


def _marked(value: Any) -> Any:
    """A value as a layer returned it, that can be told again: by identity, and what is made of it by its gradient."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _contents(value: Any) -> list[tuple[int, ...]]:
    """Identities of what the mutable containers among the arguments hold now."""
    found: list[tuple[int, ...]] = []
    if isinstance(value, dict | list):
        items = list(value.values()) if isinstance(value, dict) else value
        found.append(tuple(id(item) for item in items))
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            found += _contents(item)
    return found


def _leaves(value: Any) -> list[Any]:
    """Everything that is no container, through tuples, lists and dicts; `None` is nothing."""
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return [leaf for item in items for leaf in _leaves(item)]
    return [] if value is None else [value]
