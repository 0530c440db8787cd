"""Splits a Hugging Face model into units, and finds out from tiny runs how they work.

`port_model` copies a model's structure without its weights (parameters become meta tensors, buffers are copied),
finds the stack of decoder layers, and runs it on zeros to find what layers return, which parameters prologue and
epilogue use, and the coefficient of a router auxiliary loss. Nothing depends on model types or parameter names. A
model that cannot be trained exactly is refused with a `ModelError`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from megatrain.errors import MegaTrainError, ModelError, typed_line
from megatrain.model.adapters import FULL_PRECISION, adapter_of, without_parametrize
from megatrain.model.architecture import head_of, position_limit
from megatrain.model.between_layers import EarlierOutput, Value
from megatrain.model.forward_arguments import MARKS, arguments_of
from megatrain.model.mapped_tensors import lazy_zeros
from megatrain.model.peak import SkipLargeProducts
from megatrain.model.ports import (
    ROUTED,
    Call,
    Capture,
    HandOut,
    Port,
    PortedModel,
    Sides,
    TracingCapture,
    TracingHandOut,
    batch_first,
    handing_back,
    head_shape,
    placeholder,
    takes,
    with_layers,
)
from megatrain.model.profile import Measurement, portable_attention, window_of
from megatrain.model.recomputed_encoders import encoder_layers, outermost_module_lists
from megatrain.model.router_logits import install_recorders, recorded
from megatrain.model.side_values import (
    Passing,
    Path,
    Seen,
    Traffic,
    Untraceable,
    holds_containers,
    leaves_of,
    read_of,
    rebuilt,
    value_at,
    without,
    written,
)
from megatrain.model.skeleton import as_meta, on_the_cpu, registering
from megatrain.model.user_patches import (
    Buffers,
    OwnTensors,
    code_of,
    refuse_hooks_around,
    refuse_mixing,
    refuse_shared_and_hooked,
    separate_dicts,
)
from megatrain.model.weight_reads import (
    OrderOfUse,
    ReadByProducts,
    Uses,
    in_order_of_use,
    nodes_of,
    reachable_leaves,
)
from megatrain.model.weight_sources import quiet
from megatrain.spec import Growth, ModelSpec, ParamSpec, SideValue, UnitSpec

PROBE_TOKENS = 4
"""Length of the inputs of the tiny runs."""

MOST_STACKS = 4
"""Module lists to try; an image tower may be larger than the stack of decoder layers."""


def port_model(model: nn.Module, dtype: torch.dtype) -> PortedModel:
    """Split a causal language model into units that compute in `dtype`.

    `model` may be a blueprint, with parameters on the meta device; its buffers must have values. It is not changed and
    shares no parameter storage with the result; its mode (`train` or `eval`) carries over. Raises `ModelError` for
    anything but a causal language model, and for one that cannot be streamed exactly.
    """
    refuse_other_kinds(model)
    assert isinstance(model, PreTrainedModel)
    adapter = adapter_of(model)
    if adapter is not None:
        adapter.refuse_more(model)
    refuse_shared_and_hooked(model)
    refusal: ModelError | None = None
    for stack in _stacks(model):
        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.inference_mode(False),
                _foreign_errors(type(model).__name__, dtype),
            ):
                ported = _ported(model, stack, dtype)
                ported.adapter = adapter
                ported.remember_recomputed()
                ported.structure = replace(ported.structure, base_apart=adapter is not None)
                return ported
        except ModelError as error:
            refusal = refusal or error  # about the largest stack, which is nearly always the right one
    assert refusal is not None
    raise refusal


def _ported(model: PreTrainedModel, stack: str, dtype: torch.dtype) -> PortedModel:
    ported = _take_apart(model, stack, dtype)
    with portable_attention(ported.skeleton):
        look = _learn_layers(model, ported)
        with OwnTensors(model):
            ported.structure = _learn_structure(model, ported, _layer_specs(model, ported, look), look.traffic.sides)
        if ported.routers_off:
            ported.balance_coefficient = _learn_balance(ported, look.sides)
    if ported.balance_coefficient is not None:
        ported.structure = _recording(ported, look.sides)
    ported.measured = _Measured(ported, look, partial(_foreign_errors, type(model).__name__, dtype))
    return ported


class _Measured:
    """`Measurement` whose errors name the model."""

    def __init__(
        self, ported: PortedModel, look: FirstLook, errors: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._measurement = Measurement(ported, look.kinds, look.sides, PROBE_TOKENS)
        self._errors = errors

    def spec(self) -> ModelSpec:
        with self._errors():
            return self._measurement.spec()

    def parts(self) -> list[tuple[str, ...]]:
        with self._errors():
            return self._measurement.parts()


@contextmanager
def _foreign_errors(name: str, dtype: torch.dtype) -> Iterator[None]:
    """Turn whatever the model's own code raises when run in pieces into a `ModelError`."""
    try:
        yield
    except MegaTrainError:
        raise
    except Exception as error:
        raise ModelError(
            f"cannot be run layer by layer in {str(dtype).removeprefix('torch.')} ({typed_line(error)})",
            where=f"model {name}",
            fix="" if dtype == torch.float32 else "precision=fp32 may work",
        ) from error


