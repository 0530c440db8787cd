"""MegaTrain's version, which is known without installing the package."""

__version__ = "0.1.0"
