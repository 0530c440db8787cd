"""Reads the masters and AdamW's state in checkpoints of other trainers, by parameter name and one tensor at a time.

| written by | masters | moments |
|---|---|---|
| Trainer | the Hugging Face model in the folder | `optimizer.pt`, by index; `optimizer.bin`, by name or index |
| FSDP, as torch.distributed.checkpoint (DCP) writes it | `pytorch_model_fsdp_0/` | `optimizer_0/` |
| DeepSpeed ZeRO-3 | flat float32 groups in `*_optim_states.pt` of all ranks | the same files |
| DeepSpeed, universal | `zero/NAME/fp32.pt` | `zero/NAME/exp_avg.pt`, `exp_avg_sq.pt` |

No class or function that a file names is ever looked up: torch loads tensors and plain values only (`weights_only`),
and what else DeepSpeed and DCP have pickled becomes a `_Record`. Files of tensors are mapped.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatrain.checkpoint.load import Checkpoint
from megatrain.errors import CheckpointError, first_line
from megatrain.system.paths import lies_within, read_json, read_text

PARTS = {"m": "exp_avg", "v": "exp_avg_sq"}
"""Our names of AdamW's moments -> those in every one of these formats."""

STEP = "step"
TRAINER_STATE = "trainer_state.json"
RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes in DeepSpeed's files whose content is not needed."""

SETTINGS: Mapping[str, Callable[[Any], Any]] = {
    "lr": float,
    "betas": lambda betas: [float(beta) for beta in betas],
    "eps": float,
    "weight_decay": float,
}
"""What torch's AdamW calls its hyperparameters -> how to read them."""

NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Names that the Trainer of transformers does not decay, besides all in an `nn.LayerNorm`."""

NO_DECAY_BEFORE = (r"bias",)
"""The same of older versions."""

RESTART = "start from its weights with a new optimizer (model.path)"


MALFORMED = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError),
    *(LookupError, OSError, RuntimeError, TypeError, ValueError),
)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise `CheckpointError`, naming the path, if what is read there is not as its format should be."""
    try:
        yield
    except MALFORMED as error:
        raise CheckpointError(f"cannot be read ({first_line(error)})", where=str(path), fix="copy it again") from error


class Group(NamedTuple):
    """Parameters with one set of hyperparameters, under torch's names: lr, betas, eps, weight_decay."""

    settings: Mapping[str, Any]
    names: Sequence[str]


