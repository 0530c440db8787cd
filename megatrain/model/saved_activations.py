"""Selective activation checkpointing: stores the outputs of a layer's large matrix products and of attention.

This lies between keeping the whole graph and recomputing everything from the input: these outputs are expensive to
compute and small to hold. They are selected by op, never by model: products whose inner dimension is at least half
the hidden size (so many FLOPs per stored value), and attention. `Keeping` stores their outputs while a layer runs
forward; `Answering` returns each at the same place when the layer runs again, and everything else is recomputed. So
the graph is the same, and so is every bit.

It resembles PyTorch's selective checkpointing (`torch.utils.checkpoint`), which did not fit in three respects: an
output that the layer changes in place is an error there, and is recomputed here; attention with dropout advances the
random state, so it is never stored here; and the last product of a layer, after which autograd saves nothing, is
stored or computed there for no use. Here it is *spared*: replaced by NaNs that no gradient sees.

Products of activations with each other (`bmm`, hence eager attention) are not stored: their outputs are as large
as they are expensive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatrain.errors import ModelError
from megatrain.model.peak import tensors_of

Level = Literal["chosen", "attention"]
"""Products and attention, or only attention; values of `spec.Keep`."""

ALIGNMENT = 16
"""Width in bytes of the widest load in kernels."""

PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_grouped_mm": 0}
"""Name of a product -> position of its argument whose row length is the inner dimension."""

Key = tuple[Any, int, tuple[torch.Size, ...]]
"""An op, how many of its kind preceded it in the layer's run, and the shapes of its arguments."""


@cache
def attends(op: Any) -> bool:
    """Whether the op is fused attention, judged by its name, from whatever library."""
    name = op._schema.name.lower() if hasattr(op, "_schema") else ""
    return ("attention" in name or "flash_attn" in name) and "backward" not in name and "choice" not in name


@cache
def _rows_of(op: Any) -> int | None:
    return PRODUCTS.get(op._schema.name) if hasattr(op, "_schema") else None


