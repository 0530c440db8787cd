"""Takes a vision encoder's layers out of the prologue (the unit before the decoder layers), so that they are streamed.

With ports in place of the encoder's layers, too, the model's own forward runs in three parts: up to the encoder's first
layer (the *start*, which makes patches), from the encoder's last layer to the first decoder layer (the prologue), and
behind the last decoder layer. This is exact where the encoder calls each of its layers once, in order, and hands on
what they return as it is. Layers above the last whose output reaches the decoder, as Llava has, stay in the prologue.
`stream_encoder` finds that out from a row with images, by the model's graph; otherwise everything stays in the
prologue. No model is known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.errors import ModelError
from megatrain.model.between_layers import PrologueDone, is_same
from megatrain.model.mapped_tensors import lazy_zeros
from megatrain.model.peak import SkipLargeProducts
from megatrain.model.ports import Call, Capture, Port, PortedModel, Script, Weights, with_layers
from megatrain.model.profile import portable_attention
from megatrain.model.recomputed_encoders import outermost_module_lists
from megatrain.model.user_patches import Buffers
from megatrain.model.weight_reads import OrderOfUse, ReadByProducts, Uses, in_order_of_use, reachable_leaves
from megatrain.spec import ModelSpec, ParamSpec, UnitSpec

WHERE = "the encoder of images"
FIX = "leave out image_row, with which the encoder is streamed, or put what is encoded apart into several micro-batches"


@dataclass
class EncoderStack:
    """The layers of an encoder, behind ports of their own. `structure.encoder[1 + i]` is the unit of layer i."""

    name: str
    """Of the module list, `model.visual.blocks`."""
    templates: list[nn.Module]
    ports: list[Port] = field(default_factory=list)
    start: tuple[str, ...] = ()
    """Names of the parameters that are read before the first layer."""
    taps: tuple[int, ...] = ()
    """The layers below the last whose output the prologue reads, too."""
    reads_calls = True
    _script: Script | None = None
    """What the ports do now; without one, they pass on what they get."""

    def __post_init__(self) -> None:
        self.ports = [HookedPort(index, layer) for index, layer in enumerate(self.templates)]
        for port, layer in zip(self.ports, self.templates, strict=True):
            port.script = self
            port._forward_hooks.update(layer._forward_hooks)  # by which the library collects hidden states

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        return hidden if self._script is None else self._script.visit(index, hidden, call)

    @contextmanager
    def playing(self, script: Script) -> Iterator[None]:
        """In the block, the ports do this."""
        self._script = script
        try:
            yield
        finally:
            self._script = None

    def begin(
        self, ported: PortedModel, weights: Weights, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, list[Call]] | None:
        """The first layer's input, and one `Call` per layer; `None` if the micro-batch has nothing to encode.

        weights: parameters of the start, by full names. inputs: as for `PortedModel.prologue`.
        """
        begun = Begun(len(self.ports))
        with self.playing(begun):
            ported.run(Stop(), {**ported.placeholders, **weights}, inputs)
        if begun.hidden is None:
            return None
        begun.check()
        return begun.hidden, begun.calls

    @contextmanager
    def handing_out(self, encoded: Sequence[Tensor]) -> Iterator[None]:
        """In the block, in which the prologue runs, the encoder's last layer and `taps` return these; without them, the
        encoder is not reached."""
        places = (len(self.ports) - 1, *self.taps) if encoded else ()
        handed = Handed(len(self.ports), dict(zip(places, encoded, strict=True)))
        with self.playing(handed):
            yield
        handed.check()

    def layer(
        self, ported: PortedModel, index: int, weights: Weights, hidden: Tensor, call: Call
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a layer of the encoder with these weights on [..., width]; returns its output, and no side values."""
        args, kwargs = call.arguments(hidden)
        with ported.holding(self.templates[index], weights):
            return call.hidden_of(self.templates[index](*args, **kwargs)), {}


