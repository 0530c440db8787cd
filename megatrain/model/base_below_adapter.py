"""The base below an adapter, asked alone: the modules of `peft` step aside, and the base's own weights compute.

Left out: bringing back weights of the base that a run with the adapter does not have where they are read. Making some
adapters changes the base, some train biases of it, and a norm or head that trains as a whole stands in the place of the
base's, which nothing else reads, so that the head's unit does not hold it. All are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from megatrain.errors import ModelError
from megatrain.model.adapter_methods import changes_base
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
    config = ported.adapter.config
    if changes_base(config):
        what = f"init_lora_weights={config.init_lora_weights!r} has changed the base, which cannot be asked as it was"
        raise ModelError(what, where="adapter", fix=ASK_THE_BASE)
    with ExitStack() as off:
        for root in roots_of(ported):
            off.enter_context(switched_off(root))
        if lost := [*_trained(ported), *_not_held(ported)]:
            what = f"the base's {listed(lost)} cannot be asked as it was: it, or another in its place, trains"
            raise ModelError(what, where="adapter", fix=ASK_THE_BASE)
        yield


def _trained(ported: PortedModel) -> list[str]:
    """The parameters of the base that train beside the adapter's."""
    assert ported.adapter is not None
    trained = (param.name for unit in ported.structure.units for param in unit.params if param.trainable)
    return [name for name in trained if ported.adapter.name not in name.split(".")]


def _not_held(ported: PortedModel) -> list[str]:
    """The parameters that the modules after the last layer would now read, and that their unit does not hold."""
    epilogue = ported.structure.units[ported.structure.epilogue]
    held = {*epilogue.borrows, *(param.name for param in epilogue.params)}
    leaves = {name: zero.detach().requires_grad_() for name, zero in ported.placeholders.items()}
    some = next(iter(leaves.values()))
    hidden = torch.zeros(1, *head_shape(ported), dtype=some.dtype, device=some.device)
    with torch.enable_grad(), SkipLargeProducts():  # type: ignore[no-untyped-call]
        reached = reachable_leaves(ported.head(leaves, hidden))
    return [name for name, leaf in leaves.items() if id(leaf) in reached and name not in held]
