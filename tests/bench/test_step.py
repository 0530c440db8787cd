"""The comparison with plain PyTorch at a tiny size: all contenders train the same model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import step


def losses(name: str, clip: float | None) -> list[float]:
    torch.manual_seed(0)
    ids = torch.randint(0, step.TINY["vocab_size"], (2, 16))
    model: Any = LlamaForCausalLM(LlamaConfig(**step.TINY)).float().train()
    contend = step._plain if name in step.BASELINES else step._ours
    one_step, activations = contend(name, model, ids, "fp32", clip)
    told = [one_step() for _ in range(3)]
    assert activations()
    return told


def test_all_contenders_train_the_same_model() -> None:
    plain = losses(step.PLAIN, 1.0)
    assert plain[0] > plain[1] > plain[2]
    for name in (step.CHECKPOINTING, "keep", "recompute", "recompute, fused"):
        assert losses(name, 1.0) == pytest.approx(plain, rel=1e-5), name
    assert losses("keep", None) == pytest.approx(losses(step.PLAIN, None), rel=1e-5)


@pytest.mark.slow
def test_the_result_is_json_with_a_row_for_each_contender() -> None:
    contenders = (step.PLAIN, step.CHECKPOINTING, step.COMPILED, step.PRODUCTS)
    result = json.loads(json.dumps(step.compare(step.TINY, 2, 16, pairs=1, warm_up=1, contenders=contenders)))
    assert list(result["contenders"]) == list(contenders)
    table = step.show(result)
    assert all(name in table for name in contenders)


@pytest.mark.slow
def test_a_contender_that_ends_is_named() -> None:
    with pytest.raises(RuntimeError, match="plain has ended"):
        step.compare({**step.TINY, "num_attention_heads": 3}, 2, 16, pairs=1, contenders=(step.PLAIN,))
