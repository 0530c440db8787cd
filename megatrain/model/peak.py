"""Peak memory of a layer as a function of sequence length, fitted from measurements at three lengths.

What is alive behind each op is counted by storage. A layer does the same ops at any length, so behind each the count is
fitted as what is fixed, per token, and per token and position, and of all ops those remain that could be the largest at
some length; where the ops differ (loops over positions), the largest alone is fitted. No fit is below what it was made
of. Results as large as weights are not computed, and a product with a large weight, which is zero as all weights are
here, is not multiplied: zeros that nothing has written stand for both, with the shape and strides of the result.

Left out: what kernels take for themselves, but for the float32 result of a product that a cpu multiplies in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatrain.model.mapped_tensors import lazy_zeros
from megatrain.spec.layer_profile import Growth, Peak

LARGE_NUMEL = 1 << 20
"""Elements from which nothing is computed that reads or makes so many."""
APART_NBYTES = 128
"""By which the float32 result of a product that a cpu multiplies in bfloat16 keeps apart from what lies beside it."""

ADDING = ("aten::addmm", "aten::baddbmm")
PRODUCTS = (*ADDING, "aten::mm", "aten::bmm", "aten::_grouped_mm")
UNTOLD_VIEW = "aten::_unsafe_view"
"""A view whose schema does not say so."""
FACTORIES = ("aten::zeros", "aten::new_zeros", "aten::empty", "aten::new_empty", "aten::full", "aten::new_full")

Lengths = tuple[int, int, int]
Run = Callable[[int], tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]]
"""Something run on sequences of so many tokens with gradients: its output, its weights, and its inputs."""

_expired: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[assignment]

_IN_CHUNK: ContextVar[bool] = ContextVar("in chunk", default=False)


@contextmanager
def in_chunk() -> Iterator[None]:
    """What is made in the block is of the size of a chunk of tokens (`tokenwise`)."""
    token = _IN_CHUNK.set(True)
    try:
        yield
    finally:
        _IN_CHUNK.reset(token)


class Living(TorchDispatchMode):
    """Counts what ops make in the block, until it ends: `peak` is the most that was alive at one time."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        self._alive = [0, 0]

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        output = self.compute(op, args, kwargs)
        for each in _tensors(output):
            storage = each.untyped_storage()
            if not each.is_meta and storage._cdata not in self._known and storage._cdata not in given:
                nbytes, chunk = storage.nbytes(), _IN_CHUNK.get()
                self._known[storage._cdata] = StorageWeakRef(storage), nbytes, chunk
                self._alive[chunk] += nbytes
        self.peak = max(self.peak, self.nbytes)
        self.watch(op, output)
        return output

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return op(*args, **kwargs)

    def watch(self, op: Any, output: Any) -> None:
        """To be told of each op."""

    @property
    def nbytes(self) -> int:
        """That exist now."""
        return sum(self.alive)

    @property
    def alive(self) -> tuple[int, int]:
        """Bytes that exist now, outside chunks and in them."""
        for place in list(filter(_expired, self._known)):  # behind every op, over every tensor: no Python in between
            _, nbytes, chunk = self._known.pop(place)  # the reference has kept the place from being used again
            self._alive[chunk] -= nbytes
        return self._alive[0], self._alive[1]


class Recording(Living):
    """A run on zeros: at each op, what was alive on a device and on a cpu, each outside chunks and in them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, bool]] = []
        """Their names, and whether a kernel was at work that takes memory of its own."""
        self.rows: list[tuple[int, int, int, int]] = []
        self.kept: tuple[int, int] = (0, 0)
        """What was alive between forward and backward."""

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return _spared(op, args, kwargs)

    def watch(self, op: Any, output: Any) -> None:
        name = op._schema.name if hasattr(op, "_schema") else str(op)
        product = 2 * output.untyped_storage().nbytes() if name in PRODUCTS and output.element_size() == 2 else 0
        self.note(name, "attention" in name, product)

    def note(self, name: str, kernel: bool, product: int = 0) -> None:
        """product: bytes of a float32 result that a cpu has beside."""
        outside, inside = self.alive
        apart, chunk = (APART_NBYTES, _IN_CHUNK.get()) if product else (0, False)
        self.ops.append((name, kernel))
        self.rows.append((outside, inside, outside + apart + product * (not chunk), inside + product * chunk))


def recorded_forward(run: Run, tokens: int) -> Recording:
    """Of a run without gradients."""
    record = Recording()
    with torch.no_grad(), record:
        run(tokens)
    return record


def recorded_backward(run: Run, tokens: int, *, is_head: bool = False) -> Recording:
    """Of a run with gradients and its backward, which lets gradients of weights go. The output goes before and its
    gradient is not counted; of the head, whose logits the loss reads, both are."""
    record = Recording()
    with torch.enable_grad():
        with record:
            output, weights, inputs = run(tokens)
        wanted, edge = [each for each in weights if each.requires_grad], get_gradient_edge(output)
        if is_head:
            with record:
                gradient = torch.zeros_like(output)
                record.note("loss", kernel=True)
        else:
            gradient = torch.zeros_like(output)
            del output
        record.kept = record.alive
        hooks = [each.register_hook(_let_go) for each in wanted]
        with record:
            torch.autograd.grad([edge], [*inputs, *wanted], [gradient], allow_unused=True)
        for hook in hooks:
            hook.remove()
    return record


def _let_go(gradient: Tensor | None) -> Tensor | None:
    """In the place of a weight's gradient, which has been added up by now, if there is one."""
    return None if gradient is None else torch.zeros((), dtype=gradient.dtype).expand(gradient.shape)


# Fitting --------------------------------------------------------------------------------------------------------------


