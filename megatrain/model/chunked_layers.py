"""Runs token-wise parts of a layer (usually the MLP and the norms) over a long sequence in chunks.

The output of such a part at a token depends on its input at that token alone. So it can process a long sequence in
chunks, keep only its input, and recompute each chunk for the backward pass: its intermediates exist for one chunk
at a time. Parts are found without a list of classes or names. Candidates are submodules that the layer calls once,
with one tensor in and one out, and for which autograd keeps much more than that tensor. Each is run on random
weights, on the whole sequence and on permuted tokens in pieces, and must give the same. Parts that contain
experts, have hooks (recorders of router logits) or draw at random are not chunked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megatrain.model.peak import LimitNumel, Living, SkipLargeProducts, TooLarge, in_chunk
from megatrain.model.saved_activations import unseen
from megatrain.model.swapped_parameters import SwappedParameters

WORTH_IT = 0.5
"""Parts for which autograd keeps less than this, as a multiple of the input's bytes, are not chunked."""
TOKENS = 8
"""Tokens of the run that records which submodules are called."""
ORDER, PIECES = (3, 0, 6, 5, 1, 4, 2), (3, 4)
"""The permutation of a test's tokens, and the sizes of its pieces."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference that counts as rounding, relative to the largest value."""
MOST_RANDOM_NUMEL = 1 << 20
"""Weights up to this size are random in a test; larger ones repeat one row, which takes no memory."""


def token_wise(layer: nn.Module, run: Callable[[int], object]) -> tuple[str, ...]:
    """Names of a layer's largest submodules that are token-wise and worth chunking.

    `run` runs the layer on a given number of tokens. The layer's mode and parameters are not changed.
    """
    calls: dict[str, list[tuple[tuple[Any, ...], Mapping[str, Any], Any]]] = {}
    hooks = [
        module.register_forward_hook(partial(_note, calls.setdefault(name, [])), with_kwargs=True)
        for name, module in layer.named_modules()
        if name
    ]
    try:
        with torch.no_grad(), SkipLargeProducts():  # type: ignore[no-untyped-call]
            run(TOKENS)
    finally:
        for hook in hooks:
            hook.remove()
    names: list[str] = []
    for name, seen in calls.items():  # outermost first
        if any(name.startswith(f"{outer}.") for outer in names) or len(seen) != 1:
            continue
        args, kwargs, output = seen[0]
        module = layer.get_submodule(name)
        if not kwargs and _one_for_one(args, output) and not _apart(module) and _passes(module, args[0]):
            names.append(name)
    return tuple(names)


@contextmanager
def in_chunks(layer: nn.Module, names: Sequence[str], tokens: int) -> Iterator[None]:
    """In the block, these parts of a layer process more than `tokens` tokens in chunks of that many.

    Outputs and input gradients equal those of the whole up to the rounding of matrix products of another size.
    Weight gradients are summed over chunks in order, in float32, and rounded once.
    """
    parts = [layer.get_submodule(name) for name in names]
    before = [vars(part).get("forward") for part in parts]
    for part in parts:
        part.forward = _Chunked(part, part.forward, tokens)
    try:
        yield
    finally:
        for part, forward in zip(parts, before, strict=True):
            if forward is None:
                del part.forward
            else:
                part.forward = forward


@dataclass(frozen=True, slots=True)
class _Chunked:
    """Replaces the forward of a part, `plain`, which is then called with [..., tokens, channels] of at most
    `tokens` tokens."""

    part: nn.Module
    plain: Callable[[Tensor], Tensor]
    tokens: int

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # no backward inside a compiled backward
    def __call__(self, given: Tensor) -> Tensor:
        if given.numel() <= self.tokens * given.shape[-1]:
            return self.plain(given)
        weights = dict(self.part.named_parameters())
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (given, *weights.values()))
        if not wanted:
            return self.whole(given)
        output: Tensor = _InChunks.apply(self, tuple(weights), given, *weights.values())  # type: ignore[no-untyped-call]
        return output

    def rows(self, given: Tensor) -> int:
        """Tokens of each sequence in one chunk."""
        sequences = given.numel() // (given.shape[-1] * given.shape[-2])
        return max(1, self.tokens // sequences)

    def whole(self, given: Tensor) -> Tensor:
        """The output for all tokens, chunk by chunk."""
        output: Tensor | None = None
        start = 0
        for piece in given.split(self.rows(given), dim=-2):
            with unseen(), in_chunk():
                made = self.plain(piece.contiguous())  # as the library's code gets its inputs
            if output is None:
                output = made.new_empty((*given.shape[:-1], made.shape[-1]))
            output.narrow(-2, start, piece.shape[-2]).copy_(made)
            start += piece.shape[-2]
        assert output is not None
        return output


class _InChunks(torch.autograd.Function):
    """Saves only the input and the weights, the latter by offset (`engine.weights.save_weights_by_name`)."""

    @staticmethod
    def forward(ctx: Any, chunked: _Chunked, names: tuple[str, ...], given: Tensor, *weights: Tensor) -> Tensor:
        ctx.chunked, ctx.names = chunked, names
        ctx.save_for_backward(given, *weights)
        return chunked.whole(given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, *weights = ctx.saved_tensors
        _, _, wants_given, *wants = ctx.needs_input_grad
        leaves = [weight.detach().requires_grad_(wanted) for weight, wanted in zip(weights, wants, strict=True)]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums = [_Sum(leaf) for leaf in trained]
        plain, bound = ctx.chunked.plain, dict(zip(ctx.names, leaves, strict=True))
        input_gradient = torch.empty_like(given) if wants_given else None
        rows, start = ctx.chunked.rows(given), 0
        swapped = SwappedParameters(ctx.chunked.part)
        for piece, wanted in zip(given.split(rows, dim=-2), gradient.split(rows, dim=-2), strict=True):
            leaf = piece.detach().contiguous().requires_grad_(wants_given)
            with in_chunk():
                with torch.enable_grad(), swapped.holding(bound):
                    made = plain(leaf)
                torch.autograd.backward([made], [wanted], inputs=[*([leaf] if wants_given else []), *trained])
            if input_gradient is not None and leaf.grad is not None:
                input_gradient.narrow(-2, start, piece.shape[-2]).copy_(leaf.grad)
            start += piece.shape[-2]
        totals = iter(sums)
        return None, None, input_gradient, *(next(totals).total() if wanted else None for wanted in wants)


class _Sum:
    """Accumulates one weight's gradient over chunks in float32 as each becomes available."""

    def __init__(self, leaf: Tensor) -> None:
        self._dtype = leaf.dtype
        self._total: Tensor | None = None
        leaf.register_post_accumulate_grad_hook(self._add)

    @torch.no_grad()
    def _add(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        if self._total is None:
            self._total = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32))
        else:
            self._total += leaf.grad
        leaf.grad = None

    def total(self) -> Tensor | None:
        """Return the sum in the weight's dtype, and drop it here."""
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)


