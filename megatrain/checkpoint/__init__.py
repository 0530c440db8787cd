"""Folders that hold a model: exports, and the checkpoints from which runs resume."""
