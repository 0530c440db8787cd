"""Folders that hold a model: exports, and the checkpoints from which runs resume.

Public names are imported on first use, so that listing checkpoints does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.checkpoint.export import ExportOptions, export_units
    from megatrain.checkpoint.folder import Retention, lowest_scored, newest_sound, open_checkpoint, prune
    from megatrain.checkpoint.hard_links import Earlier
    from megatrain.checkpoint.listing import checkpoints, step_of
    from megatrain.checkpoint.load import Checkpoint
    from megatrain.checkpoint.manifest import full_check, quick_check
    from megatrain.checkpoint.peer_checkpoints import PeerCheckpoint
    from megatrain.checkpoint.save import Facts, ParamState, PlannedCheckpoint, step_folder, write_checkpoint

_HOMES = {
    "Checkpoint": "megatrain.checkpoint.load",
    "Earlier": "megatrain.checkpoint.hard_links",
    "ExportOptions": "megatrain.checkpoint.export",
    "Facts": "megatrain.checkpoint.save",
    "ParamState": "megatrain.checkpoint.save",
    "PeerCheckpoint": "megatrain.checkpoint.peer_checkpoints",
    "PlannedCheckpoint": "megatrain.checkpoint.save",
    "Retention": "megatrain.checkpoint.folder",
    "checkpoints": "megatrain.checkpoint.listing",
    "export_units": "megatrain.checkpoint.export",
    "full_check": "megatrain.checkpoint.manifest",
    "lowest_scored": "megatrain.checkpoint.folder",
    "newest_sound": "megatrain.checkpoint.folder",
    "open_checkpoint": "megatrain.checkpoint.folder",
    "prune": "megatrain.checkpoint.folder",
    "quick_check": "megatrain.checkpoint.manifest",
    "step_folder": "megatrain.checkpoint.save",
    "step_of": "megatrain.checkpoint.listing",
    "write_checkpoint": "megatrain.checkpoint.save",
}

__all__ = [
    "Checkpoint",
    "Earlier",
    "ExportOptions",
    "Facts",
    "ParamState",
    "PeerCheckpoint",
    "PlannedCheckpoint",
    "Retention",
    "checkpoints",
    "export_units",
    "full_check",
    "lowest_scored",
    "newest_sound",
    "open_checkpoint",
    "prune",
    "quick_check",
    "step_folder",
    "step_of",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
