"""Runs layers compiled by `torch.compile`; all layers of one structure share a compilation.

What is compiled is the call of a layer with weights as inputs, not a module. Each shape of a micro-batch is compiled
separately, so that no result depends on what ran before, also after a resume. Numbers differ from the uncompiled
library's by rounding. Dropout draws the same values as without compilation, and values are rounded to bfloat16 in
the same places. What layers pass to each other besides the hidden state is compiled, too. Not compiled: layers whose
router outputs are recorded, which needs the library's hooks, and parts that run in chunks (`chunked_layers`).
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.errors import PlanError

MOST_COMPILATIONS = 64
"""Limit per process (structures x shapes, with and without gradients); exceeding it is an error, not a slowdown."""

LayerCall = Callable[[nn.Module, dict[str, Tensor], tuple[Any, ...], dict[str, Any]], Any]


_SECONDS: list[float] = []
"""Durations in seconds of this process's calls that compiled something."""


def spent() -> tuple[int, float]:
    """(number of compilations in this process, seconds of the calls that made them)."""
    return len(_SECONDS), sum(_SECONDS)


def require_compiler(device: torch.device) -> None:
    """Raise `PlanError` if nothing can be compiled for the device."""
    where = "policy.kernels"
    if device.type == "cuda":
        if not importlib.import_module("torch.utils._triton").has_triton():
            raise PlanError("triton is not installed", where=where, fix="pip install triton, or use stock")
        return
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except Exception as error:
        raise PlanError("there is no C++ compiler", where=where, fix="install g++, or use stock") from error


def compiled_call(
    layer: nn.Module, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """`functional_call`, compiled. Raises `PlanError` for more than `MOST_COMPILATIONS` compilations."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    graphs = dynamo.utils.counters["stats"]
    before, began = graphs["unique_graphs"], time.perf_counter()
    limits = {"recompile_limit": MOST_COMPILATIONS, "fail_on_recompile_limit_hit": True}
    limits["skip_nnmodule_hook_guards"] = False  # layers differ in their hooks
    try:
        with dynamo.config.patch(**limits), warnings.catch_warnings():
            # Of the compiler's own look at arguments that code between layers has computed.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
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
    call: LayerCall = torch.compile(_call, dynamic=False, options=options)
    return call


def _call(layer: nn.Module, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return functional_call(layer, weights, args, kwargs)
