"""Adapters: LoRA and its relatives, by `peft`, over a model that streams. The only home of `peft`, which is optional.

`peft` puts its layers into a model in place, `q_proj` becomes one that holds `base_layer`, `lora_A` and `lora_B`, and
leaves the model's own forward as it was. So an adapted model is a model, and ports know nothing of it: the base is what
is frozen, the adapter what trains. Here is told which adapters that holds for (`adapter_of`), and what a layer of
`peft` does otherwise than by its parameters alone is put right in the copy that streams (`without_parametrize`).
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import MethodType
from typing import Any

import torch
from torch import nn

from megatrain.errors import ModelError
from megatrain.model.architecture import plain_errors

METHODS = (
    *("LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "MISS", "LN_TUNING"),
    *("FOURIERFT", "VERA", "C3A", "ROAD", "DELORA", "WAVEFT"),
)
"""Methods of `peft` that leave a layer's forward a function of its input, each compared with plain PyTorch in tests."""

WHY_NOT = {
    "ADALORA": "changes its ranks between steps, by a loss of its own",
    "XLORA": "runs the model twice for each batch",
    "ADAPTION_PROMPT": "puts learned tokens into the attention of the last layers alone",
}
"""What is known of some others; prompt and prefix methods say of themselves what they are."""

FULL_PRECISION = "load it in bfloat16: frozen, it costs 2 bytes a parameter of host memory, none of the device's"
"""In place of a quantized base (QLoRA)."""


DROPOUT = re.compile(r"\w*dropout")
"""Fields of a `PeftConfig` that hold a rate."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The one adapter of a model: its name in the model, `default` as a rule, and its `PeftConfig`."""

    name: str
    config: Any

    @property
    def drops(self) -> bool:
        """Whether it draws at random."""
        return any(value for name, value in vars(self.config).items() if DROPOUT.fullmatch(name))

    @property
    def facts(self) -> str:
        """All that its code depends on, as text."""
        fields = {name: sorted(each) if isinstance(each, set) else each for name, each in vars(self.config).items()}
        return f"peft {version('peft')} {json.dumps(fields, sort_keys=True, default=str)}"

    def put_into(self, model: nn.Module, *, drops: bool = True) -> None:
        """Another one like it into a model that has none, to train; without dropout if that is not wanted.

        Raises `ModelError` where the model has no place for it.
        """
        from peft import inject_adapter_in_model

        config = copy.deepcopy(self.config)
        config.inference_mode = False
        if not drops:
            for name in filter(DROPOUT.fullmatch, vars(config)):
                setattr(config, name, 0.0)
        with plain_errors(f"model {type(model).__name__}"):
            inject_adapter_in_model(config, model, self.name)


def base_of(model: nn.Module) -> nn.Module:
    """The transformers model in a `PeftModel`, the adapter's layers in it; any other model as it is.

    Raises `ModelError` for what is more than layers in a model: prompt and prefix methods, and mixed adapters.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    if isinstance(model, peft.PeftMixedModel):
        raise ModelError("mixes adapters of several methods", where="model PeftMixedModel", fix="give it one adapter")
    for config in model.peft_config.values():
        refuse_method(config)
    base: nn.Module = model.get_base_model()
    return base


def refuse_method(config: Any) -> None:
    """Raise `ModelError` for a method of `peft` that does not stream, by its name."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if method in METHODS:
        return
    why = WHY_NOT.get(method, "has not been compared with plain PyTorch here")
    if getattr(config, "is_prompt_learning", False):
        why = "puts learned tokens before the text or into the cache, outside of the layers"
    raise ModelError(f"{method} {why}, and cannot be streamed", where="adapter", fix="use LoRA, say (peft.LoraConfig)")


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter in a transformers model, `None` where there is none.

    Raises `ModelError` for several, for one that is merged, disabled or not active, and for a method that does not
    stream.
    """
    tuned = list(_tuned(model))
    if not tuned:
        return None
    where = f"model {type(model).__name__}"
    if getattr(model, "quantization_method", None) is not None:
        raise ModelError("its base is quantized (QLoRA)", where=where, fix=FULL_PRECISION)
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    if len(configs) != 1:
        what = f"has {len(configs)} adapters ({', '.join(configs)})"
        raise ModelError(what, where=where, fix="leave one in it (delete_adapter), since one is trained")
    ((name, config),) = configs.items()
    refuse_method(config)
    for module in tuned:
        if getattr(module, "merged", False):
            raise ModelError("its adapter is merged into the base", where=where, fix="call unmerge_adapter() first")
        if module.disable_adapters:
            raise ModelError("its adapter is disabled", where=where, fix="call enable_adapter_layers() first")
        if list(module.active_adapters) != [name]:
            raise ModelError(f"its adapter {name} is not active", where=where, fix=f"call set_adapter({name!r}) first")
    return Adapter(name, config)


def _tuned(model: nn.Module) -> Iterator[Any]:
    """The modules that `peft` has put into a model."""
    if "peft" in sys.modules:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        yield from (module for module in model.modules() if isinstance(module, kinds))


def without_parametrize(model: nn.Module) -> None:
    """Let layers that adapt a bare parameter, such as fused experts, put the sum in its place for each call.

    `peft` does so by `torch.nn.utils.parametrize`, which registers parameters and so changes the module that
    `torch.func.functional_call` is at work on. The arithmetic is its own.
    """
    for module in _tuned(model):
        if hasattr(module, "_activate_lora"):
            module._activate_lora = MethodType(_adapted, module)


@contextmanager
def _adapted(self: Any, active_adapters: list[str]) -> Iterator[None]:
    """In the block, the parameter that the wrapper adapts is the adapted one."""
    layer, name = self.get_base_layer(), self.parameter_name
    weight = layer._parameters[name]
    (adapter,) = active_adapters
    if self.num_experts > 1:
        lhs, rhs, scaling = self.get_delta_factors(adapter)
        layer._parameters[name] = torch.baddbmm(weight, lhs, rhs, alpha=scaling)
    else:
        layer._parameters[name] = weight + self.get_delta_weight(adapter)
    try:
        yield
    finally:
        layer._parameters[name] = weight
