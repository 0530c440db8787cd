"""Defines where a model's weights come from: one protocol for a model in memory, in files, or freshly initialised.

`ModelSource` has a whole model in memory, `PretrainedSource` (in `pretrained`) files, `FreshSource` (in `initialize`)
an initialiser and a seed. The last two need no more than a few parameters in memory besides the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatrain.errors import ModelError
from megatrain.model.architecture import auto_class, plain_errors, read_config
from megatrain.model.hub import is_local, located
from megatrain.spec import FileBytes

Progress = Callable[[int, int], None]
"""Called with (done, total) in a unit of the source's choice; done never decreases, and ends at total."""


class Masters(Protocol):
    """The float32 masters by parameter name; `memory.Store` is one."""

    def master(self, name: str) -> Tensor:
        """A float32 copy of one parameter, in its shape, on the cpu."""
        ...

    def write_master(self, name: str, value: Tensor) -> None:
        """Set one parameter. `value` has its shape and may be overwritten by the call."""
        ...


class RenamedMasters:
    """Masters by a source's names, which stand for one name each, or several; others are not written."""

    def __init__(
        self, masters: Masters, names: Mapping[str, Sequence[str]], changed: Callable[[str, Tensor], Tensor]
    ) -> None:
        """changed: makes of (name, value) of the source what is written."""
        self._masters, self._names, self._changed = masters, names, changed

    def master(self, name: str) -> Tensor:
        return self._masters.master(self._names[name][0])

    def write_master(self, name: str, value: Tensor) -> None:
        for renamed in self._names.get(name, ()):
            self._masters.write_master(renamed, self._changed(name, value))


@runtime_checkable
class MastersByRange(Protocol):
    """Masters that are set by ranges, so that no parameter need be whole in memory; `memory.Store` is one."""

    @property
    def is_shared(self) -> bool:
        """Whether only parts of parameters are wanted."""
        ...

    def write_ranges(self, name: str, read: Callable[[int, int], Tensor]) -> None:
        """Set what is wanted of one parameter from `read(start, stop)`, float32[stop - start]."""
        ...


class Fills(Protocol):
    """Weights of a model, which need not all be in one place."""

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        """Write every parameter of every unit.

        `units` are lists of names as in `model.named_parameters()` (tied ones once), in streaming order; together they
        name every parameter. Raises `ModelError` if one cannot be written; the masters are then invalid.
        """
        ...


class Source(Fills, Protocol):
    """A model's structure and its weights."""

    @property
    def model(self) -> PreTrainedModel:
        """The model for `port_model`: parameters may be on the meta device, buffers have values."""
        ...


class InFiles(NamedTuple):
    """Parameters whose bytes a source's files hold: name -> byte ranges in order; and for the others, why not."""

    files: Mapping[str, tuple[FileBytes, ...]]
    others: Mapping[str, str]


def in_files_of(source: Fills, names: Iterable[str], dtype: torch.dtype) -> InFiles:
    """Which of these parameters exist byte for byte in a source's files in `dtype`, and why the others do not."""
    ask = getattr(source, "in_files", None)
    if ask is None:
        return InFiles({}, dict.fromkeys(names, "does not come from files"))
    in_files: InFiles = ask(names, dtype)
    return in_files


class ModelSource:
    """The weights of a model that the user holds; they are copied, and the model is not changed."""

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
        parameters = dict(self.model.named_parameters())
        report = Report(progress, sum(parameter.numel() for parameter in parameters.values()))
        for unit in units:
            for name in unit:
                masters.write_master(name, parameters[name].detach())
                report.add(parameters[name].numel())
        report.end()


class Report:
    """Counts progress towards a total and reports it to `progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self.total = progress, 0, total

    def add(self, numbers: int) -> None:
        self._done += numbers
        if self._progress:
            self._progress(min(self._done, self.total), self.total)

    def end(self) -> None:
        """Report completion, whatever has been counted."""
        if self._done != self.total:
            self.add(self.total - self._done)


def require_all(written: Iterable[str], units: Sequence[Sequence[str]], *, where: str) -> None:
    """Raise `ModelError` naming parameters of `units` that have not been written."""
    if missing := sorted({name for unit in units for name in unit} - set(written)):
        raise ModelError(f"no value for {listed(missing)}", where=where)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names of a list, and how many more there are."""
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


# Whole models in memory -----------------------------------------------------------------------------------------------
#
# Not used for training, where a source fills the store unit by unit without a second copy of the model: to sample from
# a saved model.


def load_causal_lm(
    source: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal language model with its weights, from a local folder or a hub name, in training mode.

    dtype: of the weights; the library chooses those of buffers. trust_remote_code: allow the model's own code. Raises
    `ModelError` if it is missing, unreadable, or not a causal language model.
    """
    with quiet(), plain_errors(f"model {source}"):
        source = located(source, where=f"model {source}")
        config = read_config(source, where=f"model {source}", trust_remote_code=trust_remote_code)
        model = auto_class(config).from_pretrained(
            source, dtype=dtype, local_files_only=is_local(source), trust_remote_code=trust_remote_code
        )
    loaded: PreTrainedModel = model.train()
    return loaded


class quiet:
    """Silences transformers' progress bars and notices in the block; errors are still raised."""

    def __enter__(self) -> None:
        self._level = transformers_logging.get_verbosity()
        self._had_bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._level)
        if self._had_bars:
            transformers_logging.enable_progress_bar()
