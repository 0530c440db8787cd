"""A model split into parts: ports replace its decoder layers, so that its own `forward` runs without them.

The forward of a causal language model is a prologue (embedding, positions, masks), a loop over layers and an epilogue
(final norm, head). With a port in place of each layer, running it either

* *captures* the arguments of each layer besides the hidden state, and the prologue's true output;
* or, if the last port returns a given hidden state, runs the true epilogue on it.

This relies on layers being called once each, in order, which is checked for every model (`Capture.each_once`). What
the model's loop computes on the hidden state between two layers is recorded (`between_layers`). No model is known by
name.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model.adapters import Adapter
from megatrain.model.between_layers import Between, EarlierOutput, PrologueDone, Recorder, TensorSubstitution, Value
from megatrain.model.chunked_layers import in_chunks, in_mode
from megatrain.model.forward_arguments import Arguments
from megatrain.model.peak import tensors_of
from megatrain.model.recomputed_encoders import recomputed
from megatrain.model.router_logits import recorded, replayed
from megatrain.model.side_values import Passing, Path, leaves_of, rebuilt, value_at
from megatrain.model.swapped_parameters import SwappedParameters
from megatrain.model.weight_sources import InFiles, Source, in_files_of
from megatrain.spec import ModelSpec, hidden_sides

HIDDEN = "hidden_states"
"""Layers' keyword for the hidden state, if it is not their first positional argument."""
CONSTANTS = "constants"


