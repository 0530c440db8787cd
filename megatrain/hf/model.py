"""A trainer's model without weights in memory: they are in its files before training, in the engine afterwards."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from megatrain.errors import ConfigError, ModelError
from megatrain.hf.training_options import refuse_dtypes
from megatrain.memory.checksum import checksum
from megatrain.model import Masters, PretrainedSource, Progress, buffer_dtypes
from megatrain.model.weight_sources import RenamedMasters
from megatrain.train.engine import Engine

# A model by name ------------------------------------------------------------------------------------------------------
#
# A model given by name: its structure, with parameters that are read from its files when they are first used.
#
# The engine is created from this model, with whatever the user or TRL has changed by then: its config, the size of its
# embeddings, weights. Parameters that nobody has read or changed go from the files to the engine directly, unit by
# unit.


LOADING_OPTIONS = ("low_cpu_mem_usage", "max_memory", "offload_folder", "offload_buffers", "offload_state_dict")
"""Options in `model_init_kwargs` that are ignored: the engine decides where weights are during loading."""

WHERE = "model_init_kwargs"


@dataclass(frozen=True)
class FileReader:
    """Reads one parameter from a model's files."""

    files: PretrainedSource
    name: str
    """The parameter's name in the model that the files are of."""
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        return self.files.read(self.name, self.dtype)


def named_model(name: str, args: Any, *, adapted: bool = False) -> PreTrainedModel:
    """The model in a folder or of that name on the hub, in evaluation mode; its parameters are `LazyParameter`s.

    It is as `from_pretrained` would load it with `args.model_init_kwargs`, of which those that are `None` are ignored,
    but in float32 if no dtype is given. adapted: whether an adapter trains over it and is saved in its place; otherwise
    tensors of its files that are not loaded are logged, and carried over when it is saved. Raises `ConfigError` for
    options that are not supported, and `ModelError` for a model that cannot be loaded.
    """
    given = {key: value for key, value in (getattr(args, WHERE, None) or {}).items() if value is not None}
    wanted = given.pop("dtype", given.pop("torch_dtype", torch.float32))
    trusted = given.pop("trust_remote_code", getattr(args, "trust_remote_code", False))
    _refuse_device_map(given.pop("device_map", "auto"))
    if not given.pop("use_safetensors", True):
        raise ConfigError("use_safetensors=False is not supported", where=WHERE, fix="leave it out")
    files = PretrainedSource(
        name,
        attention=given.pop("attn_implementation", "auto"),
        trust_remote_code=bool(trusted),
        revision=given.pop("revision", None),
        fields={key: value for key, value in given.items() if key not in LOADING_OPTIONS},
    )
    if (left_out := files.left_out()) and not adapted:
        logging.getLogger(__name__).warning("%s: %s; they are carried over when it is saved", name, left_out)
    dtype = _dtype(wanted, files)
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
        number: LazyParameter.of(model.get_parameter(key), dtypes[key], FileReader(files, key, dtypes[key]))
        for number, key in names.items()
    }
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = lazy[id(parameter)]
    return model


def _dtype(wanted: Any, files: PretrainedSource) -> torch.dtype:
    """The dtype meant by an argument of `from_pretrained`: a dtype, its name, or `auto`."""
    dtype = files.dtype if wanted == "auto" else getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={wanted!r} is not a torch dtype", where=WHERE, fix="use float32 or bfloat16")
    return dtype


def _refuse_device_map(given: Any) -> None:
    """Raise `ConfigError` for a map to several devices; others are ignored: the engine decides where weights are."""
    if isinstance(given, dict) and given.keys() != {""}:
        what = "a device_map of several devices is not supported"
        raise ConfigError(what, where=WHERE, fix="leave it out: the engine decides where weights are")