class HookedPort(Port):
    """A port in an encoder, on which the library may put hooks."""

    __call__ = nn.Module.__call__


class Stop:
    """Leaves the forward at the first decoder layer."""

    reads_calls = False

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        raise PrologueDone


class _Ordered:
    """What both parts around the layers demand: each is called once, in order."""

    def __init__(self, layers: int) -> None:
        self._layers, self._order = layers, list[int]()

    def check(self) -> None:
        """Raise `ModelError` if layers were called otherwise."""
        if self._order != list(range(self._layers)) and self._order:
            raise ModelError("runs other than once for a micro-batch", where=WHERE, fix=FIX)


class Begun(_Ordered):
    """Records the calls of the encoder's layers, and stops behind the last."""

    reads_calls = True

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.calls: list[Call] = []
        self.hidden: Tensor | None = None
        self._passed: tuple[Tensor, int] | None = None

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        if self._passed is None:
            self.hidden = hidden
        elif not is_same(hidden, self._passed[0]) or hidden._version != self._passed[1]:
            raise ModelError("computes on the hidden state between its layers", where=WHERE, fix=FIX)
        self._order.append(index)
        self.calls.append(call)
        if index == self._layers - 1:
            raise PrologueDone
        passed = self.passed_on(hidden)
        self._passed = passed, passed._version
        return passed

    def passed_on(self, hidden: Tensor) -> Tensor:
        """A tensor of its own that stands for what the next layer gets."""
        return hidden.detach()


class Handed(_Ordered):
    """Makes layers return what the encoder has made, by layer."""

    reads_calls = False

    def __init__(self, layers: int, encoded: Mapping[int, Tensor]) -> None:
        super().__init__(layers)
        self._encoded = encoded

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        self._order.append(index)
        if not self._encoded:
            raise ModelError("is reached only behind another part of the prologue", where=WHERE, fix=FIX)
        return self._encoded[index] if index in self._encoded else self.passed_on(hidden)

    def check(self) -> None:
        super().check()
        if self._encoded and not self._order:
            raise ModelError("is not reached a second time", where=WHERE, fix=FIX)

    def passed_on(self, hidden: Tensor) -> Tensor:
        return hidden


# Finding it -----------------------------------------------------------------------------------------------------------


class _Unlike(Exception):
    """A list of modules is not the layers of an encoder as it is streamed."""


class _Fewer(Exception):
    """The decoder gets what an earlier layer returns, with this number of layers."""


def stream_encoder(ported: PortedModel, row: Mapping[str, Tensor], values: int) -> None:
    """Make units of the layers of the encoder that a row with images goes through, if they are like decoder layers.

    row: arguments of the model's forward, int64[1, tokens] among them. values: its floating-point values besides text
    (`profile_prologue.values_of`).
    """
    with portable_attention(ported.skeleton), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        rows = {name: torch.cat([one, one]) for name, one in row.items()}  # an encoder may run once for each row
        _find_encoder(ported, rows, 2 * values)


def _find_encoder(ported: PortedModel, rows: Mapping[str, Tensor], values: int) -> None:
    lists = {name: module for name, module in outermost_module_lists(ported.skeleton).items() if name != ported.stack}
    for name in sorted(lists, key=lambda name: -sum(p.numel() for p in lists[name].parameters())):
        layers = list(lists[name].children())
        if not layers or not _reaches(ported, layers[0], rows):
            continue
        structure = _tried(ported, EncoderStack(name, layers), rows, values)
        if isinstance(structure, _Fewer):
            structure = _tried(ported, EncoderStack(name, layers[: structure.args[0]]), rows, values)
        if isinstance(structure, ModelSpec) and ported.encoder is not None:
            ported.structure = structure.with_in_files(ported.in_files.files.keys())
            streamed = {id(layer) for layer in ported.encoder.templates}
            ported.encoders = [layer for layer in ported.encoders if id(layer) not in streamed]
            ported.profiled = None
            ported.remember_recomputed()
            return


