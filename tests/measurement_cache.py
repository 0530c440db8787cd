"""Caches what was found out about a tiny model, for the next model that is alike: the memory that its layers take, and
how it is split into units.

Tests make engines for the same few models again and again, and measuring a model takes a score of runs of each of its
layers: four fifths of the time of an engine. What is measured is numbers about the model's code, so it is the same for
models with the same classes, attributes, buffers, shapes and dtypes. All of these are in the key, values of buffers
included, and functions and classes as the objects they are. A model with anything in it that cannot be told by its
value (a hook, an object of a class unknown here) is like no other, and is measured anew. Of splitting it into units,
most of the rest of that time, the same holds; each engine gets a copy of its own.

Not in the key: functions that a layer finds by a global name. The rooms in `MEASURED_ANEW` ask for the measurement
itself, or replace such functions, and nothing is remembered in them; nor are splits in those of `SPLIT_ANEW`.

An engine that nobody plans for has its layers measured to see whether what they keep fits. In the quick suite a tiny
model with much more memory than it could take is not measured for that: what it keeps fits (`spared`). And in rooms
whose tests ask for a plan but not for the figures in it (`ROUGHLY`) layers are measured whole and with all outputs
recomputed: neither in chunks nor with outputs kept elsewhere, nor are longer runs looked at, which together are three
quarters of the runs.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from megatrain.model import PortedModel, profile
from megatrain.model.carried import carried_by, carry
from megatrain.spec import LayerProfile, ModelSpec, Policy, Work
from megatrain.spec.layer_profile import Outputs
from megatrain.system.paths import written_whole

MEASURED_ANEW = (
    "tests/model/test_chunked_layers.py",
    "tests/model/test_profile_prologue.py",
    "tests/model/test_peak.py",
    "tests/model/test_profile.py",
    "tests/model/test_saved_activations.py",
    "tests/engine/",
    "tests/gpu/",
    "tests/standin_cuda/",
    "tests/integration/test_altered.py",
    "tests/stock/test_between_layers.py",
)

SPLIT_ANEW = (*MEASURED_ANEW, "tests/model/", "tests/integration/test_callers.py")

ROUGHLY = (
    *("tests/docs/", "tests/run/", "tests/stock/"),
    *(f"tests/commands/test_{name}.py" for name in ("cli", "init", "plan")),
    *(f"tests/integration/test_{name}.py" for name in ("callers", "packing", "ranks", "streamed_updates")),
)

MOST_SPLITS = 64
"""Of which copies wait."""

LARGE_NBYTES = 1 << 24
"""Of buffers; a larger one is not read through."""

TINY_NUMEL, FEW_TOKENS, MUCH_NBYTES = 1 << 22, 512, 1 << 31
"""Parameters and tokens whose layers keep less than half of so much memory, whatever the kind."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)
NOT_COMPUTED_WITH = (
    "_name_or_path",
    "name_or_path",
    "base_model_name_or_path",
    "_weight_conversions",
    "generation_config",
    "carried_over",
)
"""What a config or a model remembers of where it was loaded from, what it generates by, and what it only carries."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STATE = ("training", "_parameters", "_buffers", "_modules")
OF_EVERY_MODULE = vars(nn.Module())

FOLDER: Path | None = None
"""What one process has measured, for the others of the session."""
_MEASURED: dict[Hashable, ModelSpec] = {}
_SPLIT: dict[Hashable, PortedModel] = {}
_CHANGING = threading.Lock()
"""Ranks of one process split models at once."""


class _Unlike(Exception):
    """Something cannot be told by its value."""


def remember(profile: ModuleType, on: bool = True) -> None:
    """Have the module's measurements remembered from now on, or each model measured again."""
    _switch(on, profile.Measurement, spec=cached)


def split_once(split_into_units: ModuleType, on: bool = True) -> None:
    """Have what the module finds out about a model copied for the next one from now on, or each model split again."""
    _switch(on, split_into_units, _ported=copied)


