"""Puts given tensors in place of a module's parameters, for calls of the module.

It does what `torch.func.functional_call` does, with a fifth of the calls of functions: the places of the parameters are
looked up once for all calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

Place = tuple[dict[str, Any], str]
"""Where a module has a parameter: its dictionary of parameters, and the name there."""


class SwappedParameters:
    """The places of a module's parameters, which does not gain or lose any afterwards."""

    def __init__(self, module: nn.Module) -> None:
        at = defaultdict[int, list[Place]](list)
        for inner in module.modules():
            for key, parameter in inner._parameters.items():
                if parameter is not None:
                    at[id(parameter)].append((inner._parameters, key))
        named = module.named_parameters(remove_duplicate=False)
        self._places = {name: at[id(parameter)] for name, parameter in named}
        """Name -> all places of the parameter, which may have several names."""

    def holding(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """In the block, the module has these parameters, by name; others stay. Raises `KeyError` for another name."""
        return _Swap([(*place, tensor) for name, tensor in weights.items() for place in self._places[name]])


class _Swap:
    """In the block, tensors are in these places."""

    __slots__ = ("_before", "_places")

    def __init__(self, places: list[tuple[dict[str, Any], str, Tensor]]) -> None:
        self._places = places
        self._before = [(parameters, key, parameters[key]) for parameters, key, _ in places]

    def __enter__(self) -> None:
        try:
            for parameters, key, tensor in self._places:
                parameters[key] = tensor
        except BaseException:  # Ctrl-C, say: the block is not entered, so nothing else puts them back
            self.__exit__()
            raise

    def __exit__(self, *failure: object) -> None:
        for parameters, key, tensor in reversed(self._before):
            parameters[key] = tensor