def _reaches(ported: PortedModel, layer: nn.Module, rows: Mapping[str, Tensor]) -> bool:
    """Whether the rows go through an encoder's layer. By then, the library has put its hooks on all of them."""

    def stop(*_: Any) -> None:
        raise PrologueDone

    handle, capture = layer.register_forward_pre_hook(stop), Capture(len(ported.ports))
    try:
        with torch.no_grad(), SkipLargeProducts():  # type: ignore[no-untyped-call]
            ported.run(capture, ported.placeholders, rows)
    except Exception:  # of foreign code
        return False
    finally:
        handle.remove()
    return capture.hidden is None


def _tried(
    ported: PortedModel, encoder: EncoderStack, rows: Mapping[str, Tensor], values: int
) -> ModelSpec | Exception:
    """The structure with the encoder's units, if they can be streamed; otherwise the model is as before."""
    before, prefixes = ported.placeholders, tuple(f"{encoder.name}.{port.index}." for port in encoder.ports)
    ported.placeholders = {name: zero for name, zero in before.items() if not name.startswith(prefixes)}
    _put(ported, encoder, encoder)
    try:
        return _with_encoder(ported, encoder, rows, values)
    except Exception as error:  # whatever foreign code raises: the encoder stays where it is, and is exact there
        ported.placeholders = before
        _put(ported, encoder, None)
        return error


def _put(ported: PortedModel, encoder: EncoderStack, now: EncoderStack | None) -> None:
    """Let the model have ports in place of the encoder's layers, or none."""
    with_layers(ported.skeleton, encoder.name, encoder.templates if now is None else encoder.ports)
    ported.encoder = now
    vars(ported).pop("_swapped", None)


def _with_encoder(ported: PortedModel, encoder: EncoderStack, rows: Mapping[str, Tensor], values: int) -> ModelSpec:
    """The structure with the encoder's units. Raises `_Unlike`, or what the model's code raises."""
    structure, layers = ported.structure, len(encoder.ports)
    leaves = {name: zero.detach().requires_grad_() for name, zero in ported.placeholders.items()}
    look, capture, shown = _Look(encoder), Capture(len(ported.ports)), Uses(_refuse_hidden_reads(leaves))
    with torch.enable_grad(), SkipLargeProducts(), shown, encoder.playing(look):  # type: ignore[no-untyped-call]
        ported.run(Stop(), leaves, rows)
    if look.hidden is None:
        raise _Unlike
    look.check()
    given = torch.zeros(look.hidden.shape, dtype=look.hidden.dtype, requires_grad=True)
    handed = _Traced(layers, {layers - 1: given})
    with torch.enable_grad(), SkipLargeProducts(), shown, encoder.playing(handed):  # type: ignore[no-untyped-call]
        ported.run(capture, leaves, rows)
    handed.check()
    if capture.hidden is None or not capture.each_once:
        raise _Unlike
    capture.recorder.check()
    outputs = [capture.hidden, *(tensor for call in capture.calls for tensor in call.tensors())]
    behind = set[int]().union(*map(reachable_leaves, outputs))
    needing = {id(tensor) for call in look.calls for tensor in call.tensors() if tensor.requires_grad}
    read = [index for index, leaf in enumerate((*handed.leaves, given)) if id(leaf) in behind]
    if not read or needing:
        raise _Unlike
    if read[-1] < layers - 1:
        raise _Fewer(read[-1] + 1)
    encoder.taps = tuple(read[:-1])
    before = reachable_leaves(look.hidden)
    encoder.start = tuple(name for name, leaf in leaves.items() if id(leaf) in before)
    params = structure.units[0].params
    if behind & before or not {*encoder.start} <= {param.name for param in params}:
        raise _Unlike
    first = tuple(param for param in params if param.name in encoder.start)
    units = [UnitSpec(f"{encoder.name} input", "layer", first)]
    units += _layer_specs(encoder, look, {param.name: param for param in params})
    moved = {param.name for unit in units for param in unit.params}
    prologue = replace(structure.units[0], params=tuple(param for param in params if param.name not in moved))
    return replace(
        structure,
        units=(prologue, *structure.units[1:], *(replace(unit, ranks=structure.ranks) for unit in units)),
        encoders=len(units),
        encoded_per_value=given.numel() / values,
        taps=tuple(index + 2 for index in encoder.taps),
    )


