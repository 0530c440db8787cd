"""Images on a GPU: loss and gradients of the stock model, whether its encoder is streamed or in the prologue."""

from __future__ import annotations

import pytest
import torch

from megatrain import Policy
from megatrain.train.parity import truth
from tests.stock.image_models import image_model
from tests.stock.test_images import errors, made, mixed
from tests.stock.test_streamed_encoders import row_of
from tests.tiny import equal

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the library's own warnings
POLICIES = {
    "recompute": Policy(activations="recompute", shard_nbytes=4096),
    "offload": Policy(activations_by_layer=(("drop",), ("offload", "input")), shard_nbytes=4096, transfer="staged"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["qwen3_vl", "llava"])
def test_loss_and_gradients_with_images_equal_the_stock_models(kind: str, policy: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, batches = image_model(kind), mixed(kind)
    loss, expected = truth(model, batches)
    with (
        made(model, "cuda:0", POLICIES[policy]) as whole,
        made(model, "cuda:0", POLICIES[policy], image_row=row_of(kind)) as streamed,
    ):
        assert streamed.structure.encoders
        assert not whole.structure.encoders
        gradients = streamed.gradients(batches)
        assert equal(gradients, whole.gradients(batches))
        assert streamed.evaluate(batches) == pytest.approx(loss, rel=1e-5)
    assert max(errors(gradients, expected).values()) < 1e-5