@dataclass(frozen=True, slots=True)
class Call:
    """A layer's arguments besides the hidden state.

    by_keyword: whether the hidden state is passed by keyword. leading: how many of its dimensions come before batch
    and length in the model's own code; everywhere else, batch and length come first.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_keyword: bool
    leading: int = 0
    between: Between | None = None
    """What the model's loop computes before this layer, if anything, for its hidden state or for arguments, which are a
    `Value` here."""
    constants: tuple[Tensor | EarlierOutput, ...] = ()
    """What `between` reads besides the hidden state."""
    takes: Mapping[Path, int] = field(default_factory=dict)
    """Place of a constant -> number of the side value that goes there; or of an argument or constant of the prologue
    that needs a gradient, besides those of `Port.passing` -> a negative number."""

    def arguments(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the layer, with this hidden state [batch, length, hidden size]."""
        if self.leading:
            hidden = batch_later(hidden, self.leading)
        if self.by_keyword:
            return self.args, {HIDDEN: hidden, **self.kwargs}
        return (hidden, *self.args), dict(self.kwargs)

    def replayed(self, hidden: Tensor) -> tuple[Tensor, Call]:
        """The layer's hidden state and its call, without `Value`s, if the layer before has returned `hidden`, and the
        model's loop computes something in front of it."""
        assert self.between is not None
        values = self.between.replayed(hidden, cast(tuple[Tensor, ...], self.constants))
        form = rebuilt(self.form, lambda _, leaf: values[leaf.number] if isinstance(leaf, Value) else leaf)
        return values[self.between.result], self.with_form(form)

    @property
    def form(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, in plain containers."""
        return self.args, dict(self.kwargs)

    def with_form(self, form: tuple[tuple[Any, ...], dict[str, Any]]) -> Call:
        """The same call with other arguments."""
        args, kwargs = form
        return replace(self, args=args, kwargs=kwargs)

    def hidden_of(self, output: Any) -> Tensor:
        """The hidden state [batch, length, hidden size] in the layer's return value."""
        hidden: Tensor = output if isinstance(output, Tensor) else output[0]
        return batch_first(hidden, self.leading) if self.leading else hidden

    def places(self) -> Iterator[tuple[Path, Any]]:
        """Each argument and constant with its place."""
        yield from leaves_of(self.form)
        yield from leaves_of(self.constants, (CONSTANTS,))

    def changed(self, change: Callable[[Path, Any], Any]) -> Call:
        """The same call with other arguments and constants."""
        return replace(
            self.with_form(rebuilt(self.form, change)), constants=rebuilt(self.constants, change, (CONSTANTS,))
        )

    def given(self, values: Mapping[int, Tensor]) -> Call:
        """The same call with these values, by number, in the places of `takes`."""
        takes = self.takes
        if not takes:
            return self
        return self.changed(lambda path, leaf: values.get(takes[path], leaf) if path in takes else leaf)

    def detached(self) -> Call:
        """The same call without graphs."""
        return self.changed(lambda _, leaf: leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf)

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments and constants."""
        return tensors_of(self.form, self.constants)


ANY_CALL = Call((), {}, False)
"""For scripts that do not read calls."""


def batch_first(hidden: Tensor, leading: int) -> Tensor:
    """A view with batch and length before the first `leading` dimensions."""
    return hidden.movedim((leading, leading + 1), (0, 1)) if leading else hidden


def batch_later(hidden: Tensor, leading: int) -> Tensor:
    """What `batch_first` has been made from."""
    return hidden.movedim((0, 1), (leading, leading + 1)) if leading else hidden


def split_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any], leading: int = 0) -> tuple[Tensor, Call]:
    """Separate the hidden state, batch first, from a layer's arguments."""
    if args:
        hidden = batch_first(args[0], leading) if leading else args[0]
        return hidden, Call(args[1:], dict(kwargs), False, leading)
    if HIDDEN in kwargs:
        rest = {name: value for name, value in kwargs.items() if name != HIDDEN}
        return batch_first(kwargs[HIDDEN], leading), Call((), rest, True, leading)
    raise ModelError(f"a decoder layer is called without a hidden state (arguments: {sorted(kwargs)})")


def placeholder(parameter: Tensor, device: torch.device) -> Tensor:
    """One zero, expanded to a parameter's shape. (`Tensor.to` would allocate all of it.)"""
    zero = torch.zeros((), dtype=parameter.dtype, device="cpu")  # whatever the caller's default device is
    zero = zero.to(device)  # a copy that blocks, so any stream may read it
    return zero.expand(parameter.shape)


class Script(Protocol):
    """What the ports do during one run of the forward."""

    reads_calls: bool
    """Whether `visit` reads more than the hidden state of a layer's call."""

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor: ...


class Capture:
    """Records the calls of all layers, passes on stand-ins for the hidden state, and stops before the epilogue."""

    reads_calls = True
    through_the_head = False
    """Whether to look for what enters behind the layers up to the model's end, if anything does between them."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.calls: list[Call] = []
        self.hidden: Tensor | None = None
        self.order: list[int] = []
        self.recorder = Recorder({})
        self.made: dict[int, Tensor] = {}
        """Side values of layers, filled in by measurements."""

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        recorder = self.recorder
        recorder.paused = True
        if self.hidden is None:
            self.hidden = hidden
            recorder.stands_in(hidden)
            recorder.paused = True  # until the stand-in below, which is no function of the model's
        elif hidden is not recorder.stand_in or recorder.needs_replay(call.args, call.kwargs):
            between, constants = recorder.finished(hidden, call.form)
            call = replace(call.with_form(recorder.noted(call.form)), between=between, constants=constants)
        self.order.append(index)
        self.calls.append(call)
        last = index == self.layers - 1
        if last and not recorder.has_recorded:
            raise PrologueDone
        stand_in = self.passed_on(hidden)
        recorder.stands_in(stand_in, behind=last)
        return stand_in

    def passed_on(self, hidden: Tensor) -> Tensor:
        """A tensor of its own that stands for what the next layer gets."""
        return hidden.detach()

    @property
    def each_once(self) -> bool:
        """Whether each layer was called once, in order."""
        return self.order == list(range(self.layers))


class TracingCapture(Capture):
    """A capture in which each layer passes on a leaf of its own, to tell what is computed from it before the next."""

    through_the_head = True

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.leaves: list[Tensor] = []

    def passed_on(self, hidden: Tensor) -> Tensor:
        self.leaves.append(hidden.detach().requires_grad_())
        return self.leaves[-1]


class Recomputed:
    """Modules with buffers that are not saved, such as rotary tables. Some code recomputes them from what it is called
    with, and keeps them, so that a call would depend on the calls before it, and thus on the schedule."""

    def __init__(self, root: nn.Module) -> None:
        """Remember the present state: each call is to start from it."""
        self._were = [
            (module, _attributes(module), {name: _Buffer(module._buffers[name]) for name in unsaved})
            for module in root.modules()
            if (unsaved := module._non_persistent_buffers_set)
        ]

    def restore(self) -> None:
        """Put back what was remembered in each module of which a buffer has been written to or replaced."""
        for module, attributes, were in self._were:
            buffers, unsaved = module._buffers, module._non_persistent_buffers_set
            if unsaved == were.keys() and all(was.is_still(buffers[name]) for name, was in were.items()):
                continue
            for name in unsaved - were.keys():
                module.__delattr__(name)
            for name in _attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            buffers.update({name: was.anew() for name, was in were.items()})


class _Buffer:
    """One buffer and the value that it starts with."""

    def __init__(self, buffer: Tensor | None) -> None:
        self._value = None if buffer is None else buffer.clone()
        self._now, self._version = buffer, 0 if buffer is None else buffer._version

    def anew(self) -> Tensor | None:
        """A new tensor with that value: a graph may have saved the old one."""
        if self._value is not None:
            with torch.inference_mode(False), _disable_current_modes():  # no part of what is measured
                self._now = self._value.clone()
            self._version = self._now._version
        return self._now

    def is_still(self, buffer: Tensor | None) -> bool:
        return buffer is self._now and (buffer is None or buffer._version == self._version)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


OF_EVERY_MODULE = vars(nn.Module()).keys()


class HandOut:
    """Makes the last port return `hidden`, and each port replay what its layer had recorded.

    earlier: unit before the last layer -> the hidden state that it has made, if the head reads that, too.
    """

    reads_calls = False

    def __init__(
        self,
        layers: int,
        hidden: Tensor,
        routed: Sequence[tuple[Tensor, ...]] = (),
        earlier: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.layers, self.hidden, self.routed, self.earlier = layers, hidden, routed, earlier or {}
        self.order: list[int] = []
        self.instead: TensorSubstitution | None = None
        """Active from the first layer on, if the head reads what the prologue makes."""

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        if not index and (first := self.earlier.get(0)) is not None and self.instead is None:
            self.instead = TensorSubstitution(hidden, first)
            self.instead.__enter__()  # type: ignore[no-untyped-call]
        self.order.append(index)
        if self.routed:
            replayed(self.routed[index])
        if index == self.layers - 1:
            return self.hidden
        return self.earlier.get(index + 1, hidden) if self.earlier else hidden


class TracingHandOut(HandOut):
    """Also keeps the hidden state that the first layer gets, and hands out leaves of its own for what each unit makes,
    which code between layers may change in place."""

    def __init__(self, layers: int, hidden: Tensor) -> None:
        super().__init__(layers, hidden)
        self.first = hidden
        self.leaves: list[Tensor] = []

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        if not self.order:
            self.first, self.earlier = hidden, {0: self._leaf(hidden)}
        if index < self.layers - 1:
            self.earlier = {**self.earlier, index + 1: self._leaf(hidden)}
        return super().visit(index, hidden, call)

    def _leaf(self, hidden: Tensor) -> Tensor:
        self.leaves.append(hidden.detach().requires_grad_())
        return self.leaves[-1].clone()


class Port(nn.Module):
    """Replaces decoder layer `index`; forwards the layer's other attributes (its attention type, say)."""

    def __init__(self, index: int, layer: nn.Module) -> None:
        super().__init__()
        self.index = index
        self.script: Script | None = None
        self.leading = 0
        """`Call.leading`."""
        self.returns: int | None = None
        """Length of the tuple that the layer returns; `None` if it returns the bare hidden state."""
        self.others: tuple[Any, ...] = ()
        """The other elements of that tuple: all during the first look, later only markers of side values."""
        self.passing: Passing | None = None
        """The side values that the layer takes and makes, if any."""
        self.recorded: list[int] = []
        """Numbers of the side values that it records for the auxiliary loss."""
        self._behind = [layer]  # in a list, so that the layer is not registered as a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        script = self.script
        assert script is not None, "a port is only run by PortedModel"
        if self.passing is not None:
            hidden, call = split_hidden(args, kwargs, self.leading)
            hidden = script.visit(self.index, hidden, call.with_form(self.passing.kept(call.form)))
            self.passing.write(call.form)
        elif script.reads_calls or self.leading or not args:
            hidden = script.visit(self.index, *split_hidden(args, kwargs, self.leading))
        else:
            hidden = script.visit(self.index, args[0], ANY_CALL)
        hidden = batch_later(hidden, self.leading) if self.leading else hidden
        if self.returns is None:
            return hidden
        return hidden, *(self.others or [None] * (self.returns - 1))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Not through `nn.Module`, which makes three calls more to look for hooks: nobody puts one on a port."""
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_behind"][0], name)


class Ports(nn.ModuleList):
    """The ports in a model. A slice of all is the same list: `nn.ModuleList` registers them anew in each forward."""

    def __getitem__(self, index: Any) -> Any:
        all_of_them = isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1)
        return self if all_of_them else super().__getitem__(index)


# The model behind them ------------------------------------------------------------------------------------------------
#
# `PortedModel` has the model's structure on the meta device, and runs prologue, layers and head with weights that the
# caller passes for one call. `model.split_into_units` makes it; `engine.weights` knows where weights are.


Weights = Mapping[str, Tensor]
"""Parameters for one call: full names for prologue and epilogue, names inside the layer for layers."""

Sides = tuple[Tensor, ...]
"""What a layer records for the auxiliary loss: router logits [tokens, experts]."""


class Measured(Protocol):
    """What running a model on zeros tells about it (`profile.Measurement`)."""

    def spec(self) -> ModelSpec: ...
    def parts(self) -> list[tuple[str, ...]]: ...


class Encoder(Protocol):
    """The layers of an encoder that are units of their own (`encoder_stack.EncoderStack`)."""

    name: str
    templates: list[nn.Module]
    start: tuple[str, ...]
    taps: tuple[int, ...]

    def begin(
        self, ported: PortedModel, weights: Weights, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, list[Call]] | None: ...
    def handing_out(self, encoded: Sequence[Tensor]) -> AbstractContextManager[None]: ...
    def layer(
        self, ported: PortedModel, index: int, weights: Weights, hidden: Tensor, call: Call
    ) -> tuple[Tensor, dict[int, Tensor]]: ...


@dataclass
class PortedModel:
    """A model that runs unit by unit. `structure.units[1 + i]` is the layer behind `ports[i]`."""

    structure: ModelSpec
    """The specification without profiles, which is enough to train; `spec` has them."""
    skeleton: PreTrainedModel
    templates: list[nn.Module]
    ports: list[Port]
    stack: str
    """Name of the module list of layers, `model.layers`."""
    placeholders: dict[str, Tensor]
    """Zeros without memory in the shape of each parameter outside the layers."""
    hidden_shape: tuple[int, ...] = ()
    """Shape of the hidden state of one token; for most models (hidden size,)."""
    by_head: tuple[int, ...] | None = None
    """The units before the last layer whose hidden state the head reads, too, once known."""
    routers_off: Mapping[str, Any] = field(default_factory=dict)
    """Forward arguments that switch router logits off, whatever the config says."""
    balance_coefficient: float | None = None
    """Weight of the router auxiliary loss; `None` if the model has none or its config disables it."""
    arguments: Arguments = field(default_factory=Arguments)
    """The arguments that its forward takes."""
    marks: Sequence[str] = ()
    """Arguments that its forward wants of text, too: zeros for every token (`forward_arguments.MARKS`)."""
    measured: Measured | None = None
    """Measures profiles and token-wise parts on demand."""
    adapter: Adapter | None = None
    """The adapter that trains over a frozen base, if any."""
    in_files: InFiles = field(default_factory=lambda: InFiles({}, {}))
    """Frozen parameters whose bytes can be read from the model's files, and why others cannot."""
    recomputed: dict[nn.Module, Recomputed] = field(default_factory=dict)
    """What the modules of the skeleton, and of each template, recompute; each call of one starts from its state after
    the first look."""
    encoders: Sequence[nn.Module] = ()
    """The layers of the prologue's encoders (`recomputed_encoders`)."""
    encoder: Encoder | None = None
    """The layers of an encoder that are units of their own (`encoder_stack`)."""
    image_row: tuple[Mapping[str, Tensor], int] | None = None
    """Rows with images, [rows, tokens], and the number of their values (`profile_prologue`): for which the prologue is
    measured too."""
    _found_in: Callable[[], object] = lambda: None
    _on_a_cpu: bool = False
    profiled: ModelSpec | None = None
    """`structure` with the memory profiles of units, once measured. Set to `None`, it is measured anew when needed."""

    @property
    def spec(self) -> ModelSpec:
        """The specification with the memory profiles of units, measured on first use (planning needs it)."""
        if self.profiled is None:
            assert self.measured is not None
            self.profiled = self.measured.spec().on_a_cpu() if self._on_a_cpu else self.measured.spec()
        return self.profiled

    def compute_on(self, device: torch.device) -> None:
        """Have its units called on this device, and `spec` be of it."""
        self.to_device(device)
        self._on_a_cpu = device.type == "cpu"
        if self._on_a_cpu:
            self.change(ModelSpec.on_a_cpu)

    def find_in(self, source: Source, dtype: torch.dtype) -> None:
        """Find out which frozen parameters a source's files hold byte for byte, in `dtype`."""
        frozen = [param.name for unit in self.structure.units for param in unit.params if not param.trainable]
        self.in_files, self._found_in = in_files_of(source, frozen, dtype), weakref.ref(source)
        self.change(lambda spec: spec.with_in_files(self.in_files.files.keys()))

    def lies_in(self, source: object) -> bool:
        """Whether `in_files` refers to that source."""
        return self._found_in() is source

    def change(self, change: Callable[[ModelSpec], ModelSpec]) -> None:
        """Change its specification, with and without profiles: how many ranks share it, say."""
        self.structure = change(self.structure)
        if self.profiled is not None:
            self.profiled = change(self.profiled)

    @property
    def known(self) -> ModelSpec:
        """The specification as far as it is known by now."""
        return self.structure if self.profiled is None else self.profiled

    @cached_property
    def parts(self) -> list[tuple[str, ...]]:
        """Names of the token-wise parts of each layer (`chunked_layers`)."""
        assert self.measured is not None
        return self.measured.parts()

    def prefix(self, index: int) -> str:
        """Name prefix of the parameters of layer `index`, counted from 0: `model.layers.3.`"""
        return f"{self.stack}.{index}."

    def prologue(
        self,
        weights: Weights,
        inputs: Mapping[str, Any],
        around: Sequence[AbstractContextManager[object]] = (),
        encoded: Sequence[Tensor] = (),
        *,
        for_first_layer: bool = False,
    ) -> tuple[Tensor, list[Call]]:
        """Run everything before the first layer.

        `inputs` are keyword arguments of the model's forward: `input_ids` [batch, length], `attention_mask` and so on.
        Returns the hidden state [batch, length, hidden size] and one `Call` per layer. With gradients, layers of
        encoders keep no graph, and are run again by the backward pass, in the contexts `around`. encoded: what the
        streamed encoder has made, if the micro-batch has anything for it. for_first_layer: stop there if that is all.
        """
        visited = 1 if for_first_layer and not self.by_head else len(self.ports)
        capture, handing_out = Capture(visited), cast(AbstractContextManager[object], nullcontext())
        if self.encoder is not None:
            handing_out = self.encoder.handing_out(encoded)
            weights = {**{name: self.placeholders[name] for name in self.encoder.start}, **weights}
        with handing_out, recomputed(self.encoders if torch.is_grad_enabled() else (), around):
            self.run(capture, weights, inputs)
        if capture.hidden is None or not capture.each_once:
            fix = "leave out the images or whatever else leads to this"
            raise ModelError("skipped or repeated a layer", where=self.structure.name, fix=fix)
        capture.recorder.check()
        return capture.hidden, with_earlier(self, capture.calls)

    def layer(
        self,
        index: int,
        weights: Weights,
        hidden: Tensor,
        call: Call,
        mlp_chunk_tokens: int = 0,
        values: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run layer `index`, counted from 0, on `hidden` [batch, length, hidden size]; returns the same shape and the
        side values that it makes, by number.

        mlp_chunk_tokens: tokens that its token-wise parts compute at a time; 0 for all. values: the side values that it
        takes.
        """
        template, passing = self.templates[index], self.ports[index].passing
        if passing is not None or values or call.between is not None:
            hidden, call = filled(self.ports[index], call, values or {}, hidden)
        args, kwargs = call.arguments(hidden)
        routed: list[Tensor] = []
        if self.balance_coefficient is None and not mlp_chunk_tokens:
            with self.holding(template, weights):
                output = template(*args, **kwargs)
        else:
            recording = nullcontext(routed) if self.balance_coefficient is None else recorded()
            parts = self.parts[index] if mlp_chunk_tokens else ()
            with recording as routed, in_chunks(template, parts, mlp_chunk_tokens), self.holding(template, weights):
                output = template(*args, **kwargs)
        side_values = dict(zip(self.ports[index].recorded, routed, strict=True)) if routed else {}
        if passing is not None:
            side_values |= passing.made(output, call.form)
        made = call.hidden_of(output)
        if self.structure.sides and (number := hidden_sides(self.structure).get(index + 1)) is not None:
            side_values[number] = made
        return made, side_values

    def holding(self, root: nn.Module, weights: Weights) -> AbstractContextManager[object]:
        """In the block, the skeleton or a template has these parameters, by its names; what it recomputes is as at the
        start."""
        if root in self.recomputed:
            self.recomputed[root].restore()
        return self._swapped[root].holding(weights)

    @cached_property
    def _swapped(self) -> dict[nn.Module, SwappedParameters]:
        """Of the skeleton and of each template."""
        return {root: SwappedParameters(root) for root in roots_of(self)}

    def head(self, weights: Weights, hidden: Tensor) -> Tensor:
        """Run everything after the last layer on `hidden` [tokens, *head_shape]; returns logits [tokens, vocabulary].

        Tokens are passed as a batch of sequences of length one, which matches the shape of `input_ids` and looks up no
        position beyond the first. The prologue runs too, on placeholders without memory, and its result is dropped.
        """
        tokens = hidden.shape[0]
        handing_out = handing_back(self, hidden.unsqueeze(1))
        ids = torch.zeros(tokens, 1, dtype=torch.long, device=hidden.device)
        output = self.run(handing_out, {**self.placeholders, **weights}, {"input_ids": ids})
        logits: Tensor = output.logits
        return logits.reshape(tokens, -1)

    def balance(self, weights: Weights, inputs: Mapping[str, Any], routed: Sequence[Sides]) -> Tensor:
        """The router auxiliary loss, a scalar without its coefficient, computed by the model's own code from what
        all layers' routers have returned (`routed`).

        `weights` are the head's, `inputs` the micro-batch's, as passed to the prologue. The head runs on one zero
        per row, which the model requires, and its result is dropped.
        """
        rows = inputs["input_ids"].shape
        some = next(iter(weights.values()))
        hidden = torch.zeros((), dtype=some.dtype, device=some.device).expand(*rows, *self.hidden_shape)
        asked = {**inputs, **ROUTED}
        output = self.run(HandOut(len(self.ports), hidden, routed), {**self.placeholders, **weights}, asked)
        loss: Tensor = output.aux_loss
        return loss

    def to_device(self, device: torch.device) -> None:
        """Move the buffers of skeleton and templates (parameters have no storage)."""
        for root in roots_of(self):
            with self.holding(root, {}):
                for module in root.modules():
                    for name, buffer in module._buffers.items():
                        if buffer is not None and not buffer.is_meta:
                            module._buffers[name] = buffer.to(device)
        self.placeholders = {name: placeholder(zero, device) for name, zero in self.placeholders.items()}
        self.remember_recomputed()

    def remember_recomputed(self) -> None:
        """From now on, calls of the skeleton and of the templates start from their present state (`Recomputed`)."""
        self.recomputed = {root: Recomputed(root) for root in roots_of(self)}

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """In the block, no dropout and the like; afterwards every module is back in its mode."""
        return in_mode(False, *roots_of(self))

    def whole(self) -> PreTrainedModel:
        """The reassembled model, on the meta device except its buffers: for names, files and configuration."""
        together = copy.deepcopy(self.skeleton)
        if self.structure.tied:
            together.config.tie_word_embeddings = True  # even if only the code tied them: one name is written
        with_layers(together, self.stack, copy.deepcopy(self.templates))
        if self.encoder is not None:
            with_layers(together, self.encoder.name, copy.deepcopy(self.encoder.templates))
        return together

    def run(self, script: Script, weights: Weights, inputs: Mapping[str, Any]) -> Any:
        """Run the model's own forward with `script` in place of the layers; `None` if it stopped after the
        prologue."""
        states = [port.__dict__ for port in self.ports]  # `setattr` of a module costs fourteen calls
        for state in states:
            state["script"] = script
        if isinstance(script, Capture):
            through, by_head = script.through_the_head, self.by_head
            script.recorder = Recorder(weights, self.skeleton.buffers, through=through, by_head=by_head)
        try:
            if self.marks:
                inputs = {**dict.fromkeys(self.marks, torch.zeros_like(inputs["input_ids"])), **inputs}
            with self.holding(self.skeleton, weights):
                return self.skeleton(**{"use_cache": False, **self.routers_off, **inputs})
        except PrologueDone:
            return None
        finally:
            if isinstance(script, Capture):
                script.recorder.leave()
            elif isinstance(script, HandOut) and script.instead is not None:
                script.instead.leave()
            for state in states:
                state["script"] = None


def roots_of(ported: PortedModel) -> list[nn.Module]:
    """The modules that are called: the skeleton, and each layer that is a unit."""
    encoder = () if ported.encoder is None else ported.encoder.templates
    return [ported.skeleton, *ported.templates, *encoder]


def with_layers(model: nn.Module, stack: str, layers: Iterable[nn.Module]) -> None:
    """Put modules in place of the first of a module list."""
    parent, _, attribute = stack.rpartition(".")
    first = list(layers)
    rest = list(model.get_submodule(stack).children())[len(first) :]
    setattr(model.get_submodule(parent), attribute, Ports([*first, *rest]))


ROUTED: dict[str, Any] = {"output_router_logits": True, "logits_to_keep": 1}
"""Forward arguments for computing the auxiliary loss."""


def takes(model: PreTrainedModel, argument: str) -> bool:
    """Whether the model's forward has a parameter of that name."""
    return argument in inspect.signature(type(model).forward).parameters


# What a layer or the head is given besides the hidden state below it --------------------------------------------------


def filled(port: Port, call: Call, values: Mapping[int, Tensor], hidden: Tensor) -> tuple[Tensor, Call]:
    """The hidden state with which a layer is called, and its call with these side values, by number, if the layer
    before has returned `hidden`."""
    if port.passing is not None:
        call = call.with_form(port.passing.given(call.form, values))
    if values:
        call = call.given(values)
    return call.replayed(hidden) if call.between is not None else (hidden, call)


def with_earlier(ported: PortedModel, calls: Sequence[Call]) -> list[Call]:
    """The calls with the side value in `Call.takes` for each `EarlierOutput`. Raises `ModelError` for one that text
    does not lead to: no schedule has it."""
    structure = ported.structure
    return [_with_earlier(structure, index, call) if call.constants else call for index, call in enumerate(calls)]


def _with_earlier(structure: ModelSpec, index: int, call: Call) -> Call:
    places = {place: each.unit for place, each in enumerate(call.constants) if isinstance(each, EarlierOutput)}
    if not places:
        return call
    numbers = hidden_sides(structure, index + 1)
    for unit in places.values() - numbers.keys():
        what = f"layer {index} gets the output of {structure.units[unit].name} in this micro-batch only"
        raise ModelError(what, where=structure.name, fix="leave out the entries that lead to it")
    return replace(call, takes={(CONSTANTS, place): numbers[unit] for place, unit in places.items()})


def head_shape(ported: PortedModel) -> tuple[int, ...]:
    """Shape of what the head gets of one token: the hidden state, or all that it reads of several units."""
    return (1 + len(ported.by_head), *ported.hidden_shape) if ported.by_head else ported.hidden_shape


def handing_back(ported: PortedModel, hidden: Tensor) -> HandOut:
    """Hands out what the head reads: `hidden` [rows, length, *head_shape]."""
    if not ported.by_head:
        return HandOut(len(ported.ports), hidden)
    last, *earlier = (hidden.select(2, place) for place in range(hidden.shape[2]))
    return HandOut(len(ported.ports), last, earlier=dict(zip(ported.by_head, earlier, strict=True)))


def sides_of_prologue(ported: PortedModel, calls: Sequence[Call]) -> dict[int, Tensor]:
    """The side values that the prologue has made, by number."""
    side_values: dict[int, Tensor] = {}
    for index, call in enumerate(calls):
        side_values |= taken_from_prologue(ported, index, call)
    return side_values


def taken_from_prologue(ported: PortedModel, index: int, call: Call) -> dict[int, Tensor]:
    """Those that layer `index` takes, by number."""
    passing, sides = ported.ports[index].passing, ported.structure.sides
    takes = () if passing is None else passing.takes.items()
    return {number: value_at(call.form, path) for path, number in takes if not sides[number].source}


def numbered(ported: PortedModel, calls: Sequence[Call]) -> tuple[list[Call], dict[int, Tensor]]:
    """The calls with what else needs a gradient in `Call.takes`, and these tensors of the prologue by number.

    calls: of a run with gradients, which shows what needs one.
    """
    needing: dict[int, tuple[int, Tensor]] = {}
    with_numbers = []
    for port, call in zip(ported.ports, calls, strict=True):
        known = {} if port.passing is None else port.passing.takes
        takes: dict[Path, int] = {}
        for path, leaf in call.places():
            if isinstance(leaf, Tensor) and leaf.requires_grad and path not in known:
                takes[path], _ = needing.setdefault(id(leaf), (-1 - len(needing), leaf))
        with_numbers.append(replace(call, takes={**call.takes, **takes}) if takes else call)
    return with_numbers, dict(needing.values())
