"""Says what a model is written as: the names, shapes and dtypes of its checkpoint's tensors, and the small files.

A checkpoint is not just the list of parameters: transformers fuses experts on loading, renames, and ties. The
reverse conversion that `save_pretrained` applies to a whole model in memory is applied here to one unit at a time:
first on the meta device, so that everything about the files is known before a byte is written, then on values. The
model that the conversion consults never has storage. The files themselves are written by
`checkpoint.safetensors_writer`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from functools import cache
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from megatrain.errors import ExportError, first_line
from megatrain.model.adapters import Adapter
from megatrain.model.architecture import POSITIONS, auto_class, position_limit
from megatrain.model.carried import NOTHING, WAS_QUANTIZED, WrittenTensor, carried_by
from megatrain.model.hub import ADAPTER
from megatrain.model.ports import PortedModel, Weights
from megatrain.model.side_values import leaves_of
from megatrain.model.weight_sources import quiet
from megatrain.spec import Precision


def written_of(ported: PortedModel, dtype: torch.dtype, *, for_checkpoint: bool = False) -> Written:
    """What a ported model is written as: its adapter if it has one, else all of it.

    for_checkpoint: without what an adapter's base holds (`peft` saves the weights of adapted embeddings too), and with
    whether the model was published quantized, which a resumed run's export asks for.
    """
    if ported.adapter is None:
        return WrittenModel(ported, dtype, for_checkpoint=for_checkpoint)
    return WrittenAdapter(ported, ported.adapter, dtype, with_base=not for_checkpoint)


def written_precision(ported: PortedModel) -> Precision:
    """The precision of an export if none is asked for: float32, the masters, or bfloat16 for a model that was
    published quantized, so that it does not become eight times as large."""
    was_quantized = ported.adapter is None and carried_by(ported.skeleton).was_quantized
    return "bf16" if was_quantized else "fp32"


def written_parameters(ported: PortedModel) -> Collection[str]:
    """The parameters that are written, without planning the files (see `WrittenModel.writes`)."""
    if ported.adapter is None:
        return {param.name for unit in ported.structure.units for param in unit.params}
    return {*ported.adapter.file_names(ported.whole()).values()}


class WrittenAdapter:
    """A model's adapter as `peft` writes it, without the base."""

    stem = "adapter_model"
    needs_remote_code = False
    carried = NOTHING  # its base is published with them

    def __init__(self, ported: PortedModel, adapter: Adapter, dtype: torch.dtype, *, with_base: bool = True) -> None:
        self.spec, self._config = ported.structure, adapter.config_json
        whole = ported.whole()
        self.auto_class: str = auto_class(whole.config).__name__
        names = adapter.file_names(whole)
        if not with_base and not adapter.is_resized:
            frozen = {param.name for unit in self.spec.units for param in unit.params if not param.trainable}
            names = {file: name for file, name in names.items() if name not in frozen}
        self._files: dict[str, list[str]] = {}
        """Name in the model -> its names in the file: a parameter of two modules is written for both."""
        for file, name in names.items():
            self._files.setdefault(name, []).append(file)
        self._params = [[param for param in unit.params if param.name in self._files] for unit in self.spec.units]
        self.units = [
            [WrittenTensor(file, param.shape, dtype) for param in params for file in self._files[param.name]]
            for params in self._params
        ]
        buffers = dict(whole.named_buffers())
        self._buffers = {file: buffers[name].cpu() for file, name in names.items() if name in buffers}
        self.units[0] += [WrittenTensor(name, tuple(value.shape), value.dtype) for name, value in self._buffers.items()]

    @property
    def numel(self) -> int:
        return sum(prod(tensor.shape) for unit in self.units for tensor in unit)

    def writes(self, name: str) -> bool:
        return name in self._files

    def tensors(self, unit: int, masters: Weights) -> dict[str, Tensor]:
        tensors = {file: masters[param.name] for param in self._params[unit] for file in self._files[param.name]}
        return {**tensors, **(self._buffers if unit == 0 else {})}

    def write_small_files(self, folder: Path) -> None:
        """Write the adapter's config."""
        (folder / ADAPTER).write_bytes(self._config)


