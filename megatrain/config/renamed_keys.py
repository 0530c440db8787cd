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

OTHER_TRAINERS = {
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
