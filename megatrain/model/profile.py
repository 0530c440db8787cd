"""Measures the memory of a model's layers, head and prologue besides their weights, by running them on zeros.

Each kind of layer runs forward, and forward and backward, at three short lengths. A fit through the peaks (`peak`) is
checked against a fourth run that is longer and has two rows. A layer that pads to blocks, or loops over positions, is
then run at further lengths; one that copies for several rows what one row shares is also measured with two rows, and
one whose attention a CPU runs in another way than CUDA is measured both ways (`DeviceAttention`). The zeros take
almost no memory. Training does not need any of this: it runs when somebody plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatrain.model.chunked_layers import in_chunks, token_wise
from megatrain.model.mapped_tensors import lazy_parameters, lazy_zeros
from megatrain.model.peak import (
    DeviceAttention,
    Lengths,
    Recording,
    Run,
    SkipLargeProducts,
    growth_of,
    measured,
    recorded_backward,
    recorded_forward,
)
from megatrain.model.ports import Capture, PortedModel, Sides, filled, head_shape, taken_from_prologue
from megatrain.model.profile_prologue import (
    LARGE,
    Batching,
    NotAccepted,
    alike,
    captured,
    padded,
    profile_encoder,
    profile_images,
    profile_prologue,
    whole,
    windows,
    windows_of,
)
from megatrain.model.saved_activations import Answering, Keeping, Key, Level, Stored
from megatrain.model.skeleton import on_the_cpu
from megatrain.spec import LayerProfile, ModelSpec, SideValue
from megatrain.spec.layer_profile import Outputs, Peak

SHORT, BLOCKS = 8, (64, 128, 256)
"""Tokens of the shortest of three runs, each twice as long as the one before; block sizes that layers may pad to."""
FURTHER, ROUNDED = 300, 0.01
"""Tokens of the run that a fit is checked against, and the relative error allowed."""
TOO_LITTLE = 10
"""Weight of an underestimate relative to an overestimate."""
ROWS = 2

RunOf = Callable[[int], Run]
"""Number of rows -> run of a layer."""
ZerosOf = Callable[[Sequence[int], torch.dtype], Tensor]
Record = Callable[[int], Recording]
Profiles = TypeVar("Profiles")


class Measurement:
    """Memory and token-wise parts of a ported model, measured once per kind of layer.

    sides: what each layer recorded for `seen` tokens, if the model has a router auxiliary loss.
    """

    def __init__(self, ported: PortedModel, kinds: Sequence[object], side_values: Sequence[Sides], seen: int) -> None:
        self._ported, self._kinds, self._sides, self._seen = ported, kinds, side_values, seen
        self._first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}

    def parts(self) -> list[tuple[str, ...]]:
        """Names of each layer's token-wise parts."""
        with _on_the_cpu(self._ported):
            called = self._calls()
            parts = {kind: self._parts(called, index) for kind, index in self._first.items()}
        return [parts[kind] for kind in self._kinds]

    def spec(self) -> ModelSpec:
        """The model's specification with profiles."""
        structure = self._ported.structure
        most = structure.max_positions or FURTHER
        shortest = max(1, min(SHORT, most // 4))
        short = shortest, 2 * shortest, 4 * shortest
        with _on_the_cpu(self._ported):
            told = windows_of(self._ported, shortest)
            with windows(self._ported, LARGE):
                with SkipLargeProducts():  # type: ignore[no-untyped-call]
                    prologue = profile_prologue(self._ported, short)
                prologue = self._with_images(prologue)
                known = {kind: self._layer(index, prologue, short, most) for kind, index in self._first.items()}
                encoder = self._encoder()
            epilogue = self._head(short)
            side_values = self._sized(short, most)
        layers = []
        for index, kind in enumerate(self._kinds):
            window = told.get(index, known[kind].window)
            layers.append(replace(known[kind], window=window))
        profiles = zip(structure.units, (prologue, *layers, epilogue, *encoder), strict=True)
        units = tuple(replace(unit, profile=profile) for unit, profile in profiles)
        return replace(structure, units=units, sides=side_values)

    def _with_images(self, prologue: LayerProfile) -> LayerProfile:
        """Also for rows with images, if the model is to see some; as it is if the model's code does not take them."""
        row = self._ported.image_row
        if row is None or not row[1]:
            return prologue
        try:
            images, here = _on_both(partial(profile_images, self._ported, *row))
        except NotAccepted:
            return prologue
        known, on_a_cpu = (self._beside_text(profile, prologue) for profile in (images, here))
        return known if here is images else replace(known, others=(*known.others, ("cpu", on_a_cpu)))

    def _encoder(self) -> list[LayerProfile]:
        """Profiles of the units of a streamed encoder, for rows like the one that the model is to see."""
        row, count = self._ported.image_row, self._ported.structure.encoders
        if row is None or not count:
            return [LayerProfile()] * count
        on_device, here = _on_both(partial(profile_encoder, self._ported, *row))
        if here is on_device:
            return on_device
        return [replace(one, others=(("cpu", other),)) for one, other in zip(on_device, here, strict=True)]

    def _beside_text(self, images: LayerProfile, prologue: LayerProfile) -> LayerProfile:
        """The prologue, and as what differs in it rows with images, whose text alone may take more than these."""
        text = prologue.of("padded").forward
        forward = Peak(images.forward.device + text.device, images.forward.host + text.host)
        return replace(prologue, others=(("images", replace(images, forward=forward)), *prologue.others))

    def _layer(self, index: int, prologue: LayerProfile, short: Lengths, most: int) -> LayerProfile:
        """Profile a layer as a GPU runs it, and as `cpu` among the others where a CPU runs attention in another way."""
        called, layer = self._calls(), self._ported.templates[index]
        parts = self._parts(called, index)
        takes_masks = any(name == "padded" for name, _ in prologue.others)
        masks = takes_masks and not alike(called(whole, 1, short[0]), called(padded, 1, short[0]), index)

        def measure() -> LayerProfile:
            profile = profile_layer(layer, partial(self._run, called, whole, index), parts, short, most)
            if not masks:
                return profile
            masked = profile_layer(layer, partial(self._run, called, padded, index), parts, short, most)
            return replace(profile, others=(("masked", masked), *profile.others))

        on_device, here = _on_both(measure)
        return on_device if here is on_device else replace(on_device, others=(("cpu", here), *on_device.others))

    def _calls(self) -> Callable[[Batching, int, int], Capture]:
        @cache
        def called(rows: Batching, count: int, tokens: int) -> Capture:
            with _disable_current_modes(), SkipLargeProducts():  # type: ignore[no-untyped-call]  # not what is measured
                return captured(self._ported, rows(count, tokens))

        return called

    def _run(self, called: Callable[[Batching, int, int], Capture], rows: Batching, index: int, count: int) -> Run:
        layer = self._ported.templates[index]
        weights = lazy_parameters(layer)  # grouped products want real strides

        def run(tokens: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
            capture = called(rows, count, tokens)
            assert capture.hidden is not None
            given = capture.hidden.detach().requires_grad_()
            values, port = self._values(capture, index), self._ported.ports[index]
            hidden, call = filled(port, capture.calls[index], values, given)
            args, kwargs = call.arguments(hidden)
            output = call.hidden_of(functional_call(layer, weights, args, kwargs))
            return output, list(weights.values()), [given, *(value for value in values.values() if value.requires_grad)]

        return run

    def _values(self, capture: Capture, index: int) -> dict[int, Tensor]:
        """The side values that a layer takes, as leaves; those of layers from running these on zeros."""
        side_values = self._ported.structure.sides
        if self._ported.ports[index].passing is None and not capture.calls[index].takes:
            return {}
        with _disable_current_modes(), torch.no_grad():  # no part of what is measured
            values = self._side_values_of(capture, index, lazy_zeros)
            return {
                number: value.detach().requires_grad_(side_values[number].differentiable)
                for number, value in values.items()
            }

    def _side_values_of(self, capture: Capture, index: int, zeros: ZerosOf) -> dict[int, Tensor]:
        passing, side_values = self._ported.ports[index].passing, self._ported.structure.sides
        assert capture.hidden is not None
        earlier = {number: torch.zeros_like(capture.hidden) for number in capture.calls[index].takes.values()}
        values_of = taken_from_prologue(self._ported, index, capture.calls[index]) | earlier
        for number in set(() if passing is None else passing.takes.values()) - values_of.keys():
            if number not in capture.made:
                capture.made |= self._made(capture, side_values[number].source - 1, zeros)
            values_of[number] = capture.made[number]
        return values_of

    def _made(self, capture: Capture, index: int, zeros: ZerosOf) -> dict[int, Tensor]:
        layer, port = self._ported.templates[index], self._ported.ports[index]
        assert port.passing is not None
        assert capture.hidden is not None
        weights = {name: zeros(p.shape, p.dtype) for name, p in layer.named_parameters()}
        values = self._side_values_of(capture, index, zeros)
        hidden, call = filled(port, capture.calls[index], values, capture.hidden)
        args, kwargs = call.arguments(hidden)
        with SkipLargeProducts():  # type: ignore[no-untyped-call]
            return port.passing.made(functional_call(layer, weights, args, kwargs), call.form)

    def _sized(self, lengths: Lengths, most: int) -> tuple[SideValue, ...]:
        """The side values with their bytes; those of router logits and hidden states are known."""
        side_values, ports = self._ported.structure.sides, self._ported.ports
        called, known = self._calls(), {number for port in ports for number in port.recorded}
        known |= {number for number, side in enumerate(side_values) if side.is_hidden}
        sizes: dict[int, list[int]] = {number: [] for number in range(len(side_values)) if number not in known}
        for tokens in lengths if sizes else ():
            values: dict[int, Tensor] = {}
            for port in ports:
                values |= self._values(called(whole, 1, tokens), port.index)
            for number, measured_nbytes in sizes.items():
                measured_nbytes.append(values[number].nbytes)
        growths = {number: growth_of(measured_nbytes, lengths) for number, measured_nbytes in sizes.items()}
        pairs = {number for number, growth in growths.items() if growth.per_pair}
        limits = self._of_long_sequences(pairs, most) if pairs else {}
        return tuple(
            replace(side, size=growths.get(number, side.size), most_per_token=limits.get(number, 0.0))
            for number, side in enumerate(side_values)
        )

    def _of_long_sequences(self, numbers: set[int], tokens: int) -> dict[int, float]:
        """Bytes of a token in the longest sequence, of side values that may grow no further (the positions that
        sparse attention chooses). Only shapes are computed."""
        values: dict[int, Tensor] = {}
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                capture = captured(self._ported, whole(1, tokens))
                for port in self._ported.ports:
                    values |= self._side_values_of(
                        capture, port.index, lambda shape, dtype: torch.zeros(shape, dtype=dtype)
                    )
        except Exception:  # of foreign code that needs values
            return {}
        return {number: values[number].nbytes / tokens for number in numbers}

    def _parts(self, called: Callable[[Batching, int, int], Capture], index: int) -> tuple[str, ...]:
        return token_wise(self._ported.templates[index], self._run(called, whole, index, 1))

    def _head(self, lengths: Lengths) -> LayerProfile:
        """Profile of the LOSS op: the head on one chunk, and the router auxiliary loss, whose gradients remain."""
        ported, structure = self._ported, self._ported.structure
        epilogue = structure.units[structure.epilogue]
        units = (*(structure.units[:1] if structure.tied else ()), epilogue)
        trains = {param.name: param.trainable for unit in units for param in unit.params}
        forms = {name: ported.placeholders[name] for name in trains}
        leaves = {name: lazy_zeros(form.shape, form.dtype).requires_grad_(trains[name]) for name, form in forms.items()}
        used = [leaves[name] for name in (*(param.name for param in epilogue.params), *epilogue.borrows)]
        dtype = next(iter(leaves.values())).dtype

        def head(tokens: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
            given = torch.zeros(tokens, *head_shape(ported), dtype=dtype).requires_grad_()
            return ported.head(leaves, given), used, [given]

        def balance(tokens: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
            with _disable_current_modes():
                inputs = whole(1, tokens)
                routed = [tuple(_as_long(side, self._seen, tokens) for side in of_layer) for of_layer in self._sides]
            loss = (ported.balance_coefficient or 0.0) * ported.balance(leaves, inputs, routed)
            return loss, [], [side for of_layer in routed for side in of_layer]

        profile = LayerProfile(backward=measured(partial(recorded_backward, head, is_head=True), lengths)[0])
        told = all(self._seen in side.shape for of_layer in self._sides for side in of_layer)
        if ported.balance_coefficient is None or not told:  # a model that cannot be measured may still train
            return profile
        return replace(profile, balance=measured(partial(recorded_backward, balance, is_head=True), lengths)[0])


def _on_both(measure: Callable[[], Profiles]) -> tuple[Profiles, Profiles]:
    """What is measured as a GPU runs attention, and as a CPU does; one object if that is the same."""
    with DeviceAttention() as otherwise:
        on_device = measure()
    return on_device, measure() if otherwise.calls else on_device


def _as_long(side: Tensor, seen: int, tokens: int) -> Tensor:
    """Zeros like what was recorded for `seen` tokens, for another number of tokens."""
    place = side.shape.index(seen)
    return torch.zeros(*side.shape[:place], tokens, *side.shape[place + 1 :], dtype=side.dtype).requires_grad_()


@contextmanager
def _on_the_cpu(ported: PortedModel) -> Iterator[None]:
    """In the block, buffers are on the CPU and the random state is restored afterwards."""
    before = next(iter(ported.placeholders.values())).device
    ported.to_device(torch.device("cpu"))
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            on_the_cpu(),
            portable_attention(ported.skeleton),
        ):
            yield
    finally:
        ported.to_device(before)


SDPA_WITHOUT_SOFTCAP = "sdpa_uncapped"
"""sdpa as a stand-in for kernels that cap scores inside, which changes no shape. The library's refuses a cap."""


def _uncapped(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
    return sdpa_attention_forward(*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(SDPA_WITHOUT_SOFTCAP, _uncapped)
ALL_MASK_ATTENTION_FUNCTIONS.register(SDPA_WITHOUT_SOFTCAP, sdpa_mask)


@contextmanager
def portable_attention(skeleton: PreTrainedModel) -> Iterator[None]:
    """Use a kernel that exists on the CPU, where the tiny runs are; what they show does not depend on the kernel."""
    config = skeleton.config
    chosen = config._attn_implementation
    if chosen not in ("sdpa", "eager"):
        config._attn_implementation = "sdpa" if skeleton._supports_sdpa else SDPA_WITHOUT_SOFTCAP
    try:
        yield
    finally:
        if config._attn_implementation != chosen:
            config._attn_implementation = chosen


# Layers ---------------------------------------------------------------------------------------------------------------


def profile_layer(layer: nn.Module, run_of: RunOf, parts: Sequence[str], short: Lengths, most: int) -> LayerProfile:
    """parts: names of the token-wise parts. most: number of tokens that the model surely accepts."""
    numel = max((sum(p.numel() for p in layer.get_submodule(part).parameters()) for part in parts), default=0)
    run, runs, lengths = run_of(1), _runs(layer, run_of(1), parts), short
    further = _further(runs, 1, most)
    profile = LayerProfile(**_measured_fields(runs, short), chunk_numel=numel)
    off = _off(profile, further)
    for block in BLOCKS if off > ROUNDED else ():
        at = block - 1, 2 * block - 1, 4 * block - 1  # so that it pads
        for multiple in (1, block):
            other = replace(profile, **_measured_fields(runs, at, multiple), block=multiple)
            if (nearer := _off(other, further)) < off:
                off, lengths, profile = nearer, at, other
        if off <= ROUNDED:
            break
    pairs = growth_of([runs.forward(tokens).flops for tokens in short], short).per_pair
    with SkipLargeProducts():  # type: ignore[no-untyped-call]  # below the modes that watch ops
        width = run(short[0])[0].shape[-1]
        outputs = _outputs(run, width, short, lengths)
    profile = replace(profile, attention_flops=float(round(pairs)), window=window_of(layer), outputs=outputs)
    of_two = _runs(layer, run_of(ROWS), parts)
    if _off(profile, _further(of_two, ROWS, most)) > max(off, ROUNDED):
        several = replace(profile, **_measured_fields(of_two, lengths, profile.block, ROWS))
        if profile.outputs.chosen_nbytes:
            offloaded = _offloaded(run_of(ROWS), width, lengths, ROWS)
            several = replace(several, outputs=replace(profile.outputs, **offloaded))
        profile = replace(profile, others=(("several", several),))
    return profile


class _Runs(NamedTuple):
    """Recordings of a layer by number of tokens, each made once."""

    forward: Record
    backward: Record
    in_chunks: Record | None
    """Backward with token-wise parts, if any, in chunks of half of the tokens."""


def _runs(layer: nn.Module, run: Run, parts: Sequence[str]) -> _Runs:
    def chunked(tokens: int) -> Recording:
        with in_chunks(layer, parts, tokens // 2):
            return recorded_backward(run, tokens)

    forward, backward = cache(partial(recorded_forward, run)), cache(partial(recorded_backward, run))
    return _Runs(forward, backward, cache(chunked) if parts else None)


def _measured_fields(runs: _Runs, lengths: Lengths, block: int = 1, rows: int = 1) -> dict[str, Any]:
    """Fields of a `LayerProfile`. block, rows: see `measured`."""
    forward, _ = measured(runs.forward, lengths, block, rows)
    backward, graph = measured(runs.backward, lengths, block, rows)
    fitted: dict[str, Any] = {"forward": forward, "backward": backward, "graph": graph}
    if runs.in_chunks is not None:
        fitted["backward_in_chunks"], fitted["graph_in_chunks"] = measured(runs.in_chunks, lengths, block, rows)
    return fitted


LEVELS: tuple[Level, ...] = get_args(Level)

FurtherRun = tuple[int, int, tuple[int, int, int]]
"""Rows, their tokens, and the run's bytes: backward, forward, and kept in between."""


def _further(runs: _Runs, rows: int, most: int) -> FurtherRun | None:
    """A further run, if the layer accepts that many positions, or rows."""
    for tokens in (FURTHER // rows, min(FURTHER, most) // rows):
        with suppress(RuntimeError, IndexError, ValueError, NotAccepted):
            record = runs.backward(tokens)
            return rows, tokens, (record.peak, runs.forward(tokens).peak, sum(record.kept))
    return None


def _off(profile: LayerProfile, further: FurtherRun | None) -> float:
    """Relative error of a profile's predictions for a further run; underestimates weigh more."""
    if further is None:
        return 0.0
    rows, tokens, nbytes = further
    length = profile.padded(tokens)
    said = (peak.nbytes(False, rows * length, length) for peak in (profile.backward, profile.forward))
    over = [a / b - 1 for a, b in zip((*said, profile.kept(rows, tokens)), nbytes, strict=True) if b]
    return sum(error if error > 0 else -TOO_LITTLE * error for error in over)


def window_of(layer: nn.Module) -> int | None:
    """The layer's attention window in positions, if one of its modules declares it."""
    windows = [getattr(module, "sliding_window", None) for module in layer.modules()]
    return next((window for window in windows if isinstance(window, int) and window > 0), None)


# Outputs of single ops ------------------------------------------------------------------------------------------------


def _outputs(run: Run, width: int, short: Lengths, lengths: Lengths) -> Outputs:
    """Bytes of the outputs of single ops, and memory saved by storing them; empty if the layer cannot run this way.

    width: the hidden size. lengths: where peaks are measured.
    """
    length = short[1]
    try:
        by_level = {level: _keeping(run, width, length, level) for level in LEVELS}
        offloaded = _offloaded(run, width, lengths)
    except (RuntimeError, NotImplementedError):  # an op that dispatch modes cannot intercept
        return Outputs()
    nbytes = {level: sum(_storages(stored.tensors()).values()) / length for level, (stored, _) in by_level.items()}
    stored, flops = by_level["chosen"]
    spared = sum(flops[key] for key in stored.spared if key in flops)
    answered = spared + sum(flops[key] for key in stored.outputs if key in flops)
    total = max(1.0, sum(flops.values()))
    return Outputs(
        chosen_nbytes=nbytes["chosen"],
        shared_nbytes=_shared_nbytes(run, length, stored) / length,
        attention_nbytes=nbytes["attention"],
        chosen_share=answered / total,
        spared_share=spared / total,
        **offloaded,
    )


def _keeping(run: Run, width: int, length: int, level: Level) -> tuple[Stored, dict[Key, float]]:
    """The outputs stored during a run, and the FLOPs of each product."""
    keeping = Keeping(level, width)
    with SkipLargeProducts(), keeping.running():  # type: ignore[no-untyped-call]
        run(length)
    return keeping.stored(), keeping.flops


def _shared_nbytes(run: Run, length: int, stored: Stored) -> int:
    """Bytes of stored outputs that the graph made from them holds too."""
    stored_nbytes, held = _storages(stored.tensors()), set[int]()

    def pack(tensor: Tensor) -> Tensor:
        held.add(tensor.untyped_storage().data_ptr())
        return tensor

    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    answering = Answering(Stored(dict(stored.outputs), dict(stored.spared)))
    with torch.enable_grad(), hooks(pack, lambda tensor: tensor), answering:
        run(length)
    return sum(nbytes for place, nbytes in stored_nbytes.items() if place in held)


def _offloaded(run: Run, width: int, lengths: Lengths, rows: int = 1) -> dict[str, Any]:
    """Fields of `Outputs`: peaks of backward passes that get stored outputs from memory elsewhere."""

    def recorded(tokens: int, level: Level) -> Recording:
        stored, _ = _keeping(run, width, tokens, level)

        def answered(tokens: int) -> Any:
            with Answering(stored):
                return run(tokens)

        held = stored.tensors()  # otherwise the graph would free them
        record = recorded_backward(answered, tokens)
        del held
        return record

    return {f"{level}_offloaded": measured(partial(recorded, level=level), lengths, rows=rows)[0] for level in LEVELS}


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Address -> bytes of each storage."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