def measure_roughly(profile: ModuleType, on: bool = True) -> None:
    """Have layers measured by fewer runs from now on, or by all."""
    _switch(on, profile, profile_layer=rough, _outputs=without_outputs, _further=unchecked)


def spare(schedule_cache: ModuleType, on: bool = True) -> None:
    """Have nothing measured from now on to see whether what a tiny model keeps fits, or have it measured."""
    _switch(on, schedule_cache.Schedules, _fitted=spared, _refuse_images=unasked)


def _switch(on: bool, owner: Any, **wrappers: Callable[[Any], Any]) -> None:
    for name, wrapper in wrappers.items():
        plain = getattr(getattr(owner, name), "__wrapped__", getattr(owner, name))
        setattr(owner, name, wrapper(plain) if on else plain)


def rough(measure: Callable[..., LayerProfile]) -> Callable[..., LayerProfile]:
    @wraps(measure)
    def measured(layer: nn.Module, run_of: Any, parts: Any, *lengths: Any) -> LayerProfile:
        return measure(layer, run_of, (), *lengths)

    return measured


def without_outputs(measure: Callable[..., Outputs]) -> Callable[..., Outputs]:
    @wraps(measure)
    def measured(*_: Any) -> Outputs:
        return Outputs()

    return measured


def unchecked(run_longer: Callable[..., Any]) -> Callable[..., None]:
    @wraps(run_longer)
    def unmeasured(*_: Any) -> None:
        """No longer run, which the fit through short ones is then not compared with."""

    return unmeasured


def copied(split: Callable[[PreTrainedModel, str, torch.dtype], PortedModel]) -> Any:
    @wraps(split)
    def ported(model: PreTrainedModel, stack: str, dtype: torch.dtype) -> PortedModel:
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        modules = model.named_modules(remove_duplicate=False)
        first: dict[int, str] = {}
        shared = tuple((name, first.setdefault(id(part), name)) for name, part in (*tensors, *modules))
        try:
            key = _settings(), stack, dtype, shared, _form(model, {}, left_out=("carried_over",))
        except _Unlike:
            return split(model, stack, dtype)
        if known := _SPLIT.get(key):
            alike = copy.deepcopy(known)
            carry(alike.skeleton, carried_by(model))
            return alike
        fresh = split(model, stack, dtype)
        if not any(vars(module)[hooks] for module in fresh.skeleton.modules() for hooks in HOOKS):
            with _CHANGING, suppress(RuntimeError):  # a layer that keeps a tensor with its graph cannot be copied
                _SPLIT[key] = copy.deepcopy(fresh)
                if len(_SPLIT) > MOST_SPLITS:
                    del _SPLIT[next(iter(_SPLIT))]
        return fresh

    return ported


def spared(fit: Callable[[Any, int, Work], Policy]) -> Callable[[Any, int, Work], Policy]:
    @wraps(fit)
    def fitted(schedules: Any, free_nbytes: int, work: Work) -> Policy:
        if not _has_much_room(schedules, free_nbytes, work):
            return fit(schedules, free_nbytes, work)
        return replace(schedules.policy, activations="keep")

    return fitted


def unasked(refuse: Callable[[Any, Work], None]) -> Callable[[Any, Work], None]:
    @wraps(refuse)
    def refused(schedules: Any, work: Work) -> None:
        if not _has_much_room(schedules, schedules._memory_for_activations, work):
            refuse(schedules, work)

    return refused


def _has_much_room(schedules: Any, free_nbytes: int, work: Work) -> bool:
    is_tiny = schedules._ported.structure.numel <= TINY_NUMEL and sum(work.tokens) <= FEW_TOKENS
    return is_tiny and free_nbytes >= MUCH_NBYTES


