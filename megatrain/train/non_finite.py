"""A step that was not finite: is it the weights that are not?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.errors import NonFinite
from megatrain.memory import Store

MOST_NAMED = 3
"""Weights that are not finite, of which a message names so many."""


class Blame:
    """Looks through the weights of a store when a step was not finite."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sound_at: int | None = None  # steps that had been done when the weights were last found to be finite

    def forget(self) -> None:
        """The weights are others now."""
        self._sound_at = None

    @contextmanager
    def weights(self, steps: int) -> Iterator[None]:
        """`NonFinite` out of the block names the weights that are not finite themselves, if that is what it is about.

        They are looked through once for each step that has been done: one that fails changes none of them.
        """
        try:
            yield
        except NonFinite as error:
            if self._sound_at == steps:
                raise
            if not (bad := self._store.non_finite()):
                self._sound_at = steps
                raise
            named = ", ".join(bad[:MOST_NAMED]) + (f" and {len(bad) - MOST_NAMED:,} more" if bad[MOST_NAMED:] else "")
            fix = "start from other weights: these were damaged, or are of a run that had diverged"
            what = f"{error.what}, as are values of the weights themselves: {named}"
            raise NonFinite(what, where=error.where, fix=fix, parameters=bad) from error
