"""Saves an engine's checkpoint in a thread while training continues.

When a save begins, nothing is pending and no op runs: the state is that after a whole step. Then a thread writes unit
by unit, in the order in which the next steps will change them, directly from where the state is; an update waits
until its unit has been written. So the checkpoint is the exact state of one moment without a copy of it, and a save
takes no more memory than one unit in float32 (for masters stored as halves, and for what is read from the disk). With
the exact norm, updates come a whole forward and backward pass later, so that long a save delays nobody. Units on the
device are copied for the thread before training continues.

When to save and what to keep is decided in `checkpoints`; `checkpoint.save` writes the files.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from megatrain.checkpoint import (
    CheckpointFacts,
    ParamState,
    PlannedCheckpoint,
    PreviousCheckpoint,
    step_folder,
    write_checkpoint,
)
from megatrain.checkpoint.manifest import FileSum
from megatrain.checkpoint.rank_byte_ranges import RankByteRanges
from megatrain.checkpoint.run_state import read_training
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.device.worker import OwningProcess
from megatrain.dist import ALONE, World
from megatrain.errors import CheckpointError, DamagedCheckpoint, MegaTrainError, typed_line
from megatrain.memory import Store
from megatrain.model import PortedModel
from megatrain.optim import HostArrays, StateArrays
from megatrain.schedule import Buffer, Use
from megatrain.spec import Policy
from megatrain.spec.validate_fields import Bounds, checked
from megatrain.system.paths import usable_path
from megatrain.train.restore import ENGINE, FROZEN
from megatrain.train.save_from_ranks import Agree, SharedFiles, follow_gathered, gathered, write_together

SPARE = "host/checkpoint"
StepNumber = Annotated[int, Bounds(0)]


class _Abandoned(Exception):
    """The save was cancelled."""


@dataclass(eq=False)
class Save:
    """One checkpoint in progress or finished. Call `wait`, or poll `is_over`."""

    step: int
    began: float = field(default_factory=time.monotonic)
    path: Path | None = None
    """The folder, once complete."""
    failure: MegaTrainError | None = None
    seconds: float = 0.0
    """Its duration, once it is over."""
    nbytes: int = 0
    """Bytes of weights and moments."""
    shared_nbytes: int = 0
    """Bytes of files that are hard links to the previous checkpoint's."""
    copied: tuple[int, str] = (0, "")
    """Bytes of unchanged files that could not be linked to the previous checkpoint's, and why not."""
    streamed: str = ""
    """Why rank 0 wrote all ranks' state alone, if it did."""
    written_nbytes: int = 0
    moved: float = field(default_factory=time.monotonic)
    """`time.monotonic` of the last write."""
    at: str = ""
    """What is being written now."""
    thread: threading.Thread | None = None
    _process: OwningProcess = field(default_factory=OwningProcess)
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """The folder, once complete. Raises `CheckpointError` if writing failed, or took over `timeout` seconds; it
        then continues.

        In a forked child, a save that was in progress raises `DeviceError`.
        """
        if not self.is_over:
            self._process.refuse_elsewhere(f"checkpoint of step {self.step}")
        if not self._over.wait(timeout):
            what = f"is not written after {time.monotonic() - self.began:.0f} s"
            raise CheckpointError(what, where=f"checkpoint of step {self.step}")
        if self.failure is not None:
            raise self.failure
        assert self.path is not None
        return self.path

    def end(self, path: Path | None, failure: MegaTrainError | None) -> None:
        """Mark it as over, whether successful or not."""
        self.path, self.failure = path, failure
        self.seconds = time.monotonic() - self.began
        self._over.set()


