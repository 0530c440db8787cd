"""Learning-rate schedules: the learning rate of a step is its peak times `LrSchedule.multiplier(step)`.

Steps count from 0. Every schedule starts with the same linear warm-up over W = `warmup_steps`:

    step < W      (step + 1) / W          so step 0 already learns, and step W - 1 has the full rate

After it, with T = `total_steps`, r = `min_ratio`, and x = (step - W) / (T - W) clamped to [0, 1]:

    constant      1
    linear        1 - (1 - r) x
    cosine        r + (1 - r) (1 + cos(pi x)) / 2          Loshchilov and Hutter, SGDR, ICLR 2017
    wsd           1, then 1 - (1 - r) y with y = (step - (T - D)) / D over the last D = `decay_steps` steps

So the last trained step, T - 1, is one notch above r; r applies from step T on. WSD (warm-up, stable, decay) is from
Hu et al., "MiniCPM", 2024, who leave the shape of the decay open; here it is linear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from megatrain.errors import ConfigError
from megatrain.spec.validate_fields import Bounds, check_fields

Steps = Annotated[int, Bounds(0, 1 << 60)]


@dataclass(frozen=True)
class LrSchedule:
    """A learning rate over time, relative to its peak. It depends on the step alone, so it has no state to resume.

    What the formula of its name does not use is ignored. Raises ConfigError for numbers that contradict each other.
    """

    name: Literal["constant", "cosine", "linear", "wsd"]
    total_steps: Steps
    warmup_steps: Steps = 0
    min_ratio: Annotated[float, Bounds(0, 1)] = 0.0
    decay_steps: Steps = 0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.name == "constant":
            return
        after_warmup = self.total_steps - self.warmup_steps
        if after_warmup < 0 or self.total_steps < 1:
            what = f"{self.total_steps} steps in all, {self.warmup_steps} of them warm-up"
            raise ConfigError(what, where="total_steps", fix="train for longer")
        if self.name == "wsd" and self.decay_steps > after_warmup:
            what = f"{self.decay_steps} steps of decay and {self.warmup_steps} of warm-up in {self.total_steps}"
            raise ConfigError(what, where="decay_steps", fix="give at most total_steps - warmup_steps")

    def multiplier(self, step: int) -> float:
        """The factor, in [0, 1], of the peak learning rate at `step`, counted from 0."""
        warm = (step + 1) / self.warmup_steps if step < self.warmup_steps else 1.0
        if self.name == "constant":
            return warm
        first = self.total_steps - self.decay_steps if self.name == "wsd" else self.warmup_steps
        share = 1.0 if step >= self.total_steps else max(0, step - first) / max(1, self.total_steps - first)
        if self.name == "cosine":
            return warm * (self.min_ratio + (1 - self.min_ratio) * (1 + math.cos(math.pi * share)) / 2)
        return warm * (1 - (1 - self.min_ratio) * share)
