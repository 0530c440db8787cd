"""A cache on disk of what has been measured of models, so that each is measured only once.

To measure a model takes the library that reads it, which takes longer to import than most questions take to answer. A
file holds what `spec_file` reads, under a digest of all that it depends on: the model, the two libraries, and the code
that measures. It leaves out measuring (`model`), and what a user saves (`report.as_content`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from megatrain.errors import ModelError
from megatrain.plan.spec_file import read_model
from megatrain.spec import ModelSpec
from megatrain.system.paths import read_json, written_whole

FOLDER = Path("~/.cache/megatrain/measured")

MEASURED_BY = ("model", "spec", "plan/spec_file.py")
"""Of the package, what a specification depends on."""


def measured_file(asked: Sequence[str]) -> Path:
    """Where the specification of what is asked for is remembered. asked: the config or the name of one that is built
    in, and how the model is to be read."""
    digest = hashlib.sha256()
    for part in (*asked, *(version(library) for library in ("torch", "transformers"))):
        digest.update(part.encode() + b"\0")
    package = Path(__file__).resolve().parent.parent
    for place in MEASURED_BY:
        for path in sorted(package.joinpath(place).glob("*.*")) or [package / place]:
            digest.update(path.read_bytes())
    return Path(os.path.expanduser(FOLDER)) / f"{digest.hexdigest()}.json"


def recall(file: Path) -> ModelSpec | None:
    """What has been remembered there, if anything has."""
    try:
        return read_model(read_json(file), str(file))
    except (OSError, ValueError, ModelError):
        return None


def remember(file: Path, spec: ModelSpec) -> None:
    """Write a specification down, whole or not at all; where nothing can be written, the model is measured again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as draft:
            draft.write_text(json.dumps({"model": asdict(spec)}), encoding="utf-8")
