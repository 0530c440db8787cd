"""Refuses, in one line and before allocating anything, what a streamed trainer does not support.

Here are classes, constructors' arguments and models; training arguments have a table (`training_options.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from megatrain.errors import ConfigError, ModelError
from megatrain.model import base_of
from megatrain.model.adapters import adapter_of

OVERRIDES = (
    *("compute_loss", "training_step", "prediction_step", "create_optimizer", "_inner_training_loop", "_run_epoch"),
    *("get_batch_samples", "_get_num_items_in_batch", "_clip_grad_norm", "_get_grad_norm"),
)
"""Methods that a class between ours and the library's must not have, since the engine takes their place."""

KNOWN = ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.base_trainer", "megatrain.hf.trainer")
"""Modules whose own such methods are known, and have a counterpart here."""


def refuse_keywords(given: dict[str, Any]) -> None:
    """Raise `ConfigError` for an argument of the constructor that cannot be honoured."""
    optimizers = given.get("optimizers") or (None, None)
    if any(each is not None for each in optimizers):
        what, fix = "optimizers cannot be honoured", "set optim, learning_rate and lr_scheduler_type of the arguments"
        raise ConfigError(what, where="StreamedTrainer", fix=fix)
    for name, fix in (
        ("optimizer_cls_and_kwargs", "set optim and learning_rate of the arguments"),
        ("compute_loss_func", "it wants whole logits: give loss_fn, see megatrain.losses"),
        ("model_init", "give the model"),
        ("quantization_config", "weights are trained in full precision"),
    ):
        if given.get(name) is not None:
            raise ConfigError(f"{name} cannot be honoured", where="StreamedTrainer", fix=fix)


def refuse_class(kind: type) -> None:
    """Raise `ConfigError` for a trainer with a loss or a step of its own, which the engine would not run."""
    for base in kind.__mro__:
        if base.__module__ in KNOWN or base.__module__.startswith("megatrain.hf"):
            continue
        if theirs := [name for name in OVERRIDES if name in vars(base)]:
            what = f"{base.__name__}.{theirs[0]} would not be run"
            raise ConfigError(what, where="StreamedTrainer", fix="give loss_fn instead, see megatrain.losses")


def refuse_dtypes(dtypes: Iterable[torch.dtype]) -> None:
    """Raise `ConfigError` for weights that are neither float32 nor bfloat16, whether loaded or by name."""
    if odd := sorted(str(dtype) for dtype in {*dtypes} - {torch.float32, torch.bfloat16}):
        what = f"weights in {odd[0].removeprefix('torch.')}"
        raise ConfigError(what, where="StreamedTrainer", fix="load them with dtype=torch.float32 or torch.bfloat16")


def refuse_model(model: Any, args: Any) -> None:
    """Raise `ModelError` for quantized weights and for adapters that do not stream, `ConfigError` for those of half
    precision, and for what of the training arguments does not go with an adapter or with float32."""
    if getattr(model, "quantization_method", None) is not None:
        raise ModelError("is quantized", where=type(model).__name__, fix="load it in full precision")
    if adapter_of(base_of(model)) is not None and args.load_best_model_at_end:
        fix = "leave it out, and use the best checkpoint, which is the folder of an adapter"
        raise ConfigError("load_best_model_at_end is not for adapters", where="StreamedTrainer", fix=fix)
    if args.bf16_full_eval and not args.bf16 and model.dtype != torch.bfloat16:
        what, fix = (
            "bf16_full_eval cannot be honoured: evaluation computes as training does",
            "set bf16, or leave it out",
        )
        raise ConfigError(what, where="StreamedTrainer", fix=fix)
    refuse_dtypes(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def refuse_loss(model: Any) -> None:
    """Raise `ConfigError` for a `loss_function` that is not the library's cross-entropy, which would not be run."""
    found = getattr(model, "loss_function", ForCausalLMLoss)
    if found is not ForCausalLMLoss:
        what = f"its loss_function, {getattr(found, '__name__', type(found).__name__)}, would not be run"
        fix = "give loss_fn instead, see megatrain.losses"
        raise ConfigError(what, where=type(model).__name__, fix=fix)


__all__ = ["refuse_class", "refuse_dtypes", "refuse_keywords", "refuse_loss", "refuse_model"]
