"""Checkpoints encoders of images: the backward pass recomputes their layers one by one, so only one has a graph.

An encoder of images in the prologue may be as deep as the text model, and its graph larger than all else that a step
holds. In the block of `recomputed`, a layer with something to train keeps its arguments alone, and runs once more when
the backward pass reaches it, by PyTorch's own checkpointing: to the same bits, with the same random numbers. Layers are
the children of the outermost module lists besides the decoder's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


def outermost_module_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The module lists that are in no other, by name."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return {name: lists[name] for name in lists if not any(name.startswith(f"{other}.") for other in lists)}


def encoder_layers(skeleton: nn.Module, stack: str) -> list[nn.Module]:
    """The layers of encoders. stack: name of the module list of decoder layers."""
    lists = outermost_module_lists(skeleton)
    layers = [layer for name in lists if name != stack for layer in lists[name].children()]
    return [layer for layer in layers if any(True for _ in layer.parameters())]


@contextmanager
def recomputed(layers: Iterable[nn.Module], around: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    """In the block, which runs their forwards, these layers are prepared to run again in the backward pass, in the
    contexts `around`: it does not have the function modes of the block."""
    before = [(layer, vars(layer).get("forward")) for layer in layers]
    try:
        for layer, _ in before:
            vars(layer)["forward"] = partial(_checkpointed, _Body(layer), around)
        yield
    finally:
        for layer, patched in before:
            del vars(layer)["forward"]
            if patched is not None:  # by the user
                vars(layer)["forward"] = patched


class _Body(nn.Module):
    """A layer's forward without its hooks, which record what a model returns: they have seen its first run."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self._forward = layer, layer.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _checkpointed(body: _Body, around: Sequence[AbstractContextManager[object]], *args: Any, **kwargs: Any) -> Any:
    weights: dict[str, Tensor] = dict(body.named_parameters())  # which the skeleton has lost by the backward pass
    needed = (*weights.values(), *tree_leaves((args, kwargs)))
    if not torch.is_grad_enabled() or not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in needed):
        return body(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        return functional_call(body, weights, args, kwargs)

    def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        return nullcontext(), _together(around)

    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _together(contexts: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
