"""Writes checkpoints unit by unit: a Hugging Face folder with float32 masters, plus everything needed to resume.

    step-00001200/
      config.json, model.safetensors ...      a model that `from_pretrained` loads, tokenizer included; if the model has
                                              an adapter, only the adapter, as `peft` writes it
      optimizer/moments.safetensors ...       m and v of each trained parameter, `NAME.m` and `NAME.v`, in its shape
      training.json                           everything that is not a tensor (`run_state`)
      manifest.json                           sizes and checksums (`manifest`)

Masters and moments of a unit are written in one pass, so that a unit is gathered once, with one unit in memory at a
time. The folder appears complete or not at all. What needs transformers (names and small files) is done when a
checkpoint is planned, since it must not run during a training step; writing may.
"""

from __future__ import annotations

import errno
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint.direct_io import DirectWriter
from megatrain.checkpoint.export import SHARD_NBYTES, add_files
from megatrain.checkpoint.hard_links import Earlier, SharedFile, share_instead
from megatrain.checkpoint.manifest import MANIFEST, FileSum, Manifest, sum_of
from megatrain.checkpoint.run_state import TRAINING, write_training
from megatrain.checkpoint.safetensors_writer import Shard, ShardFile, ShardWriter, plan_front_to_back, write_index
from megatrain.errors import CheckpointError
from megatrain.formatting import at_least, at_most
from megatrain.model import PortedModel, Written, WrittenTensor, written_of
from megatrain.spec import ModelSpec, ParamSpec
from megatrain.system.atomic import appearing
from megatrain.system.paths import usable_path
from megatrain.version import __version__

OPTIMIZER = "optimizer"
"""The folder of moments inside a checkpoint."""

Progress = Callable[[int, int], None]
"""Called with (bytes written, total bytes)."""


@dataclass(frozen=True, slots=True)
class ParamState:
    """The float32 state of one parameter in its shape, on the host. A frozen parameter has no moments."""

    master: Tensor
    m: Tensor | None = None
    v: Tensor | None = None


class PlannedCheckpoint:
    """Everything about a model's checkpoints that is known before writing; may be used for any number of them.

    Buffers, config and generation config are written as they are now. Construct it on the thread that runs the
    model, while it is not running. Raises `ExportError` if a checkpoint cannot be built unit by unit.
    """

    def __init__(
        self, ported: PortedModel, *, shard_nbytes: int = SHARD_NBYTES, order: Sequence[int] | None = None
    ) -> None:
        self.spec = ported.structure
        self.order = tuple(range(len(self.spec.units)) if order is None else order)
        """Order in which units are written; by default that of the specification."""
        self.written = written_of(ported, torch.float32, for_checkpoint=True)
        self.frozen = frozenset() if ported.adapter else _frozen(self.spec, self.written)
        """Tensors that do not train. They are in separate files, which checkpoints share (`hard_links`)."""
        nbytes = shard_nbytes if ported.adapter is None else 1 << 62  # `peft` reads one file
        self.copied = self.written.carried.without({tensor.name for tensor in self.tensors})
        """Tensors of the model's source that it does not read. They are in separate files, which are shared, too."""
        planned = plan_front_to_back(self.tensors, nbytes, self.written.stem, self.frozen, self.copied)
        names = {tensor.name for tensor in self.copied}
        self.copied_files = [shard for shard in planned if not names.isdisjoint(shard.starts)]
        self.weights = [shard for shard in planned if names.isdisjoint(shard.starts)]
        self.moments = plan_front_to_back(self.moment_tensors, shard_nbytes, f"{OPTIMIZER}/moments")
        self.small_files = _small_files(self.written)

    @property
    def tensors(self) -> list[WrittenTensor]:
        """The tensors of the model's files, in the order in which units provide them."""
        return [tensor for unit in self.order for tensor in self.tensors_of(unit)]

    def tensors_of(self, unit: int) -> list[WrittenTensor]:
        """A unit's tensors, in an order independent of how the model was made, so that a resumed run makes the
        same files."""
        return sorted(self.written.units[unit], key=lambda tensor: tensor.name)

    @property
    def moment_tensors(self) -> list[WrittenTensor]:
        """The tensors of the optimizer's files, in the order in which units provide them."""
        params = (param for unit in self.order for param in self.spec.units[unit].params)
        return [tensor for param in params for tensor in moments_of(param)]

    @property
    def frozen_weights(self) -> list[Shard]:
        """Files without trained weights."""
        return [shard for shard in self.weights if shard.starts and self.frozen.issuperset(shard.starts)]

    @property
    def nbytes(self) -> int:
        """Bytes of the files of weights and moments; the other files are small."""
        return sum(shard.nbytes for shard in (*self.weights, *self.copied_files, *self.moments))