class PeerCheckpoint(Checkpoint):
    """A checkpoint of another trainer: weights, and AdamW's moments and number of updates."""

    kind: ClassVar[str]
    """Its format, in words."""
    holds_masters: ClassVar[bool] = True
    """Whether `weight` gives the masters; otherwise the folder is a Hugging Face model that holds them."""
    knows_names = False
    """Whether `name_parameters` was called, without which there are neither moments nor settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def groups(self) -> Sequence[Group]:
        """The optimizer's groups of parameters."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """Steps done, if the files tell; otherwise the number of updates."""
        if not (file := self.folder / TRAINER_STATE).is_file():
            return self.updates
        with _readable(file):
            return int(read_json(file)["global_step"])

    @cached_property
    def training(self) -> dict[str, Any]:
        """What `Engine.save` would have written, as far as it is known."""
        counts = {"steps": self.step, "updates": self.updates, "missed": self.missed}
        return {"engine": {**counts, "optimizer": self._adamw_fields()}}

    @cached_property
    def updates(self) -> int:
        """Updates of the parameter that has had most. Raises `CheckpointError` if no parameter has a state."""
        if not (counts := self.update_counts()):
            raise self.error("holds no state of an optimizer", "start from its weights (model.path)")
        return max(counts.values())

    @cached_property
    def missed(self) -> Mapping[str, int]:
        """Parameter -> by how much its number of updates is below `updates`, if it is: its other steps had no gradient
        of it. One without a state has had none."""
        counts = self.update_counts()
        behind = {name: self.updates - counts.get(name, 0) for group in self.groups for name in group.names}
        return {name: count for name, count in behind.items() if count}

    def name_parameters(self, model: nn.Module, trained: Collection[str] | None = None) -> None:
        """Learn from the model what the files do not tell: which parameter an index means, and shapes.

        model: its parameters may be on the meta device. trained: the parameters that train, by default those with
        `requires_grad`. Raises `CheckpointError` if the state cannot be this model's.
        """
        if trained is not None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in trained)
        self._fit(model)
        self.knows_names = True

    def _fit(self, model: nn.Module) -> None:
        """Find each parameter of the state in the model. Raises `CheckpointError` if one is not in it."""
        due = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
        for name, shape in self.moment_shapes.items():
            if due.get(name) != shape:
                here = f"is {list(due[name])} in this one" if name in due else "is missing in this one"
                raise self.error(
                    f"is of another model: {name}, {list(shape)}, {here}", "give its own model (model.path)"
                )

    def update_counts(self) -> dict[str, int]:
        """Parameter -> number of its updates, for parameters with a state; an index stands for one without a name."""
        raise NotImplementedError

    def moment(self, name: str, part: str) -> Tensor:
        """One of the values of `PARTS`, in the parameter's shape and the file's dtype."""
        raise NotImplementedError

    def keeps(self, name: str, arrays: Sequence[str]) -> bool:
        """See `Checkpoint`."""
        return name in self.moment_shapes and {*arrays} == PARTS.keys()

    def moments(self, name: str, arrays: Sequence[str]) -> list[Tensor]:
        """See `Checkpoint`."""
        if self.missed.get(name) == self.updates:
            return [*torch.zeros(len(arrays), *self.moment_shapes[name])]
        return [self.moment(name, PARTS[array]).float() for array in arrays]

    def _adamw_fields(self) -> dict[str, Any]:
        """The fields of our AdamW. Raises `CheckpointError` for groups that it cannot express."""
        groups = [group for group in self.groups if group.names]
        of = {key: [read(group.settings[key]) for group in groups] for key, read in SETTINGS.items()}
        decay = {rate for rate in of["weight_decay"] if rate}
        for key, values in {**of, "weight_decay": decay}.items():
            if key != "lr" and len({str(value) for value in values}) > 1:
                raise self.error(f"its groups differ in {key}: {', '.join(map(str, values))}", RESTART)
        first = [of[key][0] for key in ("lr", "betas", "eps")]
        undecayed = [group.names for group, rate in zip(groups, of["weight_decay"], strict=True) if decay and not rate]
        others = [(group.names, rate) for group, rate in zip(groups, of["lr"], strict=True) if rate != first[0]]
        return {
            **dict(zip(("lr", "betas", "eps"), first, strict=True)),
            "weight_decay": max(decay, default=0.0),
            "no_decay": [name for names in undecayed for name in names],
            "learning_rates": [[name, rate] for names, rate in others for name in names],
        }

    def weight(self, name: str) -> Tensor | None:
        """A parameter or buffer, in its shape, or `None` if the files do not hold it."""
        return None

    @property
    def weight_names(self) -> Iterable[str]:
        """Names of all parameters and buffers that are held, tied ones under any of their names."""
        return ()

    def error(self, what: str, fix: str = f"save it again, or {RESTART}") -> CheckpointError:
        """The error to raise for this checkpoint."""
        return CheckpointError(what, where=f"{self.folder} ({self.kind})", fix=fix)

    def refuse_other_optimizer(self, parts: Iterable[str], groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise `CheckpointError` for the state of anything but plain AdamW. parts: of any parameter's state."""
        if not (kinds := set(parts)):
            raise self.error("holds no state of an optimizer", "start from its weights (model.path)")
        if odd := sorted(kinds - {STEP, *PARTS.values()}):
            raise self.error(f"is of another optimizer than AdamW: its state has {', '.join(odd)}", RESTART)
        for group in groups:
            for key, read in SETTINGS.items():
                read(self.value(group, key, file="a group"))
            if wrong := next((name for name in ("amsgrad", "maximize") if group.get(name)), None):
                raise self.error(f"its AdamW has {wrong}, which ours lacks", RESTART)
            if "decoupled_weight_decay" in group and "amsgrad" not in group:  # torch's Adam and AdamW have both keys
                raise self.error("is of RAdam, whose state has the same names as AdamW's", RESTART)
            if group.get("decoupled_weight_decay", True) is False and group.get("weight_decay"):
                raise self.error("is of Adam, which adds the weight decay to the gradient", RESTART)

    def load(self, file: Path) -> Any:
        """The content of a file of torch's, its tensors mapped. Raises `CheckpointError` if that is not safe."""
        try:
            with torch.serialization.safe_globals([(_Record, name) for name in RECORDS]):
                return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except FileNotFoundError as error:
            raise self.error(f"lacks {file.name}", "copy it again: all ranks' files are needed") from error
        except pickle.UnpicklingError as error:
            odd = re.search(r"GLOBAL (\S+)", str(error))
            what = f"{file.name} holds more than tensors and plain values ({odd[1] if odd else first_line(error)})"
            raise self.error(f"{what}, and loading that could run any code") from error
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise self.error(f"{file.name} cannot be read ({first_line(error)})", "copy it again") from error

    def value(self, tree: Any, *keys: Any, file: str) -> Any:
        """A value inside nested mappings and lists. Raises `CheckpointError` if the file lacks it."""
        for key in keys:
            try:
                tree = tree[key]
            except (LookupError, TypeError) as error:
                place = ".".join(map(str, keys))
                raise self.error(f"{file} has no {place}, which this format should have") from error
        return tree


def peer_checkpoint(folder: Path) -> PeerCheckpoint | None:
    """What another trainer has saved in a folder, or `None`.

    Raises `CheckpointError` for a kind that is not read, and for files that are not as their format should be.
    """
    with _readable(folder):
        return _checkpoint_in(folder)


def _checkpoint_in(folder: Path) -> PeerCheckpoint | None:
    tag = folder
    if (latest := folder / "latest").is_file():
        tag = folder / read_text(latest).strip()
        if not lies_within(tag, folder) or not tag.is_dir():
            raise CheckpointError(f"its file `latest` names {tag.name}, which is missing", where=str(folder))
    if (tag / "zero").is_dir():
        return Universal(folder, tag)
    if any(tag.glob("*zero_pp_rank_*_optim_states.pt")):
        return Zero3(folder, tag)
    if _metadata_in(folder):
        return Sharded(folder)
    for name in ("optimizer.pt", "optimizer.bin"):
        if (folder / name).is_file():
            return OptimizerFile(folder, name)
    if any(folder.glob("optimizer*_rank*.bin")):
        fix = "save it as DCP (save_fsdp_optimizer's use_dcp), or start from its weights (model.path)"
        raise CheckpointError("holds FSDP's state in one file per rank, which is not read", where=str(folder), fix=fix)
    return None


# The optimizer's own state dict ---------------------------------------------------------------------------------------


class OptimizerFile(PeerCheckpoint):
    """`optimizer.pt` of a Trainer, or of any program that saves a Hugging Face model and an optimizer's state dict."""

    kind = "a Trainer's checkpoint"
    holds_masters = False

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self._file = name
        saved = self.load(folder / name)
        self._state: Mapping[Any, Mapping[str, Any]] = self.value(saved, "state", file=name)
        self._groups: Sequence[Mapping[str, Any]] = self.value(saved, "param_groups", file=name)
        parts = {part for parts_of_one in self._state.values() for part in parts_of_one}
        self.refuse_other_optimizer(parts, self._groups)
        self._steps = {key: int(self.value(state, STEP, file=name)) for key, state in self._state.items()}
        self._sizes = {key: {tuple(self._part(key, part).shape) for part in PARTS.values()} for key in self._state}
        self._numbers = [list(self.value(group, "params", file=name)) for group in self._groups]
        self._names: list[list[str]] = []
        self._keys: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def _fit(self, model: nn.Module) -> None:
        """Name the indices of the file: they count the trained parameters of all groups in their order."""
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters() if weight.requires_grad}
        keys = self._numbers
        named = [self._names_in(group, indices) for group, indices in zip(self._groups, keys, strict=True)]
        possible = [named] if any(named) else list(_partitions(model, shapes))
        flat = [key for group in keys for key in group]
        for groups in possible:
            key_of = dict(zip((name for group in groups for name in group), flat, strict=False))
            fits = list(map(len, groups)) == list(map(len, keys))
            if fits and all(self._fits(key, shapes.get(name)) for name, key in key_of.items()):
                self._names, self._keys = groups, key_of
                self._shapes = {name: shapes[name] for name in key_of}
                return
        theirs, ours = (" + ".join(str(len(group)) for group in groups) for groups in (keys, possible[0]))
        what = f"its {self._file} is not of this model: groups of {theirs} parameters, here {ours} of these shapes"
        raise self.error(what, f"freeze what was frozen (train.freeze), or {RESTART}")

    @staticmethod
    def _names_in(group: Mapping[str, Any], keys: Sequence[Any]) -> list[str]:
        """The names that the file gives a group's parameters, in `param_names` or in place of indices; else none."""
        names = group.get("param_names") or keys
        return list(names) if all(isinstance(name, str) for name in names) else []

    def _fits(self, key: Any, shape: tuple[int, ...] | None) -> bool:
        """Whether there is no state for an index, or one of that shape."""
        return shape is not None and self._sizes.get(key, {shape}) == {shape}

    def _part(self, key: Any, part: str) -> Tensor:
        tensor: Tensor = self.value(self._state, key, part, file=self._file)
        return tensor

    @property
    def groups(self) -> Sequence[Group]:
        return [Group(settings, names) for settings, names in zip(self._groups, self._names, strict=True)]

    @property
    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def update_counts(self) -> dict[str, int]:
        names = {key: name for name, key in self._keys.items()}
        return {names.get(key, str(key)): step for key, step in self._steps.items()}

    def moment(self, name: str, part: str) -> Tensor:
        return self._part(self._keys[name], part)


