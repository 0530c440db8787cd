"""What a layer is said to take is what it takes."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from megatrain.model import port_model, profile
from tests.tiny import FAMILIES, batch, tiny_model


def kept_by_the_stock_layer(family: str, rows: int, length: int) -> int:
    """Bytes that autograd keeps of layer 1 inside the stock model's own forward pass, weights not counted."""
    model = tiny_model(family)
    layer = model.get_submodule(port_model(model, torch.float32).stack)[1]
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []
    given: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        if inside and not {tensor.untyped_storage().data_ptr()} & (weights | given):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inside: list[bool] = []

    def enter(module: object, args: object, kwargs: dict[str, object]) -> None:
        inside.append(True)
        values = [value for item in kwargs.values() for value in (item if isinstance(item, tuple) else (item,))]
        given.update(value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor))

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**{key: value for key, value in batch(rows, length, 0).items() if key != "labels"}, use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize(("rows", "length"), [(1, 24), (3, 11)])
def test_the_bytes_of_a_kept_graph_are_predicted(family: str, rows: int, length: int) -> None:
    profile = port_model(tiny_model(family), torch.float32).spec.units[2].profile
    assert profile.kept(rows, length) == pytest.approx(kept_by_the_stock_layer(family, rows, length), rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_counted_whichever_kernel_runs(family: str) -> None:
    """4 heads of 8: scores and their product with the values, two operations each per multiply-add."""
    profile = port_model(tiny_model(family), torch.float32).spec.units[1].profile
    assert profile.attention_flops == 2 * 2 * 4 * 8


def test_windows_limit_what_is_attended() -> None:
    units = port_model(tiny_model("gemma2"), torch.float32).spec.units
    assert [unit.profile.window for unit in units[1:-1]] == [4, None, 4, None]
    windowed, full = units[1].profile, units[2].profile
    attended = sum(min(position + 1, 4) for position in range(10)) / 10
    assert windowed.attended(10) == pytest.approx(attended)
    assert full.attended(10) == pytest.approx(5.5)


def test_a_layer_that_pads_to_blocks_is_looked_at_where_blocks_begin() -> None:
    """Of 64 tokens: at 8 and 16 it keeps as much, and a longer run shows that this does not go on."""

    def run(block: int) -> profile.Run:
        def padding(tokens: int) -> tuple[Tensor, list[Tensor]]:
            padded = torch.zeros(1, -(-tokens // block) * block, 4, requires_grad=True)
            return padded.sigmoid()[:, :tokens], []

        return padding

    for block, expected in ((1, (8, 16)), (64, (65, 129)), (256, (257, 513))):
        lengths = profile.steady_lengths(run(block))
        assert lengths == expected
        each, by_length = profile.kept_growth(run(block), lengths)
        for tokens in (300, 1000):
            assert tokens * (each + tokens * by_length) >= profile.kept_nbytes(run(block), tokens)


def test_what_a_run_keeps_goes_with_it() -> None:
    """Also where an operation saves its own output."""
    refs: list[weakref.ref[torch.Tensor]] = []

    def run(tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        output = torch.ones(tokens, 8, requires_grad=True).softmax(-1)
        refs.append(weakref.ref(output))
        return output.sum(), []

    assert profile.kept_nbytes(run, 5) == 5 * 8 * 4
    assert refs[0]() is None
