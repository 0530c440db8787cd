"""A model on paper, for tests of schedules: no torch, a few hundred parameters."""

from __future__ import annotations

from megatrain.spec import ModelSpec, ParamSpec, UnitSpec


def small_spec(layers: int = 3, tied: bool = False) -> ModelSpec:
    table = ParamSpec("embed", (64, 8))
    middle = tuple(
        UnitSpec(f"layers.{i}", "layer", tuple(ParamSpec(f"layers.{i}.{k}", (16, 8)) for k in "abc"))
        for i in range(layers)
    )
    head = () if tied else (ParamSpec("head", (64, 8)),)
    end = UnitSpec("epilogue", "epilogue", (ParamSpec("norm", (8,)), *head), ("embed",) if tied else ())
    return ModelSpec("small", (UnitSpec("prologue", "prologue", (table,)), *middle, end), hidden_size=8, vocab_size=64)
