"""Answers what a model's code asks of its inputs on the host, without waiting for the GPU.

Before its layers a model looks at masks and positions in Python: whether anything is padded (`mask.all()`), where
packed samples begin. On a GPU each such question is a wait, twice in every micro-batch. The inputs come from the host,
so the answer can: while `HostAnswers` is active it remembers how integer tensors were computed from them, and when one
is asked for its value, computes that from the host's copies instead. Nothing is computed unless it is asked for.

Functions that are not in `KNOWN` (those that make memory for a kernel to fill among them), floating-point tensors, and
tensors that have been written to since are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ASKS = frozenset({"__bool__", "__int__", "__index__", "__float__", "item", "tolist"})

_NAMES = """
    all any eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not isin
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __rand__ __ror__ __neg__ neg abs sign
    add sub mul __add__ __sub__ __mul__ __radd__ __rsub__ __rmul__ floor_divide __floordiv__ remainder __mod__ clamp
    sum cumsum diff max min amax amin argmax argmin maximum minimum prod count_nonzero where masked_fill pad
    view reshape expand expand_as unsqueeze squeeze t transpose permute flatten unflatten contiguous clone detach
    __getitem__ narrow select cat stack repeat roll flip index_select gather to bool long int arange tensor
"""
KNOWN = frozenset(_NAMES.split())


class _Recipe:
    """How a tensor was computed: a function and its arguments, or its value."""

    __slots__ = ("args", "func", "kwargs", "value")

    def __init__(self, func: Any, args: Any, kwargs: Any, value: Any = None) -> None:
        self.func, self.args, self.kwargs, self.value = func, args, kwargs, value

    def computed(self) -> Any:
        """On the host."""
        if self.value is None:
            self.value = self.func(*_mapped(self.args, _on_host), **_mapped(self.kwargs, _on_host))
            self.func = self.args = self.kwargs = None
        return self.value


class HostAnswers(TorchFunctionMode):
    """While active, on this thread: tensors computed from the inputs answer from the host.

    pairs: each input on the device, and the same on the host, which stays as it is.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._known: dict[int, tuple[ReferenceType[Tensor], int, _Recipe]] = {}
        for there, here in pairs:
            self._know(there, _Recipe(None, (), {}, here))

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ASKS and args and isinstance(args[0], Tensor) and (recipe := self._recipe(args[0])) is not None:
            with suppress(Exception):  # what does not go on the host goes on the device
                return func(recipe.computed(), *args[1:], **kwargs)
        found = func(*args, **kwargs)
        if name in KNOWN and _is_told(found) and not any(found is each for each in args):
            try:
                parts = _mapped((tuple(args), dict(kwargs)), self._part)
            except _Unknown:
                return found
            self._know(found, _Recipe(func, *parts))
        return found

    def _know(self, tensor: Tensor, recipe: _Recipe) -> None:
        self._known[id(tensor)] = ref(tensor), tensor._version, recipe

    def _recipe(self, tensor: Tensor) -> _Recipe | None:
        """How a tensor has come to the values that it has now, if that is known."""
        there, version, recipe = self._known.get(id(tensor), (None, 0, None))
        return recipe if there is not None and there() is tensor and tensor._version == version else None

    def _part(self, value: Any) -> Any:
        """An argument as a recipe holds it, which keeps no tensor of the device alive."""
        if isinstance(value, Tensor):
            recipe = self._recipe(value)
            if recipe is None:
                raise _Unknown
            return recipe
        if callable(value) and not isinstance(value, torch.dtype):
            raise _Unknown
        return value


class _Unknown(Exception):
    """An argument whose values the host does not know."""


def _is_told(found: Any) -> bool:
    """Whether it is a tensor that recipes are kept of."""
    if type(found) is not Tensor or not found.is_cuda or torch._C._functorch.is_functorch_wrapped_tensor(found):
        return False
    return not found.is_floating_point() and not found.is_complex()


def _on_host(value: Any) -> Any:
    if isinstance(value, _Recipe):
        return value.computed()
    at_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return torch.device("cpu") if at_device else value


def _mapped(value: Any, to: Callable[[Any], Any]) -> Any:
    """The same containers, with `to(each)` for what is in them."""
    if isinstance(value, tuple | list):
        return type(value)(_mapped(each, to) for each in value) if type(value) in (tuple, list) else to(value)
    if isinstance(value, dict):
        return {key: _mapped(each, to) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(each, to) for each in (value.start, value.stop, value.step)))
    return to(value)
