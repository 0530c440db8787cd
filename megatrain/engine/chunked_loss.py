"""Computes head and loss in chunks of tokens, so that full logits never exist; supports custom losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatrain.engine.batch import MicroBatch, count_targets
from megatrain.errors import BatchError, LossError, typed_line
from megatrain.model.peak import may_be_overwritten
from megatrain.schedule.passes.workspace import LOSS_BLOCK_NUMEL

# Custom losses --------------------------------------------------------------------------------------------------------
#
# What a loss function gets and returns, and how it is run without the full logits.
#
# There are two kinds. A `LogProbLoss` gets the log-probability of every label of a micro-batch at once, as supervised,
# preference and policy losses need; it takes two passes over the chunks, so the head's forward runs once more than for
# cross-entropy. A `LogitsLoss` gets all logits of a few tokens at a time, and is a sum over tokens: label smoothing,
# z-loss, distillation.
#
# Both return a sum. The step's loss is the sum over all micro-batches, divided by the sum of their `divisor`s, so how a
# step is divided into micro-batches makes no difference. Not supported: losses that couple tokens of several
# micro-batches.


Summed = Tensor | float | tuple[Tensor | float, Tensor | float]
Sums = Mapping[str, Summed]
"""What a loss function may report beside the loss: name -> a sum, which is divided like the loss, or a sum and the
count to divide it by instead."""
COUNT = " (count)"
"""Appended to the name of a sum to name the count to divide it by."""

Returned = Tensor | tuple[Tensor, Sums]


class LogProbLoss:
    """A loss computed from the log-probabilities of the labels. Subclass it; a plain function will do if it needs
    neither `own` nor `divisor`.

    `own` names entries of a micro-batch that only the loss gets, not the model.
    """

    own: tuple[str, ...] = ()

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> Returned:
        """The sum of the losses of a micro-batch, a float32 scalar; or a pair of that and sums to report.

        log_probs: float32[batch, length], the log-probability of each label given the tokens before it, at the label's
        own position; 0 if the label is -100 or the first of its row (`target_mask`). batch: the micro-batch, with its
        tensors on the device.
        """
        raise NotImplementedError

    def divisor(self, batch: MicroBatch) -> float:
        """What this micro-batch adds to the divisor of the step's loss; by default its number of target tokens.

        Called before anything is computed; raise `BatchError` here for a micro-batch that the loss cannot handle.
        """
        return count_targets(batch)


class LogitsLoss:
    """A loss computed from each token's logits. Subclass it.

    `own` names entries of a micro-batch that only the loss gets, not the model: tensors [batch, length, ...], aligned
    with the labels.
    """

    own: tuple[str, ...] = ()

    def __call__(self, logits: Tensor, labels: Tensor, **own: Tensor) -> Returned:
        """The sum of the losses of some target tokens, a float32 scalar; or a pair of that and sums to report.

        logits: float32[tokens, vocabulary]. labels: int64[tokens], never -100. own: each [tokens, ...], for the same
        tokens. All on the device, and valid until the call returns. A call gets `Numerics.loss_chunk_tokens` tokens at
        most, and fewer of a large vocabulary: plans leave room for five times these logits, their gradient included.
        """
        raise NotImplementedError

    def divisor(self, batch: MicroBatch) -> float:
        """As in `LogProbLoss`."""
        return count_targets(batch)


LossFn = LogProbLoss | LogitsLoss | Callable[[Tensor, MicroBatch], Returned]
"""What a step accepts as a loss. A function counts as a `LogProbLoss` divided by the target tokens."""


def check_loss(loss_fn: LossFn | None) -> None:
    """Raise `LossError` unless this can be called as a loss."""
    if loss_fn is None or (callable(loss_fn) and not isinstance(loss_fn, type)):
        return
    name = loss_fn.__name__ if isinstance(loss_fn, type) else f"a {type(loss_fn).__name__}"
    fix = (
        f"create an instance: {name}()"
        if isinstance(loss_fn, type)
        else "give a function, a LogProbLoss or a LogitsLoss"
    )
    raise LossError(f"{name} is not a loss function", where="loss_fn", fix=fix)


def own_entries(loss_fn: LossFn | None) -> tuple[str, ...]:
    """The entries of a micro-batch that only the loss gets."""
    return loss_fn.own if isinstance(loss_fn, LogProbLoss | LogitsLoss) else ()


def divisor_of(loss_fn: LossFn | None, batch: MicroBatch) -> float:
    """What a micro-batch adds to the step's divisor. Raises `BatchError` if an entry that the loss needs is missing,
    and whatever `loss_fn.divisor` raises."""
    for key in own_entries(loss_fn):
        if not isinstance(batch.get(key), Tensor):
            raise BatchError(f"lacks {key}, which the loss needs", where=type(loss_fn).__name__)
        if isinstance(loss_fn, LogitsLoss) and batch[key].shape[:2] != batch["labels"].shape:
            what = f"{key} {list(batch[key].shape)} does not match the labels, {list(batch['labels'].shape)}"
            raise BatchError(what, where=type(loss_fn).__name__)
    divisor = loss_fn.divisor(batch) if isinstance(loss_fn, LogProbLoss | LogitsLoss) else count_targets(batch)
    if not 0 <= divisor < float("inf"):
        raise LossError(f"its divisor is {divisor}", where=type(loss_fn).__name__, fix="return 0 or more")
    return divisor


@dataclass(frozen=True)
class MicroBatchLoss:
    """The loss of a micro-batch and what it reports."""

    loss: Tensor
    """A sum, float64 scalar."""
    gradient: Tensor | None = None
    """With respect to the hidden states, [tokens, hidden size]; `None` if not computed."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """What the loss function reports, float64 scalars."""


def measure(loss_fn: LossFn | None, chunked: ChunkedHead, batch: MicroBatch) -> MicroBatchLoss:
    """The loss of a micro-batch without gradients; cross-entropy if there is no `loss_fn`."""
    if loss_fn is None:
        return MicroBatchLoss(cross_entropy_loss(chunked))
    if isinstance(loss_fn, LogitsLoss):
        return _by_logits(loss_fn, chunked, batch, None)
    loss, sums = _called(loss_fn, _log_probs_at_labels(chunked, batch), _to_device(batch, chunked.hidden.device))
    return MicroBatchLoss(loss.double(), None, sums)


def differentiate(loss_fn: LossFn | None, chunked: ChunkedHead, batch: MicroBatch, scale: float) -> MicroBatchLoss:
    """The loss of a micro-batch and the gradient of `scale` times it. Gradients of the leaves go to their hooks."""
    if loss_fn is None:
        return MicroBatchLoss(*cross_entropy_loss_and_gradient(chunked, scale))
    if isinstance(loss_fn, LogitsLoss):
        return _by_logits(loss_fn, chunked, batch, scale)
    leaf = _log_probs_at_labels(chunked, batch).requires_grad_()
    with torch.enable_grad():
        loss, sums = _called(loss_fn, leaf, _to_device(batch, chunked.hidden.device), needs_graph=True)
        (gradient,) = torch.autograd.grad(loss * scale, leaf)
    chunked.rewind()
    by_token = gradient.roll(-1, dims=1).flatten()

    def gradient_of(logits: Tensor, chunk: Chunk, into: Tensor | None) -> Tensor:
        return _log_prob_gradient(logits, chunk.targets, by_token[chunk.indices], into)

    for_hidden = backward(chunked, gradient_of)
    return MicroBatchLoss(loss.detach().double(), for_hidden, sums)


def _log_probs_at_labels(chunked: ChunkedHead, batch: MicroBatch) -> Tensor:
    """Log-probabilities of the labels, each at its label's position, float32[batch, length]; no graph."""
    by_token = log_probs(chunked)
    return by_token.view(batch["labels"].shape).roll(1, dims=1)  # the last position has no target, so the first is 0


