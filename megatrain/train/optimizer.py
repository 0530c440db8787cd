"""The optimizer of a run: the norm of each unit's gradient, the factor that clips it, and the update of its state.

    norm      as the gradient of a unit lands, the sum of its squares is taken
    finish    once all have landed: the global norm, and the factor that clips
    update    a unit, or a piece of one, is updated with its gradient and that factor

With `update="next_forward"` an update is *pending* after `finish`, and the next schedule applies it (during its
forward, just before each unit's fetch), or a flush does. With `update="during_backward"` nothing is clipped, and each
unit is updated as its gradient lands. Either way a gradient that is not finite stops the step before it is used.

As in PyTorch, a parameter without a gradient in a step (`None` there) is not updated: no decay, no change of moments,
and the count of its updates, which the bias correction uses, stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.dist import ALONE, World
from megatrain.engine.gradient_accumulation import for_parameters
from megatrain.errors import NonFinite
from megatrain.memory import Store
from megatrain.optim import (
    MomentumArrays,
    Optimizer,
    StepScalars,
    clip_scale,
    expansion,
    matrix_shape,
    own_square_sums,
    sum_of_squares,
    update_on_host,
)
from megatrain.optim.kernels import Segment
from megatrain.schedule.passes.pieces import Piece
from megatrain.spec import ModelSpec, Part, Policy
from megatrain.spec.layout import NORM_BLOCK, OWNED, Layout, MatrixGroup, Ownership, layout_of
from megatrain.train.device_update import arrays_in, kernels_for, sum_of_squares_on_device, update_on_device
from megatrain.train.matrix_update import MuonUpdate, TrainedParameter, as_numpy, within
from megatrain.train.options import threads_of


@dataclass(slots=True)
class UnitVersion:
    """How many updates the state of a unit has had. With nothing reached, all of its elements have had the same."""

    applied: int = 0
    reached: int = 0
    """Elements that have had one update more, if only some have: those from the start to this one."""
    missed: dict[str, int] = field(default_factory=dict)
    """Parameter -> those of the updates in which it had no gradient, if any."""
    moved: int = 0
    """Elements up to which matrices that are updated whole have had their momentum updated once more; at least
    `reached` among these."""
    is_torn: bool = False
    """Whether it is being changed, or was when that failed: nobody knows which elements have changed."""

    def count(self, left_out: Collection[str]) -> None:
        self.applied, self.reached, self.moved = self.applied + 1, 0, 0
        for name in left_out:
            self.missed[name] = self.missed.get(name, 0) + 1


@dataclass(slots=True)
class UnitGradient:
    """What is known of the gradient of one unit in one step."""

    square_sums: Sequence[float] = ()
    """Numbers whose exact sum over all ranks is the sum of its squares, once they are on the host."""
    landing: Tensor | None = None
    """The sum of squares of a gradient on the device, readable once the device is idle."""
    device_flag: Tensor | None = None
    """If the unit is updated on the device as its gradient lands: whether that is finite, a bool on the device."""
    not_finite: list[str] = field(default_factory=list)
    """Parameters whose gradient in host memory is not finite."""
    absent: Collection[str] = ()
    """Parameters without a gradient on this rank; of a pending update, on any rank."""
    present: tuple[Tensor, Tensor] | None = None
    """Flags of the parameters, on the device and on the host: see `GradientReceiver.present`."""
    is_used: bool = False
    """Whether the unit has been updated with it; to no effect if `device_flag` is false."""

    @property
    def is_finite(self) -> bool:
        """As far as the host knows."""
        return math.isfinite(math.fsum(self.square_sums))

    def left_out(self, parameters: Sequence[TrainedParameter]) -> Collection[str]:
        """Names of the parameters without a gradient on any rank."""
        if not self.absent or self.present is None:
            return self.absent
        _, flags = self.present
        return [name for (name, *_), flag in zip(parameters, flags.tolist(), strict=True) if not flag]

    def cases(
        self, parameters: Sequence[TrainedParameter], *, on_device: bool = True
    ) -> Iterator[tuple[Tensor | None, Sequence[TrainedParameter]]]:
        """(flag on the device or None, parameters that are updated if it is true), for an update there or on the host.

        The host may not know yet which of the parameters without a gradient on this rank got one on another; an update
        there waits for that."""
        if not on_device:
            left_out = self.left_out(parameters)
            yield None, [parameter for parameter in parameters if parameter.name not in left_out]
            return
        yield self.device_flag, [parameter for parameter in parameters if parameter.name not in self.absent]
        if self.absent and self.present is not None:
            for flag, parameter in zip(self.present[0], parameters, strict=True):
                if parameter.name in self.absent:
                    yield flag.bool() if self.device_flag is None else flag.bool() & self.device_flag, [parameter]


@dataclass(slots=True)
class Update:
    """One update of all units: the gradients of a step, and the factors to use them with."""

    gradients: list[UnitGradient]
    factors: Callable[[int], tuple[StepScalars, ...]]
    """Factors of each group of parameters, given how many updates a parameter has missed."""
    units: set[int]
    """Units to which it is still to be applied."""
    matrices: MuonUpdate | None = None
    """Factors for matrices that are updated whole."""

    def changed(
        self, unit: int, stop: int, version: UnitVersion, parameters: Sequence[TrainedParameter], size: int
    ) -> None:
        """The elements of a unit up to `stop` have been updated, of `size`."""
        known = self.gradients[unit]
        version.is_torn, version.reached = False, stop if stop < size else 0
        if version.reached:
            return
        known.is_used, version.moved = True, 0
        if known.device_flag is None:  # else the host does not know yet whether it had an effect
            self.units.discard(unit)
            version.count(known.left_out(parameters))

    def segments(
        self, parameters: Iterable[TrainedParameter], missed: Mapping[str, int], start: int, stop: int
    ) -> Iterator[tuple[StepScalars, list[Segment]]]:
        """(factors, segments to update with them) of these parameters of a unit, among its elements [start, stop)."""
        alike: dict[tuple[int, int], list[Segment]] = {}
        for name, group, segments, shape in parameters:
            if shape[0]:
                continue
            of_group = alike.setdefault((group, missed.get(name, 0) if missed else 0), [])
            if segments and start <= segments[0][0] and segments[-1][1] <= stop:  # as in every update of a whole unit
                of_group += segments
                continue
            of_group += [(max(start, a), min(stop, b), decays) for a, b, decays in segments if a < stop and start < b]
        for (group, count), inside in alike.items():
            if inside:
                yield self.factors(count)[group], inside


class StreamedOptimizer:
    """A `GradientReceiver` that trains: one optimizer over all units, wherever their state is."""

    def __init__(
        self,
        algorithm: Optimizer,
        max_grad_norm: float | None,
        model: ModelSpec,
        policy: Policy,
        device: Device,
        owned: Ownership = Ownership(),  # noqa: B008  # a frozen value
        world: World = ALONE,
    ) -> None:
        """owned: this rank's share of each unit."""
        self.algorithm, self.max_grad_norm = algorithm, max_grad_norm
        self.threads = 0
        """Threads for updates; 0 until the first step if the policy leaves it open."""
        self.before_update: Callable[[int], None] = lambda unit: None
        """Called before a unit is updated; may block until it may be."""
        self.versions = [UnitVersion() for _ in model.units]
        self._model, self._device, self._world = model, device, world
        self._parameters = [trained_parameters(layout_of(unit), algorithm, owned) for unit in model.units]
        self._sizes = [layout_of(unit).trained.own_size for unit in model.units]
        """This rank's trained elements of each unit."""
        self.trained = [unit for unit, parameters in enumerate(self._parameters) if parameters]
        """Units with trained parameters."""
        self._deferred = policy.update == "next_forward"
        self._gradients = [UnitGradient() for _ in model.units]
        """Of each unit, in the running step."""
        self._update: Update | None = None
        """The update that is applied now, or next."""
        self._lr = algorithm.lr
        """Of the running step."""
        self._ranks_differ = False
        """Whether other ranks may have updated units in a step that was not completed."""
        self._kernels: Any = None
        self.adopt(policy)

    @property
    def pending(self) -> Collection[int]:
        """Units whose last gradient waits in host memory to be applied."""
        return self._update.units if self._deferred and self._update is not None else ()

    @property
    def updates(self) -> int:
        """The number of updates applied or pending, which is the newest step's number."""
        return max((self.versions[unit].applied + (unit in self.pending) for unit in self.trained), default=0)

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupted step has applied some of the pending updates."""
        partly = any(version.reached or version.moved for version in self.versions)
        return bool(self.pending and (partly or len(self.pending) < len(self.trained)))

    @property
    def settings(self) -> dict[str, object]:
        """What the running step uses gradients with."""
        told: dict[str, object] = {
            "lr": self._lr,
            "max_grad_norm": self.max_grad_norm,
            "optimizer": str(self.algorithm),
        }
        if self._update is None or self._update.matrices is None:
            return told
        return {**told, "updates left": sorted(self._update.units)}  # each needs directions from all ranks

    @property
    def not_finite(self) -> dict[int, list[str]]:
        """Unit with a non-finite gradient in host memory -> the parameters concerned."""
        return {unit: known.not_finite for unit, known in enumerate(self._gradients) if known.not_finite}

    # A step ---------------------------------------------------------------------------------------------------------

    def begin(self, lr: float) -> None:
        """Start a step whose update will use this learning rate.

        Raises, before anything is computed, `ConfigError` for a rate out of range, and `NonFinite` if an interrupted
        step has left some units ahead of others.
        """
        self.refuse_torn()
        self.threads = self.threads or threads_of(self._world)
        factors = factors_of(self.algorithm, lr, self.updates + 1)
        self._lr, self._gradients = lr, [UnitGradient() for _ in self.versions]
        if not self._deferred:
            self._update = Update(self._gradients, factors, set(self.trained), MuonUpdate.of(self.algorithm, lr))

    def absent(self, unit: int, names: Sequence[str]) -> None:
        self._gradients[unit].absent = frozenset(names)

    def present(self, unit: int, flags: Tensor, flags_on_host: Tensor) -> None:
        self._gradients[unit].present = flags, flags_on_host

    def norm(self, unit: int, gradient: Tensor, loss: Tensor | None, elements: Piece | None = None) -> None:
        """Sum the squares of a unit's gradient, or of this rank's share, or of a piece. Raises `NonFinite`, which for
        units on the device and for several ranks `finish` does instead."""
        known = self._gradients[unit]
        self._ranks_differ = self._world.size > 1 and not self._deferred
        if unit in self._normed_on_device:
            squares = sum_of_squares_on_device(gradient, self._kernels)
            if loss is not None:
                squares += 0 * loss  # with a non-finite loss no gradient is used either
            known.landing = self._device.landing(squares)
            if not self._deferred:
                known.device_flag = squares.isfinite()
            return
        values, is_alone, start = as_numpy(gradient), self._world.size == 1, 0
        if is_alone and elements is None:
            known.square_sums = [sum_of_squares(values, self.threads)]
        else:
            size = self._sizes[unit]
            start, stop = elements or (0, size)
            sums = own_square_sums(values, NORM_BLOCK if is_alone else OWNED, self.threads)
            known.square_sums = expansion([*known.square_sums, *sums]) if start else sums
            if is_alone and stop == size:
                known.square_sums = [math.fsum(known.square_sums)]
        if not known.is_finite:
            known.not_finite += _not_finite(self._parameters[unit], gradient, start)
            if self._world.size == 1:
                raise _refusal(self._model, unit, known.not_finite, _used(self._gradients))

    def finish(self) -> float:
        """All gradients have landed: compute the clipping factor, and return the global norm before clipping. Absent
        parameters become those without a gradient on any rank.

        Raises `NonFinite` for gradients of units on the device, and on all ranks for one on any.
        """
        bad = [(unit, known.not_finite) for unit, known in enumerate(self._gradients) if not known.is_finite]
        squares = expansion([number for known in self._gradients for number in known.square_sums])
        absent = [sorted(known.absent) for known in self._gradients] if self._deferred else []
        told = self._world.exchange("the norm", (bad, squares, _used(self._gradients), absent))
        bad_by_rank, squares_by_rank, used_by_rank, absent_by_rank = zip(*told, strict=True)
        if any(bad_by_rank):
            last = max(unit for of_rank in bad_by_rank for unit, _ in of_rank)  # the first in backward
            names = dict.fromkeys(name for of_rank in bad_by_rank for name in dict(of_rank).get(last, ()))
            raise _refusal(self._model, last, list(names), {unit for of_rank in used_by_rank for unit in of_rank})
        for known, of_unit in zip(self._gradients, zip(*absent_by_rank, strict=True), strict=False):
            known.absent = frozenset.intersection(*map(frozenset, of_unit))
        norm = math.sqrt(math.fsum(number for of_rank in squares_by_rank for number in of_rank))
        if self._deferred:
            clipping = 1.0 if self.max_grad_norm is None else clip_scale(norm, self.max_grad_norm)
            factors = factors_of(self.algorithm, self._lr, self.updates + 1, clipping)
            of_matrices = MuonUpdate.of(self.algorithm, self._lr, clipping)
            self._update = Update(self._gradients, factors, set(self.trained), of_matrices)
        self._ranks_differ = False
        return norm

    def update(
        self, unit: int, gradient: Tensor, parts: Mapping[Part, Sequence[Tensor]], elements: Piece | None = None
    ) -> None:
        """Update a unit, or a piece of it, where its state is, with the factors of the gradient's own step.

        A deferred update that an interrupted step has already applied is not repeated.
        """
        if (update := self._waiting(unit)) is None:
            return
        known, version, parameters = update.gradients[unit], self.versions[unit], self._parameters[unit]
        first, stop = elements or (0, self._sizes[unit])
        start = max(first, version.reached)
        if start >= stop:
            return
        version.is_torn = True
        state = arrays_in(parts, stop - first)
        if unit not in self._on_device and (elements is None or unit not in self._streamed):
            arrays, values = state.map(as_numpy), as_numpy(gradient)
            left_out = known.left_out(parameters)
            updated = [parameter for parameter in parameters if parameter.name not in left_out]
            for scalars, segments in update.segments(updated, version.missed, start, stop):
                update_on_host(arrays, values, scalars, _behind(segments, first) if first else segments, self.threads)
        else:
            for flag, covered in known.cases(parameters):
                for scalars, segments in update.segments(covered, version.missed, start, stop):
                    update_on_device(state, gradient, scalars, _behind(segments, first), flag, self._kernels)
        update.changed(unit, stop, version, parameters, self._sizes[unit])

    def momentum(
        self,
        unit: int,
        gradient: Tensor,
        moments: Sequence[Tensor],
        directions: Sequence[tuple[Piece, Tensor]],
        elements: Piece,
    ) -> None:
        """Take the gradient of some elements of matrices into their momentum, and write their directions.

        After an interrupted step some or all have it already. Of these only the directions are written again.
        """
        if (update := self._waiting(unit)) is None:
            return
        (first, stop), version = elements, self.versions[unit]
        known, parameters = update.gradients[unit], self._parameters[unit]
        threads = 0 if unit in self._on_device else self.threads
        assert update.matrices is not None
        is_change = stop > version.moved
        if is_change:
            version.is_torn = True
        (memory,) = moments
        momenta = memory.view(torch.float32)
        for (start, end), direction in directions:
            inside = slice(start - first, end - first)
            given = MomentumArrays(momenta[inside], gradient[inside], direction)
            for flag, covered in known.cases(parameters, on_device=not threads):
                segments = within(covered, start, end, version.moved)
                update.matrices.momentum(given, segments, flag, threads)
        if is_change:
            version.is_torn, version.moved = False, stop

    def orthogonalize(self, unit: int, group: MatrixGroup, direction: Tensor) -> None:
        """Make the matrices of a group orthogonal, in the memory of their direction. With several ranks also where this
        one has made all of its own update, which may be before."""
        assert self._update is not None
        assert self._update.matrices is not None
        self._update.matrices.orthogonalize(group, direction)

    def apply(
        self,
        unit: int,
        directions: Sequence[tuple[Piece, Tensor]],
        parts: Mapping[Part, Sequence[Tensor]],
        elements: Piece,
    ) -> None:
        """Move some elements of matrices in their directions; what an interrupted step has moved stays."""
        if (update := self._waiting(unit)) is None:
            return
        (first, stop), version = elements, self.versions[unit]
        known, parameters = update.gradients[unit], self._parameters[unit]
        threads = 0 if unit in self._on_device else self.threads
        assert update.matrices is not None
        if version.reached >= stop:
            return
        version.is_torn = True
        masters = arrays_in(parts, stop - first).masters
        for (start, end), direction in directions:
            given = tuple(half[start - first : end - first] for half in masters)
            for flag, covered in known.cases(parameters, on_device=not threads):
                shaped = update.matrices.shaped(covered, max(start, version.reached), end, start)
                update.matrices.apply(given, direction, shaped, flag, threads)
        update.changed(unit, stop, version, parameters, self._sizes[unit])

    def _waiting(self, unit: int) -> Update | None:
        """The update that a unit waits for, which nobody else may read meanwhile; `None` if there is none."""
        update = self._update
        if update is None or unit not in update.units or not update.gradients[unit].is_finite:
            return None  # if not finite, there are several ranks, all of which learn of it at the end
        self.before_update(unit)
        if self.versions[unit].is_torn:
            self.refuse_torn()
        return update

    def at_rest(self) -> bool:
        """The device is idle, after success or failure: read what it has decided.

        Returns whether every unit has been updated with the gradients of the running step.
        """
        for version, known, parameters in zip(self.versions, self._gradients, self._parameters, strict=True):
            if known.landing is not None:
                known.square_sums, known.landing = [float(known.landing)], None
            if known.device_flag is None:
                continue
            if not known.is_finite:
                version.reached, version.moved, known.is_used = 0, 0, False  # nothing has changed
            elif known.is_used:
                version.count(known.left_out(parameters))
            known.device_flag = None
        return not self._deferred and self._world.size == 1 and len(_used(self._gradients)) == len(self.trained)

    # Between steps --------------------------------------------------------------------------------------------------

    def adopt(self, policy: Policy) -> None:
        """Units are now placed as in this policy. No updates may be pending, and the device must be idle."""
        self.threads = policy.host_threads
        self._on_device = {unit for unit in range(len(self.versions)) if policy.placement(unit).on_device}
        self._streamed = policy.updates_streamed(self._model)
        self._normed_on_device = self._on_device if self._deferred else self._on_device | self._streamed
        if self._on_device or self._streamed:
            self._kernels = kernels_for(self._device)

    def restore(self, updates: int | None, missed: Mapping[str, int] | None = None) -> None:
        """Every trained unit has had this many updates, less those its parameters have missed; none is pending.

        updates: `None` before all state is replaced, which is torn until the next call.
        """
        self._update, self._ranks_differ = None, False
        for unit, parameters in enumerate(self._parameters):
            of_unit = {name: missed[name] for name, *_ in parameters if missed and name in missed}
            applied = updates if updates is not None and parameters else 0
            self.versions[unit] = UnitVersion(applied, missed=of_unit, is_torn=updates is None)

    def refuse_torn(self) -> None:
        """Raise `NonFinite`, naming the units, if an interrupted step has left some ahead of others, or if changing
        some has failed halfway."""
        if torn := [unit for unit, version in enumerate(self.versions) if version.is_torn]:
            what = (
                f"an update or a restore that failed has changed only parts of these units: {_named(self._model, torn)}"
            )
            raise NonFinite(what, where="optimizer", fix="restore a checkpoint, or start again from a saved model")
        counts = {self.versions[unit].applied for unit in self.trained}
        partly = {unit for unit, version in enumerate(self.versions) if version.reached or version.moved}
        if self.pending or (len(counts) <= 1 and not partly and not self._ranks_differ):
            return
        ahead = {unit for unit in self.trained if len(counts) > 1 and self.versions[unit].applied == max(counts)}
        what = f"an interrupted step has updated only these units: {_named(self._model, ahead | partly)}"
        raise NonFinite(
            "an interrupted step has updated units on only some ranks" if self._ranks_differ else what,
            where="optimizer",
            fix="start again from a saved model; with max_grad_norm a step is applied completely or not at all",
        )


def factors_of(
    algorithm: Optimizer, lr: float, step: int, grad_scale: float = 1.0
) -> Callable[[int], tuple[StepScalars, ...]]:
    """The factors of an update, for any number of missed ones. Raises as `Optimizer.scalars` does."""
    of_step = cache(lambda missed: algorithm.scalars_by_group(lr=lr, step=step - missed, grad_scale=grad_scale))
    of_step(0)
    return of_step


def trained_parameters(layout: Layout, algorithm: Optimizer, owned: Ownership) -> list[TrainedParameter]:
    parameters = []
    for place in layout.trained.fields:
        decays = algorithm.decays(place.name, place.shape)
        pieces = owned.within(layout, place.start, place.stop)
        segments = tuple((piece.own.start, piece.own.stop, decays) for piece in pieces)
        shape = matrix_shape(place.shape, place.matrices) if place.matrices else (0, 0)
        parameters.append(TrainedParameter(place.name, algorithm.group(place.name), segments, shape))
    return parameters


def _refusal(model: ModelSpec, unit: int, parameters: Sequence[str], updated: Collection[int]) -> NonFinite:
    """parameters: those of the unit with non-finite gradients. updated: units that already are."""
    what, where = f"the gradient is not finite{for_parameters(parameters)}", model.units[unit].name
    if not updated:
        return NonFinite(what, where=where, fix="nothing was updated; lower the learning rate")
    what = f"{what}, and these units were already updated: {_named(model, updated)}"
    return NonFinite(what, where=where, fix="set max_grad_norm, with which a step is applied completely or not at all")


def _named(model: ModelSpec, units: Collection[int]) -> str:
    return ", ".join(model.units[unit].name for unit in sorted(units))


def _not_finite(parameters: Sequence[TrainedParameter], gradient: Tensor, first: int) -> list[str]:
    """Parameters with a non-finite value in a gradient of elements from `first` on: last first, as in backward."""
    return [
        name
        for name, _, segments, _ in reversed(parameters)
        if not all(
            bool(gradient[max(0, start - first) : max(0, stop - first)].isfinite().all()) for start, stop, _ in segments
        )
    ]


def _behind(segments: Sequence[Segment], first: int) -> Sequence[Segment]:
    """Segments of a unit, counted in the piece that begins at element `first`."""
    return [(start - first, stop - first, decays) for start, stop, decays in segments]


def _used(gradients: Sequence[UnitGradient]) -> list[int]:
    return [unit for unit, known in enumerate(gradients) if known.is_used]


class GradientCollector:
    """A `GradientReceiver` that copies every gradient to float32 as it lands, and updates nothing.

    store: assembles the shares of several ranks.
    """

    def __init__(
        self, model: ModelSpec, before_update: Callable[[int], None] = lambda unit: None, store: Store | None = None
    ) -> None:
        self._before_update, self._units = before_update, model.units
        self._together = store.together if store is not None and model.ranks > 1 else None
        self._shares: dict[int, Tensor] = {}
        """Unit -> this rank's share of its gradient."""
        self.gradients: dict[str, Tensor] = {}
        self.not_finite: dict[int, list[str]] = {}
        self.settings: dict[str, object] = {}

    def absent(self, unit: int, names: Sequence[str]) -> None:
        """Their gradients are collected as zeros."""

    def present(self, unit: int, flags: Tensor, flags_on_host: Tensor) -> None:
        """Likewise."""

    def norm(self, unit: int, gradient: Tensor, loss: Tensor | None, elements: Piece | None = None) -> None:
        start = elements[0] if elements else 0
        if self._together is not None:  # with several ranks, finiteness is checked at the end
            if unit not in self._shares:
                self._shares[unit] = torch.empty(layout_of(self._units[unit]).trained.own_size)
            self._shares[unit][start : start + gradient.numel()] = gradient.to("cpu", torch.float32)
            return
        if not bool(gradient.isfinite().all()):
            raise NonFinite("the gradient is not finite", where=self._units[unit].name)
        self._keep(unit, gradient, start)

    def _keep(self, unit: int, gradient: Tensor, start: int = 0) -> None:
        """gradient: of the unit's elements from `start` on."""
        for place in layout_of(self._units[unit]).trained.fields:
            first, last = max(place.start, start), min(place.stop, start + gradient.numel())
            if first < last:
                if place.name not in self.gradients:
                    self.gradients[place.name] = torch.empty(place.shape)
                part = self.gradients[place.name].view(-1)[first - place.start : last - place.start]
                part.copy_(gradient[first - start : last - start])

    def finish(self) -> dict[str, Tensor]:
        """Parameter name -> gradient in its shape, once all have landed. With several ranks all must call it."""
        for unit in sorted(self._shares, reverse=True):
            assert self._together is not None
            self._keep(unit, self._together(self._shares.pop(unit), layout_of(self._units[unit]).trained))
        return self.gradients

    def momentum(self, unit: int, *arguments: object) -> None:
        """Change nothing."""

    orthogonalize = apply = momentum

    def update(
        self, unit: int, gradient: Tensor, parts: Mapping[Part, Sequence[Tensor]], elements: Piece | None = None
    ) -> None:
        """Change nothing; but state on the disk is written back, so nobody may be reading it."""
        self._before_update(unit)
