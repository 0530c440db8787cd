"""What a model records of its layers besides the hidden state: the router logits of a mixture of experts.

transformers gathers such outputs with hooks on modules inside the layers, into a collector that is active during one
forward. Here the collector is made active around a single layer (`router_logits`), and later, when the model's own
forward runs without its layers, it is handed what the layers had recorded (`replayed`); so a loss that the model
computes from all its routers is computed by the model's own code. The only place that touches that machinery.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

output_capturing: Any
try:
    output_capturing = import_module("transformers.utils.output_capturing")
except ImportError:  # a transformers that gathers these outputs in another way
    output_capturing = None

ROUTERS = "router_logits"
"""Key of the outputs that the auxiliary loss is computed from."""


def install_recorders(model: PreTrainedModel) -> bool:
    """Put the library's recording hooks on `model`, with all its layers in place; false where it has none of them."""
    if output_capturing is None:
        return False
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in inner:
        output_capturing.maybe_install_capturing_hooks(module)
    return any(ROUTERS in (output_capturing._CAN_RECORD_REGISTRY.get(module) or ()) for module in inner)


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """Gather what the recorders see during the block, in the order of the calls."""
    found: list[Tensor] = []
    if output_capturing is None:
        yield found
        return
    token = output_capturing._active_collector.set({ROUTERS: found})
    try:
        yield found
    finally:
        output_capturing._active_collector.reset(token)


def replayed(sides: tuple[Tensor, ...]) -> None:
    """Hand what a layer had recorded to the collector that is active now, if there is one."""
    collector = None if output_capturing is None else output_capturing._active_collector.get()
    if collector is not None and ROUTERS in collector:
        collector[ROUTERS].extend(sides)
