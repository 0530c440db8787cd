"""A checkpoint to go on from: it is checked before anything of it can be read.

Masters come back by loading the folder as a Hugging Face model (`model.PretrainedSource`), which undoes the library's
conversions; moments come by the names of parameters, so that no order, tier or policy of the run that wrote them
matters. Reading does not check again: a file that is damaged after `open_checkpoint` is not found out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatrain.checkpoint.manifest import Check, full_check, read_manifest
from megatrain.checkpoint.run_state import read_training
from megatrain.checkpoint.save import OPTIMIZER
from megatrain.errors import CheckpointError, DamagedCheckpoint, first_line
from megatrain.system.paths import usable_path


class Checkpoint:
    """A checkpoint that has been checked. Made by `open_checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """A Hugging Face model with float32 masters."""
        self.manifest = read_manifest(folder)

    @property
    def step(self) -> int:
        return self.manifest.step

    @cached_property
    def training(self) -> dict[str, Any]:
        """What the run gave beside tensors."""
        return read_training(self.folder)

    @cached_property
    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> the shape of its moments, of those that were trained."""
        found = {key.rpartition("."): shape for key, (_, shape) in self._tensors.items()}
        return {name: shape for (name, _, kind), shape in found.items() if kind == "m"}

    def moments(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, m, v) of each of these parameters, float32 in its shape.

        The tensors lie in a mapped file, which takes no memory but pages that can be read again, and goes with them:
        drop each before the next. Raises `CheckpointError` for a parameter that was not trained.
        """
        for name in names:
            yield name, self._tensor(f"{name}.m"), self._tensor(f"{name}.v")

    def _tensor(self, key: str) -> Tensor:
        if key not in self._tensors:
            raise CheckpointError(f"has no {key}", where=str(self.folder), fix="train the parameters that it trained")
        with self._open(self._tensors[key][0]) as opened:
            tensor: Tensor = opened.get_tensor(key)
            return tensor

    @cached_property
    def _tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor of the optimizer -> the file that holds it, and its shape."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for file in self.manifest.files:
            if file.startswith(f"{OPTIMIZER}/"):
                with self._open(file) as opened:
                    found |= {key: (file, tuple(opened.get_slice(key).get_shape())) for key in opened.keys()}  # noqa: SIM118
        return found

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{file} cannot be read ({first_line(error)})", where=str(self.folder)) from error


def open_checkpoint(folder: str | Path, check: Check = full_check) -> Checkpoint:
    """A checkpoint to read from. Raises `DamagedCheckpoint`, naming the first fault, if `check` finds any."""
    folder = usable_path(folder, error=CheckpointError).resolve()
    if damages := check(folder):
        more = f" (and {len(damages) - 1:,} more)" if len(damages) > 1 else ""
        raise DamagedCheckpoint(f"{damages[0]}{more}", where=str(folder), fix="go on from an older one")
    return Checkpoint(folder)