def measured(
    record: Callable[[int], Recording], lengths: Lengths, block: int = 1, rows: int = 1
) -> tuple[Peak, Growth]:
    """What runs at three lengths took, and what was alive between their forwards and backwards.

    record: of a run of so many tokens, in chunks of half of them where it has chunks. rows: sequences of each run.
    block: tokens to whose multiples each sequence is padded.
    """
    records = [record(tokens) for tokens in lengths]
    short, long, further = (-(-tokens // block) * block for tokens in lengths)
    padded = short, long, further
    found = [np.array(record.rows, dtype=float).reshape(-1, 2, 2) for record in records]
    if all(record.ops == records[0].ops for record in records):
        kernel = np.array([each for _, each in records[0].ops])
        device, host = np.stack(found).transpose(2, 0, 1, 3)  # lengths x ops x (outside, in chunks)
    else:
        kernel = np.array([any(each for _, each in records[0].ops)])
        device, host = (np.array([[(each[:, on].sum(-1).max(), 0.0)] for each in found]) for on in (0, 1))
    peak = Peak(_largest(device, kernel, padded, rows), _largest(host, kernel, padded, rows))
    return peak, growth_of([sum(record.kept) for record in records], padded, rows)


def growth_of(sizes: Sequence[int], lengths: Lengths, rows: int = 1) -> Growth:
    """Of something that had such sizes at three lengths of so many rows."""
    fixed, each, pair = _through(np.array(sizes, dtype=float), lengths)
    return Growth(float(fixed), float(each) / rows, float(pair) / rows)


def _largest(sizes: Any, kernel: Any, lengths: Lengths, rows: int) -> tuple[Growth, ...]:
    """Of all ops those that no other exceeds in every part. Chunks are of the tokens of all rows already."""
    fixed, each, pair = _through(sizes[..., 0], lengths)
    beside, inside, _ = _through(sizes[..., 1], [length / 2 for length in lengths])
    parts = np.unique(np.column_stack([fixed + beside, each, pair, inside, kernel]).round(3), axis=0)[::-1]
    return tuple(
        Growth(float(part[0]), float(part[1]) / rows, float(part[2]) / rows, float(part[3]), bool(part[4]))
        for part in parts
        if not ((parts >= part).all(1) & (parts > part).any(1)).any()
    )


def _through(sizes: Any, lengths: Sequence[float]) -> tuple[Any, Any, Any]:
    """What is fixed, per token, and per token and position of sizes (lengths first), none negative, at no length less
    than it was."""
    short, long, further = lengths
    slope = (sizes[1] - sizes[0]) / (long - short)
    pair = np.maximum(0.0, ((sizes[2] - sizes[1]) / (further - long) - slope) / (further - short))
    each = np.maximum(0.0, slope - pair * (short + long))
    left = [size - length * (each + pair * length) for size, length in zip(sizes, lengths, strict=True)]
    return np.maximum(0.0, np.max(left, axis=0)), each, pair


# Runs on zeros --------------------------------------------------------------------------------------------------------


class SkipLargeProducts(TorchDispatchMode):
    """In the block, products with large weights are zero without being multiplied. For runs on zeros alone."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        schema, kwargs = getattr(op, "_schema", None), kwargs or {}
        return _spared(op, args, kwargs) if schema is not None and schema.name in PRODUCTS else op(*args, **kwargs)


class TooLarge(RuntimeError):
    """What an op would make or multiply is too large to be computed for a test."""


class LimitNumel(TorchDispatchMode):
    """In the block, an op that would read or make more elements than `most` raises `TooLarge`; views do not."""

    supports_higher_order_operators = True

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        schema = getattr(op, "_schema", None)
        if schema is not None and not _is_view(schema) and _largest_numel(schema.name, args) > self._most:
            raise TooLarge
        return op(*args, **(kwargs or {}))


def _is_view(schema: Any) -> bool:
    return schema.name == UNTOLD_VIEW or any(each.alias_info is not None for each in schema.returns)


def _spared(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op gives; computed where that takes little."""
    schema = getattr(op, "_schema", None)
    if schema is None or _largest_numel(schema.name, args) < LARGE_NUMEL:
        return op(*args, **kwargs)
    if schema.is_mutable:
        return args[0]
    return op(*args, **kwargs) if _is_view(schema) else _not_computed(op, args, kwargs)


def _largest_numel(name: str, args: Sequence[Any]) -> int:
    """Elements of the largest tensor that an op reads, or that a product or a factory makes."""
    tensors, made = list(_tensors(args)), 0
    if name in PRODUCTS:
        left, right = tensors[1:3] if name in ADDING else tensors[:2]
        groups = tensors[2].numel() if name == "aten::_grouped_mm" and left.dim() == right.dim() == 2 else 1
        made = groups * left.numel() // max(1, left.shape[-1]) * int(right.shape[-1])
    if not tensors or name in FACTORIES:
        sizes = next((each for each in args if isinstance(each, list | tuple)), ())
        return prod(each for each in sizes if isinstance(each, int))
    return max(made, *(each.numel() for each in tensors))


def _not_computed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op would give, as unwritten zeros; computed after all where its form cannot be told."""

    def form(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    try:
        given = {**tree_map_only(Tensor, form, kwargs), **({"device": "meta"} if "device" in kwargs else {})}
        forms = op(*tree_map_only(Tensor, form, args), **given)
    except (RuntimeError, NotImplementedError):
        return op(*args, **kwargs)
    return tree_map_only(Tensor, _lazy_zeros_like, forms)


def _lazy_zeros_like(form: Tensor) -> Tensor:
    numel = 1 + sum((size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True))
    return lazy_zeros([numel if form.numel() else 0], form.dtype).as_strided(form.shape, form.stride())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Of the arguments or the results of an op."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
