"""Assigns memory to side values, which units hand to later ones, and to their gradients: on the device, or offloaded.

All that one unit makes is kept in the same way: its side values as its hidden state, which is the next layer's input.
On the device, a value is a transient buffer from the unit that makes it to the last that reads it. Offloaded, it goes
through slots to host memory, as offloaded inputs do (`recompute`), and comes back for each unit that reads it and no
longer finds it in its slot. A hidden state that is also a side value has no memory of its own: units find it where the
next layer keeps it as its input, on the device, offloaded or in a graph. A value is never computed twice: where inputs
are dropped, it stays on the device, as does an input that later units read.

The gradient of a value takes the same route. It waits as long as a value does, from the highest unit that reads the
value to the one that makes it, unlike the gradient of the hidden state, which the next op takes. Each reader adds a
term, and the sum leaves again if it does not stay in its slot. Values of the prologue are among the arguments of
layers, which stay on the device; what only the loss reads (router logits) is small, and stays there too.
"""

from __future__ import annotations

from collections import defaultdict

from megatrain.schedule.contents import Side, SideGradient
from megatrain.schedule.ops import Access, Use
from megatrain.schedule.passes.recompute import PREFIXES, Activations
from megatrain.spec import ModelSpec, Work


class SideValues:
    """Assigns the memory of one step's side values, beside that of its `activations`."""

    def __init__(self, model: ModelSpec, work: Work, activations: Activations) -> None:
        self._model, self._work, self._activations = model, work, activations
        self.offloaded: dict[str, Access] = {}
        """Name -> each offloaded value or gradient of the ops made so far. Slots replace the names later."""
        self._made: dict[int, list[int]] = defaultdict(list)
        """Unit -> numbers of the side values that it makes."""
        self._used: dict[int, list[int]] = defaultdict(list)
        """Unit -> numbers of the side values that it reads."""
        for number, side in enumerate(model.sides):
            self._made[side.source].append(number)
            for user in side.users:
                self._used[user].append(number)

    def made(self, unit: int, micro: int) -> list[Access]:
        """The side values that a unit's forward leaves; its hidden state is the input of the next unit."""
        values = self._model.sides
        return [self._value(number, micro) for number in self._made[unit] if unit and not values[number].is_hidden]

    def used(self, unit: int, micro: int) -> list[Access]:
        """The side values that a unit reads besides its input and the arguments of layers."""
        accesses = []
        for number in self._used[unit]:
            side = self._model.sides[number]
            if side.is_hidden and side.source + 1 < unit:
                accesses.append(self._activations.found_by(side.source + 1, micro))
            elif side.source and not side.is_hidden:
                accesses.append(self._value(number, micro))
        return accesses

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
        return self._placed(number, Use.SIDE_VALUES, Side(number, micro))

    def _gradient(self, number: int, micro: int, after: int) -> Access:
        """The gradient of a side value after the backward of unit `after`. If only the loss reads the value, the
        gradient takes its place."""
        return self._placed(number, Use.SIDE_GRADIENTS, SideGradient(number, micro, after))

    def _placed(self, number: int, use: Use, content: Side | SideGradient) -> Access:
        side, micro, which = self._model.sides[number], content.micro, f"{number}.{content.micro}"
        tokens = self._work.tokens[micro]
        of_one = side.nbytes(tokens, min(self._work.length or tokens, tokens))
        nbytes = max(1, round(self._work.repeats * of_one))
        if side.users == (self._model.epilogue,) and not side.is_hidden:
            return self._activations.transient(Use.ROUTER_LOGITS, which, nbytes, content)
        if self._activations.leaves(side.source + 1, side.users, micro):
            access = Access(f"{PREFIXES[use]}{which}", 0, nbytes, content)
            self.offloaded.setdefault(access.buffer, access)
            return access
        return self._activations.transient(use, which, nbytes, content)
