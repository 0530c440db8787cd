"""Lets a model's code read values of its inputs without waiting for the GPU.

Before its layers a model inspects masks and positions in Python: whether anything is padded (`mask.all()`), where
packed samples begin. On a GPU each such read waits for the device, twice per micro-batch. But the inputs come from the
host. While `HostAnswers` is active it records how integer tensors are computed from them, and when Python reads the
value of one, computes it from the host's copies instead. Nothing is computed until it is read.

Not covered: functions that are not in `REPEATABLE` (for example those that allocate memory for a kernel to fill),
floating-point tensors, and tensors changed in place since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

VALUE_READS = frozenset({"__bool__", "__int__", "__index__", "__float__", "item", "tolist"})
"""Functions that return a tensor's value to Python."""

_NAMES = """
    all any eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not isin
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __rand__ __ror__ __neg__ neg abs sign
    add sub mul __add__ __sub__ __mul__ __radd__ __rsub__ __rmul__ floor_divide __floordiv__ remainder __mod__ clamp
    sum cumsum diff max min amax amin argmax argmin maximum minimum prod count_nonzero where masked_fill pad
    view reshape expand expand_as unsqueeze squeeze t transpose permute flatten unflatten contiguous clone detach
    __getitem__ narrow select cat stack repeat roll flip index_select gather to bool long int arange tensor
"""
REPEATABLE = frozenset(_NAMES.split())
"""Functions whose result depends on their arguments alone, so that the host may compute it again."""


class _Recipe:
    """How a tensor was computed: a function and its arguments, or the value itself."""

    __slots__ = ("args", "func", "kwargs", "value")

    def __init__(self, func: Any, args: Any, kwargs: Any, value: Any = None) -> None:
        self.func, self.args, self.kwargs, self.value = func, args, kwargs, value

    def computed(self) -> Any:
        """The value on the host, computed at the first call."""
        if self.value is None:
            self.value = self.func(*_map_nested(self.args, _on_host), **_map_nested(self.kwargs, _on_host))
            self.func = self.args = self.kwargs = None
        return self.value


class HostAnswers(TorchFunctionMode):
    """While active, on this thread: values of tensors computed from the inputs are read on the host.

    pairs: each input on the device with the same on the host, which must not change meanwhile.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._recipes: dict[int, tuple[ReferenceType[Tensor], int, _Recipe]] = {}
        for on_device, here in pairs:
            self._remember(on_device, _Recipe(None, (), {}, here))

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if (
            name in VALUE_READS
            and args
            and isinstance(args[0], Tensor)
            and (recipe := self._recipe(args[0])) is not None
        ):
            with suppress(Exception):  # what fails on the host is read on the device
                return func(recipe.computed(), *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if name in REPEATABLE and _is_tracked(result) and not any(result is argument for argument in args):
            try:
                parts = _map_nested((tuple(args), dict(kwargs)), self._as_recipe)
            except _Unknown:
                return result
            self._remember(result, _Recipe(func, *parts))
        return result

    def _remember(self, tensor: Tensor, recipe: _Recipe) -> None:
        self._recipes[id(tensor)] = ref(tensor), tensor._version, recipe

    def _recipe(self, tensor: Tensor) -> _Recipe | None:
        """How a tensor's current values were computed, if that is known."""
        reference, version, recipe = self._recipes.get(id(tensor), (None, 0, None))
        return recipe if reference is not None and reference() is tensor and tensor._version == version else None

    def _as_recipe(self, value: Any) -> Any:
        """An argument as recipes keep it: recipes instead of tensors, so that no device memory is kept alive."""
        if isinstance(value, Tensor):
            recipe = self._recipe(value)
            if recipe is None:
                raise _Unknown
            return recipe
        if callable(value) and not isinstance(value, torch.dtype):
            raise _Unknown
        return value


class _Unknown(Exception):
    """The values of an argument are not known on the host."""


def _is_tracked(result: Any) -> bool:
    """Whether it is a tensor whose recipe is recorded: on a GPU, and of integers or bools."""
    if type(result) is not Tensor or not result.is_cuda or torch._C._functorch.is_functorch_wrapped_tensor(result):
        return False
    return not result.is_floating_point() and not result.is_complex()


def _on_host(value: Any) -> Any:
    """An argument of a recipe as the host's computation uses it."""
    if isinstance(value, _Recipe):
        return value.computed()
    at_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return torch.device("cpu") if at_device else value


def _map_nested(value: Any, to: Callable[[Any], Any]) -> Any:
    """Apply `to` to each value in nested containers, and return containers of the same form."""
    if isinstance(value, tuple | list):
        return type(value)(_map_nested(item, to) for item in value) if type(value) in (tuple, list) else to(value)
    if isinstance(value, dict):
        return {key: _map_nested(item, to) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_map_nested(bound, to) for bound in (value.start, value.stop, value.step)))
    return to(value)
