"""The generation benchmark at a tiny size: it runs, and its numbers agree with each other."""

from __future__ import annotations

import json

import pytest

from bench import generate

pytestmark = pytest.mark.slow  # a benchmark at a tiny size

SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 96,
}


def test_the_benchmark_runs_and_its_numbers_agree() -> None:
    result = generate.compare(SHAPE, prompt=6, new=3, turns=1)
    speeds = result["tokens_per_second"]
    assert speeds.keys() == {"cached", "uncached", "stock"}
    assert result["cached_to_stock"] == pytest.approx(speeds["cached"] / speeds["stock"])
    assert json.dumps(result)
    assert f"{speeds['uncached']:.1f} tokens/s" in generate.show(result)
