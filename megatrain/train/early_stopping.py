"""Early stopping: tracks the lowest validation loss, and whether patience has run out.

A small plain value, saved in checkpoints: a run that resumes or rolls back counts as if it had never stopped.
`run.evaluation` measures the losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class LowestLoss:
    """patience: evaluations in a row without improvement that end the run; `None` never ends it. threshold:
    minimum decrease of the loss that counts as improvement. of: what is measured, and with which loss."""

    patience: int | None = None
    threshold: float = 0.0
    of: str = ""
    since: int = -1
    """Losses up to this step measure something other than `of`."""
    loss: float = math.inf
    step: int = -1
    """Step of the lowest loss; -1 if nothing was measured."""
    waited: int = 0
    """Evaluations since the last improvement."""

    def add(self, step: int, loss: float) -> None:
        """Add the loss after `step` steps; NaN is no improvement."""
        self.waited = 0 if loss < self.loss - self.threshold else self.waited + 1
        if loss < self.loss:
            self.step, self.loss = step, loss

    @property
    def is_over(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    @property
    def why(self) -> str:
        """Why the run ends, as text."""
        by = f" by more than {self.threshold:g}" if self.threshold else ""
        times = "1 measurement" if self.waited == 1 else f"{self.waited} measurements"
        lowest = f"; the lowest was {self.loss:.4g}, after step {self.step:,}" if self.step >= 0 else ""
        return f"the validation loss has not fallen{by} in {times}{lowest}"

    def state(self) -> dict[str, Any]:
        """Its state in plain values."""
        loss = self.loss if self.step >= 0 else None
        return {"of": self.of, "since": self.since, "loss": loss, "step": self.step, "waited": self.waited}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Continue from `state`, saved after `step` steps; start anew if it measures something else, or is None."""
        found = state if state is not None and state.get("of") == self.of else {"since": step}
        self.since, self.step, self.waited = found["since"], found.get("step", -1), found.get("waited", 0)
        loss = found.get("loss")
        self.loss = math.inf if loss is None else loss
