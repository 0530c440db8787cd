#!/usr/bin/env bash
# Bamba and MiniMax, called token by token with a cache and without `position_ids`, give every new token the position 0.
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: `model(token, past_key_values=cache)` goes on where the cache ends, as for Falcon-H1, Qwen3-Next and others that mix attention and a state.
# Seen: without `position_ids` Bamba counts from 0 in each call. MiniMax asks the cache for the length of its first layer; where that is one of
# linear attention, as in MiniMax-Text-01 (each eighth layer has full attention), it is 0. With the class's default order, full attention first, all
# is well. Nothing is said. `generate` gives positions itself, and is right.
# Cost: a sampler of one's own, a server, a score of several continuations of one prompt: the prompt is read right, and what follows has no order. The
# text begins well, and a test by `generate` passes.
# MegaTrain generates by transformers' `generate`, which gives positions.

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
    BambaConfig, BambaForCausalLM, FalconH1Config, FalconH1ForCausalLM, MiniMaxConfig, MiniMaxForCausalLM, Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

logging.disable(logging.WARNING)  # of kernels that are not installed
COMMON = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
          "initializer_range": 0.25}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
NEXT = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2}
MINIMAX = {"num_local_experts": 4, "block_size": 16}
LINEAR, FULL = "linear_attention", "full_attention"
FAMILIES = {
    "Falcon-H1": (FalconH1ForCausalLM, FalconH1Config, {"num_hidden_layers": 2, "mamba_d_ssm": 128, **MAMBA}),
    "Qwen3-Next": (Qwen3NextForCausalLM, Qwen3NextConfig, NEXT),
    "MiniMax, full attention first": (MiniMaxForCausalLM, MiniMaxConfig, MINIMAX | {"layer_types": [FULL, LINEAR], "num_hidden_layers": 2}),
    "MiniMax, full attention last": (MiniMaxForCausalLM, MiniMaxConfig, MINIMAX | {"layer_types": [LINEAR, FULL], "num_hidden_layers": 2}),
    "Bamba": (BambaForCausalLM, BambaConfig, {"num_hidden_layers": 2, "attn_layer_indices": [1], **MAMBA}),
}
NEW = 24


@torch.no_grad()
def continued(model, ids, with_positions):
    """The loop that the documentation of caches shows."""
    cache, given, answer = None, ids, []
    for _ in range(NEW):
        seen = ids.shape[1] + len(answer) - given.shape[1]
        where = {"position_ids": torch.arange(seen, seen + given.shape[1])[None]} if with_positions else {}
        output = model(given, past_key_values=cache, use_cache=True, **where)
        cache, given = output.past_key_values, output.logits[:, -1:].argmax(-1)
        answer.append(given.item())
    return answer


ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(1))
for name, (kind, config, fields) in FAMILIES.items():
    torch.manual_seed(0)
    model = kind(config(**COMMON | fields)).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False, use_cache=False)[0, ids.shape[1]:].tolist()
    cached = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1]:].tolist()
    alike = {given: sum(map(int.__eq__, continued(model, ids, given), wanted)) for given in (False, True)}
    print(f"{name}: {alike[False]} of {NEW} tokens of the loop are those of a model without a cache; with position_ids {alike[True]}; "
          f"generate {sum(map(int.__eq__, cached, wanted))}")
    assert alike[True] == NEW and cached == wanted, "this has changed"
    assert alike[False] < NEW // 2 if name in ("Bamba", "MiniMax, full attention last") else alike[False] == NEW, "this has changed"
PYTHON