class LazySource:
    """A `Source` for a model given by name: parameters not read yet come from its files, the others from memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        parameters = dict(self.model.named_parameters())
        readers = {name: reader for name, each in parameters.items() if (reader := _file_reader(each)) is not None}
        for files in {reader.files for reader in readers.values()}:
            ours = {name: reader for name, reader in readers.items() if reader.files is files}
            renamed: dict[str, list[str]] = {}
            for name, reader in ours.items():
                renamed.setdefault(reader.name, []).append(name)
            dtypes = {reader.name: reader.dtype for reader in ours.values()}  # of the trainer's model
            rounded = RenamedMasters(masters, renamed, partial(_rounded, dtypes))
            files.fill(rounded, [[ours[name].name for name in unit if name in ours] for unit in units], progress)
        for unit in units:
            for name in unit:
                if name not in readers:
                    masters.write_master(name, parameters[name].detach())


def _rounded(dtypes: Mapping[str, torch.dtype], name: str, value: Tensor) -> Tensor:
    return value.to(dtypes[name])


def _file_reader(parameter: nn.Parameter) -> FileReader | None:
    """What reads a parameter from its file; `None` if its values are in memory or in the engine."""
    read = parameter.read if isinstance(parameter, LazyParameter) else None
    return read if isinstance(read, FileReader) else None


# Lazy parameters ------------------------------------------------------------------------------------------------------
#
# A `Trainer`, its callbacks and its loggers read a model in many places: its config, its number of parameters, its
# mode. So the model stays what it is, and only the values of its parameters are missing. A `LazyParameter` has a shape
# and a dtype, and becomes an ordinary parameter when its values are first used, as by a forward pass, a clone or a
# write. Before the engine runs again, values that have been written go to it and the memory is freed
# (`LazyModel.collect_changes`).


READ_NO_VALUES = frozenset(
    {
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__),
        *(torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex),
        *(torch.Tensor.get_device, torch.Tensor.requires_grad_, torch.Tensor.is_inference),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    }
)
"""Functions, in addition to properties, that need no values of a parameter."""

VALUE_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "_base"})
"""Properties of a tensor that need its values."""


class LazyParameter(nn.Parameter):
    """A parameter whose values are read when they are first used. Then it becomes an ordinary `nn.Parameter`."""

    read: Callable[[], Tensor]
    """Returns the values in the parameter's shape and dtype; the parameter then uses that memory, not a copy."""

    @classmethod
    def of(cls, parameter: Tensor, dtype: torch.dtype, read: Callable[[], Tensor]) -> LazyParameter:
        """A new one with the shape and `requires_grad` of `parameter`."""
        made = cls(_without_memory(parameter.shape, dtype), requires_grad=parameter.requires_grad)
        made.read = read
        return made

    @staticmethod
    def make_lazy(parameter: nn.Parameter, read: Callable[[], Tensor]) -> None:
        """Turn a parameter into a lazy one in place and free its values. For a lazy one, replace `read`."""
        if not isinstance(parameter, LazyParameter):
            parameter.data = _without_memory(parameter.shape, parameter.dtype, parameter.device)
            parameter.__class__ = LazyParameter
        assert isinstance(parameter, LazyParameter)
        parameter.read = read

    def materialize(self) -> None:
        """Read the values and become an ordinary parameter. Raises what `read` raises."""
        with torch.inference_mode(False):  # the values may be trained later, even if first used in inference mode
            values = self.read()
        self._become_ordinary()
        self.data = values

    def _become_ordinary(self) -> None:
        del self.read
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        is_property = func.__class__.__name__ == "method-wrapper"
        if is_property and name == "data" and func.__name__ == "__set__":
            args[0]._become_ordinary()  # with the new values; the old ones are not read
        elif func not in READ_NO_VALUES and not (is_property and name not in VALUE_PROPERTIES):
            for each in tree_iter((args, kwargs)):
                if isinstance(each, LazyParameter):
                    each.materialize()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.materialize()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.materialize()
        return self.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # the same, with its types
        return f"Parameter of shape {list(self.shape)}, {self.dtype}, whose values have not been read"


def _without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of NaN that takes no memory."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


