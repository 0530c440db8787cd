"""`Checkpoint`: what a run resumes from, opened and checked by `folder.open_checkpoint`.

Masters are loaded from the folder as a Hugging Face model (`model.PretrainedSource`), which reverses the library's
conversions; moments are read by parameter name, so the order, tiers and policy of the run that wrote them do not
matter. Damage after the check is not detected. A checkpoint of another trainer is a `peer_checkpoints.PeerCheckpoint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatrain.checkpoint.manifest import read_manifest
from megatrain.checkpoint.run_state import read_training
from megatrain.checkpoint.save import OPTIMIZER
from megatrain.errors import CheckpointError, DamagedCheckpoint, first_line


class Checkpoint:
    """A checked checkpoint, made by `folder.open_checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """The folder: a Hugging Face model with float32 masters."""
        self.manifest = read_manifest(folder)

    @property
    def step(self) -> int:
        return self.manifest.step

    @cached_property
    def training(self) -> dict[str, Any]:
        """The run's state other than tensors."""
        return read_training(self.folder)

    @cached_property
    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of its moments, for trained parameters."""
        return {key.rpartition(".")[0]: shape for key, (_, shape) in self._tensors.items()}

    def keeps(self, name: str, arrays: Sequence[str]) -> bool:
        """Whether it has these arrays of a parameter and no others."""
        return self._kept.get(name) == {*arrays}

    @cached_property
    def _kept(self) -> dict[str, set[str]]:
        """Name of a trained parameter -> the arrays that its optimizer kept of it."""
        kept: dict[str, set[str]] = {}
        for key in self._tensors:
            name, _, array = key.rpartition(".")
            kept.setdefault(name, set()).add(array)
        return kept

    def moments(self, name: str, arrays: Sequence[str]) -> list[Tensor]:
        """The arrays of these names that the optimizer kept of a parameter, float32 in its shape.

        They are in a mapped file, which stays mapped as long as they exist: drop them before taking those of the next.
        Raises `CheckpointError` for a parameter that was not trained, or not by an optimizer that keeps these.
        """
        return [self._tensor(f"{name}.{array}") for array in arrays]

    def _tensor(self, key: str) -> Tensor:
        if key not in self._tensors:
            raise CheckpointError(f"has no {key}", where=str(self.folder), fix="train the parameters that it trained")
        with self._open(self._tensors[key][0]) as opened:
            tensor: Tensor = opened.get_tensor(key)
            return tensor

    @cached_property
    def _tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name of an optimizer tensor -> (its file, its shape)."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for file in self.manifest.files:
            if file.startswith(f"{OPTIMIZER}/"):
                with self._open(file) as opened:
                    tensors |= {key: (file, tuple(opened.get_slice(key).get_shape())) for key in opened.keys()}  # noqa: SIM118
        return tensors

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{file} cannot be read ({first_line(error)})", where=str(self.folder)) from error
