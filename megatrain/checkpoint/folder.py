"""The checkpoints of a run: opens one after checking it, finds the newest sound one, and decides which to keep.

`Retention` says which are kept; `put_all_right` repairs what a crash has left between two renames when a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.listing import checkpoints, step_of
from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.manifest import (
    MANIFEST,
    Check,
    UnverifiedBlocks,
    full_check,
    quick_check,
    read_manifest,
)
from megatrain.checkpoint.peer_checkpoints import PeerCheckpoint, peer_checkpoint
from megatrain.checkpoint.run_state import TRAINING
from megatrain.errors import CheckpointError, DamagedCheckpoint, ModelError
from megatrain.system.atomic import finish_vanishing, vanish
from megatrain.system.paths import missing, usable_path


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints to keep: the last ones, one every so many steps, and the best."""

    keep_last: int = 3
    keep_every: int | None = None
    keep_best: int = 0

    def is_regular(self, step: int) -> bool:
        """Whether the checkpoint of a step is always kept."""
        return bool(self.keep_every) and step % (self.keep_every or 1) == 0

    def kept(self, scores: Mapping[int, float | None]) -> set[int]:
        """The steps to keep, given the score of each (lower is better, `None` for none)."""
        last = sorted(scores)[-self.keep_last :]
        every = [step for step in scores if self.is_regular(step)]
        ranked = sorted((score, -step) for step, score in scores.items() if score is not None)
        return {*last, *every, *(-step for _, step in ranked[: self.keep_best])}


def open_checkpoint(folder: str | Path, check: Check = full_check) -> Checkpoint:
    """Open a checkpoint for reading, ours or another trainer's (then `check` is not asked).

    Raises `DamagedCheckpoint`, naming the first fault, if `check` finds any, and `CheckpointError` for a kind or
    optimizer of another trainer that cannot be taken over.
    """
    named = usable_path(folder, error=CheckpointError)
    if not named.exists():
        raise missing(named, DamagedCheckpoint)
    ours = any((named / name).exists() for name in (MANIFEST, TRAINING))
    if named.is_dir() and not ours and (theirs := peer_checkpoint(named.resolve())) is not None:
        return theirs
    if damages := check(folder := named.resolve()):
        if inside := _inside(folder):
            raise DamagedCheckpoint("holds checkpoints, but is not one", where=str(folder), fix=f"name {inside[0]}")
        if (folder / "config.json").exists() and not ours:
            fix = "train it as a new model, by Engine.from_pretrained or model.path"
            raise DamagedCheckpoint("is a model without a state of training", where=str(folder), fix=fix)
        more = f" (and {len(damages) - 1:,} more)" if len(damages) > 1 else ""
        raise DamagedCheckpoint(f"{damages[0]}{more}", where=str(folder), fix="go on from an older one")
    return Checkpoint(folder)


def open_verifying_on_load(folder: str | Path, check: Check = quick_check) -> Checkpoint:
    """As `open_checkpoint`, but tensors are compared with their checksums when they are loaded, and small files now."""
    opened = open_checkpoint(folder, check)
    if not isinstance(opened, PeerCheckpoint):
        opened.unverified = UnverifiedBlocks(opened.folder, opened.manifest.files)
        opened.unverified.verify_small()
    return opened


def refuse_damaged_weights(folder: str | Path) -> None:
    """Raise `DamagedCheckpoint` if a byte of a model's tensors has changed since a checkpoint of ours was written.

    For those who read the model of a checkpoint and not its state, of which nothing is read here. Any other folder, and
    a name of the hub, is let pass. Raises `ModelError` for an invalid path.
    """
    named = usable_path(folder, where="model", error=ModelError)
    if not all((named / name).is_file() for name in (MANIFEST, TRAINING)):
        return
    files = read_manifest(named).files.items()
    weights = {name: file for name, file in files if name.endswith(".safetensors") and "/" not in name}
    UnverifiedBlocks(named, weights).verify_rest()


def _inside(folder: Path) -> list[Path]:
    """The checkpoints in a folder of them, or of a run."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return []
    of_trainer = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return checkpoints(folder) or checkpoints(folder / "checkpoints") or of_trainer


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest sound checkpoint, if any, and a message for each newer one that was skipped."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...]


def newest_sound(folder: str | Path, open_one: Callable[[Path], Checkpoint] = open_checkpoint) -> Newest:
    """Find the newest checkpoint that `open_one` opens."""
    skipped: list[str] = []
    for path in checkpoints(folder):
        try:
            return Newest(open_one(path), tuple(skipped))
        except DamagedCheckpoint as error:
            skipped.append(f"{path.name}: {error.what}")
    return Newest(None, tuple(skipped))


def lowest_scored(folder: str | Path, since: int = -1) -> Checkpoint | None:
    """The sound checkpoint with the lowest score, the newest of equals; `None` if none has a score.

    since: scores up to this step measure something else and do not count.
    """
    scores: list[tuple[float, int, Path]] = []
    for path in checkpoints(folder):
        with suppress(DamagedCheckpoint):
            if (score := read_manifest(path).score) is not None and step_of(path) > since:
                scores.append((score, -step_of(path), path))
    for _, _, path in sorted(scores):
        with suppress(DamagedCheckpoint):
            return open_checkpoint(path)
    return None


def prune(folder: str | Path, retention: Retention, since: int = -1) -> list[Path]:
    """Remove the checkpoints in `folder` that need not be kept; returns their former paths.

    The newest one that looks sound (`quick_check`) and all newer ones always stay. Damaged ones are removed. A folder
    without a sound manifest stays, since it may not be ours. Checkpoints are removed as a whole, and so is what an
    earlier call left half-deleted. For one thread at a time. since: see `lowest_scored`.

    Raises `CheckpointError` for what cannot be removed.
    """
    finish_vanishing(Path(folder))
    scores: dict[int, float | None] = {}
    ours: dict[int, Path] = {}
    for path in checkpoints(folder):
        try:
            manifest = read_manifest(path)
        except DamagedCheckpoint:
            continue
        ours[step_of(path)] = path
        if not quick_check(path):
            scores[step_of(path)] = manifest.score if step_of(path) > since else None
    kept = retention.kept(scores)
    going = [path for step, path in ours.items() if step not in kept and step < max(scores, default=0)]
    for path in going:
        try:
            vanish(path)
        except OSError as error:
            what = f"cannot be removed ({error.strerror or error})"
            raise CheckpointError(what, where=str(path), fix="check permissions") from error
    return going
