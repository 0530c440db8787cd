"""What happens in a training run, as frozen values.

The loop tells events, and every report (metrics file, trackers, the line on the terminal) reads them, so each number
has one definition, here. `elapsed_seconds` counts from the start of training, measurements and samples included. Left
out: how any of it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

MAX_EXPONENT = 709.0
"""Of e, in a float."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a training step did.

    loss: mean over all target tokens of the step, or what the loss function makes it. grad_norm: global 2-norm of the
    gradient before clipping. tokens: target tokens. stall_seconds: time in which compute waited for copies or updates.
    written_nbytes: what it wrote to the disk tier, on all ranks. metrics: what the loss function reports, means like
    the loss. by_micro_batch: the same of each micro-batch, and its router auxiliary loss without the coefficient as
    `aux_loss`.
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
    """A step was done. `seconds` is its wall time, the wait for its data included, measurements and samples not."""

    step: int
    """Steps done, this one included."""
    steps: int
    """Steps of the whole run."""
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Target tokens; padding is none."""
    seconds: float
    data_seconds: float
    """Part of `seconds` in which the step waited for its micro-batches."""
    stall_seconds: float
    """Part of `seconds` in which compute waited for copies or updates."""
    flops: float
    """Necessary floating-point operations of the step: forward and backward, nothing recomputed."""
    peak_flops: float
    """Operations per second of a large matrix product on the device, measured, or of the quickest step so far where
    that was more."""
    nbytes: Mapping[str, int]
    """Bytes held per tier."""
    elapsed_seconds: float
    resumed_at: int = 0
    """Steps that were done before this process took the run up."""
    epoch: float | None = None
    """Passes over the data so far, this step included; None where nobody has told."""
    epochs: float | None = None
    """Passes over the data in the whole run, where that is known."""
    written_nbytes: int = 0
    """Bytes that the step wrote to the disk tier, on all ranks."""
    kept: Mapping[str, float] = field(default_factory=dict)
    """What was left of the layers' forwards (a word of `spec.Keep`) -> the share of them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the loss reports of the step: rewards of preferences, say."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def written_nbytes_per_day(self) -> float:
        """Bytes that a day of such steps writes to the disk tier, to be compared with what its drives are made for."""
        return self.written_nbytes / self.seconds * 86_400

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al., "PaLM", 2022): the time that the model's products would take at
        the measured peak, over `seconds`; products of recomputation do not count."""
        return self.flops / self.peak_flops / self.seconds

    @property
    def stall_share(self) -> float:
        """Share of the time in which compute waited, for data, copies or updates."""
        return (self.data_seconds + self.stall_seconds) / self.seconds


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step gave a loss or gradient that is not finite, and was not applied."""

    step: int
    steps: int
    reason: str
    in_a_row: int
    seconds: float
    elapsed_seconds: float
    ends: bool = False
    """Whether the run ends with it; the error then tells the reason."""


def mean_loss(recent: Iterable[Stepped | Skipped]) -> float:
    """The loss that a person is shown: the mean of recent steps, one of which was done at least."""
    return fmean(one.loss for one in recent if isinstance(one, Stepped))


def perplexity_of(loss: float) -> float:
    """e to a cross-entropy; infinite where that is too large for a float."""
    return math.exp(loss) if loss < MAX_EXPONENT else math.inf if loss == loss else math.nan


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The validation loss, mean over the target tokens of all sources, was measured after `step` steps."""

    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the loss reports with it."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """The loss of each source, by its name, where there are several."""

    @property
    def perplexity(self) -> float:
        """Per token; not a number where the loss is another than cross-entropy."""
        return math.nan if self.metrics else perplexity_of(self.loss)


@dataclass(frozen=True, slots=True)
class Scored:
    """After `step` steps a metric of the user's, or the tasks of lm_eval, have given these numbers."""

    step: int
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StoppedEarly:
    """The run ends after `step` steps, as it has been asked to, before it is at its last one."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """The model continued `prompt` with `text` after `step` steps."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Replanned:
    """Between two steps, another policy was taken up, because measured times say that it is quicker."""

    step: int
    seconds: float
    """Of a step as it was, by the measured times."""
    new_seconds: float
    changes: str
    """Fields of the policy, before -> after."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Layers were compiled by the end of a step, so many structures and shapes of them, within `seconds` of it."""

    step: int
    compilations: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Planned:
    """A run, or a part of it, begins after `step` steps; this is what was foreseen."""

    step: int
    model: str
    facts: Mapping[str, str]
    """What a person is shown before training: a name, and what it is."""
    seconds: float
    """Of a step."""
    nbytes: Mapping[str, Mapping[str, int]]
    """Tier -> use -> bytes, where most of the tier is in use."""
    held_nbytes: Mapping[str, Mapping[str, int]]
    """Tier -> use -> bytes that are held now."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run goes on after `step` steps that an earlier process has done."""

    step: int
    steps: int
    checkpoint: str
    """Its folder."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint of the state after `step` steps is whole."""

    step: int
    seconds: float
    """That it took, beside training."""
    nbytes: int
    checkpoint: str
    """Its folder."""
    shared_nbytes: int = 0
    """Of files that are those of the checkpoint before, and were not written again."""
    streamed: str = ""
    """Why rank 0 has written it alone, where several ranks have not done so together."""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Step `step` was not finite; the run goes on after step `to`, and without the data of that one."""

    step: int
    to: int
    reason: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Something went wrong that training can go on without."""

    step: int
    what: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Training ended after `step` of `steps` steps; fewer than asked for when it was told to stop."""

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
    | Planned
    | Replanned
    | Compiled
    | Resumed
    | Saved
    | RolledBack
    | Warned
    | Ended
)
Watcher = Callable[[Event], None]