def cached(measure: Callable[[Any], ModelSpec]) -> Callable[[Any], ModelSpec]:
    @wraps(measure)
    def spec(measurement: Any) -> ModelSpec:
        ported = measurement._ported
        try:
            whole = ported.skeleton, ported.templates, ported.placeholders, ported.routers_off, ported.image_row
            model = _form(whole, {})
        except _Unlike:
            return measure(measurement)
        exact = not hasattr(profile.profile_layer, "__wrapped__")
        key = exact, _settings(), model, ported.structure, ported.balance_coefficient, measurement._seen
        if key not in _MEASURED:
            _MEASURED[key] = _shared(key, partial(measure, measurement))
        return _MEASURED[key]

    return spec


def _shared(key: Hashable, measure: Callable[[], ModelSpec]) -> ModelSpec:
    """What this process or another has measured."""
    if FOLDER is None:
        return measure()
    try:
        file = FOLDER / f"{hashlib.sha256(_named(key).encode()).hexdigest()}.measured"
    except _Unlike:
        return measure()
    if file.exists():
        known: ModelSpec = pickle.loads(file.read_bytes())
        return known
    found = measure()
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as draft:
        draft.write_bytes(pickle.dumps(found))
    return found


def _named(value: Hashable) -> str:
    """A key as every process would write it. Raises `_Unlike` for what has no name outside its own."""
    if isinstance(value, tuple | frozenset):
        parts = [_named(each) for each in value]
        return f"({' '.join(parts if isinstance(value, tuple) else sorted(parts))})"
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        if "<locals>" in value.__qualname__ or value.__module__ == "__main__":
            raise _Unlike
        line = value.__code__.co_firstlineno if isinstance(value, FunctionType) else 0
        return f"{value.__module__}.{value.__qualname__}:{line}"
    return repr(value)


def _settings() -> Hashable:
    """What decides beside the layer which ops run."""
    kernels = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        (kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()),
    )


def _form(value: Any, inside: Mapping[int, int], left_out: tuple[str, ...] = NOT_COMPUTED_WITH) -> Hashable:
    """A value that equals another's only if both are alike. inside: the objects that it is a part of, by `id`.
    left_out: attributes of configs and models that do not count."""
    if isinstance(value, PLAIN):
        return type(value), value  # 1, 1.0 and True are equal and not alike
    if isinstance(value, type | BuiltinFunctionType) or (isinstance(value, FunctionType) and not value.__closure__):
        return value
    if isinstance(value, Tensor):
        return _tensor(value)
    if id(value) in inside:
        return "around", inside[id(value)]
    form = partial(_form, inside={**inside, id(value): len(inside)}, left_out=left_out)
    if isinstance(value, tuple | list):
        return type(value), tuple(form(each) for each in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(form(each) for each in value)
    if isinstance(value, dict):
        return type(value), tuple((form(name), form(each)) for name, each in value.items())
    if isinstance(value, partial):
        return partial, form((value.func, value.args, value.keywords))
    if isinstance(value, nn.Module):
        return _module(value, form, left_out)
    is_of_an_adapter = type(value).__module__.startswith("peft.")  # its settings, and what goes by them
    if is_of_an_adapter or isinstance(value, PreTrainedConfig | GenerationConfig):
        return type(value), form({name: each for name, each in vars(value).items() if name not in left_out})
    if is_dataclass(value):
        return type(value), form({field.name: getattr(value, field.name) for field in fields(value)})
    raise _Unlike


def _module(module: nn.Module, form: Callable[[Any], Hashable], left_out: tuple[str, ...]) -> Hashable:
    attributes = vars(module)
    if any(attributes[hooks] for hooks in HOOKS):
        raise _Unlike
    apart = {*OF_EVERY_MODULE, *left_out}
    own = {name: value for name, value in attributes.items() if name in STATE or name not in apart}
    return type(module), type(module).forward, form(own)


def _tensor(tensor: Tensor) -> Hashable:
    outside = tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
    if type(tensor) not in (Tensor, nn.Parameter):
        raise _Unlike
    if tensor.is_meta or isinstance(tensor, nn.Parameter):  # its values are no part of the code
        return outside
    if tensor.numel() * tensor.element_size() > LARGE_NBYTES:
        raise _Unlike
    flat = (
        tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    )  # one element may have stride 0
    return outside, hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
