"""What was learned of a layer before, in this process, for one that is like it in all that a run depends on.

Learning a layer (`learn`) takes a score of runs of it, and engines for the same model are made again and again: one for
each setting when an architecture is compared, one for each test. What is learned is numbers about the layer's code, so
it is the same for layers with the same classes, attributes, buffers, shapes and arguments. All of these are in the key,
values of buffers and arguments included, and functions and classes as the objects they are. A layer with anything in it
that cannot be told by its value (a hook, an object of a class unknown here) is like no other, and is learned anew.

Not in the key: functions that a layer finds by a global name. Whoever replaces one of the library's own between two
engines for the same model may get the estimates, and the token-wise parts, of the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from megatrain.spec import LayerProfile

MOST = 64
"""Layers that are remembered, the last ones learned."""

LARGE_NBYTES = 1 << 24
"""Of buffers and arguments; a larger one is not read through."""

Learned = tuple[LayerProfile, tuple[str, ...]]
"""A layer's profile, and the names of its token-wise parts."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STATE = ("training", "_parameters", "_buffers", "_modules")
OF_EVERY_MODULE = vars(nn.Module())

_LEARNED: dict[Hashable, Learned] = {}


class _Unlike(Exception):
    """Something cannot be told by its value."""


def learned(layer: nn.Module, given: Any, learn: Callable[[], Learned]) -> Learned:
    """What `learn` says of a layer, or has said of one like it, called with the same. given: tensors and containers."""
    try:
        key = _settings(), _form((layer, given), {})
    except _Unlike:
        return learn()
    found = _LEARNED.get(key)
    if found is None:
        found = learn()
        while len(_LEARNED) >= MOST:
            _LEARNED.pop(next(iter(_LEARNED)), None)
        _LEARNED[key] = found
    return found


def _settings() -> Hashable:
    """What decides beside the layer which ops run."""
    kernels = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        (kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()),
    )


def _form(value: Any, inside: Mapping[int, int]) -> Hashable:
    """A value that equals another's only if both are alike. inside: the objects that it is a part of, by `id`."""
    if isinstance(value, PLAIN):
        return type(value), value  # 1, 1.0 and True are equal and not alike
    if isinstance(value, type | BuiltinFunctionType) or (isinstance(value, FunctionType) and not value.__closure__):
        return value
    if isinstance(value, Tensor):
        return _tensor(value)
    if id(value) in inside:
        return "around", inside[id(value)]
    inside = {**inside, id(value): len(inside)}
    if isinstance(value, tuple | list):
        return type(value), tuple(_form(each, inside) for each in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_form(each, inside) for each in value)
    if isinstance(value, dict):
        return type(value), tuple((_form(name, inside), _form(each, inside)) for name, each in value.items())
    if isinstance(value, partial):
        return partial, _form((value.func, value.args, value.keywords), inside)
    if isinstance(value, PreTrainedConfig):
        return type(value), _form(vars(value), inside)
    if isinstance(value, nn.Module):
        return _module(value, inside)
    raise _Unlike


def _module(module: nn.Module, inside: Mapping[int, int]) -> Hashable:
    fields = vars(module)
    if any(fields[hooks] for hooks in HOOKS):
        raise _Unlike
    own = {name: value for name, value in fields.items() if name in STATE or name not in OF_EVERY_MODULE}
    return type(module), type(module).forward, _form(own, inside)


def _tensor(tensor: Tensor) -> Hashable:
    outside = tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
    if type(tensor) not in (Tensor, nn.Parameter):
        raise _Unlike
    if tensor.is_meta:
        return outside
    if tensor.numel() * tensor.element_size() > LARGE_NBYTES:
        raise _Unlike
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return outside, hashlib.sha256(content.data).hexdigest()
