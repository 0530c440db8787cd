"""The memory of side values: what units pass to later ones besides the hidden state, and the gradients of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from megatrain.schedule.contents import Content, Side, SideGradient
from megatrain.schedule.ops import Access, Use
from megatrain.spec import ModelSpec, Work

Transient = Callable[[Use, str, int, Content], Access]
"""(use, name within it, bytes, content) -> device memory that exists while ops need it."""


class SideValues:
    """Assigns the memory of one step's side values, which stay on the device from the unit that makes them to the last
    that reads them."""

    def __init__(self, model: ModelSpec, work: Work, transient: Transient) -> None:
        self._model, self._work, self._transient = model, work, transient
        self._made: dict[int, list[int]] = defaultdict(list)
        """Unit -> numbers of the side values that it makes, and below of those that it reads."""
        self._used: dict[int, list[int]] = defaultdict(list)
        for number, side in enumerate(model.sides):
            self._made[side.source].append(number)
            for user in side.users:
                self._used[user].append(number)

    def made(self, unit: int, micro: int) -> list[Access]:
        """The side values that a unit's forward leaves."""
        return [self._value(number, micro) for number in self._made[unit] if self._has_memory(number)]

    def used(self, unit: int, micro: int) -> list[Access]:
        """The side values that a unit reads."""
        return [self._value(number, micro) for number in self._used[unit] if self._has_memory(number)]

    def _has_memory(self, number: int) -> bool:
        """Those of the prologue are among the arguments of layers, except its hidden state."""
        side = self._model.sides[number]
        return side.source > 0 or side.is_hidden

    def backward(self, unit: int, micro: int) -> tuple[list[Access], list[Access]]:
        """Gradients of side values in a unit's backward: what it reads, and what it writes.

        Each unit that used a value adds to its gradient, from the top down; the unit that made it takes the sum.
        """
        values, wanted = self._model.sides, self._model.wants_gradient
        made = [number for number in self._made[unit] if wanted(values[number])]
        reads, writes = [self._gradient(number, micro, values[number].users[0]) for number in made], []
        for number in self._used[unit]:
            if wanted(values[number]):
                above = [user for user in values[number].users if user > unit]
                reads += [self._gradient(number, micro, above[0])] if above else []
                writes.append(self._gradient(number, micro, unit))
        return reads, writes

    def _value(self, number: int, micro: int) -> Access:
        use = Use.ROUTER_LOGITS if self._only_for_the_loss(number) else Use.SIDE_VALUES
        return self._transient(use, f"{number}.{micro}", self._nbytes(number, micro), Side(number, micro))

    def _gradient(self, number: int, micro: int, after: int) -> Access:
        """The gradient of a side value, which takes the place of a value that only the loss reads."""
        use = Use.ROUTER_LOGITS if self._only_for_the_loss(number) else Use.SIDE_GRADIENTS
        content = SideGradient(number, micro, after)
        return self._transient(use, f"{number}.{micro}", self._nbytes(number, micro), content)

    def _only_for_the_loss(self, number: int) -> bool:
        side = self._model.sides[number]
        return side.users == (self._model.epilogue,) and not side.is_hidden

    def _nbytes(self, number: int, micro: int) -> int:
        tokens = self._work.tokens[micro]
        nbytes = self._model.sides[number].nbytes(tokens, min(self._work.length or tokens, tokens))
        return max(1, round(self._work.repeats * nbytes))
