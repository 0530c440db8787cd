"""Detects what users have changed in a model (forwards, hooks, modules), and refuses what is not supported.

The engine runs a copy of the model's structure with weights of its own. A function that a user has put into the
model is the same object in the copy, so what it refers to (a module's forward, say) still belongs to the original,
and would compute with weights that nobody trains. That is detected from the tensors that the code reads during the
first look (`OwnTensors`). What reading does not show is looked for explicitly (`refuse_shared_and_hooked`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from megatrain.errors import MegaTrainError, ModelError
from megatrain.model.chunked_layers import ExpandedRowLinear
from megatrain.model.ports import OF_EVERY_MODULE, PortedModel, handing_back
from megatrain.model.weight_reads import Uses

LIBRARIES = ("torch", "transformers", "peft")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refuse_shared_and_hooked(model: nn.Module) -> None:
    """Raise `ModelError` for gradient hooks on trained parameters, trained parameters that share memory, and modules
    used twice.

    (`torch.func.functional_call` does not restore a module with parameters that is at two places. A copy of a
    `ParameterDict`, which nothing calls, serves as well: see `separate_dicts`.)
    """
    where = f"model {type(model).__name__}"
    places: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = places.setdefault(id(module), name)
        if first != name and next(module.parameters(), None) is not None and not isinstance(module, nn.ParameterDict):
            what = f"{first} is in the model twice, also as {name}"
            raise ModelError(what, where=where, fix="give each place a module of its own (copy.deepcopy)")
    memory: dict[int, str] = {}
    by_name = dict(model.named_parameters())
    for name, parameter in by_name.items():
        first = memory.setdefault(parameter.data_ptr(), name) if _in_memory(parameter) else name
        if first != name and (parameter.requires_grad or by_name[first].requires_grad):
            what = f"parameter {name} shares memory with {first}, but would be trained separately"
            fix = "tie them by one nn.Parameter for both"
            if parameter.shape != by_name[first].shape:  # a transposed view, as `peft` makes of tied LoRA matrices
                fix = "leave ensure_weight_tying out of the adapter's config, or name the embedding in modules_to_save"
            raise ModelError(what, where=where, fix=fix)
        if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise ModelError(
                f"parameter {name} has a gradient hook, which would never be called",
                where=where,
                fix="remove it, or freeze the parameter; a hook on a module's forward or backward is called",
            )


def separate_dicts(model: nn.Module) -> None:
    """Give each place of a `ParameterDict` a dictionary of its own, with the same parameters."""
    seen: set[int] = set()
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, nn.ParameterDict):
                if id(child) in seen:
                    module._modules[name] = nn.ParameterDict(dict(child.items()))
                seen.add(id(child))


def refuse_hooks_around(model: nn.Module, stack: str) -> None:
    """Raise `ModelError` for a hook on a module that contains the `stack` of layers, which only runs in pieces."""
    where = f"model {type(model).__name__}"
    around = stack.split(".")
    for depth in range(len(around)):
        name = ".".join(around[:depth])
        if any(not _of_library(hook) for hook in _hooks(model.get_submodule(name))):
            what = f"{'module ' + name if name else 'the model'} has a hook, but never runs in one piece"
            fix = "put the hook on a layer, the embedding or the head, or remove it"
            raise ModelError(what, where=where, fix=fix)


class OwnTensors(Uses):
    """While active on this thread: raises `ModelError` if code reads tensors that the engine does not have.

    These are parameters and buffers of `model`, the original of the structure, and any other leaf that requires a
    gradient, unless it was made inside the block or no longer exists at its end.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(lambda func, tensors: self._look(tensors))
        self._where = f"model {type(model).__name__}"
        named = [*model.named_parameters(), *model.named_buffers()]
        self._storages = {tensor.untyped_storage().data_ptr(): name for name, tensor in named if _in_memory(tensor)}
        self._objects = {id(tensor): name for name, tensor in named}
        self._made: list[Tensor] = []
        self._foreign: list[ReferenceType[Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.requires_grad_ or getattr(func, "__self__", None) is _REQUIRES_GRAD:
            self._made.append(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def _look(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            root = tensor if tensor._base is None else tensor._base
            name = self._objects.get(id(root))
            if name is None and _in_memory(tensor):
                name = self._storages.get(tensor.untyped_storage().data_ptr())
            if name is not None:
                raise ModelError(
                    f"code added to it reads {name} of the original model, not of the copy that trains",
                    where=self._where,
                    fix="let it use the module that it is called with (types.MethodType, a subclass, a forward hook)",
                )
            if root.is_leaf and root.requires_grad and not any(root is made for made in self._made):
                self._foreign.append(ref(root))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        kept = next((leaf for leaf in (reference() for reference in self._foreign) if leaf is not None), None)
        if kept is not None and not isinstance(error, MegaTrainError):
            raise ModelError(
                f"code added to it reads a trainable tensor {list(kept.shape)} that does not belong to the model",
                where=self._where,
                fix="register it as a parameter of one of the model's modules",
            ) from error


_REQUIRES_GRAD = Tensor.requires_grad


def _in_memory(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() > 0


class Buffers:
    """A snapshot of buffers by name, to find out later which have changed."""

    def __init__(self, module: nn.Module, prefix: str = "") -> None:
        self._module, self._prefix = module, prefix
        self._were = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in module.named_buffers()}

    def refuse_changed(self, where: str) -> None:
        """Raise `ModelError` naming a buffer that has another value, or is saved and was written to.

        What is not saved may be written anew from what the code is called with, as long as the same call writes the
        same (rotary tables); `ports.Recomputed` then keeps one call from the next.
        """
        saved = self._module.state_dict(keep_vars=True).keys()
        for name, buffer in self._module.named_buffers():
            was, version, value = self._were.get(name, (None, 0, None))
            written = buffer is was and buffer._version != version and name in saved
            if written or value is None or not _alike(buffer, value):
                raise ModelError(
                    f"each forward changes the buffer {self._prefix}{name}, but parts of it run twice in a step",
                    where=where,
                    fix="put the model in evaluation mode if that leaves the buffer alone, or remove that code",
                )


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def code_of(layer: nn.Module) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What distinguishes the code of layers of one class.

    First what decides which ops run: classes inside, switches of those that are not the libraries', functions set
    on instances. Then what distinguishes functions with the same code, which may refer to other objects.
    """
    code: list[Any] = []
    held: list[int] = []
    for name, module in layer.named_modules():
        if _of_library(type(module)):  # a parametrized module has a class of its own with the same name
            code.append((name, type(module).__module__, type(module).__qualname__))
        else:
            switches = [(key, value) for key, value in vars(module).items() if isinstance(value, bool | str)]
            code.append((name, type(module), tuple(switches)))
        assigned = [value for key, value in vars(module).items() if key not in OF_EVERY_MODULE and _is_code(value)]
        for value in [*assigned, *_hooks(module)]:
            if isinstance(value, partial) and not _of_library(value):
                held.append(id(value))
            for function in _functions(value):
                code.append(getattr(function, "__code__", type(function)))
                if not _of_library(function):
                    held.append(id(function))
    return tuple(code), tuple(held)


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | partial)


def _functions(value: Any) -> Iterator[Any]:
    """The functions in a callable, through bound arguments."""
    if isinstance(value, partial):
        for inner in (value.func, *value.args, *value.keywords.values()):
            if callable(inner) and not isinstance(inner, nn.Module | type):
                yield from _functions(inner)
    else:
        yield value.__func__ if isinstance(value, MethodType) else value


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for kind in HOOKS for hook in getattr(module, kind).values()]


def _of_library(function: Any) -> bool:
    (inner, *_) = _functions(function)
    return str(getattr(inner, "__module__", "")).partition(".")[0] in LIBRARIES


def refuse_mixing(ported: PortedModel, hidden: Tensor) -> None:
    """Raise `ModelError` for user code after the layers that looks at several tokens at a time.

    The head processes tokens one by one. hidden: zeros [tokens, *head_shape]. Weights are random rows that
    repeat, so that a product with a large one takes no memory.
    """
    skeleton = ported.skeleton
    code, held = code_of(skeleton)
    if not held and all(isinstance(part[1], str) for part in code if isinstance(part, tuple)):
        return
    rows = {name: torch.randn(zero.shape[-1:], dtype=zero.dtype) for name, zero in ported.placeholders.items()}
    weights = {name: rows[name].expand(zero.shape) for name, zero in ported.placeholders.items()}
    hidden, ids = torch.randn_like(hidden), torch.zeros(1, len(hidden), dtype=torch.long)

    def whole(given: Tensor) -> Tensor:
        torch.default_generator.manual_seed(0)
        logits: Tensor = ported.run(handing_back(ported, given.unsqueeze(0)), weights, {"input_ids": ids}).logits
        return logits.reshape(len(given), -1).float()

    with torch.no_grad(), ported.evaluation_mode(), ExpandedRowLinear():
        torch.default_generator.manual_seed(0)
        apart, together = ported.head(weights, hidden).float(), whole(hidden)
        mixes = False
        for token in range(len(hidden)):
            others, changed = torch.arange(len(hidden)) != token, hidden.clone()
            changed[token] *= -1
            mixes = mixes or not _alike(together[others], whole(changed)[others])
    atol = 0.05 * float(apart.nan_to_num().abs().max())
    if mixes or not torch.allclose(apart, together, rtol=0.05, atol=atol, equal_nan=True):
        raise ModelError(
            "code after its layers looks at several tokens at a time, but tokens go through the head in chunks",
            where=f"model {type(skeleton).__name__}",
            fix="put that code into a layer, or remove it",
        )
