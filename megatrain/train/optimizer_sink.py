"""The optimizer sink: takes each unit's gradient into the norm and the fused AdamW pass.

With `update="next_forward"` the sink sums a step's squared norms; when all units have landed, `finish` computes
the clipping factor, and every unit has an update *pending*, applied by the next schedule (during its forward, just
before each unit's fetch) or by a flush. With `update="during_backward"` each unit is updated as it lands. Either
way a gradient that is not finite stops the step before it is used.

As in PyTorch, a parameter without a gradient in a step (`None` there) is not updated: no decay, no change of moments,
and the count of its updates, which the bias correction uses, stays. Counts are held as `missed`, by how much a
parameter's is below its unit's, so that units in which all have gradients are updated as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.dist import ALONE, World
from megatrain.engine.gradient_accumulation import for_parameters
from megatrain.errors import NonFinite
from megatrain.memory import Store, unit_state
from megatrain.optim import (
    AdamW,
    StepScalars,
    clip_scale,
    expansion,
    own_square_sums,
    sum_of_squares,
    update_on_host,
)
from megatrain.optim.kernels import Segment
from megatrain.spec import ModelSpec, Numerics, Part, Policy
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
        self.threads = 0
        """Threads for updates; 0 until the first step if the policy leaves it open."""
        self.updates = 0
        """Number of updates applied or pending, which is the newest step's number."""
        self.pending: set[int] = set()
        """Units whose last gradient waits in host memory to be applied."""
        self._precision = numerics.precision
        self._device, self._world, self._owned = device, world, owned
        self._kernels: Any = None
        self._deferred = policy.update == "next_forward"
        self._model = model
        self._names = [unit.name for unit in model.units]
        self._layouts = [layout_of(unit) for unit in model.units]
        self._parameters = [[field.name for field in layout.trained.fields] for layout in self._layouts]
        """Names of each unit's trained parameters."""
        self.trained = [unit for unit, spec in enumerate(model.units) if spec.trains]
        """Units with trained parameters."""
        self.applied = [0] * len(model.units)
        """Number of updates applied to each unit."""
        self.missed: dict[str, int] = {}
        """Parameter -> updates of its unit in which it had no gradient, if any."""
        self._absent: dict[int, Collection[str]] = {}
        """Unit -> its parameters without a gradient in this step, on this rank."""
        self._present: dict[int, tuple[Tensor, Tensor]] = {}
        """Unit -> flags of its parameters, on any rank: see `GradSink.present`."""
        self._left_out: dict[int, Collection[str]] = {} if self._deferred else self._absent
        """The same as `_absent` for the gradients that the next updates use, on all ranks if those are pending."""
        self._whole = [self._cut(unit, self._parameters[unit]) for unit in range(len(model.units))]
        """Of each unit, what `_cut` returns if all parameters have had all updates."""
        self.before_update: Callable[[int], None] = lambda unit: None
        """Called before a unit is updated; may block until it may be."""
        self._squares: dict[int, float] = {}
        self._on_their_way: dict[int, Tensor] = {}
        """Sums of squares of units on the device, readable once the device is idle."""
        self.not_finite: dict[int, list[str]] = {}
        """Unit with a non-finite gradient in host memory -> the parameters concerned."""
        self._own_squares: list[float] = []
        """With several ranks: numbers whose sum over all ranks is the sum of squares."""
        self._sound: dict[int, Tensor] = {}
        """For units updated on the device as their gradient lands: whether it is finite, a bool there."""
        self._let_through: set[int] = set()
        """Those of them whose update has run, with effect if the gradient was finite."""
        self._updated: set[int] = set()
        self._unfinished = False
        """Whether any rank may have updated units in a step that was not completed."""
        self._reached: dict[int, int] = {}
        """Unit updated in pieces -> elements updated so far, if not all."""
        self._scalars: Callable[[int], tuple[StepScalars, ...]] | None = None
        """Factors of each group of parameters, given how many updates a parameter has missed."""
        self._next_lr = optimizer.lr
        self.settings: dict[str, object] = {}
        self.adopt(policy)

    def begin(self, lr: float) -> None:
        """Start a step whose update will use this learning rate.

        Raises, before anything is computed, `ConfigError` for a rate out of range, and `NonFinite` if an interrupted
        step has left some units ahead of others.
        """
        self.refuse_torn()
        self.threads = self.threads or threads_of(self._world)
        if not self.pending:  # an interrupted step whose updates were all applied counts as a step
            self.updates = max([self.updates, *(self.applied[unit] for unit in self.trained)])
        scalars = self._factors(lr)
        collected = (self._squares, self._on_their_way, self._sound, self.not_finite, self._absent, self._present)
        for found in (*collected, self._own_squares, self._updated):
            found.clear()
        self._next_lr = lr
        self.settings = {"lr": lr, "max_grad_norm": self.max_grad_norm, "optimizer": str(self.optimizer)}
        if not self._deferred:
            self._scalars = scalars

    def _factors(self, lr: float, grad_scale: float = 1.0) -> Callable[[int], tuple[StepScalars, ...]]:
        """The factors of the next update, for any number of missed ones. Raises as `AdamW.scalars` does."""
        optimizer, step = self.optimizer, self.updates + 1
        made = cache(lambda missed: optimizer.scalars_by_group(lr=lr, step=step - missed, grad_scale=grad_scale))
        made(0)
        return made

    def absent(self, unit: int, names: Sequence[str]) -> None:
        self._absent[unit] = frozenset(names)

    def present(self, unit: int, flags: Tensor, landed: Tensor) -> None:
        self._present[unit] = flags, landed

    def norm(self, unit: int, gradient: Tensor, loss: Tensor | None) -> None:
        """Sum the squares of a unit's gradient, or of this rank's share. Raises `NonFinite`, which for units on the
        device and for several ranks `finish` does instead."""
        self._unfinished = self._world.size > 1 and not self._deferred
        if self._normed_there[unit]:
            squares = sum_of_squares_on_device(gradient, self._kernels)
            if loss is not None:
                squares += 0 * loss  # with a non-finite loss no gradient is used either
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
        """Apply AdamW to a unit, where its state is, with the factors of the gradient's own step.

        A deferred update that an interrupted step has already applied is not repeated.
        """
        if unit not in (self.pending if self._deferred else self.trained):
            return
        if not self._deferred and not math.isfinite(self._squares.get(unit, 0.0)):
            return  # with several ranks, all of which learn of it at the end
        self.before_update(unit)
        if elements is not None or self._on_device[unit]:
            sound = self._sound.get(unit)
            start, stop = elements or (0, self._layouts[unit].trained.own_size)
            for flag, names in self._to_update_there(unit, sound):
                for scalars, inside in self._inside(unit, start, stop, names):
                    segments = [(a - start, b - start, decays) for a, b, decays in inside]
                    update_on_device(parts, gradient, self._precision, scalars, segments, flag, self._kernels)
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
        self._count_update(unit)

    def _count_update(self, unit: int) -> None:
        """A unit's update has been applied."""
        self._updated.add(unit)
        self.applied[unit] += 1
        for name in self._without_gradient(unit):
            self.missed[name] = self.missed.get(name, 0) + 1

    def _without_gradient(self, unit: int) -> Collection[str]:
        """The unit's parameters that its update leaves out."""
        here = self._left_out.get(unit, ())
        if not here or unit not in self._present:
            return here
        _, landed = self._present[unit]
        return {name for name, flag in zip(self._parameters[unit], landed.tolist(), strict=True) if not flag}

    def _to_update_there(self, unit: int, sound: Tensor | None) -> Iterator[tuple[Tensor | None, Collection[str]]]:
        """(flag on the device or None, names of parameters): what an update on the device covers, if the flag is true.

        The host may not know yet which of the parameters without a gradient on this rank got one on another."""
        here = self._left_out.get(unit, ())
        yield sound, [name for name in self._parameters[unit] if name not in here]
        if here and unit in self._present:
            flags, _ = self._present[unit]
            for flag, name in zip(flags, self._parameters[unit], strict=True):
                if name in here:
                    yield flag.bool() if sound is None else flag.bool() & sound, [name]

    def _update_on_host(self, unit: int, gradient: Tensor, parts: Mapping[Part, Tensor]) -> None:
        state, trained = unit_state(parts, self._layouts[unit], self._precision), self._layouts[unit].trained.own_size
        grad, state = _as_numpy(gradient), state.part(slice(0, trained))
        absent = self._without_gradient(unit)
        names = [name for name in self._parameters[unit] if name not in absent]
        for scalars, segments in self._inside(unit, self._reached.get(unit, 0), trained, names):
            update_on_host(state, grad, scalars, segments, self.threads)

    def _inside(
        self, unit: int, start: int, stop: int, names: Collection[str]
    ) -> Iterator[tuple[StepScalars, list[Segment]]]:
        """(factors, segments) of the parameters of these names, where they are among a unit's elements [start, stop),
        for each group and number of missed updates."""
        assert self._scalars is not None
        whole = len(names) == len(self._parameters[unit]) and self.missed.keys().isdisjoint(names)
        is_cut = (start, stop) != (0, self._layouts[unit].trained.own_size)
        for (group, missed), segments in (self._whole[unit] if whole else self._cut(unit, names)).items():
            inside = segments
            if is_cut:
                inside = [(max(start, a), min(stop, b), decays) for a, b, decays in segments]
                inside = [segment for segment in inside if segment[0] < segment[1]]
            if inside:
                yield self._scalars(missed)[group], inside

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupted step has applied some of the pending updates."""
        return bool(self.pending and (self._reached or len(self.pending) < len(self.trained)))

    def adopt(self, policy: Policy) -> None:
        """Units are now placed as in this policy. No updates may be pending, and the device must be idle."""
        self.threads = policy.host_threads
        self._on_device = [policy.placement(unit).on_device for unit in range(len(self._names))]
        self._normed_there, streamed = list(self._on_device), policy.updates_streamed(self._model)
        for unit in () if self._deferred else streamed:
            self._normed_there[unit] = True
        if any(self._on_device) or streamed:
            self._kernels = kernels_for(self._device)

    def restore(self, updates: int, missed: Mapping[str, int] | None = None) -> None:
        """Every trained unit has had this many updates, less those its parameters have missed; none is pending."""
        self.updates, self._scalars, self._unfinished = updates, None, False
        self.missed = dict(missed or {})
        self.pending.clear()
        self._reached.clear()
        self.applied = [updates if unit in self.trained else 0 for unit in range(len(self._names))]

    def at_rest(self) -> None:
        """The device is idle, after success or failure: read what it has decided."""
        self._squares |= {unit: float(squares) for unit, squares in self._on_their_way.items()}
        for unit in [unit for unit in self._reached if unit in self._sound and not math.isfinite(self._squares[unit])]:
            del self._reached[unit]  # nothing has changed
        for unit in sorted(self._let_through):
            if math.isfinite(self._squares[unit]):
                self._count_update(unit)
        for found in (self._on_their_way, self._sound, self._let_through):
            found.clear()

    def finish(self) -> float:
        """All gradients have landed: compute the clipping factor, and return the global norm before clipping.

        Raises `NonFinite` for gradients of units on the device, and on all ranks for one on any.
        """
        bad = [(unit, self.not_finite.get(unit, [])) for unit, of in self._squares.items() if not math.isfinite(of)]
        there = [squares for unit, squares in self._squares.items() if self._normed_there[unit]]
        absent = [(unit, sorted(names)) for unit, names in self._absent.items()] if self._deferred else []
        own = bad, expansion([*self._own_squares, *there]), sorted(self._done), absent
        told = self._world.exchange("the norm", own)
        if odd := [(unit, names) for units, *_ in told for unit, names in units]:
            first = max(unit for unit, _ in odd)
            names = list(dict.fromkeys(name for unit, own in odd for name in own if unit == first))
            raise self._refusal(first, names, {unit for _, _, units, _ in told for unit in units})
        squares = self._squares.values() if self._world.size == 1 else [each for _, of, *_ in told for each in of]
        total = math.sqrt(math.fsum(squares))
        if self._deferred:
            scale = 1.0 if self.max_grad_norm is None else clip_scale(total, self.max_grad_norm)
            self._scalars = self._factors(self._next_lr, scale)
            self.pending, by_rank = set(self.trained), [dict(each) for *_, each in told]
            self._left_out = {unit: set.intersection(*(set(of[unit]) for of in by_rank)) for unit in self._absent}
        self.updates, self._unfinished = self.updates + 1, False
        return total

    def refuse_torn(self) -> None:
        """Raise `NonFinite`, naming the units, if an interrupted step has left some ahead of others."""
        counts = {self.applied[unit] for unit in self.trained}
        if self.pending or (len(counts) <= 1 and not self._reached and not self._unfinished):
            return
        ahead = [unit for unit in self.trained if len(counts) > 1 and self.applied[unit] == max(counts)]
        named = ", ".join(self._names[unit] for unit in sorted({*ahead, *self._reached}))
        what = f"an interrupted step has updated only these units: {named}"
        raise NonFinite(
            "an interrupted step has updated units on only some ranks" if self._unfinished else what,
            where="optimizer",
            fix="start again from a saved model; with max_grad_norm a step is applied completely or not at all",
        )

    @property
    def _done(self) -> set[int]:
        """Units updated by this step's own gradient."""
        return set() if self._deferred else self._updated | self._let_through

    def _names_of(self, unit: int, gradient: Tensor) -> list[str]:
        """Parameters with a non-finite gradient in a unit, or in this rank's share: last first, in the order of
        backward."""
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
        """parameters: those of the unit with non-finite gradients. done: units already updated."""
        what = f"the gradient is not finite{for_parameters(parameters)}"
        if not done:
            return NonFinite(
                what,
                where=self._names[unit],
                fix="nothing was updated; lower the learning rate",
            )
        named = ", ".join(self._names[other] for other in sorted(done))
        return NonFinite(
            f"{what}, and these units were already updated: {named}",
            where=self._names[unit],
            fix="set max_grad_norm, with which a step is applied completely or not at all",
        )

    def _cut(self, unit: int, names: Collection[str]) -> dict[tuple[int, int], list[Segment]]:
        """(group, missed updates) -> (start, stop, decays) of the elements of these trained parameters in a unit's
        state buffers."""
        layout, optimizer, wanted = self._layouts[unit], self.optimizer, set(names)
        found: dict[tuple[int, int], list[Segment]] = {}
        for field in layout.trained.fields:
            if field.name not in wanted:
                continue
            pieces = self._owned.within(layout, field.start, field.stop)
            decays = optimizer.decays(field.name, field.shape)
            segments = [(piece.own.start, piece.own.stop, decays) for piece in pieces]
            found.setdefault((optimizer.group(field.name), self.missed.get(field.name, 0)), []).extend(segments)
        return found


