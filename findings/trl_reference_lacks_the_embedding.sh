#!/usr/bin/env bash
# The reference that TRL's trainers make of a trained adapter lacks what the adapter has learned of the embedding.
#
# Versions: trl 1.16.0, peft 0.21.2, transformers 5.23.0, torch 2.13.0, datasets 5.2.0, accelerate 1.15.0.
# Expected: preferences are trained over an adapter that supervised training has made, and the reference is a copy of it: before the first
# step the policy is its reference, all rewards and KL terms are 0, and DPO's loss is log 2. So it is for LoRA and DoRA over layers.
# Seen: the copy takes the parameters with `.default.` in their names, but names of PEFT that end in `.default` are not among them: LoRA over
# an embedding, single rows of it (`trainable_token_indices`), and all of IA3, VeRA, LoHa, LoKr and SHiRA. The reference has their
# initial values. It is so in DPO, KTO, GRPO and RLOO.
# Cost: an adapter over "all-linear" and the embedding, or one that taught a chat template's new tokens, is held to a model that knows half
# of it. The rewards, their margins, and the KL penalty are off from the start, and nothing is said.
# MegaTrain's reference is what the model itself says before the first step.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2 trl==1.16.0 \
  datasets==5.2.0 accelerate==1.15.0

cd "$work"
cat > seen.py <<'PYTHON'
import math

import torch
from datasets import Dataset
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftModel, ShiraConfig, VeraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer

LETTERS = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TARGETS = ["q_proj", "v_proj"]
METHODS = {
    "LoRA": LoraConfig(r=4, target_modules=TARGETS),
    "DoRA": LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "LoRA and a whole head": LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "LoRA, embedding too": LoraConfig(r=4, target_modules=[*TARGETS, "embed_tokens"]),
    "LoRA and single rows": LoraConfig(r=4, target_modules=TARGETS, trainable_token_indices=[LETTERS.index("e")]),
    "IA3": IA3Config(target_modules=TARGETS, feedforward_modules=[]),
    "VeRA": VeraConfig(r=4, target_modules=TARGETS),
    "LoHa": LoHaConfig(r=4, target_modules=TARGETS),
    "LoKr": LoKrConfig(r=4, target_modules=TARGETS),
    "SHiRA": ShiraConfig(r=4, target_modules=TARGETS),
}
RIGHT = {"LoRA", "DoRA", "LoRA and a whole head"}
PAIRS = [{"prompt": f"is it {i}", "chosen": " yes indeed" * (i % 3 + 1), "rejected": " never" * (i % 2 + 1)} for i in range(8)]
ANSWERS = [{"prompt": pair["prompt"], "completion": pair["chosen"], "label": i % 2 == 0} for i, pair in enumerate(PAIRS)]
PROMPTS = [{"prompt": pair["prompt"]} for pair in PAIRS]


def tokenizer():
    letters = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")


def base():
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **special, vocab_size=len(LETTERS)))


def save_trained(config):
    """Write an adapter whose weights have been changed as by training."""
    model = get_peft_model(base(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained("adapter")


def first_log(trainer, config, rows, **more):
    """What a trainer logs at its first step, whose rate is 0, and the kinds of parameters that its reference lacks."""
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 0.0, "save_strategy": "no", "logging_steps": 1}
    arguments = config("out", **options, **more, bf16=False, use_cpu=True, report_to=[], disable_tqdm=True)
    model = PeftModel.from_pretrained(base(), "adapter", is_trainable=True)
    lengths = {} if "beta" not in more else {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
    run = trainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **lengths)
    values = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    run.train()
    names = [name for name in values if "default" in name.split(".")]
    lacks = [name for name in names if not torch.equal(values[name], values[name.replace(".default", ".ref")])]
    return run.state.log_history[0], {name.split(".")[-2] for name in lacks}


for name, config in METHODS.items():
    save_trained(config)
    dpo, lacks = first_log(DPOTrainer, DPOConfig, PAIRS)
    kto, lacks_too = first_log(KTOTrainer, KTOConfig, ANSWERS)
    print(f"{name:22} DPO's loss {dpo['loss']:.5f}, rewards of chosen {dpo['rewards/chosen']:.2g}, KTO's {kto['rewards/chosen']:.2g}; other: {lacks}")
    is_right = abs(dpo["loss"] - math.log(2)) < 1e-6 and dpo["rewards/chosen"] == kto["rewards/chosen"] == 0
    assert lacks == lacks_too and is_right is not bool(lacks) and is_right is (name in RIGHT), "this has changed"

for name in ("LoRA", "LoRA, embedding too"):
    save_trained(METHODS[name])
    for trainer, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
        log, _ = first_log(trainer, config, PROMPTS, beta=0.1, num_generations=2, max_completion_length=8)
        print(f"{name:22} {trainer.__name__}: KL of the first step {log['kl']:.2g}")
        assert (log["kl"] == 0) is (name in RIGHT), "this has changed"
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
