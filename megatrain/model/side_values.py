"""Finds the tensors that a layer or the prologue passes to later layers besides the hidden state, such as shared keys.

A layer may return more than the hidden state, and the model's loop hands that to a later layer (indices of sparse
attention, states of routers); it may write into a dictionary that all layers get (keys and values that layers share);
and layers may get tensors of the prologue that need a gradient (inputs of each layer). The first look finds where
they come from and where they go (`split_into_units.FirstLook`). After that, a `Marker` stands for a value of a layer
while the model's loop runs without its layers, and `Passing` puts values into a layer's arguments and takes out those
that it has made. Numbers are places in `ModelSpec.sides`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megatrain.spec import SideValue

Path = tuple[Any, ...]
"""Keys and indices that lead to a place in nested tuples, lists and mappings."""

_DROPPED: Any = object()


@dataclass(frozen=True, slots=True)
class Marker:
    """Stands for a side value of a layer."""

    number: int
    """-1 in the first look."""


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each value in nested containers, with its place."""
    if _is_sequence(value) or isinstance(value, Mapping):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves_of(item, (*path, key))
    else:
        yield path, value


def value_at(value: Any, path: Path) -> Any:
    """What is at a place in nested containers."""
    for key in path:
        value = value[key]
    return value


def rebuilt(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A copy of nested containers with changed values; an entry of a mapping without its value is left out."""
    if _is_sequence(value):
        items = [rebuilt(item, change, (*path, key)) for key, item in enumerate(value)]
        if any(item is _DROPPED for item in items):
            return _DROPPED
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, MutableMapping):
        return change(path, value)
    copied = copy.copy(value)
    for key, item in value.items():
        new = rebuilt(item, change, (*path, key))
        if new is _DROPPED:
            del copied[key]
        else:
            copied[key] = new
    return copied


def _is_sequence(value: Any) -> bool:
    return type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields"))


@dataclass(frozen=True, slots=True)
class Passing:
    """What one layer takes besides the hidden state, and what it makes. Arguments are `Call.form`."""

    takes: Mapping[Path, int]
    """Place among the arguments -> number."""
    makes: Mapping[int, Path]
    """Number -> place in (the layer's return value, its arguments)."""
    others: tuple[Any, ...]
    """What the port returns after the hidden state."""
    writes: tuple[tuple[Path, Any, Any], ...]
    """(place of a mapping among the arguments, key, markers) of what the port writes."""

    def kept(self, arguments: Any) -> Any:
        """A copy of the arguments, so that later layers do not change it, without entries that the layer does not
        read."""
        unread = {path for path, leaf in leaves_of(arguments) if isinstance(leaf, Marker) and path not in self.takes}
        return without(arguments, unread)

    def write(self, arguments: Any) -> None:
        """Let later layers find what this one would have written."""
        for path, key, markers in self.writes:
            value_at(arguments, path)[key] = markers

    def given(self, arguments: Any, values: Mapping[int, Tensor]) -> Any:
        """A copy of the arguments with these values in their places; without one, a tensor of the prologue stays."""

        def put(path: Path, leaf: Any) -> Any:
            number = leaf.number if isinstance(leaf, Marker) else self.takes.get(path, -1)
            return values.get(number, leaf)

        return rebuilt(arguments, put)

    def made(self, output: Any, arguments: Any) -> dict[int, Tensor]:
        """What a call of the layer has made."""
        return {number: value_at((output, arguments), path) for number, path in self.makes.items()}


# The first look -------------------------------------------------------------------------------------------------------


class Untraceable(Exception):
    """A layer changes a container in another way than by setting an entry of a mapping that a later layer reads."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a layer did when it ran on zeros."""

    output: Any
    read: list[Path]
    """Places of the values of earlier layers that it gets and may read."""
    writes: list[tuple[Path, Any, Any]]
    """(place of a mapping among its arguments, key, value) of what it writes."""
    traced: tuple[Any, Any]
    """Return value and arguments of a second run, with gradients."""


def holds_containers(arguments: Any) -> bool:
    """Whether a layer could write into its arguments."""
    args, kwargs = arguments
    return any(map(_holds_containers, (*args, *kwargs.values())))


def _holds_containers(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_holds_containers, value))
    return isinstance(value, list | MutableMapping)


def written(before: Any, after: Any, path: Path = ()) -> list[tuple[Path, Any, Any]]:
    """(place of a mapping, key, value) of each entry that is new or changed. Raises `Untraceable`."""
    if isinstance(after, Mapping):
        if before.keys() - after.keys():
            raise Untraceable
        entries = []
        for key, value in after.items():
            if key in before and isinstance(value, list | MutableMapping):
                entries += written(before[key], value, (*path, key))
            elif key not in before or not _is_as_before(before[key], value):
                entries.append((path, key, value))
        return entries
    if not _is_sequence(after):
        return []
    if len(before) != len(after) or (isinstance(after, list) and not _is_as_before(before, after)):
        raise Untraceable
    pairs = enumerate(zip(before, after, strict=True))
    return [each for key, (was, now) in pairs for each in written(was, now, (*path, key))]


def _is_as_before(before: Any, after: Any) -> bool:
    was, now = list(leaves_of(before)), list(leaves_of(after))
    return len(was) == len(now) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(was, now, strict=True))


