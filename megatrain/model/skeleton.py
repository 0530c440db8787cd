"""Builds a model's structure without its weights: parameters on the meta device, all else as in the stock model.

The library's own `from_config` runs unchanged, with `nn.Module.register_parameter` replaced during the call: each
parameter becomes a meta tensor as soon as a module registers it. So initialisers cost nothing, and at most one
parameter exists at a time (as untouched memory if it came from `torch.empty`, and not at all if it is huge), while
rotary tables and other buffers are computed as usual. Building the whole model on the meta device, as
`from_pretrained` does, would leave buffers without values.

Weights come from `initialize` and `pretrained`.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.hub_kernels import load_and_register_attn_kernel
from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK
from transformers.utils.import_utils import (
    KERNELS_MAX_VERSION,
    KERNELS_MIN_VERSION,
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_kernels_available,
    is_torch_flex_attn_available,
)

from megatrain.errors import ModelError, first_line
from megatrain.model.architecture import auto_class, model_class_of, plain_errors, refuse_other_configs
from megatrain.model.dequantize import drop_quantization
from megatrain.model.weight_sources import quiet

HUGE = 1 << 26
"""New tensors with this many elements are taken for parameters; a buffer of this size would be refused."""

_FACTORIES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.full.default,
    torch.ops.aten.rand.default,
    torch.ops.aten.randn.default,
}

Registered = Callable[[nn.Parameter], nn.Parameter]
"""Called with each parameter that a module registers; returns the one that the module keeps."""


def blueprint(config: PreTrainedConfig, *, attention: str = "auto", trust_remote_code: bool = False) -> PreTrainedModel:
    """The structure of the causal language model of `config`, in training mode.

    Parameters are float32 on the meta device, tied and with `requires_grad` as the library sets them. Buffers have
    their values, on the CPU. `config` and the caller's random state are not changed.

    attention: the name of an implementation (`sdpa`, `eager`, `flash_attention_2`, `flash_attention_3` or
    `flex_attention`), or `auto` for the config's choice, else the library's (`sdpa` if the model has it). For a flash
    attention whose package is not installed the library takes a prebuilt kernel of the hub, and the model's config
    names that one. Raises `ModelError` if the model cannot use the one named, and for a config that does not describe a
    causal language model with plain weights.
    """
    return outline(config, attention=attention, trust_remote_code=trust_remote_code)[0]


def outline(
    config: PreTrainedConfig, *, attention: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[nn.Parameter]]:
    """A blueprint, and its parameters in the order in which modules registered them.

    The list includes parameters that the library replaced later, such as a head's own weight that is then tied.
    """
    outlined: dict[int, nn.Parameter] = {}  # by storage

    def registered(parameter: nn.Parameter) -> nn.Parameter:
        stripped = as_meta(parameter)
        outlined.setdefault(storage_of(stripped), stripped)
        return stripped

    with _Outline():  # type: ignore[no-untyped-call]
        model = build(config, registered, seed=0, attention=attention, trust_remote_code=trust_remote_code)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(f"its buffer {name} has no value without the weights", where=where_of(config))
    return model, list(outlined.values())


def build(
    config: PreTrainedConfig, registered: Registered, *, seed: int, attention: str, trust_remote_code: bool
) -> PreTrainedModel:
    """Run the library's own construction from `seed`, with every parameter passed through `registered`."""
    where = where_of(config)
    refuse_other_configs(config, where=where, trust_remote_code=trust_remote_code)
    refuse_attention(config, attention, where)
    config = copy.deepcopy(config)
    drop_quantization(config)
    with (
        quiet(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        on_the_cpu(),
        plain_errors(where),
        registering(registered),
    ):
        torch.default_generator.manual_seed(seed)  # only the CPU's: nothing is drawn elsewhere
        model: PreTrainedModel = auto_class(config).from_config(
            config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            **({} if attention == "auto" else {"attn_implementation": attention}),
        )
    used = model.config._attn_implementation
    if attention != "auto" and used not in (attention, FLASH_ATTN_KERNEL_FALLBACK.get(attention)):
        raise ModelError(f"uses attention={used}, but {attention} was requested", where=where, fix=_ask_for(used))
    model.train()
    return model


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """In the block, or the function that it decorates, make the CPU the default device. If it already is, a context
    would only get in the way of `out=`."""
    here = torch.device("cpu")
    with nullcontext() if torch.get_default_device() == here else here:
        yield


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage, shared with its views; valid only while one of them is alive."""
    return int(tensor.untyped_storage()._cdata)


def where_of(config: PreTrainedConfig) -> str:
    """A model's name in errors: its folder or hub name, or its kind."""
    return f"model {config.name_or_path or config.model_type}"


@contextmanager
def registering(handle: Registered) -> Iterator[None]:
    """In the block, parameters that modules register in this thread go through `handle`; one block at a time."""
    original, here = nn.Module.register_parameter, threading.get_ident()

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == here:
            param = handle(param)
        original(module, name, param)

    with _one_at_a_time:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


_one_at_a_time = threading.RLock()


def as_meta(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter without values; the same object if a parameter comes twice."""
    if parameter.is_meta:
        return parameter
    if not hasattr(parameter, "as_meta"):
        stripped = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        stripped.__dict__.update(parameter.__dict__)
        parameter.__dict__["as_meta"] = stripped
    known: nn.Parameter = parameter.__dict__["as_meta"]
    return known


class _Outline(TorchDispatchMode):
    """Lets initialisation code run on parameters without values.

    A huge tensor, which will become a parameter, gets no memory before it is registered either: the experts of one
    layer can exceed this machine's memory, and some are made by `torch.zeros`, which touches all of it. Writing to
    a meta tensor does nothing, and a number read from one is zero; the result goes into other parameters, or into
    a buffer, where `initialize` would notice.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and math.prod(args[0]) >= HUGE:
            kwargs = {**kwargs, "device": torch.device("meta")}
        elif func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        elif (written := list(written_by(func, args, kwargs))) and all(tensor.is_meta for tensor in written):
            return written[0] if len(written) == 1 else tuple(written)
        return func(*args, **kwargs)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes to, according to its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def refuse_attention(config: PreTrainedConfig, attention: str, where: str) -> None:
    """Raise `ModelError`, naming the alternatives, for an attention that the model or this machine does not have.

    A prebuilt kernel is loaded to know: its builds are for some cards and versions of PyTorch only.
    """
    model_class = model_class_of(config)
    if attention == "auto" or model_class is None:
        return  # the library, or the model's own code, decides
    # Models that name compatible kernels have attention sinks. Other kernels leave sinks out, these give no gradient.
    flash = model_class._supports_flash_attn and not model_class._compatible_flash_implementations
    choices = {
        "eager": True,
        "sdpa": model_class._supports_sdpa,
        "flash_attention_2": flash and is_flash_attn_2_available(),
        "flash_attention_3": flash and is_flash_attn_3_available(),
        "flex_attention": model_class._supports_flex_attn and is_torch_flex_attn_available(),
    }
    what, fix = f"{model_class.__name__} cannot use attention={attention} here", _ask_for(*filter(choices.get, choices))
    if attention == "flash_attention_3" and (dropout := _attention_dropout(config)):
        raise ModelError(
            f"{what}, since it has no dropout", where=where, fix=f"set {dropout} to 0 in the config, or {fix}"
        )
    if choices.get(attention, False):
        return
    if not flash or attention not in choices or attention not in FLASH_ATTN_KERNEL_FALLBACK:
        raise ModelError(what, where=where, fix=fix)
    if not is_kernels_available():
        package = f'"kernels>={KERNELS_MIN_VERSION},<{KERNELS_MAX_VERSION}"'
        raise ModelError(what, where=where, fix=f"pip install {package}, which loads a prebuilt kernel, or {fix}")
    try:
        load_and_register_attn_kernel(name := FLASH_ATTN_KERNEL_FALLBACK[attention])
    except Exception as failure:  # from the hub, or from the kernel's own code
        raise ModelError(f"{what}: {name} does not load ({first_line(failure)})", where=where, fix=fix) from failure


def _attention_dropout(config: PreTrainedConfig) -> str:
    """The field that sets a dropout of attention, if one does."""
    fields = config.get_text_config().to_dict()
    return next((name for name, value in fields.items() if "att" in name and "drop" in name and value), "")


def _ask_for(*attentions: str) -> str:
    return f"use attention={' or '.join(attentions)}"
