"""Imports Triton kernels only if they run and give the right results on a device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatrain.errors import typed_line

MISSING = "triton is not installed"
UNSUPPORTED = "Triton does not support this device"
"""By PyTorch: the GPU is too old, say, or the detection of devices is switched off."""


def load_if_correct(
    load: Callable[[], Any], device: torch.device, agrees: Callable[[Any, torch.device], bool]
) -> tuple[Any, str]:
    """Import Triton kernels and compare them on the device; returns (module, "") or (None, reason).

    load: imports the module of kernels. agrees: whether they compute there what they should; they are compiled for it,
    so the device must be idle.
    """
    try:
        support = importlib.import_module("torch.utils._triton")
        if not support.has_triton():
            return None, UNSUPPORTED if support.has_triton_package() else MISSING
        kernels = load()
        return (kernels, "") if agrees(kernels, device) else (None, "Triton's kernels compute something else here")
    except Exception as error:  # no compiler for its launchers, say
        return None, f"Triton failed ({typed_line(error)})"
