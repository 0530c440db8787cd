"""Models with adapters of `peft`, and what is compared of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.tiny import stock_gradients, tiny_model, unequal_batches

PARTS = ("q_proj", "down_proj")
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "LoraConfig", "r": 4, "lora_alpha": 3, "target_modules": "all-linear"},
    "rslora": {"kind": "LoraConfig", "r": 4, "use_rslora": True, "lora_alpha": 2, "target_modules": "all-linear"},
    "dora": {"kind": "LoraConfig", "r": 4, "use_dora": True, "target_modules": "all-linear"},
    "with biases": {"kind": "LoraConfig", "r": 4, "lora_bias": False, "bias": "all", "target_modules": "all-linear"},
    "of the ends": {"kind": "LoraConfig", "r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "whole ends": {
        "kind": "LoraConfig",
        "r": 4,
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
    "ia3": {"kind": "IA3Config", "target_modules": PARTS, "feedforward_modules": ["down_proj"]},
    "loha": {"kind": "LoHaConfig", "r": 4, "target_modules": PARTS},
    "lokr": {"kind": "LoKrConfig", "r": 4, "target_modules": PARTS},
    "oft": {"kind": "OFTConfig", "oft_block_size": 4, "target_modules": PARTS},
    "boft": {"kind": "BOFTConfig", "boft_block_size": 4, "target_modules": PARTS},
    "hra": {"kind": "HRAConfig", "r": 4, "target_modules": PARTS},
    "miss": {"kind": "MissConfig", "r": 4, "target_modules": PARTS},
    "norms": {"kind": "LNTuningConfig", "target_modules": ["input_layernorm"]},
    "fourier": {"kind": "FourierFTConfig", "n_frequency": 20, "target_modules": PARTS},
    "c3a": {"kind": "C3AConfig", "block_size": 4, "target_modules": ["v_proj"]},
    "road": {"kind": "RoadConfig", "group_size": 4, "target_modules": ["v_proj"]},
    "delora": {"kind": "DeloraConfig", "r": 4, "target_modules": ["q_proj"]},
    "wave": {"kind": "WaveFTConfig", "n_frequency": 20, "target_modules": ["q_proj"]},
}
"""Name -> the class of its config, and fields."""


def config_of(method: str, **changes: Any) -> Any:
    """The `PeftConfig` of a method."""
    import peft  # which the GPU tests, collected with nothing but torch, may lack

    fields = {**METHODS[method], "task_type": "CAUSAL_LM", **changes}
    kind = getattr(peft, fields.pop("kind"))
    return kind(**{name: [*each] if isinstance(each, tuple) else each for name, each in fields.items()})


def adapted(family: str | PreTrainedModel = "llama", method: str = "lora", **changes: Any) -> Any:
    """A `PeftModel` whose adapter has had some training: nothing of it is zero."""
    import peft

    model = tiny_model(family) if isinstance(family, str) else family
    torch.manual_seed(0)
    with_adapter = peft.get_peft_model(model, config_of(method, **changes))
    with torch.no_grad():
        for parameter in with_adapter.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return with_adapter.train()


def true_gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of the unequal micro-batches, and the gradient of all that trains, by plain PyTorch."""
    base = model.get_base_model()
    loss, gradients = stock_gradients(base, unequal_batches())
    return loss, {name: gradients[name] for name, each in base.named_parameters() if each.requires_grad}
