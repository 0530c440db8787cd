"""The part of an engine that outlives a process: what saves its state, and takes it up again.

A base of `Engine` only to keep both files short: it uses the engine's store, sink and streamer, and adds no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatrain.checkpoint import Checkpoint, open_checkpoint
from megatrain.engine import Streamer
from megatrain.errors import CheckpointError, ModelError
from megatrain.fields import checked
from megatrain.memory import Disk, Store
from megatrain.model import PretrainedSource, Progress, Source
from megatrain.spec import ModelSpec, Policy
from megatrain.train.restored import CALLER, ENGINE, NewMoments, engine_facts, facts_in, read_moments
from megatrain.train.saver import Save, Saver
from megatrain.train.sink import OptimizerSink
from megatrain.train.turns import Turn, one_at_a_time


class Restorable:
    """See `Engine`."""

    spec: ModelSpec
    _store: Store
    _sink: OptimizerSink
    _streamer: Streamer
    _saver: Saver
    _steps: int
    _sound_at: int | None
    _disk: Disk | None
    _turn: Turn

    @property
    def disk(self) -> Disk | None:
        """The files for state on the disk, if there are folders for them."""
        return self._disk

    @one_at_a_time
    def save(
        self,
        folder: str | Path,
        training: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        score: float | None = None,
        write_more: Callable[[Path], object] | None = None,
        then: Callable[[Path], object] | None = None,
    ) -> Save:
        """Begin to write the checkpoint `folder/step-...`, and return; steps may follow while it is written.

        It holds the state as it is now, bit for bit: an update waits for its unit to be written. One is under way at a
        time. `Save.wait` gives the folder; what fails is told there, and training goes on.

        training: what else to keep, the position in the data, say (plain values; `Checkpoint.training["run"]` gives it
        back). step: the number in the name, `steps` if not given. score, write_more: see `checkpoint.write_checkpoint`.
        then: called with the folder once it is whole, on the thread that wrote it.
        Raises `ExportError`, and `DoesNotFit` without memory for the largest unit in float32.
        """
        self._settle()
        names = [unit.name for unit in self.spec.units]
        facts = engine_facts(self._sink, self.policy, self._steps, self._streamer.seed, names)
        both = {ENGINE: facts, CALLER: _as_now(dict(training or {}))}
        number = self._steps if step is None else step
        return self._saver.begin(folder, number, self.policy, both, score, write_more, then)

    @one_at_a_time
    def restore(self, checkpoint: Checkpoint | str | Path, *, trust_remote_code: bool = False) -> None:
        """Go back (or on) to the state in a checkpoint of this model; what is pending is dropped.

        checkpoint: a folder `step-...`, which is checked first, or an open one. Raises `CheckpointError`, before
        anything is changed, for one that is damaged or of another model, and `ModelError` and `DiskError`; the state is
        then worthless until another one is restored.
        """
        checkpoint = checked(checkpoint, Checkpoint | str | Path, CheckpointError, "restore")
        checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        source = PretrainedSource(checkpoint.folder, trust_remote_code=trust_remote_code)
        self._refuse_other(checkpoint, {name: tuple(p.shape) for name, p in source.model.named_parameters()})
        self._saver.wait()
        self._sink.restore(0)
        self._fill(source)
        self._take_up(checkpoint, "refuse")

    @property
    def steps(self) -> int:
        """Steps that have been done, those before a checkpoint was taken up included."""
        return self._steps

    @property
    def saver(self) -> Saver:
        """What writes checkpoints: to reserve its memory, and to see what it is at."""
        return self._saver

    def under_way(self) -> tuple[list[tuple[str, str, float]], float]:
        """What each stream is at, (op, stream, seconds so far), and the seconds since any op began or ended.

        For those who watch from another thread.
        """
        return self._streamer.under_way()

    @one_at_a_time
    def fill(self, source: Source, progress: Progress | None = None) -> None:
        """Set every parameter from a source; optimizer and counters stay. For whoever makes an engine."""
        self._fill(source, progress)

    def _fill(self, source: Source, progress: Progress | None = None) -> None:
        self._saver.wait()
        self._sound_at = None
        source.fill(self._store, [[param.name for param in unit.params] for unit in self.spec.units], progress)
        self._store.settle()

    @one_at_a_time
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set some parameters, name -> value in the parameter's shape; optimizer and counters stay.

        Raises `ModelError`, before any is set, for a name or a shape that is not the model's.
        """
        shapes = {param.name: param.shape for unit in self.spec.units for param in unit.params}
        for name, value in weights.items():
            if tuple(value.shape) != shapes.get(name):
                what = f"has no parameter {name} of shape {list(value.shape)}"
                raise ModelError(what, where=f"model {self.spec.name}")
        self._settle()
        self._saver.wait()
        for name in self._store.names():  # unit by unit
            if name in weights:
                self._store.write_master(name, weights[name])
        self._store.settle()

    @property
    def policy(self) -> Policy:
        """How the model is streamed."""
        raise NotImplementedError

    def _settle(self) -> None:
        raise NotImplementedError

    def _refuse_other(self, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `CheckpointError` for a checkpoint of a model with these parameters, if they are not ours."""
        ours = {param.name: param.shape for unit in self.spec.units for param in unit.params}
        if odd := sorted({*ours.items()} ^ {*shapes.items()}):
            what = f"is of another model: {odd[0][0]} of shape {list(odd[0][1])} is in one of the two alone"
            raise CheckpointError(what, where=str(checkpoint.folder), fix="make an engine with Engine.from_checkpoint")

    def _take_up(self, checkpoint: Checkpoint, new: NewMoments) -> None:
        """Moments and counters of a checkpoint whose masters are there already."""
        facts = facts_in(checkpoint)
        read_moments(checkpoint, self._store, new)
        self._sink.restore(facts["updates"])
        self._steps, self._streamer.seed = facts["steps"], facts["seed"]
        self._saver.goes_on_from(checkpoint.folder)


def _as_now(value: Any) -> Any:
    """A copy of nested lists and dicts: they are written later, beside a caller who may go on changing them."""
    if isinstance(value, dict):
        return {key: _as_now(each) for key, each in value.items()}
    return [_as_now(each) for each in value] if type(value) is list else value
