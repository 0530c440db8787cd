"""Measurements of models: shipped for the built-in ones, cached on disk for others.

Measuring a model needs torch and transformers, which take longer to import than most plans take.
`measured_models.zip` has a member for each built-in model, in bfloat16 with the default attention; `python -m
bench.measured_models` writes it, and a test measures some of them again. A file of the cache is named by a digest of
everything that it depends on: the model, the two libraries, and the code that measures. `spec_file` reads both.
Models are measured by the room `model`.
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
from megatrain.system import hub_client
from megatrain.system.paths import read_json, refuse_impossible_model, usable_path, written_whole

BUILT_IN = Path(__file__).parent / "measured_models.zip"

VARIANTS = frozenset({"base", "bf16", "chat", "fp8", "hf", "instruct", "it", "pt"})
"""Parts of a hub id, between dashes, that do not change the model's shape."""

FOLDER = Path("~/.cache/megatrain/measured")

MEASURED_BY = ("model", "spec", "plan/spec_file.py")
"""Code of the package that a specification depends on."""


@cache
def known_names() -> tuple[str, ...]:
    """The hub ids of the built-in models."""
    with ZipFile(BUILT_IN) as archive:
        return tuple(archive.namelist())


def known_name(name: str) -> str | None:
    """The hub id of the built-in model called `name`, or `None`.

    Case is ignored and the organisation may be left out. A variant (`-Instruct`, `-it`, `-Base`) gets the shape of its
    built-in model, although some variants have other maximum positions or a few more tokens.
    """
    for reduced in (str.lower, _without_variant):
        wanted = reduced(name)
        found = [each for each in known_names() if wanted in (reduced(each), reduced(each).rpartition("/")[2])]
        if len(found) == 1:
            return found[0]
    return None


def refuse_absent(source: str) -> None:
    """Raise `ModelError` for a model that is neither on this machine nor on the hub, with similar names."""
    where = f"model {source}"
    refuse_impossible_model(source, where)
    if usable_path(source, where="model", error=ModelError).exists():
        return
    hub_client.refuse_absent_model(source, where, known=known_names())


def _without_variant(name: str) -> str:
    """`meta-llama/llama-3.1-8b` for `meta-llama/Meta-Llama-3.1-8B-Instruct`. The hub dropped that `Meta-`, too."""
    organisation, slash, model = name.lower().rpartition("/")
    words = model.removeprefix("meta-").split("-")
    return organisation + slash + "-".join(word for word in words if word not in VARIANTS)


def built_in(known: str) -> ModelSpec:
    """The specification of a built-in model, in bfloat16. known: its hub id."""
    with ZipFile(BUILT_IN) as archive:
        return read_model(json.loads(archive.read(known)), f"{BUILT_IN.name}: {known}")


def measured_file(asked: Sequence[str]) -> Path:
    """The cache file of a specification.

    asked: the model's config, or the name of a built-in one, and the options by which it is read.
    """
    digest = hashlib.sha256()
    for part in (*asked, *(version(library) for library in ("torch", "transformers"))):
        digest.update(part.encode() + b"\0")
    package = Path(__file__).resolve().parent.parent
    for place in MEASURED_BY:
        for path in sorted(package.joinpath(place).glob("*.*")) or [package / place]:
            digest.update(path.read_bytes())
    return Path(os.path.expanduser(FOLDER)) / f"{digest.hexdigest()}.json"


def recall(file: Path) -> ModelSpec | None:
    """The cached specification, or `None`."""
    try:
        return read_model(read_json(file), str(file))
    except (OSError, ValueError, ModelError):
        return None


def remember(file: Path, spec: ModelSpec) -> None:
    """Write a specification to the cache, atomically. If that fails, the model will be measured again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as draft:
            draft.write_text(json.dumps({"model": as_fields(spec)}), encoding="utf-8")
