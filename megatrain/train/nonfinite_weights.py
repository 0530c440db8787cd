"""On a loss or gradient that is not finite, check whether the weights already contain NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.dist import World
from megatrain.errors import NonFinite
from megatrain.memory import Store

MOST_NAMED = 3
"""Weights that are not finite, of which a message names so many."""


class NonfiniteWeights:
    """Looks through the weights once for each step that has been done: one that fails changes none of them."""

    def __init__(self, store: Store, world: World) -> None:
        self._store, self._world = store, world
        self._sound_at: int | None = None
        """Steps that had been done when all were last found to be finite."""

    def may_have_come(self) -> None:
        """The weights are others now."""
        self._sound_at = None

    @contextmanager
    def blamed(self, steps: int) -> Iterator[None]:
        """`NonFinite` out of the block, after so many steps, names the weights that are not finite themselves, if that
        is what it is about. Of several ranks it comes out on all."""
        try:
            yield
        except NonFinite as error:
            if self._sound_at == steps:
                raise
            told = self._world.exchange("weights that are not finite", self._store.non_finite())
            if not (bad := list(dict.fromkeys(name for of_rank in told for name in of_rank))):
                self._sound_at = steps
                raise
            named = ", ".join(bad[:MOST_NAMED]) + (f" and {len(bad) - MOST_NAMED:,} more" if bad[MOST_NAMED:] else "")
            fix = "start from other weights: these were damaged, or are of a run that had diverged"
            what = f"{error.what}, as are values of the weights themselves: {named}"
            raise NonFinite(what, where=error.where, fix=fix, parameters=bad) from error
