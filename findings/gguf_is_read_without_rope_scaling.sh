#!/usr/bin/env bash
# transformers reads a GGUF file of a long-context model without the scaling of its rotary embeddings.
#
# Versions: transformers 5.23.0, gguf 0.19.0, torch 2.13.0, accelerate 1.15.0.
# Expected: a Llama whose GGUF file holds linear or YaRN scaling (`llama.rope.scaling.*`), or Llama 3.1's factors of frequencies (the
# tensor `rope_freqs.weight`), is the model that was written, as it is without scaling.
# Seen: all three are read with `rope_type: default` and without a warning; the logits are those of the same weights without any scaling. Of the
# keys, only gpt-oss's are read; the tensor is left out.
# Cost: a Llama 3.1 or a YaRN model that is loaded from GGUF, fine-tuned and saved is another model beyond its original length, and its
# config.json says that it never had a scaling.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0

cd "$work"
cat > seen.py <<'PYTHON'
import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, HEADS, LAYERS, THETA, ORIGINAL, LENGTH = 32, 4, 2, 10000.0, 32, 128
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}


def model(kind):
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": THETA, **SCALINGS[kind]}
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=LENGTH, rope_parameters=rope, initializer_range=0.3)).eval()


def write(stock, kind, path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(64)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(64)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(stock.config.rms_norm_eps)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(THETA)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(SCALINGS[kind]["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
    if kind == "llama3":
        unscaled = 1 / THETA ** (torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight"
        writer.add_tensor(name, (unscaled / stock.model.rotary_emb.inv_freq).numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, weight in stock.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # GGUF interleaves the two halves of each head
            weight = weight.reshape(HEADS, 2, -1, WIDTH).transpose(1, 2).reshape(weight.shape)
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ids = torch.randint(0, 64, (1, LENGTH))
unscaled = model("default")
for kind in SCALINGS:
    stock = model(kind)
    write(stock, kind, f"{kind}.gguf")
    read = LlamaForCausalLM.from_pretrained(".", gguf_file=f"{kind}.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        written, plain, seen = (one(ids).logits for one in (stock, unscaled, read))
    off, off_plain = (seen - written).abs().max().item(), (seen - plain).abs().max().item()
    print(f"{kind}: read as {read.config.rope_parameters}; logits {off:.1e} from the written model's, "
          f"{off_plain:.1e} from those of the same weights without scaling")
    assert read.config.rope_parameters["rope_type"] == "default" and off_plain == 0, "this has changed"
    assert off == 0 if kind == "default" else off > 0.1, "this has changed"
PYTHON
TQDM_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python seen.py
