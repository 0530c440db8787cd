#!/usr/bin/env bash
# Nemotron-H and Zamba2 give other logits with a cache than in one forward, which raises small time steps to a floor; the cache does not.
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: one forward of a text gives the logits of a forward for each token with a cache, as it does for Bamba, with the same layers of Mamba2.
# Limits of the time steps are those of `time_step_limit` in config.json, (0, inf) by default: none.
# Seen: these two take `time_step_min`, 0.001, with which initial values are drawn, for the least step. In a forward of several tokens (training, a
# loss, the prompt of an answer) shorter steps are raised to it; for single tokens with a cache they are not. Nemotron-H's `time_step_limit` is
# not read. Nothing is said. (Pull request 48989, open when this was written, measures the floor on Nemotron 3 Nano.)
# Cost: a short step is a long memory, so what a model was trained to remember fades sooner, and steps that are raised have no gradient; in the fresh
# layers here they are a seventh of all. Fine-tuning adapts a model to the floor, an answer goes on without it, and in reinforcement learning
# the probabilities of sampling and those of the loss come from two models.
# MegaTrain runs the forward of the installed transformers, so it computes what that version computes.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import logging

import torch
from transformers import BambaConfig, BambaForCausalLM, NemotronHConfig, NemotronHForCausalLM, Zamba2Config, Zamba2ForCausalLM

logging.disable(logging.WARNING)  # of kernels that are not installed
COMMON = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
          "initializer_range": 0.25}
NEMOTRON = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "head_dim": 16, "mamba_num_heads": 16,
            "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
ZAMBA = {"num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 16, "mamba_headdim": 8,
         "mamba_d_state": 16, "mamba_ngroups": 2, "chunk_size": 16}
BAMBA = {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 16,
         "mamba_n_groups": 2, "mamba_chunk_size": 16}
FAMILIES = {
    "Nemotron-H": (NemotronHForCausalLM, NemotronHConfig, NEMOTRON),
    "Zamba2": (Zamba2ForCausalLM, Zamba2Config, ZAMBA),
    "Bamba": (BambaForCausalLM, BambaConfig, BAMBA),
}
UNLIMITED = (0.0, float("inf"))


@torch.no_grad()
def off(model, ids):
    """How far the logits of one forward are from those of a forward for each token, in parts of the largest."""
    cache, logits = None, []
    for place, token in enumerate(ids.split(1, dim=1)):
        output = model(token, past_key_values=cache, use_cache=True, position_ids=torch.tensor([[place]]))
        cache = output.past_key_values
        logits.append(output.logits)
    whole = model(ids, use_cache=False).logits
    return ((whole - torch.cat(logits, dim=1)).abs().max() / whole.abs().max()).item()


ids = torch.randint(0, 64, (1, 300), generator=torch.Generator().manual_seed(1))
for name, (kind, config, fields) in FAMILIES.items():
    torch.manual_seed(0)
    model = kind(config(**COMMON | fields)).eval()
    mixers = [module for module in model.modules() if hasattr(module, "dt_bias")]
    limit, steps = mixers[0].time_step_limit, []
    bias = mixers[0].dt_bias
    watch = mixers[0].in_proj.register_forward_hook(lambda _, __, out: steps.append(out[..., -len(bias):] + bias))
    fresh = off(model, ids)
    watch.remove()
    short = (torch.nn.functional.softplus(torch.cat(steps, dim=1)) < 0.001).float().mean().item()
    with torch.no_grad():
        for mixer in mixers:
            mixer.dt_bias.fill_(-9.2)  # steps of about 0.0001: heads with a long memory
    slow = off(model, ids)
    for mixer in mixers:
        mixer.time_step_limit = UNLIMITED
    unlimited = off(model, ids)
    print(f"{name}: config's time_step_limit {getattr(model.config, 'time_step_limit', None)}, applied to a forward {limit}; "
          f"{short:.0%} of the steps of a fresh layer are below 0.001")
    print(f"  a forward is off one for each token by {fresh:.0e}; with long memories by {slow:.0e}; then without a limit by {unlimited:.0e}")
    assert limit == ((0.001, float("inf")) if name != "Bamba" else UNLIMITED), "this has changed"
    assert unlimited < 1e-3 and (fresh > 5e-3 and slow > 0.05 if name != "Bamba" else max(fresh, slow) < 1e-3), "this has changed"
PYTHON