def _partitions(model: nn.Module, trained: Iterable[str]) -> Iterable[list[list[str]]]:
    """The ways in which trainers put parameters into groups: decayed and others, by two rules, or all in one."""
    owners = dict(model.named_modules())
    for patterns in (NO_DECAY, NO_DECAY_BEFORE):
        groups: list[list[str]] = [[], []]
        for name in trained:
            normalizes = isinstance(owners[name.rpartition(".")[0]], nn.LayerNorm)
            groups[normalizes or any(re.search(pattern, name.lower()) for pattern in patterns)].append(name)
        yield groups
    yield [list(trained)]


# Sharded by torch.distributed.checkpoint ------------------------------------------------------------------------------

METADATA = ".metadata"


def _metadata_in(folder: Path) -> list[Path]:
    """The files that describe the shards in a folder and the folders in it."""
    return [*folder.glob(METADATA), *sorted(folder.glob(f"*/{METADATA}"))]


class _Record:
    """Stands for an object of any class in a pickle: keeps what it was made from."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.args = args
        vars(self).update(fields)

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


class _Records(pickle.Unpickler):
    """Loads a pickle without looking up any class or function that it names."""

    def find_class(self, module: str, name: str) -> Any:
        return torch.Size if (module, name) == ("torch", "Size") else _Record


class _Place(NamedTuple):
    """Where a part of a tensor, or a plain value, lies."""

    file: Path
    start: int
    nbytes: int
    offsets: tuple[int, ...]


class Sharded(PeerCheckpoint):
    """What FSDP saves through torch.distributed.checkpoint, by name and in parts of any ranks' files."""

    kind = "an FSDP checkpoint"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._places: dict[str, list[_Place]] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._weights: dict[str, str] = {}
        self._parts: dict[str, dict[str, str]] = {}
        self._settings: dict[int, dict[str, str]] = {}
        for file in _metadata_in(folder):
            self._add(file)
        settings = [group for _, group in sorted(self._settings.items())]
        self._groups = [{key: self._read(self._places[at][0]) for key, at in group.items()} for group in settings]
        self.refuse_other_optimizer((part for parts in self._parts.values() for part in parts), self._groups)
        if not self._weights or not self._parts:
            lacks = "the optimizer (optimizer_0)" if self._weights else "the model (pytorch_model_fsdp_0)"
            raise self.error(f"has no part of {lacks}", "name the folder that holds both")

    def _add(self, file: Path) -> None:
        """Take up the names, sizes and places in one `.metadata`."""
        with _readable(file):
            with file.open("rb") as opened:
                known = _Records(opened).load()
            paths, stored = known.planner_data or {}, known.storage_data
            for index, info in stored.items():
                if getattr(info, "transform_descriptors", None):
                    raise self.error(f"{info.relative_path} is compressed", "save it without extensions of DCP")
                held = file.parent / str(info.relative_path)
                if not lies_within(held, file.parent):
                    raise self.error(f"its {METADATA} names a file outside its folder, {held.name}")
                place = _Place(held, info.offset, info.length, tuple(getattr(index, "offset", ())))
                self._places.setdefault(index.fqn, []).append(place)
            for key, about in known.state_dict_metadata.items():
                if is_tensor := hasattr(about, "size"):
                    self._sizes[key] = tuple(about.size)
                self._file_under(tuple(paths.get(key, (key,))), key, is_tensor)

    def _file_under(self, path: tuple[Any, ...], key: str, is_tensor: bool) -> None:
        """Note what a key is: a setting of a group, a part of a parameter's state, or a weight."""
        if len(path) > 2 and path[-3] == "param_groups":
            self._settings.setdefault(path[-2], {})[path[-1]] = key
        elif len(path) > 2 and path[-3] == "state":
            self._parts.setdefault(path[-2], {})[path[-1]] = key
        elif is_tensor:
            self._weights[str(path[-1])] = key

    def _read(self, place: _Place) -> Any:
        if not place.file.is_file():
            raise self.error(f"lacks {place.file.name}", "copy it again: all ranks' files are needed")
        with _readable(place.file), place.file.open("rb") as file:
            file.seek(place.start)
            return torch.load(io.BytesIO(file.read(place.nbytes)), map_location="cpu", weights_only=True)

    def _tensor(self, key: str) -> Tensor:
        size = self._sizes[key]
        places = self._places.get(key, [])
        if len(places) == 1:
            whole: Tensor = self._read(places[0])
            if tuple(whole.shape) == size:
                return whole
        value, left = torch.empty(size), math.prod(size)
        for place in places:
            part = self._read(place)
            at = zip(place.offsets, part.shape, strict=True)
            value[tuple(slice(start, start + length) for start, length in at)] = part
            left -= part.numel()
        if left:
            raise self.error(f"holds only parts of {key}", "copy it again: all ranks' files are needed")
        return value

    @property
    def groups(self) -> Sequence[Group]:
        return [Group(settings, self.value(settings, "params", file="optimizer_0")) for settings in self._groups]

    @property
    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        held = {name: self._part(name, PARTS["m"]) for name in self._parts}
        idle = {name: self.value(self._weights, name, file="the model") for name in self.missed if name not in held}
        return {name: self._sizes[key] for name, key in {**held, **idle}.items()}

    def _part(self, name: str, part: str) -> str:
        key: str = self.value(self._parts, name, part, file="optimizer_0")
        return key

    def update_counts(self) -> dict[str, int]:
        return {name: int(self._tensor(self._part(name, STEP))) for name in self._parts}

    def moment(self, name: str, part: str) -> Tensor:
        return self._tensor(self._part(name, part))

    def weight(self, name: str) -> Tensor | None:
        return self._tensor(self._weights[name]) if name in self._weights else None

    @property
    def weight_names(self) -> Iterable[str]:
        return self._weights