def refuse_other_kinds(model: nn.Module) -> None:
    """Raise `ModelError` for anything but a causal language model of transformers."""
    where = f"model {type(model).__name__}"
    if not isinstance(model, PreTrainedModel):
        if any(isinstance(getattr(model, name, None), PreTrainedModel) for name in ("_orig_mod", "module")):
            raise ModelError("wraps a transformers model", where=where, fix="pass the model in it")
        raise ModelError("not a transformers model", where=where, fix="pass an AutoModelForCausalLM")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError("an encoder-decoder, not a causal language model", where=where, fix="use a decoder-only model")
    if head_of(model) is None:
        fix = "load it with AutoModelForCausalLM; heads for classification or scoring are not supported"
        raise ModelError("has no language-model head", where=where, fix=fix)


def _stacks(model: nn.Module) -> list[str]:
    """Names of the outermost module lists that may be the decoder layers, most parameters first."""
    lists = {name: module for name, module in outermost_module_lists(model).items() if len(module)}
    if not lists:
        raise ModelError("has no list of decoder layers", where=f"model {type(model).__name__}")
    return sorted(lists, key=lambda name: -sum(p.numel() for p in lists[name].parameters()))[:MOST_STACKS]


def _take_apart(model: PreTrainedModel, stack: str, dtype: torch.dtype) -> PortedModel:
    """Copy the structure with meta parameters of `dtype` and put ports in place of the layers of `stack`."""
    refuse_hooks_around(model, stack)
    memo: dict[int, Any] = {}
    dtypes = buffer_dtypes(model, dtype)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            what = "has parameters that are not floating point (quantized?)"
            raise ModelError(what, where=type(model).__name__, fix=FULL_PRECISION)
        meta = torch.empty(parameter.shape, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(f"its buffer {name} has no value (meta device)", where=type(model).__name__)
        if id(buffer) in memo:
            what = f"its buffer {name} is a parameter too, so would not follow its training"
            raise ModelError(what, where=type(model).__name__, fix="register it as a parameter only")
        memo[id(buffer)] = buffer.detach().cpu().to(dtypes.get(name, buffer.dtype), copy=True)
    skeleton = copy.deepcopy(model, memo)
    for module in skeleton.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.__dict__["gradient_checkpointing"] = False  # the policy decides what to recompute
    without_parametrize(skeleton)
    separate_dicts(skeleton)
    skeleton.config.return_dict = True
    routers_off = {}
    if getattr(model.config, "output_router_logits", False):
        _refuse_unrecorded(skeleton)
        routers_off = {"output_router_logits": False}
    templates = list(skeleton.get_submodule(stack).children())
    ports = [Port(index, layer) for index, layer in enumerate(templates)]
    with_layers(skeleton, stack, ports)
    nothing = ModelSpec(type(model).__name__, _placeholder_units(len(templates)), 1, 1)
    placeholders = {
        name: placeholder(parameter, torch.device("cpu")) for name, parameter in skeleton.named_parameters()
    }
    taken = arguments_of(skeleton, templates)
    encoders = encoder_layers(skeleton, stack)
    more: Any = {"routers_off": routers_off, "arguments": taken, "encoders": encoders}
    return PortedModel(nothing, skeleton, templates, ports, stack, placeholders, **more)


def buffer_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtype of each buffer when the library builds the model in `dtype`; some stay float32 (rotary tables, say)."""
    if dtype == torch.float32 or next(model.parameters()).dtype == dtype:
        return {}
    try:
        with quiet(), torch.random.fork_rng(devices=[]), on_the_cpu(), registering(as_meta), no_init_weights():
            small: PreTrainedModel = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    except Exception:  # a class that cannot be built from its config alone
        return {}
    exact = [*(small._keep_in_fp32_modules or ()), *(small._keep_in_fp32_modules_strict or ())]
    return {
        name: buffer.dtype
        for name, buffer in small.named_buffers()
        if buffer.is_floating_point() and not any(kept in name for kept in exact)
    }


def _refuse_unrecorded(model: PreTrainedModel) -> None:
    """Raise `ModelError` unless the library's recorders capture the routers' outputs, from which the loss is
    computed."""
    if not install_recorders(model) or not takes(model, "logits_to_keep"):
        raise ModelError(
            "its router auxiliary loss (output_router_logits=True) does not use transformers' output recorders",
            where=type(model).__name__,
            fix="set output_router_logits=False in its config",
        )


def _placeholder_units(layers: int) -> tuple[UnitSpec, ...]:
    middle = [UnitSpec(f"layers.{index}", "layer", ()) for index in range(layers)]
    return UnitSpec("prologue", "prologue", ()), *middle, UnitSpec("epilogue", "epilogue", ())


def _learn_layers(model: PreTrainedModel, ported: PortedModel) -> FirstLook:
    """Run one layer of each kind: does it return the hidden state, or a tuple that starts with it?"""
    look = FirstLook(ported)
    with torch.enable_grad(), OwnTensors(model):
        try:
            _run_probe(ported, look, PROBE_TOKENS)
        except Exception as error:
            ported.marks = [name for name in MARKS if name in ported.arguments.own]
            if isinstance(error, MegaTrainError) or not ported.marks:
                raise
            look = FirstLook(ported)
            _run_probe(ported, look, PROBE_TOKENS)
    try:
        passing = look.traffic.finish(len(ported.ports))
    except Untraceable:
        what = "its layers write into an object that is passed to all of them, and that none of them reads"
        raise ModelError(what, where=f"model {type(model).__name__}") from None
    for port, each in zip(ported.ports, passing, strict=True):
        port.passing, port.others = each, () if each is None else each.others
    return look


def _run_probe(ported: PortedModel, capture: Capture, tokens: int) -> None:
    where = f"model {type(ported.skeleton).__name__}"
    ported.run(capture, ported.placeholders, _probe_inputs(tokens))
    if capture.hidden is None or len(capture.calls) < len(ported.ports):
        raise ModelError("does not call each of its decoder layers once", where=where)
    if capture.hidden.dim() < 3 or capture.hidden.shape[:2] != (1, tokens):
        raise ModelError(f"its hidden state is {list(capture.hidden.shape)}, without batch and length", where=where)


def _learn_balance(ported: PortedModel, sides: list[Sides]) -> float | None:
    """The coefficient of the auxiliary loss: how much the model's loss grows with it."""
    leaves = [tuple(side.detach().requires_grad_() for side in of_layer) for of_layer in sides]
    inputs = _probe_inputs()
    hidden = torch.zeros(1, PROBE_TOKENS, *ported.hidden_shape, dtype=next(iter(ported.placeholders.values())).dtype)
    with torch.enable_grad():
        asked = {**inputs, **ROUTED, "logits_to_keep": 0, "labels": inputs["input_ids"]}
        output = ported.run(HandOut(len(ported.ports), hidden, leaves), ported.placeholders, asked)
        if output.aux_loss is None or not isinstance(output.aux_loss, Tensor) or not output.aux_loss.requires_grad:
            return None
        (coefficient,) = torch.autograd.grad(output.loss, output.aux_loss, allow_unused=True)
    return None if coefficient is None or not coefficient else float(coefficient)


def _recording(ported: PortedModel, recorded: list[Sides]) -> ModelSpec:
    """Add what layers record for the auxiliary loss, for which schedules have buffers."""
    structure, side_values = ported.structure, list(ported.structure.sides)
    for port, of_layer in zip(ported.ports, recorded, strict=True):
        port.recorded = [*range(len(side_values), len(side_values) + len(of_layer))]
        sizes = (Growth(per_token=side.nbytes / PROBE_TOKENS) for side in of_layer)
        side_values += [SideValue(port.index + 1, (structure.epilogue,), size=size) for size in sizes]
    return replace(structure, sides=tuple(side_values))


def _sides_of_prologue(ported: PortedModel, capture: TracingCapture, known: int) -> tuple[SideValue, ...]:
    """The arguments of layers that need a gradient. known: the number of side values so far."""
    users: dict[int, tuple[set[int], int]] = {}
    between = {id(leaf) for leaf in capture.leaves}
    for port, call in zip(ported.ports, capture.calls, strict=True):
        takes: dict[Path, int] = {}
        for path, leaf in leaves_of(call.form):
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                continue
            if id(leaf) in between or reachable_leaves(leaf) & between:
                what = "computes between its decoder layers what layers take besides the hidden state"
                raise ModelError(what, where=f"model {type(ported.skeleton).__name__}")
            units, takes[path] = users.setdefault(id(leaf), (set(), known + len(users)))
            units.add(port.index + 1)
        if takes:
            has = port.passing or Passing({}, {}, (), ())
            port.passing = replace(has, takes={**has.takes, **takes})
    return tuple(SideValue(0, tuple(sorted(units))) for units, _ in users.values())


def _probe_inputs(tokens: int = PROBE_TOKENS, rows: int = 1) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(rows, tokens, dtype=torch.long)}


