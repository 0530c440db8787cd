"""An engine put together: a source of structure and weights, and the options that every way to make one takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatrain.config import refuse_several_processes
from megatrain.device import Device, open_device
from megatrain.engine import DTYPES
from megatrain.model import PortedModel, Progress, Source, port_model
from megatrain.optim import AdamW, warm_up
from megatrain.spec import Policy
from megatrain.train.options import EngineOptions, checked_options, disk_of, policy_of
from megatrain.train.vetted import NOT_ASKED, short_check

if TYPE_CHECKING:
    from torch import nn

    from megatrain.train.engine import Engine

    Unverified = Callable[[nn.Module, str, Policy], Engine]


def assemble(
    kind: type[Engine],
    unverified: Unverified,
    source: Source,
    ported: PortedModel | None,
    progress: Progress | None,
    options: EngineOptions,
) -> Engine:
    """See `Engine.from_source`. unverified: makes an engine to check with, which cannot be checked itself.

    One that trains is refused where a launcher has started several processes; each may have one that does not.
    """
    options = checked_options(options)
    if any(parameter.requires_grad for parameter in source.model.parameters()):
        refuse_several_processes("engine")
    device = options.get("device", "cpu")
    opened = device if isinstance(device, Device) else open_device(device)
    try:
        checked = short_check(source.model, unverified) if options.get("verify", True) else NOT_ASKED
        engine = _allocated(kind, source, ported, opened, options)
        engine.checked = checked
    except BaseException:
        if opened is not device:
            opened.close()
        raise
    try:
        engine.fill(source, progress)
        warm_up()
    except BaseException:
        engine.close()
        raise
    return engine


def _allocated(
    kind: type[Engine], source: Source, ported: PortedModel | None, opened: Device, options: EngineOptions
) -> Engine:
    """The engine, its memory allocated and nothing in it yet."""
    taken = ported or port_model(source.model, DTYPES[options.get("precision", "bf16")])
    policy = policy_of(options, opened, taken.spec)
    return kind(
        taken,
        opened,
        policy,
        options.get("optimizer") or AdamW(),
        options.get("max_grad_norm", 1.0),
        disk_of(options, policy),
        fits_activations=options.get("policy", "auto") == "auto",
        owns_device=opened is not options.get("device", "cpu"),
        seed=options.get("seed", 0),
    )
