"""What layers are called with for padded and packed rows, where a model's code takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.errors import ModelError
from megatrain.model import port_model, profile_prologue
from megatrain.model.ports import PortedModel
from tests.tiny import tiny_model

LENGTHS = (8, 16, 32)


def test_unsupported_row_counts_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    ported, honest = port_model(tiny_model("llama"), torch.float32), PortedModel.run

    def run(self: PortedModel, capture: Any, weights: Any, inputs: Any) -> Any:
        if "position_ids" in inputs:
            raise LookupError("no positions here")
        return honest(self, capture, weights, inputs)

    assert {name for name, _ in profile_prologue.profile_prologue(ported, LENGTHS).others} == {"padded", "packed"}
    monkeypatch.setattr(PortedModel, "run", run)
    found = profile_prologue.profile_prologue(ported, LENGTHS)
    assert [name for name, _ in found.others] == ["padded"]


def test_counting_errors_are_not_taken_for_unsupported_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ported = port_model(tiny_model("llama"), torch.float32)

    def packed(rows: int, tokens: int) -> dict[str, torch.Tensor]:
        raise ZeroDivisionError

    monkeypatch.setattr(profile_prologue, "packed", packed)
    with pytest.raises(ZeroDivisionError):
        profile_prologue.profile_prologue(ported, LENGTHS)


def test_a_model_that_supports_no_row_count_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ported = port_model(tiny_model("llama"), torch.float32)

    def run(*_: Any) -> Any:
        raise ModelError("cannot be run", where="here")

    monkeypatch.setattr(PortedModel, "run", run)
    with pytest.raises(ModelError, match="cannot be run"):
        profile_prologue.profile_prologue(ported, LENGTHS)
