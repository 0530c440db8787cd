"""What is right is found right, and each way to be wrong is found: a mask, a buffer, a cap, a scale, a draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from megatrain import Engine, Policy
from megatrain.engine.context import OpContext
from megatrain.errors import ModelError
from megatrain.model import Call, PortedModel
from megatrain.model.tiny import shrink, twin_from, with_dropout
from megatrain.spec import Numerics
from megatrain.train import parity
from megatrain.train.parity import (
    ROUTERS,
    Finding,
    MakeEngine,
    Report,
    compare,
    full_report,
    replay_finding,
    short_check,
    verify_rows,
)
from tests.tiny import stock_gradients, tiny_model, unequal_batches


def make(model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
    return Engine.from_model(model, device, numerics=numerics, policy=policy, verify=False)


def wrong(change: Callable[[PortedModel], None]) -> MakeEngine:
    """Makes engines whose model is changed behind their back."""

    def made(model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
        engine = make(model, device, numerics, policy)
        change(engine.parts.ported)
        return engine

    return made


@cache
def small_of(kind: str, **changes: Any) -> PreTrainedConfig:
    return shrink(AutoConfig.for_model(kind, **changes))


def still(kind: str, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    return twin_from(with_dropout(small_of(kind, **changes), 0.0), 0, attention)


def asked(model: PreTrainedModel, engine: MakeEngine = make, settings: int | None = None) -> Report:
    """Of the first settings, or of all."""
    return compare(model, engine, parity.short_cases(model), parity.short_settings()[:settings], enough=1)


# What is right -----------------------------------------------------------------------------------------------------


def test_the_reference_is_a_plain_step_of_the_stock_model() -> None:
    model = tiny_model("mixtral", output_router_logits=True)
    loss, expected = stock_gradients(model, unequal_batches(3))
    found_loss, found = parity.truth(model, unequal_batches(3))
    assert found_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def test_frozen_parameters_need_no_moments() -> None:
    model = still("llama")
    model.lm_head.weight.requires_grad_(False)
    report = asked(model)
    assert report.ok
    assert "lm_head.weight" not in {finding.group for finding in report.findings}


@pytest.mark.parametrize("part", [slice(0, None, 6), pytest.param(slice(None), marks=pytest.mark.slow)])
def test_every_case_is_verified_and_every_group_listed(part: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick suite compares in the plainest setting and in the last, a mixture of plans on the simulator."""
    settings = parity.full_settings()
    assert {"cpu", parity.SIM} == {setting.name.partition(",")[0] for setting in settings}
    monkeypatch.setattr(parity, "full_settings", lambda: settings[part])
    report = full_report(small_of("olmoe"), make)
    assert report.ok, report.worst
    assert not report.left_out
    groups = [group for group, _, _ in verify_rows(report)]
    assert groups[0] == "loss"
    assert {"model.layers.*.mlp.experts.gate_up_proj", "lm_head.weight", ROUTERS} <= set(groups)
    assert {verdict for _, _, verdict in verify_rows(report)} == {"equal"}
    assert any("packed" in case.name for case in parity.full_cases(still("olmoe")))


def test_dropout_is_replayed_by_every_plan_and_device() -> None:
    model = twin_from(with_dropout(small_of("gpt2"), 0.2), 0)
    (case, *_), settings = parity.short_cases(model), parity.full_settings()
    assert replay_finding(model, make, case, settings).error == 0


@pytest.mark.parametrize(
    ("off", "equal"),
    [({"tiny": 0.7}, True), ({"tiny": 0.7, "large": 1e-3}, False), ({"large": math.nan, "tiny": 0.7}, False)],
)
def test_replay_compares_with_the_largest_gradient(off: dict[str, float], equal: bool) -> None:
    """A gradient that is only rounding (DeepSeek-V4's gates of hash layers have 1e-9) has no scale of its own."""
    expected = {"large": torch.ones(4), "tiny": torch.full((4,), 1e-9)}

    class Told:
        def __init__(self, gradients: dict[str, Tensor]) -> None:
            self.gradients, self.evaluate, self.close = lambda _: gradients, lambda _: 0.0, lambda: None

    moved = {name: value * (1 + off.get(name, 0.0)) for name, value in expected.items()}
    told, model = iter([Told(expected), Told(moved)]), still("gpt2")
    found = replay_finding(model, lambda *_: next(told), parity.short_cases(model)[0], parity.short_settings()[:2])
    assert (found.error < parity.TOLERANCE) == equal


