"""Adapters of `peft` train as they do in plain PyTorch, over a base that streams and stays as it is."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

from megatrain import AdamW, Engine, Policy
from megatrain.errors import ModelError
from megatrain.model import port_model
from megatrain.spec import Numerics
from tests.adapted import METHODS, adapted, config_of, true_gradients
from tests.kinds import stock_model, tiny_config
from tests.tiny import equal, relative_error, tiny_model, unequal_batches

TOLERANCE = 1e-6
FLOOR = 1e-2
"""The scale of an error is at least this share of the largest gradient: some are small sums of large terms."""

NUMERICS = Numerics("fp32", loss_chunk_tokens=7)
FAMILIES = ("llama", "llama-tied", "gemma2", "qwen3-moe", "mixtral-balanced", "gemma4")
DEVICES = (("cpu", "recompute"), ("sim:5", "keep"))
CASES = [
    *((family, "lora", *how) for family in (*FAMILIES, "gpt2") for how in DEVICES),
    *(("llama", method, *DEVICES[place % 2]) for place, method in enumerate(METHODS) if method != "lora"),
    *(
        pytest.param(family, method, *DEVICES[1], marks=pytest.mark.slow if (place + other) % 4 else ())
        for place, family in enumerate(FAMILIES)
        for other, method in enumerate(("of the ends", "whole ends", "ia3", "loha"))
    ),
]


def policy_for(device: str, **changes: object) -> Policy:
    small = {"shares_memory": device == "cpu", "shard_nbytes": 4096}
    return Policy(**{**small, **changes})  # type: ignore[arg-type]


@pytest.mark.few(8)
@pytest.mark.parametrize(("family", "method", "device", "activations"), CASES)
def test_loss_and_every_gradient_equal_pefts(family: str, method: str, device: str, activations: str) -> None:
    model = adapted(family, method)
    assert_true(model, device, activations)


def assert_true(model: peft.PeftModel, device: str, activations: str, tolerance: float = TOLERANCE) -> None:
    loss, expected = true_gradients(model)
    assert expected
    policy = policy_for(device, activations=activations)
    with Engine.from_model(model, device, numerics=NUMERICS, policy=policy, verify=False) as engine:
        found = engine.gradients(unequal_batches())
        assert engine.evaluate(unequal_batches()) == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys()
    floor = FLOOR * max(float(value.norm()) for value in expected.values())
    errors = {n: float((found[n] - value).norm()) / max(float(value.norm()), floor) for n, value in expected.items()}
    assert not [name for name, error in errors.items() if not error < tolerance]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["bamba", "deepseek_v3", "gpt_oss"])
def test_hybrid_and_latent_attention_models_match_peft(kind: str) -> None:
    model = stock_model(tiny_config(kind), 0)
    for device, activations in DEVICES:
        assert_true(adapted(copy.deepcopy(model)), device, activations, 1e-5)


def test_in_bfloat16_gradients_are_those_of_peft_in_bfloat16() -> None:
    model = adapted("llama")
    _, exact = true_gradients(model)
    with Engine.from_model(model, precision="bf16", verify=False) as engine:
        found = engine.gradients(unequal_batches())
    _, rounded = true_gradients(model.to(torch.bfloat16))
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert relative_error(found[name], value) < max(0.02, 2 * relative_error(rounded[name].float(), value)), name


def test_the_base_is_unchanged_and_the_adapter_matches_plain_pytorch() -> None:
    model = adapted("qwen3-moe")
    base = model.get_base_model()
    plain = torch.optim.AdamW([p for p in base.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0, eps=1e-6)
    before = {name: each.detach().clone() for name, each in base.named_parameters()}
    optimizer = AdamW(lr=1e-2, weight_decay=0.0, eps=1e-6, betas=(0.9, 0.999))
    with Engine.from_model(model, numerics=NUMERICS, optimizer=optimizer, max_grad_norm=None, verify=False) as engine:
        for _ in range(5):
            engine.step(unequal_batches())
            _, gradients = true_gradients(model)
            for name, each in base.named_parameters():
                each.grad = gradients.get(name)
            plain.step()
        after = engine.master_weights()
    for name, each in base.named_parameters():
        if each.requires_grad:
            assert relative_error(after[name], each.detach()) < 1e-4, name
            assert not torch.equal(after[name], before[name])
        else:
            assert torch.equal(after[name], before[name])


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["lora", "dora", "loha"])
def test_dropout_is_replayed_in_recomputation(method: str) -> None:
    drops = {"module_dropout": 0.5} if method == "loha" else {"lora_dropout": 0.3}
    model, found = adapted("llama", method, **drops), []
    for device, activations in (("cpu", "keep"), ("cpu", "recompute"), ("sim:3", "recompute"), ("sim:4", "keep")):
        policy = policy_for(device, activations=activations)
        with Engine.from_model(model, device, numerics=NUMERICS, policy=policy, verify=False) as engine:
            found.append(engine.gradients(unequal_batches()))
    assert all(equal(found[0], each) for each in found[1:])
    _, without = true_gradients(adapted("llama", method))
    assert any(relative_error(found[0][name], without[name]) > 0.01 for name in without), "nothing has been dropped"


def test_architectures_are_verified_and_remembered_with_their_adapter(tmp_path: object) -> None:
    model = adapted("llama", "lora", lora_dropout=0.1)
    with Engine.from_model(model) as engine:
        assert engine.checked.state in ("checked", "remembered")
    with Engine.from_model(adapted("llama", "lora", lora_dropout=0.1)) as engine:
        assert engine.checked.state == "remembered"


def test_adapters_added_by_transformers_train() -> None:
    model = tiny_model()
    model.add_adapter(config_of("lora"))
    with Engine.from_model(model, verify=False) as engine:
        assert engine.structure.trained_numel == sum(p.numel() for p in model.parameters() if p.requires_grad)
        engine.step(unequal_batches())


def test_additional_adapters_are_refused_by_name() -> None:
    model = adapted()
    model.add_adapter("other", config_of("lora"))
    with pytest.raises(ModelError, match=r"has 2 adapters \(default, other\); keep one"):
        Engine.from_model(model)


def test_merged_and_disabled_adapters_are_refused() -> None:
    model = adapted()
    model.merge_adapter()
    with pytest.raises(ModelError, match="its adapter is merged into the base; call unmerge_adapter"):
        Engine.from_model(model)
    model.unmerge_adapter()
    model.base_model.disable_adapter_layers()
    with pytest.raises(ModelError, match="its adapter is disabled; call enable_adapter_layers"):
        Engine.from_model(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PROMPT_TUNING adds learned"),
        (lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PREFIX_TUNING adds learned"),
        (lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "P_TUNING adds learned"),
        (lambda: peft.AdaLoraConfig(total_step=9, target_modules=["q_proj"]), "ADALORA changes its ranks"),
        (lambda: config_of("lora", alora_invocation_tokens=[5]), "aLoRA starts after tokens that are searched for"),
        (lambda: config_of("lora", velora_config=peft.VeloraConfig()), "VeLoRA keeps an average over its first batch"),
        (lambda: peft.ShiraConfig(r=4, target_modules=["q_proj"]), "SHIRA has not been compared"),
    ],
)
def test_unsupported_adapter_methods_are_refused_by_name(config: object, message: str) -> None:
    model = peft.get_peft_model(tiny_model(), config())  # type: ignore[operator]
    with pytest.raises(
        ModelError, match=rf"adapter: {message}.*cannot stream; (use LoRA|leave \w+ out of its config)"
    ) as refusal:
        Engine.from_model(model)
    try:
        model.merge_and_unload()
    except (AttributeError, NotImplementedError):
        assert "merge it with peft" not in str(refusal.value)
    else:
        assert "merge it with peft" in str(refusal.value)


def test_other_trainable_weights_beside_an_adapter_are_refused() -> None:
    model = adapted()
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"model\.norm\.weight train too, and the adapter's file has no place"):
        Engine.from_model(model)


def test_quantized_bases_are_refused_with_an_alternative() -> None:
    model = adapted()
    model.get_base_model().quantization_method = "bitsandbytes"
    with pytest.raises(ModelError, match=r"its base is quantized \(QLoRA\); load it in bfloat16: .* 2 bytes"):
        Engine.from_model(model)


def test_units_lay_out_the_adapter_before_the_base() -> None:
    ported = port_model(adapted().get_base_model(), torch.bfloat16)
    for unit in ported.structure.units[1:-1]:
        kinds = [param.trainable for param in unit.params]
        assert kinds == sorted(kinds, reverse=True)
        assert all(param.trainable == ("lora_" in param.name) for param in unit.params)


def test_a_frozen_base_takes_two_bytes_per_parameter() -> None:
    model = tiny_model(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_hidden_layers=4)
    with Engine.from_model(adapted(model, r=1, target_modules=["q_proj"]), precision="bf16", verify=False) as engine:
        base = engine.structure.numel - engine.structure.trained_numel
        engine.step(unequal_batches())
        uses = ("weights", "optimizer state", "gradients")
        held = {
            use: nbytes
            for (tier, use), nbytes in engine.diagnostics.memory_table().items()
            if tier == "host" and use in uses
        }
        assert held.keys() == {*uses}
        assert sum(held.values()) < 2.05 * base