class GradientCollector:
    """A `GradSink` that copies every gradient to float32 as it lands, and updates nothing.

    store: assembles the shares of several ranks.
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
        self.settings: dict[str, object] = {}

    def absent(self, unit: int, names: Sequence[str]) -> None:
        """Their gradients are collected as zeros."""

    def present(self, unit: int, flags: Tensor, landed: Tensor) -> None:
        """Likewise."""

    def norm(self, unit: int, gradient: Tensor, loss: Tensor | None) -> None:
        if self._together is not None:  # with several ranks, finiteness is checked at the end
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
        """Parameter name -> gradient in its shape, once all have landed. With several ranks all must call it."""
        for unit in sorted(self._own, reverse=True):
            assert self._together is not None
            self._keep(unit, self._together(self._own.pop(unit), layout_of(self._units[unit]).trained))
        return self.gradients

    def update(
        self, unit: int, gradient: Tensor, parts: Mapping[Part, Tensor], elements: tuple[int, int] | None = None
    ) -> None:
        """Change nothing; but state on the disk is written back, so nobody may be reading it."""
        self._before_update(unit)


def _as_numpy(gradient: Tensor) -> np.ndarray:
    """bfloat16 as its bits (uint16), float32 unchanged; no copy."""
    if gradient.dtype == torch.bfloat16:
        return gradient.view(torch.int16).numpy().view(np.uint16)
    return gradient.numpy()
