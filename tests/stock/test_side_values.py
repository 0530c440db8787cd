"""Models whose layers pass more than the hidden state equal the stock model in loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedModel

from megatrain import Engine, Policy
from megatrain.model.tiny import shrink, twin_from, with_dropout
from megatrain.spec import Numerics
from megatrain.train.parity import compare, full_settings, short_cases, short_settings

PASSING = {
    "glm_moe_dsa": {False},
    "hy_v4": {False},
    "zaya": {True},
    "gemma4_text": {True},
}
"""Model type -> whether its side values need a gradient: sparse indices, router states, inputs of each layer."""

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def make(model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
    return Engine.from_model(model, device, numerics=numerics, policy=policy, verify=False)


def twin(kind: str, **fields: Any) -> PreTrainedModel:
    return twin_from(with_dropout(shrink(AutoConfig.for_model(kind, **fields)), 0.0), 0)


@pytest.mark.parametrize(
    "kind", ["zaya", "gemma4_text", *(pytest.param(k, marks=pytest.mark.slow) for k in ("glm_moe_dsa", "hy_v4"))]
)
def test_loss_and_gradients_equal_the_stock_model(kind: str) -> None:
    model = twin(kind)
    with make(model, "cpu", Numerics("fp32"), Policy(shares_memory=True)) as engine:
        sides = engine._streamer.spec.sides
    assert {side.differentiable for side in sides} == PASSING[kind]
    report = compare(model, make, short_cases(model), [*short_settings(), full_settings()[-1]], 1e-6, enough=1)
    assert report.ok, report.worst


def test_keys_and_values_of_earlier_layers_get_the_gradients_of_all_that_use_them() -> None:
    model = twin("gemma4_text", num_kv_shared_layers=2)
    report = compare(model, make, short_cases(model), [*short_settings(), full_settings()[-1]], 1e-6, enough=1)
    assert report.ok, report.worst