class SaveLock:
    """Lets training update a unit once it has been written, and hands units on the device to the writing thread.

    Training's side is `begin`, `wait_for`, `hand_over` and `give_up`; the thread's is the rest.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self.unwritten: frozenset[int] = frozenset()
        """Units that may not be updated yet."""
        self._wanted: int | None = None
        """The unit on the device for which the thread waits."""
        self._handed: HostArrays | None = None
        self._gives_up = False
        self.waited_seconds = 0.0
        """Seconds that updates have waited for their units to be written."""

    def begin(self, units: Iterable[int]) -> None:
        """Close it for these units."""
        self._gives_up, self._wanted, self._handed = False, None, None
        self.unwritten = frozenset(units)

    def wait_for(self, unit: int) -> None:
        """Block until a unit has been written, or need not be."""
        if unit in self.unwritten:
            began = time.monotonic()
            with self._turn:
                self._turn.wait_for(lambda: unit not in self.unwritten)
            self.waited_seconds += time.monotonic() - began

    def hand_over(self, units: Iterable[int], read: Callable[[int], HostArrays], is_over: Callable[[], bool]) -> None:
        """Read units for the thread, each when it asks for it, until it is over."""
        for unit in units:
            with self._turn:
                self._turn.wait_for(lambda unit=unit: self._wanted == unit or is_over())  # type: ignore[misc]
            if is_over():
                return
            state = read(unit)
            with self._turn:
                self._handed, self._wanted = state, None
                self._turn.notify_all()

    def give_up(self) -> None:
        """Have the thread end."""
        with self._turn:
            self._gives_up = True
            self._turn.notify_all()

    def refuse_given_up(self) -> None:
        """Raise `_Abandoned` if the thread is to end."""
        if self._gives_up:
            raise _Abandoned

    def receive(self, unit: int) -> HostArrays:
        """A unit on the device, read by the main thread, which alone may."""
        with self._turn:
            self._wanted = unit
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._handed is not None or self._gives_up)
            state, self._handed = self._handed, None
        if state is None:
            raise _Abandoned
        return state

    def open_for(self, units: Iterable[int]) -> None:
        """Allow updates of these units."""
        with self._turn:
            self.unwritten -= {*units}
            self._turn.notify_all()


class Saver:
    """Writes the state in `store`, one checkpoint at a time. Called by the main thread, between steps."""

    def __init__(self, ported: PortedModel, store: Store, world: World = ALONE) -> None:
        self._ported, self._store, self._world = ported, store, world
        self._ranges: RankByteRanges | None = None
        """The planned files, and where in them this rank's share goes."""
        self._planned_for: object = None
        """The order of units and the configs in these files."""
        self._doubt = ""
        """Why the ranks no longer write together."""
        self._earlier: PreviousCheckpoint | None = None
        """The last checkpoint written or resumed from, whose unchanged files need not be written again."""
        self.gate = SaveLock()
        self.current: Save | None = None
        """The last save that was started."""

    def goes_on_from(self, folder: Path) -> None:
        """The state is now that of this checkpoint."""
        with contextlib.suppress(DamagedCheckpoint, OSError):
            self._earlier = PreviousCheckpoint(folder, read_training(folder).get(ENGINE, {}).get(FROZEN))

    def reserve(self) -> None:
        """Allocate the memory that saves need. Raises `DoesNotFit`."""
        nbytes = max(unit.spare.nbytes for unit in self._store.units)
        self._store.pool.provide([Buffer(SPARE, "host", nbytes, Use.CHECKPOINT, crosses=False)])

    @property
    def is_reserved(self) -> bool:
        """Whether the memory that saves need is allocated."""
        return SPARE in self._store.pool.buffers

    def begin(
        self, folder: str | Path, facts: CheckpointFacts, policy: Policy, then: Callable[[Path], object] | None
    ) -> Save:
        """Start a save, once the previous one is over. No updates may be pending. See `checkpoint.write_checkpoint`.

        then: called with the folder once it is complete, on the thread that wrote it. Raises `ExportError` for a model
        that cannot be written, and `DoesNotFit` without memory for the largest unit; the `Save` reports later failures.
        """
        step = checked(facts.step, StepNumber, CheckpointError, "step")
        facts = replace(facts, step=step, score=checked(facts.score, float | None, CheckpointError, "score"))
        path = usable_path(folder, error=CheckpointError)
        self.wait()
        self._store.settle()
        planned = self._planned(policy)
        self.reserve()
        self.current = save = Save(step, nbytes=planned.nbytes)
        arguments = save, path, facts, then
        save.thread = threading.Thread(target=self._write, args=arguments, name="megatrain-save", daemon=True)
        try:
            self.gate.begin(planned.order)
            save.thread.start()
            on_device = [unit for unit in planned.order if self._store.units[unit].is_on_device]
            self.gate.hand_over(on_device, self._state, lambda: save.is_over)
        except BaseException as error:
            if save.thread.ident is not None:  # it has started
                self.abandon()
                raise
            failure = CheckpointError(typed_line(error), where=f"checkpoint of step {step}")
            save.thread = None
            save.end(None, failure)
            self.gate.give_up()  # in case it starts after all
            self.gate.open_for(planned.order)  # or updates would wait forever
            if isinstance(error, RuntimeError):  # the system is out of threads
                raise failure from error
            raise
        return save

    def wait(self) -> None:
        """Wait until no save is in progress. Failures are reported only by the `Save`."""
        if self.current is not None and self.current.thread is not None:
            self.current.thread.join()
            self.current.thread = None

    def abandon(self) -> None:
        """Cancel a save in progress; earlier checkpoints stay."""
        self.gate.give_up()
        self.wait()

    def _planned(self, policy: Policy) -> PlannedCheckpoint:
        """The files, for units in the order of the next updates, but with those on the device first."""
        units = list(range(len(self._store.layouts)))
        if policy.update == "during_backward":
            units.reverse()
        order = tuple(sorted(units, key=lambda unit: not self._store.units[unit].is_on_device))
        model = self._ported.skeleton
        planned_for = order, str(model.config), str(model.generation_config)
        if self._ranges is None or self._planned_for != planned_for:
            planned = PlannedCheckpoint(self._ported, order=order)
            self._ranges = RankByteRanges(planned, self._store.layouts, self._store.owned)
            self._planned_for = planned_for
        return self._ranges.planned

    def _state(self, unit: int) -> HostArrays:
        """This rank's share of a unit in float32, valid until the next is asked for."""
        return self._store.units[unit].in_float32(self._store.pool.memory(SPARE))

    # On the thread --------------------------------------------------------------------------------------------------

    def _write(self, save: Save, folder: Path, facts: CheckpointFacts, then: Callable[[Path], object] | None) -> None:
        path: Path | None = None
        failure: MegaTrainError | None = None
        assert self._ranges is not None
        planned, earlier = self._ranges.planned, self._earlier
        if earlier is not None and earlier.folder.parent != folder.resolve():
            earlier = None
        if earlier is not None:
            earlier.begin(facts.training.get(ENGINE, {}).get(FROZEN))
        progress = partial(self._note, save)
        write = partial(write_checkpoint, folder, planned, facts=facts, progress=progress, earlier=earlier)
        try:
            if self._world.size == 1:
                path = write(units=self._units(save, planned))
            else:
                target = step_folder(usable_path(folder, error=CheckpointError).resolve(), save.step)
                path = self._write_together(save, target, self._ranges, write)
            if earlier is not None and self._world.rank == 0:
                save.shared_nbytes = earlier.linked_nbytes
                save.copied = earlier.copied_nbytes, earlier.why_copied
            self.goes_on_from(path)
            if then is not None and self._world.rank == 0:
                self.gate.open_for(planned.order)
                then(path)
        except _Abandoned:
            failure = CheckpointError("was given up", where=f"checkpoint of step {save.step}")
        except MegaTrainError as error:
            failure = error
        except BaseException as error:
            failure = CheckpointError(typed_line(error), where=f"checkpoint of step {save.step}")
            failure.__cause__ = error
        finally:  # whatever happens here, nobody must wait forever
            save.end(path, failure)
            self.gate.open_for(planned.order)

    def _note(self, save: Save, written_nbytes: int, total: int = 0) -> None:
        """Record a save's progress. Raises `_Abandoned` if it has been cancelled."""
        save.written_nbytes, save.moved = written_nbytes, time.monotonic()
        self.gate.refuse_given_up()

    def _units(self, save: Save, planned: PlannedCheckpoint) -> Iterator[dict[str, ParamState]]:
        """The state of each unit in turn; taking the next means that the last has been written."""
        for unit in planned.order:
            yield self._by_name(unit, self._share(save, unit))
            self.gate.open_for([unit])
        save.at = "the manifest"

    def _share(self, save: Save, unit: int) -> HostArrays:
        """This rank's share of a unit, noting it as being written."""
        save.at = self._store.model.units[unit].name
        self._note(save, save.written_nbytes)
        return self.gate.receive(unit) if self._store.units[unit].is_on_device else self._state(unit)

    def _written(self, unit: int) -> None:
        self.gate.open_for([unit])

    def _by_name(self, unit: int, state: HostArrays) -> dict[str, ParamState]:
        return {name: ParamState(*arrays) for name, arrays in tensors_of(self._store, unit, state).items()}

    def _write_together(self, save: Save, target: Path, ranges: RankByteRanges, write: Callable[..., Path]) -> Path:
        """Write the checkpoint of several ranks: each its share, or rank 0 everything if it must."""

        def progress(nbytes: int) -> None:  # assumes that the others are as far
            self._note(save, min(nbytes * self._world.size, save.nbytes))

        def by_all(agree: Agree, staging: Path | None, arrays: Sequence[Shard]) -> Mapping[str, FileSum] | None:
            here, names = agree(lambda: ("" if staging is None else staging.name, [shard.name for shard in arrays]))[0]
            linked = [shard.nbytes for shard in ranges.planned.arrays if shard.name not in names]
            save.shared_nbytes = sum(linked)
            share = partial(self._share, save)
            files = SharedFiles(self._world, agree, ranges, share, self._written, progress, target)
            save.streamed = self._doubt or files.why_not(target.with_name(here))
            if save.streamed:
                return None
            try:
                return files.write(target.with_name(here), names)
            finally:
                if files.lost_writes:
                    self._doubt = "what the ranks had written together was not there afterwards"

        def units(agree: Agree) -> Iterator[dict[str, ParamState]]:
            return self._gathered(save, ranges.planned, agree)

        def follow(agree: Agree) -> None:
            if by_all(agree, None, ()) is None:
                follow_gathered(units(agree))

        return write_together(
            self._world, lambda agree: write(units=units(agree), together=partial(by_all, agree)), follow
        )

    def _gathered(self, save: Save, planned: PlannedCheckpoint, agree: Agree) -> Iterator[dict[str, ParamState]]:
        """The state of each unit in turn, from all ranks."""
        share: dict[int, HostArrays] = {}

        def prepare(unit: int) -> None:
            share[unit] = self._share(save, unit)

        def whole(unit: int) -> dict[str, ParamState]:
            state, layout = share.pop(unit), self._store.layouts[unit]
            parts = (state.hi, layout), *((moment, layout.trained) for moment in state.moments)
            hi, *moments = (
                self._store.together(torch.from_numpy(a), of, self._world.together).numpy() for a, of in parts
            )
            self.gate.open_for([unit])
            return self._by_name(unit, StateArrays(hi, None, tuple(moments)))

        return gathered(agree, planned.order, prepare, whole)


def tensors_of(store: Store, unit: int, state: HostArrays) -> dict[str, list[torch.Tensor]]:
    """Parameter name -> views of master and, if trained, moments in a float32 state, in the parameter's shape.

    Parameters that are not in the state are omitted.
    """
    views: dict[str, list[torch.Tensor]] = {}
    for place, param in zip(store.layouts[unit].fields, store.model.units[unit].params, strict=True):
        if place.stop > state.hi.size:
            break  # not part of checkpoints
        arrays = (state.hi, *state.moments) if param.trainable else (state.hi,)
        views[place.name] = [torch.from_numpy(part[place.start : place.stop]).view(place.shape) for part in arrays]
    return views
