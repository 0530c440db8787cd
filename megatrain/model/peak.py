"""Fits the peak memory of a layer as a function of sequence length, from runs at three lengths, and counts FLOPs.

After each op, the bytes of live storages are counted. A layer runs the same ops at any length, so the count after
each op is fitted as a constant, a per-token and a per-token-and-position term, and the ops that could have the
largest count at some length are kept; if the ops differ (loops over positions), only the largest count is fitted. A
fit is never below the runs it was made from. Results as large as weights are not computed, and products with a large
weight (zero, as all weights are here) are not multiplied: unwritten zeros with the result's shape and strides stand
for both.

Attention runs as on CUDA inside `DeviceAttention`. PyTorch's fused CPU attention needs queries, keys and values of one
width and no dropout. For other models (DeepSeek's queries and keys are wider than its values) a CPU materialises the
scores of all positions, while CUDA runs its memory-efficient kernel. ROCm is left out: its kernel needs one width too.

Memory that kernels allocate themselves is not seen, except the float32 result of a bfloat16 product on a CPU. PyTorch's
`MemTracker` counts the same bytes in 2.5 to 5 times the time, only at the peak, and not under `autograd.grad`; its
`FakeTensorMode` takes six times as long as a run on these few tokens, and refuses fused experts in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from megatrain.model.mapped_tensors import lazy_zeros
from megatrain.spec.layer_profile import Growth, Peak

LARGE_NUMEL = 1 << 20
"""Ops that read or make this many elements are not computed."""
APART_NBYTES = 128
"""Padding beside the float32 result of a bfloat16 product on a CPU, in bytes."""

ADDING = ("aten::addmm", "aten::baddbmm")
PRODUCTS = (*ADDING, "aten::mm", "aten::bmm", "aten::_grouped_mm")
UNTOLD_VIEW = "aten::_unsafe_view"
"""A view that is not declared as one in its schema."""
ATTENTION = nn.functional.scaled_dot_product_attention
CUDA_ALIGNMENT = 16
"""CUDA's memory-efficient attention needs rows of a head, in bytes, to be a multiple of this."""
CUDA_ONLY = "aten::_scaled_dot_product_efficient_attention"
"""The op of that kernel; its backward's name begins so, too."""
FACTORIES = ("aten::zeros", "aten::new_zeros", "aten::empty", "aten::new_empty", "aten::full", "aten::new_full")

Lengths = tuple[int, int, int]
Run = Callable[[int], tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]]
"""Runs something with gradients on a number of tokens; returns its output, weights and inputs."""


def _with_heads_of(query: Sequence[int], *shapes: Sequence[int]) -> list[tuple[int, ...]]:
    """Shapes [batch, heads, ...] of attention with as many heads as the query: torch 2.11 counts no others."""
    return [(shape[0], query[1], *shape[2:]) for shape in shapes]


_FLOPS: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(
        lambda query, *shapes, **_: sdpa_flop_count(query, *_with_heads_of(query, *shapes[:2]))
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(
        lambda given, query, *shapes, **_: sdpa_backward_flop_count(given, query, *_with_heads_of(query, *shapes[:2]))
    ),
}
"""Op -> a function that counts its operations; the library has none for attention on a CPU."""
_expired: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[assignment]
_owners: Callable[[int], int] = torch._C._storage_Use_Count

_IN_CHUNK: ContextVar[bool] = ContextVar("in chunk", default=False)


@contextmanager
def in_chunk() -> Iterator[None]:
    """In the block, tensors have the size of a chunk of tokens (`token_wise`), not of the sequence."""
    token = _IN_CHUNK.set(True)
    try:
        yield
    finally:
        _IN_CHUNK.reset(token)


class _Watching(TorchDispatchMode):
    """Sees each op of a run that nothing compiles: torch's guard against that costs as much as a small op."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Living(_Watching):
    """In the block, counts bytes of live tensors made by ops: `peak` is the largest total."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        self._alive = [0, 0]

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in tensors_of(*args, *kwargs.values())}
        output = self.compute(op, args, kwargs)
        for tensor in tensors_of(output):
            storage = tensor.untyped_storage()
            if not tensor.is_meta and storage._cdata not in self._known and storage._cdata not in given:
                nbytes, chunk = storage.nbytes(), _IN_CHUNK.get()
                self._known[storage._cdata] = StorageWeakRef(storage), nbytes, chunk
                self._alive[chunk] += nbytes
        self.peak = max(self.peak, self.nbytes)
        self.watch(op, output)
        return output

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return op(*args, **kwargs)

    def watch(self, op: Any, output: Any) -> None:
        """Called after each op."""

    @property
    def nbytes(self) -> int:
        """Bytes alive now."""
        return sum(self.alive)

    @property
    def alive(self) -> tuple[int, int]:
        """Bytes alive now, (outside chunks, in chunks)."""
        for place in list(filter(_expired, self._known)):  # after every op, over every tensor: no Python loop
            _, nbytes, chunk = self._known.pop(place)  # the reference kept the address from being reused
            self._alive[chunk] -= nbytes
        return self._alive[0], self._alive[1]


