#!/usr/bin/env bash
# Jamba, Zamba, Mamba and Falcon-Mamba forget what is in a cache as soon as they are given more than one token with it.
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: `generate(chat, past_key_values=cache of the turns before)` answers as `generate(chat)` does, and a text in two parts has the logits of
# the whole, as for Bamba and Mamba2 (since pull requests 46084 and 46741).
# Seen: layers of the first Mamba go on from a cached state with single tokens only. Several tokens begin with an empty state, which then replaces
# the cached one. Attention, in Jamba and Zamba, goes on to see the whole cache. Nothing is said. `prefill_chunk_size` gives such parts, too.
# Cost: chats and tool calls of several turns, in evaluation and in the rollouts of reinforcement learning, are answered from the last turn and what
# attention adds. The text is fluent, and the first turn, which tests look at, is right.
# MegaTrain gives whole texts to `generate`, which makes its own cache.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import logging

import torch
from transformers import (
    BambaConfig, BambaForCausalLM, FalconMambaConfig, FalconMambaForCausalLM, JambaConfig, JambaForCausalLM, Mamba2Config,
    Mamba2ForCausalLM, MambaConfig, MambaForCausalLM, ZambaConfig, ZambaForCausalLM,
)

logging.disable(logging.WARNING)  # of kernels that are not installed
COMMON = {"vocab_size": 64, "hidden_size": 64, "initializer_range": 0.25, "pad_token_id": None, "eos_token_id": None}
ATTENTION = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
BAMBA = {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 16,
         "mamba_n_groups": 2, "mamba_chunk_size": 16}
HYBRID = {"num_hidden_layers": 4, "mamba_d_state": 16, "mamba_dt_rank": 4, "use_mamba_kernels": False}
JAMBA = {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 2}
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid"] * 2}
MAMBA = {"num_hidden_layers": 2, "state_size": 16}
FAMILIES = {
    "Bamba": (BambaForCausalLM, BambaConfig, ATTENTION | BAMBA),
    "Jamba": (JambaForCausalLM, JambaConfig, ATTENTION | HYBRID | JAMBA),
    "Zamba": (ZambaForCausalLM, ZambaConfig, ATTENTION | HYBRID | ZAMBA),
    "Mamba2": (Mamba2ForCausalLM, Mamba2Config, MAMBA | {"num_heads": 16, "head_dim": 8, "n_groups": 2, "chunk_size": 16}),
    "Mamba": (MambaForCausalLM, MambaConfig, MAMBA | {"time_step_rank": 4}),
    "Falcon-Mamba": (FalconMambaForCausalLM, FalconMambaConfig, MAMBA | {"time_step_rank": 4}),
}
FORGETFUL = ("Jamba", "Zamba", "Mamba", "Falcon-Mamba")
HALF, NEW = 20, 16


@torch.no_grad()
def off(model, ids, tokens):
    """How far the logits of a text that is given in parts with a cache are from those of the whole, in parts of the largest."""
    cache, parts = {}, []
    for start in range(0, ids.shape[1], tokens):
        where = torch.arange(start, start + tokens)[None]
        output = model(ids[:, start:start + tokens], position_ids=where, use_cache=True, **cache)
        cache = {name: output[name] for name in ("past_key_values", "cache_params") if name in output}
        parts.append(output.logits)
    whole = model(ids, use_cache=False).logits
    return ((torch.cat(parts, dim=1) - whole).abs().max() / whole.abs().max()).item()


ids = torch.randint(3, 64, (1, 2 * HALF), generator=torch.Generator().manual_seed(1))
for name, (kind, config, fields) in FAMILIES.items():
    torch.manual_seed(0)
    model = kind(config(**COMMON | fields)).eval()
    single, half = off(model, ids, 1), off(model, ids, HALF)
    print(f"{name}: off the whole text by {single:.0e} token by token, by {half:.0e} in two parts")
    assert single < 1e-3 and (half > 0.05 if name in FORGETFUL else half < 1e-3), "this has changed"
    if name not in ("Bamba", "Jamba", "Zamba"):
        continue  # generate takes no such cache for models without attention
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    turn = model.generate(ids[:, :HALF], **options)
    chat = torch.cat([turn.sequences, ids[:, HALF:HALF + 4]], dim=1)
    anew = model.generate(chat, **options).logits[0]
    kept = model.generate(chat, past_key_values=turn.past_key_values, **options).logits[0]
    answer = ((kept - anew).abs().max() / anew.abs().max()).item()
    print(f"  generate: a second answer with the cache of the first begins with logits that are off by {answer:.0e}")
    assert answer > 0.05 if name in FORGETFUL else answer < 1e-3, "this has changed"
PYTHON
