"""Records what a model computes on hidden states between its decoder layers, and replays it in front of a layer.

While the model's own forward runs with ports in place of its layers, each port returns a stand-in for the hidden state.
`Recorder` is a function mode: it notes each torch function that meets a stand-in, or what came of it, and runs it on
a copy. What the next port gets, as its hidden state or beside it, is a stand-in itself or the result of a few
functions, which become a `Between`. It is replayed on the true hidden states in front of that layer, so that this
layer's recomputation and backward cover it. The tensors of the prologue that it reads (features of an image, masks) are
arguments of that layer (`Call.constants`), and so are outputs of units before the one below it (`EarlierOutput`),
which are side values.

Refused, because a replay could differ: Python values of the hidden state, results whose shape depends on its values,
memory that a kernel fills, writes into the prologue's tensors, and the use after the next layer of what was written
in place or drawn at random.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from megatrain.errors import ModelError
from megatrain.model.peak import tensors_of
from megatrain.model.side_values import leaves_of, rebuilt

WHERE = "code between the decoder layers"
FIX = "move that code into the layers, or leave out the entries of the micro-batch that lead to it"

_MARK = "_megatrain_between"
"""Key in `vars` of a stand-in and of what is computed from it: (recorder, number)."""

_METHODS = """
    size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_floating_point is_complex
    is_signed get_device type __len__ __hash__ __repr__ __format__
"""
TOLD = frozenset(_METHODS.split())
"""Functions that tell of a tensor's form alone."""

UNFILLED = frozenset(("empty_like", "new_empty", "new_empty_strided", "resize_", "__set__", "set_"))
SHAPED_BY_VALUES = frozenset(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"))


DRAWN = ("dropout", "rand", "bernoulli", "multinomial")
"""Parts of names of functions that draw numbers."""


class PrologueDone(Exception):
    """Leaves the model's forward after the last port; never escapes `PortedModel`."""


@dataclass(frozen=True, slots=True)
class Value:
    """A hidden state, a tensor of the prologue, or one that a function returned, by its number in a recording."""

    number: int


@dataclass(frozen=True, slots=True)
class EarlierOutput:
    """Among `Call.constants`: the hidden state that a unit before the one below the layer has made."""

    unit: int


class Step(NamedTuple):
    """A torch function and its arguments, with a `Value` in place of each tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    without_gradient: bool
    """Whether the model's code has switched gradients off around it."""
    first: int
    """Number of the first tensor that it returns."""


@dataclass(frozen=True, slots=True)
class Between:
    """The functions in front of a layer. Numbers are those of the recording."""

    steps: tuple[Step, ...]
    start: int
    """The hidden state that the layer before has returned."""
    given: tuple[int, ...]
    """`Call.constants`."""
    result: int
    """The layer's hidden state."""
    writes: bool
    """Whether the hidden state itself is changed in place."""

    def replayed(self, hidden: Tensor, constants: Sequence[Tensor]) -> dict[int, Tensor]:
        """Each value by its number, if the layer before returned `hidden` [batch, length, hidden size], which is
        kept."""
        values = dict(zip(self.given, constants, strict=True))
        values[self.start] = hidden.clone() if self.writes else hidden

        def put(leaf: Any) -> Any:
            return values[leaf.number] if isinstance(leaf, Value) else leaf

        for function, args, kwargs, without_gradient, first in self.steps:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not without_gradient):
                returned = function(*_changed(args, put), **_changed(kwargs, put))
            values |= enumerate(tensors_of(returned), start=first)
        return values


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested arguments with changed leaves."""

    def changed(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(change(leaf.start), change(leaf.stop), change(leaf.step))
        return change(leaf)

    return rebuilt(value, changed)


def _leaves(value: Any) -> Iterator[Any]:
    for _, leaf in leaves_of(value):
        yield from (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))


def _is_tuple_of_tensors(value: Any) -> bool:
    return type(value) is tuple and all(isinstance(each, Tensor) for each in value)


class _Mode(TorchFunctionMode):
    def leave(self) -> None:
        """Stop, also after an exception in the middle of torch's own push or pop."""
        while self in _get_current_function_mode_stack():
            _pop_mode()


