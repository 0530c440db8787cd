"""The call stack from `Engine.step` to autograd in a layer's backward pass is short."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain import AdamW, Engine
from tests.tiny import tiny_model, unequal_batches

PACKAGE = Path(megatrain.__file__).parent
MAX_CALLS = 10


def package_calls() -> list[str]:
    """Names of the package's functions on the call stack, outermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        code = frame.f_code
        if Path(code.co_filename).is_relative_to(PACKAGE):
            found.append(code.co_qualname)
        frame = frame.f_back
    return found[::-1]


def test_a_layers_backward_is_at_most_ten_calls_from_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = []
    stock = torch.autograd.backward

    def recorded(*args: Any, **kwargs: Any) -> None:
        stacks.append(package_calls())
        stock(*args, **kwargs)

    engine = Engine.from_model(tiny_model(), "cpu", optimizer=AdamW(1e-3))
    monkeypatch.setattr(torch.autograd, "backward", recorded)
    engine.step(unequal_batches())
    of_layers = [stack[stack.index("Engine.step") :] for stack in stacks if "Streamer._backward" in stack]
    assert of_layers
    for stack in of_layers:
        assert len(stack) <= MAX_CALLS, " -> ".join(stack)
        functions = [name.rpartition(".")[2] for name in stack]
        assert len(set(functions)) == len(functions), f"two have the same name: {functions}"
