"""Validates the micro-batches of an engine call before anything is computed, and stages them for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatrain.device import Device
from megatrain.dist import World
from megatrain.engine import LossFn, MicroBatch, check_micro_batches
from megatrain.engine.batch import TEXT_ENTRIES, as_list, check_arguments, model_entries, stage
from megatrain.engine.chunked_loss import check_loss, own_entries
from megatrain.errors import BatchError, ModelError
from megatrain.model import PortedModel
from megatrain.model.image_rows import values_of
from megatrain.spec import Work


def checked_micro_batches(
    ported: PortedModel,
    device: Device,
    world: World,
    micro_batches: Iterable[MicroBatch],
    loss_fn: LossFn | None,
    router_weights: Sequence[float] | None,
    *,
    trains: bool,
) -> tuple[list[MicroBatch], Work]:
    """The micro-batches as a list, staged for the device, and their work.

    Raises `BatchError`, `LossError`, and `ModelError` if they are to train but every parameter is frozen. With
    several ranks, an error in one rank's micro-batches is raised on all.
    """
    if trains and not ported.structure.trained_numel:
        where = f"model {ported.structure.name}"
        raise ModelError("every parameter is frozen", where=where, fix="freeze fewer of them")
    found: list[tuple[list[MicroBatch], Work]] = []

    def check() -> bool:
        check_loss(loss_fn)
        batches = stage(device, as_list(micro_batches), own_entries(loss_fn))
        work = check_micro_batches(ported.structure, batches, alone=world.size == 1)
        if router_weights is not None and len(router_weights) != len(batches):
            what = f"{len(router_weights)} router_weights for {len(batches)} micro-batches"
            raise BatchError(what, where="step", fix="give one for each micro-batch")
        own = own_entries(loss_fn)
        for index, batch in enumerate(batches):
            check_arguments(ported.arguments, batch, own, f"micro-batch {index}")
        given = [model_entries(batch, own) for batch in batches]
        values = [values_of(each, TEXT_ENTRIES) / each["input_ids"].numel() for each in given]
        found.append((batches, replace(work, values_per_token=max(values))))
        return any(not each.keys() <= TEXT_ENTRIES for each in given)

    beyond_text = world.agree("micro-batches of a step" if trains else "micro-batches to measure", check)
    ((batches, work),) = found
    return batches, replace(work, beyond_text=any(beyond_text))
