"""Head and loss in token chunks: full logits never exist.

For each chunk of target tokens the epilogue runs, the loss and its gradient with respect to the logits are formed in
float32, and the chunk's backward runs at once. Positions without a target are never sent through the head. With the
same chunks the numbers are the same bit for bit whatever else the plan says, also on the simulated device; those of the
stock model, which goes backward through `torch.nn.functional.cross_entropy`, they equal to rounding.

A loss that needs the log-probabilities of a whole micro-batch takes two passes over the chunks: `log_probs` without a
graph, and `push_gradient` once the gradient of each is known. Left out: what such losses are (`losses`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.schedule.workspace import LOSS_BLOCK_NUMEL

Head = Callable[[Tensor], Tensor]
"""Hidden states [tokens, hidden size] -> logits [tokens, vocabulary]."""


class Part(NamedTuple):
    """The target tokens of a chunk."""

    places: Tensor
    """Their positions among the hidden states, int64[tokens], on the host."""
    chosen: Tensor
    """The same on the device."""
    targets: Tensor
    """int64[tokens] on the device."""


@dataclass(frozen=True)
class Chunks:
    """The head, and what it is run on. Goes from part to part over the positions that have a target."""

    head: Head
    leaves: list[Tensor]
    """Weights of the head that train."""
    hidden: Tensor
    """[tokens, hidden size]."""
    places: Tensor
    """The positions that have a target, int64[targets] on the host."""
    targets: Tensor
    """The targets, int64[targets] on the host."""
    size: int
    """Tokens of a chunk."""
    rewind: Callable[[], None] = lambda: None
    """Makes the next pass draw what this one has drawn."""

    def __iter__(self) -> Iterator[Part]:
        device = self.hidden.device
        for start in range(0, len(self.places), self.size):
            part = slice(start, start + self.size)
            chosen, targets = (each[part].to(device, non_blocking=True) for each in (self.places, self.targets))
            yield Part(self.places[part], chosen, targets)


WORKSPACE_NUMEL = LOSS_BLOCK_NUMEL
"""Elements of the float32 workspace, by device type."""


def cross_entropy(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Sum of the losses (float64 scalar), and the gradient of `scale` times that sum with respect to the logits.

    `logits` [tokens, vocabulary]; `targets` int64[tokens], none ignored. Goes through the tokens in blocks, so that the
    float32 copy of the logits exists for one block only.
    """
    loss = torch.zeros((), dtype=torch.float64, device=logits.device)
    gradient = torch.empty_like(logits)
    for rows, work in _blocks(logits):
        loss += _softmax_gradient(work, targets[rows], scale)
        gradient[rows] = work
    return loss, gradient


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of `logits`, and a float32 copy of them that is overwritten by the next."""
    tokens, vocabulary = logits.shape
    rows = max(1, min(tokens, WORKSPACE_NUMEL.get(logits.device.type, 1 << 26) // vocabulary))
    workspace = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    for start in range(0, tokens, rows):
        part = logits[start : start + rows]
        yield slice(start, start + rows), workspace[: len(part)].copy_(part)


def _exponentials(work: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Turn float32 logits [tokens, vocabulary] in place into their exponentials, over that of the largest.

    Returns the sum of each row [tokens, 1], and the exponent of each target [tokens].
    """
    work -= work.amax(dim=-1, keepdim=True)
    chosen = work[torch.arange(len(targets), device=targets.device), targets]
    return work.exp_().sum(dim=-1, keepdim=True), chosen


def _softmax_gradient(work: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Turn float32 logits [tokens, vocabulary] in place into the gradient; returns the sum of the losses."""
    total, chosen = _exponentials(work, targets)
    work *= scale / total
    work[torch.arange(len(targets), device=targets.device), targets] -= scale
    return (total.squeeze(-1).log() - chosen).sum(dtype=torch.float64)


def reference_cross_entropy(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`cross_entropy`, slow and plain: autograd through `torch.nn.functional.cross_entropy` on float32 logits."""
    leaf = logits.detach().float().requires_grad_()
    with torch.enable_grad():
        loss = torch.nn.functional.cross_entropy(leaf, targets, reduction="sum")
        (gradient,) = torch.autograd.grad(loss * scale, leaf)
    return loss.detach().double(), gradient.to(logits.dtype)


def loss_only(chunks: Chunks) -> Tensor:
    """Sum of the losses over all targets, float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=chunks.hidden.device)
    for part in chunks:
        for rows, work in _blocks(chunks.head(chunks.hidden[part.chosen])):
            sums, exponents = _exponentials(work, part.targets[rows])
            total += (sums.squeeze(-1).log() - exponents).sum(dtype=torch.float64)
    return total


def loss_and_gradients(chunks: Chunks, scale: float) -> tuple[Tensor, Tensor]:
    """Sum of the losses (float64 scalar) and the gradient of `scale` times it, as `backward` has it."""
    total = torch.zeros((), dtype=torch.float64, device=chunks.hidden.device)

    def gradient_of(logits: Tensor, part: Part) -> Tensor:
        loss, gradient = cross_entropy(logits, part.targets, scale)
        total.add_(loss)
        return gradient

    gradient = backward(chunks, gradient_of)
    return total, gradient


def log_probs(chunks: Chunks) -> Tensor:
    """The log-probability of each target, float32[tokens] on the device of the hidden states; 0 where there is none."""
    found = torch.zeros(len(chunks.hidden), dtype=torch.float32, device=chunks.hidden.device)
    for part in chunks:
        logits = chunks.head(chunks.hidden[part.chosen])
        for rows, work in _blocks(logits):
            total, exponents = _exponentials(work, part.targets[rows])
            found[part.chosen[rows]] = exponents - total.squeeze(-1).log()
        del logits, work
    return found


def push_gradient(chunks: Chunks, gradients: Tensor) -> Tensor:
    """As `backward`, given the gradient of each target's log-probability, float32[tokens]."""
    return backward(chunks, lambda logits, part: _log_prob_gradient(logits, part.targets, gradients[part.chosen]))


def backward(chunks: Chunks, gradient_of: Callable[[Tensor, Part], Tensor]) -> Tensor:
    """The gradient for the hidden states [tokens, hidden size]; `gradient_of` gives that for the logits of a part.

    Those of the `leaves` go where their hooks send them, part by part.
    """
    found = torch.zeros_like(chunks.hidden)
    for part in chunks:
        hidden = chunks.hidden[part.chosen].requires_grad_()
        with torch.enable_grad():
            logits = chunks.head(hidden)
        gradient = gradient_of(logits.detach(), part)
        torch.autograd.backward([logits], [gradient], inputs=[hidden, *chunks.leaves])
        assert hidden.grad is not None
        found[part.chosen] = hidden.grad
        del hidden, logits, gradient  # before the next part makes its own
    return found


def _log_prob_gradient(logits: Tensor, targets: Tensor, gradients: Tensor) -> Tensor:
    """The gradient for `logits` [tokens, vocabulary]: each row's `gradients` times (one-hot - softmax)."""
    found = torch.empty_like(logits)
    for rows, work in _blocks(logits):
        total, _ = _exponentials(work, targets[rows])
        work *= -gradients[rows, None] / total
        work[torch.arange(len(work), device=work.device), targets[rows]] += gradients[rows]
        found[rows] = work
    return found