class _Look(Begun):
    """Also runs each kind of layer on zeros, to learn what it returns and in which order it reads its weights."""

    def __init__(self, encoder: EncoderStack) -> None:
        super().__init__(len(encoder.ports))
        self._encoder = encoder
        self._known: dict[object, tuple[int | None, OrderOfUse]] = {}
        self.used: list[OrderOfUse] = []

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        layer = self._encoder.templates[index]
        kind = type(layer), tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        if kind not in self._known:
            self._known[kind] = self._seen(layer, hidden, call)
        self._encoder.ports[index].returns, used = self._known[kind]
        self.used.append(used)
        return super().visit(index, hidden, call)

    def passed_on(self, hidden: Tensor) -> Tensor:
        return hidden.detach().requires_grad_()

    @staticmethod
    def _seen(layer: nn.Module, hidden: Tensor, call: Call) -> tuple[int | None, OrderOfUse]:
        zeros = {name: lazy_zeros(parameter.shape, parameter.dtype) for name, parameter in layer.named_parameters()}
        used, buffers = OrderOfUse(zeros), Buffers(layer)
        args, kwargs = call.arguments(hidden.detach())
        with torch.no_grad(), ReadByProducts(zeros) as products, Uses(used.reading):
            output = functional_call(layer, zeros, args, kwargs)
        used.matrices = products.matrices()
        buffers.refuse_changed(WHERE)
        others = () if isinstance(output, Tensor) else output[1:]
        returned = call.hidden_of(output)
        if (returned.shape, returned.dtype) != (hidden.shape, hidden.dtype) or any(one is not None for one in others):
            raise _Unlike
        return None if isinstance(output, Tensor) else len(output), used


class _Traced(Handed):
    """Passes on leaves, to tell whether anything is computed from the outputs of other layers than the last."""

    def __init__(self, layers: int, encoded: Mapping[int, Tensor]) -> None:
        super().__init__(layers, encoded)
        self.leaves: list[Tensor] = []

    def passed_on(self, hidden: Tensor) -> Tensor:
        self.leaves.append(hidden.detach().requires_grad_())
        return self.leaves[-1]


def _refuse_hidden_reads(leaves: Mapping[str, Tensor]) -> Callable[[Any, Sequence[Tensor]], None]:
    """A callback of `Uses` that raises `_Unlike` where a parameter is read that the graph will not show."""
    memory = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}

    def reading(_: Any, tensors: Sequence[Tensor]) -> None:
        shown = torch.is_grad_enabled()
        unseen = (tensor for tensor in tensors if not (shown and tensor.requires_grad))
        if any(tensor.untyped_storage().data_ptr() in memory for tensor in unseen):
            raise _Unlike

    return reading


def _layer_specs(encoder: EncoderStack, look: _Look, known: Mapping[str, ParamSpec]) -> list[UnitSpec]:
    """Units of the layers, their parameters in order of use."""
    units, seen = list[UnitSpec](), set[int]()
    for index, (template, used) in enumerate(zip(encoder.templates, look.used, strict=True)):
        parameters, prefix = dict(template.named_parameters()), f"{encoder.name}.{index}."
        if not parameters or seen & {id(parameter) for parameter in parameters.values()}:
            raise _Unlike  # shared between layers
        seen |= {id(parameter) for parameter in parameters.values()}
        params = [used.noted(name, known[prefix + name]) for name in in_order_of_use(parameters, used.names)]
        units.append(UnitSpec(prefix.rstrip("."), "layer", tuple(params)))
    return units
