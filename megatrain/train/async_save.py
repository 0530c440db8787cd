"""Checkpoints of an engine, written while it trains on.

When a save begins, nothing is pending and no op runs: the state is that after a whole step. From then on a thread
writes unit after unit, in the order in which the next steps will change them, straight from where the state lies; and
an update waits until its unit has been written. So what is written is the state of one moment, bit for bit, no copy of
it is made, and a save takes no more memory than one unit in float32, for masters that are stored as halves and for what
is read from the disk. With the exact norm, updates come a whole forward and backward pass later, which is the time that
a save has before anyone waits for it. Units that live on the device are handed over before training goes on.

It leaves out when to save and what to keep (`checkpoints`), and the files (`checkpoint.save`).
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
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint import Earlier, ParamState, PlannedCheckpoint, step_folder, write_checkpoint
from megatrain.checkpoint.manifest import FileSum
from megatrain.checkpoint.places import Places
from megatrain.device.worker import OwningProcess
from megatrain.dist import ALONE, World
from megatrain.errors import CheckpointError, DamagedCheckpoint, MegaTrainError, typed_line
from megatrain.memory import Store, UnitState
from megatrain.model import PortedModel
from megatrain.schedule import Buffer, Use
from megatrain.spec import Numerics, Policy
from megatrain.system.paths import usable_path
from megatrain.train.gathered_files import Agree, follow_gathered, gathered, write_together
from megatrain.train.shared_files import SharedFiles

SPARE = "host/checkpoint"
VERSIONS = ("megatrain", "torch", "transformers", "numpy")


class _Abandoned(Exception):
    """The save was told to give up."""


@dataclass(eq=False)
class Save:
    """One checkpoint under way, or over. `wait` for it, or look at `is_over` from time to time."""

    step: int
    began: float = field(default_factory=time.monotonic)
    path: Path | None = None
    """Where it lies, once it is whole."""
    failure: MegaTrainError | None = None
    seconds: float = 0.0
    """That it took, once it is over."""
    nbytes: int = 0
    """Of weights and moments."""
    shared_nbytes: int = 0
    """Of files that are those of the checkpoint before."""
    streamed: str = ""
    """Why rank 0 has written alone what several ranks own, where it has."""
    written_nbytes: int = 0
    moved: float = field(default_factory=time.monotonic)
    """When something was last written, on the clock of `time.monotonic`."""
    at: str = ""
    """What is being written."""
    thread: threading.Thread | None = None
    _process: OwningProcess = field(default_factory=OwningProcess)
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """The folder, once it is whole. Raises `CheckpointError` if it could not be written, or not within
        `timeout` seconds; it then goes on. In a forked child one that was under way raises `DeviceError`."""
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
        """It is over, well or badly."""
        self.path, self.failure = path, failure
        self.seconds = time.monotonic() - self.began
        self._over.set()


class Saver:
    """Writes the state that `store` holds, one checkpoint at a time. Called by the foreground, between steps."""

    def __init__(self, ported: PortedModel, store: Store, world: World = ALONE) -> None:
        self._ported, self._store, self._world = ported, store, world
        self._planned: PlannedCheckpoint | None = None
        self._places: Places | None = None
        """Where what each rank owns lies in the files of what is planned."""
        self._doubt = ""
        """Why the ranks do not write together any more."""
        self._turn = threading.Condition()
        self._unwritten: frozenset[int] = frozenset()
        """Units that may not change yet."""
        self._wanted: int | None = None
        """The unit on the device that the thread waits for."""
        self._handed: UnitState | None = None
        self._gives_up = False
        self.current: Save | None = None
        """The last one that was begun."""
        self.earlier: Earlier | None = None
        """The last checkpoint that was written or taken up: what has not changed since is not written again."""
        self.waited_seconds = 0.0
        """Time that updates have waited for their unit to be written."""

    def goes_on_from(self, folder: Path) -> None:
        """The state is that of a checkpoint now."""
        with contextlib.suppress(DamagedCheckpoint):
            self.earlier = Earlier(folder)

    def reserve(self) -> None:
        """Take the memory that saves need. Raises `DoesNotFit`."""
        nbytes = max(self._store.spare_nbytes(unit) for unit in range(len(self._store.layouts)))
        self._store.pool.provide([Buffer(SPARE, "host", nbytes, Use.CHECKPOINT, crosses=False)])

    @property
    def is_reserved(self) -> bool:
        """Whether the memory that saves need has been taken."""
        return self._store.pool.has(SPARE)

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
        """Begin a save, once an earlier one is over. Nothing may be pending. See `checkpoint.write_checkpoint`.

        Raises `ExportError` for a model that cannot be written, `DoesNotFit` without memory for the largest unit;
        what happens later is told by the `Save`.
        """
        self.wait()
        self._store.settle()
        order = self._order(policy)
        if self._planned is None or self._planned.order != order:
            self._planned = PlannedCheckpoint(self._ported, order=order)
            self._places = Places(self._planned, self._store.layouts)
        self.reserve()
        save = Save(step, nbytes=self._planned.nbytes)
        self._gives_up, self._wanted, self._handed = False, None, None
        self._unwritten, self.current = frozenset(order), save
        arguments = (save, Path(folder), self._planned, training, score, write_more, then)
        thread = threading.Thread(target=self._write, args=arguments, name="megatrain-save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system lends no more of them
            failure = CheckpointError(typed_line(error), where=f"checkpoint of step {step}")
            save.end(None, failure)
            self._release()
            raise failure from error
        save.thread = thread
        self._hand_over([unit for unit in order if self._store.on_device(unit)], save)
        return save

    def before_update(self, unit: int) -> None:
        """Block until a unit has been written, or need not be."""
        if unit in self._unwritten:
            began = time.monotonic()
            with self._turn:
                self._turn.wait_for(lambda: unit not in self._unwritten)
            self.waited_seconds += time.monotonic() - began

    def wait(self) -> None:
        """Until no save is under way. A failure is told by its `Save` alone."""
        if self.current is not None and self.current.thread is not None:
            self.current.thread.join()
            self.current.thread = None

    def abandon(self) -> None:
        """Give up a save that is under way; what was there before is there still."""
        with self._turn:
            self._gives_up = True
            self._turn.notify_all()
        self.wait()

    def _order(self, policy: Policy) -> tuple[int, ...]:
        """As the next updates come; what is on the device first."""
        units = list(range(len(self._store.layouts)))
        if policy.update == "during_backward":
            units.reverse()
        return tuple(sorted(units, key=lambda unit: not self._store.on_device(unit)))

    def _hand_over(self, units: list[int], save: Save) -> None:
        """Copy units from the device for the thread, each when it asks for it."""
        try:
            for unit in units:
                with self._turn:
                    self._turn.wait_for(lambda unit=unit: self._wanted == unit or save.is_over)  # type: ignore[misc]
                if save.is_over:
                    return
                state = self._store.float32_state(unit, self._spare())
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

        write = partial(
            write_checkpoint,
            folder,
            save.step,
            planned,
            training=training,
            score=score,
            write_more=write_more,
            progress=lambda done, total: self._note(save, done),
            earlier=self._earlier_in(folder.resolve()),
            shared=partial(_shares, save),
        )
        try:
            if self._world.size == 1:
                path = write(self._units(save, planned))
            else:
                path = self._write_together(save, planned, folder, write)
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
        finally:  # whatever happens here, nobody waits for ever
            save.end(path, failure)
            self._release()

    def _note(self, save: Save, written_nbytes: int) -> None:
        """A save has come so far. Raises `_Abandoned` once it is to give up."""
        save.written_nbytes, save.moved = written_nbytes, time.monotonic()
        if self._gives_up:
            raise _Abandoned

    def _earlier_in(self, folder: Path) -> Earlier | None:
        """The checkpoint before, if it lies in the same folder."""
        return self.earlier if self.earlier is not None and self.earlier.folder.parent == folder else None

    def _release(self) -> None:
        """Let all units change."""
        with self._turn:
            self._unwritten = frozenset()
            self._turn.notify_all()

    def _units(self, save: Save, planned: PlannedCheckpoint) -> Iterator[dict[str, ParamState]]:
        """The state of unit after unit; whoever asks for the next has written the last."""
        for unit in planned.order:
            save.at, save.moved = self._store.model.units[unit].name, time.monotonic()
            state = self._own(unit)
            yield self._by_name(unit, state)
            del state
            self._written(unit)
        save.at = "the manifest"

    def _written(self, unit: int) -> None:
        """Let a unit change."""
        with self._turn:
            self._unwritten -= {unit}
            self._turn.notify_all()

    def _write_together(self, save: Save, planned: PlannedCheckpoint, folder: Path, write: Callable[..., Path]) -> Path:
        """The checkpoint of several ranks, each of which writes what it owns; or the first all, where it must."""
        total = planned.nbytes

        def progress(nbytes: int) -> None:  # as if the others were as far
            self._note(save, min(nbytes * self._world.size, total))

        def by_all(agree: Agree, staging: Path | None) -> Mapping[str, FileSum] | None:
            name = agree(lambda: "" if staging is None else staging.name)[0]
            target = step_folder(usable_path(folder, error=CheckpointError).resolve(), save.step)
            here, earlier = target.with_name(name), self._earlier_in(target.parent)
            assert self._places is not None
            once = frozenset(filter(self._store.on_device, planned.order))
            of = planned, self._places, self._store.owned, partial(self._announced, save), once, progress, target
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
        """The state of unit after unit, from all ranks."""
        own: dict[int, UnitState] = {}

        def prepare(unit: int) -> None:
            own[unit] = self._announced(save, unit)

        def whole(unit: int) -> dict[str, ParamState]:
            state, layout = own.pop(unit), self._store.layouts[unit]
            parts = (state.hi, layout), (state.m, layout.trained), (state.v, layout.trained)
            hi, m, v = (self._store.together(torch.from_numpy(a), of, self._world.together).numpy() for a, of in parts)
            self._written(unit)
            return self._by_name(unit, UnitState(hi, None, m, v))

        return gathered(agree, planned.order, prepare, whole)

    def _announced(self, save: Save, unit: int) -> UnitState:
        """What this rank owns of a unit."""
        save.at = self._store.model.units[unit].name
        self._note(save, save.written_nbytes)
        return self._own(unit)

    def _doubts(self) -> None:
        self._doubt = "what the ranks had written together was not there afterwards"

    def _own(self, unit: int) -> UnitState:
        """What this rank has of a unit."""
        if self._store.on_device(unit):
            return self._received(unit)
        return self._store.float32_state(unit, self._spare())

    def _received(self, unit: int) -> UnitState:
        """A unit from the foreground, since only that may read the device."""
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

    def _by_name(self, unit: int, state: UnitState) -> dict[str, ParamState]:
        return {name: ParamState(*arrays) for name, arrays in tensors_of(self._store, unit, state).items()}


def _shares(save: Save, nbytes: int) -> None:
    save.shared_nbytes += nbytes


def tensors_of(store: Store, unit: int, state: UnitState) -> dict[str, list[Tensor]]:
    """Parameter name -> master and, where it trains, m and v, as views of a state in float32, in its shape; of what the
    state has."""
    found: dict[str, list[Tensor]] = {}
    for place, param in zip(store.layouts[unit].fields, store.model.units[unit].params, strict=True):
        if place.stop > state.hi.size:
            break  # what checkpoints do not hold
        arrays = (state.hi, state.m, state.v) if param.trainable else (state.hi,)
        found[place.name] = [torch.from_numpy(each[place.start : place.stop]).view(place.shape) for each in arrays]
    return found


def versions() -> dict[str, str]:
    """Of what decides how numbers come about."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def as_json(value: Numerics | Policy) -> dict[str, Any]:
    """One of these as `training.json` takes it."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(value)))  # tuples are lists there
    return plain
