"""The widest moments of a layer's backward, found by running it: every tensor from its making to its end.

A layer that is computed again and differentiated holds, at one time, what autograd has saved and has not used yet,
gradients of activations, and the gradient of a weight that is about to be added up. Which of these meet is decided by
the layer's code, so no formula per architecture could be right. Here a layer runs forward and backward on zeros at two
short lengths; each tensor that an op makes is followed by its storage, and what does not grow with the tokens is told
from what does by comparing the two runs, tensor by tensor. Of all moments those remain that could be the widest at some
length. Results as large as weights are not computed: they are stood for by tensors that take no memory; and a product
with a large weight, which is zero as all weights are, is zero without being multiplied.

Left out: what kernels take for themselves, but for two that are large: the gradient of the queries, summed in float32
by fused attention on an accelerator (Dao 2023, FlashAttention-2), and the float32 result of a product that a cpu
multiplies in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatrain.spec import Moment

LARGE_NUMEL = 1 << 22
"""Elements from which a result is not computed."""
SHORT = (8, 16)
"""Tokens of the two runs."""
LOOPED = (24, 48)
"""Tokens of two runs of a layer that does more at more tokens."""

ADDING = ("aten::addmm", "aten::baddbmm")
PRODUCTS = (*ADDING, "aten::mm", "aten::bmm", "aten::_grouped_mm")
APART_NBYTES = 128
"""By which the float32 result of a product that a cpu multiplies in bfloat16 keeps apart from what lies beside it."""
FACTORIES = ("aten::zeros", "aten::new_zeros", "aten::empty", "aten::new_empty", "aten::full", "aten::new_full")

Differentiable = Callable[[int], tuple[Tensor, Sequence[Tensor], Tensor]]
"""A layer run on so many tokens with gradients: its output, its weights and arguments, and its input."""

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
    """Follows what ops make, while they run in the block: `peak` is the most bytes that existed at one time.

    What was there before does not count. `watch(op, args, output)` is called behind each op, its result included.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: dict[int, int] = {}
        """Storage -> the tensor that it belongs to, by number."""
        self._refs: list[StorageWeakRef | None] = []
        self.sizes: list[int] = []
        """Bytes of each tensor, in the order of making."""
        self.alive: set[int] = set()
        """Numbers of those that exist."""
        self._nbytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        output = self.compute(op, args, kwargs)
        for each in _tensors(output):
            if not each.is_meta:
                storage = each.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in given:
                    self._enter(each, storage)
        self.peak = max(self.peak, self.nbytes)
        self.watch(op, args, output)
        return output

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return op(*args, **kwargs)

    def watch(self, op: Any, args: Sequence[Any], output: Any) -> None:
        """To be told of each op."""

    def measure(self, made: Tensor) -> int:
        return made.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        """That exist now."""
        self._forget()
        return self._nbytes

    def number_of(self, made: Tensor) -> int | None:
        """Which of the tensors it is, or a view of."""
        return self._known.get(made.untyped_storage()._cdata)

    def _enter(self, made: Tensor, storage: Any) -> None:
        number = len(self.sizes)
        self._known[storage._cdata] = number
        ref = StorageWeakRef(storage)
        assert ref.cdata == storage._cdata  # which `_forget` asks about
        self._refs.append(ref)
        self.sizes.append(self.measure(made))
        self.alive.add(number)
        self._nbytes += self.sizes[number]

    def _forget(self) -> None:
        for place in list(filter(_expired, self._known)):  # behind every op, over every tensor: no Python in between
            # Until here the reference has kept the place from being used again.
            number = self._known.pop(place)
            self._refs[number] = None
            self.alive.discard(number)
            self._nbytes -= self.sizes[number]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Of the arguments or the results of an op."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


# A layer's own --------------------------------------------------------------------------------------------------------

Parts = tuple[float, float, float, float]
"""Bytes of a tensor: fixed, per token, per token and position, per token of a chunk."""


class Sparing(TorchDispatchMode):
    """In the block, products with large weights are zero without being multiplied. For runs on zeros alone."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        schema = getattr(op, "_schema", None)
        if schema is None or schema.name not in PRODUCTS:
            return op(*args, **(kwargs or {}))
        return _multiplied(op, args, kwargs or {})


class Recording(Living):
    """A run on zeros: every tensor's bytes and kind, and at each op what there was."""

    def __init__(self) -> None:
        super().__init__()
        self.chunked: list[bool] = []
        """Of each tensor, whether it is of the size of a chunk."""
        self.moments: list[tuple[frozenset[int], int | None, bool]] = []
        """The tensors that there were, the one that a product has just made, and whether attention was at work."""
        self.sums: list[int] = []
        """Bytes of the tensors that there were at each moment."""

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return _spared(op, args, kwargs)

    def measure(self, made: Tensor) -> int:
        self.chunked.append(_IN_CHUNK.get())
        return max(made.untyped_storage().nbytes(), made.numel() * made.element_size())

    def watch(self, op: Any, args: Sequence[Any], output: Any) -> None:
        name = op._schema.name if hasattr(op, "_schema") else str(op)
        product = self.number_of(output) if name in PRODUCTS and output.element_size() == 2 else None
        self.moments.append((frozenset(self.alive), product, "attention" in name))
        self.sums.append(self._nbytes)


