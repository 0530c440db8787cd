"""Early stopping: the lowest validation loss so far, and whether patience with it has run out.

A value that is small and plain, so that checkpoints hold it: a run that goes on, or back, counts on as if it had never
stopped. It leaves out who measures (`run.evaluation`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class LowestLoss:
    """patience: measurements in a row without a gain after which the run ends; `None` never ends it. threshold: by how
    much a loss is to lie below the lowest to be a gain. of: what is measured, and by which loss."""

    patience: int | None = None
    threshold: float = 0.0
    of: str = ""
    since: int = -1
    """Steps done when it began to be of that: losses up to there are of something else."""
    loss: float = math.inf
    step: int = -1
    """After which it was measured; -1 where nothing has been."""
    waited: int = 0
    """Measurements since the last gain."""

    def add(self, step: int, loss: float) -> None:
        """The loss after `step` steps; one that is not a number is no gain."""
        self.waited = 0 if loss < self.loss - self.threshold else self.waited + 1
        if loss < self.loss:
            self.step, self.loss = step, loss

    @property
    def is_over(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    @property
    def why(self) -> str:
        """Why the run ends, in words."""
        by = f" by more than {self.threshold:g}" if self.threshold else ""
        times = "1 measurement" if self.waited == 1 else f"{self.waited} measurements"
        lowest = f"; the lowest was {self.loss:.4g}, after step {self.step:,}" if self.step >= 0 else ""
        return f"the validation loss has not fallen{by} in {times}{lowest}"

    def state(self) -> dict[str, Any]:
        """In plain values."""
        loss = self.loss if self.step >= 0 else None
        return {"of": self.of, "since": self.since, "loss": loss, "step": self.step, "waited": self.waited}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Count on from `state`, of after `step` steps; begin there where it is of something else, or there is none."""
        found = state if state is not None and state.get("of") == self.of else {"since": step}
        self.since, self.step, self.waited = found["since"], found.get("step", -1), found.get("waited", 0)
        loss = found.get("loss")
        self.loss = math.inf if loss is None else loss
