"""How many Python and C functions a step calls: what it takes if it has few tokens."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from megatrain import Engine, Policy
from tests.tiny import batch, tiny_model

FEW, MANY = 2, 6


@contextmanager
def counted_calls() -> Iterator[Callable[[Callable[[], object]], int]]:
    """A function that counts the calls of a third step, on this thread and on those that start in the block."""
    found: list[str] = []

    def count(frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            found.append(event)

    def of_third(step: Callable[[], object]) -> int:
        step()
        step()
        found.clear()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(before)
        return len(found)

    before = threading.getprofile()
    threading.setprofile(count)
    try:
        yield of_third
    finally:
        threading.setprofile(before)  # type: ignore[arg-type]


def stock_calls(layers: int) -> int:
    model, work = tiny_model(num_hidden_layers=layers).to(torch.bfloat16), batch(2, 8, 0)

    def step() -> None:
        model.zero_grad()
        model(**work, use_cache=False).loss.backward()

    with counted_calls() as calls_of:
        return calls_of(step)


def engine_calls(layers: int, policy: Policy) -> int:
    model, work = tiny_model(num_hidden_layers=layers), [batch(2, 8, 0)]
    with counted_calls() as calls_of, Engine.from_model(model, "cpu", policy=policy, verify=False) as engine:
        return calls_of(lambda: engine.step(work))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_the_engine_adds_few_calls_per_layer(activations: str) -> None:
    """Its copies, norms and updates are counted, which a stock model without an optimizer does not have."""
    policy = Policy(activations=activations)  # type: ignore[arg-type]
    ours = (engine_calls(MANY, policy) - engine_calls(FEW, policy)) / (MANY - FEW)
    stock = (stock_calls(MANY) - stock_calls(FEW)) / (MANY - FEW)
    assert ours - stock < 1800, (ours, stock)