def _learn_structure(
    model: PreTrainedModel, ported: PortedModel, layers: list[UnitSpec], side_values: Sequence[SideValue]
) -> ModelSpec:
    """Find the parameters that prologue and epilogue use from two autograd graphs, and list them in order of use.

    sides: those of layers."""
    where = f"model {type(model).__name__}"
    leaves = {name: zero.detach().requires_grad_() for name, zero in ported.placeholders.items()}
    trains = {name: parameter.requires_grad for name, parameter in ported.skeleton.named_parameters()}
    capture, order = TracingCapture(len(ported.ports)), OrderOfUse(leaves)
    with torch.enable_grad(), SkipLargeProducts(), Uses(order.reading):  # type: ignore[no-untyped-call]
        ported.run(capture, leaves, _probe_inputs())
    if capture.hidden is None or not capture.each_once:
        raise ModelError("skips or repeats a decoder layer", where=where)
    capture.recorder.check()
    constants = [each for call in capture.calls for each in call.constants]
    between = [each for each in constants if isinstance(each, Tensor) and each.requires_grad]
    of_prologue = _sides_of_prologue(ported, capture, len(side_values))
    ported.hidden_shape = tuple(capture.hidden.shape[2:])
    last = torch.zeros(PROBE_TOKENS, *ported.hidden_shape, dtype=capture.hidden.dtype, requires_grad=True)
    tracing = TracingHandOut(len(ported.ports), last.unsqueeze(1))
    with torch.enable_grad(), SkipLargeProducts(), Uses(order.reading):  # type: ignore[no-untyped-call]
        logits = ported.run(tracing, leaves, _probe_inputs(1, PROBE_TOKENS)).logits.reshape(PROBE_TOKENS, -1)
    if tracing.order != list(range(len(ported.ports))):
        raise ModelError("goes through its decoder layers more than once", where=where)
    ported.by_head = _read_by_head(tracing, logits, where)
    if ported.by_head or capture.recorder.has_recorded:  # look behind the layers, now that this is known
        with torch.enable_grad(), SkipLargeProducts():  # type: ignore[no-untyped-call]
            ported.run(TracingCapture(len(ported.ports)), leaves, _probe_inputs())
    handed_out = torch.zeros(PROBE_TOKENS, *head_shape(ported), dtype=capture.hidden.dtype, requires_grad=True)
    for _ in range(2):  # buffers that one forward changes, the next must not change again
        whole, buffers = handing_back(ported, handed_out.unsqueeze(1)), Buffers(ported.skeleton)
        with torch.no_grad(), SkipLargeProducts():  # type: ignore[no-untyped-call]
            ported.run(whole, ported.placeholders, _probe_inputs(1, PROBE_TOKENS))
    buffers.refuse_changed(where)
    refuse_mixing(ported, handed_out)
    in_prologue = set[int]().union(*map(reachable_leaves, (capture.hidden, *between)))
    in_epilogue = reachable_leaves(logits)
    if id(last) not in in_epilogue:
        raise ModelError("its logits of one token do not depend on what its layers make of it", where=where)
    prologue, epilogue, borrowed = [], [], []
    for name in in_order_of_use(leaves, order.names):
        leaf = leaves[name]
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
        *layers,
        UnitSpec("epilogue", "epilogue", tuple(epilogue), tuple(borrowed)),
    )
    return ModelSpec(
        name=type(model).__name__,
        units=units,
        hidden_size=prod(ported.hidden_shape),
        vocab_size=logits.shape[-1],
        max_positions=position_limit(model.config),
        attention=getattr(model.config, "_attn_implementation", None) or "eager",
        sides=(*side_values, *of_prologue, *_hidden_sides(ported, capture)),
    )


