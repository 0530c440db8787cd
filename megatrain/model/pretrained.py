"""Streams the weights of a safetensors folder into the store, checked from the headers; the whole model never exists.

Names and layouts in checkpoints are transformers' business: old names, a base model's prefix, experts stored
separately and fused on loading. So its own loading code runs for each unit, on the structure (`skeleton`) and the
unit's slices of the checkpoint; the resulting parameters are written to the store and become meta tensors again
before the next unit. Before that, the same code runs once for the whole model on meta tensors with the shapes from
the files' headers, and finds everything missing, unexpected or misshaped before any weights are read. A missing
parameter, which transformers would initialise at random, is refused.

Quantized checkpoints are dequantized on the way (`dequantize`). Adapters are not handled here.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, _get_resolved_checkpoint_files
from transformers.utils.loading_report import LoadStateDictInfo

from megatrain.errors import ModelError, first_line
from megatrain.model.architecture import plain_errors, read_config, set_fields
from megatrain.model.carried import (
    DTYPES_STORED,
    WAS_QUANTIZED,
    Carried,
    WrittenTensor,
    carry,
    processor_files,
    stored_dtype,
)
from megatrain.model.dequantize import OF_ACTIVATIONS, quantizer_of
from megatrain.model.hub import cached_folder, is_local, located, model_named
from megatrain.model.moved_elements import MovedElements, Run, groups
from megatrain.model.skeleton import blueprint
from megatrain.model.weight_sources import (
    InFiles,
    Masters,
    MastersByRange,
    Progress,
    Report,
    listed,
    quiet,
    require_all,
)
from megatrain.spec import FileBytes
from megatrain.spec.layout import SAVED_AT_ONCE
from megatrain.system.hub_client import holds_weights
from megatrain.system.paths import lies_within, read_json

BATCH_NBYTES = 128 << 20
"""Parameters are loaded in groups of up to this size in float32; a larger one is read by ranges if that is possible."""


class PretrainedSource:
    """The weights of a local Hugging Face folder, a run's folder or a hub name, as transformers would load them in
    float32."""

    def __init__(
        self,
        source: str | Path,
        *,
        attention: str = "auto",
        trust_remote_code: bool = False,
        revision: str | None = None,
        fields: Mapping[str, Any] | None = None,
        structure: PreTrainedModel | None = None,
    ) -> None:
        """Read config and headers, build the structure, load its buffers, and check that everything fits.

        revision: branch, tag or commit of a hub name. fields: changed in the config before the model is built.
        structure: the float32 model that the files are of, instead of the config's, which is then not read; it may be
        of a class that no config names, and changed.
        Raises `ModelError` for anything but a causal language model with plain weights, for a missing, truncated
        or damaged file, and for parameters that are missing or do not have the config's shape.
        """
        self._where = f"model {source}"
        source = located(model_named(source), where=self._where, revision=revision)
        saved, self._quantizer, was_quantized = None, None, False
        if structure is None:
            config = read_config(source, where=self._where, trust_remote_code=trust_remote_code, revision=revision)
            set_fields(config, fields or {}, where=self._where)
            saved, self._quantizer = config.dtype, quantizer_of(config, where=self._where)
            was_quantized = bool(config.__dict__.pop(WAS_QUANTIZED, False))
            structure = blueprint(config, attention=attention, trust_remote_code=trust_remote_code)
        self.model = structure
        self._shards = Shards(source, structure.config, where=self._where, revision=revision)
        self._mapping: list[Any] = get_model_conversion_mapping(self.model)
        self._to_write = self._mapping
        if self._quantizer is not None:
            self._mapping = self._quantizer.update_weight_conversions(self._to_write, self.model)
        for transform in self._mapping:
            if getattr(transform, "force_cpu", False):
                transform.force_cpu = False  # always the CPU here, except in the check, which has no values
        published = self._shards.dtype if self._quantizer is None else torch.bfloat16
        self.dtype: torch.dtype = saved if isinstance(saved, torch.dtype) and saved in DTYPES.values() else published
        """The config's dtype, or that of the first tensor: the library's `auto`; bfloat16 for a quantized one."""
        self._keys, self._renamed = _keys_by_target(self.model, self._mapping, self._shards.headers)
        self.unexpected: list[str] = self._check()
        """Tensors that are not loaded, but carried over to exports unless they are quantized; see `left_out`."""
        self._untie()
        self._load_buffers()
        _load_generation_config(self.model, source, revision, self._where)
        with plain_errors(self._where):
            files = processor_files(source, structure.config, revision)
            carry(
                self.model, Carried(self._unread(), files, was_quantized=was_quantized or self._quantizer is not None)
            )

    def left_out(self) -> str:
        """Describes the tensors that are not loaded, but for those that `dequantized` tells of; empty if all are."""
        names = [name for name in self.unexpected if name not in self._unread_quantized]
        if not names:
            return ""
        loaded = self._shards.headers.keys() - set(self.unexpected)
        count = "1 tensor is" if len(names) == 1 else f"{len(names):,} tensors are"
        return f"{count} not loaded: {listed(_grouped(names, loaded))}"

    def _unread(self) -> dict[WrittenTensor, FileBytes | Tensor]:
        """The tensors that are not loaded but copied to exports, and where they are; none that only a quantized
        checkpoint can hold."""
        unread = dict[WrittenTensor, FileBytes | Tensor]()
        for key in self.unexpected:
            if key in self._unread_quantized:
                continue
            header = self._shards.headers[key]
            if header.place is not None:
                tensor = WrittenTensor(key, header.shape, stored_dtype(header.dtype, key, self._where))
                unread[tensor] = header.place
            else:
                value = _mapped(header.file)[key]
                unread[WrittenTensor(key, header.shape, value.dtype)] = value
        return unread

    def dequantized(self) -> str:
        """Describes the weights that the files hold quantized; empty if there are none."""
        if self._quantizer is None:
            return ""
        count = sum(map(self._is_quantized, self._keys.values()))
        said = "1 tensor is" if count == 1 else f"{count:,} tensors are"
        said += f" published in {self._quantizer.name} and loaded at full precision; what is saved is not quantized"
        lost = len(self._unread_quantized)
        return f"{said}, and lacks {lost:,} quantized tensors that the class does not read" if lost else said

    @cached_property
    def _unread_quantized(self) -> set[str]:
        """The tensors that are not loaded and stand for a quantized weight, with their scales."""
        if self._quantizer is None:
            return set()
        ends = self._quantizer.ends
        stems = {
            key.rpartition(".")[0]
            for key in self.unexpected
            if self._is_quantized([key]) or key.endswith(tuple(end for end in ends if end != "weight"))
        }
        return {key for key in self.unexpected if key.rpartition(".")[0] in stems}

    def _is_quantized(self, keys: Iterable[str]) -> bool:
        return self._quantizer is not None and any(self._shards.headers[key].dtype not in DTYPES for key in keys)

    def dtypes(self, asked: torch.dtype) -> dict[str, torch.dtype]:
        """Parameter name -> dtype in which transformers would load it if asked for `asked`."""
        plan = self.model._get_dtype_plan(asked)
        names = [name for name, _ in self.model.named_parameters()]
        if not plan:
            return dict.fromkeys(names, asked)
        pattern, kept, _ = build_glob_alternation(list(plan))
        matches = {name: pattern.search(name) for name in names}
        return {name: plan[kept[match.lastgroup or ""]] if match else asked for name, match in matches.items()}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One parameter as transformers would load it in `dtype`; a view of the mapped file if nothing is converted.

        Writing to it does not change the file. Raises `ModelError` for files that cannot be read.
        """
        target, keys = self._sources[name]
        if target in self._renamed:
            with torch.inference_mode(False), self._shards.open(keys) as slices:
                value: Tensor = slices[keys[0]][...]
                return value.to(dtype)
        with self._loaded(keys) as values:
            return values[target].to(dtype)

    @cached_property
    def _sources(self) -> dict[str, tuple[str, Sequence[str]]]:
        """Parameter name -> (the name by which the files know it, names of the tensors in the files that make it).

        Of several names, one that is only renamed (`_renamed`) is preferred.
        """
        first, held = first_names(self.model), dict[str, tuple[str, Sequence[str]]]()
        for target, keys in self._keys.items():
            name, before = first.get(target), held.get(first.get(target, ""))
            if name is not None and (before is None or (target in self._renamed and before[0] not in self._renamed)):
                held[name] = target, [self._renamed[target]] if target in self._renamed else keys
        return held

    def in_files(self, names: Iterable[str], dtype: torch.dtype) -> InFiles:
        """Which of these parameters exist byte for byte in the files in `dtype`, and why the others do not.

        A parameter may be one tensor, or several one after the other (fused experts stored separately).
        """
        alike, files, others = dict[str, bool](), dict[str, tuple[FileBytes, ...]](), dict[str, str]()
        for name in names:
            target, keys = self._sources.get(name, (name, []))
            plain = target in self._renamed
            others[name] = self._why_not(name, keys, dtype)
            if others[name]:
                continue
            bytes_of = tuple(place for key in keys if (place := self._shards.headers[key].place) is not None)
            kind = re.sub(r"\d+", "0", target)
            if not plain and kind not in alike:
                in_runs = self.by_ranges(name)
                alike[kind] = in_runs is not None and in_runs.follow_each_other(keys)
            if plain or alike[kind]:
                files[name] = bytes_of
            else:
                others[name] = "joins tensors of the files in an order other than theirs"
        return InFiles(files, {name: why for name, why in others.items() if why})

    def _why_not(self, name: str, keys: Sequence[str], dtype: torch.dtype) -> str:
        headers = [self._shards.headers[key] for key in keys]
        kinds = sorted({header.dtype for header in headers})
        if self._is_quantized(keys):
            return f"is quantized in the files ({' and '.join(kinds)}), so they do not hold its value"
        if any(DTYPES.get(kind) != dtype for kind in kinds):
            return f"is {' and '.join(kinds)} in the files, but held as {str(dtype).removeprefix('torch.')}"
        if any(header.place is None for header in headers):
            return f"is in {headers[0].file.name}, which is not a safetensors file"
        if sum(math.prod(header.shape) for header in headers) != self.model.get_parameter(name).numel():
            return "is converted from other tensors of the files"
        return ""

    def by_ranges(self, name: str) -> InRuns | None:
        """A parameter's values, for reading by ranges; `None` if that takes more than moving elements of tensors in
        safetensors files (quantized ones, say)."""
        target, keys = self._sources.get(name, (name, []))
        headers = {key: self._shards.headers[key] for key in keys}
        if any(header.dtype not in DTYPES or header.place is None for header in headers.values()):
            return None
        shapes = {key: torch.empty(header.shape, device="meta") for key, header in headers.items()}
        if target in self._renamed:  # the library would go through all parameters of the model
            return InRuns(MovedElements(shapes), shapes[keys[0]], headers, self._where, self._shards.before_read)
        with _put_back(self.model), MovedElements(shapes) as moved:
            self._run_library(shapes, "meta")
            named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
            made = {other: tensor.data for other, tensor in named if getattr(tensor, "_is_hf_initialized", False)}
        first = first_names(self.model)
        is_all = {first.get(other) for other in made} == {name} and moved.are_known(made[target])
        return InRuns(moved, made[target], headers, self._where, self._shards.before_read) if is_all else None

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        first = first_names(self.model)
        keys: dict[str, list[str]] = {}
        for target, held in self._keys.items():
            if target in first:
                keys.setdefault(first[target], held)  # if all names of a tied one are there, one is enough
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        report = Report(progress, sum(sizes.values()))
        written: set[str] = set()
        for unit in units:
            rest = unit
            if isinstance(masters, MastersByRange):
                rest = [name for name in unit if not self._fills_by_ranges(name, masters)]
                written.update(unit)
                written.difference_update(rest)
                report.add(sum(sizes[name] for name in unit if name not in rest))
            for batch in _batches(rest, sizes):
                with self._loaded(key for name in batch for key in keys.get(name, ())) as values:
                    for target, value in values.items():
                        if target in first and first[target] not in written:
                            masters.write_master(first[target], value)
                            written.add(first[target])
                            report.add(value.numel())
                        del value  # not held while the next are loaded
        require_all(written, units, where=self._where)
        report.end()

    def _fills_by_ranges(self, name: str, masters: MastersByRange) -> bool:
        """Write a large parameter, or one that the library assembles, where a rank wants a part of it; whether it was
        one and could be read so."""
        is_assembled = name not in self._sources or self._sources[name][0] not in self._renamed
        is_large = 4 * self.model.get_parameter(name).numel() > BATCH_NBYTES
        values = self.by_ranges(name) if is_large or (masters.is_shared and is_assembled) else None
        if values is not None:
            masters.write_ranges(name, values.read)
        return values is not None

    @contextmanager
    def _loaded(self, keys: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """In the block, the parameters and buffers that these tensors of the checkpoint give, by name.

        Values may be in a mapped file.
        """
        with torch.inference_mode(False), self._shards.open(keys) as slices, _put_back(self.model):
            try:
                info = self._run_library(slices, "cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"its files cannot be read ({first_line(error)})", where=self._where) from error
            _refuse_what_does_not_fit(info, self._where)
            named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
            values = {name: tensor.data for name, tensor in named if getattr(tensor, "_is_hf_initialized", False)}
            del named
            yield values
            values.clear()

    def _run_library(self, tensors: Mapping[str, Any], device: str) -> LoadStateDictInfo:
        """Have transformers convert these tensors and load them into the model, float parameters as float32."""
        loading = LoadStateDictConfig(
            dtype=torch.float32, weight_mapping=self._mapping, device_map={"": device}, hf_quantizer=self._quantizer
        )
        info: LoadStateDictInfo
        with quiet():
            info, _ = convert_and_load_state_dict_in_model(self.model, dict(tensors), loading)
        if self._quantizer is not None:  # what is written is plain: names and layouts without the companions
            plain = [entry for entry in self._to_write if isinstance(entry, WeightConverter) or entry.was_used()]
            self.model.__dict__["_weight_conversions"] = plain
        return info

    def _check(self) -> list[str]:
        """Load shapes instead of values; returns the unexpected names, and raises for anything else that does not
        fit."""
        headers = self._shards.headers
        shapes = {
            key: torch.empty(header.shape, dtype=DTYPES_STORED.get(header.dtype), device="meta")
            for key, header in headers.items()
        }
        with _put_back(self.model):
            info = self._run_library(shapes, "meta")
        _refuse_what_does_not_fit(info, self._where)
        first = first_names(self.model)
        held_names = {first[name] for name in first.keys() - info.missing_keys}
        unexpected = info.unexpected_keys.copy()
        self.model._adjust_missing_and_unexpected_keys(info)  # drops names that the library does not miss
        buffers = info.missing_keys - first.keys()
        if missing := sorted({*first.values()} - held_names | buffers):
            raise ModelError(
                f"its files lack {listed(missing)}",
                where=self._where,
                fix="use files and a config that belong together",
            )
        for target, held in self._keys.items():
            is_plain = self._quantizer is None or target in self._renamed
            for key in held:
                if target in first and is_plain and headers[key].dtype not in DTYPES:
                    raise ModelError(
                        f"{key} holds {headers[key].dtype} values (quantized?)",
                        where=self._where,
                        fix="use float32 or bfloat16 weights",
                    )
        keys = {key for target in unexpected for key in self._keys.get(target, [target])} & headers.keys()
        makers, outer = _makers_of_tables(self.model), _outermost(keys, headers.keys() - keys)
        weights = {outer[key] for key in keys if not self._is_remade(key, makers)}  # with what lies beside them
        return sorted((key for key in keys if outer[key] in weights), key=dot_natural_key)

    def _is_remade(self, key: str, makers: Collection[str]) -> bool:
        """Whether a tensor is no weight but a table, mask or counter that the model makes itself, or needs no more."""
        header = self._shards.headers.get(key)
        if header is None:
            return False
        if self._quantizer is not None and key.endswith((*OF_ACTIVATIONS, *self._quantizer.ends)):
            return key.endswith(OF_ACTIVATIONS)
        square = len(header.shape) == 4 and header.shape[:2] == (1, 1) and header.shape[2] == header.shape[3]
        if header.dtype in ("I64", "I32", "I16", "I8", "U8", "BOOL") or not header.shape or square:
            return True
        return any(owner in makers for owner in key.split(".")[-2:-1])

    def _untie(self) -> None:
        """Untie weights that the config ties but the files store with different values, as transformers does."""
        first = first_names(self.model)
        groups: dict[str, list[str]] = {}
        for target in self._keys:
            if target in first:
                groups.setdefault(first[target], []).append(target)
        for one, *others in groups.values():
            for other in others:
                with self._loaded([*self._keys[one], *self._keys[other]]) as values:
                    same = torch.equal(values[one], values[other])
                if not same:
                    untie(self.model, other)

    def _load_buffers(self) -> None:
        buffers = dict(self.model.named_buffers())
        keys = [key for target, held in self._keys.items() if target in buffers for key in held]
        with self._loaded(keys) as values:
            loaded = {name: value.clone() for name, value in values.items()}
        for target, value in loaded.items():
            owner, _, name = target.rpartition(".")
            setattr(self.model.get_submodule(owner), name, value)


def _refuse_what_does_not_fit(info: LoadStateDictInfo, where: str) -> None:
    """Raise `ModelError` for tensors whose shape differs from the model's, or that transformers cannot
    convert."""
    if wrong := sorted((name, tuple(shape), tuple(due)) for name, shape, due in info.mismatched_keys):
        raise ModelError(
            "its files and its config disagree about the shape of "
            + listed([f"{name} (files {shape}, config {due})" for name, shape, due in wrong], most=2),
            where=where,
            fix="use files and a config that belong together",
        )
    for name, text in info.conversion_errors.items():
        said = [line for line in text.splitlines() if line.strip()]
        raise ModelError(f"cannot convert {name} ({said[-2] if len(said) > 1 else text})", where=where)


def _load_generation_config(model: PreTrainedModel, source: str, revision: str | None, where: str) -> None:
    """Load the generation config if there is one: it is saved with the model."""
    if not model.can_generate():
        return
    with quiet(), plain_errors(where), suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(
            source, local_files_only=is_local(source), revision=revision or "main"
        )


def _makers_of_tables(model: PreTrainedModel) -> set[str]:
    """Names of modules, such as `rotary_emb`, that hold tables which are not saved, and nothing else."""
    saved = {name.rpartition(".")[0] for name in model.state_dict()}
    owners = {name.rpartition(".")[0] for name, _ in model.named_buffers()} - saved
    return {owner.rpartition(".")[2] for owner in owners}


def _outermost(names: Iterable[str], loaded: Iterable[str]) -> dict[str, str]:
    """Name -> its shortest prefix that no loaded one has, or itself."""
    prefixes = {key[:place] for key in loaded for place in (match.start() for match in re.finditer(r"\.", key))}
    ends = {name: [match.start() for match in re.finditer(r"\.", name)] for name in names}
    return {name: next((name[:at] for at in ends[name] if name[:at] not in prefixes), name) for name in ends}


def _grouped(names: Iterable[str], loaded: Iterable[str]) -> list[str]:
    """Names by the shortest prefixes that no loaded one has, such as `model.visual.* (33)`; layers together."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, prefix in _outermost(names, loaded).items():
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", prefix), []).append((name, prefix))
    said = []
    for general, members in groups.items():
        prefix = general if len({prefix for _, prefix in members}) > 1 else members[0][1]
        inside = "" if all(name == end for name, end in members) else ".*"
        said.append(members[0][0] if len(members) == 1 else f"{prefix.removesuffix('.*')}{inside} ({len(members):,})")
    return said


def _batches(names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Group a unit's parameters for loading: the library reads a group with several threads."""
    batch: list[str] = []
    for name in names:
        if batch and 4 * sum(sizes.get(member, 0) for member in [*batch, name]) > BATCH_NBYTES:
            yield batch
            batch = []
        batch.append(name)
    if batch:
        yield batch


def _keys_by_target(
    model: PreTrainedModel, mapping: Sequence[Any], keys: Iterable[str]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Name in the model -> names in the checkpoint, as transformers' loading pairs them (one key may make several).

    And name in the model -> name in the checkpoint, for tensors that are loaded unchanged.
    """
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    keys_of: dict[str, list[str]] = {}
    renamed: dict[str, str] = {}
    for key in sorted(keys, key=dot_natural_key):
        target, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in state and key in state:
            target, converter = rename_source_key(key, [], [], model.base_model_prefix, state)
        keys_of.setdefault(target, []).append(key)
        if converter is None:
            renamed[target] = key
    return keys_of, renamed


def untie(model: PreTrainedModel, name: str) -> None:
    """Give a parameter of a structure that has another name too a parameter of its own under this one."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, key, nn.Parameter(torch.empty_like(module.get_parameter(key))))
    model.all_tied_weights_keys.pop(name, None)


def first_names(model: PreTrainedModel) -> dict[str, str]:
    """Parameter name -> its first name, which differs for tied parameters."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """In the block, parameters and buffers may be replaced; afterwards the originals are restored."""
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


# Weight files ---------------------------------------------------------------------------------------------------------
#
# Weight files are found, checked from their headers, and read range by range. safetensors are memory-mapped and closed
# again after each use, since the pages of an open map count as ours. `pytorch_model.bin` is mapped too if torch can.


Unread = Any
"""A tensor that is read by `[...]`: safetensors' own type, or a mapped tensor."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of the dtypes that convert to float32 without a scale."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file's header tells about a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    place: FileBytes | None = None
    """Its bytes in a safetensors file."""


BeforeRead = Callable[[str, int, int], object]
"""Called with (path of a file, first byte, end)."""


class Shards:
    """The tensors of a checkpoint, by their names in the files."""

    def __init__(self, source: str, config: PreTrainedConfig, *, where: str, revision: str | None = None) -> None:
        """Find the files of a folder or hub name, and read their headers.

        Raises `ModelError`, naming the file, for one that is missing, truncated or damaged.
        """
        self.where = where
        self.before_read: BeforeRead = lambda file, start, stop: None
        """Called with what is about to be read of a safetensors file."""
        self.headers: dict[str, Header] = {}
        for file in _files(source, config, where, revision):
            self.headers.update(_headers(file, where))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point tensor, or float32."""
        return next((DTYPES[stored.dtype] for stored in self.headers.values() if stored.dtype in DTYPES), torch.float32)

    @contextmanager
    def open(self, names: Iterable[str]) -> Iterator[dict[str, Unread]]:
        """In the block, these tensors, unread. Opens only the files that hold them; a file stays mapped as long as
        something refers to its tensors."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.headers[name].file, []).append(name)
            if (place := self.headers[name].place) is not None:
                self.before_read(place.file, place.place, place.place + place.nbytes)
        with ExitStack() as files:
            slices: dict[str, Unread] = {}
            for file, held in by_file.items():
                with _damage_named(file, self.where):
                    if file.suffix == ".safetensors":
                        opened = files.enter_context(safe_open(file, framework="pt"))
                        slices.update({name: opened.get_slice(name) for name in held})
                    else:
                        mapped = _mapped(file)
                        slices.update({name: mapped[name] for name in held})
            try:
                yield slices
            finally:
                slices.clear()  # a slice keeps its file mapped


def look_first(source: PretrainedSource, before_read: BeforeRead) -> None:
    """Have it called with what the source is about to read of a safetensors file, from now on."""
    source._shards.before_read = before_read


def non_finite_weights(source: str, config: PreTrainedConfig) -> list[str]:
    """Names of tensors with non-finite values in a model's local folder; reads all of it.

    Empty if the folder holds no weights, and for a hub name. Raises `ModelError` for damaged files.
    """
    folder = Path(source)
    if not holds_weights(folder):
        return []
    shards = Shards(source, config, where=f"model {source}")
    odd = []
    for name in (name for name, header in shards.headers.items() if header.dtype in DTYPES):
        with shards.open([name]) as tensors:
            if not bool(tensors[name][...].isfinite().all()):
                odd.append(name)
    return odd


class InRuns:
    """A parameter whose elements are in tensors of safetensors files, run by run."""

    def __init__(
        self, moved: MovedElements, made: Tensor, headers: Mapping[str, Header], where: str, before_read: BeforeRead
    ) -> None:
        """made: the parameter as it was made of tensors without storage."""
        self._moved, self._made, self._headers, self._where = moved, made, headers, where
        self._before_read = before_read

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) as float32. Raises `ModelError` if the files cannot be read."""
        values = np.empty(stop - start, np.float32)
        for group in groups(self._moved.runs(self._made, start, stop), SAVED_AT_ONCE):
            (at, run), *more = group.runs
            if run.step == 1 and not more:
                self._read_into(values[at : at + run.length], run.name, run.start)
                continue
            held = np.empty(group.stop - group.start, np.float32)
            self._read_into(held, group.name, group.start)
            for at, part in group.within(group.start, held):
                values[at : at + part.size] = part
        return torch.from_numpy(values)

    def follow_each_other(self, keys: Iterable[str]) -> bool:
        """Whether the parameter consists of these tensors one after the other."""
        wholes = [Run(key, 0, math.prod(self._headers[key].shape), 1) for key in keys]
        return list(self._moved.runs(self._made)) == wholes

    def _read_into(self, values: NDArray[np.float32], key: str, start: int) -> None:
        """Fill `values` with a tensor's elements from `start` on."""
        header = self._headers[key]
        assert header.place is not None
        dtype, nbytes = DTYPES[header.dtype], 0
        memory = values if dtype == torch.float32 else np.empty(values.size * dtype.itemsize, np.uint8)
        view = memory.view(np.uint8).data
        first = header.place.place + start * dtype.itemsize
        self._before_read(header.place.file, first, first + len(view))
        try:
            with open(header.file, "rb", buffering=0) as file:
                file.seek(first)
                while nbytes < len(view):
                    if not (more := file.readinto(view[nbytes:])):
                        raise ModelError("its files end before their tensors do", where=self._where)
                    nbytes += more
        except OSError as error:
            raise ModelError(f"its files cannot be read ({first_line(error)})", where=self._where) from error
        if memory is not values:
            torch.from_numpy(values).copy_(torch.from_numpy(memory).view(dtype))


def _files(source: str, config: PreTrainedConfig, where: str, revision: str | None) -> list[Path]:
    folder = Path(source) if Path(source).is_dir() else cached_folder(source, revision)
    if folder is not None:
        _refuse_odd_index(folder, where)
    if Path(source).is_dir() and not holds_weights(source):
        fix = "copy or download them, or name it as model.config to train a fresh model of its kind"
        raise ModelError("its folder holds no weights (no file like model.safetensors)", where=where, fix=fix)
    with plain_errors(where):
        resolved, _ = _get_resolved_checkpoint_files(
            source,
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=True,  # keeps the library from asking the hub to convert the files
            transformers_explicit_filename=getattr(config, "transformers_weights", None),
            download_kwargs={"local_files_only": is_local(source), "revision": revision or "main"},
        )
    files = [Path(file) for file in resolved or ()]
    folder = folder or cached_folder(source, revision)
    for file in files:
        if folder is not None and not lies_within(file, folder):
            what = f"its index names a file outside its folder, {os.path.relpath(file, folder)}"
            raise ModelError(what, where=where, fix="download the model again from a source you trust")
        if not file.is_file():
            raise ModelError(f"its file {file.name} is missing", where=where, fix="copy or download it again")
    return files


def _refuse_odd_index(folder: Path, where: str) -> None:
    """Raise `ModelError` for an index that names anything but files (transformers refuses one that is not JSON)."""
    for file in folder.glob("*.index.json"):
        try:
            index = read_json(file)
        except (OSError, ValueError):
            continue
        named = index.get("weight_map") if isinstance(index, dict) else None
        odd = [name for name, held in named.items() if not isinstance(held, str)] if isinstance(named, dict) else [""]
        if odd:
            what = f"its {file.name} names no file for {odd[0]}" if odd[0] else f"its {file.name} has no weight_map"
            raise ModelError(what, where=where, fix="copy or download it again")


def _headers(file: Path, where: str) -> dict[str, Header]:
    with _damage_named(file, where):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"), file.open("rb") as opened:  # the library checks that all fits
                first = 8 + (nbytes := int.from_bytes(opened.read(8), "little"))
                described = json.loads(opened.read(nbytes))
            described.pop("__metadata__", None)  # which is no tensor
            path, headers = os.path.realpath(file), dict[str, Header]()
            for name, tensor in described.items():
                start, stop = tensor["data_offsets"]
                place = FileBytes(path, first + start, stop - start)
                headers[name] = Header(file, tuple(tensor["shape"]), tensor["dtype"], place)
            return headers
        names = {dtype: name for name, dtype in DTYPES.items()}
        return {
            name: Header(file, tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in _mapped(file).items()
        }


@contextmanager
def _damage_named(file: Path, where: str) -> Iterator[None]:
    """Turn errors while opening a file into a `ModelError` that names the file."""
    try:
        yield
    except SafetensorError as error:
        raise ModelError(
            f"its file {file.name} is truncated or damaged ({first_line(error)})",
            where=where,
            fix="copy or download it again",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"its file {file.name} cannot be read ({first_line(error)})",
            where=where,
            fix="copy or download it again, or save the model as safetensors",
        ) from error


def _mapped(file: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a `.bin` file, mapped from disk."""
    held = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
