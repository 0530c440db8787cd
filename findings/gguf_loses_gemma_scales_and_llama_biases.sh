#!/usr/bin/env bash
# transformers reads GGUF files of Gemma 2 27B and Gemma 3 27B with the wrong scale of attention, and those of Llamas with biases without them.
#
# Versions: transformers 5.23.0, gguf 0.19.0, torch 2.13.0, accelerate 1.15.0.
# Expected: the model that was written, as it is for the other sizes of Gemma and for Llama without biases, or a report of what is not read.
# Seen: Gemma's config has a number of its own for the scale, `query_pre_attn_scalar`: 256 in the class's default and in most sizes, 144 and 168 in
# the two of 27B, the hidden size over the heads. llama.cpp takes it from the sizes of these two, and so their files need not state it. transformers keeps
# the class's default: scores of attention are 0.75 (Gemma 2) or 0.81 (Gemma 3) of what they should be. `gemma2.final_logit_softcapping` and
# `gemma2.attn_logit_softcapping`, which the file does state, are not read either. Llama's biases are in the file, too, and are left out, since
# `attention_bias` stays false. The lists of unexpected and missing keys are empty in all cases.
# Cost: who fine-tunes or evaluates what only GGUF is at hand for, or merges from it, works with a model that is worse than the one of the file, and
# saves a config.json with the wrong scale. It speaks, so that the quantization is blamed.
# MegaTrain reads no GGUF. (`gguf_is_read_without_rope_scaling.sh` has a number that the file does state.)

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0

cd "$work"
cat > seen.py <<'PYTHON'
import gguf
import torch
from transformers import (
    AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM,
)

HEADS, KEYS = 2, 1
COMMON = {"vocab_size": 64, "hidden_size": 36, "intermediate_size": 48, "num_attention_heads": HEADS, "num_key_value_heads": KEYS,
          "max_position_embeddings": 128, "initializer_range": 0.2, "rms_norm_eps": 2**-20}
GEMMA = {"head_dim": 8, "sliding_window": 16}
OF_27B = COMMON["hidden_size"] // HEADS
CASES = {
    "Gemma 2 of 2B": (Gemma2ForCausalLM, Gemma2Config(**COMMON | GEMMA, num_hidden_layers=26)),
    "Gemma 2 of 27B": (Gemma2ForCausalLM, Gemma2Config(**COMMON | GEMMA, num_hidden_layers=46, query_pre_attn_scalar=OF_27B)),
    "Gemma 2, other caps": (Gemma2ForCausalLM, Gemma2Config(**COMMON | GEMMA, num_hidden_layers=26, final_logit_softcapping=3.0,
                                                             attn_logit_softcapping=5.0)),
    "Gemma 3 of 4B": (Gemma3ForCausalLM, Gemma3TextConfig(**COMMON | GEMMA, num_hidden_layers=34)),
    "Gemma 3 of 27B": (Gemma3ForCausalLM, Gemma3TextConfig(**COMMON | GEMMA, num_hidden_layers=62, query_pre_attn_scalar=OF_27B)),
    "Llama": (LlamaForCausalLM, LlamaConfig(**COMMON, num_hidden_layers=2)),
    "Llama with biases": (LlamaForCausalLM, LlamaConfig(**COMMON, num_hidden_layers=2, attention_bias=True)),
}
RIGHT = ("Gemma 2 of 2B", "Gemma 3 of 4B", "Llama")
ARCHITECTURES = {"gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3_text": gguf.MODEL_ARCH.GEMMA3, "llama": gguf.MODEL_ARCH.LLAMA}


def write(model, path):
    config, kind = model.config, ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    gemma = kind != gguf.MODEL_ARCH.LLAMA
    if gemma:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    if kind == gguf.MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if gemma and "norm" in name:
            weight = weight + 1  # as GGUF holds Gemma's
        elif not gemma and ("q_proj" in name or "k_proj" in name):  # GGUF interleaves the two halves of each head
            heads = HEADS if "q_proj" in name else KEYS
            weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0))
for name, (kind, config) in CASES.items():
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.1)
    write(model, "model.gguf")
    read, report = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32, output_loading_info=True)
    with torch.no_grad():
        wanted, seen = model(ids).logits, read.eval()(ids).logits
    off = ((seen - wanted).abs().max() / wanted.abs().max()).item()
    fields = ("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "attention_bias")
    other = {field: (getattr(config, field), getattr(read.config, field)) for field in fields if hasattr(config, field)}
    print(f"{name}: logits off by {off:.0e} of the largest; written and read:", {k: v for k, v in other.items() if v[0] != v[1]})
    assert not any(report.values()), "this has changed: something is reported"
    assert off == 0 if name in RIGHT else off > 0.01, "this has changed"
PYTHON
TQDM_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
