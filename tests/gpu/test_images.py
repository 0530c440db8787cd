"""Images on a GPU: loss and gradients of the stock model, whether its encoder is streamed or in the prologue."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatrain import Engine, Numerics, Policy
from megatrain.train.parity import truth
from tests.stock.image_models import image_batch, image_model, text_batch
from tests.tiny import equal

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the library's own warnings
POLICIES = {
    "recompute": Policy(activations="recompute", shard_nbytes=4096),
    "offload": Policy(activations_by_layer=(("drop",), ("offload", "input")), shard_nbytes=4096, transfer="pageable"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["qwen3_vl", "llava"])
def test_loss_and_gradients_with_images_equal_the_stock_models(kind: str, policy: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, batches = image_model(kind), [image_batch(kind, 0), text_batch(1), image_batch(kind, 2)]
    row = {name: tensor for name, tensor in image_batch(kind, 0).items() if name != "labels"}
    loss, expected = truth(model, batches)
    numerics = Numerics("fp32", loss_chunk_tokens=5)
    make = partial(Engine.from_model, model, "cuda:0", numerics=numerics, policy=POLICIES[policy], verify=False)
    with make() as whole, make(image_row=row) as streamed:
        assert streamed.structure.encoders
        assert not whole.structure.encoders
        gradients = streamed.gradients(batches)
        assert equal(gradients, whole.gradients(batches))
        assert streamed.evaluate(batches) == pytest.approx(loss, rel=1e-5)
    largest = max(value.norm() for value in expected.values())
    for name, value in expected.items():  # biases of keys have gradients that are only rounding
        assert (gradients[name] - value).norm() < 1e-5 * max(value.norm(), 1e-3 * largest), name
