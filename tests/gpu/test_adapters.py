"""Adapters on a GPU: the gradients of plain PyTorch, and dropout drawn again as it was."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatrain import Engine, Policy
from megatrain.spec import Placement
from tests.adapted import adapted, config_of, true_gradients
from tests.tiny import equal, relative_error, tiny_model, unequal_batches

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


def test_a_base_that_is_read_from_its_files_gives_the_bits_of_one_in_memory(tmp_path: Path) -> None:
    tiny_model("qwen3-moe").to(torch.bfloat16).save_pretrained(tmp_path)
    found = []
    for placements in ((), (Placement(weights="file"),) * 5):
        policy = Policy(shard_nbytes=4096, placements=placements)
        how = {"adapter": config_of("lora"), "device": "cuda:0", "policy": policy, "verify": False}
        with Engine.from_pretrained(tmp_path, **how) as engine:  # type: ignore[arg-type]
            losses = torch.tensor([engine.step(unequal_batches()).loss for _ in range(2)])
            found.append({**engine.gradients(unequal_batches()), **engine.master_weights(), "losses": losses})
            assert len(placements) in (0, len(engine.structure.units))
    assert equal(*found)
