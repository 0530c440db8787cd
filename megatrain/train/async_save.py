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
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from megatrain.checkpoint import Earlier, ParamState, PlannedCheckpoint, step_folder, write_checkpoint
from megatrain.checkpoint.manifest import FileSum
from megatrain.checkpoint.rank_byte_ranges import RankByteRanges
from megatrain.device.worker import OwningProcess
from megatrain.dist import ALONE, World
from megatrain.errors import CheckpointError, DamagedCheckpoint, MegaTrainError, typed_line
from megatrain.memory import Store
from megatrain.model import PortedModel
from megatrain.optim import HostArrays, StateArrays
from megatrain.schedule import Buffer, Use
from megatrain.spec import Numerics, Policy
from megatrain.spec.validate_fields import Bounds, checked
from megatrain.system.paths import usable_path
from megatrain.train.save_from_all_ranks import SharedFiles
from megatrain.train.save_from_rank_zero import Agree, follow_gathered, gathered, write_together
from megatrain.version import __version__

SPARE = "host/checkpoint"
StepNumber = Annotated[int, Bounds(0)]
LIBRARIES = ("torch", "transformers", "numpy")


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
    """Bytes of files shared with the previous checkpoint."""
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


class Saver:
    """Writes the state in `store`, one checkpoint at a time. Called by the main thread, between steps."""

    def __init__(self, ported: PortedModel, store: Store, world: World = ALONE) -> None:
        self._ported, self._store, self._world = ported, store, world
        self._planned: PlannedCheckpoint | None = None
        self._ranges: RankByteRanges | None = None
        """Byte ranges of each rank's share in the planned files."""
        self._doubt = ""
        """Why the ranks no longer write together."""
        self._turn = threading.Condition()
        self._unwritten: frozenset[int] = frozenset()
        """Units that may not be updated yet."""
        self._wanted: int | None = None
        """The unit on the device for which the thread waits."""
        self._handed: HostArrays | None = None
        self._gives_up = False
        self.current: Save | None = None
        """The last save that was started."""
        self.earlier: Earlier | None = None
        """The last checkpoint written or resumed from, whose unchanged files need not be written again."""
        self.waited_seconds = 0.0
        """Seconds that updates have waited for their units to be written."""

    def goes_on_from(self, folder: Path) -> None:
        """The state is now that of this checkpoint."""
        with contextlib.suppress(DamagedCheckpoint):
            self.earlier = Earlier(folder)

    def reserve(self) -> None:
        """Allocate the memory that saves need. Raises `DoesNotFit`."""
        nbytes = max(unit.spare.nbytes for unit in self._store.units)
        self._store.pool.provide([Buffer(SPARE, "host", nbytes, Use.CHECKPOINT, crosses=False)])

    @property
    def is_reserved(self) -> bool:
        """Whether the memory that saves need is allocated."""
        return SPARE in self._store.pool.buffers

    def begin(
        self,
        folder: str | Path,
        step: int,
        policy: Policy,
        training: Mapping[str, Any],
        score: float | None,
        write_more: Callable[[Path], object] | None,
        then: Callable[[Path], object] | None,
    ) -> Save:
        """Start a save, once the previous one is over. No updates may be pending. See `checkpoint.write_checkpoint`.

        Raises `ExportError` for a model that cannot be written, and `DoesNotFit` without memory for the largest unit;
        the `Save` reports later failures.
        """
        step = checked(step, StepNumber, CheckpointError, "step")
        score = checked(score, float | None, CheckpointError, "score")
        self.wait()
        self._store.settle()
        order = self._order(policy)
        if self._planned is None or self._planned.order != order:
            self._planned = PlannedCheckpoint(self._ported, order=order)
            self._ranges = RankByteRanges(self._planned, self._store.layouts)
        self.reserve()
        save = Save(step, nbytes=self._planned.nbytes)
        self._gives_up, self._wanted, self._handed = False, None, None
        self._unwritten, self.current = frozenset(order), save
        arguments = (save, usable_path(folder, error=CheckpointError), self._planned, training, score, write_more, then)
        thread = threading.Thread(target=self._write, args=arguments, name="megatrain-save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system is out of threads
            failure = CheckpointError(typed_line(error), where=f"checkpoint of step {step}")
            save.end(None, failure)
            self._release()
            raise failure from error
        save.thread = thread
        self._hand_over([unit for unit in order if self._store.units[unit].is_on_device], save)
        return save

    def before_update(self, unit: int) -> None:
        """Block until a unit has been written, or need not be."""
        if unit in self._unwritten:
            began = time.monotonic()
            with self._turn:
                self._turn.wait_for(lambda: unit not in self._unwritten)
            self.waited_seconds += time.monotonic() - began

    def wait(self) -> None:
        """Wait until no save is in progress. Failures are reported only by the `Save`."""
        if self.current is not None and self.current.thread is not None:
            self.current.thread.join()
            self.current.thread = None

    def abandon(self) -> None:
        """Cancel a save in progress; earlier checkpoints stay."""
        with self._turn:
            self._gives_up = True
            self._turn.notify_all()
        self.wait()

    def _order(self, policy: Policy) -> tuple[int, ...]:
        """The order of the next updates; units on the device come first."""
        units = list(range(len(self._store.layouts)))
        if policy.update == "during_backward":
            units.reverse()
        return tuple(sorted(units, key=lambda unit: not self._store.units[unit].is_on_device))

    def _hand_over(self, units: list[int], save: Save) -> None:
        """Copy units from the device for the thread, each when it asks for it."""
        try:
            for unit in units:
                with self._turn:
                    self._turn.wait_for(lambda unit=unit: self._wanted == unit or save.is_over)  # type: ignore[misc]
                if save.is_over:
                    return
                state = self._store.units[unit].in_float32(self._spare())
                with self._turn:
                    self._handed, self._wanted = state, None
                    self._turn.notify_all()
        except BaseException:
            self.abandon()
            raise

    # On the thread --------------------------------------------------------------------------------------------------

    def _write(self, save: Save, folder: Path, planned: PlannedCheckpoint, *how: Any) -> None:
        training, score, write_more, then = how
        path: Path | None = None
        failure: MegaTrainError | None = None
        earlier = self._earlier_in(folder.resolve())
        write = partial(
            write_checkpoint,
            folder,
            save.step,
            planned,
            training=training,
            score=score,
            write_more=write_more,
            progress=lambda done, total: self._note(save, done),
            earlier=earlier,
            shared=partial(_shares, save),
        )
        try:
            if self._world.size == 1:
                path = write(self._units(save, planned))
            else:
                path = self._write_together(save, planned, folder, write)
            save.copied = (0, "") if earlier is None else (earlier.copied_nbytes, earlier.why_copied)
            with contextlib.suppress(DamagedCheckpoint, OSError):
                self.earlier = Earlier.just_written(path)
            if then is not None and self._world.rank == 0:
                self._release()
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
            self._release()

    def _note(self, save: Save, written_nbytes: int) -> None:
        """Record a save's progress. Raises `_Abandoned` if it has been cancelled."""
        save.written_nbytes, save.moved = written_nbytes, time.monotonic()
        if self._gives_up:
            raise _Abandoned

    def _earlier_in(self, folder: Path) -> Earlier | None:
        """The previous checkpoint, if it is in the same folder."""
        return self.earlier if self.earlier is not None and self.earlier.folder.parent == folder else None

    def _release(self) -> None:
        """Allow updates of all units."""
        with self._turn:
            self._unwritten = frozenset()
            self._turn.notify_all()

    def _units(self, save: Save, planned: PlannedCheckpoint) -> Iterator[dict[str, ParamState]]:
        """The state of each unit in turn; taking the next means that the last has been written."""
        for unit in planned.order:
            save.at, save.moved = self._store.model.units[unit].name, time.monotonic()
            state = self._own(unit)
            yield self._by_name(unit, state)
            del state
            self._written(unit)
        save.at = "the manifest"

    def _written(self, unit: int) -> None:
        """Allow updates of a unit."""
        with self._turn:
            self._unwritten -= {unit}
            self._turn.notify_all()

    def _write_together(self, save: Save, planned: PlannedCheckpoint, folder: Path, write: Callable[..., Path]) -> Path:
        """Write the checkpoint of several ranks: each its share, or rank 0 everything if it must."""
        total = planned.nbytes

        def progress(nbytes: int) -> None:  # assumes that the others are as far
            self._note(save, min(nbytes * self._world.size, total))

        def by_all(agree: Agree, staging: Path | None) -> Mapping[str, FileSum] | None:
            name = agree(lambda: "" if staging is None else staging.name)[0]
            target = step_folder(usable_path(folder, error=CheckpointError).resolve(), save.step)
            here, earlier = target.with_name(name), self._earlier_in(target.parent)
            assert self._ranges is not None
            once = frozenset(unit for unit in planned.order if self._store.units[unit].is_on_device)
            of = planned, self._ranges, self._store.owned, partial(self._announced, save), once, progress, target
            files = SharedFiles(self._world, agree, *of)
            save.streamed = self._doubt or files.why_not(here)
            if save.streamed:
                return None
            return files.write(here, earlier, self._written, partial(_shares, save), self._doubts)

        def units(agree: Agree) -> Iterator[dict[str, ParamState]]:
            return self._gathered(save, planned, agree)

        def follow(agree: Agree) -> None:
            if by_all(agree, None) is None:
                follow_gathered(units(agree))

        return write_together(
            self._world, lambda agree: write(units(agree), together=lambda staging: by_all(agree, staging)), follow
        )

    def _gathered(self, save: Save, planned: PlannedCheckpoint, agree: Agree) -> Iterator[dict[str, ParamState]]:
        """The state of each unit in turn, from all ranks."""
        own: dict[int, HostArrays] = {}

        def prepare(unit: int) -> None:
            own[unit] = self._announced(save, unit)

        def whole(unit: int) -> dict[str, ParamState]:
            state, layout = own.pop(unit), self._store.layouts[unit]
            parts = (state.hi, layout), *((moment, layout.trained) for moment in state.moments)
            hi, *moments = (
                self._store.together(torch.from_numpy(a), of, self._world.together).numpy() for a, of in parts
            )
            self._written(unit)
            return self._by_name(unit, StateArrays(hi, None, tuple(moments)))

        return gathered(agree, planned.order, prepare, whole)

    def _announced(self, save: Save, unit: int) -> HostArrays:
        """This rank's share of a unit, noting it as being written."""
        save.at = self._store.model.units[unit].name
        self._note(save, save.written_nbytes)
        return self._own(unit)

    def _doubts(self) -> None:
        self._doubt = "what the ranks had written together was not there afterwards"

    def _own(self, unit: int) -> HostArrays:
        """This rank's share of a unit."""
        if self._store.units[unit].is_on_device:
            return self._received(unit)
        return self._store.units[unit].in_float32(self._spare())

    def _received(self, unit: int) -> HostArrays:
        """A unit copied by the main thread, which alone may read the device."""
        with self._turn:
            self._wanted = unit
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._handed is not None or self._gives_up)
            state, self._handed = self._handed, None
        if state is None:
            raise _Abandoned
        return state

    def _spare(self) -> Tensor:
        return self._store.pool.memory(SPARE)

    def _by_name(self, unit: int, state: HostArrays) -> dict[str, ParamState]:
        return {name: ParamState(*arrays) for name, arrays in tensors_of(self._store, unit, state).items()}


def _shares(save: Save, nbytes: int) -> None:
    save.shared_nbytes += nbytes


def tensors_of(store: Store, unit: int, state: HostArrays) -> dict[str, list[Tensor]]:
    """Parameter name -> views of master and, if trained, moments in a float32 state, in the parameter's shape.

    Parameters that are not in the state are omitted.
    """
    found: dict[str, list[Tensor]] = {}
    for place, param in zip(store.layouts[unit].fields, store.model.units[unit].params, strict=True):
        if place.stop > state.hi.size:
            break  # not part of checkpoints
        arrays = (state.hi, *state.moments) if param.trainable else (state.hi,)
        found[place.name] = [torch.from_numpy(each[place.start : place.stop]).view(place.shape) for each in arrays]
    return found


def versions() -> dict[str, str]:
    """Versions of everything that affects numbers."""
    found = {"python": platform.python_version(), "megatrain": __version__}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def as_json(value: Numerics | Policy) -> dict[str, Any]:
    """One of these in the form for `training.json`."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(value)))  # JSON turns tuples into lists
    return plain
