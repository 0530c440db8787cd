"""Adapters on a GPU: the gradients of plain PyTorch, and dropout drawn again as it was."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from megatrain import Engine, Policy
from tests.adapted import adapted, true_gradients
from tests.tiny import equal, relative_error, unequal_batches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("peft") is None, reason="no peft here")]


@pytest.mark.parametrize(("family", "method"), [("llama", "dora"), ("qwen3-moe", "lora"), ("llama-tied", "whole ends")])
def test_loss_and_gradients_equal_pefts_in_fp32(family: str, method: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = adapted(family, method)
    loss, expected = true_gradients(model)
    with Engine.from_model(model, "cuda:0", "fp32") as engine:
        found = engine.gradients(unequal_batches())
        assert engine.evaluate(unequal_batches()) == pytest.approx(loss, rel=1e-5)
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.parametrize(("method", "drops"), [("lora", "lora_dropout"), ("loha", "module_dropout")])
def test_dropout_is_drawn_again_as_it_was(method: str, drops: str) -> None:
    model, found = adapted("llama", method, **{drops: 0.5}), []
    for activations in ("keep", "recompute"):
        policy = Policy(activations=activations, shard_nbytes=4096)  # type: ignore[arg-type]
        with Engine.from_model(model, "cuda:0", policy=policy, verify=False) as engine:
            found.append(engine.gradients(unequal_batches()))
    assert equal(*found)
