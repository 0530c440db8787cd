"""A model on paper, for tests of schedules: no torch, a few hundred parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

from megatrain.spec import ModelSpec, ParamSpec, SideValue, UnitSpec
from megatrain.spec.layer_profile import Growth


@cache
def small_spec(layers: int = 3, tied: bool = False) -> ModelSpec:
    table = ParamSpec("embed", (64, 8))
    middle = tuple(
        UnitSpec(f"layers.{i}", "layer", tuple(ParamSpec(f"layers.{i}.{k}", (16, 8)) for k in "abc"))
        for i in range(layers)
    )
    head = () if tied else (ParamSpec("head", (64, 8)),)
    end = UnitSpec("epilogue", "epilogue", (ParamSpec("norm", (8,)), *head), ("embed",) if tied else ())
    return ModelSpec("small", (UnitSpec("prologue", "prologue", (table,)), *middle, end), hidden_size=8, vocab_size=64)


def large_spec(layers: int) -> ModelSpec:
    """Layers of three matrices with 400 MB of bfloat16 weights, and ends of half as many."""
    model = small_spec(layers)
    units = [
        replace(u, params=tuple(ParamSpec(p.name, (1 << 14, 1 << 12)) for p in u.params if len(p.shape) > 1))
        for u in model.units
    ]
    return replace(model, units=tuple(units), hidden_size=1 << 12, vocab_size=1 << 14)


def with_encoder(
    spec: ModelSpec, layers: int = 2, trained: tuple[bool, ...] = (True, True, True), *, taps: bool = False
) -> ModelSpec:
    """The model with an encoder of images. trained: whether its first unit, its layers and the prologue are. taps:
    whether the prologue reads the input of its second layer, too."""
    params = tuple(ParamSpec(f"encoder.{k}", (16, 8), trainable=trained[0]) for k in "ab")
    units = [UnitSpec("encoder", "layer", params)]
    for i in range(layers):
        params = tuple(ParamSpec(f"encoder.{i}.{k}", (16, 12), trainable=trained[1]) for k in "abc")
        units.append(UnitSpec(f"encoder.{i}", "layer", params))
    table = tuple(replace(param, trainable=trained[2]) for param in spec.units[0].params)
    units = [replace(spec.units[0], params=table), *spec.units[1:], *units]
    return replace(spec, units=tuple(units), encoders=1 + layers, encoded_per_value=0.25, taps=(2,) if taps else ())


def with_sides(spec: ModelSpec, *sides: SideValue) -> ModelSpec:
    """The model with side values, of as many bytes as a hidden state in bfloat16 unless they say it."""
    measured = (side if side.size.per_token else replace(side, size=Growth(per_token=16.0)) for side in sides)
    return replace(spec, sides=tuple(measured))


def some_sides(spec: ModelSpec, draw: Random) -> ModelSpec:
    """The model with a few side values of any kind."""
    sides = []
    for source in sorted(draw.choices(range(spec.epilogue - 1), k=draw.randint(1, 4))):
        is_hidden = draw.random() < 0.5 and not any(side.source == source and side.is_hidden for side in sides)
        behind = range(source + (2 if is_hidden else 1), spec.epilogue + 1)
        users = tuple(sorted(draw.sample(behind, draw.randint(1, len(behind)))))
        size = Growth(per_token=16.0 if is_hidden else draw.choice([2.0, 8.0, 40.0]))
        sides.append(SideValue(source, users, draw.random() < 0.7 or is_hidden, size, is_hidden=is_hidden))
    return replace(spec, sides=tuple(sides))
