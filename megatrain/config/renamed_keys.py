"""Other names of configuration keys, in earlier versions and in other training libraries.

An error tells the key of now; the configuration in an older checkpoint is read by its own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "data.window": "data.sequence_length",
    "data.template": "data.chat_template",
    "data.template_values": "data.chat_template_kwargs",
    "train.dpo_beta": "train.beta",
    "train.sample_prompt": "train.sample_prompts",
    "train.lr": "train.learning_rate",
    "train.lr_schedule": "train.lr_scheduler",
    "train.micro_batch": "train.micro_batch_size",
    "train.micro_batches": "train.gradient_accumulation_steps",
    "train.windows_per_step": "train.global_batch_size",
    "train.targets_per_step": "train.target_tokens_per_step",
    "policy.activation_rows": "policy.activations_by_layer",
    "policy.gates": "policy.wait_for",
    "policy.slabs": "policy.pinned_staging_slots",
    "policy.stage_slots": "policy.disk_staging_slots",
}
"""Keys of earlier versions, and what they are now."""

REPLACED = {
    "policy.compile": "policy.kernels (stock or compile)",
    "policy.transit": "policy.transfer (pinned, staged or pageable)",
}
"""Keys of earlier versions whose values were others."""

_NO_LOW_BITS = "nothing: a frozen base is held in bfloat16, in host memory, and takes none of the device's"

_STREAMED = "nothing: state streams from host memory by itself, and several GPUs share it by `torchrun`"
_PLANNED_ACTIVATIONS = "policy.activations; left out, the plan chooses what is kept and what is computed again"
_ADAMW = "nothing: it is AdamW, with train.betas, train.eps and train.weight_decay"

OTHER_TRAINERS = {
    "adam_beta1": "train.betas, the first of two",
    "adam_beta2": "train.betas, the second of two",
    "adam_epsilon": "train.eps",
    "assistant_only_loss": "data.train_on=assistant",
    "attn_implementation": "model.attention",
    "base_model": "model.path",
    "beta": "train.beta",
    "bf16": "train.precision=bf16",
    "bnb_4bit_compute_dtype": _NO_LOW_BITS,
    "bnb_4bit_quant_type": _NO_LOW_BITS,
    "bnb_4bit_use_double_quant": _NO_LOW_BITS,
    "chat_template_path": "data.chat_template",
    "completion_only_loss": "data.train_on",
    "dataloader_num_workers": "data.workers",
    "dataset_name": "data.sources",
    "dataset_text_field": "data.columns, {text: NAME} say",
    "deepspeed": _STREAMED,
    "eval_dataset": "data.validation",
    "eval_strategy": "train.eval_every, in steps",
    "evaluation_strategy": "train.eval_every, in steps",
    "finetuning_type": "adapter.type for lora, and nothing for the whole model",
    "flash_attn": "model.attention",
    "flash_attention": "model.attention=flash_attention_2",
    "fp16": "train.precision, bf16 or fp32; fp16 would need its loss scaled",
    "fp32": "train.precision=fp32",
    "fsdp": _STREAMED,
    "fsdp_config": _STREAMED,
    "gradient_checkpointing": _PLANNED_ACTIVATIONS,
    "use_gradient_checkpointing": _PLANNED_ACTIVATIONS,
    "group_by_length": "data.packing=grouped",
    "load_best_model_at_end": "output.best",
    "loss_type": "train.dpo_loss",
    "max_seq_len": "data.sequence_length",
    "max_train_steps": "train.steps",
    "metric_for_best_model": "nothing: the best state is that of the lowest validation loss",
    "model_max_length": "data.sequence_length",
    "model_name": "model.path",
    "neat_packing": "data.packing=best_fit",
    "optim": _ADAMW,
    "optimizer": _ADAMW,
    "optimizer_type": _ADAMW,
    "overwrite_output_dir": "output.overwrite",
    "per_device_eval_batch_size": "nothing: losses are measured in the micro-batches of training",
    "pref_beta": "train.beta",
    "pref_loss": "train.dpo_loss",
    "preprocessing_num_workers": "data.workers",
    "report_to": "output.trackers",
    "resume_from_checkpoint": "resume",
    "sample_packing": "data.packing=best_fit",
    "save_strategy": "checkpoint.every, in steps",
    "sequence_len": "data.sequence_length",
    "stage": "train.objective, and data.format",
    "tf32": "train.precision",
    "tokenizer_name": "data.tokenizer",
    "tokenizer_name_or_path": "data.tokenizer",
    "torch_compile": "policy.kernels=compile",
    "torch_dtype": "train.precision",
    "train_file": "data.sources",
    "train_on_inputs": "data.train_on=all",
    "train_on_prompt": "data.train_on=all",
    "use_liger_kernel": "policy.kernels=compile, which fuses the same operations",
    "val_size": "data.validation_fraction",
    "validation_file": "data.validation",
    "wandb_project": "output.project",
    "warmup_ratio": "train.warmup_steps, in steps",
    "additional_target": "adapter.modules_to_save",
    "adapter_name_or_path": "adapter.path",
    "load_in_4bit": _NO_LOW_BITS,
    "load_in_8bit": _NO_LOW_BITS,
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_model_dir": "adapter.path",
    "lora_modules_to_save": "adapter.modules_to_save",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "lora_target": "adapter.target_modules",
    "lora_target_linear": "adapter.target_modules=all-linear",
    "lora_target_modules": "adapter.target_modules",
    "peft_use_dora": "adapter.use_dora",
    "peft_use_rslora": "adapter.use_rslora",
    "quantization_bit": _NO_LOW_BITS,
    "use_dora": "adapter.use_dora",
    "use_peft": "adapter.type",
    "use_rslora": "adapter.use_rslora",
    "batch_size": "train.global_batch_size",
    "block_size": "data.sequence_length",
    "cutoff_len": "data.sequence_length",
    "dataset": "data.sources",
    "datasets": "data.sources",
    "eval_steps": "train.eval_every",
    "grad_accum_steps": "train.gradient_accumulation_steps",
    "logging_steps": "train.log_every",
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.lr_scheduler",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "max_steps": "train.steps",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "micro_batch": "train.micro_batch_size",
    "clip_grad_norm": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "gradient_clip_val": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm",
    "model_name_or_path": "model.path",
    "output_dir": "output.folder",
    "per_device_train_batch_size": "train.micro_batch_size",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "seq_len": "data.sequence_length",
    "train_batch_size": "train.global_batch_size",
    "val_set_size": "data.validation_fraction",
    "window": "data.sequence_length",
}
"""What transformers, LLaMA-Factory, Axolotl and others call a key, wherever it stands."""


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, as nested dicts, that an earlier version wrote, by the keys of now."""
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    for old, new in RENAMED.items():
        (section, before), name = old.split("."), new.split(".")[1]
        if before in (inside := found.get(section) or {}):
            inside.setdefault(name, inside.pop(before))
    return found
