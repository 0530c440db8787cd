"""Computes head and loss in chunks of tokens, so that full logits never exist; supports custom losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.engine.batch import MicroBatch, count_targets
from megatrain.errors import BatchError, LossError
from megatrain.schedule.passes.workspace import LOSS_BLOCK_NUMEL

# Losses of the user's own ---------------------------------------------------------------------------------------------
#
# Losses of the user's own: what a loss function is given and returns, and how it is run without whole logits.
#
# There are two kinds. A `LogProbLoss` sees the log-probability of every label of a micro-batch at once, which is what
# supervised, preference and policy losses are made of; it takes two passes over the chunks, and costs one more product
# with the head than cross-entropy does. A `LogitsLoss` sees all logits of a few tokens at a time, and is a sum over
# tokens: label smoothing, a z-loss, distillation.
#
# Both give a sum; the step divides the sums of all micro-batches by the sum of their `divisor`s, so that how a step is
# cut into micro-batches changes nothing. Left out: a loss that couples tokens of several micro-batches.


Summed = Tensor | float | tuple[Tensor | float, Tensor | float]
Sums = Mapping[str, Summed]
"""What a loss function may return beside the loss, to be reported: name -> a sum like the loss's, or a sum and how many
it is of, where these are others than the loss is divided by."""
COUNT = " (count)"
"""Behind the name of a sum that has a count of its own, in what is handed on."""

Returned = Tensor | tuple[Tensor, Sums]


class LogProbLoss:
    """A loss of the log-probabilities of the labels. Subclass it, or give a plain function where one is asked for.

    `own` names entries of a micro-batch that are for the loss alone; the model does not see them.
    """

    own: tuple[str, ...] = ()

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> Returned:
        """The sum of the losses of a micro-batch, a float32 scalar, and perhaps sums to report.

        log_probs: float32[batch, length], at the place of each label: its log-probability given the tokens before it,
        and 0 where the label is -100 or first in its row (`target_mask`). batch: the micro-batch, its tensors
        on the device.
        """
        raise NotImplementedError

    def divisor(self, batch: MicroBatch) -> float:
        """What the sum is divided by, added up over the step: the target tokens, if not overridden.

        Called before anything is computed; raise `BatchError` here for a micro-batch that the loss cannot be of.
        """
        return count_targets(batch)


class LogitsLoss:
    """A loss of the logits of each token. Subclass it.

    `own` names entries of a micro-batch that are for the loss alone, tensors [batch, length, ...] at the places of the
    labels; the model does not see them.
    """

    own: tuple[str, ...] = ()

    def __call__(self, logits: Tensor, labels: Tensor, **own: Tensor) -> Returned:
        """The sum of the losses of some target tokens, a float32 scalar, and perhaps sums to report.

        logits: float32[tokens, vocabulary]. labels: int64[tokens]; tokens whose label is -100 are not among them. own:
        each [tokens, ...], of the same places. All on the device. How many tokens there are at a time is
        `Numerics.loss_chunk_tokens`; what is computed here takes memory that no plan knows of.
        """
        raise NotImplementedError

    def divisor(self, batch: MicroBatch) -> float:
        """As for `LogProbLoss`."""
        return count_targets(batch)


LossFn = LogProbLoss | LogitsLoss | Callable[[Tensor, MicroBatch], Returned]
"""What a step takes as its loss; a function is a `LogProbLoss` divided by the target tokens."""


def check_loss(loss_fn: LossFn | None) -> None:
    """Raise `LossError` for what cannot be called as a loss."""
    if loss_fn is None or (callable(loss_fn) and not isinstance(loss_fn, type)):
        return
    name = loss_fn.__name__ if isinstance(loss_fn, type) else f"a {type(loss_fn).__name__}"
    fix = f"make one: {name}()" if isinstance(loss_fn, type) else "give a function, a LogProbLoss or a LogitsLoss"
    raise LossError(f"{name} is no loss function", where="loss_fn", fix=fix)


def own_entries(loss_fn: LossFn | None) -> tuple[str, ...]:
    """The entries of a micro-batch that the model does not see."""
    return loss_fn.own if isinstance(loss_fn, LogProbLoss | LogitsLoss) else ()


def divisor_of(loss_fn: LossFn | None, batch: MicroBatch) -> float:
    """What the sum of a micro-batch's losses counts for. Raises `BatchError` where the loss lacks an entry of its own,
    and what the loss raises."""
    for key in own_entries(loss_fn):
        if not isinstance(batch.get(key), Tensor):
            raise BatchError(f"lacks {key}, which the loss needs", where=type(loss_fn).__name__)
        if isinstance(loss_fn, LogitsLoss) and batch[key].shape[:2] != batch["labels"].shape:
            what = f"{key} {list(batch[key].shape)} is not as long as the labels, {list(batch['labels'].shape)}"
            raise BatchError(what, where=type(loss_fn).__name__)
    found = loss_fn.divisor(batch) if isinstance(loss_fn, LogProbLoss | LogitsLoss) else count_targets(batch)
    if not 0 <= found < float("inf"):
        raise LossError(f"its divisor is {found}", where=type(loss_fn).__name__, fix="return 0 or more")
    return found


@dataclass(frozen=True)
class Found:
    """`loss` is a sum, float64 scalar; `gradient` is for the hidden states, None where none was asked for."""

    loss: Tensor
    gradient: Tensor | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)


def measure(loss_fn: LossFn | None, chunks: Chunks, batch: MicroBatch) -> Found:
    """The loss of a micro-batch without gradients; cross-entropy where there is no `loss_fn`."""
    if loss_fn is None:
        return Found(loss_only(chunks))
    if isinstance(loss_fn, LogitsLoss):
        return _by_logits(loss_fn, chunks, batch, None)
    loss, sums = _checked(loss_fn(_aligned(chunks, batch), _on(batch, chunks.hidden.device)), loss_fn)
    return Found(loss.double(), None, sums)


def differentiate(loss_fn: LossFn | None, chunks: Chunks, batch: MicroBatch, scale: float) -> Found:
    """The loss of a micro-batch, and the gradient of `scale` times it; those of the leaves go where their hooks say."""
    if loss_fn is None:
        return Found(*loss_and_gradients(chunks, scale))
    if isinstance(loss_fn, LogitsLoss):
        return _by_logits(loss_fn, chunks, batch, scale)
    leaf = _aligned(chunks, batch).requires_grad_()
    with torch.enable_grad():
        loss, sums = _checked(loss_fn(leaf, _on(batch, chunks.hidden.device)), loss_fn, needs_graph=True)
        (gradient,) = torch.autograd.grad(loss * scale, leaf)
    chunks.rewind()
    return Found(loss.detach().double(), push_gradient(chunks, gradient.roll(-1, dims=1).flatten()), sums)


def _aligned(chunks: Chunks, batch: MicroBatch) -> Tensor:
    """Log-probabilities at the places of their labels, float32[batch, length]; no graph."""
    found = log_probs(chunks)
    return found.view(batch["labels"].shape).roll(1, dims=1)  # a last position has no target: the first ones are 0


def _by_logits(loss_fn: LogitsLoss, chunks: Chunks, batch: MicroBatch, scale: float | None) -> Found:
    """Chunk by chunk, with the gradient of `scale` times the loss where there is one."""
    device, length = chunks.hidden.device, batch["labels"].shape[1]
    total = torch.zeros((), dtype=torch.float64, device=device)
    sums: dict[str, Tensor] = {}

    def loss_of(logits: Tensor, part: Part) -> Tensor:
        at = part.places // length, part.places % length + 1
        own = {key: batch[key][at[0].to(batch[key].device), at[1].to(batch[key].device)] for key in loss_fn.own}
        own = {key: value.to(device, non_blocking=True) for key, value in own.items()}
        loss, found = _checked(loss_fn(logits.float(), part.targets, **own), loss_fn, needs_graph=scale is not None)
        total.add_(loss.detach().double())
        for name, value in found.items():
            sums[name] = sums[name] + value if name in sums else value
        return loss

    if scale is None:
        with torch.no_grad():
            for part in chunks:
                loss_of(chunks.head(chunks.hidden[part.chosen]), part)
        return Found(total, None, sums)

    def gradient_of(logits: Tensor, part: Part, scale: float = scale) -> Tensor:
        with torch.enable_grad():
            (found,) = torch.autograd.grad(loss_of(logits.requires_grad_(), part) * scale, logits)
        return found

    return Found(total, backward(chunks, gradient_of), sums)


def _checked(returned: Returned, loss_fn: LossFn, *, needs_graph: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and what is to be reported as float64 scalars. Raises `LossError` for what is no loss."""
    loss, sums = returned if isinstance(returned, tuple) else (returned, {})
    where = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise LossError(f"returned {shape}, not a scalar", where=where, fix="return the sum of the losses")
    if needs_graph and not loss.requires_grad:
        what = "returned a loss that does not depend on what it was given"
        raise LossError(what, where=where, fix="compute it from the argument, without detach or item")
    parts = {name: value if isinstance(value, tuple) else (value,) for name, value in sums.items()}
    kept = {
        name + mark: torch.as_tensor(each, device=loss.device).detach().double().sum()
        for name, values in parts.items()
        for mark, each in zip(("", COUNT), values, strict=False)
    }
    return loss.reshape(()), kept


