"""Outputs that are worth keeping of a layer's forward: those of its large products, and of attention.

Between a kept graph and an input from which everything is computed again lies what is dear to compute and small to
hold. Which ops that are is decided by op, never by model: a product whose rows are at least half as long as the hidden
state (so many operations for each value kept), and whatever attends. `Keeping` stores their outputs while a layer runs
forward, `Answering` hands them out while it runs again, each at the place that it came from, and all else is computed.
So the graph that grows is the same, and so is each bit of it.

In kind it is PyTorch's selective checkpointing (`torch.utils.checkpoint`), which proved unfit in three points: an
output that the layer then changes in place is an error there, and is computed again here; attention with dropout draws
numbers that what follows counts on, so here it is never stored; and the last product of a layer, behind which autograd
saves nothing, is stored or computed for nobody there. Here it is *spared*: answered with NaNs that no gradient sees.

Left out: products of activations with each other (`bmm`, so eager attention), whose outputs are as large as dear.
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
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatrain.errors import ModelError

Level = Literal["chosen", "attention"]
"""Products and attention, or attention alone; the words of `spec.Keep`."""

ALIGNMENT = 16
"""Bytes of the widest load that kernels use."""

PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_grouped_mm": 0}
"""Name of an op -> which of its arguments has rows as long as the sums that make each value."""

Key = tuple[Any, int, tuple[torch.Size, ...]]
"""An op, how many of its kind went before it in the run of the layer, and the shapes of what it was given."""


@cache
def attends(op: Any) -> bool:
    """Whether the op is fused attention, by the name that it has in whatever library it is from."""
    name = op._schema.name.lower() if hasattr(op, "_schema") else ""
    return ("attention" in name or "flash_attn" in name) and "backward" not in name and "choice" not in name


@cache
def _rows_of(op: Any) -> int | None:
    return PRODUCTS.get(op._schema.name) if hasattr(op, "_schema") else None


def _draws(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op that attends has dropout."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    return any(value for name, value in given.items() if name in ("dropout_p", "p_dropout"))


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor in memory that is not its own."""

    start: int
    """Byte at which it begins."""
    form: Tensor
    """Its shape, strides and dtype, without memory."""


@dataclass(slots=True)
class Stored:
    """What is left of one run of a layer, to answer the next with: outputs, and the forms of those that are spared."""

    outputs: dict[Key, Any] = field(default_factory=dict)
    spared: dict[Key, Any] = field(default_factory=dict)

    packed: dict[Key, Any] = field(default_factory=dict)
    """Outputs that lie in memory which is not theirs: each tensor as its first byte there and a form without memory."""

    def tensors(self) -> list[Tensor]:
        return [tensor for output in self.outputs.values() for tensor in _tensors(output)]

    def pack(self, memory: Tensor) -> None:
        """Copy all outputs on its device to `memory`, uint8[bytes], one behind the other, and let go of them.

        What it has no room for is let go of as well, and computed again.
        """
        free = 0
        for key, output in self.outputs.items():
            leaves = [leaf for leaf in _tensors(output) if leaf.device == memory.device]
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
        """The outputs again, as views of `memory`, which holds what `pack` has left in it."""
        for key, output in self.packed.items():
            self.outputs[key] = tree_map_only(Packed, lambda part: _seen(memory, part.start, part.form), output)
        self.packed = {}

    def finish(self, where: str) -> None:
        """Raises `ModelError` where the layer has not asked for all that was stored: it ran in another way."""
        if left := (*self.outputs, *self.spared):
            what = f"computes otherwise the second time: no {', '.join(sorted({str(op) for op, *_ in left}))}"
            raise ModelError(what, where=where, fix="keep inputs or graphs instead: policy.activations_by_layer")


_UNSEEN: ContextVar[bool] = ContextVar("unseen", default=False)


def watched() -> bool:
    """Whether outputs of ops are being stored or answered. Compiled code has no such ops."""
    return isinstance(_get_current_dispatch_mode(), _Watching)


@contextmanager
def unseen() -> Iterator[None]:
    """What runs in the block is neither stored nor answered: it is made chunk by chunk, so as not to exist whole."""
    token = _UNSEEN.set(True)
    try:
        yield
    finally:
        _UNSEEN.reset(token)


