"""`megatrain export`: rewrite a model folder in either precision, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.checkpoint.export import export_pieces
from megatrain.checkpoint.folder import refuse_damaged_weights
from megatrain.data.tokenizer import load_tokenizer, save_tokenizer
from megatrain.errors import DataError, ExportError
from megatrain.model import (
    AdaptedSource,
    MergedSource,
    PretrainedSource,
    Progress,
    Source,
    WeightsInMemory,
    listed,
    model_named,
    port_model,
    pretrained_source,
)
from megatrain.run.existing_run import holds_model
from megatrain.spec import ModelSpec, Precision, UnitSpec
from megatrain.spec.layout import SAVED_AT_ONCE
from megatrain.system.paths import usable_path
from megatrain.train.progress import printable


@dataclass(frozen=True)
class ModelToRead:
    """Which model is read, and with what.

    name: a model folder, run folder or hub name. base: of an adapter, in place of the one that it names.
    trust_remote_code: run code that comes with the model.
    """

    name: str
    base: str | None = None
    trust_remote_code: bool = False


def run_export(
    source: str | ModelToRead,
    target: str | Path,
    *,
    precision: Precision = "bf16",
    overwrite: bool = False,
    merge: bool = False,
    progress: Progress | None = None,
    notice: Callable[[str], object] = lambda line: None,
) -> Path:
    """Write the model and tokenizer of `source` (model folder, run folder or hub name) to `target`; returns its path.

    precision: of the weights. overwrite: replace a model in `target`. merge: `source` is an adapter; merge it into its
    base in float32 and round once. progress: called with (done, total) bytes. notice: called with lines for the user
    about the source, and about a model that is replaced. Tensors that the model does not read are copied from the
    source.

    Raises `ModelError` if the model cannot be read, `ExportError` if the folder cannot be written or already holds a
    model, and if `merge` does not match whether `source` is an adapter, and `DamagedCheckpoint` for a checkpoint whose
    weights have changed.
    """
    folder_path = usable_path(target, where="TARGET", error=ExportError, to_write="folder")
    if holds_model(folder_path, overwrite=overwrite):
        notice(f"replacing the model in {folder_path}")
    source = ModelToRead(source) if isinstance(source, str) else source
    name = model_named(source.name)
    refuse_damaged_weights(name)
    pretrained = pretrained_source(name, trust_remote_code=source.trust_remote_code, base=source.base)
    adapted = pretrained if isinstance(pretrained, AdaptedSource) else None
    if merge == (adapted is None):
        what = "is not an adapter, so there is nothing to merge" if merge else "is an adapter"
        fix = "leave --merge out" if merge else "add --merge to write its base with the adapter merged in"
        raise ExportError(what, where=f"model {source.name}", fix=fix)
    if left_out := pretrained.left_out():
        notice(f"copied unchanged: {printable(left_out)}")
    written_from: Source = pretrained if adapted is None else MergedSource(adapted)
    ported = port_model(written_from.model, torch.float32)
    masters = _Masters(written_from, ported.structure)
    written = export_pieces(
        ported,
        masters.read,
        folder_path,
        precision=precision,
        facts={"made from": source.name},
        write_more=_tokenizer(name) or (None if adapted is None else _tokenizer(adapted.base_name)),
        progress=progress,
    )
    if masters.not_finite:
        names = listed([*masters.not_finite])
        notice(f"written unchanged, although some weights of the source are not finite: {names}")
    return written


class _Masters:
    """The parameters of a source: large ones are read by ranges, if its files hold their elements, others by unit."""

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        self._source = source
        self._units = {param.name: unit for unit in spec.units for param in unit.params}
        self._held: dict[str, Callable[[int, int], Tensor]] = {}
        """Name -> what reads elements [start, stop) of the parameters of one unit."""
        self.not_finite: dict[str, None] = {}
        """Names of parameters with values that are not, in order."""

    def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Elements [start, stop) of a parameter, as float32."""
        if name not in self._held:
            self._held.clear()
            self._hold(self._units[name])
        values: NDArray[np.float32] = self._held[name](start, stop).numpy()
        if not np.isfinite(values).all():
            self.not_finite[name] = None
        return values

    def _hold(self, unit: UnitSpec) -> None:
        if isinstance(self._source, PretrainedSource):
            for param in unit.params:
                is_large = param.numel > SAVED_AT_ONCE // 4
                if is_large and (in_runs := self._source.by_ranges(param.name)) is not None:
                    self._held[param.name] = in_runs.read
        memory = WeightsInMemory()
        self._source.fill(memory, [[param.name for param in unit.params if param.name not in self._held]])
        for name, value in memory.values.items():
            flat = value.reshape(-1)
            self._held[name] = lambda start, stop, flat=flat: flat[start:stop]  # type: ignore[misc]


def _tokenizer(name: str) -> Callable[[Path], object] | None:
    try:
        return partial(save_tokenizer, load_tokenizer(name))
    except DataError:  # a model without a tokenizer can still be exported
        return None
