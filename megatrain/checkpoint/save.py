"""Writes checkpoints piece by piece: a Hugging Face folder with float32 masters, plus everything needed to resume.

    step-00001200/
      config.json, model.safetensors ...      a model that `from_pretrained` loads, tokenizer included; if the model has
                                              an adapter, only the adapter, as `peft` writes it
      optimizer/moments.safetensors ...       the optimizer's arrays for each trained parameter (AdamW's `NAME.m`,
                                              `NAME.v`)
      training.json                           everything that is not a tensor (`run_state`)
      manifest.json                           sizes and checksums (`manifest`)

State is read by ranges, in the order of the files, with at most `SAVED_AT_ONCE` elements in memory at a time. The
folder appears complete or not at all. What needs transformers (names and small files) is done when a checkpoint is
planned, since it must not run during a training step; writing may.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.checkpoint.export import SHARD_NBYTES, add_files, refuse_too_little_space, writing_to
from megatrain.checkpoint.manifest import MANIFEST, FileSum, Manifest, read_manifest, sum_of
from megatrain.checkpoint.range_writer import TensorWriter, sums_of_files, writing_ranges
from megatrain.checkpoint.run_state import TRAINING, write_training
from megatrain.checkpoint.safetensors_writer import Shard, plan_front_to_back, tensor_blocks, write_index
from megatrain.checkpoint.tensor_pieces import TensorPiece, are_moved, tensor_pieces
from megatrain.errors import CheckpointError
from megatrain.model import PortedModel, Written, WrittenTensor, written_of
from megatrain.spec import ModelSpec, ParamSpec
from megatrain.spec.layout import SAVED_AT_ONCE, Layout, Ownership, Piece
from megatrain.system.atomic import appearing
from megatrain.system.paths import usable_path
from megatrain.version import __version__

OPTIMIZER = "optimizer"
"""The folder of moments inside a checkpoint."""

Progress = Callable[[int, int], None]
"""Called with (bytes written, total bytes)."""


@dataclass(frozen=True, slots=True)
class StateReader:
    """The float32 state of all units, which is read by ranges."""

    read: Callable[[int, int, int, int], NDArray[np.float32]]
    """Reads elements [start, stop) of one array of a unit, given as (unit, array, start, stop): 0 are the masters, n
    the optimizer's n-th array (`ParamSpec.state`). What it returns need only be valid until the next call."""
    layouts: Sequence[Layout]
    owned: Ownership | None = None
    """What a rank owns, if its elements are those of its own buffers; otherwise they are those of whole units."""
    written: Callable[[int], object] = lambda unit: None
    """Called with each unit once nothing of it need be read any more."""

    def within(self, unit: int, array: int, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Elements [start, stop) of a whole unit as far as they can be read: pairs of a first element and values."""
        pieces: Iterable[Piece] = (Piece(start, stop, start),)
        if self.owned is not None:
            pieces = self.owned.within(self.layouts[unit], start, stop)
        for piece in pieces:
            yield piece.start, self.read(unit, array, piece.own.start, piece.own.stop)


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What a checkpoint says besides weights and moments."""

    step: int
    training: Mapping[str, Any]
    """See `write_training`."""
    score: float | None = None
    """For ranking checkpoints; lower is better."""
    write_more: Callable[[Path], object] | None = None
    """Called with the folder before it appears, to add a tokenizer, say."""


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
        """Tensors that do not train. They are in separate files, which checkpoints share (`PreviousCheckpoint`)."""
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
        frozen = [shard for shard in self.weights if shard.starts and self.frozen.issuperset(shard.starts)]
        return [shard for shard in frozen if self._constants.keys() >= shard.starts.keys()]

    def besides_parameters(self, shard: Shard) -> Iterator[tuple[int, bytes | memoryview]]:
        """The bytes of a file that do not come from parameters, with their places: header, buffers, copied tensors."""
        yield 0, shard.header
        copied = {tensor.name: tensor for tensor in self.copied}
        for name, start in shard.starts.items():
            blocks: Iterable[memoryview] = ()
            if name in copied:
                blocks = self.written.carried.blocks(copied[name])
            elif not (buffer := self._constants[name]).is_meta:
                blocks = tensor_blocks(buffer, buffer.dtype)
            for block in blocks:
                yield start, block
                start += len(block)

    @cached_property
    def _constants(self) -> dict[str, Tensor]:
        """The tensors of the model's files that do not train: a buffer's value, or a meta tensor for frozen weights."""
        constants: dict[str, Tensor] = {}
        for unit in self.order:
            params = [param for param in self.spec.units[unit].params if self.written.writes(param.name)]
            empty = {param.name: torch.empty(param.shape, device="meta") for param in params}
            trained = any(param.trainable for param in params)
            frozen = {id(empty[param.name]) for param in params if not param.trainable}
            for name, value in self.written.tensors(unit, empty).items():
                if not trained or id(value) in frozen or not value.is_meta:
                    constants[name] = value
        return constants

    @cached_property
    def are_moved(self) -> bool:
        """Whether conversions only move elements, and compute none, so that no parameter must be whole for them."""
        return all(are_moved(self.written, unit) for unit in self.order)

    def pieces(self, unit: int, state: StateReader, wants: Callable[[WrittenTensor], bool]) -> Iterator[TensorPiece]:
        """The wanted tensors of a unit as far as the state can be read, piece by piece, weights first."""
        layout = state.layouts[unit]

        def masters(name: str, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
            first = layout.by_name[name].start
            for at, values in state.within(unit, 0, first + start, first + stop):
                yield at - first, values

        yield from tensor_pieces(self.written, unit, filter(wants, self.tensors_of(unit)), masters)
        for field, param in zip(layout.trained.fields, self.spec.units[unit].params, strict=False):
            for array, tensor in enumerate(moments_of(param), 1):
                starts = range(field.start, field.stop, SAVED_AT_ONCE) if wants(tensor) else ()
                for start in starts:
                    for at, values in state.within(unit, array, start, min(start + SAVED_AT_ONCE, field.stop)):
                        yield TensorPiece(tensor, at - field.start, torch.from_numpy(values))

    @property
    def arrays(self) -> list[Shard]:
        """The files of weights and moments."""
        return [*self.weights, *self.moments]

    @property
    def nbytes(self) -> int:
        """Bytes of the files of weights, moments and copied tensors; the other files are small."""
        return sum(shard.nbytes for shard in (*self.arrays, *self.copied_files))


def write_checkpoint(
    folder: str | Path,
    planned: PlannedCheckpoint,
    state: StateReader,
    facts: CheckpointFacts,
    *,
    progress: Progress | None = None,
    earlier: PreviousCheckpoint | None = None,
    together: Callable[[Path, Sequence[Shard]], Mapping[str, FileSum] | None] | None = None,
) -> Path:
    """Write the checkpoint `step-STEP` into `folder`, replacing an existing one, and return its path.

    state: read unit by unit in `planned.order`. earlier: a checkpoint in the same folder, whose files are linked if
    unchanged. together: called with the folder and the files of weights and moments that are not linked, so that
    several ranks may write them together; returns their checksums, or nothing if they are to be written from `state`.

    May run in a thread during training, as may `state.read`, one call at a time. Raises `CheckpointError`, leaving an
    existing checkpoint unchanged, if writing fails (for lack of space, say). Errors of `state.read` are passed on.
    """
    target = step_folder(usable_path(folder, error=CheckpointError, to_write="folder").resolve(), facts.step)
    _refuse_foreign(target)
    with writing_to(target, CheckpointError), appearing(target) as staging:
        for name, content in planned.small_files.items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_bytes(content)
        write_training(staging, facts.training)
        if facts.write_more is not None:
            add_files(facts.write_more, staging)  # before links, through which it could write to the earlier checkpoint
        sums = _linked(planned, earlier, staging)
        arrays, copied = (
            [shard for shard in shards if shard.name not in sums] for shards in (planned.arrays, planned.copied_files)
        )
        refuse_too_little_space(target, sum(shard.nbytes for shard in (*arrays, *copied)))
        written = together(staging, arrays) if together is not None else None
        sums |= _write_arrays(planned, arrays, state, staging, progress) if written is None else written
        sums |= _copy_tensors(planned, copied, staging)
        of_weights = [*planned.weights, *planned.copied_files], [*planned.tensors, *planned.copied]
        write_index(staging, *of_weights, planned.written.numel)
        files = {name: sums.get(name) or sum_of(path) for name, path in _files_in(staging).items()}
        for name in files.keys() - sums.keys():
            if earlier is not None and earlier.files.get(name) == files[name]:
                earlier.link(name, staging / name)
        score = facts.score if facts.score is not None and math.isfinite(facts.score) else None
        (staging / MANIFEST).write_text(Manifest(facts.step, score, __version__, files).text())
    return target


def _linked(planned: PlannedCheckpoint, earlier: PreviousCheckpoint | None, folder: Path) -> dict[str, FileSum]:
    """Hard-link the files of frozen and of copied tensors that the earlier checkpoint holds unchanged."""
    linked: dict[str, FileSum] = {}
    if earlier is None:
        return linked
    frozen = planned.frozen_weights if earlier.has_same_weights else []
    for shard in (*frozen, *planned.copied_files):
        pieces = planned.besides_parameters(shard)
        if earlier.holds(shard.name, shard.nbytes, pieces) and earlier.link(shard.name, folder / shard.name):
            linked[shard.name] = earlier.files[shard.name]
    return linked


def step_folder(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint in the folder of checkpoints."""
    return folder / f"step-{step:08d}"


def moments_of(param: ParamSpec) -> list[WrittenTensor]:
    """The tensors of a parameter's optimizer state, none if it is frozen."""
    if not param.trainable:
        return []
    return [WrittenTensor(f"{param.name}.{array}", param.shape, torch.float32) for array in param.state]


def _write_arrays(
    planned: PlannedCheckpoint, files: Sequence[Shard], state: StateReader, folder: Path, progress: Progress | None
) -> Mapping[str, FileSum]:
    """Write these files of weights and moments from the state of all units, and return their checksums."""
    tensors = [*planned.tensors, *planned.moment_tensors]
    with writing_ranges(folder, files) as ranges:
        writer = TensorWriter(ranges, planned.arrays)
        total = sum(tensor.nbytes for tensor in tensors)
        done = total - sum(tensor.nbytes for tensor in filter(writer.takes, tensors))
        for unit in planned.order:
            for piece in planned.pieces(unit, state, writer.takes):
                writer.write(piece.tensor, piece.values, piece.at)
                done += piece.values.numel() * piece.tensor.dtype.itemsize
                if progress is not None:
                    progress(done, total)
            state.written(unit)
    return sums_of_files(folder, files, ranges.written)


def _copy_tensors(planned: PlannedCheckpoint, files: Sequence[Shard], folder: Path) -> Mapping[str, FileSum]:
    """Write these files of tensors that are copied from the model's source, and return their checksums."""
    with writing_ranges(folder, files) as ranges:
        writer = TensorWriter(ranges, planned.copied_files)
        for tensor in planned.copied:
            writer.copy(tensor, planned.written.carried.blocks(tensor))
    return sums_of_files(folder, files, ranges.written)


def _frozen(spec: ModelSpec, written: Written) -> frozenset[str]:
    """Names of tensors that do not train, judged by names; a wrong guess only costs space."""
    names: set[str] = set()
    for unit, tensors in zip(spec.units, written.units, strict=True):
        still = {param.name for param in unit.params if not param.trainable}
        whole = bool(still) and not any(param.trainable for param in unit.params)
        names.update(tensor.name for tensor in tensors if whole or tensor.name in still)
    return frozenset(names)


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


def _refuse_foreign(target: Path) -> None:
    """Raise `CheckpointError` unless the target is a checkpoint or empty, since it is replaced as a whole."""
    try:
        inside = {path.name for path in target.iterdir()} if target.exists() else set()
    except OSError as error:
        raise CheckpointError(f"cannot be replaced ({error.strerror or error})", where=str(target)) from error
    if inside and not inside & {MANIFEST, TRAINING, "config.json"}:
        raise CheckpointError("is a folder, but not a checkpoint", where=str(target), fix="move it out of the way")


# Files that are the same as in the previous checkpoint ----------------------------------------------------------------

SMALLEST = 1 << 20
"""Smaller files (in bytes) are not worth linking."""
READ_ONLY = 0o444

Stamp = tuple[int, int, int]
"""A file's inode, size, and time of its last change."""


class PreviousCheckpoint:
    """A checkpoint that this process has written or checked, whose unchanged files are hard-linked instead of written.

    Those are frozen weights, tensors copied from the model's source, and tokenizers. A file of frozen weights is the
    same if its header is, and the checksum of all frozen weights (`Store.frozen_checksum`); tensors that are not
    parameters are compared byte by byte, other files by their checksums once they are written. A file that was touched
    since (by inode, size and time) is not linked, nor are small ones, which people may edit; a linked file is made
    read-only, since writing to it would change both. Either checkpoint may be removed without affecting the other. If
    the file system has no hard links, files are written again, and the run says so once.

    Raises `DamagedCheckpoint` if it has no sound manifest, and `OSError` if a file is missing.
    """

    def __init__(self, folder: Path, frozen: str | None = None) -> None:
        """frozen: the checksum of the frozen weights in it, if known."""
        self.folder, self.frozen = folder, frozen
        self.files = read_manifest(folder).files
        self._stamps = {name: _stamp(folder / name) for name in self.files}
        self.has_same_weights = False
        """Whether the frozen weights are the same now."""
        self.linked_nbytes = 0
        """Bytes of files that the checkpoint being written shares with this one."""
        self.copied_nbytes = 0
        """Bytes of files that could not be linked, so that they are written again."""
        self.why_copied = ""

    def begin(self, frozen: str | None) -> None:
        """Count the links of another checkpoint, with frozen weights of that checksum."""
        self.has_same_weights = frozen is not None and frozen == self.frozen
        self.linked_nbytes, self.copied_nbytes, self.why_copied = 0, 0, ""

    def holds(self, name: str, nbytes: int, pieces: Iterable[tuple[int, bytes | memoryview]]) -> bool:
        """Whether there is a file of that name and size, with these bytes at these places."""
        if name not in self.files or self.files[name].nbytes != nbytes:
            return False
        try:
            with (self.folder / name).open("rb") as file:
                return all(file.seek(start) == start and file.read(len(data)) == data for start, data in pieces)
        except OSError:
            return False

    def link(self, name: str, path: Path) -> bool:
        """Make `path` a hard link to the file; whether that was possible."""
        source, nbytes, beside = self.folder / name, self.files[name].nbytes, path.with_name(f".{path.name}.link")
        try:
            if nbytes < SMALLEST or _stamp(source) != self._stamps[name]:
                return False
        except OSError:
            return False
        try:
            source.chmod(READ_ONLY)
            beside.hardlink_to(source)
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            self.copied_nbytes += nbytes
            self.why_copied = error.strerror or str(error)
            return False
        self.linked_nbytes += nbytes
        return True


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