def _read_by_head(tracing: TracingHandOut, logits: Tensor, where: str) -> tuple[int, ...]:
    """The units before the last layer whose hidden state logits [tokens, vocabulary] depend on. Raises `ModelError` if
    they need more of what the prologue computes."""
    if nodes_of(logits) & {node for node in nodes_of(tracing.first) if not hasattr(node, "variable")}:
        raise ModelError("its logits depend on what its prologue computes besides the hidden state", where=where)
    reached = reachable_leaves(logits)
    return tuple(unit for unit, leaf in enumerate(tracing.leaves) if id(leaf) in reached)


def _hidden_sides(ported: PortedModel, capture: TracingCapture) -> tuple[SideValue, ...]:
    """The hidden states of units that more than the next unit reads."""
    assert capture.hidden is not None
    epilogue = len(ported.ports) + 1
    users: dict[int, list[int]] = {}
    for index, call in enumerate(capture.calls):
        for each in call.constants:
            if isinstance(each, EarlierOutput):
                users.setdefault(each.unit, []).append(index + 1)
    for unit in ported.by_head or ():
        users.setdefault(unit, []).append(epilogue)
    size = Growth(per_token=capture.hidden.nbytes / PROBE_TOKENS)
    return tuple(SideValue(unit, tuple(users[unit]), size=size, is_hidden=True) for unit in sorted(users))