def _by_logits(loss_fn: LogitsLoss, chunked: ChunkedHead, batch: MicroBatch, scale: float | None) -> MicroBatchLoss:
    """The loss chunk by chunk, with the gradient of `scale` times it unless that is `None`."""
    device, length = chunked.hidden.device, batch["labels"].shape[1]
    total = torch.zeros((), dtype=torch.float64, device=device)
    sums: dict[str, Tensor] = {}

    def loss_of(logits: Tensor, chunk: Chunk) -> Tensor:
        at = chunk.positions // length, chunk.positions % length + 1
        entries = {key: batch[key][at[0].to(batch[key].device), at[1].to(batch[key].device)] for key in loss_fn.own}
        entries = {key: value.to(device, non_blocking=True) for key, value in entries.items()}
        loss, reported = _called(loss_fn, logits, chunk.targets, needs_graph=scale is not None, **entries)
        total.add_(loss.detach().double())
        for name, value in reported.items():
            sums[name] = sums[name] + value if name in sums else value
        return loss

    if scale is None:
        with torch.no_grad():
            for chunk in chunked:
                logits = chunked.head(chunked.hidden[chunk.indices])
                for rows, part in _parts(chunk, logits):
                    loss_of(logits[rows].float(), part)
        return MicroBatchLoss(total, None, sums)

    def gradient_of(logits: Tensor, chunk: Chunk, into: Tensor | None, scale: float = scale) -> Tensor:
        gradient = torch.empty_like(logits) if into is None else into
        for rows, part in _parts(chunk, logits):
            leaf = logits[rows].float().requires_grad_()
            with torch.enable_grad():
                (gradient[rows],) = torch.autograd.grad(loss_of(leaf, part) * scale, leaf)
        return gradient

    return MicroBatchLoss(total, backward(chunked, gradient_of), sums)


