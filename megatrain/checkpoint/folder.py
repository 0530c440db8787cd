"""The checkpoints of a run: finds the newest sound one, and decides which to keep.

`Retention` says which are kept; `put_all_right` repairs what a crash has left between two renames when a run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.listing import checkpoints, step_of
from megatrain.checkpoint.load import Checkpoint, open_checkpoint
from megatrain.checkpoint.manifest import Check, full_check, quick_check, read_manifest
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatrain.system.atomic import finish_vanishing, vanish


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints to keep: the last ones, one every so many steps, and the best."""

    keep_last: int = 3
    keep_every: int | None = None
    keep_best: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_best < 0 or (self.keep_every is not None and self.keep_every < 1):
            raise ConfigError(
                f"{self.keep_last}, {self.keep_every} and {self.keep_best} cannot be kept",
                where="keep_last, keep_every and keep_best",
                fix="keep at least the last one, and no negative number",
            )

    def is_regular(self, step: int) -> bool:
        """Whether the checkpoint of a step is always kept."""
        return bool(self.keep_every) and step % (self.keep_every or 1) == 0

    def kept(self, scores: Mapping[int, float | None]) -> set[int]:
        """The steps to keep, given the score of each (lower is better, `None` for none)."""
        last = sorted(scores)[-self.keep_last :]
        every = [step for step in scores if self.is_regular(step)]
        ranked = sorted((score, -step) for step, score in scores.items() if score is not None)
        return {*last, *every, *(-step for _, step in ranked[: self.keep_best])}


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest sound checkpoint, if any, and a message for each newer one that was skipped."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...]


def newest_sound(folder: str | Path, check: Check = full_check) -> Newest:
    """Find the newest checkpoint in which `check` finds nothing wrong."""
    skipped: list[str] = []
    for path in checkpoints(folder):
        try:
            return Newest(open_checkpoint(path, check), tuple(skipped))
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