def moments_of(run: Differentiable, lengths: tuple[int, int]) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """The widest moments of a layer that runs forward and backward: on an accelerator, and on a cpu.

    run: for so many tokens of one sequence, the layer's output, its weights and arguments, and its input. Nothing where
    the layer does other things at another length, so that its tensors cannot be told apart.
    """
    return widest_of([recorded(run, length) for length in lengths], lengths)


def widest_of(records: Sequence[Recording], lengths: tuple[int, int]) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """As `moments_of`, of runs at the two lengths."""
    short, long = records
    if short.moments != long.moments or short.chunked != long.chunked:
        return (), ()
    parts = _parts_of(short, long, lengths)
    device, host = set[tuple[Parts, bool]](), set[tuple[Parts, bool]]()
    for alive, product, attends in short.moments:
        there = _sum(parts[number] for number in alive)
        device.add((there, attends))
        beside = (
            () if product is None else ((APART_NBYTES, 0.0, 0.0, 0.0), *(parts[product],) * 2)
        )  # its float32 result
        host.add((_sum((there, *beside)), attends))
    return _widest(device), _widest(host)


def moments_anywhere(
    run: Differentiable, lengths: tuple[int, int]
) -> tuple[tuple[Moment, ...], tuple[Moment, ...], tuple[int, int]]:
    """As `moments_of`, also for layers that pad sequences to blocks of their own (`lengths` are not `SHORT`) or go
    through them in loops, and the two lengths that tell how such a layer grows."""
    if lengths == SHORT:
        device, host = moments_of(run, lengths)
        if device:
            return device, host, lengths
        lengths = LOOPED
    return *_of_peaks([recorded(run, length) for length in _three(lengths)], lengths), lengths


def forward_moments(run: Differentiable, lengths: tuple[int, int]) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """The widest moments of a forward without gradients, for lengths as `moments_anywhere` has found them."""

    def record(tokens: int) -> Recording:
        found = Recording()
        with torch.no_grad(), found:
            run(tokens)
        return found

    if lengths == SHORT:
        device, host = widest_of([record(tokens) for tokens in lengths], lengths)
        if device:
            return device, host
    return _of_peaks([record(tokens) for tokens in _three(lengths)], lengths)


def _three(lengths: tuple[int, int]) -> tuple[int, int, int]:
    """Lengths that tell what is fixed, what grows with the tokens, and what with their square."""
    return *lengths, 2 * lengths[1]


def _of_peaks(records: Sequence[Recording], lengths: tuple[int, int]) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """A moment that is as wide as the widest of three runs."""
    found = []
    for on_cpu in (False, True):
        peaks = [
            max(
                total + (APART_NBYTES + 2 * record.sizes[made] if on_cpu and made is not None else 0)
                for total, (_, made, _) in zip(record.sums, record.moments, strict=True)
            )
            for record in records
        ]
        grows = through(peaks, _three(lengths))
        found.append((Moment(*grows, attends=any(each[2] for each in records[0].moments)),))
    return found[0], found[1]


def through(peaks: Sequence[int], lengths: tuple[int, int, int]) -> tuple[float, float, float]:
    """Bytes that are fixed, per token, and per token and position, none of them negative, of a sum that has been seen
    at three lengths and is said to be no less there."""
    (short, long, further), (less, more, most) = lengths, peaks
    slope = (more - less) / (long - short)
    by_length = max(0.0, ((most - more) / (further - long) - slope) / (further - short))
    each = max(0.0, slope - by_length * (short + long))
    fixed = max(
        0.0, *(peak - length * (each + by_length * length) for peak, length in zip(peaks, lengths, strict=True))
    )
    return fixed, each, by_length


def moment_at(place: int, records: Sequence[Recording], lengths: tuple[int, int]) -> Moment:
    """What there was at one op of runs that have all ops alike."""
    parts = _parts_of(records[0], records[1], lengths)
    return Moment(*_sum(parts[number] for number in records[0].moments[place][0]))


def _parts_of(short: Recording, long: Recording, lengths: tuple[int, int]) -> list[Parts]:
    sizes = zip(short.sizes, long.sizes, short.chunked, strict=True)
    return [_parts(less, more, chunked, lengths) for less, more, chunked in sizes]


