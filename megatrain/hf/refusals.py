"""Refuses, in one line and before allocating anything, what a streamed trainer does not support.

This file checks classes, arguments of constructors and models. Training arguments have a table: `training_options.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from megatrain.errors import ConfigError, ModelError
from megatrain.model import base_of
from megatrain.model.adapters import adapter_of
from megatrain.train.options import ANY, of_torch, same_settings

REPLACED_METHODS = (
    *("compute_loss", "training_step", "prediction_step", "create_optimizer", "_inner_training_loop", "_run_epoch"),
    *("get_batch_samples", "_get_num_items_in_batch", "_clip_grad_norm", "_get_grad_norm"),
)
"""Methods that a user's trainer class must not override, since the engine replaces them."""

KNOWN_MODULES = ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.base_trainer", "megatrain.hf.trainer")
"""Modules whose trainers may have these methods, since the engine does the same."""


def refuse_keywords(given: dict[str, Any]) -> None:
    """Raise `ConfigError` for an argument of the constructor that is not supported."""
    optimizers = given.get("optimizers") or (None, None)
    if any(each is not None for each in optimizers):
        what, fix = "optimizers are not supported", "set optim, learning_rate and lr_scheduler_type in the arguments"
        if (theirs := of_torch(optimizers[0])) and (ours := same_settings(theirs)) != ANY:
            fix = f"give engine_options={{'optimizer': {ours}}}, and set lr_scheduler_type in the arguments"
        raise ConfigError(what, where="StreamedTrainer", fix=fix)
    for name, fix in (
        ("optimizer_cls_and_kwargs", "set optim and learning_rate in the arguments, or engine_options['optimizer']"),
        ("compute_loss_func", "it needs the full logits: give loss_fn, see megatrain.losses"),
        ("model_init", "give the model"),
        ("quantization_config", "weights are trained in full precision: leave it out"),
    ):
        if given.get(name) is not None:
            raise ConfigError(f"{name} is not supported", where="StreamedTrainer", fix=fix)


def refuse_class(kind: type) -> None:
    """Raise `ConfigError` for a trainer class with its own loss or training step, which the engine would not run."""
    for base in kind.__mro__:
        if base.__module__ in KNOWN_MODULES or base.__module__.startswith("megatrain.hf"):
            continue
        if theirs := [name for name in REPLACED_METHODS if name in vars(base)]:
            what = f"{base.__name__}.{theirs[0]} would not be run"
            raise ConfigError(what, where="StreamedTrainer", fix="give loss_fn instead, see megatrain.losses")


def refuse_dtypes(dtypes: Iterable[torch.dtype]) -> None:
    """Raise `ConfigError` for weights that are neither float32 nor bfloat16."""
    if odd := sorted(str(dtype) for dtype in {*dtypes} - {torch.float32, torch.bfloat16}):
        what = f"weights in {odd[0].removeprefix('torch.')}"
        raise ConfigError(what, where="StreamedTrainer", fix="load them with dtype=torch.float32 or torch.bfloat16")


def refuse_model(model: Any, args: Any) -> None:
    """Raise `ModelError` for quantized weights and for adapters that are not supported, and `ConfigError` for float16
    weights and for training arguments that do not work with an adapter or with the dtype."""
    if getattr(model, "quantization_method", None) is not None:
        raise ModelError("is quantized", where=type(model).__name__, fix="load it in full precision")
    if adapter_of(base_of(model)) is not None and args.load_best_model_at_end:
        fix = "leave it out, and load the best checkpoint, which is the folder of an adapter"
        raise ConfigError("load_best_model_at_end is not supported with adapters", where="StreamedTrainer", fix=fix)
    if args.bf16_full_eval and not args.bf16 and model.dtype != torch.bfloat16:
        what, fix = (
            "bf16_full_eval is not supported in a float32 run: evaluation computes as training does",
            "set bf16, or leave it out",
        )
        raise ConfigError(what, where="StreamedTrainer", fix=fix)
    refuse_dtypes(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def refuse_loss(model: Any) -> None:
    """Raise `ConfigError` for a `loss_function` other than the library's cross-entropy, since it would not be run."""
    loss = getattr(model, "loss_function", ForCausalLMLoss)
    if loss is not ForCausalLMLoss:
        what = f"its loss_function, {getattr(loss, '__name__', type(loss).__name__)}, would not be run"
        fix = "give loss_fn instead, see megatrain.losses"
        raise ConfigError(what, where=type(model).__name__, fix=fix)


__all__ = ["refuse_class", "refuse_dtypes", "refuse_keywords", "refuse_loss", "refuse_model"]
