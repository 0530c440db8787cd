"""Finds the arguments that a model's code reads, so that an argument which nothing reads is refused, not ignored.

Most models in transformers take `**kwargs` and pass them through their layers to the attention kernel; a name that no
function on the way asks for is silently ignored. So the names are collected from the code without running it:
optional parameters, and strings as in `kwargs.get("seq_idx")`, in the forward of every module, in the `**kwargs`
functions that it calls, and in the kernel that the config names. There is no list of models or arguments.

Whether a value makes sense is for the model itself to check.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

DEEPEST = 4
"""Depth of calls followed from a forward into functions that take `**kwargs`."""


class Arguments:
    """The arguments that a model's forward takes: its `own` parameters, and if it takes `**kwargs`, the names that
    its code may `read` from them."""

    def __init__(self, own: Iterable[str] = (), read: Iterable[str] = ()) -> None:
        self.own, self.read = frozenset(own), frozenset(read)

    def __contains__(self, name: str) -> bool:
        return name in self.own or name in self.read


MARKS = ("mm_token_type_ids", "token_type_ids")
"""Arguments that tell which tokens are parts of an image. Some models want them for text, too: zeros."""


def arguments_of(model: PreTrainedModel, layers: Iterable[nn.Module]) -> Arguments:
    """The arguments of a model's forward, including its decoder `layers`, which may have been replaced by ports."""
    forward = _function(model.forward)
    parameters = inspect.signature(model.forward if forward is None else forward).parameters.values()
    kinds = {parameter.name: parameter.kind for parameter in parameters}
    named = [name for name, kind in kinds.items() if kind in BY_NAME and name != "self"]
    if inspect.Parameter.VAR_KEYWORD not in kinds.values():
        return Arguments(named)
    read: set[str] = set()
    for function, owner in _forwards([model, *layers]):
        read |= _names_in(function, owner, DEEPEST, set())
    with_config = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    for kernel in {getattr(module.config, "_attn_implementation", None) for module in with_config}:
        if (called := _function(ALL_ATTENTION_FUNCTIONS.get(kernel))) is not None:
            read |= _names_in(called, None, DEEPEST, set())
    return Arguments(named, read)


def _forwards(roots: Iterable[nn.Module]) -> Iterator[tuple[FunctionType, type]]:
    """(forward, class) of every module: one per class, plus forwards set on instances."""
    seen: set[Any] = set()
    for root in roots:
        for module in root.modules():
            function = _function(module.forward)
            if function is not None and (function, type(module)) not in seen:
                seen.add((function, type(module)))
                yield function, type(module)


def _function(callable_: Any) -> FunctionType | None:
    """The Python function inside a method and its decorators."""
    function = inspect.unwrap(getattr(callable_, "__func__", callable_)) if callable(callable_) else None
    return function if isinstance(function, FunctionType) else None


def _names_in(function: FunctionType, owner: type | None, depth: int, seen: set[CodeType]) -> set[str]:
    """Optional parameters and strings of a function, of those it wraps, and of the `**kwargs` functions it calls.

    Called functions are looked up among the methods of `owner` and in the function's module.
    """
    code = function.__code__
    if code in seen:
        return set()
    seen.add(code)
    positional = code.co_varnames[: code.co_argcount]
    optional = positional[len(positional) - len(function.__defaults__ or ()) :]
    names = {*optional, *(function.__kwdefaults__ or ()), *_texts(code)}
    for name in code.co_names if depth else ():
        called: Callable[..., Any] | None = getattr(owner, name, None) if owner is not None else None
        inner = _function(called) or _function(function.__globals__.get(name))
        if inner is not None and inner.__code__.co_flags & inspect.CO_VARKEYWORDS:
            names |= _names_in(inner, owner, depth - 1, seen)
    for cell in function.__closure__ or ():
        if depth and (wrapped := _held_in(cell)) is not None:
            names |= _names_in(wrapped, owner, depth - 1, seen)
    return names


def _held_in(cell: CellType) -> FunctionType | None:
    """The function or method in a closure's cell."""
    try:
        return _function(cell.cell_contents)
    except ValueError:  # an empty cell
        return None


def _texts(code: CodeType) -> Iterator[str]:
    """Strings in a function's code, nested functions included, that could be argument names."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