# DeepSpeed ------------------------------------------------------------------------------------------------------------

OPTIMIZER = "optimizer_state_dict"
"""Both the key of DeepSpeed's optimizer in its file, and inside it that of torch's."""


class Zero3(PeerCheckpoint):
    """DeepSpeed's ZeRO-3: every rank holds 1/ranks of each parameter, padded, in flat groups."""

    kind = "a DeepSpeed ZeRO-3 checkpoint"

    def __init__(self, folder: Path, tag: Path) -> None:
        """tag: the folder, in `folder` or itself, of one step."""
        super().__init__(folder)
        self._tag = tag
        self._models = self._of_ranks(tag.glob("*mp_rank_*_model_states.pt"))
        shapes = self.value(self._models[0], "param_shapes", file="model_states")
        self._param_shapes: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(shape) for name, shape in group.items()} for group in shapes
        ]
        """The parameters of each flat group, in their order."""
        self._shared: Mapping[str, str] = self._models[0].get("shared_params") or {}
        self._open_optimizer()
        held = self._optimizer.get("state") or {}
        self.refuse_other_optimizer((part for parts in held.values() for part in parts), self._param_groups)
        if sum(len(group["params"]) for group in self._param_groups) != len(self._param_shapes):
            raise self.error("has another number of flat groups than of lists of parameters")

    def _of_ranks(self, files: Iterable[Path]) -> list[Any]:
        """The contents of files of all ranks, in their order."""
        ranks: dict[int, Path] = {}
        for file in files:
            rank = re.search(r"zero_pp_rank_(\d+)_mp_rank_00_", file.name)
            if not rank and "mp_rank_00_model_states" not in file.name:
                raise self.error(f"is split by tensor parallelism too ({file.name})", "convert it (ds_to_universal.py)")
            ranks[int(rank[1]) if rank else 0] = file
        if lacking := sorted({*range(max(ranks, default=0) + 1)} - ranks.keys()):
            raise self.error(f"lacks the files of rank {lacking[0]}", "copy it again: all ranks' files are needed")
        return [self.load(ranks[rank]) for rank in sorted(ranks)]

    def _open_optimizer(self) -> None:
        """Open the optimizer's files, and find where each parameter begins in its flat group."""
        saved = self._of_ranks(self._tag.glob("*zero_pp_rank_*_optim_states.pt"))
        name = "optim_states"
        self._ranks = [self.value(rank, OPTIMIZER, file=name) for rank in saved]
        if "fp32_flat_groups" not in self._ranks[0]:
            command = "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state"
            fix = f"convert it: {command} --input_folder {self._tag} --output_folder NEW, and resume=NEW"
            raise self.error("is of another stage of ZeRO than 3", fix)
        if (count := self._ranks[0].get("partition_count")) not in (len(self._ranks), None):
            what = f"was written by {count} ranks, but has the files of {len(self._ranks)}"
            raise self.error(what, "copy it again: all ranks' files are needed")
        self._optimizer = self.value(self._ranks[0], OPTIMIZER, file=name)
        self._param_groups: Sequence[Mapping[str, Any]] = self.value(self._optimizer, "param_groups", file=name)
        self._starts: dict[str, tuple[int, int]] = {}
        for number, shapes in enumerate(self._param_shapes):
            start = 0
            for parameter, shape in shapes.items():
                self._starts[parameter] = number, start
                start += self._share(shape)
            held = self.value(self._ranks[0], "fp32_flat_groups", number, file=name).numel()
            if held != start:
                what = f"its flat group {number} holds {held:,} numbers of each rank, where {start:,} are due"
                raise self.error(what, "convert it (ds_to_universal.py)")

    def _share(self, shape: tuple[int, ...]) -> int:
        """Numbers of a parameter that each rank holds."""
        return -(-math.prod(shape) // len(self._ranks))

    @property
    def step(self) -> int:
        return int(self._models[0].get("global_steps") or super().step)

    @property
    def groups(self) -> Sequence[Group]:
        names = [
            [name for flat in group["params"] for name in self._param_shapes[flat]] for group in self._param_groups
        ]
        return [Group(settings, names) for settings, names in zip(self._param_groups, names, strict=True)]

    @cached_property
    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for group in self._param_shapes for name, shape in group.items()}

    def update_counts(self) -> dict[str, int]:
        held = {flat: group.get(STEP) for group in self._param_groups for flat in group["params"]}
        held |= {flat: parts[STEP] for flat, parts in (self._optimizer.get("state") or {}).items() if STEP in parts}
        steps = {flat: int(step) for flat, step in held.items() if step is not None}
        return {name: step for flat, step in steps.items() for name in self._param_shapes[flat]}

    def moment(self, name: str, part: str) -> Tensor:
        flat, _ = self._starts[name]
        place = OPTIMIZER, "state", flat, part
        return self._joined(name, [self.value(rank, *place, file="optim_states") for rank in self._ranks])

    def _joined(self, name: str, flat_groups: Sequence[Tensor]) -> Tensor:
        """A parameter from its share in each rank's flat group."""
        (_, start), shape = self._starts[name], self.moment_shapes[name]
        shares = [flat[start : start + self._share(shape)] for flat in flat_groups]
        return torch.cat(shares)[: math.prod(shape)].view(shape)

    def _master(self, name: str) -> Tensor:
        return self._joined(name, [rank["fp32_flat_groups"][self._starts[name][0]] for rank in self._ranks])

    def weight(self, name: str) -> Tensor | None:
        name, first = self._shared.get(name, name), self._models[0]
        if name in self.moment_shapes:
            return self._master(name)
        if shape := (first.get("frozen_param_shapes") or {}).get(name):
            pieces = [model["frozen_param_fragments"][name].flatten() for model in self._models]
            return torch.cat(pieces)[: math.prod(shape)].view(tuple(shape))
        return first["module"].get(name) if name in first["buffer_names"] else None

    @property
    def weight_names(self) -> Iterable[str]:
        first = self._models[0]
        return [*self.moment_shapes, *(first.get("frozen_param_shapes") or {}), *first["buffer_names"], *self._shared]


