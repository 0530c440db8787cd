"""What a streamed trainer supports: a table of training arguments, for the checks and for the docs page, and checks of
classes, of the constructor's arguments and of models, made before anything is allocated.

An option works as in the stock trainer, or is refused, or has no effect. It works as in the stock trainer if the
library's own code reads it, since that code still runs, or if the engine does the same. Options that trade memory for
time without changing results have no effect: the planner decides instead. A field of a later library version that is
not in this table is refused as soon as it is set. Fields that a user's own subclass adds are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from megatrain.errors import ConfigError, ModelError
from megatrain.model import base_of
from megatrain.model.adapters import adapter_of

Effect = Literal["same", "refused", "none"]
LIBRARIES = ("transformers", "trl")
"""Packages whose options are checked; others are a user's own."""

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
"""Values of `optim` that mean AdamW in full precision."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a training argument does in a streamed trainer."""

    effect: Effect = "same"
    why: str = ""
    """If refused, what to do instead; otherwise why it has no effect, or a remark."""
    refuses: Callable[[Any], bool] | None = None
    """Whether a value is refused. `None`: any true value if `effect` is "refused", otherwise none."""
    values: str = ""
    """The refused values in words, if not all are."""
    with_ranks: bool = False
    """Whether values are refused only if several processes train one model."""

    def refused(self, value: Any, ranks: int) -> bool:
        """Whether `value` is refused with this number of processes."""
        if self.refuses is None:
            return self.effect == "refused" and bool(value)
        return self.refuses(value) and (ranks > 1 or not self.with_ranks)


def _same(names: str) -> dict[str, Option]:
    return {name: Option() for name in names.split()}


def _refused(why: str) -> Option:
    return Option("refused", why)


def _no_effect(why: str) -> Option:
    return Option("none", why)


_LEFT_TO_PLANNER = _no_effect("the planner chooses what is kept, recomputed or offloaded")
_NO_DDP = "processes share the model without DDP"
_FUSED = "give engine_options numerics=Numerics(kernels='fused') instead"

TRAINING: dict[str, Option] = {
    **_same("output_dir per_device_train_batch_size num_train_epochs max_steps gradient_accumulation_steps"),
    **_same("learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps"),
    **_same("weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor"),
    "optim": Option(
        "same",
        f"use {ADAMW[0]}, and for another optimizer engine_options={{'optimizer': megatrain.Muon(...)}}",
        lambda value: getattr(value, "value", value) not in ADAMW,
        "other than AdamW",
    ),
    "optim_args": _no_effect("AdamW has none, also in the stock trainer"),
    "optim_target_modules": _refused("all parameters use the same optimizer"),
    "average_tokens_across_devices": Option(
        "same", "tokens of all processes count the same", lambda value: not value, "False", with_ranks=True
    ),
    "bf16": Option(
        "same", "weights and gradients are copied to and from the device in bfloat16; master weights are float32"
    ),
    "fp16": _refused("use bf16, or full precision"),
    "bf16_full_eval": Option("same", "evaluation computes as training does, so it is refused in float32 runs"),
    "fp16_full_eval": _refused("evaluation computes as training does"),
    **_same("tf32"),
    "activation_checkpointing": _LEFT_TO_PLANNER,
    "activation_checkpointing_kwargs": _LEFT_TO_PLANNER,
    "gradient_checkpointing": _LEFT_TO_PLANNER,
    "gradient_checkpointing_kwargs": _LEFT_TO_PLANNER,
    "torch_compile": _refused(_FUSED),
    "torch_compile_backend": _no_effect("only used with torch_compile"),
    "torch_compile_mode": _no_effect("only used with torch_compile"),
    "use_liger_kernel": _refused(_FUSED),
    "liger_kernel_config": _no_effect("only used with use_liger_kernel"),
    "use_cache": _no_effect("training and evaluation cache no keys and values"),
    "neftune_noise_alpha": Option(
        "same", "the noise has the same distribution but other values, the same under any plan"
    ),
    "torch_empty_cache_steps": _no_effect("the engine plans its device memory, and frees it when it is closed"),
    "auto_find_batch_size": _refused("set per_device_train_batch_size; the planner splits it to fit"),
    **_same("logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter"),
    **_same("include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project"),
    **_same("trackio_space_id trackio_bucket_id trackio_static_space_id"),
    **_same("eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start"),
    **_same("eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics"),
    **_same("batch_eval_metrics"),
    "save_only_model": Option("same", "such a checkpoint cannot be resumed from, as in the stock trainer"),
    **_same("save_strategy save_steps save_total_limit"),
    "enable_jit_checkpoint": Option("same", "the checkpoint is saved at the end of the step, or before the next one"),
    "save_on_each_node": Option("same", "rank 0 writes, to a folder that all can read", bool, "True", with_ranks=True),
    **_same("push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"),
    "load_best_model_at_end": Option("same", "refused with an adapter: load its best checkpoint instead"),
    **_same("metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint"),
    "seed": Option("same", "same order of the data; dropout draws other numbers"),
    **_same("full_determinism data_seed use_cpu"),
    "accelerator_config": Option(
        "same",
        "each rank needs a batch in every step",
        lambda value: not getattr(value, "even_batches", True),
        "even_batches=False",
        with_ranks=True,
    ),
    "parallelism_config": _refused("processes share the model without it"),
    **_same("dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers"),
    **_same("dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order"),
    **_same("remove_unused_columns train_sampling_strategy length_column_name"),
    "label_names": Option(
        "same",
        "the loss is computed from labels",
        lambda value: value not in (None, ["labels"]),
        "other than ['labels']",
    ),
    "ddp_find_unused_parameters": _refused(_NO_DDP),
    "ddp_bucket_cap_mb": _no_effect(_NO_DDP),
    "ddp_broadcast_buffers": _no_effect(_NO_DDP),
    "ddp_static_graph": _no_effect(_NO_DDP),
    **_same("ddp_backend"),
    "ddp_timeout": Option("same", "how long a rank waits for the others"),
    "fsdp": _refused("processes share the model without it"),
    "fsdp_config": _no_effect("only used with fsdp"),
    "deepspeed": _refused("the engine streams layers instead"),
    "debug": _refused(
        "its hooks need whole layers on one device; the engine reports values that are not finite itself"
    ),
    "skip_memory_metrics": Option("same", "the memory measured includes the engine's"),
    **_same("do_train do_eval do_predict resume_from_checkpoint local_rank"),
}
"""Every field of `transformers.TrainingArguments`."""

