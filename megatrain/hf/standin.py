"""The user's model while the engine holds its weights: all but empty, saved by the engine, and loud where it is run.

A `Trainer`, its callbacks and its loggers look at a model in many places: its config, its number of parameters, its
mode. So the model stays what it is, with parameters that take no memory, and gets its weights back when training ends.
Until then they read as nan, and a forward pass is refused. A model that was never loaded (a folder's) stays without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain.errors import ModelError

OWN = ("forward", "save_pretrained")
"""Methods that a stand-in has of its own; TRL puts a `forward` of its own there too."""


class StandIn:
    """A model without its weights. `export` is called with a folder in place of `save_pretrained`."""

    def __init__(self, model: nn.Module, export: Callable[[Path], object]) -> None:
        self.model, self._export = model, export
        self.loaded = not any(parameter.is_meta for parameter in model.parameters())
        """Whether the user had the weights in memory, and gets them back."""
        self._before: dict[str, Any] | None = None

    def take(self) -> None:
        """The engine holds the weights from now on."""
        if self._before is not None:
            return
        self._before = {name: self.model.__dict__[name] for name in OWN if name in self.model.__dict__}
        self.model.__dict__ |= {"forward": _refusing(self.model.forward), "save_pretrained": self._save}
        if self.loaded:
            for parameter in self.model.parameters():
                nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
                parameter.data = nothing.expand(parameter.shape)

    def give_back(self, master: Callable[[str], torch.Tensor]) -> None:
        """The model is the user's again, with the weights that `master` gives by name, each in its own dtype."""
        if self._before is None or not self.loaded:
            return
        for name, parameter in self.model.named_parameters():
            parameter.data = master(name).to(parameter.dtype)
        for name in OWN:
            self.model.__dict__.pop(name, None)
        self.model.__dict__ |= self._before
        self._before = None

    def _save(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """As `PreTrainedModel.save_pretrained`. Raises `ModelError` for what the engine's export does not offer."""
        if refused := sorted({*options, *(["state_dict"] if state_dict is not None else [])} - {"safe_serialization"}):
            raise ModelError(
                f"is saved by the engine, without {refused[0]}", where="save_pretrained", fix="leave it out"
            )
        if is_main_process:
            self._export(Path(save_directory))


def _refusing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `forward`, with its signature, by which a `Trainer` knows the columns that a model takes."""

    @wraps(forward)
    def refused(*_: Any, **__: Any) -> Any:
        fix = "use trainer.evaluate, trainer.save_model or trainer.engine.generate; after train() the model has them"
        raise ModelError("its weights are in the streaming engine", where="the trainer's model", fix=fix)

    return refused


__all__ = ["StandIn"]
