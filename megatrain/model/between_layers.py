"""Records what a model computes on the hidden state between two decoder layers, and replays it in the later one.

While the model's own forward runs with ports in place of its layers, each port returns a stand-in for the hidden state.
`Recorder` is a function mode: it notes each torch function that meets the stand-in, or what came of it, and runs it on
a copy. What reaches the next port is the stand-in itself, or the result of a few functions, which become a `Between`.
It is replayed on the true hidden state in front of the next layer, so that this layer's recomputation and backward
cover it. The tensors of the prologue that it reads (features of an image, masks) are arguments of that layer
(`Call.constants`).

Refused, because a replay could differ: Python values of the hidden state, results whose shape depends on its values,
memory that a kernel fills, writes into the prologue's tensors, and what is used after the layer that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode
from torch.utils._pytree import tree_leaves

from megatrain.errors import ModelError
from megatrain.model.side_values import leaves_of, rebuilt

WHERE = "code between the decoder layers"
FIX = "move that code into the layers, or leave out the entries of the micro-batch that lead to it"

_MARK = "_megatrain_between"
"""Key in `vars` of a stand-in and of what is computed from it: (recorder, stretch between two layers, number)."""

_METHODS = """
    size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_floating_point is_complex
    is_signed get_device type __len__ __hash__ __repr__ __format__
"""
TOLD = frozenset(_METHODS.split())
"""Functions that tell of a tensor's form alone."""