class LazyModel:
    """A trainer's model, whose parameters become lazy ones that read from the engine once there is one."""

    def __init__(self, model: nn.Module, saves: nn.Module | None = None) -> None:
        """saves: the object whose `save_pretrained` the trainer calls, if not `model`: a `PeftModel` around it."""
        self.model, self._saves = model, saves or model
        self._engine: Engine | None = None
        self._loaded: dict[str, tuple[int, int | None]] = {}
        """Parameters that have been read -> address and checksum; no checksum if it is the engine's own memory."""
        self.engine_is_ahead = False
        """Whether the engine has updated its weights before the trainer's loop has called its optimizer's `step`."""

    def move_weights_to(self, engine: Engine) -> None:
        """Free the weights; from now on they are read from the engine."""
        self._engine = engine
        for name, parameter in self.model.named_parameters():
            self._make_lazy(name, parameter)

    def collect_changes(self) -> dict[str, Tensor]:
        """Free the weights that have been read, and return those whose values have been changed, by name."""
        changed: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, LazyParameter):
                now = parameter.detach()
                if self._is_changed(name, now):
                    changed[name] = now
                self._make_lazy(name, parameter)
        self._loaded.clear()
        return changed

    def catch_up(self) -> None:
        """The trainer's own optimizer step, which comes after the engine's, is done."""
        self.engine_is_ahead = False

    def refuse_before_step(self) -> None:
        """Raise `ModelError` between the engine's update and the optimizer's `step`: the state is of the next step."""
        if self.engine_is_ahead:
            what = "its weights have been updated already, and gradients are not kept"
            fix = "read, evaluate and save from on_optimizer_step on"
            raise ModelError(what, where="the trainer's model, before the optimizer's step", fix=fix)

    def _is_changed(self, name: str, now: Tensor) -> bool:
        """Whether values were written or replaced since they were read. (The engine's may have changed by a step.)"""
        address, of_copy = self._loaded.get(name, (0, None))
        return now.data_ptr() != address if of_copy is None else _checksum(now) != of_copy

    def _make_lazy(self, name: str, parameter: nn.Parameter) -> None:
        LazyParameter.make_lazy(parameter, partial(self._read, name, parameter.dtype, parameter.device))

    def _read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.refuse_before_step()
        assert self._engine is not None
        view = self._engine.weights.view(name)
        if view is not None and view.dtype == dtype and device.type == "cpu":
            self._loaded[name] = view.data_ptr(), None
            return view
        copied = self._engine.weights[name].to(dtype)
        self._loaded[name] = copied.data_ptr(), _checksum(copied)
        return copied.to(device)

    @contextmanager
    def saved_by(self, export: Callable[[Path], object]) -> Iterator[None]:
        """In the block, `export` replaces the model's `save_pretrained`, which would need all weights in memory."""

        def save(save_directory: str | Path, is_main_process: bool = True, **options: Any) -> None:
            if odd := sorted(name for name, value in options.items() if value is not None):
                raise ModelError(f"{odd[0]} is not supported", where="save_pretrained", fix="leave it out")
            if is_main_process:
                export(Path(save_directory))

        self._saves.__dict__["save_pretrained"] = save
        try:
            yield
        finally:
            del self._saves.__dict__["save_pretrained"]


@contextmanager
def noisy_embeddings(model: Any, alpha: float | None) -> Iterator[None]:
    """In the block, the model's input embedding has a hook that adds noise in training mode. Copies keep the hook.

    This is NEFTune (Jain et al., "Noisy Embeddings Improve Instruction Finetuning", 2023). The noise is drawn in the
    forward of the embedding. The engine runs that forward again in its backward pass with the same seed, as for
    dropout, so both draw the same noise under any plan (`engine.context.call_seed`).

    alpha: strength of the noise, by the paper's formula; no hook if it is `None`.
    """
    if alpha is None:
        yield
        return
    handle = model.get_input_embeddings().register_forward_hook(partial(_with_noise, alpha))
    try:
        yield
    finally:
        handle.remove()


def _with_noise(alpha: float, module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Embeddings [batch, length, hidden size] plus uniform noise of at most alpha / sqrt(length * hidden size)."""
    if not module.training:
        return output
    largest = alpha / math.sqrt(output.shape[1] * output.shape[2])
    return output + torch.empty_like(output).uniform_(-largest, largest)


WRAPPING_MODULES = ("trl.", "accelerate.", "torch.amp.")
"""Modules whose functions trainers wrap around the `forward` of a model: a fused head, autocast."""


@contextmanager
def forward_without_wrappers(model: nn.Module) -> Iterator[None]:
    """In the block, the model has its own `forward`, or the user's, without the trainers' wrappers."""
    names, inner = ("forward", "_original_forward"), custom_forward(model)
    around: dict[str, Any] = {name: model.__dict__.pop(name) for name in names if name in model.__dict__}
    if inner is not None:
        model.__dict__["forward"] = inner
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
        model.__dict__ |= around


def custom_forward(module: nn.Module) -> Any:
    """The `forward` that the user has set on this module object, without the trainers' wrappers; or `None`."""
    inner = module.__dict__.get("forward")
    while inner is not None and defining_module(inner).startswith(WRAPPING_MODULES):
        function = getattr(inner, "__func__", inner)
        fused = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        inner = fused.get("original_forward", getattr(function, "__wrapped__", None))
    return None if getattr(inner, "__func__", inner) is type(module).forward else inner


def defining_module(function: Any) -> str:
    """The name of the module a function was defined in, even if it claims to be another by `functools.wraps`."""
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__globals__", {}).get("__name__") or type(function).__module__)


def checksums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of each tensor's bytes."""
    return {name: _checksum(values.detach()) for name, values in weights.items()}


def _checksum(values: Tensor) -> int:
    flat = values.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    whole, rest = flat[: flat.size // 8 * 8], np.zeros(8, np.uint8)
    rest[: flat.size - whole.size] = flat[whole.size :]
    return checksum([whole, rest])
