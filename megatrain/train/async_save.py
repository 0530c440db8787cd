"""Saves an engine's checkpoint in a thread while training continues.

When a save begins, nothing is pending and no op runs: the state is that after a whole step. Then a thread writes unit
by unit, in the order in which the next steps will change them, directly from where the state is; an update waits until
its unit has been written. So the checkpoint is the exact state of one moment without a copy of it, and a save takes
memory for `SAVED_AT_ONCE` elements in float32 (of masters stored as halves, and of what is not in host memory),
whatever the model, beside the blocks that are being written. With the exact norm, updates come a whole forward and
backward pass later, so a save that takes less than that delays nobody. Units on the device are read for the thread,
range by range, before training continues.

When to save and what to keep is decided in `checkpoints`; `checkpoint.save` writes the files.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint.manifest import FileSum
from megatrain.checkpoint.run_state import read_training
from megatrain.checkpoint.safetensors_writer import Shard
from megatrain.checkpoint.save import (
    CheckpointFacts,
    PlannedCheckpoint,
    PreviousCheckpoint,
    StateReader,
    step_folder,
    write_checkpoint,
)
from megatrain.device.worker import OwningProcess
from megatrain.dist import ALONE, World
from megatrain.errors import CheckpointError, DamagedCheckpoint, MegaTrainError, typed_line
from megatrain.memory import Store
from megatrain.model import PortedModel
from megatrain.schedule import Buffer, Use
from megatrain.spec import Policy
from megatrain.spec.validate_fields import Bounds, checked
from megatrain.system.paths import usable_path
from megatrain.train.restore import ENGINE, FROZEN
from megatrain.train.save_from_ranks import Agree, SharedFiles, from_all_ranks, write_together

SPARE = "host/checkpoint"
StepNumber = Annotated[int, Bounds(0)]
Range = tuple[int, int, int, int]
"""What is read of a unit's state: (unit, array, start, stop), as in `checkpoint.StateReader`."""


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
    is_reported: bool = False
    """Whether a caller has its outcome."""
    _process: OwningProcess = field(default_factory=OwningProcess)
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def is_unreported(self) -> bool:
        """Whether this process writes it, and no caller has its outcome."""
        return not (self.is_reported or self._process.is_elsewhere)

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
        self.is_reported = True
        if self.failure is not None:
            raise self.failure
        assert self.path is not None
        return self.path

    def end(self, path: Path | None, failure: MegaTrainError | None) -> None:
        self.path, self.failure = path, failure
        self.seconds = time.monotonic() - self.began
        self._over.set()


