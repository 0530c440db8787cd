"""Folders that hold a model: exports, and the checkpoints from which runs resume.

Public names are imported on first use, so that listing checkpoints does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.checkpoint.export import ExportOptions, export_pieces, exported_pieces
    from megatrain.checkpoint.folder import Retention, lowest_scored, newest_sound, open_checkpoint, prune
    from megatrain.checkpoint.hard_links import PreviousCheckpoint
    from megatrain.checkpoint.listing import checkpoints, step_of
    from megatrain.checkpoint.load import Checkpoint
    from megatrain.checkpoint.manifest import full_check, quick_check
    from megatrain.checkpoint.peer_checkpoints import PeerCheckpoint
    from megatrain.checkpoint.save import CheckpointFacts, PlannedCheckpoint, StateReader, step_folder, write_checkpoint

_NAMES = {
    "export": ("ExportOptions", "export_pieces", "exported_pieces"),
    "folder": ("Retention", "lowest_scored", "newest_sound", "open_checkpoint", "prune"),
    "hard_links": ("PreviousCheckpoint",),
    "listing": ("checkpoints", "step_of"),
    "load": ("Checkpoint",),
    "manifest": ("full_check", "quick_check"),
    "peer_checkpoints": ("PeerCheckpoint",),
    "save": ("CheckpointFacts", "PlannedCheckpoint", "StateReader", "step_folder", "write_checkpoint"),
}

__all__ = [
    "Checkpoint",
    "CheckpointFacts",
    "ExportOptions",
    "PeerCheckpoint",
    "PlannedCheckpoint",
    "PreviousCheckpoint",
    "Retention",
    "StateReader",
    "checkpoints",
    "export_pieces",
    "exported_pieces",
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
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"megatrain.checkpoint.{module}"), name)
    raise AttributeError(f"module 'megatrain.checkpoint' has no attribute {name!r}")
