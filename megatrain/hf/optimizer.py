"""The optimizer that a `Trainer` sees: parameter groups whose hyperparameters the engine reads, without state.

The engine updates weights while it streams them, so `step` does nothing. Moments are in the engine and in its
checkpoints. Writing them to `optimizer.pt` too would make each checkpoint two thirds larger and slower, and need memory
for a copy. So a stock `Trainer` cannot resume from one, and its error says why (`MOMENTS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatrain.errors import ConfigError
from megatrain.optim import Muon, Optimizer

MOMENTS = (
    b"this checkpoint was written by a streamed trainer, and its optimizer's moments are in MegaTrain's files: resume "
    b"with megatrain.hf.streamed, or start from the weights of this folder as a model"
)
"""Stored in `optimizer.pt` as the first parameter's `step`. When torch's AdamW loads it, converting it to a float fails
with this text. It is bytes because AdamW would iterate over a string."""

WHERE = "StreamedTrainer"
NAMES = {"lr": "learning rates", "betas": "betas", "eps": "values of eps", "weight_decay": "weight decays"}
"""Names of hyperparameters that groups have, if the optimizer has them -> of their values."""


class EngineOptimizer(torch.optim.Optimizer):
    """The parameter groups of a `Trainer`: one with weight decay and one without, then two more for each pattern in
    `learning_rates`. With Muon just the first two, since all rates follow that of its matrices.

    lr: the learning rate of parameters that match no pattern; by default `algorithm.lr`. on_step: called by `step`.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Optimizer,
        lr: float | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._has_rates = not isinstance(algorithm, Muon) and bool(algorithm.learning_rates)
        places = [
            (algorithm.group(name) if self._has_rates else 0, algorithm.decays(name, parameter.shape))
            for name, parameter in trained
        ]
        rates = [("", algorithm.lr if lr is None else lr), *(algorithm.learning_rates if self._has_rates else ())]
        groups = [
            {
                "params": [p for (_, p), place in zip(trained, places, strict=True) if place == (group, decays)],
                "weight_decay": algorithm.weight_decay if decays else 0.0,
                "lr": rate,
                "pattern": pattern,
            }
            for group, (pattern, rate) in enumerate(rates)
            for decays in (True, False)
        ]
        self._common_to_all = [name for name in ("betas", "eps") if hasattr(algorithm, name)]
        rest = {name: getattr(algorithm, name) for name in (*self._common_to_all, "weight_decay")}
        super().__init__(groups, {"lr": groups[0]["lr"], **rest})
        self._algorithm, self._initial_groups, self._on_step = algorithm, self._parameter_ids(), on_step
        self._peak_lr = rates[0][1]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Call `on_step`; the engine has updated the weights already."""
        self._on_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no gradients are kept here."""

    @property
    def lr(self) -> float:
        """The learning rate of the next step for parameters that match no pattern of `learning_rates`."""
        return float(self._common("lr", self.param_groups[:2]))

    @property
    def algorithm(self) -> Optimizer:
        """The hyperparameters of the next step, as set in the groups; with several learning rates, those too.

        Raises `ConfigError` for values out of range, and for groups that differ where the engine has one value for all.
        """
        fix = "set it in the training arguments, or leave it as it was"
        if self._parameter_ids() != self._initial_groups:
            raise ConfigError("parameters have been moved to other groups", where=WHERE, fix=fix)
        for name in ("amsgrad", "maximize"):
            if any(group.get(name) for group in self.param_groups):
                raise ConfigError(f"{name} in a parameter group is not supported", where=WHERE, fix=fix)
        for other in self.param_groups[1::2]:
            if other["weight_decay"] and other["params"]:
                what = f"weight_decay={other['weight_decay']} in a group without weight decay is not supported"
                raise ConfigError(what, where=WHERE, fix="set that of the first group only")
        values = {name: self._common(name) for name in self._common_to_all}
        given: dict[str, Any] = {name: tuple(value) if name == "betas" else value for name, value in values.items()}
        given["weight_decay"] = self._common("weight_decay", self.param_groups[::2])
        if self._has_rates:
            pairs = (self.param_groups[at : at + 2] for at in range(2, len(self.param_groups), 2))
            rates = (float(self._common("lr", pair)) for pair in pairs)
            patterns = (pattern for pattern, _ in self._algorithm.learning_rates)
            given |= {"lr": self.lr, "learning_rates": tuple(zip(patterns, rates, strict=True))}
        return replace(self._algorithm, **given)

    @property
    def with_peak_rates(self) -> Optimizer:
        """`algorithm` with the learning rates that the scheduler started from, for a checkpoint."""
        peaks = {"learning_rates": self._algorithm.learning_rates} if self._has_rates else {}
        return replace(self.algorithm, lr=self._peak_lr, **peaks)

    def _common(self, name: str, groups: Sequence[dict[str, Any]] = ()) -> Any:
        """The value that these groups have in common, or all groups if none are given. Empty groups are ignored.

        Groups from an older checkpoint may lack entries; they have the default. Raises `ConfigError` if values differ.
        """
        groups = groups or self.param_groups
        groups = [group for group in groups if group["params"]] or groups
        values = [group.get(name, self.defaults[name]) for group in groups]
        if any(each != values[0] for each in values):
            what = f"the parameter groups have different {NAMES[name]}: {sorted(values)}"
            fix = "set rates by name in engine_options={'optimizer': AdamW(learning_rates=...)}" if name == "lr" else ""
            raise ConfigError(what, where=WHERE, fix=fix or "set one value for all")
        return values[0]

    def _parameter_ids(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The groups with their current learning rates; instead of moments, a message where those are."""
        state = super().state_dict()
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        return {**state, "state": {number: {"step": MOMENTS} for number in numbers[:1]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the groups, which are matched by position. Raises `ConfigError` if they were saved with other
        patterns of `learning_rates`."""
        before, now = (
            [group.get("pattern", "") for group in groups] for groups in (state_dict["param_groups"], self.param_groups)
        )
        if before != now:
            what = f"was saved with learning_rates for {_listed(before)}, and now they are for {_listed(now)}"
            raise ConfigError(
                what, where="optimizer.pt", fix="give the same patterns in the same order, or start a new run"
            )
        super().load_state_dict({**state_dict, "state": {}})


def _listed(patterns: Sequence[str]) -> str:
    return ", ".join(map(repr, dict.fromkeys(filter(None, patterns)))) or "no pattern"
