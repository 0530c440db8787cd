"""Adapters on a GPU: the gradients of plain PyTorch, and dropout drawn again as it was."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
def test_dropout_is_replayed_in_recomputation(method: str, drops: str) -> None:
    model, found = adapted("llama", method, **{drops: 0.5}), []
    for activations in ("keep", "recompute"):
        policy = Policy(activations=activations, shard_nbytes=4096)  # type: ignore[arg-type]
        with Engine.from_model(model, "cuda:0", policy=policy, verify=False) as engine:
            found.append(engine.gradients(unequal_batches()))
    assert equal(*found)


IN_FILES = Placement(weights="file")
OTHERS: dict[str, dict[str, Any]] = {
    "all": {},
    "pageable": {"transfer": "pageable", "weight_slots": 3, "activations": "keep"},
    "at once": {"update": "during_backward"},
    "read ahead": {"shard_nbytes": 1 << 20, "read_ahead_nbytes": 1 << 20},
    "beside": {"placements": (IN_FILES, Placement("device"), IN_FILES, Placement("disk", "disk"), IN_FILES)},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A base in files, and what a run gives that holds it."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("qwen3-moe").to(torch.bfloat16).save_pretrained(folder)
    return folder, _trained_over(folder, Policy(shard_nbytes=4096))


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_backed_base_gives_the_same_bits_as_in_memory(
    base: tuple[Path, dict[str, torch.Tensor]], other: str, tmp_path: Path
) -> None:
    policy = Policy(**{"shard_nbytes": 4096, "placements": (IN_FILES,) * 5} | OTHERS[other])
    assert equal(_trained_over(base[0], policy, disk=[tmp_path]), base[1])


def _trained_over(folder: Path, policy: Policy, **how: Any) -> dict[str, torch.Tensor]:
    how |= {"adapter": config_of("lora"), "device": "cuda:0", "policy": policy, "verify": False, "max_grad_norm": None}
    with Engine.from_pretrained(folder, **how) as engine:
        losses = torch.tensor([engine.step(unequal_batches()).loss for _ in range(2)])
        found = {**engine.gradients(unequal_batches()), **engine.master_weights(), "losses": losses}
        assert engine.parts.pool.files is not None
        assert (engine.parts.pool.files.read_nbytes > 0) == any(each.weights == "file" for each in policy.placements)
    return found
