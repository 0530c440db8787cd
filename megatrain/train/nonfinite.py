"""Finds the source of a NaN or infinite loss or gradient: non-finite weights, or the first module that returns one.

A step whose loss is finite costs nothing for it: modules are looked at in a second forward pass over the same
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megatrain.engine import Streamer
from megatrain.errors import MegaTrainError, NonFinite
from megatrain.memory import Store
from megatrain.model import PortedModel, listed
from megatrain.model.peak import tensors_of

MOST_NAMED = 3
"""Number of non-finite weights that a message names."""


class NonfiniteCauses:
    """Checks the weights at most once per successful step, since a failing step does not change them."""

    def __init__(self, store: Store, streamer: Streamer) -> None:
        self._store, self._context, self._world = store, streamer.context, streamer.context.world
        self._sound_at: int | None = None
        """Number of steps done when all weights were last found finite."""

    def weights_replaced(self) -> None:
        """The weights may have become non-finite."""
        self._sound_at = None

    @contextmanager
    def named(self, steps: int, forward: Callable[[], object] | None = None) -> Iterator[None]:
        """Make a `NonFinite` from the block name non-finite weights, or else where a non-finite loss comes from. With
        several ranks all raise it.

        steps: number of steps done. forward: computes the loss once more.
        """
        try:
            yield
        except NonFinite as error:
            if bad := [] if self._sound_at == steps else self._bad_weights():
                what = f"{error.what}, and some weights are not finite either: {listed(bad, MOST_NAMED)}"
                fix = "start from other weights: these are damaged, or from a diverged run"
                raise NonFinite(what, where=error.where, fix=fix, parameters=bad) from error
            self._sound_at = steps
            if forward is not None and error.of_loss:
                error.what += self._source(forward)
            raise

    def _bad_weights(self) -> list[str]:
        told = self._world.exchange("weights that are not finite", self._store.non_finite())
        return list(dict.fromkeys(name for of_rank in told for name in of_rank))

    def _source(self, forward: Callable[[], object]) -> str:
        """Where a non-finite loss comes from, in words; nothing if the loss cannot be computed again. With several
        ranks, raises what fails on one of them."""
        outputs, is_finite = ModuleValues(self._context.ported), True
        try:
            with outputs.watched():
                forward()
        except NonFinite as again:
            if not again.of_loss:  # some units were updated, on all ranks
                return ""
            is_finite = False
        except MegaTrainError:
            if self._world.size > 1:  # the others are in the forward pass, as when a step fails
                raise
            return ""
        told = self._world.exchange("outputs that are not finite", outputs.first_nonfinite())
        if first := min(((*found, rank) for rank, found in enumerate(told) if found), default=None):
            _, name, rank = first
            return f", first not finite: {name}" + (f" on rank {rank}" if self._world.size > 1 else "")
        if not is_finite:
            return ", although the outputs of all modules are finite"
        return ", and finite when computed again"


class ModuleValues:
    """Whether inputs and outputs of the modules of a model are finite, in the order in which they run."""

    def __init__(self, ported: PortedModel) -> None:
        layers = ((ported.prefix(index), layer) for index, layer in enumerate(ported.templates))
        self._names = {
            id(module): (prefix + name).removesuffix(".") or "the model"
            for prefix, root in (("", ported.skeleton), *layers)
            for name, module in root.named_modules()
        }
        self._seen: list[tuple[str, Tensor]] = []
        """What it is, and whether it is finite, on the device: a bool."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the block, look at every call of a module."""
        before = register_module_forward_pre_hook(lambda module, args: self._see("the input of ", module, args[:1]))
        after = register_module_forward_hook(lambda module, args, output: self._see("the output of ", module, output))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _see(self, what: str, module: nn.Module, value: Any) -> None:
        if name := self._names.get(id(module)):
            floating = (each for each in tensors_of(value) if each.is_floating_point() and not each.is_meta)
            self._seen += [(what + name, each.isfinite().all()) for each in floating]

    def first_nonfinite(self) -> tuple[int, str] | None:
        """(position in the order, which input or output) of the first one that is not finite."""
        return next(((at, what) for at, (what, finite) in enumerate(self._seen) if not finite), None)
