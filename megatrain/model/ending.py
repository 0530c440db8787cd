"""What the end of a model takes in memory, found by running it: its head over a chunk, a router's auxiliary loss.

Some heads divide, cap or scale their logits, in one dtype or another, and an auxiliary loss makes tables of all layers,
tokens and experts. So both run forward and backward on zeros at two short lengths, followed tensor by tensor as layers
are (`model.moments`). The loss itself is the engine's and is counted by rule (`schedule.workspace`): the gradient of
the logits, which exists here too, and its float32 block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatrain.model.moments import Recording, letting_go, moment_at, widest_of
from megatrain.model.ported import PortedModel, Sides
from megatrain.model.profile import LENGTHS
from megatrain.spec import LayerProfile, UnitSpec


def with_ending(ported: PortedModel, sides: Sequence[Sides], tokens: int) -> tuple[UnitSpec, ...]:
    """The units of a model, with profiles that know of the LOSS op.

    sides: what each layer has recorded of so many tokens, where the model has an auxiliary loss.
    """
    units, routed = ported.spec.units, ported.balance_coefficient is not None
    *body, end = units
    names = [param.name for unit in (*(units[:1] if ported.spec.tied else ()), end) for param in unit.params]
    leaves = {name: torch.zeros_like(ported.placeholders[name]).requires_grad_() for name in names}
    used = [leaves[name] for name in (*(param.name for param in end.params), *end.borrows)]
    profile = _of_head(ported, leaves, used)
    if routed:
        profile = _of_balance(ported, leaves, sides, tokens, profile)
        layers = zip(body[1:], sides, strict=True)
        body[1:] = [replace(unit, profile=_recording(unit.profile, of_layer, tokens)) for unit, of_layer in layers]
    return *body, replace(end, profile=profile)


def _of_head(ported: PortedModel, leaves: dict[str, Tensor], used: Sequence[Tensor]) -> LayerProfile:
    dtype, records, formed = next(iter(leaves.values())).dtype, [], 0
    for tokens in LENGTHS:
        records.append(record := Recording())
        with torch.enable_grad(), record, letting_go(used):
            given = torch.zeros(tokens, *ported.hidden_shape, dtype=dtype).requires_grad_()
            logits = ported.head(leaves, given)
            formed = len(record.moments)
            gradient = torch.zeros_like(logits)
            torch.autograd.grad([logits], [given, *used], [gradient], allow_unused=True)
    device, host = widest_of(records, LENGTHS)
    if not device:
        return LayerProfile()
    return LayerProfile(moments=device, host_moments=host, formed_moments=(moment_at(formed, records, LENGTHS),))


def _of_balance(
    ported: PortedModel, leaves: dict[str, Tensor], sides: Sequence[Sides], seen: int, profile: LayerProfile
) -> LayerProfile:
    records = []
    if any(seen not in side.shape for of_layer in sides for side in of_layer):
        return profile  # nothing says how it grows, and to be counted is no condition for being trained
    for tokens in LENGTHS:
        given = [tuple(_as_long(side, seen, tokens).requires_grad_() for side in of_layer) for of_layer in sides]
        inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
        records.append(record := Recording())
        with torch.enable_grad(), record:
            loss = (ported.balance_coefficient or 0.0) * ported.balance(leaves, inputs, given)
            each = [side for of_layer in given for side in of_layer]
            torch.autograd.grad(loss, each, allow_unused=True, materialize_grads=True)
    device, host = widest_of(records, LENGTHS)
    return replace(profile, balance_moments=device, host_balance_moments=host)


def _recording(profile: LayerProfile, sides: Sides, tokens: int) -> LayerProfile:
    return replace(profile, sides_nbytes=sum(side.numel() * side.element_size() for side in sides) / tokens)


def _as_long(side: Tensor, seen: int, tokens: int) -> Tensor:
    """Zeros like what was recorded of `seen` tokens, of other ones."""
    place = side.shape.index(seen)
    return torch.zeros(*side.shape[:place], tokens, *side.shape[place + 1 :], dtype=side.dtype)
