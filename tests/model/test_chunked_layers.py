"""Parts of a layer that go through a sequence in chunks: which they are, and that they stay the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatrain.model import port_model
from megatrain.model.chunked_layers import in_chunks, token_wise
from tests.tiny import relative_error, tiny_model

NORMS = {"input_layernorm", "post_attention_layernorm"}
PARTS = {
    "llama": {"mlp", *NORMS},
    "qwen3": {"mlp", *NORMS},
    "gemma2": {"mlp", *NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"},
    "gpt2": {"mlp"},  # torch's own norm keeps next to nothing
    "mixtral": NORMS,  # experts see some tokens only
    "qwen3-moe": NORMS,
}
QUICK = ("llama", 0), ("gpt2", 1), ("qwen3-moe", 1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (family, other) in QUICK else pytest.mark.slow)
        for family in PARTS
        for other, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)
def test_mlps_and_norms_are_found_and_experts_left_whole(family: str, dtype: torch.dtype) -> None:
    ported = port_model(tiny_model(family), dtype)
    assert [set(parts) for parts in ported.parts] == [PARTS[family]] * len(ported.templates)
    profile = ported.spec.units[1].profile
    assert profile.kept(1, 100, chunk=10) < profile.kept(1, 100, chunk=100) == profile.kept(1, 100)


def test_mlps_of_any_width_are_found() -> None:
    """Where products are not computed but to find it: 4 million parameters each."""
    wide = port_model(tiny_model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=1), torch.bfloat16)
    assert set(wide.parts[0]) == PARTS["llama"]
    assert wide.spec.units[1].profile.chunk_numel == 3 * 1024 * 4096


class Narrow(nn.Module):
    """A feed-forward of no width, as `num_shared_experts: 0` makes it; without warnings at its initialization."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Parameter(torch.empty(0, 8)), nn.Parameter(torch.empty(8, 0)), nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(self.act(nn.functional.linear(hidden, self.up)), self.down)


def test_an_mlp_of_no_width_is_left_whole() -> None:
    assert found_in(Narrow()) == ()


class Centred(nn.Module):
    """A feed-forward whose tokens meet by how far channels are from their mean, which is nothing if they are alike."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = nn.functional.linear(hidden, weight=self.up.weight)
        off = wide - wide.mean(-1, keepdim=True)
        return self.down(nn.functional.silu(wide) + off.mean(-2, keepdim=True))  # type: ignore[no-any-return]


class Unusual(nn.Module):
    """A feed-forward whose large product is no `linear`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.empty(inner, width)) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.up.t()).sigmoid() @ self.down


@pytest.mark.parametrize("part", [Centred, Unusual])
@pytest.mark.parametrize(("width", "inner"), [(64, 256), (1024, 4096)])
def test_other_wide_modules_are_not_taken_for_mlps(part: type, width: int, inner: int) -> None:
    layer = Inside(part(width, inner))
    found = token_wise(layer, lambda tokens: (layer(torch.zeros(1, tokens, width)), []))
    assert found == (("part",) if part is Unusual and width == 64 else ())


def test_modules_with_dropout_are_not_chunked() -> None:
    """Chunks would draw other numbers than the whole. What is inside it and draws nothing may be taken instead."""
    model = tiny_model("gpt2", resid_pdrop=0.1)
    for each in (model, model.eval()):
        assert port_model(each, torch.float32).parts == [("mlp.act",)] * 3


class Mixing(nn.Module):
    """A feed-forward between whose products the tokens meet."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(8, 32), nn.Linear(32, 8), mix

    def forward(self, hidden: Tensor) -> Tensor:
        wide: Tensor = self.up(hidden).sigmoid()
        return self.down(wide * self.mix(wide))


class Inside(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.part(hidden)


def found_in(part: nn.Module) -> tuple[str, ...]:
    layer = Inside(part)
    return token_wise(layer, lambda tokens: (layer(torch.zeros(1, tokens, 8)), []))


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "with the next token": lambda wide: wide.roll(-1, dims=-2),
    "with all before": lambda wide: wide.cumsum(-2),
    "with the mean of all": lambda wide: wide.mean(-2, keepdim=True),
    "with their number": lambda wide: wide * wide.shape[-2],
    "with their place": lambda wide: wide * torch.arange(wide.shape[-2]).unsqueeze(-1),
}


@pytest.mark.parametrize("mix", MIXES)
def test_modules_that_mix_tokens_are_not_chunked(mix: str) -> None:
    assert "part" not in found_in(Mixing(MIXES[mix]))


class Overwriting(Mixing):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mul_(2))


def test_modules_that_modify_their_input_are_not_chunked() -> None:
    assert "part" not in found_in(Overwriting(torch.tanh))


def test_modules_with_hooks_are_not_chunked() -> None:
    part = Mixing(torch.tanh)
    assert found_in(part) == ("part",)
    part.up.register_forward_hook(lambda *_: None)
    assert found_in(part) == ()


@pytest.mark.parametrize("shape", [(1, 37), (3, 11)], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 10, 1000])
@pytest.mark.parametrize("frozen", ["", "up.weight", "given"])
def test_chunked_outputs_and_gradients_equal_the_whole(shape: tuple[int, int], tokens: int, frozen: str) -> None:
    torch.manual_seed(0)
    layer = Inside(Mixing(torch.tanh))
    given = torch.randn(*shape, 8, requires_grad=frozen != "given")
    for name, parameter in layer.part.named_parameters():
        parameter.requires_grad_(name != frozen)
    wanted = torch.randn(*shape, 8)

    def gradients(output: Tensor) -> list[Tensor | None]:
        leaves = [given, *layer.parameters()]
        for leaf in leaves:
            leaf.grad = None
        output.backward(wanted)
        return [leaf.grad for leaf in leaves]

    expected = layer(given)
    whole = gradients(expected)
    results = []
    for _ in range(2):
        with in_chunks(layer, ["part"], tokens):
            output = layer(given)  # its backward comes after the block, as in the engine
            with torch.no_grad():
                assert torch.equal(layer(given), output)
        results.append([output, *gradients(output)])
    for first, again, plain in zip(*results, [expected, *whole], strict=True):
        assert (first is None) == (plain is None)
        if first is not None and plain is not None and again is not None:
            assert torch.equal(first, again)
            assert relative_error(first, plain) < 1e-6
    assert "forward" not in vars(layer.part)


def test_bfloat16_weight_gradients_are_rounded_once_for_any_chunking() -> None:
    """512 terms of 1 each: a sum in bfloat16 would stop at 256."""
    layer = Inside(nn.Linear(1, 1, bias=False)).to(torch.bfloat16)
    with in_chunks(layer, ["part"], 1):
        layer(torch.ones(1, 512, 1, dtype=torch.bfloat16)).sum().backward()
    (weight,) = layer.parameters()
    assert weight.grad is not None
    assert weight.grad.item() == 512
