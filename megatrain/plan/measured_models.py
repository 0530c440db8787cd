"""Measurements of models: shipped for the built-in ones, cached on disk for others.

To measure a model takes the library that reads it, which takes longer to import than most questions take to answer.
`measured_models.zip` has a member for each built-in model, in bfloat16 with the usual attention, as
`python -m bench.measured_models` writes it; a test measures some anew. A file of the cache lies under a digest of all
that it depends on: the model, the two libraries, and the code that measures. Both hold what `spec_file` reads. It
leaves out measuring (`model`), and what a user saves (`report.as_content`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

from megatrain.errors import ModelError
from megatrain.plan.spec_file import as_fields, read_model
from megatrain.spec import ModelSpec
from megatrain.system.paths import read_json, written_whole

BUILT_IN = Path(__file__).parent / "measured_models.zip"

VARIANTS = frozenset({"base", "chat", "hf", "instruct", "it", "pt"})
"""Words of an id, between dashes, that say how a model was tuned or stored and nothing of its shape."""

FOLDER = Path("~/.cache/megatrain/measured")

MEASURED_BY = ("model", "spec", "plan/spec_file.py")
"""Of the package, what a specification depends on."""


@cache
def known_names() -> tuple[str, ...]:
    """The hub ids of the models that are built in."""
    with ZipFile(BUILT_IN) as archive:
        return tuple(archive.namelist())


def known_name(name: str) -> str | None:
    """The id of the built-in model that `name` means, if it means one.

    Case does not count, and the organisation may be left out. A variant (`-Instruct`, `-it`, `-Base`) gets the shape of
    the model that is built in, although some were published for more or fewer positions, or with a few more tokens.
    """
    for reduced in (str.lower, _without_variant):
        wanted = reduced(name)
        found = [each for each in known_names() if wanted in (reduced(each), reduced(each).rpartition("/")[2])]
        if len(found) == 1:
            return found[0]
    return None


def _without_variant(name: str) -> str:
    """`meta-llama/llama-3.1-8b` for `meta-llama/Meta-Llama-3.1-8B-Instruct`; the hub dropped that `Meta-` too."""
    organisation, slash, model = name.lower().rpartition("/")
    words = model.removeprefix("meta-").split("-")
    return organisation + slash + "-".join(word for word in words if word not in VARIANTS)


def built_in(known: str) -> ModelSpec:
    """What was measured of a built-in model, in bfloat16."""
    with ZipFile(BUILT_IN) as archive:
        return read_model(json.loads(archive.read(known)), f"{BUILT_IN.name}: {known}")


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
            draft.write_text(json.dumps({"model": as_fields(spec)}), encoding="utf-8")
