"""Lists the checkpoints of a run by their folder names, such as `step-00001200`.

Does not import torch, so that an earlier run in the way is reported at once. `folder` checks whether they are sound.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatrain.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})")


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoint folders in `folder`, newest first, sound or not; empty if there is no such folder."""
    try:
        inside = list(Path(folder).iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror or error})", where=str(folder)) from error
    return sorted((path for path in inside if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's folder name."""
    return int(checkpoint.name.removeprefix("step-"))
