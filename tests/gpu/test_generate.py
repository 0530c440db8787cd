"""On a real GPU: the tokens of the stock model, with the cache on the device and across its streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain import Engine
from tests.tiny import FAMILIES, batch, tiny_model

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize(
    "way", [{"do_sample": False}, {"num_beams": 3}, {"do_sample": True}, {"cache_implementation": "static"}], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_equal_the_stock_models(family: str, way: dict[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = batch(2, 7, 1)["input_ids"]
    model = tiny_model(family, output_router_logits=False).eval()
    with Engine.from_model(model, "cuda:0", "fp32") as engine:
        found = engine.generate(ids, seed=3, **OPTIONS, **way)
    torch.manual_seed(3)
    expected = model.to("cuda:0").generate(ids.to("cuda:0"), **OPTIONS, **way, disable_compile=True)
    assert torch.equal(found, expected)
