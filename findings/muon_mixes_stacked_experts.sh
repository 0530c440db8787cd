#!/usr/bin/env bash
# Muon of pytorch_optimizer and of heavyball orthogonalizes the stacked experts of a layer as one matrix, not expert by expert.
#
# Versions: torch 2.13.0, transformers 5.17.0, pytorch_optimizer 4.1.0, heavyball 3.2.1, muon-optimizer 0.1.0.
# Expected: transformers 5 holds the experts of a layer as one parameter of experts x rows x columns. Muon is defined for matrices, so a
# stack is refused (torch.optim.Muon does) or updated expert by expert (muon-optimizer does), with the bits of separate matrices.
# Seen: both flatten the stack to a matrix with a row for each expert. An expert's update then depends on the gradients of the other experts
# (pytorch_optimizer: by 60% of its length, heavyball: by 4%) and is an eighth to a fifth as long as the update of the same matrix alone. Its
# largest singular value is eleven times the smallest, where it is less than twice for the matrix alone: a scaled gradient, not an orthogonal matrix.
# Cost: the same mixture trained with the same optimizer and rate is another run under transformers 5 than under transformers 4, which had a
# matrix for each expert; experts learn several times slower than the rate says, and nothing is said.
# MegaTrain has no Muon yet; when it has, it will orthogonalize experts one by one.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.17.0 pytorch_optimizer==4.1.0 heavyball==3.2.1 muon-optimizer==0.1.0 numpy

cd "$work"
cat > seen.py <<'PYTHON'
import heavyball
import muon
import pytorch_optimizer
import torch
from transformers import MixtralConfig, MixtralForCausalLM

heavyball.utils.compile_mode = None
OPTIMIZERS = {
    "muon-optimizer": lambda p: muon.SingleDeviceMuon([p], lr=1.0),
    "pytorch_optimizer": lambda p: pytorch_optimizer.Muon([{"params": [p], "use_muon": True, "lr": 1.0}]),
    "heavyball": lambda p: heavyball.Muon([p], lr=1.0, weight_decay=0.0, warmup_steps=0),
}


def update(name: str, gradient: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = OPTIMIZERS[name](parameter)
    parameter.grad = gradient.clone()
    optimizer.step()
    return -parameter.detach()


def spread(matrix: torch.Tensor) -> float:
    values = torch.linalg.svdvals(matrix)
    return float(values[0] / values[-1])


torch.manual_seed(0)
config = MixtralConfig(
    hidden_size=64,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=128,
)
model = MixtralForCausalLM(config)
tokens = torch.randint(0, 128, (8, 64))
model(input_ids=tokens, labels=tokens).loss.backward()
stack = model.model.layers[0].mlp.experts.gate_up_proj
assert stack.ndim == 3, stack.shape
gradient = stack.grad.float()
others = gradient.clone()
others[1:] *= torch.linspace(0.1, 3.0, gradient[0].numel()).view_as(gradient[0])

seen = {}
for name in OPTIMIZERS:
    stacked, alone = update(name, gradient)[0], update(name, gradient[0])
    moved = (update(name, others)[0] - stacked).norm() / stacked.norm()
    seen[name] = (float(moved), float(stacked.norm() / alone.norm()), spread(stacked), spread(alone))
    print(f"{name}: the other experts move the update by {moved:.3f}; length {seen[name][1]:.3f} of that of the matrix alone;")
    print(f"    largest singular value {seen[name][2]:.1f} times the smallest, {seen[name][3]:.1f} times for the matrix alone")

try:
    torch.optim.Muon([stack])
    raise SystemExit("torch.optim.Muon takes a stack now")
except ValueError as error:
    print(f"torch.optim.Muon: {error}")

moved, length, _, _ = seen["muon-optimizer"]
assert moved == 0 and abs(length - 1) < 0.05, seen
for name in ("pytorch_optimizer", "heavyball"):
    moved, length, stacked, alone = seen[name]
    assert moved > 0.02 and length < 0.5 and stacked > 1.5 * alone, (name, seen)
PYTHON
"$work/venv/bin/python" -W ignore seen.py
