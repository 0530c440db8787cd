"""What a layer takes beside its weights, found by running it on zeros: attention arithmetic, and what autograd
keeps, and what outputs of single ops take and save.

No formula per architecture could be right for all of them, and one run of each kind of layer at two short lengths
tells both numbers: kept bytes are linear in tokens, plus a part that grows with tokens x length where a kernel keeps
its scores. The zeros take no memory worth naming. Left out: what a kernel needs for its own time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatrain.model.chosen import Answering, Keeping, Key, Level, Stored
from megatrain.model.moments import SHORT, growth
from megatrain.spec import LayerProfile

LENGTHS = SHORT
"""Tokens of the two runs."""

FURTHER, ROUNDED = 300, 1.01
"""Tokens of a run that shows whether what two short ones tell holds beyond, and by how much it may be exceeded."""
BLOCKS = ((65, 129), (257, 513))
"""Tokens of two runs of a layer that pads: each begins one more block of 64, and of 128 or 256."""

FEW_TOKENS = 128
"""Over which what is fixed is spread; with more it is counted too high, and is little."""

MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)

Run = Callable[[int], tuple[Tensor, Iterable[Tensor]]]
"""Runs the layer on so many tokens with gradients; its output, and tensors that do not count: weights, arguments."""


def profile_layer(layer: nn.Module, run: Run, lengths: tuple[int, int] = LENGTHS) -> LayerProfile:
    """Profile of one layer from two runs, one per length of `LENGTHS`; what it keeps grows as `lengths` tell."""
    with _Attention() as attention:
        each, by_length = kept_growth(run)
    if lengths != LENGTHS:
        each, by_length = kept_growth(run, lengths)
    plain = LayerProfile(
        attention_flops=attention.flops / len(LENGTHS),
        window=window_of(layer),
        kept_nbytes=each,
        kept_nbytes_by_length=by_length,
    )
    return replace(plain, **_stored(run, LENGTHS[-1]))


def _stored(run: Run, length: int) -> dict[str, Any]:
    """What single ops' outputs take and save, as fields of a profile; nothing where a layer does not run like that.

    `width` of the hidden state is that of the output.
    """
    try:
        found = {level: _keeping(run, length, level) for level in ("chosen", "attention")}
    except (RuntimeError, NotImplementedError):  # an op that no dispatch mode can look at
        return {}
    nbytes = {level: sum(_storages(stored.tensors()).values()) / length for level, (stored, _) in found.items()}
    stored, flops = found["chosen"]
    spared = sum(flops[key] for key in stored.spared if key in flops)
    answered = spared + sum(flops[key] for key in stored.outputs if key in flops)
    return {
        "chosen_nbytes": nbytes["chosen"],
        "shared_nbytes": _shared_nbytes(run, length, stored) / length,
        "attention_nbytes": nbytes["attention"],
        "chosen_share": answered / max(1.0, sum(flops.values())),
        "spared_share": spared / max(1.0, sum(flops.values())),
    }


def _keeping(run: Run, length: int, level: Level) -> tuple[Stored, dict[Key, float]]:
    """What is stored of a run, and the operations of each product, once the first run has told the width."""
    width = run(length)[0].shape[-1]
    keeping = Keeping(level, width)
    with keeping.running():
        run(length)
    return keeping.stored(), keeping.flops


def _shared_nbytes(run: Run, length: int, stored: Stored) -> int:
    """Bytes of what was stored that the graph holds which grows from it."""
    there = _storages(stored.tensors())
    held: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        held.add(tensor.untyped_storage().data_ptr())
        return tensor

    with _hooks(pack), Answering(Stored(dict(stored.outputs), dict(stored.spared))):
        run(length)
    return sum(nbytes for place, nbytes in there.items() if place in held)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Where each storage lies, and its bytes."""
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


class _Attention(TorchFunctionMode):
    """Counts operations of attention per token and position, of the fused function and of products of scores."""

    flops: float = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2] if len(args) > 2 else (kwargs or {})["value"]
            self.flops += 2.0 * query.shape[1] * (query.shape[-1] + value.shape[-1])
        output = func(*args, **(kwargs or {}))
        if func in MATMULS and output.dim() == 4 and output.shape[-2] in LENGTHS:
            self.flops += 2.0 * output.numel() * args[0].shape[-1] / output.shape[-2] ** 2
        return output


def kept_growth(run: Run, lengths: tuple[int, int] = LENGTHS) -> tuple[float, float]:
    """Bytes that autograd keeps of a run per token, and per token and position; tensor by tensor where both lengths
    keep as many, since some have the size of a weight whatever the length. Those count as of `FEW_TOKENS` tokens."""
    fixed, each, by_length = _kept_parts(run, lengths)
    return each + fixed / FEW_TOKENS, by_length


def steady_lengths(run: Run) -> tuple[int, int]:
    """Two lengths that tell how a layer grows: short ones, unless it pads sequences to blocks of its own."""
    try:
        further = kept_nbytes(run, FURTHER)
        for lengths in (LENGTHS, *BLOCKS):
            fixed, each, by_length = _kept_parts(run, lengths)
            if further <= ROUNDED * (fixed + FURTHER * (each + FURTHER * by_length)):
                return lengths
    except (RuntimeError, IndexError):  # it takes fewer positions
        return LENGTHS
    return BLOCKS[-1]


def _kept_parts(run: Run, lengths: tuple[int, int]) -> tuple[float, float, float]:
    short, long = (_kept(run, length) for length in lengths)
    if len(short) != len(long) or lengths != LENGTHS:
        short, long = [sum(short)], [sum(long)]
    parts = [growth(less, more, lengths) for less, more in zip(short, long, strict=True)]
    fixed, each, by_length = (sum(part[place] for part in parts) for place in range(3))
    return fixed, each, by_length


def kept_nbytes(run: Run, length: int) -> int:
    """Bytes that autograd keeps for the backward pass of one run, each storage once."""
    return sum(_kept(run, length))


def _kept(run: Run, length: int) -> list[int]:
    """Bytes of each storage that autograd keeps, in the order of their first use."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no storage is freed and its address used again

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor.detach()  # a node that saves its own output would keep itself alive

    with _hooks(pack):
        output, others = run(length)
    for tensor in others:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    del output
    alive.clear()  # else each would hold the graph that holds the list
    return list(kept.values())


@contextmanager
def _hooks(pack: Callable[[Tensor], Tensor]) -> Iterator[None]:
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    with torch.enable_grad(), hooks(pack, lambda tensor: tensor):
        yield


def window_of(layer: nn.Module) -> int | None:
    """Positions that the layer attends to at most, if one of its modules says so."""
    windows = [getattr(module, "sliding_window", None) for module in layer.modules()]
    return next((window for window in windows if isinstance(window, int) and window > 0), None)
