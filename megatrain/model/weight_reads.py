"""Finds which weights a model's code reads, in which order and as what matrices.

A function mode around the call sees where a layer first reads a weight, without touching the model's code. Asking for
a shape or making a view reads nothing: a view is tracked to where it is used, so one expert's slice of a tensor of
all experts counts as that slice. Anything else counts as reading the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from megatrain.model.peak import ADDING, SkipLargeProducts, tensors_of
from megatrain.model.peak import PRODUCTS as MATRIX_PRODUCTS
from megatrain.spec import ParamSpec

Reading = Callable[[Any, Sequence[Tensor]], None]
"""Called with a function and the tensors among its arguments before it runs."""

_ATTRIBUTES = """
    shape dtype device layout ndim requires_grad is_leaf grad grad_fn is_meta is_cuda is_cpu is_sparse is_quantized
    is_nested is_mkldnn itemsize nbytes T mT
"""
_METHODS = """
    size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_floating_point is_complex
    get_device requires_grad_ detach t transpose swapaxes permute view view_as unsqueeze squeeze narrow select chunk
    split unbind expand expand_as unflatten movedim __len__ __hash__
"""


def _harmless() -> frozenset[Any]:
    """Functions that read no element of a tensor."""
    getters = (getattr(getattr(Tensor, name, None), "__get__", None) for name in _ATTRIBUTES.split())
    functions = (getattr(home, name, None) for home in (torch, Tensor) for name in _METHODS.split())
    return frozenset(function for function in (*getters, *functions) if function is not None)


HARMLESS = _harmless()


class Uses(TorchFunctionMode):
    """While active on this thread: calls `reading` for each torch function that reads elements of tensors."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self._reading = reading

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS or _is_slice(func, args):
            return func(*args, **kwargs)
        self._reading(func, [in_memory(tensor) for tensor in tensors_of(args, kwargs)])
        return func(*args, **kwargs)


def _is_slice(func: Any, args: Sequence[Any]) -> bool:
    """Whether an indexing makes a view. A one-element tensor counts as a number, as in torch, since expert loops
    use them."""
    if func is not Tensor.__getitem__:
        return False
    places = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(
        place is None or place is Ellipsis or type(place) in (int, slice) or _is_number(place) for place in places
    )


def _is_number(place: Any) -> bool:
    """Whether an index is an integer in a 0-dim tensor. Torch treats uint8 as a mask."""
    return isinstance(place, Tensor) and place.dim() == 0 and place.dtype in (torch.int64, torch.int32)


