"""Layers through `torch.compile`: one compilation for all layers of a structure, since their parameters are inputs.

What is compiled is the call of a layer with given weights, not a module; another layer of the same structure runs the
same code. Each shape of a micro-batch is compiled for itself, so that what is computed depends on nothing that ran
before, a resumed run included. Numbers differ from those of the library's own code by rounding. Dropout draws what it
draws without, and values are rounded to bfloat16 where the library's code rounds them. Left out: layers whose router
outputs are recorded, which run inside a hook of the library; parts that run in chunks stay as they are
(`chunked_layers`).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.errors import PlanError

MOST_COMPILATIONS = 64
"""Of a process: structures times shapes, with gradients and without. Beyond them it is an error, and not slow."""

LayerCall = Callable[[nn.Module, dict[str, Tensor], tuple[Any, ...], dict[str, Any]], Any]


_SECONDS: list[float] = []
"""That calls took, of this process, in which something was compiled."""


def spent() -> tuple[int, float]:
    """Compilations so far in this process, and the seconds of the calls in which they were made."""
    return len(_SECONDS), sum(_SECONDS)


def require_compiler(device: torch.device) -> None:
    """Raise `PlanError` where nothing could be compiled for a device."""
    where = "policy.kernels"
    if device.type == "cuda":
        if not importlib.import_module("torch.utils._triton").has_triton():
            raise PlanError("triton is not there", where=where, fix="pip install triton, or use stock")
        return
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except Exception as error:
        raise PlanError("there is no C++ compiler", where=where, fix="install g++, or use stock") from error


def compiled_call(
    layer: nn.Module, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What `functional_call` gives, by compiled code. Raises `PlanError` for more than `MOST_COMPILATIONS`."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    graphs = dynamo.utils.counters["stats"]
    before, began = graphs["unique_graphs"], time.perf_counter()
    limits = {"recompile_limit": MOST_COMPILATIONS, "fail_on_recompile_limit_hit": True}
    limits["skip_nnmodule_hook_guards"] = False  # one layer's hooks are not another's
    try:
        with dynamo.config.patch(**limits):
            output = _compiled()(layer, dict(weights), args, dict(kwargs))
    except dynamo.exc.FailOnRecompileLimitHit as error:
        raise PlanError(
            f"more than {MOST_COMPILATIONS} shapes of micro-batches would be compiled",
            where="policy.kernels",
            fix="give all micro-batches one shape (packing=best_fit), or use stock",
        ) from error
    if graphs["unique_graphs"] > before:
        _SECONDS.append(time.perf_counter() - began)
    return output


@cache
def _compiled() -> LayerCall:
    options: dict[str, Any] = {"fallback_random": True, "emulate_precision_casts": True}
    found: LayerCall = torch.compile(_call, dynamic=False, options=options)
    return found


def _call(layer: nn.Module, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return functional_call(layer, weights, args, kwargs)
