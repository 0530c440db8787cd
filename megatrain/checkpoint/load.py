"""`Checkpoint`: what a run resumes from, opened and checked by `folder.open_checkpoint`.

Masters are loaded from the folder as a Hugging Face model (`model.PretrainedSource`), which reverses the library's
conversions; moments are read by parameter name, so the order, tiers and policy of the run that wrote them do not
matter. Its bytes were compared with their checksums before, or are when they are loaded (`unverified`); damage after
that is not detected. A checkpoint of another trainer is a `peer_checkpoints.PeerCheckpoint`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatrain.checkpoint.manifest import UnverifiedBlocks, read_manifest
from megatrain.checkpoint.run_state import read_training
from megatrain.checkpoint.save import OPTIMIZER
from megatrain.errors import CheckpointError, DamagedCheckpoint, first_line


class Checkpoint:
    """A checked checkpoint, made by `folder.open_checkpoint`."""

    unverified: UnverifiedBlocks | None = None
    """What is compared with its checksum when it is loaded, if it was opened so (`folder.open_verifying_on_load`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """The folder: a Hugging Face model with float32 masters."""
        self.manifest = read_manifest(folder)

    @property
    def step(self) -> int:
        return self.manifest.step

    def verify(self, file: str, start: int, stop: int) -> None:
        """Compare bytes [start, stop) of a file, by its path without links, before they are loaded. Raises
        `DamagedCheckpoint`."""
        if self.unverified is not None and file in self._name_of_path:
            self.unverified.verify(self._name_of_path[file], start, stop)

    @cached_property
    def _name_of_path(self) -> dict[str, str]:
        """Path of a file, without links -> its name."""
        return {os.path.realpath(self.folder / name): name for name in self.manifest.files}

    def verify_rest(self) -> None:
        """Compare what was not loaded. Raises `DamagedCheckpoint`."""
        if self.unverified is not None:
            self.unverified.verify_rest()

    def verify_moments(self, name: str, array: str, start: int, stop: int) -> None:
        """Compare elements [start, stop) of an array that the optimizer kept, float32. Raises `DamagedCheckpoint`."""
        if self.unverified is not None:
            file, _, first = self._tensors[f"{name}.{array}"]
            self.unverified.verify(file, first + 4 * start, first + 4 * stop)

    @cached_property
    def training(self) -> dict[str, Any]:
        """The run's state other than tensors."""
        return read_training(self.folder)

    @cached_property
    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of its moments, for trained parameters."""
        return {key.rpartition(".")[0]: shape for key, (_, shape, _) in self._tensors.items()}

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
    def _tensors(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Name of an optimizer tensor -> (its file, its shape, its first byte)."""
        tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for name in self.manifest.files:
            if not name.startswith(f"{OPTIMIZER}/"):
                continue
            with self._open(name), (self.folder / name).open("rb") as file:  # the library checks that all fits
                first = 8 + (nbytes := int.from_bytes(file.read(8), "little"))
                header = json.loads(file.read(nbytes))
            header.pop("__metadata__", None)  # which is no tensor
            for key, tensor in header.items():
                tensors[key] = name, tuple(tensor["shape"]), first + tensor["data_offsets"][0]
        return tensors

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{file} cannot be read ({first_line(error)})", where=str(self.folder)) from error
