"""Learning-rate schedules: the learning rate of a step is its peak times `multiplier(step)`.

Steps count from 0. Every schedule starts with the same linear warm-up over W = `warmup_steps`:

    step < W      (step + 1) / W          so step 0 already learns, and step W - 1 has the full rate

After it, with T = `total_steps`, r = `min_ratio`, and x = (step - W) / (T - W) clamped to [0, 1]:

    constant      1
    linear        1 - (1 - r) x
    cosine        r + (1 - r) (1 + cos(pi x)) / 2          Loshchilov and Hutter, SGDR, ICLR 2017
    wsd           1, then 1 - (1 - r) y with y = (step - (T - D)) / D over the last D = `decay_steps` steps

So the last trained step, T - 1, is one notch above r; r applies from step T on. WSD (warm-up, stable, decay) is from
Hu et al., "MiniCPM", 2024, who leave the shape of the decay open; here it is linear.

Multipliers depend on the step alone, so schedules have no state to resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Protocol

from megatrain.errors import ConfigError
from megatrain.spec.validate_fields import Bounds, check_fields

Steps = Annotated[int, Bounds(0, 1 << 60)]


class LrSchedule(Protocol):
    """A learning rate over time, relative to its peak."""

    def multiplier(self, step: int) -> float:
        """The factor, in [0, 1], of the peak learning rate at `step`, counted from 0."""
        ...


@dataclass(frozen=True)
class Constant:
    """Warm-up, then the full rate."""

    warmup_steps: Steps = 0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    def multiplier(self, step: int) -> float:
        return _warmup(step, self.warmup_steps)


@dataclass(frozen=True)
class Linear:
    """Warm-up, then a straight line to `min_ratio` at `total_steps`."""

    total_steps: Steps
    warmup_steps: Steps = 0
    min_ratio: Annotated[float, Bounds(0, 1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        _check_span(self.warmup_steps, self.total_steps)

    def multiplier(self, step: int) -> float:
        x = _progress(step, self.warmup_steps, self.total_steps)
        return _warmup(step, self.warmup_steps) * (1 - (1 - self.min_ratio) * x)


@dataclass(frozen=True)
class Cosine:
    """Warm-up, then half a cosine to `min_ratio` at `total_steps`."""

    total_steps: Steps
    warmup_steps: Steps = 0
    min_ratio: Annotated[float, Bounds(0, 1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        _check_span(self.warmup_steps, self.total_steps)

    def multiplier(self, step: int) -> float:
        x = _progress(step, self.warmup_steps, self.total_steps)
        height = self.min_ratio + (1 - self.min_ratio) * (1 + math.cos(math.pi * x)) / 2
        return _warmup(step, self.warmup_steps) * height


@dataclass(frozen=True)
class WarmupStableDecay:
    """Warm-up, the full rate, then a straight line to `min_ratio` over the last `decay_steps` steps."""

    total_steps: Steps
    decay_steps: Steps
    warmup_steps: Steps = 0
    min_ratio: Annotated[float, Bounds(0, 1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        _check_span(self.warmup_steps, self.total_steps)
        if not 0 <= self.decay_steps <= self.total_steps - self.warmup_steps:
            raise ConfigError(
                f"{self.decay_steps} steps of decay and {self.warmup_steps} of warm-up in {self.total_steps}",
                where="decay_steps",
                fix="give at most total_steps - warmup_steps",
            )

    def multiplier(self, step: int) -> float:
        y = _progress(step, self.total_steps - self.decay_steps, self.total_steps)
        return _warmup(step, self.warmup_steps) * (1 - (1 - self.min_ratio) * y)


NAMES = ("constant", "cosine", "linear", "wsd")


def lr_schedule(
    name: str, *, total_steps: int, warmup_steps: int = 0, min_ratio: float = 0.0, decay_steps: int = 0
) -> LrSchedule:
    """The schedule of this name, one of `NAMES`; arguments that its formula above does not use are ignored.

    Raises ConfigError for an unknown name (with the nearest known one) and for numbers that contradict each other.
    """
    if name == "constant":
        return Constant(warmup_steps)
    if name == "linear":
        return Linear(total_steps, warmup_steps, min_ratio)
    if name == "cosine":
        return Cosine(total_steps, warmup_steps, min_ratio)
    if name == "wsd":
        return WarmupStableDecay(total_steps, decay_steps, warmup_steps, min_ratio)
    nearest = get_close_matches(name.lower(), NAMES, 1, cutoff=0.4)
    fix = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(NAMES)}"
    raise ConfigError(f"no learning-rate schedule is called {name!r}", where="lr schedule", fix=fix)


def _warmup(step: int, warmup_steps: int) -> float:
    return (step + 1) / warmup_steps if step < warmup_steps else 1.0


def _progress(step: int, first: int, end: int) -> float:
    """How far `step` is from `first` (0) to `end` (1), clamped; 1 for an empty span."""
    if step >= end:
        return 1.0
    return max(0.0, (step - first) / (end - first)) if end > first else 0.0


def _check_span(warmup_steps: int, total_steps: int) -> None:
    if total_steps < max(1, warmup_steps):
        raise ConfigError(
            f"{total_steps} steps in all, {warmup_steps} of them warm-up",
            where="total_steps",
            fix="train for longer",
        )
