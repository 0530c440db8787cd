"""Lists what is fused in the layers of each architecture that the tests compare, and what keeps the library's code.

    python -m bench.fused_architectures [--types NAME ...] [--brief] [--json FILE]

For the twin of a type (`model.tiny`): how many norms, rotary embeddings and gated activations are fused, how many are
not, and the kernels that its layers launch, forward and backward, before and after. Then, in how many types each part
is fused, or is not, and why. Only this list goes by the library's names to find the parts that are not fused. Kernels
are not counted for a type whose layers need more than a batch of text.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from bench.fused_layer import CountKernels
from megatrain.errors import ModelError
from megatrain.model import PortedModel, port_model
from megatrain.model.fuse_layers import GATE, fuse
from megatrain.model.ports import roots_of
from tests.integration.test_architectures import CHOSEN, NOT_COMPARED, OTHERS, config_of, twin

TYPES = [kind for kind in (*CHOSEN, *OTHERS) if kind not in NOT_COMPARED]
TOKENS = 9
PARTS = ("norm", "rotary", "gated")
ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""Modules that define activations."""


def cover(kind: str) -> dict[str, Any]:
    """For a model type, what is `fused` (part -> count), what is `left` ("part: why" -> count), and `launches`, the
    kernels of all layers before and after. Raises `ModelError` if no layer can be run in bfloat16."""
    model = twin(config_of(kind))
    ported = port_model(model, torch.bfloat16)
    before = launches(ported, dict(model.named_parameters()))
    fused, left = Counter[str](), Counter[str]()
    for layer in roots_of(ported)[1:]:
        changed = fuse(layer)
        fused.update(next(part for part in PARTS if part in what) for what in changed.values())
        left.update(": ".join(why) for why in unfused(layer, changed))
    after = launches(ported, dict(model.named_parameters()))
    return {"type": kind, "fused": dict(fused), "left": dict(left), "launches": [before, after]}


def unfused(layer: nn.Module, changed: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(part, why) of each part of a layer that is not among those that were changed."""
    for name, module in layer.named_modules():
        kind, children = type(module), list(module.children())
        if not children and "norm" in kind.__name__.lower() and name not in changed:
            yield "norm", why_norm(module)
        function = inspect.unwrap(getattr(module.forward, "__func__", kind.forward))
        for called in function.__code__.co_names if isinstance(function, FunctionType) else ():
            known = function.__globals__.get(called)
            if "rot" in called and isinstance(known, FunctionType):
                yield "rotary", ", ".join(inspect.signature(known).parameters)
        acts = any(type(child).__module__ in ACTIVATIONS for child in children)
        if (acts or hasattr(module, GATE)) and name not in changed:
            yield "gated", why_gated(module)


def why_norm(module: nn.Module) -> str:
    if type(module).__module__.startswith("torch."):
        return "PyTorch's own, which is one kernel"
    return "with a gate" if "gate" in inspect.signature(module.forward).parameters else "no formula fits"


def why_gated(module: nn.Module) -> str:
    if hasattr(module, GATE):
        return "in stacked experts"
    if any(parameter.dim() > 2 for parameter in module.parameters()):
        return "in a mixer, or in experts that are called otherwise"
    matrices = [child for child in module.children() if any(each.dim() == 2 for each in child.parameters())]
    return "has no gate" if len(matrices) < 3 else "no formula fits"


def launches(ported: PortedModel, parameters: Mapping[str, Tensor]) -> int | None:
    """Kernels that all layers launch, forward and backward; None if they cannot be called for a batch of text alone."""
    values = {name: value.detach().bfloat16().requires_grad_() for name, value in parameters.items()}
    units, total, made = ported.structure.units, 0, dict[int, Tensor]()
    try:
        with torch.no_grad():
            start = {param.name: values[param.name] for param in units[0].params}
            hidden, calls = ported.prologue(start, {"input_ids": torch.arange(3, 3 + TOKENS)[None]})
        for index, call in enumerate(calls):
            prefix, names = ported.prefix(index), [param.name for param in units[1 + index].params]
            weights = {name.removeprefix(prefix): values[name] for name in names}
            hidden = hidden.detach().requires_grad_()
            with torch.enable_grad(), CountKernels(list(weights.values())) as counting:
                output, new = ported.layer(index, weights, hidden, call, values=made)
                torch.autograd.grad(output.sum(), [hidden, *weights.values()], allow_unused=True)
            total += counting.counts.launches
            made |= {number: value.detach() for number, value in new.items()}
            hidden = output
    except (ModelError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    return total


def show(results: Sequence[Mapping[str, Any]], brief: bool) -> str:
    """The types as a table, unless brief, then how many types have each part fused, and why parts are left."""
    lines = ["| type | norm | rotary | gated | kernels |", "|---|---|---|---|---|"]
    types: dict[str, list[str]] = defaultdict(list)
    ratios: list[float] = []
    for result in results:
        left = Counter[str]()
        for why, count in result["left"].items():
            left[why.partition(":")[0]] += count
            types[why].append(result["type"])
        for part in result["fused"]:
            types[f"{part}: fused"].append(result["type"])
        before, after = result["launches"]
        counts = [f"{result['fused'].get(part, 0)} of {result['fused'].get(part, 0) + left[part]}" for part in PARTS]
        ratios += [after / before] if before else []
        told = f"{before} -> {after} ({after / before:.2f})" if before else ""
        lines.append(f"| {' | '.join([result['type'], *counts, told])} |")
    lines = [] if brief else [*lines, ""]
    lines += ["| part | types | such as |", "|---|---|---|"]
    for why, kinds in sorted(types.items(), key=lambda item: (PARTS.index(item[0].partition(":")[0]), -len(item[1]))):
        lines.append(f"| {why} | {len(kinds)} | {', '.join(kinds[:4])} |")
    ratios.sort()
    quarters = ", ".join(f"{ratios[len(ratios) * quarter // 4]:.2f}" for quarter in (1, 2, 3)) if ratios else ""
    return "\n".join([*lines, "", f"{len(results)} types; kernels to stock, quartiles of {len(ratios)}: {quarters}"])


def main() -> None:
    parser = argparse.ArgumentParser(description="what is fused in the layers of each architecture")
    parser.add_argument(
        "--types", nargs="+", choices=TYPES, default=TYPES, metavar="NAME", help="of models; default all"
    )
    parser.add_argument("--brief", action="store_true", help="no line for each type")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    results = []
    for kind in arguments.types:
        try:
            results.append(cover(kind))
        except ModelError as refusal:
            print(f"{kind}: {refusal}")
    print(show(results, arguments.brief))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