# Finding them ---------------------------------------------------------------------------------------------------------


def _note(seen: list[Any], module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
    seen.append((args, kwargs, output))


def _one_for_one(args: tuple[Any, ...], output: Any) -> bool:
    """Whether a call got one tensor [..., tokens, channels], not empty, and returned one for the same tokens."""
    if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return False
    given = args[0]
    fits = given.dim() >= 2 and given.shape[-2] == TOKENS and given.is_floating_point()
    fits = fits and min(given.numel(), output.numel()) > 0
    return fits and output.dim() == given.dim() and output.shape[:-1] == given.shape[:-1]


def _apart(module: nn.Module) -> bool:
    """Whether a module contains experts, which see only some of the tokens, or modules with hooks."""
    inner = list(module.modules())
    listened = (part._forward_hooks or part._forward_pre_hooks for part in inner)
    experts = any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in inner)
    return experts or any(parameter.dim() > 2 for parameter in module.parameters()) or any(map(bool, listened))


def _passes(module: nn.Module, given: Tensor) -> bool:
    """Whether chunking the module pays, and its output at each token depends on that token alone."""
    if _kept_of(module, given) - given.nbytes < WORTH_IT * given.nbytes:
        return False
    generator = torch.Generator().manual_seed(0)
    weights = {name: random_like(parameter, generator) for name, parameter in module.named_parameters()}
    tokens = torch.randn(len(ORDER), given.shape[-1], generator=generator).to(given.dtype)
    tokens = tokens.expand(*given.shape[:-2], *tokens.shape).contiguous()
    untouched = tokens.clone()
    try:  # in training mode, so that dropout fails the test
        with in_mode(True, module), torch.no_grad(), LimitNumel(MOST_RANDOM_NUMEL), ExpandedRowLinear():
            expected = functional_call(module, weights, (tokens,))[..., ORDER, :]
            pieces = tokens[..., ORDER, :].split(PIECES, dim=-2)
            in_pieces = torch.cat([functional_call(module, weights, (piece,)) for piece in pieces], dim=-2)
    except TooLarge:  # a large weight is used by something other than `linear`
        return False
    if not torch.equal(tokens, untouched):
        return False  # it writes into its input, which must be kept
    largest, off = expected.float().abs().max(), (in_pieces - expected).float().abs().max()
    return bool(largest > 0) and bool(off <= TOLERANCE.get(given.dtype, 1e-5) * largest)


def _kept_of(module: nn.Module, given: Tensor) -> int:
    """Bytes that autograd keeps for a module, including its input."""
    leaves = {name: torch.zeros((), dtype=p.dtype).expand(p.shape) for name, p in module.named_parameters()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    living = Living()
    with torch.enable_grad(), SkipLargeProducts(), living:  # type: ignore[no-untyped-call]
        inside = given.detach().requires_grad_().clone()  # not a leaf, so a module may write into it
        graph = functional_call(module, leaves, (inside,)).grad_fn
        del inside
        return living.nbytes if graph else 0


@contextmanager
def in_mode(training: bool, *roots: nn.Module) -> Iterator[None]:
    """In the block, all modules in these are in training mode, or not; afterwards each is as before."""
    modes = {module: module.training for root in roots for module in root.modules()}
    try:
        for module in modes:
            module.training = training
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class ExpandedRowLinear(TorchFunctionMode):
    """In the block, `linear` with a weight that repeats one row uses that row, scaled by a different factor per
    channel."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
        if func is not functional.linear or given["weight"].dim() != 2 or given["weight"].stride(0):
            return func(*args, **(kwargs or {}))
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        product = functional.linear(x, weight[:1]) * torch.linspace(
            0.5, 1.5, len(weight), dtype=x.dtype, device=x.device
        )
        return product if bias is None else product + bias


def random_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random weights with the shape and dtype of a parameter, scaled for outputs of ordinary size."""
    rows = like.shape if like.numel() <= MOST_RANDOM_NUMEL else like.shape[-1:]
    drawn: Tensor = torch.randn(rows, generator=generator) / float(max(1, like.shape[-1])) ** 0.5
    return drawn.to(like.dtype).expand(like.shape)