def _layer_specs(model: PreTrainedModel, ported: PortedModel, look: FirstLook) -> list[UnitSpec]:
    seen: dict[int, str] = {id(p): name for name, p in ported.skeleton.named_parameters()}
    units = []
    for index, template in enumerate(ported.templates):
        prefix, params, parameters = ported.prefix(index), [], dict(template.named_parameters())
        if not parameters:
            raise ModelError(f"its layer {prefix.rstrip('.')} has no parameters", where=f"model {type(model).__name__}")
        used = look.used[look.kinds[index]]
        for name in in_order_of_use(parameters, used.names):
            parameter = parameters[name]
            if id(parameter) in seen:
                raise ModelError(
                    f"layers share a parameter: {prefix}{name} is {seen[id(parameter)]}", where=type(model).__name__
                )
            seen[id(parameter)] = prefix + name
            share = _active_share(model, parameter)
            param = ParamSpec(prefix + name, tuple(parameter.shape), share, parameter.requires_grad)
            params.append(used.noted(name, param))
        units.append(UnitSpec(prefix.rstrip("."), "layer", tuple(params)))
    return units


def _active_share(model: PreTrainedModel, parameter: Tensor) -> float:
    """Share of a parameter that one token uses: below 1 if its first dimension counts experts."""
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if not chosen or not experts or parameter.dim() < 3 or parameter.shape[0] != experts:
        return 1.0
    return float(chosen) / float(experts)


# The first look at the layers -----------------------------------------------------------------------------------------
#
# One layer of each kind runs on zeros at its place in the model's forward. This shows the structure in which it returns
# the hidden state, and what else layers exchange (`side_values`): another value of that structure, or an entry that
# they write into a dictionary. What the model's loop computes from such values is refused.


def _leading(hidden: Tensor) -> int:
    """How many dimensions the hidden state of the probe has before batch and length."""
    places = (place for place in range(hidden.dim() - 2) if hidden.shape[place : place + 2] == (1, PROBE_TOKENS))
    return next(places, 0)