UNFILLED = frozenset(("empty_like", "new_empty", "new_empty_strided", "resize_", "__set__", "set_"))
SHAPED_BY_VALUES = frozenset(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"))


class PrologueDone(Exception):
    """Leaves the model's forward after the last port; never escapes `PortedModel`."""


@dataclass(frozen=True, slots=True)
class _Value:
    """The hidden state (0), or a tensor that one of the functions returned."""

    number: int


@dataclass(frozen=True, slots=True)
class _Constant:
    number: int


class Step(NamedTuple):
    """A torch function and its arguments, with places instead of tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    without_gradient: bool
    """Whether the model's code has switched gradients off around it."""


@dataclass(frozen=True, slots=True)
class Between:
    """The functions between two layers."""

    steps: tuple[Step, ...]
    result: int
    writes: bool
    """Whether the hidden state itself is changed in place."""

    def replayed(self, hidden: Tensor, constants: Sequence[Tensor]) -> Tensor:
        """What the next layer gets, [batch, length, hidden size], if this layer returned `hidden`, which is kept."""
        values = [hidden.clone() if self.writes else hidden]

        def given(leaf: Any) -> Any:
            if isinstance(leaf, _Value):
                return values[leaf.number]
            return constants[leaf.number] if isinstance(leaf, _Constant) else leaf

        for function, args, kwargs, without_gradient in self.steps:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not without_gradient):
                found = function(*_changed(args, given), **_changed(kwargs, given))
            values += [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        return values[self.result]


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested arguments with changed leaves."""

    def changed(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(change(leaf.start), change(leaf.stop), change(leaf.step))
        return change(leaf)

    return rebuilt(value, changed)


def _tensors(value: Any) -> Iterator[Tensor]:
    for _, leaf in leaves_of(value):
        for each in (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,):
            if isinstance(each, Tensor):
                yield each


class Recorder(TorchFunctionMode):
    """Notes what is computed from stand-ins, while it is active on this thread and not paused.

    weights: what the prologue may read, in memory that other weights take later, so that values of them are copied.
    buffers: gives the model's. through: go on to the model's end, rather than to the first weight behind the layers.
    """

    _numbers = count()

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        buffers: Callable[[], Iterable[Tensor]] = tuple,
        *,
        through: bool = False,
    ) -> None:
        super().__init__()
        self.steps: list[Step] = []
        """Since the last stand-in."""
        self.stand_in: Tensor | None = None
        self._number, self._stretch, self._values = next(self._numbers), 0, 1
        self._weights, self._buffers, self._through = weights, buffers, through
        self._start: Tensor | None = None
        """The copy of the stand-in that functions get."""
        self._constants: dict[int, Tensor] = {}
        self._read: list[tuple[Tensor, int]] = []
        """Tensors of the prologue, with their versions when they were read."""
        self.paused = self._behind = self._gradients = False
        """paused: note nothing until the next stand-in."""
        self.has_recorded = False

    def leave(self) -> None:
        """Stop, also after an exception in the middle of torch's own push or pop."""
        while self in _get_current_function_mode_stack():
            _pop_mode()

    def stands_in(self, tensor: Tensor, *, behind: bool = False) -> None:
        """Begin a stretch with this tensor for the output of a layer; behind: of the last one."""
        if not self._stretch:
            self._gradients = torch.is_grad_enabled()
            self.__enter__()  # type: ignore[no-untyped-call]
        self._stretch += 1
        tensor.__dict__[_MARK] = self._number, self._stretch, 0
        self.stand_in, self._start, self.paused, self._behind = tensor, None, False, behind
        if self.steps:
            self.steps, self._constants, self._values = [], {}, 1

    def finished(self, hidden: Tensor, arguments: Any) -> tuple[Between | None, tuple[Tensor, ...]]:
        """What has led to the next layer's hidden state, and the tensors that it reads. Raises `ModelError`."""
        if any(self._is_marked(each) for each in _tensors(arguments)):
            _refuse("what layers take besides the hidden state is computed from it")
        start = self.stand_in if self._start is None else self._start
        assert start is not None
        number, writes = self._place(hidden), start._version > 0 and self._start is not None
        if number is None:
            _refuse("a layer's hidden state is not computed from that of the layer before it")
        if not writes and is_same(hidden, start):
            return None, ()
        self.has_recorded = True
        memory = {each.untyped_storage().data_ptr() for each in self._weights.values()}
        constants = tuple(
            each.clone() if each.untyped_storage().data_ptr() in memory else each for each in self._constants.values()
        )
        return Between(tuple(self.steps), number, writes), constants

    def check(self) -> None:
        """Raise `ModelError` if a tensor that has been read was changed since."""
        if any(_version(tensor) != version for tensor, version in self._read):
            _refuse("a tensor of the prologue changes after it was used")

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, given = kwargs or {}, (args, kwargs)
        if self.paused or not any(self._is_marked(each) for each in _tensors(given)):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in TOLD or name == "__get__":
            told = func(*args, **kwargs)
            if not isinstance(told, Tensor):
                return told
        if self._behind:
            self._look_behind(given)
        else:
            _refuse_unrepeatable(name, args, [each for each in _tensors(given) if self._is_marked(each)])
        others = [each for each in _tensors(given) if self._place(each) is None]
        versions = [_version(each) for each in others]
        noted = _changed(tuple(args), self._noted), _changed(dict(kwargs), self._noted)
        found = func(*_changed(tuple(args), self._run), **_changed(dict(kwargs), self._run))
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        if found is not None and not made:
            _refuse(f"{name} reads values of the hidden state")
        if versions != [_version(each) for each in others]:
            _refuse(f"{name} writes into a tensor of the prologue")
        self.steps.append(Step(func, *noted, self._gradients and not torch.is_grad_enabled()))
        self._read += zip(others, versions, strict=True)
        for number, each in enumerate(made, start=self._values):
            if not self._is_marked(each) and not any(each is other for other in others):
                each.__dict__[_MARK] = self._number, self._stretch, number
        self._values += len(made)
        return found

    def _look_behind(self, given: Any) -> None:
        """Raise `ModelError` for what enters before the head, or in it: the head gets no micro-batch. Leave the forward
        at a weight that is not there."""
        weights, buffers = ({id(each) for each in some} for some in (self._weights.values(), self._buffers()))
        others = [each for each in _tensors(given) if not self._is_marked(each)]
        if any(each.is_meta or (id(each) in weights and not self._through) for each in others):
            raise PrologueDone
        if any(each.numel() > 1 and id(each) not in weights | buffers for each in others):
            _refuse("a tensor of the prologue enters behind the last layer")

    def _is_marked(self, tensor: Tensor) -> bool:
        return bool(tensor.__dict__.get(_MARK, (None,))[0] == self._number)

    def _place(self, tensor: Tensor) -> int | None:
        """The number of a value; `None` for another tensor. Raises `ModelError` for a value of an earlier stretch."""
        recorder, stretch, number = tensor.__dict__.get(_MARK, (None, 0, 0))
        if recorder != self._number:
            return None
        if stretch != self._stretch:
            _refuse("what is computed from a layer's hidden state is used after the next layer")
        return int(number)

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = self._place(leaf)
        if number is not None:
            return _Value(number)
        if leaf.is_meta:
            _refuse("a parameter of a layer or of the head is used")
        self._constants.setdefault(id(leaf), leaf)
        return _Constant([*self._constants].index(id(leaf)))

    def _run(self, leaf: Any) -> Any:
        """An argument as functions get it now."""
        if leaf is not self.stand_in:
            return leaf
        if self._start is None:
            assert self.stand_in is not None
            self._start = self.stand_in.clone()
            self._start.__dict__[_MARK] = self._number, self._stretch, 0
        return self._start


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements: a slice of everything is a new tensor."""
    if one is other:
        return True
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and (one.shape, one.stride()) == (other.shape, other.stride())
    )


def _refuse_unrepeatable(name: str, args: Sequence[Any], marked: Sequence[Tensor]) -> None:
    """Raise `ModelError` for a function whose replay may differ. marked: what comes from the hidden state."""
    if name in UNFILLED:
        _refuse(f"{name} makes memory to be filled, and what fills it is not seen")
    chosen = name == "__getitem__" and any(
        each.dtype == torch.bool and any(each is other for other in marked) for each in _tensors(args[1:])
    )
    if chosen or name in SHAPED_BY_VALUES or (name == "where" and len(args) == 1):
        _refuse(f"{name} gives a shape that depends on values of the hidden state")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _refuse(what: str) -> NoReturn:
    raise ModelError(what, where=WHERE, fix=FIX)
