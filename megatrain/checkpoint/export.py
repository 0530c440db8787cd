"""A Hugging Face folder from the masters. It appears whole or not at all.

The folder is written under a temporary name beside the target and renamed when it is complete. It leaves out
streaming unit by unit: for now the masters are gathered in float32 first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatrain.errors import ExportError
from megatrain.model import PortedModel

MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".md", ".txt", ".py")
"""Endings of the files that a Hugging Face model folder is made of."""


def export_model(ported: PortedModel, masters: Mapping[str, Tensor], folder: str | Path) -> Path:
    """Write config, generation config and float32 safetensors to `folder`, replacing a model that is there.

    Raises `ExportError` when the folder cannot be written or holds anything that does not belong to a model.
    """
    target = Path(folder).absolute()
    _refuse_foreign(target)
    staging, aside = (target.with_name(f".{target.name}.{os.getpid()}.{suffix}") for suffix in ("part", "old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        ported.write_pretrained(masters, staging)
        _sync(staging)
        if target.exists():
            target.rename(aside)
        staging.rename(target)
    except OSError as error:
        raise ExportError(
            f"cannot be written ({error.strerror or error})", where=str(target), fix="check space and permissions"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if aside.exists() and not target.exists():
            aside.rename(target)  # the new one did not make it
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _refuse_foreign(target: Path) -> None:
    """An export replaces a whole folder, so there must be nothing in it but what belongs to a model."""
    if not target.exists():
        return
    where, fix = str(target), "choose another folder"
    if not target.is_dir():
        raise ExportError("is a file", where=where, fix=fix)
    names = sorted(path.name for path in target.iterdir() if path.is_dir() or path.suffix not in MODEL_SUFFIXES)
    if names:
        raise ExportError(f"holds {names[0]!r}, which is not part of a model", where=where, fix=fix)
    if any(target.iterdir()) and not (target / "config.json").exists():
        raise ExportError("is not a model folder", where=where, fix=fix)


def _sync(folder: Path) -> None:
    """Force every file, and the folder itself, to the disk before the rename makes them visible."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
