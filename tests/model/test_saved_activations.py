"""What is stored of a layer's run answers the next run: the same bits, less work, and nothing that would be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.errors import ModelError
from megatrain.model import Answering, Keeping, Stored
from megatrain.model.saved_activations import Level

WIDTH = 16

Layer = Callable[[Tensor, nn.ParameterDict], Tensor]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[op._schema.name.removeprefix("aten::")] += 1
        return op(*args, **(kwargs or {}))


def weights() -> nn.ParameterDict:
    torch.manual_seed(0)
    sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "up": (WIDTH, 40), "down": (40, WIDTH)}
    return nn.ParameterDict({name: nn.Parameter(torch.randn(size) / 4) for name, size in sizes.items()})


def attention(hidden: Tensor, w: nn.ParameterDict, dropout: float = 0.0) -> Tensor:
    query, key, value = ((hidden @ w[name]).view(2, 6, 2, 8).transpose(1, 2) for name in "qkv")
    found = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    return hidden + found.transpose(1, 2).reshape(2, 6, WIDTH)


def plain(hidden: Tensor, w: nn.ParameterDict) -> Tensor:
    hidden = attention(hidden, w)
    return hidden + silu(hidden @ w["up"]) @ w["down"]


def in_place(hidden: Tensor, w: nn.ParameterDict) -> Tensor:
    hidden = attention(hidden, w)
    inner = hidden @ w["up"]
    inner += 1.0  # through a view of a product's output that does not say that it is one
    last = inner.tanh() @ w["down"]
    last *= 2.0
    return hidden + last


def with_dropout(hidden: Tensor, w: nn.ParameterDict) -> Tensor:
    hidden = attention(hidden, w, dropout=0.3)
    return hidden + nn.functional.dropout(silu(hidden @ w["up"]), 0.5) @ w["down"]


def a_sum_behind(hidden: Tensor, w: nn.ParameterDict) -> Tensor:
    """Nothing of the last product may be spared: it is saved."""
    return (plain(hidden, w) @ w["q"]).pow(2)


def gradients(layer: Layer, level: Level | None, memory_nbytes: int = 0) -> tuple[list[Tensor], Counter[str]]:
    """Output and gradients, and the ops that ran for the gradients. memory_nbytes: of that which outputs are packed to
    and, elsewhere, read from again; 0 for none."""
    w, hidden = weights(), torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    leaf, found, answers = hidden.clone().requires_grad_(), [], Stored()
    if level is not None:
        keeping = Keeping(level, WIDTH)
        torch.manual_seed(7)
        with keeping.running():
            found.append(layer(leaf, w).detach())
        answers = keeping.stored()
        assert all(not tensor.requires_grad for tensor in answers.tensors())
        if memory_nbytes:
            memory = torch.full((memory_nbytes,), 0xFF, dtype=torch.uint8)
            answers.pack(memory)
            assert not answers.tensors(), "nothing is held but the memory"
            answers.unpack(memory.clone())
    torch.manual_seed(7)
    with Counting() as counting, Answering(answers):
        output = layer(leaf, w)
    answers.finish("here")
    if level is None:
        found.append(output.detach())
    output.backward(torch.ones_like(output))
    grads = [leaf.grad, *(each.grad for each in w.values())]
    assert all(grad is not None for grad in grads)
    return [*found, *grads], counting.seen  # type: ignore[list-item]


@pytest.mark.parametrize("layer", [plain, in_place, with_dropout, a_sum_behind])
@pytest.mark.parametrize("level", ["chosen", "attention"])
def test_gradients_are_the_same_bits(layer: Layer, level: Level) -> None:
    expected, _ = gradients(layer, None)
    found, _ = gradients(layer, level)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("layer", [plain, in_place, with_dropout, a_sum_behind])
@pytest.mark.parametrize("memory_nbytes", [1 << 16, 3000, 16])
def test_stored_outputs_keep_bits_and_overflow_is_recomputed(layer: Layer, memory_nbytes: int) -> None:
    expected, everything = gradients(layer, None)
    _, stored = gradients(layer, "chosen")
    found, seen = gradients(layer, "chosen", memory_nbytes)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
    assert stored["mm"] <= seen["mm"] <= everything["mm"]
    if memory_nbytes == 1 << 16:
        assert seen == stored
    if layer is plain and memory_nbytes < 1 << 16:
        assert seen["mm"] > stored["mm"]


def test_stored_outputs_and_their_dead_inputs_are_not_recomputed() -> None:
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    _, everything = gradients(plain, None)
    assert (everything["mm"], everything[fused]) == (5, 1)
    _, chosen = gradients(plain, "chosen")
    assert (chosen["mm"], chosen[fused]) == (0, 0)
    _, attended = gradients(plain, "attention")
    assert (attended["mm"], attended[fused]) == (4, 0)  # `down` is spared
    _, behind = gradients(a_sum_behind, "attention")
    assert behind["mm"] == 6


def test_attention_with_dropout_is_recomputed() -> None:
    _, seen = gradients(with_dropout, "chosen")
    assert sum(count for name, count in seen.items() if "bmm" in name or "attention" in name)


def test_outputs_modified_in_place_are_recomputed() -> None:
    _, seen = gradients(in_place, "chosen")
    assert seen["mm"] == 2


def test_small_matmuls_are_not_stored() -> None:
    low, high = torch.randn(WIDTH, 4), torch.randn(4, WIDTH)
    for value in (low, high):
        value.requires_grad_()
    keeping = Keeping("chosen", WIDTH)
    with keeping.running():
        (torch.randn(6, WIDTH) @ low @ high).pow(2)
    assert [tuple(tensor.shape) for tensor in keeping.stored().tensors()] == [(6, 4)]


def test_an_output_into_reused_memory_is_stored() -> None:
    """Where something lies is no name: another tensor may have been changed there, and have died."""
    memory = np.zeros((64, 64), np.float32)

    class Allocator(TorchDispatchMode):
        """Gives zeros and products the same memory, as one that reuses what is freed may."""

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = op(*args, **(kwargs or {}))
            return torch.from_numpy(memory).copy_(found) if op._schema.name in ("aten::zeros", "aten::mm") else found

    square = torch.randn(64, 64, requires_grad=True)
    keeping = Keeping("chosen", 64)
    with Allocator(), keeping.running():
        changed = torch.zeros(64, 64).add_(1.0)
        place = changed.data_ptr()
        del changed
        product = square @ square
        product.pow(2)
    assert product.data_ptr() == place
    assert len(keeping.stored().outputs) == 1


def test_nondeterministic_layers_are_refused() -> None:
    w, hidden = weights(), torch.randn(2, 6, WIDTH)
    keeping = Keeping("chosen", WIDTH)
    with keeping.running():
        plain(hidden, w)
    stored = keeping.stored()
    with Answering(stored):
        attention(hidden, w)
    with pytest.raises(ModelError, match=r"computes differently the second time: no aten\.mm\.default"):
        stored.finish("layer 3")


@pytest.mark.parametrize("level", ["chosen", "attention"])
def test_stored_outputs_are_freed_with_their_store(level: Level) -> None:
    """Outputs with their graph would hold the hook of the run, and so themselves, out of the collector's sight."""
    keeping = Keeping(level, WIDTH)
    with keeping.running():
        plain(torch.randn(2, 6, WIDTH), weights())
    run, stored = ref(keeping), keeping.stored()
    kept = [ref(tensor.untyped_storage()) for tensor in stored.tensors()]
    del keeping
    assert run() is None
    assert kept
    del stored
    assert not any(storage() for storage in kept)