class TensorSubstitution(_Mode):
    """Hands `given` to each function that is called with `tensor`, while it is active on this thread."""

    def __init__(self, tensor: Tensor, given: Tensor) -> None:
        super().__init__()
        self._tensor, self._given = tensor, given

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_changed(tuple(args), self._instead), **_changed(dict(kwargs or {}), self._instead))

    def _instead(self, leaf: Any) -> Any:
        return self._given if leaf is self._tensor else leaf


class Recorder(_Mode):
    """Notes what is computed from stand-ins, while it is active on this thread and not paused.

    weights: what the prologue may read, in memory that other weights take later, so that values of them are copied.
    buffers: gives the model's. through: go on to the model's end, rather than to the first weight behind the layers.
    by_head: the units before the last layer whose hidden state the head gets when it runs alone; `None` for any.
    """

    _numbers = count()

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        buffers: Callable[[], Iterable[Tensor]] = tuple,
        *,
        through: bool = False,
        by_head: Collection[int] | None = (),
    ) -> None:
        super().__init__()
        self.stand_in: Tensor | None = None
        """For the output of the last port."""
        self._number, self._next = next(self._numbers), 0
        self._weights, self._buffers, self._through, self._by_head = weights, buffers, through, by_head
        self._start: Tensor | None = None
        """The copy of the stand-in that functions get."""
        self._starts: list[int] = []
        """Numbers of the stand-ins, by unit."""
        self._steps: list[Step] = []
        self._begin = 0
        """How many there were at the last stand-in."""
        self._makers: dict[int, int] = {}
        """Number -> the step that makes it."""
        self._sources: dict[int, Tensor | EarlierOutput] = {}
        """Number -> a tensor of the prologue, or what a stand-in stands for."""
        self._of_prologue: dict[int, int] = {}
        """`id` of a tensor of the prologue -> its number."""
        self._made: list[tuple[ref[Tensor], int]] = []
        """The stand-ins and what has come of them, with the unit above which it was made."""
        self._written: set[int] = set()
        """Units whose stand-in, or what was computed before the next one, was changed in place."""
        self._looked_at: dict[int | str, Any] = {}
        """Position or keyword -> what a layer got there, if nothing can change it and it comes from no stand-in."""
        self._read: list[tuple[Tensor, int]] = []
        """Tensors of the prologue, with their versions when they were read."""
        self.paused = self._behind = self._gradients = False
        """paused: note nothing until the next stand-in."""
        self.has_recorded = bool(by_head)
        """Whether there is something to look for behind the last layer."""

    def stands_in(self, tensor: Tensor, *, behind: bool = False) -> None:
        """Begin a stretch with this tensor for the hidden state that the next unit makes, from the prologue on; behind:
        that of the last layer."""
        if not self._starts:
            self._gradients = torch.is_grad_enabled()
            self.__enter__()  # type: ignore[no-untyped-call]
        unit, number = len(self._starts), self._next
        self._next += 1
        self._starts.append(number)
        self._sources[number] = EarlierOutput(unit)
        tensor.__dict__[_MARK] = self._number, number
        self._made.append((ref(tensor), unit))
        self.stand_in, self._start, self.paused, self._behind = tensor, None, False, behind
        if self._steps:
            self._begin = len(self._steps)

    def finished(self, hidden: Tensor, arguments: Any) -> tuple[Between | None, tuple[Tensor | EarlierOutput, ...]]:
        """What has led to the next layer's hidden state and other arguments, and the tensors that it reads. Raises
        `ModelError`."""
        start, result = self.stand_in if self._start is None else self._start, self._place(hidden)
        assert start is not None
        unit, number = len(self._starts) - 1, self._starts[-1]
        wanted = {each.number for _, each in leaves_of(self.noted(arguments)) if isinstance(each, Value)}
        changes = unit in self._written or wanted or not (result == number or is_same(hidden, start))
        if not changes and (result is None or number in self._needed({result})[1]):  # units' stand-ins share memory
            return None, ()
        since = range(self._begin if unit in self._written else len(self._steps), len(self._steps))
        steps, read = self._needed(wanted if result is None else {result, *wanted}, since)
        if result is None or number not in read:
            _refuse("a layer's hidden state is not computed from that of the layer before it")
        self._refuse_unlike(steps, read)
        self.has_recorded = True
        given = sorted(each for each in read if each in self._sources and each != number)
        memory = {each.untyped_storage().data_ptr() for each in self._weights.values()}
        constants = (self._sources[each] for each in given)
        writes = self._start is not None and self._start._version > 0
        between = Between(tuple(self._steps[each] for each in steps), number, tuple(given), result, writes)
        return between, tuple(
            each.clone() if isinstance(each, Tensor) and each.untyped_storage().data_ptr() in memory else each
            for each in constants
        )

    def needs_replay(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether anything was computed since the last stand-in, or comes from stand-ins among a layer's arguments."""
        if self._steps[self._begin :]:
            return True
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        known = self._looked_at
        for place in given:
            value = given[place]
            if (place not in known or known[place] is not value) and self._comes_in(place, value):
                return True
        return False

    def _comes_in(self, place: int | str, value: Any) -> bool:
        if any(isinstance(leaf, Tensor) and self._is_marked(leaf) for _, leaf in leaves_of(value)):
            return True
        if value is None or isinstance(value, (bool, Tensor)) or _is_tuple_of_tensors(value):
            self._looked_at[place] = value
        return False

    def noted(self, arguments: Any) -> Any:
        """A layer's arguments with a `Value` in place of what comes from stand-ins, except the prologue's output."""

        def change(leaf: Any) -> Any:
            number = self._place(leaf) if isinstance(leaf, Tensor) else None
            return leaf if number is None or number == self._starts[0] else Value(number)

        return _changed(arguments, change)

    def check(self) -> None:
        """Raise `ModelError` if a tensor that has been read was changed since."""
        if any(_version(tensor) != version for tensor, version in self._read):
            _refuse("a tensor of the prologue changes after it was used")

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, given = kwargs or {}, (args, kwargs)
        if self.paused or not any(self._is_marked(tensor) for tensor in _tensors(given)):
            return self._of_head(func(*args, **kwargs), given) if self._behind else func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in TOLD or name == "__get__":
            told = func(*args, **kwargs)
            if not isinstance(told, Tensor):
                return told
        if self._behind:
            self._look_behind(given)
        else:
            _refuse_unrepeatable(name, args, [tensor for tensor in _tensors(given) if self._is_marked(tensor)])
        noted = _changed(tuple(args), self._noted), _changed(dict(kwargs), self._noted)
        run = _changed(tuple(args), self._run), _changed(dict(kwargs), self._run)
        before = [(tensor, _version(tensor)) for tensor in _tensors(run)]
        returned = func(*run[0], **run[1])
        made = tensors_of(returned)
        if returned is not None and not made:
            _refuse(f"{name} reads values of the hidden state")
        for tensor, version in before:
            if version != _version(tensor):
                self._note_written(tensor, name)
        numbers = range(self._next, self._next + len(made))
        self._next += len(made)
        self._makers |= dict.fromkeys(numbers, len(self._steps))
        self._steps.append(
            Step(func, *noted, self._gradients and not torch.is_grad_enabled(), numbers[0] if numbers else 0)
        )
        others = [(tensor, version) for tensor, version in before if not self._is_marked(tensor)]
        self._read += others
        for number, tensor in zip(numbers, made, strict=True):
            if not self._is_marked(tensor) and not any(tensor is other for other, _ in others):
                self._mark(tensor, number)
        return returned

    def _note_written(self, tensor: Tensor, name: str) -> None:
        """Raise `ModelError` for a write into what was made before the last layer."""
        unit, memory = len(self._starts) - 1, tensor.untyped_storage().data_ptr()
        alive = ((each(), above) for each, above in self._made if above < unit)
        shared = [above for each, above in alive if each is not None and each.untyped_storage().data_ptr() == memory]
        if not self._is_marked(tensor) or 0 in shared:
            _refuse(f"{name} writes into a tensor of the prologue")
        if shared:
            _refuse(f"{name} writes into what was computed before an earlier layer")
        self._written.add(unit)

    def _needed(self, numbers: Iterable[int], since: Iterable[int] = ()) -> tuple[list[int], set[int]]:
        """The steps that make these values, in order, with the steps `since`; and the numbers of all that they read."""
        steps, read = {*since}, set[int]()
        left = [*numbers, *(each for step in steps for each in self._read_by(step))]
        while left:
            number = left.pop()
            if number in read:
                continue
            read.add(number)
            if (maker := self._makers.get(number)) is not None:
                steps.add(maker)
                left += self._read_by(maker)
        return sorted(steps), read

    def _read_by(self, step: int) -> list[int]:
        _, args, kwargs, *_ = self._steps[step]
        return [leaf.number for leaf in _leaves((args, kwargs)) if isinstance(leaf, Value)]

    def _refuse_unlike(self, steps: Iterable[int], read: Iterable[int]) -> None:
        """Raise `ModelError` if a replay of what came before the last layer may differ."""
        computed = (each for each in read if not isinstance(self._sources.get(each), Tensor))
        units = {bisect_right(self._starts, each) - 1 for each in computed}
        names = (getattr(self._steps[each].function, "__name__", "") for each in steps if each < self._begin)
        if (units - {len(self._starts) - 1}) & self._written:
            _refuse("what is written in place is used after the next layer")
        if drawn := next((name for name in names if any(part in name for part in DRAWN)), None):
            _refuse(f"what {drawn} has drawn is used after the next layer")

    def _look_behind(self, given: Any) -> None:
        """Raise `ModelError` for what enters before the head, or in it: the head gets no micro-batch. Leave the forward
        at a weight that is not there."""
        weights, buffers = ({id(each) for each in some} for some in (self._weights.values(), self._buffers()))
        others = [each for each in _tensors(given) if not self._is_marked(each)]
        if any(each.is_meta or (id(each) in weights and not self._through) for each in others):
            raise PrologueDone
        if any(each.numel() > 1 and not self._is_of_head(each, weights | buffers) for each in others):
            _refuse("a tensor of the prologue enters behind the last layer")
        for each in _tensors(given):
            number = self._place(each)
            if number is None or number >= self._starts[-1]:
                continue
            steps, read = self._needed({number})
            self._refuse_unlike(steps, read)
            for source in (self._sources[other] for other in read if other in self._sources):
                if isinstance(source, Tensor) and source.numel() > 1:
                    _refuse("a tensor of the prologue enters behind the last layer")
                if isinstance(source, EarlierOutput) and self._by_head is not None and source.unit not in self._by_head:
                    _refuse("a hidden state of a layer before the last one enters behind the last layer")

    def _of_head(self, returned: Any, given: Any) -> Any:
        """Note what a function has returned behind the last layer if it was computed from weights alone."""
        known = {id(each) for some in (self._weights.values(), self._buffers()) for each in some}
        tensors = [*_tensors(given)]
        if tensors and all(self._is_of_head(each, known) for each in tensors):
            for each in tensors_of(returned):
                each.__dict__[_MARK] = self._number, None
        return returned

    def _is_of_head(self, tensor: Tensor, known: set[int]) -> bool:
        return id(tensor) in known or tensor.__dict__.get(_MARK) == (self._number, None)

    def _mark(self, tensor: Tensor, number: int) -> None:
        tensor.__dict__[_MARK] = self._number, number
        self._made.append((ref(tensor), len(self._starts) - 1))

    def _is_marked(self, tensor: Tensor) -> bool:
        return self._place(tensor) is not None

    def _place(self, tensor: Tensor) -> int | None:
        """The number of a value that comes from stand-ins; `None` for another tensor."""
        recorder, number = tensor.__dict__.get(_MARK, (None, None))
        return number if recorder == self._number else None

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = self._place(leaf)
        if number is not None:
            return Value(number)
        if leaf.is_meta:
            _refuse("a parameter of a layer or of the head is used")
        if id(leaf) not in self._of_prologue:
            self._of_prologue[id(leaf)] = number = self._next
            self._next += 1
            self._sources[number] = leaf
        return Value(self._of_prologue[id(leaf)])

    def _run(self, leaf: Any) -> Any:
        """An argument as functions get it now."""
        if leaf is not self.stand_in:
            return leaf
        if self._start is None:
            assert self.stand_in is not None
            self._start = self.stand_in.clone()
            self._mark(self._start, self._starts[-1])
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
