"""On a loss or gradient that is not finite, check whether the weights already contain NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.dist import World
from megatrain.errors import NonFinite
from megatrain.memory import Store

MOST_NAMED = 3
"""Number of non-finite weights that a message names."""


class NonfiniteWeights:
    """Checks the weights at most once per successful step, since a failing step does not change them."""

    def __init__(self, store: Store, world: World) -> None:
        self._store, self._world = store, world
        self._sound_at: int | None = None
        """Number of steps done when all weights were last found finite."""

    def may_have_come(self) -> None:
        """The weights were replaced."""
        self._sound_at = None

    @contextmanager
    def blamed(self, steps: int) -> Iterator[None]:
        """Make a `NonFinite` from the block name non-finite weights, if there are any. With several ranks all raise
        it.

        steps: number of steps done.
        """
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
            fix = "start from other weights: these are damaged, or from a diverged run"
            what = f"{error.what}, and some weights are not finite either: {named}"
            raise NonFinite(what, where=error.where, fix=fix, parameters=bad) from error
