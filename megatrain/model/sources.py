"""Where a model's weights come from, as one protocol: a structure to take apart, and a way to fill the store with it.

`ModelSource` has a whole model in memory, `PretrainedSource` (in `pretrained`) files, `FreshSource` (in `fresh`) an
initialiser and a seed. The last two never hold the model: what they need beyond the store is a few parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from megatrain.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (done, total) in a unit of the source's own; done never falls, and ends at total."""


class Masters(Protocol):
    """The float32 truth by parameter name; `memory.Store` is one."""

    def master(self, name: str) -> Tensor:
        """A float32 copy of one parameter, in its shape, on the cpu."""
        ...

    def write_master(self, name: str, value: Tensor) -> None:
        """Set one parameter. `value` has its shape and may be lost or overwritten after the call."""
        ...


class Source(Protocol):
    """A model's structure and its weights, which need not exist in one place."""

    @property
    def model(self) -> PreTrainedModel:
        """What `port_model` takes: parameters may be on the meta device, buffers have their values."""
        ...

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        """Write every parameter of every unit.

        `units` are lists of names as in `model.named_parameters()` (tied ones once), in streaming order; together they
        name every parameter. Raises `ModelError` when one cannot be written; the masters are then worthless.
        """
        ...


class ModelSource:
    """The weights of a model that the user holds; it is copied from, and left as it is."""

    def __init__(self, model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise ModelError(
                    f"its parameter {name} has no value (meta device)",
                    where=f"model {type(model).__name__}",
                    fix="load its weights, or train from the folder that holds them",
                )
        self.model = model

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        """Write every parameter of every unit (see `Source`)."""
        parameters = dict(self.model.named_parameters())
        report = Report(progress, sum(parameter.numel() for parameter in parameters.values()))
        for unit in units:
            for name in unit:
                masters.write_master(name, parameters[name].detach())
                report.add(parameters[name].numel())
        report.end()


class Report:
    """Counts towards a total, and tells `progress` about it."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self.total = progress, 0, total

    def add(self, numbers: int) -> None:
        self._done += numbers
        if self._progress:
            self._progress(min(self._done, self.total), self.total)

    def end(self) -> None:
        """All is done, whatever has been counted."""
        if self._done != self.total:
            self.add(self.total - self._done)


def require_all(written: Iterable[str], units: Sequence[Sequence[str]], *, where: str) -> None:
    """Raise `ModelError` naming the parameters of `units` that have not been written."""
    if missing := sorted({name for unit in units for name in unit} - set(written)):
        raise ModelError(f"no value for {listed(missing)}", where=where)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names of a list, and how many more there are."""
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
