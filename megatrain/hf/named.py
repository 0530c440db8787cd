"""A trainer's model by name: its structure alone, with parameters that are read from its files when they are wanted.

The model is the trainer's own from the start: what the user or TRL then changes, its config, its embeddings' size, a
weight, is what the engine is made from. What nobody has read or changed by then goes from the files straight into the
engine, unit by unit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.errors import ConfigError
from megatrain.hf.refusals import refuse_dtypes
from megatrain.hf.standin import LazyParameter
from megatrain.model import Masters, PretrainedSource, Progress, buffer_dtypes

HOW_IT_IS_LOADED = ("low_cpu_mem_usage", "max_memory", "offload_folder", "offload_buffers", "offload_state_dict")
"""Of `model_init_kwargs`, what says where weights lie while a model is loaded: the engine decides that."""

WHERE = "model_init_kwargs"


@dataclass(frozen=True)
class FromFiles:
    """Reads one parameter."""

    files: PretrainedSource
    name: str
    """In the files' own model."""
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        return self.files.read(self.name, self.dtype)


def named_model(name: str, args: Any) -> PreTrainedModel:
    """The model of a folder or a hub name, in evaluation mode, its parameters `LazyParameter`s.

    It is as `from_pretrained` would load it with the `model_init_kwargs` of TRL's arguments, where `None` means not
    given, and in float32 if no dtype is. Raises `ConfigError` for one that cannot be honoured, and `ModelError`.
    """
    given = {key: value for key, value in (getattr(args, WHERE, None) or {}).items() if value is not None}
    asked = given.pop("dtype", given.pop("torch_dtype", torch.float32))
    trusted = given.pop("trust_remote_code", getattr(args, "trust_remote_code", False))
    _refuse_device_map(given.pop("device_map", "auto"))
    if not given.pop("use_safetensors", True):
        raise ConfigError("use_safetensors=False cannot be honoured", where=WHERE, fix="leave it out")
    files = PretrainedSource(
        name,
        attention=given.pop("attn_implementation", "auto"),
        trust_remote_code=bool(trusted),
        revision=given.pop("revision", None),
        fields={key: value for key, value in given.items() if key not in HOW_IT_IS_LOADED},
    )
    dtype = _dtype(asked, files)
    dtypes = files.dtypes(dtype)
    refuse_dtypes(dtypes.values())
    model: PreTrainedModel = copy.deepcopy(files.model)
    model.eval()
    model.config.dtype = dtype
    of_buffers = buffer_dtypes(files.model, dtype)
    for key, buffer in model.named_buffers():
        buffer.data = buffer.to(of_buffers.get(key, buffer.dtype))
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    lazy = {
        number: LazyParameter.of(model.get_parameter(key), dtypes[key], FromFiles(files, key, dtypes[key]))
        for number, key in names.items()
    }
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = lazy[id(parameter)]
    return model


def _dtype(asked: Any, files: PretrainedSource) -> torch.dtype:
    """As `from_pretrained` takes it: a dtype, its name, or `auto`."""
    found = files.dtype if asked == "auto" else getattr(torch, asked, None) if isinstance(asked, str) else asked
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={asked!r} is no dtype of torch", where=WHERE, fix="use float32 or bfloat16")
    return found


def _refuse_device_map(given: Any) -> None:
    """The engine decides where weights are, so a map is accepted as long as it asks for no more than one place."""
    if isinstance(given, dict) and given.keys() != {""}:
        what = "a device_map of several places cannot be honoured"
        raise ConfigError(what, where=WHERE, fix="leave it out: the engine decides where weights are")


class NamedSource:
    """The trainer's model as a source: what is still in its files comes from there, and the rest from memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        """Write every parameter of every unit (see `Source`)."""
        parameters = dict(self.model.named_parameters())
        unread = {name: found for name, parameter in parameters.items() if (found := _unread(parameter)) is not None}
        for files in {found.files for found in unread.values()}:
            ours = {name: found for name, found in unread.items() if found.files is files}
            wanted = [[ours[name].name for name in unit if name in ours] for unit in units]
            files.fill(_Renamed(masters, ours), wanted, progress)
        for unit in units:
            for name in unit:
                if name not in unread:
                    masters.write_master(name, parameters[name].detach())


def _unread(parameter: nn.Parameter) -> FromFiles | None:
    read = parameter.read if isinstance(parameter, LazyParameter) else None
    return read if isinstance(read, FromFiles) else None


class _Renamed:
    """The masters under the names that parameters have in their files, rounded as the trainer's model has them."""

    def __init__(self, masters: Masters, ours: dict[str, FromFiles]) -> None:
        self._masters = masters
        self._ours: dict[str, list[tuple[str, torch.dtype]]] = {}
        for name, found in ours.items():
            self._ours.setdefault(found.name, []).append((name, found.dtype))

    def master(self, name: str) -> Tensor:
        return self._masters.master(self._ours[name][0][0])

    def write_master(self, name: str, value: Tensor) -> None:
        for ours, dtype in self._ours[name]:
            self._masters.write_master(ours, value.to(dtype))


__all__ = ["NamedSource", "named_model"]
