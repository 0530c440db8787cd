"""Where gradients go: into the norm, and into the fused AdamW pass.

With `update="next_forward"` the sink sums the squared norms of a step; when all units have landed, `finish` fixes the
clipping factor and every unit has an update *pending*, to be applied by the next schedule (during its forward, just
ahead of each unit's fetch) or by a flush. With `update="during_backward"` each unit is updated as it lands. Either
way a gradient that is not finite stops the step before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.dist import ALONE, World
from megatrain.engine.gradient_sums import of_parameters
from megatrain.errors import NonFinite
from megatrain.memory import Store, unit_state
from megatrain.optim import (
    AdamW,
    StepScalars,
    clip_scale,
    expansion,
    own_square_sums,
    sum_of_squares,
    update_fp32,
    update_split,
)
from megatrain.spec import ModelSpec, Numerics, Part, Policy, UnitSpec
from megatrain.spec.layout import OWNED, Ownership, layout_of
from megatrain.train.device_adamw import kernels_for, sum_of_squares_on_device, update_on_device
from megatrain.train.options import threads_of


class OptimizerSink:
    """A `GradSink` that trains: one AdamW over all units."""

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        optimizer: AdamW,
        max_grad_norm: float | None,
        device: Device,
        owned: Ownership = Ownership(),  # noqa: B008  # a frozen value
        world: World = ALONE,
    ) -> None:
        self.optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self.threads = policy.host_threads
        """Of updates; 0 until the first step, where the policy says so."""
        self.updates = 0
        """Updates applied or pending; the step number of the newest."""
        self.pending: set[int] = set()
        """Units whose gradient of the last step waits in host memory."""
        self._precision = numerics.precision
        self._device, self._world, self._owned = device, world, owned
        self._kernels: Any = None
        self._deferred = policy.update == "next_forward"
        self._model = model
        self._names = [unit.name for unit in model.units]
        self._layouts = [layout_of(unit) for unit in model.units]
        self._segments = [self._cut(unit, owned) for unit in model.units]
        self.trained = [unit for unit, spec in enumerate(model.units) if spec.trains]
        """Units with anything to update."""
        self.applied = [0] * len(model.units)
        """Updates that each unit has had."""
        self.before_update: Callable[[int], None] = lambda unit: None
        """Called with a unit that is about to change; may block until it may."""
        self._squares: dict[int, float] = {}
        self._on_their_way: dict[int, Tensor] = {}
        """Sums of squares of units on the device, which are landed when the device has come to rest."""
        self.not_finite: dict[int, list[str]] = {}
        """Unit whose gradient in host memory is not finite -> the parameters that it is so for."""
        self._own_squares: list[float] = []
        """Of several ranks, numbers whose sum over all of them is that of the squares."""
        self._sound: dict[int, Tensor] = {}
        """Of units that are updated on the device as their gradient lands, whether it is finite: bool, there."""
        self._let_through: set[int] = set()
        """Those of them whose update has run, and has changed them if their gradient was finite."""
        self._updated: set[int] = set()
        self._unfinished = False
        """Whether any of several ranks may have updated units in a step that has not come to its end."""
        self._reached: dict[int, int] = {}
        """Unit that is updated in pieces -> elements that have been, where not all have."""
        self._scalars: tuple[StepScalars, ...] | None = None
        """Of each group of parameters."""
        self._next_lr = optimizer.lr
        self.how: dict[str, object] = {}
        self.adopt(policy)

    def begin(self, lr: float) -> None:
        """A new step starts, whose own update will use this learning rate.

        Raises `ConfigError` for a rate out of range, and `NonFinite` where an interrupted step has left some units
        ahead of others; either way before anything is computed.
        """
        self.refuse_torn()
        self.threads = self.threads or threads_of(self._world)
        if not self.pending:  # an interrupted step whose updates were all applied counts as a step
            self.updates = max([self.updates, *(self.applied[unit] for unit in self.trained)])
        scalars = self.optimizer.scalars_by_group(lr=lr, step=self.updates + 1)
        for found in (self._squares, self._on_their_way, self._sound, self._own_squares, self.not_finite):
            found.clear()
        self._updated.clear()
        self._next_lr = lr
        self.how = {"lr": lr, "max_grad_norm": self.max_grad_norm, "optimizer": str(self.optimizer)}
        if not self._deferred:
            self._scalars = scalars

    def norm(self, unit: int, gradient: Tensor, loss: Tensor | None) -> None:
        """Sum the squares of a unit's gradient, or of what this rank owns of it. Raises `NonFinite`; of a unit on the
        device, and where there are several ranks, `finish` does."""
        self._unfinished = self._world.size > 1 and not self._deferred
        if self._normed_there[unit]:
            squares = sum_of_squares_on_device(gradient, self._kernels)
            if loss is not None:
                squares += 0 * loss  # of a loss that is not finite no gradient is used either
            self._on_their_way[unit] = self._device.landing(squares)
            if not self._deferred:
                self._sound[unit] = squares.isfinite()
            return
        if self._world.size > 1:
            own = own_square_sums(_as_numpy(gradient), OWNED, self.threads)
            self._squares[unit] = math.fsum(own)
            self._own_squares += own
        else:
            self._squares[unit] = sum_of_squares(_as_numpy(gradient), self.threads)
        if not math.isfinite(self._squares[unit]):
            self.not_finite[unit] = self._names_of(unit, gradient)
            if self._world.size == 1:
                raise self._refusal(unit, self.not_finite[unit], self._done)

    def update(
        self, unit: int, gradient: Tensor, parts: Mapping[Part, Tensor], elements: tuple[int, int] | None = None
    ) -> None:
        """Apply AdamW to a unit, where its state is, with the scalars of the step that the gradient belongs to.

        A deferred update that an interrupted step has applied already is not applied again.
        """
        if unit not in (self.pending if self._deferred else self.trained):
            return
        if not self._deferred and not math.isfinite(self._squares.get(unit, 0.0)):
            return  # of several ranks, which all hear of it at the end
        self.before_update(unit)
        if elements is not None or self._on_device[unit]:
            sound, kernels = self._sound.get(unit), self._kernels
            start, stop = elements or (0, self._layouts[unit].trained.own_size)
            for scalars, inside in self._inside(unit, start, stop):
                segments = [(a - start, b - start, decays) for a, b, decays in inside]
                update_on_device(parts, gradient, self._precision, scalars, segments, sound, kernels)
            self._reached[unit] = stop
            if stop < self._layouts[unit].trained.own_size:
                return
            del self._reached[unit]
            if sound is not None:
                self._let_through.add(unit)
                return
        else:
            self._update_on_host(unit, gradient, parts)
            self._reached.pop(unit, None)
        self.pending.discard(unit)
        self._updated.add(unit)
        self.applied[unit] += 1

    def _update_on_host(self, unit: int, gradient: Tensor, parts: Mapping[Part, Tensor]) -> None:
        state, trained = unit_state(parts, self._layouts[unit], self._precision), self._layouts[unit].trained.own_size
        grad = _as_numpy(gradient)
        hi = state.hi[: state.m.size]  # what is frozen comes after
        lo = None if state.lo is None else state.lo[: state.m.size]
        for scalars, segments in self._inside(unit, self._reached.get(unit, 0), trained):
            if lo is None:
                update_fp32(hi, state.m, state.v, grad, scalars, segments, self.threads)
            else:
                update_split(hi, lo, state.m, state.v, grad, scalars, segments, self.threads)

    def _inside(self, unit: int, start: int, stop: int) -> Iterator[tuple[StepScalars, list[tuple[int, int, bool]]]]:
        """The segments of a unit, as far as they are among its elements [start, stop): of each group that has any,
        with its factors."""
        assert self._scalars is not None
        for group, segments in self._segments[unit].items():
            cut = [(max(start, a), min(stop, b), decays) for a, b, decays in segments]
            if inside := [segment for segment in cut if segment[0] < segment[1]]:
                yield self._scalars[group], inside

    @property
    def is_interrupted(self) -> bool:
        """Whether some of what was pending has been applied, by a step that was broken off."""
        return bool(self.pending and (self._reached or len(self.pending) < len(self.trained)))

    def adopt(self, policy: Policy) -> None:
        """Units live where this policy has them from now on. Nothing may be pending, and the device is at rest."""
        self._on_device = [policy.placement(unit).on_device for unit in range(len(self._names))]
        self._normed_there, streamed = list(self._on_device), policy.updates_streamed(self._model)
        for unit in () if self._deferred else streamed:
            self._normed_there[unit] = True
        if any(self._on_device) or streamed:
            self._kernels = kernels_for(self._device)

    def restore(self, updates: int) -> None:
        """The state is that after so many updates, of each unit that trains; nothing is pending."""
        self.updates, self._scalars, self._unfinished = updates, None, False
        self.pending.clear()
        self._reached.clear()
        self.applied = [updates if unit in self.trained else 0 for unit in range(len(self._names))]

    def at_rest(self) -> None:
        """The device has come to rest, whether the step has succeeded or not: what it has decided is known."""
        self._squares |= {unit: float(squares) for unit, squares in self._on_their_way.items()}
        for unit in [unit for unit in self._reached if unit in self._sound and not math.isfinite(self._squares[unit])]:
            del self._reached[unit]  # nothing has changed
        for unit in sorted(self._let_through):
            if math.isfinite(self._squares[unit]):
                self._updated.add(unit)
                self.applied[unit] += 1
        for found in (self._on_their_way, self._sound, self._let_through):
            found.clear()

    def finish(self) -> float:
        """All gradients of the step have landed: fix the clipping factor. Returns the global norm before clipping.

        Raises `NonFinite` for the gradient of a unit on the device, and on all ranks for one of any.
        """
        bad = [(unit, self.not_finite.get(unit, [])) for unit, of in self._squares.items() if not math.isfinite(of)]
        there = [squares for unit, squares in self._squares.items() if self._normed_there[unit]]
        told = self._world.exchange("the norm", (bad, expansion([*self._own_squares, *there]), sorted(self._done)))
        if odd := [(unit, names) for units, _, _ in told for unit, names in units]:
            first = max(unit for unit, _ in odd)
            names = list(dict.fromkeys(name for unit, own in odd for name in own if unit == first))
            raise self._refusal(first, names, {unit for _, _, units in told for unit in units})
        squares = self._squares.values() if self._world.size == 1 else [each for _, own, _ in told for each in own]
        total = math.sqrt(math.fsum(squares))
        if self._deferred:
            scale = 1.0 if self.max_grad_norm is None else clip_scale(total, self.max_grad_norm)
            how = {"lr": self._next_lr, "grad_scale": scale}
            self._scalars = self.optimizer.scalars_by_group(step=self.updates + 1, **how)
            self.pending = set(self.trained)
        self.updates, self._unfinished = self.updates + 1, False
        return total

    def refuse_torn(self) -> None:
        """Raise `NonFinite` where an interrupted step has left some units ahead of others, naming them."""
        counts = {self.applied[unit] for unit in self.trained}
        if self.pending or (len(counts) <= 1 and not self._reached and not self._unfinished):
            return
        ahead = [unit for unit in self.trained if len(counts) > 1 and self.applied[unit] == max(counts)]
        named = ", ".join(self._names[unit] for unit in sorted({*ahead, *self._reached}))
        what = f"an interrupted step has updated only these units: {named}"
        raise NonFinite(
            "an interrupted step has updated units on some ranks" if self._unfinished else what,
            where="optimizer",
            fix="start again from a saved model; with max_grad_norm a step applies whole or not at all",
        )

    @property
    def _done(self) -> set[int]:
        """Units that this step's own gradient has updated."""
        return set() if self._deferred else self._updated | self._let_through

    def _names_of(self, unit: int, gradient: Tensor) -> list[str]:
        """Parameters for which the gradient of a unit, or what this rank owns of it, is not finite: the last of the
        unit first, as the backward pass comes to them."""
        layout = layout_of(self._model.units[unit])
        return [
            field.name
            for field in reversed(layout.trained.fields)
            if not all(
                bool(gradient[piece.own.start : piece.own.stop].isfinite().all())
                for piece in self._owned.within(layout, field.start, field.stop)
            )
        ]

    def _refusal(self, unit: int, parameters: Sequence[str], done: set[int]) -> NonFinite:
        """parameters: those of the unit whose gradient is not finite. done: units that have been updated."""
        what = f"the gradient is not finite{of_parameters(parameters)}"
        if not done:
            return NonFinite(
                what,
                where=self._names[unit],
                fix="nothing was updated; lower the learning rate",
            )
        named = ", ".join(self._names[other] for other in sorted(done))
        return NonFinite(
            f"{what}, and these units had been updated already: {named}",
            where=self._names[unit],
            fix="set max_grad_norm, which makes a step apply whole or not at all",
        )

    def _cut(self, unit: UnitSpec, owned: Ownership) -> dict[int, list[tuple[int, int, bool]]]:
        """Group of parameters -> element ranges of the buffers of a unit's state that train, and whether they decay."""
        layout, optimizer = layout_of(unit), self.optimizer
        found: dict[int, list[tuple[int, int, bool]]] = {}
        for field in layout.trained.fields:
            pieces = owned.within(layout, field.start, field.stop)
            segments = [(piece.own.start, piece.own.stop, optimizer.decays(field.name)) for piece in pieces]
            found.setdefault(optimizer.group(field.name), []).extend(segments)
        return found


