"""Folders that hold a model: exports, and the checkpoints that a run goes on from."""

from megatrain.checkpoint.export import ExportOptions, export_model, export_units
from megatrain.checkpoint.folder import Retention, checkpoints, lowest_scored, newest_sound, prune, step_of
from megatrain.checkpoint.hard_links import Earlier
from megatrain.checkpoint.load import Checkpoint, open_checkpoint
from megatrain.checkpoint.manifest import full_check, quick_check
from megatrain.checkpoint.save import ParamState, PlannedCheckpoint, step_folder, write_checkpoint
from megatrain.system.atomic import put_all_right

__all__ = [
    "Checkpoint",
    "Earlier",
    "ExportOptions",
    "ParamState",
    "PlannedCheckpoint",
    "Retention",
    "checkpoints",
    "export_model",
    "export_units",
    "full_check",
    "lowest_scored",
    "newest_sound",
    "open_checkpoint",
    "prune",
    "put_all_right",
    "quick_check",
    "step_folder",
    "step_of",
    "write_checkpoint",
]