class FirstLook(Capture):
    """A capture that also runs one layer of each kind, with gradients enabled to trace what comes from a layer.

    A layer that gets something of an earlier one, or a container that it may write into, is run in any case.
    """

    def __init__(self, ported: PortedModel) -> None:
        super().__init__(len(ported.ports))
        self._ported = ported
        self.used: dict[object, OrderOfUse] = {}
        """Kind of layer -> the order in which it first used its parameters."""
        self.kinds: list[object] = []
        self.sides: list[Sides] = []
        self.traffic = Traffic()
        """What layers pass on besides the hidden state."""
        self._known: dict[tuple[object, object], tuple[Seen, OrderOfUse, Sides]] = {}
        """By kind, and by what the layer's own functions refer to."""

    def visit(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        self.recorder.paused = True
        if not self.order and (leading := _leading(hidden)):
            hidden, call = batch_first(hidden, leading), replace(call, leading=leading)
            for port in self._ported.ports:
                port.leading = leading
        if self.traffic.is_computed_in(call.form):
            raise self._refusal("model computes between its layers with what they pass on")
        layer, came = self._ported.templates[index], self.traffic.found_in(call.form)
        code, held = code_of(layer)
        forms = ((name, p.shape, p.requires_grad) for name, p in layer.named_parameters())
        kind: tuple[Any, ...] = (type(layer), *forms, window_of(layer), code)
        if came or holds_containers(call.form):
            seen, order, side_values = self._look(index, hidden, call, came)
            kind = (*kind, tuple((path, came[path].shape) for path in seen.read), tuple(seen.writes))
        else:
            if (kind, held) not in self._known:
                self._known[kind, held] = self._look(index, hidden, call, came)
            seen, order, side_values = self._known[kind, held]
        if self.hidden is not None:
            between, _ = self.recorder.finished(hidden, call.form)
            noted = leaves_of(self.recorder.noted(call.form)) if between else ()
            computed = ((path, value_at(call.form, path).shape) for path, leaf in noted if isinstance(leaf, Value))
            kind = (*kind, *(str(step.function) for step in (between.steps if between else ())), *computed)
        self.used.setdefault(kind, order)
        port = self._ported.ports[index]
        port.returns = len(seen.output) if isinstance(seen.output, tuple | list) else None
        port.others = self.traffic.passed_on(index, seen, call.form)
        self.kinds.append(kind)
        self.sides.append(side_values)
        return super().visit(index, hidden, call)

    def _look(
        self, index: int, hidden: Tensor, call: Call, came: Mapping[Path, Tensor]
    ) -> tuple[Seen, OrderOfUse, Sides]:
        """Run a layer where the model calls it: once to see what it reads and makes, once more for gradients."""
        layer = self._ported.templates[index]
        # Grouped products want real strides.
        zeros = {name: lazy_zeros(p.shape, p.dtype) for name, p in layer.named_parameters()}
        buffers, order = Buffers(layer, self._ported.prefix(index)), OrderOfUse(zeros)
        touched: set[int] = set()

        def reading(func: Any, tensors: Sequence[Tensor]) -> None:
            order.reading(func, tensors)
            touched.update(each.untyped_storage().data_ptr() for each in tensors if came)

        first = call.with_form(rebuilt(call.form, lambda path, leaf: leaf))
        args, kwargs = first.arguments(hidden)
        with torch.no_grad(), recorded() as routed, ReadByProducts(zeros) as products, Uses(reading):
            output = functional_call(layer, zeros, args, kwargs)
        order.matrices = products.matrices()
        try:
            writes = written(call.form, first.form)
        except Untraceable:
            raise self._refusal("layers write into an object that is passed to all of them") from None
        places = {path for path, leaf in came.items() if leaf.untyped_storage().data_ptr() in touched}
        read = read_of(call.form, places, came.keys())
        without_gradients = call.with_form(without(call.form, came.keys() - read))
        more = isinstance(output, tuple | list) and len(output) > 1
        with torch.enable_grad(), SkipLargeProducts():  # type: ignore[no-untyped-call]  # code may ask
            leaves = {name: zero.detach().requires_grad_() for name, zero in zeros.items()}
            args, kwargs = without_gradients.arguments(
                hidden.detach().requires_grad_() if came or writes or more else hidden
            )
            traced = functional_call(layer, leaves, args, kwargs)
        buffers.refuse_changed(f"model {type(self._ported.skeleton).__name__}")
        return Seen(output, sorted(read, key=str), writes, (traced, without_gradients.form)), order, tuple(routed)

    def _refusal(self, what: str) -> ModelError:
        return ModelError(f"its {what}", where=f"model {type(self._ported.skeleton).__name__}")
