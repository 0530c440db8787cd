"""A trainer's model whose weights are elsewhere: in its files before training, in the engine afterwards."""

from __future__ import annotations

import copy
import inspect
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
from megatrain.hf.refusals import refuse_dtypes
from megatrain.memory.checksum import checksum
from megatrain.model import Masters, PretrainedSource, Progress, buffer_dtypes
from megatrain.train.engine import Engine

# A model by name ------------------------------------------------------------------------------------------------------
#
# A trainer's model by name: its structure alone, with parameters that are read from its files when they are wanted.
#
# The model is the trainer's own from the start: what the user or TRL then changes, its config, its embeddings' size, a
# weight, is what the engine is made from. What nobody has read or changed by then goes from the files straight into the
# engine, unit by unit.


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


# The stand-in ---------------------------------------------------------------------------------------------------------
#
# The trainer's model while its weights are elsewhere: in its files before training, in the engine from then on.
#
# A `Trainer`, its callbacks and its loggers look at a model in many places: its config, its number of parameters, its
# mode. So the model stays what it is, and only the values of its parameters are elsewhere: a `LazyParameter` tells its
# shape and its dtype without them, and becomes an ordinary parameter when its values are wanted, as a forward pass, a
# clone or a write wants them. Before the engine runs again it takes back what has been read, and what has been written.


KNOWN_WITHOUT_VALUES = frozenset(
    {
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__),
        *(torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex),
        *(torch.Tensor.get_device, torch.Tensor.requires_grad_, torch.Tensor.is_inference),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    }
)
"""What may be asked of a parameter whose values are elsewhere, beside its properties."""

VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "_base"})
"""Properties of a tensor that have its values."""


class LazyParameter(nn.Parameter):
    """A parameter whose values are read when they are first wanted; from then on it is an ordinary one."""

    read: Callable[[], Tensor]
    """Gives the values, in the parameter's shape and dtype; the parameter keeps that very memory."""

    @classmethod
    def of(cls, parameter: Tensor, dtype: torch.dtype, read: Callable[[], Tensor]) -> LazyParameter:
        """A new one in the place of `parameter`, of which only the shape counts and whether it trains."""
        made = cls(_nothing(parameter.shape, dtype), requires_grad=parameter.requires_grad)
        made.read = read
        return made

    @staticmethod
    def put_away(parameter: nn.Parameter, read: Callable[[], Tensor]) -> None:
        """Let go of the values of an ordinary parameter, which is a lazy one from now on, or change how one reads."""
        if not isinstance(parameter, LazyParameter):
            parameter.data = _nothing(parameter.shape, parameter.dtype, parameter.device)
            parameter.__class__ = LazyParameter
        assert isinstance(parameter, LazyParameter)
        parameter.read = read

    def materialize(self) -> None:
        """Read the values, and become an ordinary parameter. Raises what reading raises."""
        with torch.inference_mode(False):  # what is read may be trained, whoever asks
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
            args[0]._become_ordinary()  # with other values
        elif func not in KNOWN_WITHOUT_VALUES and not (is_property and name not in VALUES):
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


def _nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A tensor that takes no memory."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


class StandIn:
    """The model of a trainer, and where its weights are."""

    def __init__(self, model: nn.Module, saves: nn.Module | None = None) -> None:
        """saves: what a trainer saves by `save_pretrained`, where that is another: a `PeftModel` around the model."""
        self.model, self._saves = model, saves or model
        self._engine: Engine | None = None
        self._lent: dict[str, tuple[int, int | None]] = {}
        """Parameters that have been read: address, and a sum over a copy's bytes; none for the engine's own memory."""
        self.is_ahead = False
        """Whether the engine has updated and the trainer's loop has not come to that: a stock model would not have."""

    def lend(self, engine: Engine) -> None:
        """The engine has the weights from now on, and they are read from there."""
        self._engine = engine
        for name, parameter in self.model.named_parameters():
            self._put_away(name, parameter)

    def take_back(self) -> dict[str, Tensor]:
        """Let go of what has been read since the engine lent it. Returns what has been changed, by name."""
        changed: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, LazyParameter):
                now = parameter.detach()
                if self._is_changed(name, now):
                    changed[name] = now
                self._put_away(name, parameter)
        self._lent.clear()
        return changed

    def _is_changed(self, name: str, now: Tensor) -> bool:
        """Not by what the engine has: that may have been stepped by hand since."""
        address, of_copy = self._lent.get(name, (0, None))
        return now.data_ptr() != address if of_copy is None else _sum_over(now) != of_copy

    def _put_away(self, name: str, parameter: nn.Parameter) -> None:
        LazyParameter.put_away(parameter, partial(self._read, name, parameter.dtype, parameter.device))

    def _read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.is_ahead:
            what = "its weights have been updated already, and gradients are not kept"
            fix = "read weights from on_optimizer_step on"
            raise ModelError(what, where="the trainer's model, before the optimizer's step", fix=fix)
        assert self._engine is not None
        there = self._engine.weight_view(name)
        if there is not None and there.dtype == dtype and device.type == "cpu":
            self._lent[name] = there.data_ptr(), None
            return there
        copied = self._engine.master(name).to(dtype)
        self._lent[name] = copied.data_ptr(), _sum_over(copied)
        return copied.to(device)

    @contextmanager
    def saved_by(self, export: Callable[[Path], object]) -> Iterator[None]:
        """In the block, `export` takes the place of the model's `save_pretrained`: no second copy of the weights."""

        def save(save_directory: str | Path, is_main_process: bool = True, **options: Any) -> None:
            if odd := sorted(name for name, value in options.items() if value is not None):
                raise ModelError(f"is saved without {odd[0]}", where="save_pretrained", fix="leave it out")
            if is_main_process:
                export(Path(save_directory))

        self._saves.__dict__["save_pretrained"] = save
        try:
            yield
        finally:
            del self._saves.__dict__["save_pretrained"]


AROUND_A_FORWARD = ("trl.", "accelerate.", "torch.amp.")
"""Modules whose wrappers trainers put around the `forward` of a model: a fused head, autocast."""


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """In the block, the model has the `forward` that its user knows, without what trainers have put around it."""
    names, inner = ("forward", "_original_forward"), users_forward(model)
    around: dict[str, Any] = {name: model.__dict__.pop(name) for name in names if name in model.__dict__}
    if inner is not None:
        model.__dict__["forward"] = inner
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
        model.__dict__ |= around


def users_forward(module: nn.Module) -> Any:
    """A `forward` that its user has put into this very module, without what trainers have put around it, or `None`."""
    inner = module.__dict__.get("forward")
    while inner is not None and module_of(inner).startswith(AROUND_A_FORWARD):
        function = getattr(inner, "__func__", inner)
        fused = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        inner = fused.get("original_forward", getattr(function, "__wrapped__", None))
    return None if getattr(inner, "__func__", inner) is type(module).forward else inner


def module_of(function: Any) -> str:
    """Where a function was written, whatever it says that it wraps."""
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__globals__", {}).get("__name__") or type(function).__module__)


def sums_over(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of the bytes of each."""
    return {name: _sum_over(values.detach()) for name, values in weights.items()}


def _sum_over(values: Tensor) -> int:
    """A checksum of the bytes."""
    flat = values.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    whole, rest = flat[: flat.size // 8 * 8], np.zeros(8, np.uint8)
    rest[: flat.size - whole.size] = flat[whole.size :]
    return checksum([whole, rest])


__all__ = [
    *("LazyParameter", "NamedSource", "StandIn"),
    *("module_of", "named_model", "own_forward", "sums_over", "users_forward"),
]
