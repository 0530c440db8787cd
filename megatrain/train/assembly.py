"""An engine put together: a source of structure and weights, and the options that every way to make one takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatrain.device import Device, open_device
from megatrain.engine import DTYPES
from megatrain.errors import PlanError
from megatrain.model import PortedModel, Progress, Source, port_model
from megatrain.optim import AdamW, warm_up
from megatrain.spec import Policy
from megatrain.train.options import EngineOptions, disk_of, policy_of
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
    """See `Engine.from_source`. unverified: makes an engine to check with, which cannot be checked itself."""
    if unknown := options.keys() - EngineOptions.__annotations__.keys():
        raise TypeError(f"an engine takes no option {sorted(unknown)[0]!r}")
    precision = options.get("precision", "bf16")
    if precision not in DTYPES:
        raise PlanError(f"precision must be bf16 or fp32, not {precision!r}", where="precision")
    checked = short_check(source.model, unverified) if options.get("verify", True) else NOT_ASKED
    device = options.get("device", "cpu")
    opened = open_device(device) if isinstance(device, str) else device
    try:
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
