"""MegaTrain's version, where every room may read it: a source tree need not be installed to name it in a checkpoint."""

__version__ = "0.1.0"