class GradientCollector:
    """A `GradSink` that keeps a float32 copy of every gradient as it lands, and updates nothing.

    store: puts together what several ranks own of one.
    """

    def __init__(
        self,
        model: ModelSpec,
        before_update: Callable[[int], None] = lambda unit: None,
        store: Store | None = None,
    ) -> None:
        self._before_update, self._units = before_update, model.units
        self._together = store.together if store is not None and model.ranks > 1 else None
        self._own: dict[int, Tensor] = {}
        self._fields = [
            [f for f, param in zip(layout_of(unit).fields, unit.params, strict=True) if param.trainable]
            for unit in model.units
        ]
        self._names = [unit.name for unit in model.units]
        self.gradients: dict[str, Tensor] = {}
        self.not_finite: dict[int, list[str]] = {}
        self.how: dict[str, object] = {}

    def norm(self, unit: int, gradient: Tensor, loss: Tensor | None) -> None:
        if self._together is not None:  # a step of several ranks looks at the end whether all are finite
            self._own[unit] = gradient.to("cpu", torch.float32, copy=True)
            return
        if not bool(gradient.isfinite().all()):
            raise NonFinite("the gradient is not finite", where=self._names[unit])
        self._keep(unit, gradient)

    def _keep(self, unit: int, gradient: Tensor) -> None:
        for field in self._fields[unit]:
            part = gradient[field.start : field.stop].to("cpu", torch.float32, copy=True)
            self.gradients[field.name] = part.view(field.shape)

    def finish(self) -> dict[str, Tensor]:
        """All have landed: parameter name -> gradient, in its shape. Of several ranks all must call it."""
        for unit in sorted(self._own, reverse=True):
            assert self._together is not None
            self._keep(unit, self._together(self._own.pop(unit), layout_of(self._units[unit]).trained))
        return self.gradients

    def update(
        self, unit: int, gradient: Tensor, parts: Mapping[Part, Tensor], elements: tuple[int, int] | None = None
    ) -> None:
        """The weights stay as they are; but what lives on the disk is written back, so nobody may be reading it."""
        self._before_update(unit)


def _as_numpy(gradient: Tensor) -> np.ndarray:
    """bfloat16 as its bits (uint16), float32 as it is; no copy."""
    if gradient.dtype == torch.bfloat16:
        return gradient.view(torch.int16).numpy().view(np.uint16)
    return gradient.numpy()