class Recording(Living):
    """Records, after each op of a run on zeros, the live bytes on a device and on a CPU, each outside chunks and
    in them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, bool]] = []
        """(name of the op, whether its kernel allocates memory of its own)."""
        self.rows: list[tuple[int, int, int, int]] = []
        self.kept: tuple[int, int] = (0, 0)
        """Bytes alive between forward and backward."""
        self.flops = 0
        """Floating-point operations of products and attention."""

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        output = _spared(op, args, kwargs)
        if (count := _FLOPS.get(getattr(op, "overloadpacket", None))) is not None:
            self.flops += count(*args, **kwargs, out_val=output)
        return output

    def watch(self, op: Any, output: Any) -> None:
        name = op._schema.name if hasattr(op, "_schema") else str(op)
        product = 2 * output.untyped_storage().nbytes() if name in PRODUCTS and output.element_size() == 2 else 0
        self.note(name, "attention" in name, product)

    def note(self, name: str, kernel: bool, product: int = 0) -> None:
        """product: bytes of the extra float32 result that a CPU has."""
        outside, inside = self._alive  # nothing has been freed since the op
        apart, chunk = (APART_NBYTES, _IN_CHUNK.get()) if product else (0, False)
        self.ops.append((name, kernel))
        self.rows.append((outside, inside, outside + apart + product * (not chunk), inside + product * chunk))


def may_be_overwritten(output: Tensor) -> bool:
    """Whether an output's memory may be overwritten before its backward: no saved tensor of autograd and no tensor of
    the model's code shares its storage. output: detached, and the caller's only tensor in that storage."""
    storage = output.untyped_storage()  # whose owners are now `output` and this variable
    return output.is_contiguous() and output.nbytes == storage.nbytes() and _owners(storage._cdata) == 2


def recorded_forward(run: Run, tokens: int) -> Recording:
    """Record a forward without gradients."""
    record = Recording()
    with torch.no_grad(), record:
        run(tokens)
    return record


def recorded_backward(run: Run, tokens: int, *, is_head: bool = False) -> Recording:
    """Record a forward with gradients and its backward, which drops weight gradients.

    The output is freed first and its gradient not counted, except for the head (`is_head`), whose logits the loss
    reads: their gradient takes their memory, or memory of its own if something else may read them.
    """
    record = Recording()
    with torch.enable_grad():
        with record:
            output, weights, inputs = run(tokens)
        wanted, edge = [weight for weight in weights if weight.requires_grad], get_gradient_edge(output)
        output = output.detach()
        if is_head:
            with record:
                gradient = output if may_be_overwritten(output) else torch.zeros_like(output)
                record.note("loss", kernel=True)
        else:
            gradient = torch.zeros_like(output)
        del output
        record.kept = record.alive
        hooks = [weight.register_hook(_let_go) for weight in wanted]
        with record:
            torch.autograd.grad([edge], [*inputs, *wanted], [gradient], allow_unused=True)
        for hook in hooks:
            hook.remove()
    return record


def _let_go(gradient: Tensor | None) -> Tensor | None:
    """Replaces a weight's gradient, if any, which has been accumulated by now."""
    return None if gradient is None else torch.zeros((), dtype=gradient.dtype).expand(gradient.shape)


# Fitting --------------------------------------------------------------------------------------------------------------


