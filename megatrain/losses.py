"""Losses for `Engine.step(..., loss_fn=...)`: the two base classes, and the losses that come with MegaTrain.

Your own loss is a function of the labels' log-probabilities,

    def unlikelihood(log_probs, batch):                    # float32[batch, length]; 0 where there is no target
        return -torch.log1p(-log_probs.exp())[target_mask(batch)].sum()

or a subclass of `LogProbLoss`, which can also define the divisor of the sum and extra entries of a micro-batch, or of
`LogitsLoss`, which sees all logits of a few tokens at a time. Logits of a whole batch never exist.

Reference models are not run beside the trained one: their log-probabilities are computed before training and passed in
the micro-batches (`with_reference`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.data import packing
from megatrain.engine import LogitsLoss, LogProbLoss, LossFn, MicroBatch, Summed, Sums, target_mask
from megatrain.errors import BatchError, ConfigError
from megatrain.spec.validate_fields import Bounds, check_fields

REFERENCE = packing.REFERENCE
"""Micro-batch entry: per row, the reference model's summed log-probability of the targets, float32[batch]."""
DESIRABLE = packing.DESIRABLE
"""Micro-batch entry: whether a row's answer is desirable, bool[batch]."""


class _OfPairs(LogProbLoss):
    """Base of losses over pairs: rows 0, 2, ... are chosen, the row after each is rejected; the divisor is pairs."""

    beta: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_fields(self, ConfigError, f"{name}.")
        if self.beta == 0:
            raise ConfigError("with a beta of 0 nothing is learned", where=f"{name}.beta", fix="use a number above 0")

    def divisor(self, batch: MicroBatch) -> float:
        """Number of pairs. Raises `BatchError` for an odd number of rows or a row without a target."""
        count, where = len(batch["labels"]), type(self).__name__
        if count % 2:
            fix = "put both rows of a pair into one micro-batch, chosen first"
            raise BatchError(f"{count} rows are not pairs of chosen and rejected", where=where, fix=fix)
        if not bool(target_mask(batch).any(dim=1).all()):
            raise BatchError("a row has no target", where=where, fix="leave such pairs out")
        return count / 2


def _reported(rewards: Tensor, sums: Tensor) -> dict[str, Tensor]:
    """The reported metrics, summed over pairs. rewards, sums (of log-probabilities): float32[rows]."""
    rewards, sums = rewards.detach(), sums.detach()
    chosen, rejected = rewards[::2], rewards[1::2]
    return {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margins": (chosen - rejected).sum(),
        "rewards/accuracies": (chosen > rejected).double().sum(),
        "logps/chosen": sums[::2].sum(),
        "logps/rejected": sums[1::2].sum(),
    }