def read_of(arguments: Any, touched: Set[Path], came: Set[Path]) -> set[Path]:
    """The values that a layer reads: those that it has `touched`, with all of the same entry of a mapping."""
    entries = {_entry_of(arguments, path) for path in touched} - {()}
    return {path for path in came if path in touched or _entry_of(arguments, path) in entries}


def _entry_of(arguments: Any, path: Path) -> Path:
    """The place of the entry of a mapping that this place is in; () if it is in none."""
    value = arguments[path[0]][path[1]]
    for depth, key in enumerate(path[2:], start=3):
        if isinstance(value, Mapping):
            return path[:depth]
        value = value[key]
    return ()


def without(arguments: Any, places: Set[Path]) -> Any:
    """A copy of the arguments without the entries of mappings that these places are in; what is passed by itself is
    replaced by a marker, of which nothing can be computed."""

    def left(path: Path, leaf: Any) -> Any:
        if path not in places:
            return leaf
        return _DROPPED if _entry_of(arguments, path) else leaf if isinstance(leaf, Marker) else Marker(-1)

    return rebuilt(arguments, left)


class Traffic:
    """Collects in a first look where side values of layers come from, and where they go."""

    def __init__(self) -> None:
        self.sides: list[SideValue] = []
        """In the order of the layers that make them, once finished."""
        self._made: dict[int, Origin] = {}
        """`id` of a tensor -> the layer that has made it, and its place there."""
        self._tensors: list[Tensor] = []
        self._differentiable: dict[Origin, bool] = {}
        self._objects: list[Any] = []
        """What layers return besides tensors."""
        self._users: dict[Origin, dict[int, list[Path]]] = {}
        self._others: list[tuple[Any, ...]] = []
        self._writes: list[list[tuple[Path, Any, Any]]] = []

    def found_in(self, arguments: Any) -> dict[Path, Tensor]:
        """Place -> value of an earlier layer."""
        return {path: leaf for path, leaf in leaves_of(arguments) if id(leaf) in self._made}

    def is_computed_in(self, arguments: Any) -> bool:
        """Whether an argument was computed from what a layer returned besides the hidden state, or is no tensor."""
        for _, leaf in leaves_of(arguments):
            computed = isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in self._made
            if (computed and self._made) or any(leaf is each for each in self._objects):
                return True
        return False

    def passed_on(self, index: int, seen: Seen, arguments: Any) -> tuple[Any, ...]:
        """What a layer returns after the hidden state, as tensors that can be traced; it also writes what it has
        written into the model's own containers."""
        came = self.found_in(arguments)
        for path in seen.read:
            self._users[self._made[id(came[path])]].setdefault(index, []).append(path)
        alike: dict[int, Tensor] = {}

        def traceable(place: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                self._objects += [] if leaf is None else [leaf]
                return leaf
            if id(leaf) in self._made:  # as it came
                return leaf
            if id(leaf) not in alike:
                alike[id(leaf)] = self._traceable(leaf, (index, place), value_at(seen.traced, place))
            return alike[id(leaf)]

        def traceable_in(entry: Path, inner: Path, leaf: Any) -> Any:
            return traceable((*entry, *inner), leaf)

        rest = tuple(seen.output[1:]) if isinstance(seen.output, tuple | list) else ()
        self._others.append(rebuilt(rest, lambda path, leaf: traceable((0, path[0] + 1, *path[1:]), leaf)))
        self._writes.append([])
        for path, key, value in seen.writes:
            marked = rebuilt(value, partial(traceable_in, (1, *path, key)))
            value_at(arguments, path)[key] = marked
            self._writes[-1].append((path, key, marked))
        return self._others[-1]

    def _traceable(self, leaf: Tensor, origin: Origin, traced: Tensor) -> Tensor:
        """A tensor of its own: what is computed from it needs a gradient."""
        tensor = leaf.detach()
        if tensor.is_floating_point():
            tensor.requires_grad_()
        self._made[id(tensor)] = origin
        self._tensors.append(tensor)
        self._users[origin], self._differentiable[origin] = {}, traced.requires_grad
        return tensor

    def finish(self, layers: int) -> list[Passing | None]:
        """For each layer what it passes on. Raises `Untraceable` if nothing reads what a layer has written."""
        numbers = {origin: number for number, origin in enumerate(each for each in self._users if self._users[each])}
        users = {origin: self._users[origin] for origin in numbers}
        self.sides = [
            SideValue(origin[0] + 1, tuple(index + 1 for index in sorted(by)), self._differentiable[origin])
            for origin, by in users.items()
        ]

        def marker(path: Path, leaf: Any) -> Any:
            origin = self._made.get(id(leaf))
            return Marker(numbers[origin]) if origin in numbers else None

        passings: list[Passing | None] = []
        for index in range(layers):
            takes = {path: numbers[origin] for origin, by in users.items() for path in by.get(index, ())}
            makes = {number: origin[1] for origin, number in numbers.items() if origin[0] == index}
            others = rebuilt(self._others[index], marker) if index < len(self._others) else ()
            writes = [(path, key, rebuilt(value, marker)) for path, key, value in self._writes[index : index + 1][0]]
            if any(leaf is None for _, _, value in writes for _, leaf in leaves_of(value)):
                raise Untraceable
            passes = takes or makes or writes or any(leaf is not None for _, leaf in leaves_of(others))
            passings.append(Passing(takes, makes, others, tuple(writes)) if passes else None)
        return passings


Origin = tuple[int, Path]
"""A layer, and a place in (its return value, its arguments)."""