def test_cases_the_stock_model_fails_are_skipped_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = still("llama")
    plain = type(model).forward

    def no_masks(self: nn.Module, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            raise ValueError("no masks here")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", no_masks)
    report = asked(model)
    assert report.ok
    assert [line.partition(":")[2] for line in report.left_out] == [" ValueError: no masks here"] * 2
    with pytest.raises(ModelError, match="computes none of the cases"):
        compare(model, make, parity.short_cases(model)[:1], parity.short_settings())


def test_rounding_is_distinguished_from_errors_by_perturbing_the_last_bit() -> None:
    """With a tolerance below rounding, what is asked again stays right, and a mistake of the same size does not. It is
    named where it was met first, though others are wrong by a little more."""
    model = still("llama")
    asked_once, settings = parity.short_cases(model)[:1], parity.short_settings()
    assert compare(model, make, asked_once, settings, tolerance=1e-9).ok

    class Off:
        """Its gradients are off by a part in ten thousand, and by a hundredth of that more in each later setting."""

        errors = iter(1e-4 * (1 + number / 100) for number in range(len(settings)))

        def __init__(self, engine: Engine) -> None:
            self.engine, self.evaluate, self.close = engine, engine.evaluate, engine.close
            self.error = next(self.errors)

        def gradients(self, micro_batches: Any) -> dict[str, Tensor]:
            return {name: value * (1 + self.error) for name, value in self.engine.gradients(micro_batches).items()}

    report = compare(model, lambda *how: Off(make(*how)), asked_once, settings)
    assert not report.ok
    assert report.worst.error == pytest.approx(1e-4, rel=0.1)
    assert report.worst.where == f"{asked_once[0].name}; {settings[0].name}"


def test_errors_rank_before_rounding() -> None:
    shaky = Finding("a.*", 3e-5, "a.1", "case", "cpu", rounding=2e-5)
    mistaken = Finding("b", 2e-5, "b", "case", "cpu", rounding=1e-6)
    fine = Finding("loss", 1e-8, "loss")
    assert Report("Model", "sdpa", 1e-5, (fine, shaky)).ok
    assert Report("Model", "sdpa", 1e-5, (fine, shaky)).worst is shaky
    report = Report("Model", "sdpa", 1e-5, (fine, shaky, mistaken))
    assert report.worst is mistaken
    assert [verdict for _, _, verdict in verify_rows(report)] == ["equal", "equal", "differs: case; cpu"]
    with pytest.raises(ModelError, match="gradient of b would be wrong by 2e-05"):
        report.raise_if_wrong()


# What is wrong -----------------------------------------------------------------------------------------------------


def zero_buffers(ported: PortedModel, name: str) -> None:
    found = [
        buffer
        for root in (ported.skeleton, *ported.templates)
        for full, buffer in root.named_buffers()
        if full.endswith(name)
    ]
    assert found
    for buffer in found:
        buffer.zero_()
    ported.recomputed.clear()  # it would put them back


def skip_final_cap(ported: PortedModel) -> None:
    ported.skeleton.config.final_logit_softcapping = None


def skip_attention_cap(ported: PortedModel) -> None:
    for template in ported.templates:
        template.self_attn.attn_logit_softcapping = None


def skip_residual_scale(ported: PortedModel) -> None:
    for template in ported.templates:
        template.residual_multiplier = 1.0


def skip_router_loss(ported: PortedModel) -> None:
    ported.balance_coefficient = None


WRONG: dict[str, tuple[str, dict[str, Any], Callable[[PortedModel], None]]] = {
    "final soft-cap skipped": ("gemma2", {}, skip_final_cap),
    "attention soft-cap skipped": ("gemma2", {}, skip_attention_cap),
    "correction of a router missing": ("deepseek_v3", {}, lambda p: zero_buffers(p, "e_score_correction_bias")),
    "rotary table missing": ("llama", {}, lambda p: zero_buffers(p, "inv_freq")),
    "logit scale skipped": ("cohere", {}, lambda p: setattr(p.skeleton, "logit_scale", 1.0)),
    "residual scale skipped": ("granite", {"residual_multiplier": 0.5}, skip_residual_scale),
    "router loss skipped": ("mixtral", {"output_router_logits": True}, skip_router_loss),
    "layers with and without positions swapped": ("smollm3", {}, lambda p: p.templates.reverse()),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_templates_are_detected(case: str) -> None:
    kind, changes, change = WRONG[case]
    model = still(kind, "eager", **changes)
    assert asked(model, settings=1).ok
    report = asked(model, wrong(change), settings=1)
    assert not report.ok
    assert report.worst.error > 10 * report.tolerance


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "qwen3_next"])
def test_dropped_masks_are_detected(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Call.arguments

    def dropped(self: Call, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = plain(self, hidden)
        masks = (torch.Tensor,)
        args = tuple(None if isinstance(each, masks) and each.dtype == torch.bool else each for each in args)
        return args, {name: None if name == "attention_mask" else value for name, value in kwargs.items()}

    monkeypatch.setattr(Call, "arguments", dropped)
    assert not asked(still(kind)).ok


def test_unreplayed_dropout_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(OpContext, "reseed", lambda *_: None)
    with pytest.raises(ModelError, match="two micro-batches of whole rows; cpu, keep against cpu, "):
        short_check(tiny_model("gpt2", attn_pdrop=0.1, resid_pdrop=0.1), make, tmp_path)


def test_missing_and_nan_gradients_are_detected() -> None:
    model = still("llama")

    class Odd:
        def __init__(self, engine: Engine) -> None:
            self.engine, self.evaluate, self.close = engine, engine.evaluate, engine.close

        def gradients(self, micro_batches: Any) -> dict[str, Tensor]:
            found = self.engine.gradients(micro_batches)
            del found["lm_head.weight"]
            found["model.norm.weight"][0] = torch.nan
            return found

    wrongs = [finding.group for finding in asked(model, lambda *how: Odd(make(*how))).findings if finding.error > 1]
    assert wrongs == ["model.norm.weight", "lm_head.weight"]


def test_the_error_names_the_parameter_the_case_and_what_to_try(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        short_check(tiny_model("gemma2"), wrong(skip_final_cap), tmp_path)
    text = str(caught.value)
    assert text.startswith("model Gemma2ForCausalLM: its gradient of model.")
    assert "padded on both sides; cpu, keep" in text
    assert "try another attention kernel (" in text
    assert "\n" not in text