SFT: dict[str, Option] = {
    **_same("model_init_kwargs trust_remote_code chat_template_path dataset_text_field dataset_kwargs"),
    "router_aux_loss_coef": Option("same", "refused when the engine is created if the model's forward does not use it"),
    **_same("dataset_num_proc eos_token pad_token max_length truncation_mode shuffle_dataset packing packing_strategy"),
    **_same("padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type"),
    "activation_offloading": _LEFT_TO_PLANNER,
}
"""The fields that `trl.SFTConfig` has in addition."""

OPTIONS = {**TRAINING, **SFT}


class Row(NamedTuple):
    """A row of the docs page's table."""

    name: str
    here: str
    why: str


def refuse_arguments(args: Any) -> None:
    """Raise `ConfigError` for a training argument that is refused, or that is set and not in the table."""
    for name, default in _library_fields(type(args)):
        value, ranks, option = getattr(args, name), args.world_size, OPTIONS.get(name)
        if option is None:
            if value != default:
                what = f"{name} is not known to this version of MegaTrain"
                raise ConfigError(what, where="StreamedTrainer", fix="leave it out, or use the stock trainer")
        elif option.refused(value, ranks):
            shown = f"={getattr(value, 'value', value)}" if option.values else ""
            of_ranks = f" with {ranks} processes" if option.with_ranks else ""
            if name == "accelerator_config":
                name, shown = option.values, ""
            fix = option.why if name == "optim" else f"leave it out: {option.why}"
            raise ConfigError(f"{name}{shown} is not supported{of_ranks}", where="StreamedTrainer", fix=fix)
    if args.n_gpu > 1:
        what = f"{args.n_gpu} GPUs are visible, but one process uses only one"
        raise ConfigError(what, where="StreamedTrainer", fix="set CUDA_VISIBLE_DEVICES to one of them")


def _library_fields(kind: type) -> Iterator[tuple[str, Any]]:
    """Name and default of each field that the libraries define, not a user's subclass."""
    theirs = {
        name
        for base in kind.__mro__
        if base.__module__.partition(".")[0] in LIBRARIES
        for name in vars(base).get("__annotations__", {})
    }
    for each in fields(kind):
        if each.name in theirs:
            yield each.name, each.default if each.default_factory is MISSING else each.default_factory()


def describe_options() -> dict[str, list[Row]]:
    """Class of arguments -> its options, for the docs page."""
    tables = {"transformers.TrainingArguments": TRAINING, "trl.SFTConfig": SFT}
    return {kind: [Row(name, *_describe(each)) for name, each in options.items()] for kind, options in tables.items()}


def _describe(option: Option) -> tuple[str, str]:
    """The second and third cell of an option's row."""
    if option.effect == "none":
        return "no effect", option.why
    if option.effect == "refused":
        return "refused", option.why
    if option.refuses is None:
        return "same as stock", option.why
    several = " with several processes" if option.with_ranks else ""
    return "same as stock", f"refused{several}: {option.values} ({option.why})"


# Classes, constructor arguments and models ----------------------------------------------------------------------------

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
        what = "optimizers are not supported"
        fix = "set optim (or engine_options['optimizer']), learning_rate and lr_scheduler_type in the arguments"
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