def _on(batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for key, value in batch.items()
    }


@dataclass(frozen=True, slots=True)
class StepResult:
    """`loss` is the mean over all target tokens of the step, or what a loss function makes it; `tokens` counts them.

    metrics: what the loss function reports, means like the loss. by_micro_batch: the same of each micro-batch alone (0
    where nothing in it counts), with its router auxiliary loss, without the coefficient, as `aux_loss` if it has one.
    shares: where several ranks add up theirs, what each micro-batch has in `loss`. Both in the order of all ranks.
    """

    loss: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    by_micro_batch: tuple[dict[str, float], ...] = ()
    shares: tuple[float, ...] = ()


class KeepLogProbs(LogProbLoss):
    """No loss: keeps the log-probabilities of each micro-batch, on the host, in the order of the step."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> Tensor:
        self.kept.append(log_probs.cpu())
        return log_probs.new_zeros(())


# Chunks ---------------------------------------------------------------------------------------------------------------
#
# Head and loss in token chunks: full logits never exist.
#
# For each chunk of target tokens the epilogue runs, the loss and its gradient with respect to the logits are formed in
# float32, and the chunk's backward runs at once. Positions without a target are never sent through the head. With the
# same chunks the numbers are the same bit for bit whatever else the plan says, also on the simulated device; those of
# the stock model, which goes backward through `torch.nn.functional.cross_entropy`, they equal to rounding.
#
# A loss that needs the log-probabilities of a whole micro-batch takes two passes over the chunks: `log_probs` without a
# graph, and `push_gradient` once the gradient of each is known. Left out: what such losses are (`LossFn`).


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


__all__ = [
    "Found",
    "KeepLogProbs",
    "LogProbLoss",
    "LogitsLoss",
    "LossFn",
    "StepResult",
    "check_loss",
    "differentiate",
    "divisor_of",
    "measure",
    "own_entries",
]
