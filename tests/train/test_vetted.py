"""An architecture is checked when it is met, and never again until something that matters has changed."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from megatrain import Engine, Policy
from megatrain.errors import ModelError
from megatrain.spec import Numerics
from megatrain.train import parity
from megatrain.train.parity import Checked, Finding, Report, customised, short_check, short_settings
from tests.tiny import tiny_model

SAME = Report("", "sdpa", 1e-6, (Finding("loss", 0.0, "loss"),))


class Counting:
    """Makes engines, and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
        self.made += 1
        return Engine.from_model(model, device, numerics=numerics, policy=policy, verify=False)


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "_SEEN", set())


@pytest.fixture
def make() -> Counting:
    return Counting()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison finds no difference, and takes no time: where the question is when one is made."""
    monkeypatch.setattr(parity, "compare", lambda *_, **__: SAME)


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "_SEEN", set())


def test_successful_verifications_are_cached_in_memory_and_on_disk(
    make: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = tiny_model(), tmp_path / "new" / "folder"
    assert short_check(model, make, folder) == Checked("checked")
    made = make.made
    assert made == len(short_settings())
    assert short_check(model, make, folder) == Checked("remembered")
    another_process(monkeypatch)
    assert short_check(model, make, folder) == Checked("remembered")
    assert make.made == made
    assert len(list(folder.iterdir())) == 1, "no draft is left"


@pytest.mark.usefixtures("quick")
def test_one_verified_size_covers_the_architecture(make: Counting, tmp_path: Path) -> None:
    short_check(tiny_model(hidden_size=64, intermediate_size=128, num_hidden_layers=3), make, tmp_path)
    assert short_check(
        tiny_model(hidden_size=128, intermediate_size=256, num_hidden_layers=5), make, tmp_path
    ) == Checked("remembered")
    assert short_check(tiny_model(tie_word_embeddings=True), make, tmp_path) == Checked("checked")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", ["kernel", "switch", "library", "source"])
def test_relevant_changes_require_another_verification(
    what: str, make: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    short_check(model, make, tmp_path)
    another_process(monkeypatch)
    if what == "kernel":
        model = tiny_model(attn_implementation="eager")
    elif what == "switch":
        model = tiny_model(hidden_act="gelu")
    elif what == "library":
        monkeypatch.setattr(parity, "version", lambda library: "another")
    else:
        monkeypatch.setattr(parity, "own_sources", lambda: "edited")
    assert short_check(model, make, tmp_path) == Checked("checked")


def test_failed_verifications_are_not_cached(make: Counting, tmp_path: Path) -> None:
    def wrong(model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
        engine = make(model, device, numerics, policy)
        engine.parts.ported.templates.reverse()
        engine.parts.ported.skeleton.config.rms_norm_eps = 1.0
        next(m for m in engine.parts.ported.skeleton.modules() if hasattr(m, "variance_epsilon")).variance_epsilon = 1.0
        return engine

    for _ in range(2):
        with pytest.raises(ModelError, match="would be wrong by"):
            short_check(tiny_model(), wrong, tmp_path)
    assert not list(tmp_path.iterdir())
    assert short_check(tiny_model(), make, tmp_path) == Checked("checked")


@pytest.mark.usefixtures("quick")
def test_an_unusable_cache_only_costs_time(make: Counting, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert short_check(tiny_model(), make, blocked) == Checked("checked")


@pytest.mark.usefixtures("quick")
def test_customised_models_are_verified_each_time(make: Counting, tmp_path: Path) -> None:
    model = tiny_model()
    assert not customised(model)
    model.model.layers[0].mlp.forward = types.MethodType(type(model.model.layers[0].mlp).forward, model.model)
    assert customised(model)
    for _ in range(2):
        assert "its class is computed correctly" in short_check(model, make, tmp_path).why
    assert not list(tmp_path.iterdir())


def test_hooks_and_foreign_modules_make_a_model_custom() -> None:
    hooked = tiny_model()
    hooked.model.norm.register_forward_hook(lambda *_: None)

    class Adapter(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    adapted = tiny_model()
    adapted.model.layers[0].mlp.up_proj = Adapter(32, 48)
    assert customised(hooked)
    assert customised(adapted)


def test_unverifiable_models_are_reported_as_unchecked(tmp_path: Path) -> None:
    def refuses(model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
        raise ModelError("layers share a parameter")

    assert short_check(nn.Linear(2, 2), refuses, tmp_path).state == "unchecked"
    assert short_check(tiny_model(), refuses, tmp_path) == Checked("unchecked", "layers share a parameter")
    assert not list(tmp_path.iterdir())


def test_a_crash_of_the_engine_is_one_typed_line(tmp_path: Path) -> None:
    def crashes(model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
        raise RuntimeError("shapes\nof things")

    with pytest.raises(ModelError, match="fails in the engine: RuntimeError: shapes") as caught:
        short_check(tiny_model(), crashes, tmp_path)
    assert "\n" not in str(caught.value)


def test_the_users_random_state_is_unchanged(make: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compares(*_: object, **__: object) -> Report:
        torch.rand(2)
        assert torch.get_default_device() == torch.device("cpu")
        return SAME

    monkeypatch.setattr(parity, "compare", compares)
    model = tiny_model()
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    with torch.device("meta"):  # nor does a default device matter
        assert short_check(model, make, tmp_path) == Checked("checked")
    assert torch.equal(torch.rand(2), expected)
