"""What the compute ops of a step hold, tensor by tensor, beside what the schedule says, for whatever architectures.

Each kind is a model type of the installed library, shrunk to a twin of a few thousand parameters. Two micro-batches of
two rows of 96 tokens go forward and backward on the simulated device, inputs kept, losses in chunks of 64 tokens; every
tensor is followed from its making to its end. A share is the most bytes that existed during an op over those that the
schedule counts then; above 1, it counts too few. Memory of a cpu or a GPU is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig

from megatrain import Engine, Policy
from megatrain.engine import streamer
from megatrain.model.peak import Living
from megatrain.model.tiny import ordinary_tokens, shrink, twin_from, with_dropout
from megatrain.schedule import Op
from megatrain.schedule.ops import Kind
from megatrain.spec import Keep, Numerics
from megatrain.testing import SimDevice
from megatrain.train.parity import micro_batch, packed

LENGTH, CHUNK, PADDING = 96, 64, 5
KINDS: tuple[Kind, ...] = ("FORWARD", "LOSS", "BACKWARD")

Row = tuple[Op, int, int]
"""A compute op, the most bytes that existed while it ran, and those that the schedule has there."""


@contextmanager
def followed() -> Iterator[list[Row]]:
    """In its block, the compute ops of engines on the simulated device, one after the other."""
    living, rows, honest = Living(), list[Row](), dict(streamer.ACTIONS)

    def following(act: Callable[..., None]) -> Callable[..., None]:
        def run(context: Any, step: Any, op: Op, lease: Any) -> None:
            living.peak = 0
            with living:
                act(context, step, op, lease)
            schedule = step.schedule
            at = next(index for index, each in enumerate(schedule.ops) if each is op)
            there = (name for name, (first, last) in schedule.lifetimes.items() if first <= at <= last)
            device = (schedule.buffers[name] for name in there)
            rows.append((op, living.peak, sum(each.nbytes for each in device if each.tier == "device")))

        return run

    streamer.ACTIONS.update({kind: following(honest[kind]) for kind in KINDS})
    try:
        yield rows
    finally:
        streamer.ACTIONS.update(honest)


def shares(kind: str, precision: str, rows: str, keep: Keep = "input") -> dict[str, float]:
    """Kind of op, with the kind of unit -> the worst share of what is said; and of the peak."""
    model = twin_from(with_dropout(shrink(AutoConfig.for_model(kind)), 0.0), 0)
    tokens = ordinary_tokens(model.config)
    make: dict[str, Callable[[int], dict[str, Any]]] = {
        "uniform": lambda seed: micro_batch(tokens, 2, LENGTH, seed),
        "padded": lambda seed: micro_batch(tokens, 2, LENGTH, seed, right=PADDING),
        "packed": lambda seed: packed(tokens, (LENGTH // 2, LENGTH // 4, LENGTH // 4), seed),
    }
    numerics, policy = Numerics(precision, loss_chunk_tokens=CHUNK), Policy(activations_by_layer=((keep,),))  # type: ignore[arg-type]
    with (
        followed() as ops,
        Engine.from_model(model, SimDevice(1), numerics=numerics, policy=policy, verify=False) as engine,
    ):
        units = engine.parts.ported.spec.units  # with which schedules know what they hold
        engine.gradients([make[rows](seed) for seed in (0, 1)])
    found: dict[str, float] = {}
    for op, held, said in ops:
        name = f"{op.kind} {units[op.unit].kind}"
        found[name] = max(found.get(name, 0.0), held / said)
    return found | {"peak": max(held for _, held, _ in ops) / max(said for _, _, said in ops)}