class _Watching(TorchDispatchMode):
    """Names each op that may be kept by its kind and its place among those of its kind."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._met: Counter[Any] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rows = _rows_of(op)
        if _UNSEEN.get() or (rows is None and (not attends(op) or _draws(op, args, kwargs))):
            return op(*args, **kwargs)
        key = op, self._met[op], tuple(each.shape for each in args if isinstance(each, Tensor))
        self._met[op] += 1
        return self.meet(key, lambda: op(*args, **kwargs), 0 if rows is None else int(args[rows].shape[-1]))

    def meet(self, key: Key, compute: Callable[[], Any], terms: int) -> Any:
        """terms: of the sum that each value of a product is; 0 for attention."""
        raise NotImplementedError


class Keeping(_Watching):
    """Stores outputs of ops that run under it, with gradients on. `width` is that of the hidden state."""

    def __init__(self, level: Level, width: int) -> None:
        super().__init__()
        self.flops: dict[Key, float] = {}
        """Operations of each product."""
        self._least = (width + 1) // 2 if level == "chosen" else float("inf")
        self._stored: dict[Key, Any] = {}
        self._unsaved: dict[Key, Any] = {}
        """What has come since autograd last saved a tensor."""
        self._written: set[int] = set()
        """Where the storages lie that were changed in place; versions do not tell, since `_unsafe_view` hides them."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if hasattr(op, "_schema") and op._schema.is_mutable:
            given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | (kwargs or {})
            for argument in op._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._written |= _places(given.get(argument.name))
        return super().__torch_dispatch__(op, types, args, kwargs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A layer runs; what autograd would save is let go of."""
        hooks: Any = torch.autograd.graph.saved_tensors_hooks
        with torch.enable_grad(), hooks(self._saves, lambda nothing: nothing), self:
            yield

    def _saves(self, tensor: Tensor) -> None:
        self._unsaved.clear()

    def meet(self, key: Key, compute: Callable[[], Any], terms: int) -> Any:
        output = compute()
        if terms:
            self.flops[key] = 2.0 * output.numel() * terms
        alone = tree_map_only(Tensor, torch.Tensor.detach, output)  # its graph would hold our hook, and we the graph
        self._written -= _places(alone)  # what was changed there before has died, and its memory is used again
        if not terms or terms >= self._least:
            self._stored[key] = alone
        self._unsaved[key] = alone
        return output

    def stored(self) -> Stored:
        """What is left of the run: nothing that has been changed in place since."""

        def unchanged(outputs: dict[Key, Any]) -> dict[Key, Any]:
            return {key: kept for key, kept in outputs.items() if not _places(kept) & self._written}

        spared = unchanged(self._unsaved)
        left = {key: kept for key, kept in unchanged(self._stored).items() if key not in spared}
        # Autograd's nodes hold the hooks and so this object; what they have made must not be held by it in turn, in a
        # circle that no collector sees.
        self._stored, self._unsaved = {}, {}
        return Stored(left, {key: tree_map_only(Tensor, _form, kept) for key, kept in spared.items()})


class Answering(_Watching):
    """Answers ops that run under it with what `Keeping` has stored of the same run; each output once."""

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self._left = stored

    def meet(self, key: Key, compute: Callable[[], Any], terms: int) -> Any:
        if key in self._left.outputs:
            return self._left.outputs.pop(key)
        if key in self._left.spared:
            return tree_map_only(Tensor, _filled, self._left.spared.pop(key))
        return compute()


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _seen(memory: Tensor, start: int, form: Tensor) -> Tensor:
    """What lies in memory from `start` on, in the shape and the strides of `form`."""
    return torch.as_strided(memory[start : start + form.nbytes].view(form.dtype), form.shape, form.stride())


def _places(output: Any) -> set[int]:
    """Where the storages of its tensors lie."""
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(output)}


def _form(tensor: Tensor) -> Tensor:
    """One element of its kind, seen in its shape."""
    return tensor.new_full((), float("nan") if tensor.is_floating_point() else 0).expand(tensor.shape)


def _filled(form: Tensor) -> Tensor:
    return form.contiguous()  # memory of its own, for what changes it in place