def measured(
    record: Callable[[int], Recording], lengths: Lengths, block: int = 1, rows: int = 1
) -> tuple[Peak, Growth]:
    """(peak, bytes kept between forward and backward), fitted from runs at three lengths.

    record: tokens -> recording of a run, with chunks of half of the tokens if it has chunks. rows: sequences per run.
    block: sequences are padded to multiples of this many tokens.
    """
    records = [record(tokens) for tokens in lengths]
    short, long, further = (-(-tokens // block) * block for tokens in lengths)
    padded = short, long, further
    sizes = [np.array(record.rows, dtype=float).reshape(-1, 2, 2) for record in records]
    if all(record.ops == records[0].ops for record in records):
        kernel = np.array([allocates for _, allocates in records[0].ops])
        device, host = np.stack(sizes).transpose(2, 0, 1, 3)  # lengths x ops x (outside, in chunks)
    else:
        kernel = np.array([any(allocates for _, allocates in records[0].ops)])
        device, host = (np.array([[(size[:, on].sum(-1).max(), 0.0)] for size in sizes]) for on in (0, 1))
    peak = Peak(_largest(device, kernel, padded, rows), _largest(host, kernel, padded, rows))
    return peak, growth_of([sum(record.kept) for record in records], padded, rows)


def measured_of_rows(records: Sequence[Recording], values: int, value_nbytes: float) -> Peak:
    """The peak for rows that are alike, fitted from runs of one row and of two: a constant, and a part per value of a
    row's images, of which it has so many. value_nbytes: bytes of a value, which a device holds besides. Empty without
    runs.
    """
    if not records:
        return Peak()
    sizes = [np.array(record.rows, dtype=float).reshape(-1, 2, 2).sum(-1) for record in records]
    if records[0].ops != records[1].ops:
        sizes = [size.max(0, keepdims=True) for size in sizes]
    fits = []
    for on, beside in ((0, value_nbytes), (1, 0.0)):
        one, two = (size[:, on] for size in sizes)
        slope = np.maximum(0.0, two - one)
        parts = np.unique(np.column_stack([np.maximum(0.0, one - slope), slope]), axis=0)[::-1]
        largest = parts[_is_largest(parts)]
        fits.append(tuple(Growth(float(base), per_value=float(rise) / values + beside) for base, rise in largest))
    return Peak(*fits)


def growth_of(sizes: Sequence[int], lengths: Lengths, rows: int = 1) -> Growth:
    """Fit of a size measured at three lengths of `rows` rows."""
    fixed, per_token, pair = _through(np.array(sizes, dtype=float), lengths)
    return Growth(float(fixed), float(per_token) / rows, float(pair) / rows)


def _largest(sizes: Any, kernel: Any, lengths: Lengths, rows: int) -> tuple[Growth, ...]:
    """The fits of those ops that no other op exceeds in every term. Chunks already count the tokens of all rows."""
    fixed, per_token, pair = _through(sizes[..., 0], lengths)
    beside, inside, _ = _through(sizes[..., 1], [length / 2 for length in lengths])
    parts = np.unique(np.column_stack([fixed + beside, per_token, pair, inside, kernel]).round(3), axis=0)[::-1]
    return tuple(
        Growth(float(part[0]), float(part[1]) / rows, float(part[2]) / rows, float(part[3]), bool(part[4]))
        for part in parts[_is_largest(parts)]
    )


def _is_largest(parts: Any) -> Any:
    """bool[n]: which rows of [n, terms], no two alike, no other row reaches in every term."""
    reached = (parts[None] >= parts[:, None]).all(-1)
    return reached.sum(1) == 1  # by itself


def _through(sizes: Any, lengths: Sequence[float]) -> tuple[Any, Any, Any]:
    """(constant, per token, per token and position) of sizes[lengths, ...], none negative, never below a measured
    size."""
    short, long, further = lengths
    slope = (sizes[1] - sizes[0]) / (long - short)
    pair = np.maximum(0.0, ((sizes[2] - sizes[1]) / (further - long) - slope) / (further - short))
    per_token = np.maximum(0.0, slope - pair * (short + long))
    left = [size - length * (per_token + pair * length) for size, length in zip(sizes, lengths, strict=True)]
    return np.maximum(0.0, np.max(left, axis=0)), per_token, pair


# Runs on zeros --------------------------------------------------------------------------------------------------------


class SkipLargeProducts(_Watching):
    """In the block, products with large weights return zeros without multiplying. Only for runs on zeros."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        schema, kwargs = getattr(op, "_schema", None), kwargs or {}
        is_spared = schema is not None and (schema.name in PRODUCTS or schema.name.startswith(CUDA_ONLY))
        return _spared(op, args, kwargs) if is_spared else op(*args, **kwargs)


class DeviceAttention(TorchFunctionMode):
    """In the block, attention that CUDA fuses and a CPU does not calls CUDA's memory-efficient op. `Recording` and
    `SkipLargeProducts` answer it with zeros of the shapes and strides it has there.

    calls: how many calls did so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        if func is not ATTENTION or not _only_cuda_fuses(given):
            return func(*args, **kwargs)
        self.calls += 1
        query, key, value = (given[name] for name in ("query", "key", "value"))
        bias = given.get("attn_mask")
        if bias is not None:
            if bias.dtype == torch.bool:
                bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        rest = given.get("dropout_p", 0.0), given.get("is_causal", False)
        attend = torch.ops.aten._scaled_dot_product_efficient_attention
        return attend(query, key, value, bias, wanted, *rest, scale=given.get("scale"))[0]


def _only_cuda_fuses(given: dict[str, Any]) -> bool:
    """Whether CUDA's memory-efficient kernel supports these arguments of attention and the CPU's fused one does not."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    rows = [tensor.shape[-1] * tensor.element_size() for tensor in (query, value)]
    return (
        not (query.shape[-1] == value.shape[-1] and not given.get("dropout_p"))
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.dim() == 4
        and query.shape[-1] == key.shape[-1]
        and not any(nbytes % CUDA_ALIGNMENT for nbytes in rows)
    )


class TooLarge(RuntimeError):
    """An op would make or multiply more than a test may compute."""


class LimitNumel(_Watching):
    """In the block, an op that reads or makes more than `most` elements raises `TooLarge`, unless it is a view."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        schema = getattr(op, "_schema", None)
        if schema is not None and not _is_view(schema) and _largest_numel(schema.name, args) > self._most:
            raise TooLarge
        return op(*args, **(kwargs or {}))


def _is_view(schema: Any) -> bool:
    return schema.name == UNTOLD_VIEW or any(result.alias_info is not None for result in schema.returns)


def _spared(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an op, computed only if that is cheap."""
    schema = getattr(op, "_schema", None)
    if schema is not None and schema.name.startswith(CUDA_ONLY):
        return _fused_on_cuda(op, args, kwargs)
    if schema is None or _largest_numel(schema.name, args) < LARGE_NUMEL:
        return op(*args, **kwargs)
    if schema.is_mutable:
        return args[0]
    return op(*args, **kwargs) if _is_view(schema) else _not_computed(op, args, kwargs)


def _largest_numel(name: str, args: Sequence[Any]) -> int:
    """Elements of the largest tensor that an op reads, or that a product or factory makes."""
    tensors, made = tensors_of(*args), 0
    if name in PRODUCTS:
        left, right = tensors[1:3] if name in ADDING else tensors[:2]
        groups = tensors[2].numel() if name == "aten::_grouped_mm" and left.dim() == right.dim() == 2 else 1
        made = groups * left.numel() // max(1, left.shape[-1]) * int(right.shape[-1])
    if not tensors or name in FACTORIES:
        sizes = next((argument for argument in args if isinstance(argument, list | tuple)), ())
        return prod(size for size in sizes if isinstance(size, int))
    return max(made, *(tensor.numel() for tensor in tensors))


def _not_computed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an op as unwritten zeros; computed after all if its shape cannot be told otherwise."""

    def form(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    try:
        given = {**tree_map_only(Tensor, form, kwargs), **({"device": "meta"} if "device" in kwargs else {})}
        forms = op(*tree_map_only(Tensor, form, args), **given)
    except (RuntimeError, NotImplementedError):
        return op(*args, **kwargs)
    return tree_map_only(Tensor, _lazy_zeros_like, forms)


def _fused_on_cuda(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of CUDA's memory-efficient attention, or of its backward. The log-sum-exp, which CUDA pads to 32
    tokens, has as many as the query, so that a fit through a few tokens holds for many."""
    output, sums, *rest = _not_computed(op, args, kwargs)
    if op._schema.name == CUDA_ONLY and sums.numel():
        sums = lazy_zeros((*sums.shape[:2], args[0].shape[2]), sums.dtype)
    return output, sums, *rest


def _lazy_zeros_like(form: Tensor) -> Tensor:
    numel = 1 + sum((size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True))
    return lazy_zeros([numel if form.numel() else 0], form.dtype).as_strided(form.shape, form.stride())


def tensors_of(*values: Any) -> list[Tensor]:
    """Every tensor among values, in nested tuples, lists and mappings."""
    tensors: list[Tensor] = []
    for value in values:  # for each op of each run: no generators
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += tensors_of(*value)
        elif isinstance(value, Mapping):
            tensors += tensors_of(*value.values())
    return tensors
