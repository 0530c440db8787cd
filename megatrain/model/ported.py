"""A Hugging Face model taken apart into units: the model's structure on the meta device, its layers behind ports.

`PortedModel` runs prologue, layers and head with weights that the caller binds for one call. How a model is taken
apart and what is learned about it is in `model.learn`; the module leaves out where weights live (`engine.weights`)
and gradients.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model.arguments import Arguments
from megatrain.model.chosen import watched
from megatrain.model.compiled import compiled_call
from megatrain.model.ports import Call, Capture, HandOut, Port, PrologueDone, hidden_of
from megatrain.model.recorded import recorded
from megatrain.model.tokenwise import in_chunks
from megatrain.spec import ModelSpec, Policy

Weights = Mapping[str, Tensor]
"""Parameters bound for one call: full names for prologue and epilogue, names inside the layer for layers."""

Sides = tuple[Tensor, ...]
"""What a layer gave besides the hidden state and the model's loss depends on: router logits [tokens, experts]."""


class Way(Protocol):
    """How a layer is run, as a `Policy` says it."""

    @property
    def mlp_chunk_tokens(self) -> int: ...
    @property
    def kernels(self) -> str: ...


AS_IT_IS: Way = Policy()
"""All tokens at once, by the library's own code."""


@dataclass
class PortedModel:
    """A model that runs unit by unit. `spec.units[1 + i]` is the layer behind `ports[i]`."""

    spec: ModelSpec
    skeleton: PreTrainedModel
    templates: list[nn.Module]
    ports: list[Port]
    stack: str
    """Name of the module list of layers, `model.layers`."""
    placeholders: dict[str, Tensor]
    """Zeros that take no memory, in the shape of each parameter outside the layers."""
    hidden_shape: tuple[int, ...] = ()
    """Shape of the hidden state of one token, (hidden size,) with most models."""
    routers_off: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that keep the model from asking for router logits where its config does."""
    balance_coefficient: float | None = None
    """Weight of the router auxiliary loss; `None` where the model has none, or its config does not ask for it."""
    parts: list[tuple[str, ...]] = field(default_factory=list)
    """Of each layer, the names of its token-wise parts (`tokenwise`)."""
    arguments: Arguments = field(default_factory=Arguments)
    """What its forward takes."""

    def prefix(self, index: int) -> str:
        """Name prefix of the parameters of layer `index` (counted from 0), `model.layers.3.`"""
        return f"{self.stack}.{index}."

    def prologue(self, weights: Weights, inputs: Mapping[str, Any]) -> tuple[Tensor, list[Call]]:
        """Run everything before the first layer.

        `inputs` are keyword arguments of the model's forward: `input_ids` [batch, length], `attention_mask` and so on.
        Returns the hidden state [batch, length, hidden size] and one `Call` per layer.
        """
        capture = Capture(len(self.ports))
        self.run(capture, weights, inputs)
        if capture.hidden is None or not capture.observed_only_passing:
            raise ModelError(
                "skipped or repeated a layer, or changed the hidden state between two", where=self.spec.name
            )
        return capture.hidden, capture.calls

    def layer(
        self, index: int, weights: Weights, hidden: Tensor, call: Call, way: Way = AS_IT_IS
    ) -> tuple[Tensor, Sides]:
        """Run layer `index` (counted from 0) on `hidden` [batch, length, hidden size]; same shape out, and sides.

        Raises `ModelError` where it cannot be run compiled.
        """
        args, kwargs = call.arguments(hidden)
        compiles = way.kernels == "compile"
        run = compiled_call if compiles and not watched() else functional_call
        if compiles and self.balance_coefficient is not None:
            what = "its layers record router outputs for the auxiliary loss, which compiled ones would not"
            raise ModelError(what, where=self.spec.name, fix="set policy.kernels=stock")
        with ExitStack() as around:
            sides = around.enter_context(recorded()) if self.balance_coefficient is not None else []
            if way.mlp_chunk_tokens:
                around.enter_context(in_chunks(self.templates[index], self.parts[index], way.mlp_chunk_tokens))
            output = run(self.templates[index], dict(weights), args, kwargs)
        return hidden_of(output), tuple(sides)

    def head(self, weights: Weights, hidden: Tensor) -> Tensor:
        """Run everything after the last layer on `hidden` [tokens, *hidden_shape]; returns logits [tokens, vocabulary].

        Tokens go through as a batch of sequences of length one, so that an epilogue which looks at the shape of
        `input_ids` is content and no position beyond the first is looked up. The prologue runs too, on placeholders
        that take no memory, and its result is dropped.
        """
        tokens = hidden.shape[0]
        handing_out = HandOut(len(self.ports), hidden.unsqueeze(1))
        ids = torch.zeros(tokens, 1, dtype=torch.long, device=hidden.device)
        output = self.run(handing_out, {**self.placeholders, **weights}, {"input_ids": ids})
        logits: Tensor = output.logits
        return logits.reshape(tokens, -1)

    def balance(self, weights: Weights, inputs: Mapping[str, Any], sides: Sequence[Sides]) -> Tensor:
        """The router auxiliary loss, a scalar: the model's own, from the sides of all layers, without its coefficient.

        `weights` are the head's, `inputs` those of the micro-batch, of which the prologue had been run. The head runs
        on one zero per row, as the model insists, and its result is dropped.
        """
        rows = inputs["input_ids"].shape
        some = next(iter(weights.values()))
        hidden = torch.zeros((), dtype=some.dtype, device=some.device).expand(*rows, *self.hidden_shape)
        asked = {**inputs, **ROUTED}
        output = self.run(HandOut(len(self.ports), hidden, sides), {**self.placeholders, **weights}, asked)
        loss: Tensor = output.aux_loss
        return loss

    def to_device(self, device: torch.device) -> None:
        """Move the buffers (not the parameters, which have no storage) of skeleton and templates."""
        for root in (self.skeleton, *self.templates):
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[name] = buffer.to(device)
        self.placeholders = {name: zero.to(device) for name, zero in self.placeholders.items()}

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Without dropout and the like in the block; afterwards every module is in the mode that it was in."""
        modules = [module for root in (self.skeleton, *self.templates) for module in root.modules()]
        modes = [module.training for module in modules]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def whole(self) -> PreTrainedModel:
        """The model put together again, on the meta device but for its buffers: for names, files and configuration."""
        together = copy.deepcopy(self.skeleton)
        if self.spec.tied:
            together.config.tie_word_embeddings = True  # also where only the code tied them: one name is written
        parent, _, attribute = self.stack.rpartition(".")
        setattr(together.get_submodule(parent), attribute, nn.ModuleList(copy.deepcopy(self.templates)))
        return together

    def run(self, script: Capture | HandOut, weights: Weights, inputs: Mapping[str, Any]) -> Any:
        """The model's own forward with `script` in the place of the layers; `None` where it ended with the prologue."""
        for port in self.ports:
            port.script = script
        try:
            return functional_call(self.skeleton, dict(weights), (), {"use_cache": False, **self.routers_off, **inputs})
        except PrologueDone:
            return None
        finally:
            for port in self.ports:
                port.script = None


ROUTED: dict[str, Any] = {"output_router_logits": True, "logits_to_keep": 1}
"""Arguments of a forward that is run for its auxiliary loss."""


def takes(model: PreTrainedModel, argument: str) -> bool:
    """Whether the model's forward has a parameter of that name."""
    return argument in inspect.signature(type(model).forward).parameters