def is_wrapped(value: Any) -> bool:
    """Whether it is a tensor inside a `torch.func` transformation, such as the `vmap` that makes masks."""
    return isinstance(value, Tensor) and bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor in memory behind a view of it."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class OrderOfUse:
    """Records names of weights in the order in which they are first read; pass `reading` to a `Uses`."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in weights.items()}
        self.names: list[str] = []
        self.matrices: dict[str, Matrices] = {}
        """By name of a weight, see `ReadByProducts`."""

    def reading(self, func: Any, tensors: Sequence[Tensor]) -> None:
        reads = (self._names.get(tensor.untyped_storage().data_ptr()) for tensor in tensors)
        self.names += [name for name in dict.fromkeys(reads) if name is not None and name not in self.names]

    def noted(self, name: str, param: ParamSpec) -> ParamSpec:
        """The parameter of the weight `name`, with what was seen of it."""
        seen = self.matrices.get(name)
        return param if seen is None else replace(param, products=seen.stacked, inputs_first=seen.inputs_first)


def in_order_of_use(names: Iterable[str], used: Sequence[str]) -> list[str]:
    """`names`: first the `used` ones in that order, then the rest unchanged."""
    places = {name: place for place, name in enumerate(used)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


# By products of a layer -----------------------------------------------------------------------------------------------
#
# Seen below autograd, where linear layers, matmul and einsum are a few products. A cast or a copy of a weight is that
# weight. A weight is a router if what chooses, `topk` say, gets just its outputs. That it has as many outputs as there
# are experts would not tell: so may keys of all heads.


CHOICES = ("aten::topk", "aten::max", "aten::argmax", "aten::sort", "aten::multinomial", "aten::gather")
COPIES = ("aten::_to_copy", "aten::clone")
CHOSEN = ("aten::index", "aten::index_select")
"""Of stacked matrices these copy some of them; of a matrix, rows, as an embedding does."""
GROUPED = "grouped_mm"
"""In the names of products of groups of tokens with a matrix each, of torch or transformers."""


class Matrices(NamedTuple):
    """The matrices in a weight."""

    stacked: int
    inputs_first: bool
    """Whether they have a row for each input, instead of one for each output."""


class _Origin(NamedTuple):
    """Where the numbers of a tensor come from."""

    kept: StorageWeakRef
    """Keeps its address from being reused."""
    weight: str = ""
    """The weight of which it is a view or a copy."""
    products: frozenset[str] = frozenset()
    """Weights of the last products behind it."""


class ReadByProducts(SkipLargeProducts):
    """In the block, where a layer runs on zeros, finds which of its weights are matrices that products read: a stack of
    them if products read dense blocks of it, such as an expert's, and else by the last two dimensions."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._origins: dict[int, _Origin] = {}
        for name, weight in weights.items():
            self._come_from(weight, name)
        self._read: dict[str, Matrices] = {}
        self._made: dict[str, tuple[int, int]] = {}
        """By name of a weight: outputs of its last product, for one token and for all."""
        self._routers: set[str] = set()

    def matrices(self) -> dict[str, Matrices]:
        """By name of a weight; without routers, and without matrices of one row or column."""
        return {name: read for name, read in self._read.items() if read.stacked and name not in self._routers}

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(op, types, args, kwargs)
        name = op._schema.name if hasattr(op, "_schema") else str(op)
        given = tensors_of(*args, *(kwargs or {}).values())
        weight, products = "", frozenset[str]()
        if name in MATRIX_PRODUCTS or GROUPED in name:
            left, right = given[1:3] if name in ADDING else given[:2]
            products = frozenset((self._multiplied(left, -1, output), self._multiplied(right, -2, output))) - {""}
        else:
            origins = [origin for origin in map(self._origin, given) if origin is not None]
            products = products.union(*(origin.products for origin in origins))
            if origins and (name in COPIES or (name in CHOSEN and len(self._shapes.get(origins[0].weight, ())) > 2)):
                weight = origins[0].weight
            if name in CHOICES:
                read = given[0].shape[-1], given[0].numel()
                self._routers |= {name for name in products if self._made[name] == read}
        if weight or products:
            for tensor in tensors_of(output):
                self._come_from(tensor, weight, products)
        return output

    def _origin(self, tensor: Tensor) -> _Origin | None:
        return self._origins.get(tensor.untyped_storage()._cdata)

    def _come_from(self, tensor: Tensor, weight: str, products: frozenset[str] = frozenset()) -> None:
        storage = tensor.untyped_storage()
        known = self._origins.get(storage._cdata)
        origin = known or _Origin(StorageWeakRef(storage), weight)
        self._origins[storage._cdata] = origin._replace(products=origin.products | products)

    def _multiplied(self, operand: Tensor, inner: int, output: Tensor) -> str:
        """Note a product over the dimension `inner` of an operand; returns its weight, or an empty text."""
        origin = self._origin(operand)
        if origin is None or not origin.weight or operand.dim() < 2:
            return ""
        rows, columns = operand.shape[-2:]
        shape = self._shapes[origin.weight]
        blocks, rest = divmod(shape.numel(), max(1, rows * columns))
        is_dense = operand.stride()[-2:] in ((columns, 1), (1, rows)) and not rest
        stacked = 0 if 1 in (rows, columns) else blocks if is_dense else prod(shape[:-2])
        read = Matrices(stacked, inputs_first=operand.stride(inner) != 1)
        self._made[origin.weight] = columns if inner == -2 else rows, output.numel()
        known = self._read.setdefault(origin.weight, read)
        if known.stacked != stacked:  # parts of several sizes
            self._read[origin.weight] = known._replace(stacked=prod(shape[:-2]))
        return origin.weight


# In graphs ------------------------------------------------------------------------------------------------------------


def reachable_leaves(tensor: Tensor) -> set[int]:
    """`id`s of the leaves that would get a gradient from `tensor`, found in its graph without running it."""
    variables = (getattr(node, "variable", None) for node in nodes_of(tensor))
    return {id(variable) for variable in variables if isinstance(variable, torch.Tensor)}


def nodes_of(tensor: Tensor) -> set[Any]:
    """The nodes of its graph."""
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
    return seen
