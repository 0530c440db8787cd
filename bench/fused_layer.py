"""Counts kernel launches, bytes moved and bytes saved for backward in one layer, stock and fused.

    python -m bench.fused_layer [--shape NAME ...] [--tokens N] [--device cpu | standin] [--list] [--json FILE]

The layer is called as the engine calls it, in bfloat16, on one sequence. Counted are ops that launch a kernel (views
and allocations do not), by the bytes that they read and write; of matrix products and attention only the launches. A
fused function is one op (`megatrain.model.fused`): one kernel. Saved are the bytes
that the graph keeps for the backward pass, without weights and each storage once. Nothing is timed, so a narrow layer
with the proportions of a published one tells the same per token and channel.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain import Engine, Numerics
from megatrain.model.saved_activations import attends
from megatrain.spec import Kernels

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {"model_type": "llama", "intermediate_size": 1792, "num_key_value_heads": 1},
    "qwen3-8b": {"model_type": "qwen3", "intermediate_size": 1536, "num_key_value_heads": 1, "head_dim": 128},
    "gemma3-12b": {"model_type": "gemma3_text", "intermediate_size": 2048, "num_key_value_heads": 2, "head_dim": 128},
    "phi3-medium": {"model_type": "phi3", "intermediate_size": 1792, "num_key_value_heads": 1},
}
"""The proportions of published models, at a width of 512."""
WIDTH, TOKENS = 512, 256
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")
OVERWRITES = ("aten::copy_", "aten::zero_", "aten::fill_")
"""Ops that write the tensor which they change, and do not read it."""
GOALS = {"launches": 0.45, "nbytes": 0.35, "saved_nbytes": 0.8}
"""Of the fused layer, over the library's."""


@dataclass
class Counts:
    """launches: of kernels. nbytes: that kernels other than products and attention move. saved_nbytes: kept for the
    backward pass. ops: name of an op -> launches."""

    launches: int = 0
    nbytes: int = 0
    saved_nbytes: int = 0
    ops: Counter[str] = field(default_factory=Counter)


class CountKernels(TorchDispatchMode):
    """Counts the ops in the block. `saving` goes around the forward pass."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self._storages = {_place(weight) for weight in weights}

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        name = op._schema.name
        if _is_view(op._schema) or name.startswith(("aten::empty", "aten::new_empty")):
            return output
        self.counts.launches += 1
        self.counts.ops[name] += 1
        if name not in PRODUCTS and not _attends(op):
            given, made = _tensors((args, kwargs)), _tensors(output)
            changed = {_place(tensor) for tensor in made} & {_place(tensor) for tensor in given}
            read = [each for each in given if name not in OVERWRITES or _place(each) not in changed]
            self.counts.nbytes += sum(map(_nbytes, (*read, *made)))
        return output

    def saving(self) -> Any:
        """A context in which the bytes that autograd saves are counted."""

        def pack(tensor: Tensor) -> Tensor:
            if _place(tensor) not in self._storages:
                self._storages.add(_place(tensor))
                self.counts.saved_nbytes += tensor.untyped_storage().nbytes()
            return tensor

        hooks: Any = torch.autograd.graph.saved_tensors_hooks
        return hooks(pack, lambda tensor: tensor)


def _attends(op: Any) -> bool:
    return attends(op) or "attention" in op._schema.name


def _is_view(schema: Any) -> bool:
    aliased = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return aliased or schema.name in ("aten::_unsafe_view", "aten::_reshape_alias", "aten::detach")


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _nbytes(tensor: Tensor) -> int:
    """Bytes of its elements; those of an expanded tensor count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def count(shape: Mapping[str, Any], kernels: Kernels, tokens: int = TOKENS, device: str = "cpu") -> Counts:
    """Counts of one layer with these fields of a config, called for one sequence."""
    fields = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64, **IDS, **shape}
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    values = {name: value.detach().to(device) for name, value in model.named_parameters()}
    with Engine.from_model(model, device, numerics=Numerics("bf16", kernels=kernels), verify=False) as engine:
        ported = engine.parts.ported
        prefix = ported.prefix(0)
        weights = {
            name.removeprefix(prefix): value.requires_grad_()
            for name, value in values.items()
            if name.startswith(prefix)
        }
        ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
        start = {param.name: values[param.name] for param in ported.structure.units[0].params}
        with torch.no_grad():
            _, calls = ported.prologue(start, {"input_ids": ids})
        hidden = torch.randn(1, tokens, WIDTH).to(device, torch.bfloat16).requires_grad_()
        gradient, counting = torch.ones_like(hidden), CountKernels(list(weights.values()))
        with torch.enable_grad(), counting:
            with counting.saving():
                output, _ = ported.layer(0, weights, hidden, calls[0])
            torch.autograd.grad(output, [hidden, *weights.values()], gradient)
    return counting.counts


def compare(shape: str, tokens: int = TOKENS, device: str = "cpu") -> dict[str, Any]:
    """Counts of the library's layer and of the fused one; goal -> ratio."""
    stock, fused = (count(SHAPES[shape], kernels, tokens, device) for kernels in ("stock", "fused"))
    ratios = {name: getattr(fused, name) / getattr(stock, name) for name in GOALS}
    return {"shape": shape, "tokens": tokens, "stock": told(stock), "fused": told(fused), "ratios": ratios}


def told(counts: Counts) -> dict[str, Any]:
    """The counts, with the ops by how often they are launched."""
    return {**asdict(replace(counts, ops=Counter())), "ops": counts.ops.most_common()}


def show(results: Sequence[Mapping[str, Any]]) -> str:
    """The comparison as a table; bytes per token and channel."""
    lines = ["| layer | kernels | launches | bytes moved | bytes saved |", "|---|---|---|---|---|"]
    for result in results:
        values = result["tokens"] * WIDTH
        for kernels in ("stock", "fused"):
            counts = result[kernels]
            moved, saved = counts["nbytes"] / values, counts["saved_nbytes"] / values
            lines.append(f"| {result['shape']} | {kernels} | {counts['launches']} | {moved:.0f} | {saved:.1f} |")
        told = " | ".join(f"{result['ratios'][name]:.2f} (goal {goal})" for name, goal in GOALS.items())
        lines.append(f"| | ratio | {told} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="kernels, bytes and saved tensors of one layer, stock and fused")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--device", choices=("cpu", "standin"), default="cpu", help="standin: a CUDA device simulated")
    parser.add_argument("--list", action="store_true", help="the ops that launch, too")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    if arguments.device == "standin":
        from tests import standin_cuda

        standin_cuda.install()
    device = "cpu" if arguments.device == "cpu" else "cuda:0"
    results = [compare(shape, arguments.tokens, device) for shape in arguments.shape]
    print(show(results))
    for result in results if arguments.list else ():
        for kernels in ("stock", "fused"):
            ops = ", ".join(f"{count} {name}" for name, count in result[kernels]["ops"])
            print(f"{result['shape']}, {kernels}: {ops}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