def write_checkpoint(
    folder: str | Path,
    step: int,
    planned: PlannedCheckpoint,
    units: Iterable[Mapping[str, ParamState]],
    training: Mapping[str, Any],
    *,
    score: float | None = None,
    write_more: Callable[[Path], object] | None = None,
    progress: Progress | None = None,
    earlier: Earlier | None = None,
    shared: Callable[[int], object] = lambda nbytes: None,
    together: Callable[[Path], Mapping[str, FileSum] | None] = lambda folder: None,
) -> Path:
    """Write the checkpoint `step-STEP` into `folder`, replacing an existing one, and return its path.

    units: name -> state of each parameter, unit by unit in `planned.order`; advanced only after the previous unit has
    been written, so a generator may reuse its memory. training: see `write_training`. score: for ranking checkpoints,
    lower is better. write_more: called with the folder before it appears, to add a tokenizer, say. earlier: a
    checkpoint in the same folder, whose files are linked if unchanged. shared: called with the bytes of each linked
    file. together: called with the folder before it holds arrays, so that several ranks may write them together;
    returns their files' checksums, or nothing if they are to be written from `units`.

    May run in a thread during training, as may `units`, one call at a time. Raises `CheckpointError`, leaving an
    existing checkpoint unchanged, if writing fails (for lack of space, say). Errors of `units` are passed on.
    """
    target = step_folder(usable_path(folder, error=CheckpointError, to_write="folder").resolve(), step)
    _refuse_foreign(target)
    with writing_to(target), appearing(target) as staging:
        _refuse_too_little_space(target, planned.nbytes - _shareable_nbytes(planned, earlier))
        for name, content in planned.small_files.items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_bytes(content)
        write_training(staging, training)
        if write_more is not None:
            add_files(write_more, staging)
        if planned.moments:
            (staging / OPTIMIZER).mkdir()
        sums = together(staging)
        if sums is None:
            sums = _write_arrays(planned, iter(units), staging, progress or _unwatched, earlier, shared)
        sums = {**sums, **_copy_files(planned, staging, earlier, shared)}
        of_weights = [*planned.weights, *planned.copied_files], [*planned.tensors, *planned.copied]
        write_index(staging, *of_weights, planned.written.numel)
        files = {name: sums.get(name) or sum_of(path) for name, path in _files_in(staging).items()}
        for name in files.keys() - sums.keys():
            if earlier is not None and share_instead(earlier, name, files[name], staging / name):
                shared(files[name].nbytes)
        score = score if score is not None and math.isfinite(score) else None
        (staging / MANIFEST).write_text(Manifest(step, score, __version__, files).text())
    return target


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Turn errors of the file system into `CheckpointError`."""
    try:
        yield
    except OSError as error:
        fix = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the disk and permissions"
        raise CheckpointError(f"cannot be written ({error.strerror or error})", where=str(target), fix=fix) from error


def step_folder(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint in the folder of checkpoints."""
    return folder / f"step-{step:08d}"


