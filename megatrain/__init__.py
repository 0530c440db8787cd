"""MegaTrain: train large language models at full precision on a single GPU, or on none.

Public names are imported on first use, so that `import megatrain` and the command line start quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain.version import __version__ as __version__

if TYPE_CHECKING:
    from megatrain.errors import MegaTrainError
    from megatrain.losses import DPO, LogitsLoss, LogProbLoss
    from megatrain.optim import AdamW, Lion, Muon
    from megatrain.spec import Limits, Numerics, Policy
    from megatrain.train.engine import Engine, StepOutput

_HOMES = {
    "AdamW": "megatrain.optim",
    "DPO": "megatrain.losses",
    "Engine": "megatrain.train.engine",
    "Limits": "megatrain.spec",
    "Lion": "megatrain.optim",
    "LogProbLoss": "megatrain.losses",
    "LogitsLoss": "megatrain.losses",
    "MegaTrainError": "megatrain.errors",
    "Muon": "megatrain.optim",
    "Numerics": "megatrain.spec",
    "Policy": "megatrain.spec",
    "StepOutput": "megatrain.train.engine",
}

__all__ = [
    "DPO",
    "AdamW",
    "Engine",
    "Limits",
    "Lion",
    "LogProbLoss",
    "LogitsLoss",
    "MegaTrainError",
    "Muon",
    "Numerics",
    "Policy",
    "StepOutput",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