def recorded(run: Differentiable, length: int) -> Recording:
    record = Recording()
    with torch.enable_grad():
        with record:
            output, others, given = run(length)
        gradient = torch.zeros_like(output)  # there before the backward
        wanted, edge = [each for each in others if each.requires_grad], get_gradient_edge(output)
        del output  # as the engine does
        with record, letting_go(wanted):
            torch.autograd.grad([edge], [given, *wanted], [gradient], allow_unused=True)
    return record


@contextmanager
def letting_go(leaves: Sequence[Tensor]) -> Iterator[None]:
    """In the block, gradients of these are forgotten as soon as they are complete."""
    hooks = [each.register_hook(_let_go) for each in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _let_go(gradient: Tensor | None) -> Tensor | None:
    """In the place of a weight's gradient, which has been added up by now, if there is one."""
    return None if gradient is None else torch.zeros((), dtype=gradient.dtype).expand(gradient.shape)


def growth(less: int, more: int, lengths: tuple[int, int]) -> tuple[float, float, float]:
    """How a tensor grows that has `less` and `more` bytes at two lengths: fixed, per token, per token and position."""
    short, long = lengths
    if more == less:
        return float(less), 0.0, 0.0
    by_length = max(0.0, (more / long - less / short) / (long - short))
    if by_length:
        return 0.0, less / short - by_length * short, by_length
    each = (more - less) / (long - short)
    return max(0.0, less - each * short), each, 0.0


def _parts(less: int, more: int, chunked: bool, lengths: tuple[int, int]) -> Parts:
    fixed, each, by_length = growth(less, more, lengths)
    return (fixed, 0.0, 0.0, 2 * each) if chunked else (fixed, each, by_length, 0.0)  # a chunk is half the sequence


def _sum(parts: Iterable[Parts]) -> Parts:
    fixed = each = by_length = chunk = 0.0
    for part in parts:
        fixed, each, by_length, chunk = fixed + part[0], each + part[1], by_length + part[2], chunk + part[3]
    return fixed, each, by_length, chunk


def _widest(moments: Iterable[tuple[Parts, bool]]) -> tuple[Moment, ...]:
    """Those that no other exceeds in every part, widest per token first."""
    left = set(moments)
    kept = [
        (parts, attends)
        for parts, attends in left
        if not any(
            (other, more) != (parts, attends)
            and more >= attends
            and all(a >= b for a, b in zip(other, parts, strict=True))
            for other, more in left
        )
    ]
    return tuple(
        Moment(*parts, attends) for parts, attends in sorted(kept, key=lambda each: (each[0][1], each), reverse=True)
    )


def _spared(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op gives; computed where that takes little."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return op(*args, **kwargs)
    if schema.is_mutable and isinstance(args[0], Tensor) and torch._debug_has_internal_overlap(args[0]) == 1:
        return args[0]  # a part of what takes no memory
    if _result_numel(schema.name, args) >= LARGE_NUMEL:
        if schema.is_mutable:
            return args[0]
        if any(each.alias_info is not None for each in schema.returns):
            return op(*args, **kwargs)  # a view
        return _hollow(op, args, kwargs)
    return _multiplied(op, args, kwargs) if schema.name in PRODUCTS else op(*args, **kwargs)


def _multiplied(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """A product; of a large weight, which is zero, zeros."""
    if max(each.numel() for each in args if isinstance(each, Tensor)) < LARGE_NUMEL:
        return op(*args, **kwargs)  # type: ignore[no-any-return]
    found: Tensor = _hollow(op, args, kwargs)
    return torch.zeros_like(found, memory_format=torch.contiguous_format)


def _result_numel(name: str, args: Sequence[Any]) -> int:
    """Elements that the result of an op could have."""
    tensors = list(_tensors(args))
    if name in PRODUCTS:
        left, right = tensors[1:3] if name in ADDING else tensors[:2]
        groups = tensors[2].numel() if len(tensors) > 2 and left.dim() == right.dim() == 2 and name not in ADDING else 1
        return groups * left.numel() // max(1, left.shape[-1]) * int(right.shape[-1])
    if not tensors or name in FACTORIES:
        sizes = next((each for each in args if isinstance(each, list | tuple)), ())
        return prod(each for each in sizes if isinstance(each, int))
    return max(each.numel() for each in tensors)


def _hollow(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op would give, as zeros that take no memory; computed after all where its form cannot be told."""

    def form(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    try:
        given = {**tree_map_only(Tensor, form, kwargs), **({"device": "meta"} if "device" in kwargs else {})}
        forms = op(*tree_map_only(Tensor, form, args), **given)
    except (RuntimeError, NotImplementedError):
        return op(*args, **kwargs)
    return tree_map_only(Tensor, lambda each: torch.zeros((), dtype=each.dtype).expand(each.shape), forms)
