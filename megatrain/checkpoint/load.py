"""Opens a checkpoint to resume from, after checking it.

Masters are loaded from the folder as a Hugging Face model (`model.PretrainedSource`), which reverses the library's
conversions; moments are read by parameter name, so the order, tiers and policy of the run that wrote them do not
matter. Damage after `open_checkpoint` is not detected. A checkpoint of another trainer (`peer_checkpoints`) is a
`PeerCheckpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megatrain.checkpoint.listing import checkpoints
from megatrain.checkpoint.manifest import MANIFEST, Check, full_check, read_manifest
from megatrain.checkpoint.peer_checkpoints import PARTS, RESTART, SETTINGS, PeerState, peer_state
from megatrain.checkpoint.run_state import TRAINING, read_training
from megatrain.checkpoint.save import OPTIMIZER
from megatrain.errors import CheckpointError, DamagedCheckpoint, first_line
from megatrain.system.paths import missing, usable_path


class Checkpoint:
    """A checked checkpoint, made by `open_checkpoint`."""

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
        shapes = {key.rpartition("."): shape for key, (_, shape) in self._tensors.items()}
        return {name: shape for (name, _, kind), shape in shapes.items() if kind == "m"}

    def moments(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, m, v) of each of these parameters, float32 in its shape.

        The tensors are in a mapped file, which stays mapped as long as they exist: drop each before taking the next.
        Raises `CheckpointError` for a parameter that was not trained.
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


class PeerCheckpoint(Checkpoint):
    """A checkpoint of another trainer: weights, and AdamW's moments and number of updates."""

    def __init__(self, folder: Path, state: PeerState) -> None:
        self.folder, self.state, self.knows_names = folder, state, False

    @property
    def step(self) -> int:
        return self.state.steps

    def name_parameters(self, model: nn.Module, trained: Collection[str] | None = None) -> None:
        """To be called before moments or settings are read: see `PeerState.name_parameters`.

        trained: the parameters that train, by default those with `requires_grad`.
        """
        if trained is not None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in trained)
        self.state.name_parameters(model)
        self.knows_names = True

    @cached_property
    def training(self) -> dict[str, Any]:
        """What `Engine.save` would have written, as far as it is known."""
        counts = {"steps": self.step, "updates": self.state.updates, "missed": self.state.missed}
        return {"engine": {**counts, "optimizer": self._settings()}}

    def _settings(self) -> dict[str, Any]:
        """The fields of our AdamW. Raises `CheckpointError` for groups that it cannot express."""
        groups = [group for group in self.state.groups if group.names]
        of = {key: [read(group.settings[key]) for group in groups] for key, read in SETTINGS.items()}
        decay = {rate for rate in of["weight_decay"] if rate}
        for key, values in {**of, "weight_decay": decay}.items():
            if key != "lr" and len({str(value) for value in values}) > 1:
                raise self.state.error(f"its groups differ in {key}: {', '.join(map(str, values))}", RESTART)
        first = [of[key][0] for key in ("lr", "betas", "eps")]
        undecayed = [group.names for group, rate in zip(groups, of["weight_decay"], strict=True) if decay and not rate]
        others = [(group.names, rate) for group, rate in zip(groups, of["lr"], strict=True) if rate != first[0]]
        return {
            **dict(zip(("lr", "betas", "eps"), first, strict=True)),
            "weight_decay": max(decay, default=0.0),
            "no_decay": [name for names in undecayed for name in names],
            "learning_rates": [[name, rate] for names, rate in others for name in names],
        }

    @property
    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Checkpoint`."""
        return dict(self.state.shapes)

    def moments(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """See `Checkpoint`."""
        for name in names:
            if self.state.missed.get(name) == self.state.updates:
                m, v = torch.zeros(len(PARTS), *self.moment_shapes[name])
            else:
                m, v = (self.state.moment(name, part).float() for part in PARTS)
            yield name, m, v


def open_checkpoint(folder: str | Path, check: Check = full_check) -> Checkpoint:
    """Open a checkpoint for reading, ours or another trainer's (then `check` is not asked).

    Raises `DamagedCheckpoint`, naming the first fault, if `check` finds any, and `CheckpointError` for a kind or
    optimizer of another trainer that cannot be taken over.
    """
    named = usable_path(folder, error=CheckpointError)
    if not named.exists():
        raise missing(named, DamagedCheckpoint)
    ours = any((named / name).exists() for name in (MANIFEST, TRAINING))
    if named.is_dir() and not ours and (state := peer_state(named.resolve())) is not None:
        return PeerCheckpoint(named.resolve(), state)
    if damages := check(folder := named.resolve()):
        if inside := _inside(folder):
            raise DamagedCheckpoint("holds checkpoints, but is not one", where=str(folder), fix=f"name {inside[0]}")
        if (folder / "config.json").exists() and not any((folder / name).exists() for name in (MANIFEST, TRAINING)):
            fix = "train it as a new model, by Engine.from_pretrained or model.path"
            raise DamagedCheckpoint("is a model without a state of training", where=str(folder), fix=fix)
        more = f" (and {len(damages) - 1:,} more)" if len(damages) > 1 else ""
        raise DamagedCheckpoint(f"{damages[0]}{more}", where=str(folder), fix="go on from an older one")
    return Checkpoint(folder)


def _inside(folder: Path) -> list[Path]:
    """The checkpoints in a folder of them, or of a run."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return []
    of_trainer = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return checkpoints(folder) or checkpoints(folder / "checkpoints") or of_trainer
