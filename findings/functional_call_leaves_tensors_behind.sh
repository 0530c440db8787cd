#!/usr/bin/env bash
# torch.func.functional_call leaves the given tensors in a module that is registered at two places.
#
# Versions: torch 2.13.0.
# Expected: the parameters are replaced for the call, and the module has its own afterwards, as the documentation of functional_call says.
# Seen: with one module under two names (a layer that a model uses twice), the module keeps the given tensors; they are no
# parameters of an optimizer that was made before, and the next plain call computes with them. No warning. With the
# parameter itself under two names, and the modules apart, all is put back.
# Cost: an ensemble, a meta-learning step or per-sample gradients over such a model change the model that they read.
# MegaTrain refuses a user's model with one module at two places, and swaps parameters itself for a layer's call.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy

cd "$work"
cat > seen.py <<'PYTHON'
import torch
from torch import nn
from torch.func import functional_call


def changed(model):
    before = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    given = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    functional_call(model, given, (torch.ones(1, 4),))
    after = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    return sorted(name for name in before | after if before.get(name) != after.get(name))


layer = nn.Linear(4, 4)
twice = nn.Sequential(layer, nn.ReLU(), layer)
tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
tied[2].weight = tied[0].weight
optimizer = torch.optim.SGD(twice.parameters(), 0.1)
seen = {"one module at two places": changed(twice), "one parameter in two modules": changed(tied)}
for what, names in seen.items():
    print(f"{what}: other tensors after the call at {', '.join(names) or 'no place'}")
print("the layer's output after it is", layer(torch.ones(1, 4)).abs().max().item(), "at most, since its weights are the zeros that were given")
assert seen["one module at two places"] and not seen["one parameter in two modules"], "this has changed"
assert not any(layer.weight is parameter for group in optimizer.param_groups for parameter in group["params"])
assert not layer.weight.any()
PYTHON
OMP_NUM_THREADS=1 venv/bin/python seen.py