LOGITS_LOSS_COPIES = 5
"""How many float32 tensors of the size of its logits a `LogitsLoss` may hold, these and their gradient included."""


def _parts(chunk: Chunk, logits: Tensor) -> Iterator[tuple[slice, Chunk]]:
    """Parts of a chunk, so small that all copies of a part's logits fit into one float32 block (`_blocks`)."""
    rows = _block_rows(logits, LOGITS_LOSS_COPIES)
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        yield part, Chunk(*(each[part] for each in chunk))


MISTAKES = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError)
"""What a loss function with a mistake raises."""


def _called(
    loss_fn: Callable[..., Returned], *inputs: Any, needs_graph: bool = False, **entries: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the sums to report, as float64 scalars. Raises `LossError` if the function raises, or unless the
    loss is a scalar with a graph."""
    where = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    try:
        returned = loss_fn(*inputs, **entries)
    except torch.OutOfMemoryError:
        raise
    except MISTAKES as error:
        given = "the logits and labels of some tokens" if isinstance(loss_fn, LogitsLoss) else "log_probs and batch"
        raise LossError(typed_line(error), where=where, fix=f"it is called with {given}") from error
    loss, sums = returned if isinstance(returned, tuple) else (returned, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise LossError(f"returned {shape}, not a scalar", where=where, fix="return the sum of the losses")
    if needs_graph and not loss.requires_grad:
        what = "returned a loss that does not depend on its first argument"
        raise LossError(what, where=where, fix="compute it from that, without detach or item")
    pairs = {name: value if isinstance(value, tuple) else (value,) for name, value in sums.items()}
    kept = {
        name + mark: torch.as_tensor(number, device=loss.device).detach().double().sum()
        for name, values in pairs.items()
        for mark, number in zip(("", COUNT), values, strict=False)
    }
    return loss.reshape(()), kept


def _to_device(batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for key, value in batch.items()
    }


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and metrics of a step.

    loss: the mean over all target tokens, or what the loss function's divisor makes of it. tokens: number of target
    tokens. metrics: what the loss function reports, averaged like the loss. by_micro_batch: the same for each
    micro-batch (0 if its divisor is 0); `aux_loss` is its router auxiliary loss without the coefficient, if it has one.
    shares: with several ranks, what each micro-batch contributes to `loss`. The last two have the micro-batches of all
    ranks, in order.
    """

    loss: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    by_micro_batch: tuple[dict[str, float], ...] = ()
    shares: tuple[float, ...] = ()


class KeepLogProbs(LogProbLoss):
    """A loss of 0 that keeps the log-probabilities of each micro-batch, on the host, in the order of the step."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> Tensor:
        self.kept.append(log_probs.cpu())
        return log_probs.new_zeros(())


# Chunks ---------------------------------------------------------------------------------------------------------------
#
# For each chunk of target tokens the head runs, the loss and its gradient with respect to the logits are computed in
# float32, and the chunk's backward runs at once. The head is not applied to positions without a target. The result
# depends on the chunk size but on nothing else in the plan, bit for bit, also on the simulated device. It equals the
# stock model's, which goes through `torch.nn.functional.cross_entropy`, up to rounding.
#
# A `LogProbLoss` takes two passes over the chunks: `log_probs` without a graph, and `backward` once the loss function's
# gradient is known.


Head = Callable[[Tensor], Tensor]
"""Hidden states [tokens, hidden size] -> logits [tokens, vocabulary]."""


class Chunk(NamedTuple):
    """Some target tokens."""

    positions: Tensor
    """Positions among the hidden states, int64[tokens] on the host."""
    indices: Tensor
    """The same on the device, to index tensors with."""
    targets: Tensor
    """int64[tokens] on the device."""


@dataclass(frozen=True)
class ChunkedHead:
    """A head, its input and its targets. Iterates over the positions that have a target, chunk by chunk."""

    head: Head
    leaves: list[Tensor]
    """Trained weights of the head."""
    hidden: Tensor
    """[tokens, hidden size]."""
    positions: Tensor
    """Positions that have a target, int64[targets] on the host."""
    targets: Tensor
    """int64[targets] on the host."""
    size: int
    """Tokens per chunk."""
    rewind: Callable[[], None] = lambda: None
    """Resets the random state, so that the next pass draws the same numbers."""

    def __iter__(self) -> Iterator[Chunk]:
        device = self.hidden.device
        for start in range(0, len(self.positions), self.size):
            rows = slice(start, start + self.size)
            indices, targets = (
                rows_of[rows].to(device, non_blocking=True) for rows_of in (self.positions, self.targets)
            )
            yield Chunk(self.positions[rows], indices, targets)


def cross_entropy(logits: Tensor, targets: Tensor, scale: float, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum of the losses, a float64 scalar, and the gradient of `scale` times that sum with respect to the logits.

    logits: [tokens, vocabulary]. targets: int64[tokens], never -100. into: memory for the gradient, which may be that
    of the logits. Goes through the tokens in blocks, so that the float32 copy of the logits exists for one block only.
    """
    loss = torch.zeros((), dtype=torch.float64, device=logits.device)
    gradient = torch.empty_like(logits) if into is None else into
    for rows, work in _blocks(logits):
        total, exponents = _exponentials(work, targets[rows])
        work *= scale / total
        work[torch.arange(len(work), device=work.device), targets[rows]] -= scale
        loss += (total.squeeze(-1).log() - exponents).sum(dtype=torch.float64)
        gradient[rows] = work
    return loss, gradient


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of `logits`, each with a float32 copy that the next block overwrites."""
    tokens, vocabulary = logits.shape
    rows = min(tokens, _block_rows(logits))
    workspace = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    for start in range(0, tokens, rows):
        block = logits[start : start + rows]
        yield slice(start, start + rows), workspace[: len(block)].copy_(block)


def _block_rows(logits: Tensor, copies: int = 1) -> int:
    """The number of rows of logits of which `copies` float32 copies fit into one block, at least 1."""
    return max(1, LOSS_BLOCK_NUMEL.get(logits.device.type, 1 << 26) // (copies * logits.shape[1]))


def _exponentials(work: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Replace float32 logits [tokens, vocabulary] by the exponentials of their distance to the row's largest.

    Returns the sum of each row [tokens, 1] and the exponent of each target [tokens].
    """
    work -= work.amax(dim=-1, keepdim=True)
    exponents = work[torch.arange(len(targets), device=targets.device), targets]
    return work.exp_().sum(dim=-1, keepdim=True), exponents


def cross_entropy_loss(chunked: ChunkedHead) -> Tensor:
    """Cross-entropy summed over all targets, a float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=chunked.hidden.device)
    for chunk in chunked:
        for rows, work in _blocks(chunked.head(chunked.hidden[chunk.indices])):
            sums, exponents = _exponentials(work, chunk.targets[rows])
            total += (sums.squeeze(-1).log() - exponents).sum(dtype=torch.float64)
    return total


def cross_entropy_loss_and_gradient(chunked: ChunkedHead, scale: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over all targets, float64 scalar, and the gradient of `scale` times it (see `backward`)."""
    total = torch.zeros((), dtype=torch.float64, device=chunked.hidden.device)

    def gradient_of(logits: Tensor, chunk: Chunk, into: Tensor | None) -> Tensor:
        loss, gradient = cross_entropy(logits, chunk.targets, scale, into)
        total.add_(loss)
        return gradient

    gradient = backward(chunked, gradient_of)
    return total, gradient


def log_probs(chunked: ChunkedHead) -> Tensor:
    """Log-probabilities of the targets, float32[tokens] on the device; 0 at positions without a target."""
    by_token = torch.zeros(len(chunked.hidden), dtype=torch.float32, device=chunked.hidden.device)
    for chunk in chunked:
        logits = chunked.head(chunked.hidden[chunk.indices])
        for rows, work in _blocks(logits):
            total, exponents = _exponentials(work, chunk.targets[rows])
            by_token[chunk.indices[rows]] = exponents - total.squeeze(-1).log()
        del logits, work
    return by_token


def backward(chunked: ChunkedHead, gradient_of: Callable[[Tensor, Chunk, Tensor | None], Tensor]) -> Tensor:
    """The gradient with respect to the hidden states, [tokens, hidden size].

    gradient_of: computes that with respect to a chunk's logits, in the given memory if any: the logits' own, unless
    something may read them later. Gradients of `leaves` go to their hooks, chunk by chunk.
    """
    for_hidden = torch.zeros_like(chunked.hidden)
    for chunk in chunked:
        hidden = chunked.hidden[chunk.indices].requires_grad_()
        with torch.enable_grad():
            logits = chunked.head(hidden)
        edge, logits = get_gradient_edge(logits), logits.detach()
        gradient = gradient_of(logits, chunk, logits if may_be_overwritten(logits) else None)
        del logits
        torch.autograd.backward([edge], [gradient], inputs=[hidden, *chunked.leaves])
        assert hidden.grad is not None
        for_hidden[chunk.indices] = hidden.grad
        del hidden, gradient  # before the next chunk allocates its own
    return for_hidden


def _log_prob_gradient(logits: Tensor, targets: Tensor, gradients: Tensor, into: Tensor | None) -> Tensor:
    """The gradient with respect to `logits` [tokens, vocabulary]: each row's `gradients` times (one-hot - softmax).
    into: as in `cross_entropy`."""
    for_logits = torch.empty_like(logits) if into is None else into
    for rows, work in _blocks(logits):
        total, _ = _exponentials(work, targets[rows])
        work *= -gradients[rows, None] / total
        work[torch.arange(len(work), device=work.device), targets[rows]] += gradients[rows]
        for_logits[rows] = work
    return for_logits
