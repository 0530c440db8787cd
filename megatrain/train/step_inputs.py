"""Validates the micro-batches of an engine call before anything is computed, and stages them for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatrain.device import Device
from megatrain.dist import World
from megatrain.engine import LossFn, MicroBatch, StepInput, check_micro_batches
from megatrain.engine.batch import TEXT_ENTRIES, as_list, check_arguments, model_entries, stage
from megatrain.engine.chunked_loss import check_loss, own_entries
from megatrain.errors import BatchError, ModelError
from megatrain.model import PortedModel
from megatrain.model.image_rows import plain_row, row_from, see, values_of


def checked_input(
    ported: PortedModel,
    device: Device,
    world: World,
    micro_batches: Iterable[MicroBatch],
    loss_fn: LossFn | None,
    router_weights: Sequence[float] | None = None,
    *,
    trains: bool = False,
) -> StepInput:
    """What a step is asked, with its micro-batches staged for the device.

    Raises `BatchError`, `LossError`, and `ModelError` if they are to train but every parameter is frozen. With
    several ranks, an error in one rank's micro-batches is raised on all.
    """
    if trains and ported.structure.lowest_trained == len(ported.structure.units):
        where = f"model {ported.structure.name}"
        raise ModelError("every parameter is frozen", where=where, fix="freeze fewer of them")
    asked = StepInput()
    image_row: dict[str, Any] = {}

    def check() -> tuple[bool, float]:
        nonlocal asked, image_row
        check_loss(loss_fn)
        only_loss = own_entries(loss_fn)
        given = as_list(micro_batches)
        batches = stage(device, given, only_loss)
        work = check_micro_batches(ported.structure, batches, alone=world.size == 1)
        if router_weights is not None and len(router_weights) != len(batches):
            what = f"{len(router_weights)} router_weights for {len(batches)} micro-batches"
            raise BatchError(what, where="step", fix="give one for each micro-batch")
        for index, batch in enumerate(batches):
            check_arguments(ported.arguments, batch, only_loss, f"micro-batch {index}")
        entries = [model_entries(batch, only_loss) for batch in batches]
        values = [values_of(of_batch, TEXT_ENTRIES) / of_batch["input_ids"].numel() for of_batch in entries]
        asked = StepInput(batches, work, loss_fn, router_weights)
        if trains and max(values) and ported.image_row is None:
            of_model = model_entries(given[values.index(max(values))], (*only_loss, "labels"))
            image_row = plain_row(of_model)
        return any(not of_batch.keys() <= TEXT_ENTRIES for of_batch in entries), max(values)

    told = world.agree("micro-batches of a step" if trains else "micro-batches to measure", check)
    most = max(values for _, values in told)
    if trains and most and ported.image_row is None:  # what they take was not planned
        rows = world.exchange("a row with images", image_row)
        row = row_from(next(each for each in rows if each))
        see(ported, row, values_of(row, TEXT_ENTRIES))
    work = replace(asked.work, beyond_text=any(beyond for beyond, _ in told), values_per_token=most)
    return replace(asked, work=work)
