"""A Hugging Face model taken apart into units: the model's structure on the meta device, its layers behind ports.

`port_model` makes a copy of a model without copying a weight (parameters become meta tensors, buffers are copied),
finds the stack of decoder layers, and learns from two tiny runs what the prologue and the epilogue use. Nothing is
looked up by model type or parameter name. A model that this cannot train exactly is refused with a `ModelError`.

`PortedModel` then runs prologue, layers and head with weights that the caller binds for one call. It leaves out where
those weights live (`engine.weights`) and gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model.load import quiet
from megatrain.model.ports import Call, Capture, HandOut, Port, PrologueDone, hidden_of, reachable_leaves
from megatrain.spec import ModelSpec, ParamSpec, UnitSpec

PROBE_TOKENS = 4
"""Length of the tiny inputs that a model is learned from."""

Weights = Mapping[str, Tensor]
"""Parameters bound for one call: full names for prologue and epilogue, names inside the layer for layers."""


@dataclass
class PortedModel:
    """A model that runs unit by unit. `spec.units[1 + i]` is the layer behind `ports[i]`."""

    spec: ModelSpec
    skeleton: PreTrainedModel
    templates: list[nn.Module]
    ports: list[Port]
    stack: str
    """Name of the module list of layers, `model.layers`."""
    _placeholders: dict[str, Tensor]

    def prefix(self, index: int) -> str:
        """Name prefix of the parameters of layer `index` (counted from 0), `model.layers.3.`"""
        return f"{self.stack}.{index}."

    def prologue(self, weights: Weights, inputs: Mapping[str, Any]) -> tuple[Tensor, list[Call]]:
        """Run everything before the first layer.

        `inputs` are keyword arguments of the model's forward: `input_ids` [batch, length], `attention_mask` and so on.
        Returns the hidden state [batch, length, hidden size] and one `Call` per layer.
        """
        capture = Capture(len(self.ports))
        self._run(capture, weights, inputs)
        if capture.hidden is None or not capture.observed_only_passing:
            raise ModelError(
                "skipped or repeated a layer, or changed the hidden state between two", where=self.spec.name
            )
        return capture.hidden, capture.calls

    def layer(self, index: int, weights: Weights, hidden: Tensor, call: Call) -> Tensor:
        """Run layer `index` (counted from 0) on `hidden` [batch, length, hidden size]; same shape out."""
        args, kwargs = call.arguments(hidden)
        return hidden_of(functional_call(self.templates[index], dict(weights), args, kwargs))

    def head(self, weights: Weights, hidden: Tensor) -> Tensor:
        """Run everything after the last layer on `hidden` [tokens, hidden size]; returns logits [tokens, vocabulary].

        Tokens go through as a batch of sequences of length one, so that an epilogue which looks at the shape of
        `input_ids` is content and no position beyond the first is looked up. The prologue runs too, on placeholders
        that take no memory, and its result is dropped.
        """
        tokens = hidden.shape[0]
        handing_out = HandOut(len(self.ports), hidden.unsqueeze(1))
        ids = torch.zeros(tokens, 1, dtype=torch.long, device=hidden.device)
        output = self._run(handing_out, {**self._placeholders, **weights}, {"input_ids": ids})
        logits: Tensor = output.logits
        return logits.reshape(tokens, -1)

    def to_device(self, device: torch.device) -> None:
        """Move the buffers (not the parameters, which have no storage) of skeleton and templates."""
        for root in (self.skeleton, *self.templates):
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[name] = buffer.to(device)
        self._placeholders = {name: zero.to(device) for name, zero in self._placeholders.items()}

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

    def write_pretrained(self, masters: Weights, folder: Path) -> None:
        """Write config and float32 safetensors as the library itself would. `masters` holds every parameter."""
        whole = copy.deepcopy(self.skeleton)
        if self.spec.tied:
            whole.config.tie_word_embeddings = True  # also where only the code tied them: one name is written
        parent, _, attribute = self.stack.rpartition(".")
        setattr(whole.get_submodule(parent), attribute, nn.ModuleList(copy.deepcopy(self.templates)))
        buffers = {name: value for name, value in whole.state_dict().items() if not value.is_meta}
        nn.Module.to(whole, torch.float32)
        with quiet():
            whole.save_pretrained(folder, state_dict={**buffers, **masters})

    def _run(self, script: Capture | HandOut, weights: Weights, inputs: Mapping[str, Any]) -> Any:
        for port in self.ports:
            port.script = script
        try:
            return functional_call(self.skeleton, dict(weights), (), {**inputs, "use_cache": False})
        except PrologueDone:
            return None
        finally:
            for port in self.ports:
                port.script = None


def port_model(model: nn.Module, dtype: torch.dtype) -> PortedModel:
    """Take a causal language model apart for computing in `dtype`.

    `model` is not changed and shares no parameter storage with the result; its mode (`train` or `eval`) carries over.
    Raises `ModelError` for what is not a causal language model or cannot be streamed exactly.
    """
    refuse_other_kinds(model)
    assert isinstance(model, PreTrainedModel)
    original_dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        learned = _take_apart(model, original_dtype)
        _learn_returns(model, learned)
        spec = _learn_spec(model, learned)
    ported = learned if dtype == original_dtype else _take_apart(model, dtype)
    for port, known in zip(ported.ports, learned.ports, strict=True):
        port.returns = known.returns
    ported.spec = spec
    return ported


def refuse_other_kinds(model: nn.Module) -> None:
    """Raise `ModelError` for anything but a causal language model of transformers."""
    where = f"model {type(model).__name__}"
    if not isinstance(model, PreTrainedModel):
        raise ModelError("not a transformers model", where=where, fix="pass an AutoModelForCausalLM")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError("an encoder-decoder, not a causal language model", where=where, fix="use a decoder-only model")
    if model.get_output_embeddings() is None:
        raise ModelError("has no language-model head", where=where, fix="load it with AutoModelForCausalLM")
    if getattr(model.config, "output_router_logits", False):
        raise ModelError(
            "its router auxiliary loss (output_router_logits=True) is not part of the streamed loss yet",
            where=where,
            fix="set output_router_logits=False in its config",
        )


def _find_stack(model: nn.Module) -> str:
    """Name of the module list that holds the decoder layers: the one with most parameters, not inside another."""
    lists: dict[str, nn.ModuleList] = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise ModelError("has no list of decoder layers", where=f"model {type(model).__name__}")
    sizes = [(sum(p.numel() for p in lists[name].parameters()), name) for name in outer]
    return max(sizes)[1]


def _take_apart(model: PreTrainedModel, dtype: torch.dtype) -> PortedModel:
    """Copy the structure with meta parameters of `dtype` and put ports in the place of the layers."""
    stack = _find_stack(model)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            raise ModelError("has parameters that are not floating point (quantized?)", where=type(model).__name__)
        meta = torch.empty(parameter.shape, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(f"its buffer {name} has no value (meta device)", where=type(model).__name__)
        memo[id(buffer)] = buffer.detach().cpu().clone()
    skeleton = copy.deepcopy(model, memo)
    for module in skeleton.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.__dict__["gradient_checkpointing"] = False  # what to recompute is the policy's choice
    skeleton.config.return_dict = True
    templates = list(skeleton.get_submodule(stack).children())
    ports = [Port(index, layer) for index, layer in enumerate(templates)]
    parent, _, attribute = stack.rpartition(".")
    setattr(skeleton.get_submodule(parent), attribute, nn.ModuleList(ports))
    nothing = ModelSpec(type(model).__name__, _placeholder_units(len(templates)), 1, 1)
    placeholders = {
        name: torch.zeros((), dtype=dtype).expand(parameter.shape) for name, parameter in skeleton.named_parameters()
    }
    return PortedModel(nothing, skeleton, templates, ports, stack, placeholders)


def _placeholder_units(layers: int) -> tuple[UnitSpec, ...]:
    middle = [UnitSpec(f"layers.{index}", "layer", ()) for index in range(layers)]
    return UnitSpec("prologue", "prologue", ()), *middle, UnitSpec("epilogue", "epilogue", ())


def _learn_returns(model: PreTrainedModel, ported: PortedModel) -> None:
    """Call one layer of each class, to see whether it returns the hidden state or a tuple that starts with it."""
    capture = Capture(len(ported.ports))
    with torch.no_grad():
        ported._run(capture, ported._placeholders, _probe_inputs())
    if capture.hidden is None or len(capture.calls) < len(ported.ports):
        raise ModelError("does not call each of its decoder layers once", where=f"model {type(model).__name__}")
    hidden, calls = capture.hidden, capture.calls
    known: dict[type, int | None] = {}
    for index, layer in enumerate(model.get_submodule(ported.stack).children()):
        if type(layer) not in known:
            args, kwargs = calls[index].arguments(hidden)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                place = next(layer.parameters()).device
                output = layer(*_moved(args, place), **_moved(kwargs, place))
            known[type(layer)] = len(output) if isinstance(output, tuple | list) else None
        ported.ports[index].returns = known[type(layer)]


def _moved(value: Any, place: torch.device) -> Any:
    """A structure of arguments with its tensors on another device."""
    if isinstance(value, Tensor):
        return value.to(place)
    if isinstance(value, dict):
        return {key: _moved(item, place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, place) for item in value)
    return value


def _probe_inputs() -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.long)}


def _learn_spec(model: PreTrainedModel, ported: PortedModel) -> ModelSpec:
    """Read off two autograd graphs which parameters the prologue and the epilogue use."""
    where = f"model {type(model).__name__}"
    leaves = {name: zero.detach().requires_grad_() for name, zero in ported._placeholders.items()}
    trains = {name: parameter.requires_grad for name, parameter in ported.skeleton.named_parameters()}
    capture = Capture(len(ported.ports))
    with torch.enable_grad():  # the caller may have switched it off
        ported._run(capture, leaves, _probe_inputs())
    if capture.hidden is None or not capture.observed_only_passing:
        raise ModelError("does more between its decoder layers than pass the hidden state on", where=where)
    for call in capture.calls:
        if any(tensor.requires_grad for tensor in call.tensors()):
            raise ModelError("its layers need a gradient other than through the hidden state", where=where)
    handed_out = torch.zeros(PROBE_TOKENS, capture.hidden.shape[-1], dtype=capture.hidden.dtype)
    with torch.enable_grad():
        logits = ported.head(leaves, handed_out)
    in_prologue, in_epilogue = reachable_leaves(capture.hidden), reachable_leaves(logits)
    prologue, epilogue, borrowed = [], [], []
    for name, leaf in leaves.items():
        param = ParamSpec(name, tuple(leaf.shape), trainable=trains[name])
        if id(leaf) in in_epilogue and id(leaf) not in in_prologue:
            epilogue.append(param)
        else:
            prologue.append(param)
            borrowed += [name] if id(leaf) in in_epilogue else []
    if not epilogue and not borrowed:
        raise ModelError("its logits depend on no parameter outside the layers", where=where)
    units = (
        UnitSpec("prologue", "prologue", tuple(prologue)),
        *_layer_specs(model, ported),
        UnitSpec("epilogue", "epilogue", tuple(epilogue), tuple(borrowed)),
    )
    return ModelSpec(
        name=type(model).__name__,
        units=units,
        hidden_size=capture.hidden.shape[-1],
        vocab_size=logits.shape[-1],
        max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )


def _layer_specs(model: PreTrainedModel, ported: PortedModel) -> list[UnitSpec]:
    seen: dict[int, str] = {id(p): name for name, p in ported.skeleton.named_parameters()}
    units = []
    for index, template in enumerate(ported.templates):
        prefix, params = ported.prefix(index), []
        for name, parameter in template.named_parameters():
            if id(parameter) in seen:
                raise ModelError(
                    f"layers share a parameter: {prefix}{name} is {seen[id(parameter)]}", where=type(model).__name__
                )
            seen[id(parameter)] = prefix + name
            share = _active_share(model, parameter)
            params.append(ParamSpec(prefix + name, tuple(parameter.shape), share, parameter.requires_grad))
        units.append(UnitSpec(prefix.rstrip("."), "layer", tuple(params)))
    return units


def _active_share(model: PreTrainedModel, parameter: Tensor) -> float:
    """Share of a parameter that one token uses: below 1 where its first dimension is that of the experts."""
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if not chosen or not experts or parameter.dim() < 3 or parameter.shape[0] != experts:
        return 1.0
    return float(chosen) / float(experts)
