"""Ports: stand-ins for decoder layers, so that a model's own `forward` can be run without its layers.

The forward of a causal language model is a prologue (embedding, positions, masks), a loop over layers and an epilogue
(final norm, head). With a port in place of each layer, running it

* *captures* what each layer would be called with, besides the hidden state, and the prologue's true output;
* or, with the last port handing out a given hidden state, runs the true epilogue on it.

What a port relies on is checked when a model is met (`Capture.observed_only_passing`): the layers are called once
each, in order, and the hidden state goes from one to the next untouched. The module knows no model by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.recorded import replayed

HIDDEN = "hidden_states"
"""The name under which layers take the hidden state when it is not the first positional argument."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer is called with besides the hidden state. `by_keyword` tells how the hidden state is passed."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_keyword: bool

    def arguments(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the layer for this hidden state [batch, length, hidden size]."""
        if self.by_keyword:
            return self.args, {HIDDEN: hidden, **self.kwargs}
        return (hidden, *self.args), dict(self.kwargs)

    @property
    def form(self) -> tuple[Any, ...]:
        """All of it, in plain containers."""
        return self.args, dict(self.kwargs), self.by_keyword

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, through tuples, lists and dicts."""
        return _tensors_in((self.args, dict(self.kwargs)))


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []


def split_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Call]:
    """Take the hidden state out of a layer's arguments."""
    if args:
        return args[0], Call(tuple(args[1:]), dict(kwargs), by_keyword=False)
    if HIDDEN in kwargs:
        rest = {name: value for name, value in kwargs.items() if name != HIDDEN}
        return kwargs[HIDDEN], Call((), rest, by_keyword=True)
    raise ModelError(f"a decoder layer is called without a hidden state (arguments: {sorted(kwargs)})")


def hidden_of(output: Any) -> Tensor:
    """The hidden state in what a layer returned."""
    return output if isinstance(output, Tensor) else output[0]


class PrologueDone(Exception):
    """Leaves the model's forward once the last port has been visited; never escapes `PortedModel`."""


class Script(Protocol):
    """What the ports do in one run of the forward."""

    def visit(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor: ...


class Capture:
    """Records the calls of all layers, passes the hidden state through, and stops before the epilogue."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.calls: list[Call] = []
        self.hidden: Tensor | None = None
        self.order: list[int] = []
        self.untouched = True

    def visit(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        hidden, call = split_hidden(args, kwargs)
        if self.hidden is None:
            self.hidden = hidden
        self.untouched = self.untouched and hidden is self.hidden
        self.order.append(index)
        self.calls.append(call)
        if index == self.layers - 1:
            raise PrologueDone
        return hidden

    @property
    def observed_only_passing(self) -> bool:
        """Whether each layer was called once, in order, with the very output of the layer before it."""
        return self.untouched and self.order == list(range(self.layers))


class HandOut:
    """Lets every port pass through, and the last one hand out `hidden`; each hands out what its layer had recorded."""

    def __init__(self, layers: int, hidden: Tensor, sides: Sequence[tuple[Tensor, ...]] = ()) -> None:
        self.layers, self.hidden, self.sides = layers, hidden, sides
        self.order: list[int] = []

    def visit(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        self.order.append(index)
        if self.sides:
            replayed(self.sides[index])
        return self.hidden if index == self.layers - 1 else split_hidden(args, kwargs)[0]


class Port(nn.Module):
    """Stands in for the decoder layer `index`; answers for the layer's other attributes (its attention type, say)."""

    def __init__(self, index: int, layer: nn.Module) -> None:
        super().__init__()
        self.index = index
        self.script: Script | None = None
        self.returns: int | None = None
        """Length of the tuple that the layer returns; `None` when it returns the hidden state itself."""
        self.others: tuple[Any, ...] = ()
        """What it answers in the other places of the tuple, during the first look; `None`s otherwise."""
        self._behind = [layer]  # in a list, so that the layer is not registered as a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.script is not None, "a port is only run by PortedModel"
        hidden = self.script.visit(self.index, args, kwargs)
        if self.returns is None:
            return hidden
        return hidden, *(self.others or [None] * (self.returns - 1))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_behind"][0], name)


def reachable_leaves(tensor: Tensor) -> set[int]:
    """`id`s of the leaves that would get a gradient from `tensor`, read off its autograd graph without running it."""
    found: set[int] = set()
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.add(id(variable))
        stack.extend(following for following, _ in node.next_functions)
    return found
