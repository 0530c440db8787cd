"""The base below an adapter, asked alone: the modules of `peft` step aside, and the base's own weights compute.

Refused are adapters whose base is not in memory as it was before training. Some change the base when they are made,
some train its biases, and some replace a norm, a head or a tied embedding by a trained copy, so that the unit no longer
holds the base's weight. Nothing here loads such weights again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.model.adapter_methods import why_base_is_changed
from megatrain.model.adapters import switched_off
from megatrain.model.peak import SkipLargeProducts
from megatrain.model.ports import PortedModel, head_shape, roots_of
from megatrain.model.weight_reads import reachable_leaves
from megatrain.model.weight_sources import listed

ASK_THE_BASE = "load the base without the adapter and ask that; a run takes train.dpo_reference=start"


@contextmanager
def without_adapter(ported: PortedModel) -> Iterator[None]:
    """In the block, only the base computes. Raises `ModelError` if there is no adapter, or no base as it was."""
    if ported.adapter is None:
        raise ModelError("has no adapter", where=ported.structure.name, fix="ask the model itself")
    if why := why_base_is_changed(ported.adapter.config):
        what = f"{why} has changed the base, which cannot be asked as it was"
        raise ModelError(what, where="adapter", fix=ASK_THE_BASE)
    with ExitStack() as off:
        for root in roots_of(ported):
            off.enter_context(switched_off(root))
        if lost := [*_trained_of_base(ported), *_missing_from_units(ported)]:
            what = f"the base's {listed(lost)} cannot be asked as it was: it, or another in its place, is trained"
            raise ModelError(what, where="adapter", fix=ASK_THE_BASE)
        yield


def _trained_of_base(ported: PortedModel) -> list[str]:
    """The base's parameters that train with the adapter, and biases that it has trained, even if now frozen."""
    assert ported.adapter is not None
    name, biases = ported.adapter.name, getattr(ported.adapter.config, "bias", "none")
    ending = {"none": (), "all": (".bias",)}.get(biases, (".base_layer.bias",))
    of_base = (param for unit in ported.structure.units for param in unit.params if name not in param.name.split("."))
    return [param.name for param in of_base if param.trainable or param.name.endswith(ending)]


def _missing_from_units(ported: PortedModel) -> list[str]:
    """The parameters that the prologue or the epilogue reads without the adapter, but that its unit does not hold."""
    leaves = {name: zero.detach().requires_grad_() for name, zero in ported.placeholders.items()}
    some = next(iter(leaves.values()))
    hidden = torch.zeros(1, *head_shape(ported), dtype=some.dtype, device=some.device)
    ids = torch.zeros(1, 2, dtype=torch.long, device=some.device)
    with torch.enable_grad(), ported.evaluation_mode(), SkipLargeProducts():  # type: ignore[no-untyped-call]
        begun, calls = ported.prologue(leaves, {"input_ids": ids})
        ended = ported.head(leaves, hidden)
    between = (each for call in calls for each in call.constants if isinstance(each, Tensor) and each.requires_grad)
    units = ported.structure.units
    read = {
        0: set[int]().union(*map(reachable_leaves, (begun, *between))),
        ported.structure.epilogue: reachable_leaves(ended),
    }
    lost = dict[str, None]()
    for unit, reached in read.items():
        held = {*units[unit].borrows, *(param.name for param in units[unit].params)}
        lost |= {name: None for name, leaf in leaves.items() if id(leaf) in reached and name not in held}
    return [*lost]
