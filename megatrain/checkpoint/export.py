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


def export_model(ported: PortedModel, masters: Mapping[str, Tensor], folder: str | Path) -> Path:
    """Write config, generation config and float32 safetensors to `folder`, replacing a model that is there.

    Raises `ExportError` when the folder cannot be written or holds something that is no model.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").exists())):
        raise ExportError("exists and is not a model folder", where=str(target), fix="choose another folder")
    staging = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        ported.write_pretrained(masters, staging)
        _sync(staging)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
    except OSError as error:
        raise ExportError(
            f"cannot be written ({error.strerror or error})", where=str(target), fix="check space and permissions"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _sync(folder: Path) -> None:
    """Force every file, and the folder itself, to the disk before the rename makes them visible."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
