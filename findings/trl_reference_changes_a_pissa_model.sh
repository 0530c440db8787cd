#!/usr/bin/env bash
# TRL's trainers change the model of a trained PiSSA or OLoRA adapter when they make its reference, before the first step.
#
# Versions: trl 1.16.0, peft 0.21.2, transformers 5.23.0, torch 2.13.0, datasets 5.2.0, accelerate 1.15.0.
# Expected: a trainer that is given an adapted model, as supervised training has left it, begins with that model. So it is for plain LoRA.
# Seen: the reference is a second adapter with the first one's config, and making a PiSSA or OLoRA adapter takes its initial value out of
# the base. Loading had taken it out once; now it is out twice, below both adapters. Policy and reference are the same wrong model, so that
# rewards and KL terms begin at 0 and look right. It is so in DPO, KTO, GRPO and RLOO.
# Cost: the run trains another model than the one that was given, here by more than a third of what the adapter does. What it saves is
# read over a base from which the value is out once: the model that is loaded is not the one that was trained. Nothing is said.
# MegaTrain makes no second adapter: the reference is what the model itself says before the first step.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2 trl==1.16.0 \
  datasets==5.2.0 accelerate==1.15.0

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer

LETTERS = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(70, 90)[None]
PAIRS = [{"prompt": f"is it {i}", "chosen": " yes indeed" * (i % 3 + 1), "rejected": " never" * (i % 2 + 1)} for i in range(8)]
ANSWERS = [{"prompt": pair["prompt"], "completion": pair["chosen"], "label": i % 2 == 0} for i, pair in enumerate(PAIRS)]
PROMPTS = [{"prompt": pair["prompt"]} for pair in PAIRS]
SAMPLES = {"beta": 0.1, "num_generations": 2, "max_completion_length": 8}
TRAINERS = {
    "DPO": (DPOTrainer, DPOConfig, PAIRS, {}, "rewards/chosen"),
    "KTO": (KTOTrainer, KTOConfig, ANSWERS, {}, "rewards/chosen"),
    "GRPO": (GRPOTrainer, GRPOConfig, PROMPTS, SAMPLES, "kl"),
    "RLOO": (RLOOTrainer, RLOOConfig, PROMPTS, SAMPLES, "kl"),
}


def tokenizer():
    letters = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")


def base():
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **special, vocab_size=len(LETTERS)))


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def loaded(folder):
    return PeftModel.from_pretrained(base(), folder, is_trainable=True)


def save_trained(start):
    """Write an adapter whose weights have been changed as by training; return the model's logits."""
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=start))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained("adapter")
    return logits(model)


def run_of(name, **more):
    trainer, config, rows, options, _ = TRAINERS[name]
    options = {"per_device_train_batch_size": 4, "save_strategy": "no", "logging_steps": 1, **options, **more}
    arguments = config("out", **options, bf16=False, use_cpu=True, report_to=[], disable_tqdm=True)
    lengths = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]} if options.get("beta") else {}
    return trainer(
        loaded("adapter"), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **lengths
    )


plain = logits(base())
for start in (True, "pissa", "olora"):
    saved = save_trained(start)
    effect = (saved - plain).norm()
    assert (logits(loaded("adapter")) - saved).norm() < 1e-4 * effect
    for name, (*_, told) in TRAINERS.items():
        run = run_of(name, max_steps=1, learning_rate=0.0)
        changed = ((logits(run.model) - saved).norm() / effect).item()
        run.train()
        value = run.state.log_history[0][told]
        print(f"init_lora_weights={start}, {name}: made, the trainer's model is off by {changed:.2g} of the adapter's effect; {told} {value:.2g}")
        assert (changed > 0.3 if isinstance(start, str) else changed == 0) and value == 0, "this has changed"
    run = run_of("DPO", max_steps=20, learning_rate=1e-3)
    run.train()
    run.save_model("result")
    apart = ((logits(loaded("result")) - logits(run.model)).norm() / effect).item()
    print(f"init_lora_weights={start}: trained by DPO, saved and loaded, it is off by {apart:.2g}")
    assert apart > 0.3 if isinstance(start, str) else apart < 1e-4, "this has changed"
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