@dataclass(frozen=True)
class DPO(_OfPairs):
    """Direct preference optimization, per pair; rows 0, 2, ... are chosen, the row after each is rejected.

    With d the difference of the two log-ratios to the reference, `sigmoid` is the negative log-sigmoid of beta * d
    (Rafailov et al., "Direct Preference Optimization", NeurIPS 2023), made conservative by `label_smoothing`, the
    assumed share of wrong preferences (Mitchell, "A note on DPO with noisy preferences", 2023). `ipo` is the
    square of d - 1 / (2 beta), with log-ratios per target token (Azar et al., "A General Theoretical Paradigm to
    Understand Learning from Human Preferences", AISTATS 2024; per token as TRL has it).

    Reports `rewards/chosen` and `rewards/rejected` (beta times the log-ratio), `rewards/margins`, `rewards/accuracies`,
    `logps/chosen` and `logps/rejected`, means over the pairs of a step. Raises `ConfigError` for a value out of range.
    """

    beta: Annotated[float, Bounds(0)] = 0.1
    label_smoothing: Annotated[float, Bounds(0, 0.5)] = 0.0
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"

    own = (REFERENCE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing == 0.5:
            what = "with a label smoothing of 0.5 nothing is learned"
            raise ConfigError(what, where="DPO.label_smoothing", fix="use less")
        if self.loss_type == "ipo" and self.label_smoothing:
            raise ConfigError("ipo does not use label smoothing", where="DPO", fix="set it to 0, or use sigmoid")

    def divisor(self, batch: MicroBatch) -> float:
        """Number of pairs. Raises `BatchError` for an odd number of rows, a row without a target, or no reference."""
        pairs = super().divisor(batch)
        if batch[REFERENCE].shape != (count := len(batch["labels"]),):
            what = f"{REFERENCE} has shape {list(batch[REFERENCE].shape)} for {count} rows"
            raise BatchError(what, where="DPO", fix="give one sum per row, as with_reference does")
        return pairs

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sums over the pairs of a micro-batch."""
        sums = log_probs.sum(dim=1)
        ratios = sums - batch[REFERENCE].to(sums)
        if self.loss_type == "ipo":
            per_token = ratios / target_mask(batch).sum(dim=1)
            losses = (per_token[::2] - per_token[1::2] - 1 / (2 * self.beta)) ** 2
        else:
            margins = self.beta * (ratios[::2] - ratios[1::2])
            right, wrong = functional.logsigmoid(margins), functional.logsigmoid(-margins)
            losses = -(1 - self.label_smoothing) * right - self.label_smoothing * wrong
        return losses.sum(), _reported(self.beta * ratios, sums)


@dataclass(frozen=True)
class ORPO(_OfPairs):
    """Odds-ratio preference optimization, per pair, without a reference.

    The cross-entropy of the chosen answer per token, plus beta times the negative log-sigmoid of the log of the odds
    ratio of both, of probabilities per token (Hong et al., "ORPO: Monolithic Preference Optimization without Reference
    Model", EMNLP 2024).

    Reports what `DPO` does, where a reward is beta times the log-probability per token, and `nll` and `log_odds_ratio`
    (the log-sigmoid). Raises `ConfigError` for a value out of range.
    """

    beta: Annotated[float, Bounds(0)] = 0.1

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sums over the pairs of a micro-batch."""
        sums = log_probs.sum(dim=1)
        means = sums / target_mask(batch).sum(dim=1)
        odds = means - _log_one_minus_exp(means)
        ratios = functional.logsigmoid(odds[::2] - odds[1::2])
        told = {"nll": -means[::2].detach().sum(), "log_odds_ratio": ratios.detach().sum()}
        return (-means[::2] - self.beta * ratios).sum(), _reported(self.beta * means, sums) | told


@dataclass(frozen=True)
class SimPO(_OfPairs):
    """Simple preference optimization, per pair, without a reference.

    The negative log-sigmoid of the difference of the rewards, less `gamma`; a reward is beta times the log-probability
    per token (Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward", NeurIPS 2024).

    Reports what `DPO` does. Raises `ConfigError` for a value out of range.
    """

    beta: Annotated[float, Bounds(0)] = 2.0
    gamma: Annotated[float, Bounds(0)] = 1.0

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sums over the pairs of a micro-batch."""
        sums = log_probs.sum(dim=1)
        rewards = self.beta * sums / target_mask(batch).sum(dim=1)
        losses = -functional.logsigmoid(rewards[::2] - rewards[1::2] - self.gamma)
        return losses.sum(), _reported(rewards, sums)


@dataclass(frozen=True)
class KTO(LogProbLoss):
    """Kahneman-Tversky optimization: answers that are good or bad by themselves.

    Rows 0, 2, ... are answers, the row after each is mismatched: the same prompt with another's answer. With r the
    log-ratio of an answer to the reference, and z the mean of that over the micro-batch's mismatched rows, at least 0
    and without a gradient, a desirable answer costs 1 - sigmoid(beta * (r - z)), an undesirable one
    1 - sigmoid(beta * (z - r)), each times its weight; the divisor is answers (Ethayarajh et al., "KTO: Model
    Alignment as Prospect Theoretic Optimization", ICML 2024; z by micro-batch where TRL has it by device). So the
    micro-batch size affects the loss: z is estimated better from more answers.

    `apo_zero_unpaired` has z = 0 and no mismatched rows: all rows are answers (D'Oosterlinck et al., "Anchored
    Preference Optimization", 2024, as TRL has it).

    Reports `rewards/chosen` and `rewards/rejected` (beta times the log-ratio), `logps/chosen` and `logps/rejected`,
    each the mean over the answers of its kind, and of `kto` the mean of `kl`. Raises `ConfigError` for a value out of
    range.
    """

    beta: Annotated[float, Bounds(0)] = 0.1
    desirable_weight: Annotated[float, Bounds(0)] = 1.0
    undesirable_weight: Annotated[float, Bounds(0)] = 1.0
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"

    own = (REFERENCE, DESIRABLE)

    def __post_init__(self) -> None:
        check_fields(self, ConfigError, "KTO.")
        if self.beta == 0:
            raise ConfigError("with a beta of 0 nothing is learned", where="KTO.beta", fix="use a number above 0")

    @property
    def rows(self) -> int:
        """Rows per answer: 2 with a mismatched row, else 1."""
        return 2 if self.loss_type == "kto" else 1

    def divisor(self, batch: MicroBatch) -> float:
        """Number of answers. Raises `BatchError` for a row without a target, label or reference."""
        count = len(batch["labels"])
        if count % self.rows:
            fix = "put an answer and its mismatched one into one micro-batch, the answer first"
            raise BatchError(f"{count} rows are not pairs of answers and mismatched ones", where="KTO", fix=fix)
        if not bool(target_mask(batch).any(dim=1).all()):
            raise BatchError("a row has no target", where="KTO", fix="leave such samples out")
        for name in self.own:
            if batch[name].shape != (count,):
                raise BatchError(
                    f"{name} has shape {list(batch[name].shape)} for {count} rows", where="KTO", fix="give one per row"
                )
        return count / self.rows

    def __call__(self, log_probs: Tensor, batch: MicroBatch) -> tuple[Tensor, Sums]:
        """Sums over the answers of a micro-batch."""
        sums = log_probs.sum(dim=1)
        ratios = sums - batch[REFERENCE].to(sums)
        answers, good = ratios[:: self.rows], batch[DESIRABLE][:: self.rows].bool()
        away = answers.new_zeros(())
        if self.loss_type == "kto":
            away = ratios[1::2].mean().detach().clamp(min=0)
        margins = torch.where(good, answers - away, away - answers)
        weights = torch.where(good, self.desirable_weight, self.undesirable_weight)
        rewards, said = self.beta * answers.detach(), sums.detach()[:: self.rows]
        told: dict[str, Summed] = {}
        for kind, which in (("chosen", good), ("rejected", ~good)):
            told[f"rewards/{kind}"] = torch.where(which, rewards, 0.0).sum(), which.sum()
            told[f"logps/{kind}"] = torch.where(which, said, 0.0).sum(), which.sum()
        if self.loss_type == "kto":
            told["kl"] = away * len(answers)
        return (weights * (1 - torch.sigmoid(self.beta * margins))).sum(), told


def _log_one_minus_exp(log_probs: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, accurate at both ends (Maechler, 2012); 0 is replaced by the next number below."""
    below = log_probs.clamp(max=-torch.finfo(log_probs.dtype).tiny)
    near = below > -math.log(2)
    first = torch.where(near, below, -1.0).expm1().neg().log()
    return torch.where(near, first, torch.where(near, -1.0, below).exp().neg().log1p())


@dataclass(frozen=True)
class SmoothedCrossEntropy(LogitsLoss):
    """Cross-entropy with label smoothing and z-loss.

    `smoothing` of each label's probability is spread over the vocabulary (Szegedy et al., CVPR 2016); `z_loss` weighs
    the squared log of the softmax's denominator (Chowdhery et al., "PaLM", 2022).
    """

    smoothing: Annotated[float, Bounds(0, 1)] = 0.0
    z_loss: Annotated[float, Bounds(0)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError, "SmoothedCrossEntropy.")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]  # it has nothing of its own
        """The sum over the tokens."""
        loss = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=self.smoothing)
        return loss + self.z_loss * torch.logsumexp(logits, dim=-1).square().sum() if self.z_loss else loss


def with_reference(micro_batches: Sequence[MicroBatch], log_probs: Sequence[Tensor]) -> list[dict[str, object]]:
    """The micro-batches with the reference's log-probabilities, from `Engine.log_probs`, in the form `DPO` reads."""
    pairs = zip(micro_batches, log_probs, strict=True)
    return [{**batch, REFERENCE: found.sum(dim=1)} for batch, found in pairs]


__all__ = [
    "DESIRABLE",
    "DPO",
    "KTO",
    "ORPO",
    "REFERENCE",
    "LogProbLoss",
    "LogitsLoss",
    "LossFn",
    "SimPO",
    "SmoothedCrossEntropy",
    "target_mask",
    "with_reference",
]