def _draws(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an attention op uses dropout."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    return any(value for name, value in given.items() if name in ("dropout_p", "p_dropout"))


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor inside memory that it does not own."""

    start: int
    """Byte offset."""
    form: Tensor
    """Its shape, strides and dtype, without memory."""


@dataclass(slots=True)
class Stored:
    """The outputs stored during one run of a layer for the next run, and the shapes of the spared ones."""

    outputs: dict[Key, Any] = field(default_factory=dict)
    spared: dict[Key, Any] = field(default_factory=dict)

    packed: dict[Key, Any] = field(default_factory=dict)
    """Outputs moved to other memory by `pack`: each tensor as its byte offset and an empty tensor of its form."""

    def tensors(self) -> list[Tensor]:
        return [tensor for output in self.outputs.values() for tensor in tensors_of(output)]

    def pack(self, memory: Tensor) -> None:
        """Move all outputs on its device to `memory`, uint8[bytes], one after the other.

        Outputs that do not fit are dropped too, and recomputed later.
        """
        free = 0
        for key, output in self.outputs.items():
            leaves = [leaf for leaf in tensors_of(output) if leaf.device == memory.device]
            places = [free + start for start in accumulate((_aligned(leaf.nbytes) for leaf in leaves), initial=0)]
            if places[-1] > memory.nbytes:
                continue
            free, begins = places[-1], iter(places)

            def moved(leaf: Tensor, begins: Iterator[int] = begins) -> Tensor | Packed:
                if leaf.device != memory.device:
                    return leaf
                form, begin = torch.empty_like(leaf, device="meta"), next(begins)
                _seen(memory, begin, form).copy_(leaf)
                return Packed(begin, form)

            self.packed[key] = tree_map_only(Tensor, moved, output)
        self.outputs = {}

    def unpack(self, memory: Tensor) -> None:
        """Restore the outputs as views of `memory`, with the contents that `pack` left there."""
        for key, output in self.packed.items():
            self.outputs[key] = tree_map_only(Packed, lambda part: _seen(memory, part.start, part.form), output)
        self.packed = {}

    def finish(self, where: str) -> None:
        """Raise `ModelError` if the layer has not used all stored outputs: it ran differently the second time."""
        if left := (*self.outputs, *self.spared):
            what = f"computes differently the second time: no {', '.join(sorted({str(op) for op, *_ in left}))}"
            raise ModelError(what, where=where, fix="keep inputs or graphs instead: policy.activations_by_layer")


_UNSEEN: ContextVar[bool] = ContextVar("unseen", default=False)


@contextmanager
def unseen() -> Iterator[None]:
    """In the block, outputs are neither stored nor replayed: they are made chunk by chunk so as never to exist
    whole."""
    token = _UNSEEN.set(True)
    try:
        yield
    finally:
        _UNSEEN.reset(token)


class _Watching(TorchDispatchMode):
    """Identifies each op that may be stored by its kind and its position among those of its kind."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._met: Counter[Any] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rows = _rows_of(op)
        if _UNSEEN.get() or (rows is None and (not attends(op) or _draws(op, args, kwargs))):
            return op(*args, **kwargs)
        key = op, self._met[op], tuple(argument.shape for argument in args if isinstance(argument, Tensor))
        self._met[op] += 1
        return self.meet(key, lambda: op(*args, **kwargs), 0 if rows is None else int(args[rows].shape[-1]))

    def meet(self, key: Key, compute: Callable[[], Any], terms: int) -> Any:
        """terms: inner dimension of a product; 0 for attention."""
        raise NotImplementedError


class Keeping(_Watching):
    """Stores the outputs of ops in the block, with gradients on. `width`: the hidden size."""

    def __init__(self, level: Level, width: int) -> None:
        super().__init__()
        self.flops: dict[Key, float] = {}
        """FLOPs of each product."""
        self._least = (width + 1) // 2 if level == "chosen" else float("inf")
        self._stored: dict[Key, Any] = {}
        self._unsaved: dict[Key, Any] = {}
        """Outputs since autograd last saved a tensor."""
        self._written: set[int] = set()
        """Addresses of storages that were changed in place; versions do not tell, since `_unsafe_view` hides them."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if hasattr(op, "_schema") and op._schema.is_mutable:
            given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | (kwargs or {})
            for argument in op._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._written |= _places(given.get(argument.name))
        return super().__torch_dispatch__(op, types, args, kwargs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While a layer runs in the block, drop what autograd would save."""
        hooks: Any = torch.autograd.graph.saved_tensors_hooks
        with torch.enable_grad(), hooks(self._saves, lambda nothing: nothing), self:
            yield

    def _saves(self, tensor: Tensor) -> None:
        self._unsaved.clear()

    def meet(self, key: Key, compute: Callable[[], Any], terms: int) -> Any:
        output = compute()
        if terms:
            self.flops[key] = 2.0 * output.numel() * terms
        alone = tree_map_only(Tensor, torch.Tensor.detach, output)  # its graph would form a cycle with our hook
        self._written -= _places(alone)  # older tensors there are dead, and their memory was reused
        if not terms or terms >= self._least:
            self._stored[key] = alone
        self._unsaved[key] = alone
        return output

    def stored(self) -> Stored:
        """The stored outputs, without those that were changed in place since."""

        def unchanged(outputs: dict[Key, Any]) -> dict[Key, Any]:
            return {key: kept for key, kept in outputs.items() if not _places(kept) & self._written}

        spared = unchanged(self._unsaved)
        left = {key: kept for key, kept in unchanged(self._stored).items() if key not in spared}
        # Autograd's nodes hold the hooks and so this object. If it held their outputs in turn, no garbage collector
        # would find the cycle.
        self._stored, self._unsaved = {}, {}
        return Stored(left, {key: tree_map_only(Tensor, _form, kept) for key, kept in spared.items()})


class Answering(_Watching):
    """Replays to ops in the block what `Keeping` stored during the same run, each output once."""

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self._left = stored

    def meet(self, key: Key, compute: Callable[[], Any], terms: int) -> Any:
        if key in self._left.outputs:
            return self._left.outputs.pop(key)
        if key in self._left.spared:
            # In their own memory, since they may be changed in place.
            return tree_map_only(Tensor, Tensor.contiguous, self._left.spared.pop(key))
        return compute()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _seen(memory: Tensor, start: int, form: Tensor) -> Tensor:
    """View of `memory` from byte `start`, with the shape and strides of `form`."""
    return torch.as_strided(memory[start : start + form.nbytes].view(form.dtype), form.shape, form.stride())


def _places(output: Any) -> set[int]:
    """Addresses of the storages of its tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(output)}


def _form(tensor: Tensor) -> Tensor:
    """An empty tensor's form: one element, expanded to the tensor's shape."""
    return tensor.new_full((), float("nan") if tensor.is_floating_point() else 0).expand(tensor.shape)
