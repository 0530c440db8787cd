"""MegaTrain's version, readable without installing the package."""

__version__ = "0.1.0"