class SaveLock:
    """Lets training update a unit once it has been written, and reads units on the device for the writing thread.

    Training's side is `begin`, `wait_for`, `hand_over` and `give_up`; the thread's is the rest.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self.unwritten: frozenset[int] = frozenset()
        """Units that may not be updated yet."""
        self._wanted: Range | None = None
        """What the thread waits for of a unit on the device."""
        self._handed: NDArray[np.float32] | None = None
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

    def hand_over(
        self, units: Iterable[int], read: Callable[..., NDArray[np.float32]], is_over: Callable[[], bool]
    ) -> None:
        """Read for the thread what it asks for, until it has written these units or is over."""
        due = {*units}
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._wanted is not None or self.unwritten.isdisjoint(due) or is_over())
                wanted = self._wanted
            if wanted is None or is_over():
                return
            values = read(*wanted)
            with self._turn:
                self._handed, self._wanted = values, None
                self._turn.notify_all()

    def give_up(self) -> None:
        with self._turn:
            self._gives_up = True
            self._turn.notify_all()

    def refuse_given_up(self) -> None:
        if self._gives_up:
            raise _Abandoned

    def receive(self, wanted: Range) -> NDArray[np.float32]:
        """A range of a unit on the device, read by the main thread, which alone may."""
        with self._turn:
            self._wanted = wanted
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._handed is not None or self._gives_up)
            values, self._handed = self._handed, None
        if values is None:
            raise _Abandoned
        return values

    def open_for(self, units: Iterable[int]) -> None:
        """Allow updates of these units."""
        with self._turn:
            self.unwritten -= {*units}
            self._turn.notify_all()


class Saver:
    """Writes the state in `store`, one checkpoint at a time. Called by the main thread, between steps."""

    def __init__(self, ported: PortedModel, store: Store, world: World = ALONE) -> None:
        self._ported, self._store, self._world = ported, store, world
        self._plan: PlannedCheckpoint | None = None
        self._planned_for: object = None
        """The order of units and the configs of the planned checkpoint."""
        self._doubt = ""
        """Why the ranks no longer write together."""
        self._earlier: PreviousCheckpoint | None = None
        """The last checkpoint written or resumed from, whose unchanged files need not be written again."""
        self.gate = SaveLock()
        self.current: Save | None = None
        """The last save that was started."""

    def goes_on_from(self, folder: Path) -> None:
        with contextlib.suppress(DamagedCheckpoint, OSError):
            self._earlier = PreviousCheckpoint(folder, read_training(folder).get(ENGINE, {}).get(FROZEN))

    def reserve(self) -> None:
        """Allocate the memory that saves need. Raises `DoesNotFit`."""
        nbytes = max(unit.spare_nbytes for unit in self._store.units)
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
        that cannot be written, and `DoesNotFit` without memory for a piece of it; the `Save` reports later failures.
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
            save.thread, save.is_reported = None, True
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
        if self.current is not None:
            self.current.is_reported = True

    def _planned(self, policy: Policy) -> PlannedCheckpoint:
        """The files, for units in the order of the next updates, but with those on the device first."""
        units = list(range(len(self._store.layouts)))
        if policy.update == "during_backward":
            units.reverse()
        order = tuple(sorted(units, key=lambda unit: not self._store.units[unit].is_on_device))
        model = self._ported.skeleton
        planned_for = order, str(model.config), str(model.generation_config)
        if self._plan is None or self._planned_for != planned_for:
            self._plan, self._planned_for = PlannedCheckpoint(self._ported, order=order), planned_for
        return self._plan

    def _state(self, unit: int, array: int, start: int, stop: int) -> NDArray[np.float32]:
        """A range of this rank's share of a unit, valid until the next is asked for."""
        return self._store.units[unit].in_float32(array, start, stop, self._store.pool.memory(SPARE))

    # On the thread --------------------------------------------------------------------------------------------------

    def _write(self, save: Save, folder: Path, facts: CheckpointFacts, then: Callable[[Path], object] | None) -> None:
        path: Path | None = None
        failure: MegaTrainError | None = None
        assert self._plan is not None
        planned, earlier = self._plan, self._earlier
        if earlier is not None and earlier.folder.parent != folder.resolve():
            earlier = None
        if earlier is not None:
            earlier.begin(facts.training.get(ENGINE, {}).get(FROZEN))
        progress = partial(self._note, save)
        write = partial(write_checkpoint, folder, planned, facts=facts, progress=progress, earlier=earlier)
        try:
            if self._world.size == 1:
                path = write(state=StateReader(partial(self._share, save), self._store.layouts, None, self._written))
            else:
                target = step_folder(usable_path(folder, error=CheckpointError).resolve(), save.step)
                path = self._write_together(save, target, planned, write)
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

    def _share(self, save: Save, *wanted: int) -> NDArray[np.float32]:
        """A range of this rank's share of a unit (see `Range`), noting the unit as being written."""
        unit, array, start, stop = wanted
        save.at = self._store.model.units[unit].name
        self._note(save, save.written_nbytes)
        if self._store.units[unit].is_on_device:
            return self.gate.receive((unit, array, start, stop))
        return self._state(unit, array, start, stop)

    def _written(self, unit: int) -> None:
        self.gate.open_for([unit])

    def _write_together(self, save: Save, target: Path, planned: PlannedCheckpoint, write: Callable[..., Path]) -> Path:
        """Write the checkpoint of several ranks: each its share, or rank 0 everything if it must."""
        share, store, wanted = partial(self._share, save), self._store, set[str]()

        def progress(nbytes: int) -> None:  # assumes that the others are as far
            self._note(save, min(nbytes * self._world.size, save.nbytes))

        def by_all(agree: Agree, staging: Path | None, arrays: Sequence[Shard]) -> Mapping[str, FileSum] | None:
            here, names = agree(lambda: ("" if staging is None else staging.name, [shard.name for shard in arrays]))[0]
            save.shared_nbytes = sum(shard.nbytes for shard in planned.arrays if shard.name not in names)
            wanted.update(name for shard in planned.arrays if shard.name in names for name in shard.starts)
            state = StateReader(share, store.layouts, store.owned, self._written)
            files = SharedFiles(self._world, agree, planned, state, progress, target)
            save.streamed = self._doubt or files.why_not(target.with_name(here))
            if save.streamed:
                return None
            try:
                return files.write(target.with_name(here), names)
            finally:
                if files.lost_writes:
                    self._doubt = "what the ranks had written together was not there afterwards"

        def whole(agree: Agree) -> StateReader:
            read = partial(from_all_ranks, self._world, agree, store, share)
            return StateReader(read, store.layouts, None, self._written)

        def follow(agree: Agree) -> None:
            if by_all(agree, None, ()) is None:
                for unit in planned.order:
                    for _ in planned.pieces(unit, whole(agree), lambda tensor: tensor.name in wanted):
                        pass
                    self._written(unit)

        return write_together(
            self._world, lambda agree: write(state=whole(agree), together=partial(by_all, agree)), follow
        )
