"""The events of a training run, as frozen values.

The loop emits events, and every report (metrics file, trackers, terminal) reads them, so each number is defined
once, here. `elapsed_seconds` counts from the start of training, including evaluations and samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from megatrain.formatting import SECONDS_PER_DAY

MAX_EXPONENT = 709.0
"""Largest exponent of e that fits a float."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a training step.

    loss: mean over all target tokens of the step, unless the loss function defines it otherwise. grad_norm: global
    2-norm of the gradient before clipping. tokens: target tokens. stall_seconds: time in which compute waited for
    copies or updates. written_nbytes: bytes written to the disk tier, on all ranks. metrics: the loss function's
    metrics, averaged like the loss. by_micro_batch: the same for each micro-batch, plus its router auxiliary loss
    without coefficient as `aux_loss`.
    """

    loss: float
    grad_norm: float
    tokens: int
    stall_seconds: float
    written_nbytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_micro_batch: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step was done. `seconds`: its wall time, including the wait for data, without evaluations and samples."""

    step: int
    """Steps done, including this one."""
    steps: int
    """Steps of the whole run."""
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Target tokens, without padding."""
    seconds: float
    data_seconds: float
    """Part of `seconds` spent waiting for micro-batches."""
    stall_seconds: float
    """Part of `seconds` in which compute waited for copies or updates."""
    flops: float
    """Model FLOPs of the step: forward and backward, without recomputation."""
    peak_flops: float
    """Measured FLOPs per second of large matrix products on the device, or of the fastest step so far if higher."""
    nbytes: Mapping[str, int]
    """Bytes held per tier; of several ranks, by the one that holds most of it."""
    elapsed_seconds: float
    resumed_at: int = 0
    """Steps done before this process resumed the run."""
    epoch: float | None = None
    """Epochs so far, including this step; None if unknown."""
    epochs: float | None = None
    """Epochs of the whole run, if known."""
    written_nbytes: int = 0
    """Bytes written to the disk tier, on all ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The loss function's metrics: preference rewards, say."""
    slowest: tuple[int, float] | None = None
    """Of several ranks, the one that was busy longest, and by what factor longer than their mean."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def written_nbytes_per_day(self) -> float:
        """Bytes that a day of such steps writes to the disk tier, to compare with its drives' endurance."""
        return self.written_nbytes / self.seconds * SECONDS_PER_DAY

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al., "PaLM", 2022): model FLOPs per second over the measured peak,
        without recomputation."""
        return self.flops / self.peak_flops / self.seconds

    @property
    def stall_share(self) -> float:
        """Share of the time in which compute waited for data, copies or updates."""
        return (self.data_seconds + self.stall_seconds) / self.seconds


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step had a loss or gradient that is not finite, and was not applied."""

    step: int
    steps: int
    reason: str
    in_a_row: int
    seconds: float
    elapsed_seconds: float
    ends: bool = False
    """Whether the run ends here; the error then says why."""


def mean_loss(recent: Iterable[Stepped | Skipped]) -> float:
    """The displayed loss: the mean over recent steps, at least one of which was done."""
    return fmean(one.loss for one in recent if isinstance(one, Stepped))


def perplexity_of(loss: float) -> float:
    """exp of a cross-entropy; infinite if too large for a float."""
    return math.exp(loss) if loss < MAX_EXPONENT else math.inf if loss == loss else math.nan


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The validation loss after `step` steps: the mean over the target tokens of all sources."""

    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The loss function's metrics."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """The loss of each source by name, if there are several."""

    @property
    def perplexity(self) -> float:
        """Per token; NaN if the loss is not cross-entropy."""
        return math.nan if self.metrics else perplexity_of(self.loss)


@dataclass(frozen=True, slots=True)
class Scored:
    """Results of a user's metric, or of lm_eval tasks, after `step` steps."""

    step: int
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StoppedEarly:
    """The run ends after `step` steps, before its last one, by early stopping."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """The model's continuation `text` of `prompt` after `step` steps."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Replanned:
    """Another policy was adopted between two steps, because measured times predict that it is faster."""

    step: int
    seconds: float
    """Seconds per step with the old policy, by measured times."""
    new_seconds: float
    changes: str
    """Fields of the policy, before -> after."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run continues after `step` steps done by an earlier process."""

    step: int
    steps: int
    checkpoint: str
    """Its folder."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint of the state after `step` steps is complete."""

    step: int
    seconds: float
    """Duration of the save, during training."""
    nbytes: int
    checkpoint: str
    """Its folder."""
    shared_nbytes: int = 0
    """Bytes of files shared with the previous checkpoint instead of written again."""
    streamed: str = ""
    """Why rank 0 wrote it alone, if several ranks did not write it together."""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Step `step` was not finite; the run continues after step `to`, without that step's data."""

    step: int
    to: int
    reason: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Something failed that training can continue without."""

    step: int
    what: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Training ended after `step` of `steps` steps; fewer if it was told to stop."""

    step: int
    steps: int
    elapsed_seconds: float


Event = (
    Stepped
    | Skipped
    | Evaluated
    | Scored
    | StoppedEarly
    | Sampled
    | Replanned
    | Resumed
    | Saved
    | RolledBack
    | Warned
    | Ended
)
Watcher = Callable[[Event], None]


def tell_all(watchers: Sequence[Watcher], *events: Event | None) -> None:
    for event in events:
        if event is not None:
            for watch in watchers:
                watch(event)
