"""The stock trainers' losses: their formulas, the metrics TRL logs, and the weight of the router auxiliary loss.

The router auxiliary loss belongs to a micro-batch, and trainers weight it differently in a step of several. In a
`Trainer`, and in TRL before 1.15, the model's forward adds all of it to the loss of each micro-batch. From 1.15 on TRL
adds its mean over the micro-batches. A loss computed from logits does not include it at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.dist import World
from megatrain.engine import MicroBatch, count_targets, target_mask
from megatrain.engine.chunked_loss import divisor_of, own_entries
from megatrain.errors import ConfigError
from megatrain.losses import LogitsLoss, LogProbLoss, LossFn, SmoothedCrossEntropy

FUSED_HEAD_NAME = "add_fused_lm_head"
"""A name that the modules of TRL's trainers have from 1.15 on. (In a source tree, `__version__` may be wrong.)"""


MEAN_WEIGHTS = "mean_weights"
"""Entry of a micro-batch: one over its target tokens, for each token."""


class TokenLoss(LogitsLoss):
    """Cross-entropy, or dynamic fine-tuning (Wu et al., "On the Generalization of SFT", 2025), with TRL's metrics.

    smoothing: label smoothing of the cross-entropy, 0 to 1. dynamic: dynamic fine-tuning instead. is_mean: whether it
    is averaged over each micro-batch and then over micro-batches, for models that do not take `num_items_in_batch`.
    """

    def __init__(self, smoothing: float, dynamic: bool, *, is_mean: bool = False) -> None:
        self.smoothing, self.dynamic = smoothing, dynamic
        self.own = (MEAN_WEIGHTS,) if is_mean else ()

    def __call__(self, logits: Tensor, labels: Tensor, **entries: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses, and sums of the entropy and of correct predictions."""
        log_probs = functional.log_softmax(logits, dim=-1)
        losses = functional.nll_loss(log_probs, labels, reduction="none")
        if self.dynamic:
            losses = losses * torch.exp(-losses).detach()
        elif self.smoothing:
            losses = (1 - self.smoothing) * losses - self.smoothing * log_probs.mean(dim=-1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum()
            correct = (logits.argmax(dim=-1) == labels).sum()
        if (weights := entries.get(MEAN_WEIGHTS)) is not None and len(weights):
            entropy, correct, losses = entropy * weights[0], correct * weights[0], losses * weights
        return losses.sum(), {"entropy": entropy, "mean_token_accuracy": correct}

    def divisor(self, batch: MicroBatch) -> float:
        """The target tokens, or 1 for a mean, in which TRL counts micro-batches without a target, too."""
        return 1.0 if self.own else super().divisor(batch)


class MeanPerMicroBatch(LogProbLoss):
    """Cross-entropy, averaged over the target tokens of each micro-batch and then over micro-batches: a stock trainer's
    loss for models that do not take `num_items_in_batch`, as most with images. A micro-batch without a target, for
    which that is not a number, does not count."""

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> Tensor:
        return -log_probs.sum() / target_mask(batch).sum().clamp(min=1)

    def divisor(self, batch: MicroBatch) -> float:
        return float(count_targets(batch) > 0)


def stock_loss(trainer: Any) -> LossFn | None:
    """The loss that a trainer's arguments describe; `None` is cross-entropy over the step's target tokens."""
    smoothing = float(trainer.args.label_smoothing_factor or 0.0)
    is_mean = not trainer.model_accepts_loss_kwargs
    if hasattr(trainer, "_metrics"):  # TRL's trainers log metrics
        return TokenLoss(smoothing, _is_dynamic(trainer), is_mean=is_mean)
    if is_mean:
        return MeanPerMicroBatch()
    return SmoothedCrossEntropy(smoothing) if smoothing else None


def with_weights(loss_fn: LossFn | None, batch: MicroBatch) -> MicroBatch:
    """`batch` with the entry that a `TokenLoss` of means needs; any other as it is."""
    if MEAN_WEIGHTS not in own_entries(loss_fn):
        return batch
    return {**batch, MEAN_WEIGHTS: torch.full(batch["labels"].shape, 1 / max(1, count_targets(batch)))}


def refuse_mean_of_means(trainer: Any) -> None:
    """Raise `ConfigError` for label smoothing, which a mean of micro-batches' means lacks."""
    if trainer.args.label_smoothing_factor:
        kind, key = type(trainer.model).__name__, "label_smoothing_factor"
        what = f"{key} is not supported: {kind} takes no num_items_in_batch, so its loss is a mean of means"
        raise ConfigError(what, where="StreamedTrainer", fix="give loss_fn, see megatrain.losses")


def refuse_other_divisor(batches: Sequence[MicroBatch], items: Any, world: World) -> None:
    """Raise `ConfigError` if the trainer would divide the loss by another number than the step's target tokens.

    batches: of this rank, in the step. items: the trainer's number; `None` if it counts none.
    """
    if items is None:
        return
    targets = sum(world.exchange("target tokens", sum(map(count_targets, batches))))
    if int(items) != targets:
        what = f"the trainer divides by {int(items)}, and the step has {targets} target tokens"
        raise ConfigError(what, where="StreamedTrainer", fix="give loss_fn with a divisor of its own")


def report_to_trl(
    trainer: Any, mode: str, metrics: Sequence[Mapping[str, float]], batches: Sequence[MicroBatch]
) -> None:
    """Give TRL the metrics of each micro-batch, which it logs; do nothing for other trainers.

    mode: `train` or `eval`. metrics: of the micro-batches of all ranks, in turn. batches: those of this rank.
    """
    if not hasattr(trainer, "_metrics"):
        return
    world = trainer.engine.world
    for of_batch, batch in zip(metrics[world.rank :: world.size], batches, strict=True):
        mask = batch.get("attention_mask")
        tokens = int(batch["input_ids"].numel() if mask is None else mask.sum())
        if world.size > 1:
            weight = divisor_of(trainer.loss_fn or stock_loss(trainer), batch)
            of_batch, tokens = _average_over_ranks(trainer, of_batch, weight, tokens)
        for name, value in of_batch.items():
            trainer._metrics[mode][name].append(value)
        if mode == "train":
            trainer._total_train_tokens += tokens
    trainer._metrics[mode]["num_tokens"] = [trainer._total_train_tokens]


def _average_over_ranks(
    trainer: Any, metrics: Mapping[str, float], weight: float, tokens: int
) -> tuple[dict[str, float], int]:
    """Means of metrics, and number of tokens, over the micro-batches that the ranks run at the same time. As in TRL
    the accelerator gathers them, which drops the samples that pad the last batch of a data set."""
    row = torch.tensor([[*metrics.values(), weight, tokens]], dtype=torch.float64, device=trainer.args.device)
    table = trainer.accelerator.gather_for_metrics(row).cpu()
    means = {}
    for column, name in enumerate(metrics):
        weights = torch.ones(len(table), dtype=table.dtype) if name == "aux_loss" else table[:, -2]
        means[name] = float(table[:, column] @ weights / weights.sum()) if weights.sum() else 0.0
    return means, int(table[:, -1].sum())


def router_coefficient(trainer: Any) -> float | None:
    """TRL's coefficient of the router auxiliary loss; `None` if TRL sets none."""
    if not getattr(trainer, "aux_loss_enabled", False):
        return None
    return float(getattr(trainer, "router_aux_loss_coef", trainer.args.router_aux_loss_coef))


def router_weights(trainer: Any, count: int) -> list[float] | None:
    """The weight of the router auxiliary loss in a step's loss, for each of a rank's `count` micro-batches; `None` with
    a loss of the user's own."""
    if trainer.loss_fn is not None:
        return None
    adds_it = any(hasattr(sys.modules.get(base.__module__), FUSED_HEAD_NAME) for base in type(trainer).__mro__)
    dynamic = _is_dynamic(trainer)
    if (dynamic and not adds_it) or (trainer.args.label_smoothing_factor and not dynamic):  # computed from logits
        return [0.0] * count
    is_mean = adds_it or not trainer.model_accepts_loss_kwargs
    return [1.0 / (count * trainer.engine.world.size) if is_mean else 1.0] * count


def _is_dynamic(trainer: Any) -> bool:
    return getattr(trainer.args, "loss_type", "nll") == "dft"
