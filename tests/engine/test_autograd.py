"""Arguments of `linear` and `embedding` are found by position, by keyword and by default, in torch's order."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn import functional

from megatrain.engine import autograd
from megatrain.engine.autograd import EmbeddingOptions, embedding_options, linear_bias

IDS, TABLE = torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2)


def test_embedding_options_follow_torchs_order() -> None:
    names = tuple(inspect.signature(functional.embedding).parameters)
    assert names == ("input", "weight", *autograd._EMBEDDING_OPTIONS)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, EmbeddingOptions(-1, False, False, False)),
        ((-2, 1.0, 2.0, True, True), {}, EmbeddingOptions(3, True, True, True)),
        ((0,), {"scale_grad_by_freq": True, "sparse": False}, EmbeddingOptions(0, False, True, False)),
        ((), {"padding_idx": 4, "max_norm": 0.0}, EmbeddingOptions(4, True, False, False)),
    ],
)
def test_embedding_options(args: tuple[object, ...], kwargs: dict[str, object], expected: EmbeddingOptions) -> None:
    assert embedding_options((IDS, TABLE, *args), kwargs) == expected


def test_bias_by_position_and_by_keyword() -> None:
    bias = torch.ones(2)
    assert linear_bias((IDS, TABLE, bias), {}) is linear_bias((IDS, TABLE), {"bias": bias}) is bias
    assert linear_bias((IDS, TABLE), {}) is linear_bias((IDS, TABLE, None), {}) is None