class Universal(Zero3):
    """A checkpoint that DeepSpeed's `ds_to_universal` has converted: a folder for each parameter."""

    kind = "a universal DeepSpeed checkpoint"

    def _open_optimizer(self) -> None:
        name = "optimizer_state.pt"
        saved = self.load(self._tag / "zero" / name)
        self._optimizer = saved.get(OPTIMIZER, saved)
        self._param_groups = self.value(self._optimizer, "param_groups", file=name)
        for parameter in self.moment_shapes:
            if not (self._tag / "zero" / parameter).is_dir():
                raise self.error(f"lacks zero/{parameter}", "convert it again")

    def update_counts(self) -> dict[str, int]:
        held = [name for name in self.moment_shapes if (self._tag / "zero" / name / f"{STEP}.pt").exists()]
        return super().update_counts() | {name: int(self._whole(name, STEP)) for name in held}

    def _whole(self, name: str, part: str) -> Tensor:
        held = self.load(self._tag / "zero" / name / f"{part}.pt")
        tensor: Tensor = held["param"] if isinstance(held, dict) else held
        return tensor

    def moment(self, name: str, part: str) -> Tensor:
        value, shape = self._whole(name, part), self.moment_shapes[name]
        if value.numel() != math.prod(shape):
            what = f"zero/{name}/{part}.pt holds {value.numel():,} numbers, where {math.prod(shape):,} are due"
            raise self.error(what, "convert it again")
        return value.view(shape)

    def _master(self, name: str) -> Tensor:
        return self.moment(name, "fp32")
