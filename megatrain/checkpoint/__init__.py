"""Folders that hold a model."""

from megatrain.checkpoint.export import SHARD_NBYTES, export_model, export_units

__all__ = ["SHARD_NBYTES", "export_model", "export_units"]
