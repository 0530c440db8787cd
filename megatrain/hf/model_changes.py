"""Checks that a Trainer's model has not changed since its engine was made, and raises an error that names what has.

The engine runs a copy of the model's code. Values of parameters are given to it before each step; whatever else is
changed in the model once there is an engine, a hook, a module, a number in one, it would never hear of. So the model's
facts are taken when the engine is made, and again before each step, and compared.

Left out is what changes no number (the mode, gradient checkpointing, names), what libraries put around a model to
train it, attributes whose names begin with an underscore, which are a module's own affair, objects that are neither
numbers, texts, functions nor tensors, and caches: tensors where there was nothing, and all that a rotary embedding has
which adapts itself to the length of its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.errors import ConfigError
from megatrain.hf.model import module_of, users_forward
from megatrain.model.user_patches import HOOKS

CHANGES_NO_NUMBER = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "architectures")
"""Fields of a config that a `Trainer` sets while it trains, or its user may; others have to be set before."""

FREE = frozenset(
    {"training", "gradient_checkpointing", "name_or_path", "warnings_issued", "model_tags", "hf_device_map"}
)
"""Attributes of modules that trainers set, or their users may; `forward` is compared apart."""

PUTS_HOOKS = ("transformers.", "accelerate.", "trl.")
"""Modules whose own hooks only look at outputs, or ask for a gradient."""

USUAL = frozenset({bool, int, float, str, type(None)})
PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device)

Facts = Mapping[tuple[str, str], Any]
"""(name of a module, a parameter or a config; attribute, or nothing for the thing itself) -> what is compared."""


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
NOT_COMPARED = object()


class _Values:
    """A tensor as it is now: equal to one that holds the same values, found without reading them if it is itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, None if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Values):
            return False
        if self.tensor is other.tensor:
            return self.version == other.version
        return torch.equal(self.tensor.cpu(), other.tensor.cpu())

    __hash__ = None  # type: ignore[assignment]  # it is compared, and no key


def facts_of(model: nn.Module) -> Facts:
    """All of a model that its engine will not hear of if it changes."""
    found: dict[tuple[str, str], Any] = {}
    configs: dict[int, tuple[str, PreTrainedConfig]] = {}
    with torch._C.DisableTorchFunctionSubclass():  # values of parameters are not asked for
        for name, module in model.named_modules(remove_duplicate=False):
            found[name, ""] = module, type(module)
            for attribute, value in _of_module(module):
                if issubclass(type(value), PreTrainedConfig):  # isinstance is slow with one
                    configs.setdefault(id(value), (f"{name}.{attribute}".strip("."), value))
                else:
                    found[name, attribute] = _compared(value)
        for name, parameter in model.named_parameters():
            found[name, ""] = nn.Parameter
            found[name, "shape"] = tuple(parameter.shape)
            found[name, "dtype"] = parameter.dtype
            found[name, "requires_grad"] = parameter.requires_grad
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if hooks := getattr(parameter, kind):
                    found[name, kind] = tuple(hooks.values())
    found["", "loss_function"] = getattr(model, "loss_function", None)
    for name, config in configs.values():
        found |= {(name, field): _compared(value) for field, value in _of_config(config)}
    return found


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    own = vars(module)
    for kind in HOOKS:
        if own[kind] and (hooks := tuple(h for h in own[kind].values() if not module_of(h).startswith(PUTS_HOOKS))):
            yield kind, hooks
    if "forward" in own and (forward := users_forward(module)) is not None:
        yield "forward", forward
    if _adapts_itself(own.get("rope_type")):
        return
    for name, value in own.items():
        if name[0] == "_" or name in FREE:
            continue
        if not (callable(value) and callable(getattr(PreTrainedModel, name, None))):  # a `generate` of one's own, say
            yield name, value
    yield from own["_buffers"].items()


def _adapts_itself(rope_type: Any) -> bool:
    return rope_type is not None and ("dynamic" in str(rope_type) or "longrope" in str(rope_type))


def _of_config(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    for name, value in vars(config).items():
        if name[0] != "_" and name not in CHANGES_NO_NUMBER:
            yield name, value.to_dict() if isinstance(value, PreTrainedConfig) else value
    yield "_attn_implementation", config._attn_implementation


def _compared(value: Any) -> Any:
    """What is compared of a value: itself, or a copy of a container of such. Of other objects nothing is known."""
    if type(value) in USUAL or isinstance(value, PLAIN) or callable(value):
        return value
    if isinstance(value, Tensor):
        return _Values(value)
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return NOT_COMPARED
    inner = [_compared(each) for each in (value.values() if isinstance(value, dict) else value)]
    if any(each is NOT_COMPARED or isinstance(each, _Values) for each in inner):
        return NOT_COMPARED
    return dict(zip(value, inner, strict=True)) if isinstance(value, dict) else inner


def refuse_changes(before: Facts, now: Facts) -> None:
    """Raise `ConfigError` naming the first fact that has changed."""
    if before == now:
        return
    for key in {**before, **now}:
        was, found = before.get(key, ABSENT), now.get(key, ABSENT)
        if was is found or was == found or was is NOT_COMPARED:
            continue
        if (found is NOT_COMPARED or isinstance(found, _Values)) and was in (None, ABSENT, [], {}):
            continue  # a cache
        what, since = ".".join(filter(None, key)) or "model", "since the engine was made"
        if all(isinstance(each, (*PLAIN, _Absent)) for each in (was, found)):
            what = f"{what} was {was!r} when the engine was made and is {found!r} now"
        elif was is ABSENT or found is ABSENT:
            what = f"{what} has been {'added' if was is ABSENT else 'removed'} {since}"
        else:
            what = f"{what} has been changed {since}"
        fix = "change it before the first train() or evaluate(), or make a new trainer"
        raise ConfigError(what, where="the trainer's model", fix=fix)


__all__ = ["Facts", "facts_of", "refuse_changes"]
