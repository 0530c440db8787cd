"""Checks that a Trainer's model has not changed since its engine was made, and raises an error that names what has.

The engine runs a copy of the model's modules. It gets changed values of parameters before each step, but no other
change made to the model after the engine was created, such as a hook, a module, or a number in one. So a snapshot of
the model is taken when the engine is created, another before each step, and the two are compared.

Not compared: what changes no result (training mode, gradient checkpointing, names); what libraries wrap around a model
to train it; private attributes, whose names begin with an underscore; objects that are neither numbers, strings,
functions nor tensors; and caches, which are tensors where there was nothing before, and everything in a rotary
embedding that adapts to the length of its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.errors import ConfigError
from megatrain.hf.model import custom_forward, defining_module
from megatrain.model.user_patches import HOOKS

UNCHECKED_FIELDS = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "architectures")
"""Fields of a config that may change during training; some of them a `Trainer` changes itself."""

UNCHECKED_ATTRIBUTES = frozenset(
    {"training", "gradient_checkpointing", "name_or_path", "warnings_issued", "model_tags", "hf_device_map"}
)
"""Attributes of modules that may change during training. `forward` is compared separately."""

HARMLESS_HOOKS = ("transformers.", "accelerate.", "trl.")
"""Packages whose hooks only read outputs or require a gradient, and are not compared."""

COMMON_TYPES = frozenset({bool, int, float, str, type(None)})
COMPARABLE_TYPES = (Number, str, bytes, type(None), torch.dtype, torch.device)

Snapshot = Mapping[tuple[str, str], Any]
"""(name of a module, parameter or config; its attribute, or "" for the object itself) -> the value to compare."""


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
NOT_COMPARED = object()


class _TensorValues:
    """A tensor's current values. The same tensor is compared by version, without reading values; another by values."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, None if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorValues):
            return False
        if self.tensor is other.tensor:
            return self.version == other.version
        return torch.equal(self.tensor.cpu(), other.tensor.cpu())

    __hash__ = None  # type: ignore[assignment]  # not used as a key


def snapshot_of(model: nn.Module) -> Snapshot:
    """Everything in a model whose change the engine would not notice."""
    facts: dict[tuple[str, str], Any] = {}
    configs: dict[int, tuple[str, PreTrainedConfig]] = {}
    with torch._C.DisableTorchFunctionSubclass():  # reads no values of lazy parameters
        for name, module in model.named_modules(remove_duplicate=False):
            facts[name, ""] = module, type(module)
            for attribute, value in _module_attributes(module):
                if issubclass(type(value), PreTrainedConfig):  # isinstance is slow with one
                    configs.setdefault(id(value), (f"{name}.{attribute}".strip("."), value))
                else:
                    facts[name, attribute] = _comparable(value)
        for name, parameter in model.named_parameters():
            facts[name, ""] = nn.Parameter
            facts[name, "shape"] = tuple(parameter.shape)
            facts[name, "dtype"] = parameter.dtype
            facts[name, "requires_grad"] = parameter.requires_grad
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if hooks := getattr(parameter, kind):
                    facts[name, kind] = tuple(hooks.values())
    facts["", "loss_function"] = getattr(model, "loss_function", None)
    for name, config in configs.values():
        facts |= {(name, field): _comparable(value) for field, value in _config_fields(config)}
    return facts


def _module_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of the hooks, buffers and attributes to compare."""
    attributes = vars(module)
    for kind in HOOKS:
        if attributes[kind] and (
            hooks := tuple(h for h in attributes[kind].values() if not defining_module(h).startswith(HARMLESS_HOOKS))
        ):
            yield kind, hooks
    if "forward" in attributes and (forward := custom_forward(module)) is not None:
        yield "forward", forward
    if _changes_with_length(attributes.get("rope_type")):
        return
    for name, value in attributes.items():
        if name[0] == "_" or name in UNCHECKED_ATTRIBUTES:
            continue
        if not (callable(value) and callable(getattr(PreTrainedModel, name, None))):  # such as a user's own `generate`
            yield name, value
    yield from attributes["_buffers"].items()


def _changes_with_length(rope_type: Any) -> bool:
    """Whether a rotary embedding of this type recomputes its buffers for longer inputs."""
    return rope_type is not None and ("dynamic" in str(rope_type) or "longrope" in str(rope_type))


def _config_fields(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Name and value of the fields to compare."""
    for name, value in vars(config).items():
        if name[0] != "_" and name not in UNCHECKED_FIELDS:
            inner = _checked(value.to_dict()) if isinstance(value, PreTrainedConfig) else value
            yield name, inner
    yield "_attn_implementation", config._attn_implementation


def _checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config within a config, and of those within it, that are compared."""
    return {
        name: _checked(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in UNCHECKED_FIELDS
    }


def _comparable(value: Any) -> Any:
    """What to compare: the value itself, a tensor's values, a copy of a container of such; or `NOT_COMPARED`."""
    if type(value) in COMMON_TYPES or isinstance(value, COMPARABLE_TYPES) or callable(value):
        return value
    if isinstance(value, Tensor):
        return _TensorValues(value)
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return NOT_COMPARED
    inner = [_comparable(each) for each in (value.values() if isinstance(value, dict) else value)]
    if any(each is NOT_COMPARED or isinstance(each, _TensorValues) for each in inner):
        return NOT_COMPARED
    return dict(zip(value, inner, strict=True)) if isinstance(value, dict) else inner


def refuse_changes(before: Snapshot, now: Snapshot) -> None:
    """Raise `ConfigError` naming the first difference between two snapshots of a model."""
    if before == now:
        return
    for key in {**before, **now}:
        was, is_now = before.get(key, ABSENT), now.get(key, ABSENT)
        if was is is_now or was == is_now or was is NOT_COMPARED:
            continue
        if (is_now is NOT_COMPARED or isinstance(is_now, _TensorValues)) and was in (None, ABSENT, [], {}):
            continue  # a cache that has been filled
        what, since = ".".join(filter(None, key)) or "model", "since the engine was created"
        if all(isinstance(each, (*COMPARABLE_TYPES, _Absent)) for each in (was, is_now)):
            what = f"{what} was {was!r} when the engine was created and is {is_now!r} now"
        elif was is ABSENT or is_now is ABSENT:
            what = f"{what} has been {'added' if was is ABSENT else 'removed'} {since}"
        else:
            what = f"{what} has been changed {since}"
        fix = "change it before the first train() or evaluate(), or create a new trainer"
        raise ConfigError(what, where="the trainer's model", fix=fix)