class WrittenModel:
    """A ported model's checkpoint, with parameters written as `dtype`; buffers keep their own dtype.

    Raises `ExportError` if the checkpoint cannot be built unit by unit.
    """

    stem = "model"
    """File name of the weights, before the shard number."""

    def __init__(self, ported: PortedModel, dtype: torch.dtype, *, for_checkpoint: bool = False) -> None:
        self.spec = ported.structure
        self._whole: PreTrainedModel = ported.whole()
        for parameter in self._whole.parameters():
            parameter.data = parameter.data.to(dtype)
        self.needs_remote_code = bool(self._whole.is_remote_code())
        """Whether `from_pretrained` will need `trust_remote_code`."""
        self.auto_class: str = auto_class(self._whole.config).__name__
        self.carried = carried_by(self._whole)
        """What is copied from the model's source after all units."""
        if for_checkpoint and self.carried.was_quantized:
            setattr(self._whole.config, WAS_QUANTIZED, True)
        self._written_as = _names_to_write(self._whole)
        self._buffers = self._saved_buffers(ported)
        ours = [self._in_memory(unit, dtype) for unit in range(len(self.spec.units))]
        self.units: list[list[WrittenTensor]] = [self._planned(tensors) for tensors in ours]
        """The tensors of each unit, in the order in which `tensors` gives them."""
        at_once = self._planned({name: tensor for tensors in ours for name, tensor in tensors.items()})
        by_unit, by_name = [tensor for unit in self.units for tensor in unit], attrgetter("name")
        if sorted(at_once, key=by_name) != sorted(by_unit, key=by_name):
            raise ExportError(
                "its checkpoint joins tensors of several units, so it cannot be written unit by unit",
                where=f"model {self.spec.name}",
            )

    @property
    def numel(self) -> int:
        """Number of parameters as transformers counts them: tied ones once, no buffers."""
        return self.spec.numel

    def writes(self, name: str) -> bool:
        """Whether `tensors` needs the master of that parameter."""
        return True

    def tensors(self, unit: int, masters: Weights) -> dict[str, Tensor]:
        """The tensors of a unit: name in the checkpoint -> value, parameters not yet rounded to the written dtype.

        masters: name -> float32 master of each parameter of the unit. Results share its memory if the layout is
        the same; the halves of fused experts are copies.
        """
        ours = {self._written_as[param.name]: masters[param.name] for param in self.spec.units[unit].params}
        return self._converted({**ours, **self._buffers[unit]})

    def write_small_files(self, folder: Path) -> None:
        """Write config, generation config and custom code to `folder`, as transformers would, and a processor's files.

        Raises `ExportError` for a generation config that transformers refuses to write.
        """
        with quiet():
            try:
                self._whole.save_pretrained(folder, state_dict={})  # no tensors, so no weights file
            except ValueError as error:
                fix = "correct model.generation_config, or the model's generation_config.json"
                raise ExportError(first_line(error), where=f"model {self.spec.name}", fix=fix) from error
            if (folder / "config.json").exists():  # transformers writes on rank 0 only
                add_old_fields(folder / "config.json", self._whole.config)
        for name, content in self.carried.files.items():
            (folder / name).write_bytes(content)

    def _saved_buffers(self, ported: PortedModel) -> list[dict[str, Tensor]]:
        """Persistent buffers on the host, by unit; those outside the layers belong to the prologue."""
        by_unit: list[dict[str, Tensor]] = [{} for _ in self.spec.units]
        parameters = {name for name, _ in self._whole.named_parameters(remove_duplicate=False)}
        ignored = set(self._whole._keys_to_ignore_on_save or ())
        for name, value in self._whole.state_dict().items():
            if name in parameters or name in ignored or not isinstance(value, Tensor):
                continue
            inside, _, rest = name.removeprefix(f"{ported.stack}.").partition(".")
            is_layers = name.startswith(f"{ported.stack}.") and inside.isdecimal() and bool(rest)
            by_unit[1 + int(inside) if is_layers else 0][name] = value.cpu()
        return by_unit

    def _in_memory(self, unit: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """A unit's tensors before conversion, without storage."""
        empty = {
            self._written_as[param.name]: torch.empty(param.shape, dtype=dtype, device="meta")
            for param in self.spec.units[unit].params
        }
        return {**empty, **{name: buffer.to("meta") for name, buffer in self._buffers[unit].items()}}

    def _planned(self, tensors: Mapping[str, Tensor]) -> list[WrittenTensor]:
        converted = self._converted(dict(tensors))
        return [WrittenTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in converted.items()]

    def _converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            converted: dict[str, Tensor] = revert_weight_conversion(self._whole, tensors)
        return converted


Written = WrittenModel | WrittenAdapter
"""What is written of a model: all of it, or only its adapter."""


def _names_to_write(whole: PreTrainedModel) -> dict[str, str]:
    """Parameter name -> written name; of tied names, the one that transformers looks for on loading.

    Keys are the first names of parameters, as in a `ModelSpec`.
    """
    tied = set(getattr(whole, "all_tied_weights_keys", None) or ())
    names: dict[int, list[str]] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {every[0]: next((name for name in every if name not in tied), every[0]) for every in names.values()}


# Fields of transformers 4 ---------------------------------------------------------------------------------------------
#
# transformers 5 renamed fields of config.json. Version 4, which older installations of other tools have, does not know
# the new names and takes its defaults without a word: another rotary base, no scaling. So the old names are written
# too. Which ones a class has, and what they mean, is learnt from the class, which still reads them.


_OLD_NUMBERS = (
    "rope_theta",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "global_rope_theta",
    "local_rope_theta",
    "rotary_emb_base",
    "rotary_pct",
)
"""Fields of transformers 4 for numbers in `rope_parameters`."""

_OLD_ALIASES = ("num_experts",)
"""Fields of transformers 4 that are aliases now."""


def add_old_fields(file: Path, config: PreTrainedConfig) -> None:
    """Add transformers 4's fields to a written config.json, also to the configs of parts such as the text model."""
    fields = config._dict_from_json_file(file)  # reads infinity, which version 5 spells as an object
    fields = _with_old_fields(fields, config, states_positions=position_limit(config) is not None)
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _with_old_fields(
    fields: Mapping[str, Any], config: PreTrainedConfig, *, states_positions: bool
) -> Mapping[str, Any]:
    """A config's fields and transformers 4's, unless version 5 would then read another rotary embedding."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs.keys() & fields.keys()}
    held = {
        name: _with_old_fields(fields[name], part, states_positions=states_positions)
        for name, part in parts.items()
        if isinstance(part, PreTrainedConfig)
    }
    old = {name: value for name, value in old_fields(config).items() if name not in fields}
    old |= {"torch_dtype": fields["dtype"]} if "dtype" in fields else {}
    whole = {**fields, **held, **old}
    if not states_positions and fields.get(POSITIONS) == getattr(type(config), POSITIONS, None):
        whole.pop(POSITIONS, None)  # the class's default must not become a statement
    kind = type(config)
    return whole if _read_rope(kind, whole) == _read_rope(kind, fields) else {**fields, **held}


def old_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields by which transformers 4 knows a config's rotary parameters and renamed sizes."""
    old = {name: getattr(config, name) for name in _OLD_ALIASES if name in config.attribute_map}
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or not rope:
        return old
    held = dict(leaves_of(rope))
    kind: Any = type(config)  # mypy takes no class for hashable
    for name in _OLD_NUMBERS:
        values = {held.get(path) for path in _moved_by(kind, name)}
        if len(values) == 1 and (value := values.pop()) is not None:
            old[name] = value
    groups: list[Mapping[str, Any]] = [rope]
    if any(isinstance(value, Mapping) for value in rope.values()):  # a group for each kind of layer
        groups = [rope.get(path[0]) or {} for path in _moved_by(kind, "rope_scaling") if len(path) > 1]
    if groups and all(group == groups[0] for group in groups):
        old["rope_scaling"] = _old_scaling(groups[0], config)
        is_undeclared = STRETCHED_FROM in groups[0] and not hasattr(type(config), STRETCHED_FROM)
        if groups[0].get("rope_type") == "longrope" and is_undeclared:
            old[STRETCHED_FROM] = groups[0][STRETCHED_FROM]  # beside `rope_scaling`, for this kind alone
    return old


STRETCHED_FROM = "original_max_position_embeddings"


def _old_scaling(rope: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any] | None:
    """`rope_scaling` as transformers 4 takes it: of LongRoPE it looks for `type`, and Phi-3 counts the keys."""
    elsewhere = {"rope_type", "type", *_OLD_NUMBERS}
    if hasattr(type(config), STRETCHED_FROM):
        elsewhere.add(STRETCHED_FROM)
    rest = {name: value for name, value in rope.items() if name not in elsewhere}
    kind = rope.get("rope_type", "default")
    return {"type" if kind == "longrope" else "rope_type": kind, **rest} if rest or kind != "default" else None


@cache  # asked at each checkpoint, and each answer takes reading two configs or four
def _moved_by(kind: type[PreTrainedConfig], old: str) -> list[tuple[Any, ...]]:
    """Paths in the rotary parameters of a class of configs whose values follow this field of transformers 4."""
    scalings = [{"rope_type": "linear", "factor": factor} for factor in (2.0, 4.0)]
    first_value, second_value = scalings if old == "rope_scaling" else (0.5, 0.25)
    for start in (None, {"rope_type": "default"}):  # some classes have a default that names everything
        first = _read_rope(kind, {"rope_parameters": start, old: first_value})
        second = _read_rope(kind, {"rope_parameters": start, old: second_value})
        if moved := [path for path in first if second.get(path) != first[path]]:
            return moved
    return []


def _read_rope(kind: type[PreTrainedConfig], fields: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """The rotary parameters of a config of this class with these fields, without the old name of their type."""
    try:
        with quiet():
            rope = getattr(kind.from_dict(copy.deepcopy(dict(fields))), "rope_parameters", None)
    except Exception:  # a class may refuse fields without others, in whatever terms its authors chose
        return {}
    return {path: value for path, value in leaves_of(rope or {}) if path[-1] != "type"}
