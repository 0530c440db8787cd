"""Folders that hold a model."""

from megatrain.checkpoint.export import export_model

__all__ = ["export_model"]