def moments_of(param: ParamSpec) -> list[WrittenTensor]:
    """The tensors of a parameter's optimizer state, none if it is frozen."""
    if not param.trainable:
        return []
    return [WrittenTensor(f"{param.name}.{each}", param.shape, torch.float32) for each in ("m", "v")]


def _write_arrays(
    planned: PlannedCheckpoint,
    units: Iterator[Mapping[str, ParamState]],
    folder: Path,
    progress: Progress,
    earlier: Earlier | None,
    shared: Callable[[int], object],
) -> dict[str, FileSum]:
    """Write the files of weights and moments, and return their checksums."""
    frozen = planned.frozen_weights
    trained = [shard for shard in planned.weights if shard not in frozen]
    with DirectWriter(folder) as files:
        create = _shared_if_equal(files, folder, earlier, shared)
        with (
            ShardWriter(folder, trained, create) as weights,
            ShardWriter(folder, frozen, create) as constant,
            ShardWriter(folder, planned.moments, create) as moments,
        ):
            arrays = _Arrays(planned, weights, constant, moments, progress)
            for unit in planned.order:
                arrays.write_unit(unit, units)
            arrays.finish(units)
    return files.sums


def _copy_files(
    planned: PlannedCheckpoint, folder: Path, earlier: Earlier | None, shared: Callable[[int], object]
) -> dict[str, FileSum]:
    """Write the files of tensors that are carried over, and return their checksums."""
    if not planned.copied_files:
        return {}
    tensors = {tensor.name: tensor for tensor in planned.copied}
    with DirectWriter(folder) as files:
        create = _shared_if_equal(files, folder, earlier, shared)
        with ShardWriter(folder, planned.copied_files, create) as writer:
            for name in (name for shard in planned.copied_files for name in shard.starts):
                writer.copy(tensors[name], planned.written.carried.blocks(tensors[name]))
    return files.sums


def _shared_if_equal(
    files: DirectWriter, folder: Path, earlier: Earlier | None, shared: Callable[[int], object]
) -> Callable[[Path, int], ShardFile]:
    """Creates files that become hard links to the previous checkpoint's if they turn out to be equal."""

    def create(path: Path, nbytes: int) -> ShardFile:
        name = path.relative_to(folder).as_posix()
        expected = earlier.sum_of(name, nbytes) if earlier is not None else None
        if earlier is None or expected is None:
            return files.open(path, nbytes)

        def unchanged(found: FileSum) -> None:
            files.sums[name] = found
            shared(found.nbytes)

        return SharedFile(earlier, name, expected, path, lambda: files.open(path, nbytes), unchanged)

    return create


def _frozen(spec: ModelSpec, written: Written) -> frozenset[str]:
    """Names of tensors that do not train, judged by names; a wrong guess only costs space."""
    names: set[str] = set()
    for unit, tensors in zip(spec.units, written.units, strict=True):
        still = {param.name for param in unit.params if not param.trainable}
        whole = bool(still) and not any(param.trainable for param in unit.params)
        names.update(tensor.name for tensor in tensors if whole or tensor.name in still)
    return frozenset(names)


def _shareable_nbytes(planned: PlannedCheckpoint, earlier: Earlier | None) -> int:
    """Bytes that will probably be linked rather than written."""
    if earlier is None:
        return 0
    still = (*planned.frozen_weights, *planned.copied_files)
    there = (shard for shard in still if earlier.sum_of(shard.name, shard.nbytes) is not None)
    return sum(shard.nbytes for shard in there)


