"""Records and replays the router logits of mixture-of-experts layers, for the model's auxiliary loss.

transformers collects such outputs with hooks on modules inside the layers, into a collector that is active during
one forward. Here a collector is activated around a single layer (`router_logits`), and later, when the model's own
forward runs without its layers, it is given what the layers had recorded (`replayed`); so the model's own code
computes the loss. No other module uses that machinery.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import output_capturing

ROUTERS = "router_logits"
"""Key of the outputs that the auxiliary loss uses."""


def install_recorders(model: PreTrainedModel) -> bool:
    """Install the library's recording hooks on `model`, with all layers in place; false if the model has none."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in inner:
        output_capturing.maybe_install_capturing_hooks(module)
    return any(ROUTERS in (module._can_record_outputs or ()) for module in inner)


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """In the block, collect what the recorders see, in the order of calls."""
    logits: list[Tensor] = []
    token = output_capturing._active_collector.set({ROUTERS: logits})
    try:
        yield logits
    finally:
        output_capturing._active_collector.reset(token)


def replayed(routed: tuple[Tensor, ...]) -> None:
    """Pass what a layer had recorded to the active collector, if any."""
    collector = output_capturing._active_collector.get()
    if collector is not None and ROUTERS in collector:
        collector[ROUTERS].extend(routed)