class _Arrays:
    """Splits the state of units into tensors, and writes each to its place."""

    def __init__(
        self,
        planned: PlannedCheckpoint,
        weights: ShardWriter,
        constant: ShardWriter,
        moments: ShardWriter,
        progress: Progress,
    ) -> None:
        self._planned, self._progress = planned, progress
        self._weights, self._constant, self._moments = weights, constant, moments
        self._last: dict[str, tuple[WrittenTensor, Tensor]] = {}  # for the last files; in memory anyway
        self._total = sum(tensor.nbytes for tensor in (*planned.tensors, *planned.moment_tensors))
        self._done = 0

    def write_unit(self, unit: int, units: Iterator[Mapping[str, ParamState]]) -> None:
        """Take the next unit and write it, keeping no reference to it."""
        state = next(units, None)
        params = [each for each in self._planned.spec.units[unit].params if self._planned.written.writes(each.name)]
        if state is None:
            given = self._planned.order.index(unit)
            raise CheckpointError(f"only {given} of {len(self._planned.spec.units)} units were given")
        _refuse_inexact(params, state)
        tensors = self._planned.written.tensors(unit, {param.name: state[param.name].master for param in params})
        for tensor in self._planned.tensors_of(unit):
            value = tensors.pop(tensor.name)  # popped to free copies as soon as they are written
            if tensor.dtype == torch.float32:
                self._write(self._constant if tensor.name in self._planned.frozen else self._weights, tensor, value)
            else:
                self._last[tensor.name] = tensor, value
        for param in params:
            both = state[param.name].m, state[param.name].v
            for tensor, moment in zip(moments_of(param), both, strict=False):
                assert moment is not None
                self._write(self._moments, tensor, moment)

    def finish(self, units: Iterator[Mapping[str, ParamState]]) -> None:
        """Write the last files, and exhaust the iterator of units."""
        for name in (name for shard in self._planned.weights for name in shard.starts):
            if name in self._last:
                self._write(self._weights, *self._last[name])
        if next(units, None) is not None:
            raise CheckpointError(f"more than {len(self._planned.spec.units)} units were given")

    def _write(self, writer: ShardWriter, tensor: WrittenTensor, value: Tensor) -> None:
        writer.write(tensor, value)
        self._done += tensor.nbytes
        self._progress(self._done, self._total)


def _refuse_inexact(params: Iterable[ParamSpec], state: Mapping[str, ParamState]) -> None:
    """Raise `CheckpointError` unless the state has exactly the expected tensors: nothing is rounded or omitted."""
    for param in params:
        where = f"parameter {param.name}"
        if param.name not in state:
            raise CheckpointError("its state was not given", where=where)
        given: dict[str, Tensor] = {
            name: tensor for name in ("master", "m", "v") if (tensor := getattr(state[param.name], name)) is not None
        }
        due = ["master", "m", "v"] if param.trainable else ["master"]
        if list(given) != due:
            raise CheckpointError(f"its state has {', '.join(given)}, not {', '.join(due)}", where=where)
        for name, tensor in given.items():
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != param.shape:
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise CheckpointError(f"its {name} is {found}, not torch.float32 {list(param.shape)}", where=where)


def _small_files(written: Written) -> dict[str, bytes]:
    """Config, generation config and custom code: name -> content. Checkpoints have no model card."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            written.write_small_files(Path(folder))
            return {name: path.read_bytes() for name, path in _files_in(Path(folder)).items()}
    except OSError as error:
        what = f"the config cannot be written ({error.strerror or error})"
        raise CheckpointError(what, where=tempfile.gettempdir(), fix="check space and permissions there") from error


def _files_in(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _unwatched(done: int, total: int) -> None:
    pass


def _refuse_foreign(target: Path) -> None:
    """Raise `CheckpointError` unless the target is a checkpoint or empty, since it is replaced as a whole."""
    try:
        inside = {path.name for path in target.iterdir()} if target.exists() else set()
    except OSError as error:
        raise CheckpointError(f"cannot be replaced ({error.strerror or error})", where=str(target)) from error
    if inside and not inside & {MANIFEST, TRAINING, "config.json"}:
        raise CheckpointError("is a folder, but not a checkpoint", where=str(target), fix="move it out of the way")


def _refuse_too_little_space(target: Path, needed: int) -> None:
    """An existing checkpoint stays until the new one is complete, so its space does not count as free."""
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"needs {at_least(needed)}, and {at_most(free)} are free")
