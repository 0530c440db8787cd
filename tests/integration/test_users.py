"""What users do to models and engines before, between and after steps; each was wrong once, or could be."""

from __future__ import annotations

import gc
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain import AdamW, Engine, Lion, Policy
from megatrain.device.cpu import CpuDevice
from megatrain.device.sim import SimDevice
from megatrain.errors import CheckpointError, ConfigError, DeviceError, LossError, ModelError
from megatrain.spec import ActivationPlan, Placement, Precision, Work
from megatrain.train.options import EngineOptions
from tests.tiny import batch, equal, relative_error, stock_gradients, tiny_model, unequal_batches


def test_frozen_parameters_do_not_change_and_have_no_gradient() -> None:
    model = tiny_model()
    frozen = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    _, expected = stock_gradients(model, unequal_batches())
    before = {name: model.get_parameter(name).detach().clone() for name in frozen}
    for device in ("cpu", "sim:1"):
        with Engine.from_model(model, device, "fp32", AdamW(lr=0.1, weight_decay=0.1)) as engine:
            found = engine.gradients(unequal_batches())
            assert set(found) == set(expected) - set(frozen)
            assert max(relative_error(found[name], expected[name]) for name in found) < 1e-6
            engine.step(unequal_batches())
            after = engine.master_weights()
        assert all(torch.equal(after[name], before[name]) for name in frozen)
        assert not torch.equal(after["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "sim:4"])
def test_frozen_parameters_cost_no_gradient_and_no_optimizer_state(device: str, precision: Precision) -> None:
    """Bytes per parameter: what trains as before; what is frozen only the weight that is computed with."""
    whole = tiny_model()
    partly = tiny_model()
    for name, parameter in partly.named_parameters():
        parameter.requires_grad_("self_attn" in name and "layers.0" not in name)
    with (
        Engine.from_model(whole, device, precision) as all_of_it,
        Engine.from_model(partly, device, precision) as engine,
    ):
        owners = {owner: n for (tier, owner), n in engine.diagnostics.memory_table().items() if tier == "host"}
        trained, numel = engine.structure.trained_numel, engine.structure.numel
        assert 0 < trained < numel / 4
        hi, grad = (2, 2) if precision == "bf16" else (4, 4)
        assert owners["weights"] == pytest.approx(hi * numel, rel=0.01)
        assert owners["optimizer state"] == pytest.approx((8 + 4 - hi) * trained, rel=0.01)
        assert owners["gradients"] == pytest.approx(grad * trained, rel=0.01)
        assert sum(engine.diagnostics.memory_table().values()) < sum(all_of_it.diagnostics.memory_table().values())


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("device", ["cpu", "sim:4"])
def test_the_backward_pass_ends_at_the_lowest_unit_that_trains(device: str, activations: ActivationPlan) -> None:
    model = tiny_model()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    _, expected = stock_gradients(model, unequal_batches())
    policy = Policy(shares_memory=device == "cpu", activations=activations)
    with Engine.from_model(model, device, "fp32", policy=policy, verify=False) as engine:
        found = engine.gradients(unequal_batches())
        visited = {op.unit for op in engine.parts.prepare(Work((1, 1))).ops if op.kind == "BACKWARD"}
    assert visited == {3}
    assert max(relative_error(found[name], expected[name]) for name in found) < 1e-6
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_fully_frozen_models_are_refused() -> None:
    model = tiny_model()
    loss, _ = stock_gradients(model, unequal_batches())
    with Engine.from_model(model.requires_grad_(False), precision="fp32") as engine:
        assert "gradients" not in {owner for _, owner in engine.diagnostics.memory_table()}
        assert engine.evaluate(unequal_batches()) == pytest.approx(loss, rel=1e-6)
        with pytest.raises(ModelError, match="every parameter is frozen"):
            engine.step(unequal_batches())


def test_a_whole_layer_can_be_frozen() -> None:
    model = tiny_model()
    model.model.layers[0].requires_grad_(False)
    with Engine.from_model(model, "sim:2", "bf16") as engine:
        for _ in range(3):
            engine.step(unequal_batches())
        assert set(engine.diagnostics.applied_updates().values()) == {0, 2}
        engine.weights.flush()
        assert engine.diagnostics.applied_updates()["model.layers.1"] == 3


@pytest.mark.parametrize("device", ["cpu", "sim:4"])
def test_a_tied_model_whose_epilogue_owns_nothing_trains(device: str) -> None:
    """OLMo's final norm has no parameters."""
    config = AutoConfig.for_model(
        "olmo",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    loss, expected = stock_gradients(model, unequal_batches())
    for update, clip in (("next_forward", 1.0), ("during_backward", None)):
        policy = Policy(update=update)  # type: ignore[arg-type]
        with Engine.from_model(model, device, "fp32", max_grad_norm=clip, policy=policy) as engine:
            found = engine.gradients(unequal_batches())
            assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-6
            assert engine.step(unequal_batches()).loss == pytest.approx(loss, rel=1e-6)
            assert engine.step(unequal_batches()).loss < loss


def test_user_enabled_gradient_checkpointing_is_harmless() -> None:
    model = tiny_model()
    _, expected = stock_gradients(model, unequal_batches())
    with warnings.catch_warnings(action="ignore"):  # newer versions call it activation_checkpointing_enable
        model.gradient_checkpointing_enable()
    with Engine.from_model(model, precision="fp32") as engine:
        found = engine.gradients(unequal_batches())
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-6


@pytest.mark.parametrize(
    "around", [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad()]
)
def test_the_callers_torch_modes_change_nothing(around: object) -> None:
    with Engine.from_model(tiny_model(), precision="fp32") as engine:
        expected = engine.gradients(unequal_batches())
    with around, Engine.from_model(tiny_model(), precision="fp32") as engine:  # type: ignore[attr-defined]
        assert equal(engine.gradients(unequal_batches()), expected)
        engine.step(unequal_batches())


def test_module_modes_are_kept_and_evaluation_has_no_dropout() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    loss, _ = stock_gradients(model.eval(), unequal_batches())
    model.transformer.h[1].train()
    with Engine.from_model(model, precision="fp32") as engine:
        before = engine.gradients(unequal_batches())
        assert engine.evaluate(unequal_batches()) == pytest.approx(loss, rel=1e-6)
        assert equal(engine.gradients(unequal_batches()), before)


def test_manually_tied_models_stay_tied(tmp_path: Path) -> None:
    model = tiny_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    with Engine.from_model(model, precision="fp32", optimizer=AdamW(lr=1e-2)) as engine:
        assert engine.structure.tied
        engine.step(unequal_batches())
        loss = engine.evaluate(unequal_batches())
        engine.save_pretrained(tmp_path / "model")
    again, _ = stock_gradients(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), unequal_batches())
    assert again == pytest.approx(loss, rel=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rate", "clip"),
    [
        (-1.0, 1.0),
        (float("nan"), None),
        (float("inf"), 1.0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((-1.0, None), (float("nan"), 1.0))),
        pytest.param(float("inf"), None, marks=pytest.mark.slow),
    ],
)
def test_a_refused_learning_rate_leaves_no_trace(rate: float, clip: float | None) -> None:
    def run(*, refused: bool) -> dict[str, Tensor]:
        with Engine.from_model(tiny_model(), optimizer=AdamW(lr=1e-2), max_grad_norm=clip) as engine:
            engine.step(unequal_batches())
            if refused:
                with pytest.raises(ConfigError):
                    engine.step(unequal_batches(), lr=rate)
            engine.step(unequal_batches())
            return engine.master_weights()

    assert equal(run(refused=True), run(refused=False))


def test_failing_steps_do_not_leak_memory() -> None:
    """They fail at the loss, where the graphs of all layers are alive."""

    def failing(*_: object) -> Tensor:
        raise ArithmeticError("on purpose")

    process = psutil.Process()
    big = [batch(8, 64, 0)]
    policy = Policy(activations="keep", shares_memory=True)
    with Engine.from_model(tiny_model(hidden_size=128, intermediate_size=512), policy=policy, verify=False) as engine:
        engine.step(big)
        gc.collect()
        gc.freeze()  # what other tests have left need not be looked at forty times
        try:
            for count in range(40):
                with pytest.raises(LossError, match="on purpose"):
                    engine.step(big, loss_fn=failing)
                gc.collect()  # tracebacks hold graphs until then
                if count == 9:
                    before = process.memory_info().rss
        finally:
            gc.unfreeze()
        # A step's graphs are about 12 MB, so thirty that stay are 370; an allocator's arenas come and go by some tens.
        assert process.memory_info().rss - before < 100 << 20


def test_an_interrupt_while_waiting_lets_the_step_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    with Engine.from_model(tiny_model(), device, optimizer=AdamW(lr=1e-2)) as engine:
        engine.step(unequal_batches())
        plain = CpuDevice.synchronize
        interrupts = [KeyboardInterrupt()]

        def interrupted(self: CpuDevice) -> None:
            if interrupts:
                raise interrupts.pop()
            plain(self)

        monkeypatch.setattr(CpuDevice, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step(unequal_batches())
        monkeypatch.undo()
        assert engine.parts.pool.leases == 0
        found = (engine.evaluate(unequal_batches()), engine.master_weights())
    with Engine.from_model(tiny_model(), optimizer=AdamW(lr=1e-2)) as engine:
        engine.step(unequal_batches())
        assert (engine.evaluate(unequal_batches()), engine.master_weights())[0] == found[0]
        assert equal(engine.master_weights(), found[1])
    device.close()


def test_schedules_are_cached_by_number_of_micro_batches() -> None:
    with Engine.from_model(tiny_model()) as engine:
        for length in range(4, 20):
            engine.step([batch(1, length, length), batch(2, length + 1, length)])
            engine.evaluate([batch(1, length, 0)])
        assert len(engine.parts.schedules.known) <= 6


def test_the_reported_policy_is_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.from_model(tiny_model()) as engine:
        engine.parts.schedules.__dict__["_memory_for_activations"] = 3_000_000
        for rows, plan in ((1, "keep"), (40, "recompute"), (1, "keep")):
            engine.parts.prepare(Work((rows * 60,)))
            assert engine.policy.activations == plan
            engine.step([batch(rows, 60, 0)])
            assert engine.policy.activations == plan


def test_closing_an_engine_stops_its_threads_and_nothing_else() -> None:
    threads = threading.active_count()
    device = CpuDevice()
    for _ in range(2):
        with Engine.from_model(tiny_model(), device) as engine:
            engine.step(unequal_batches())
    device.close()
    for _ in range(3):
        with pytest.raises(ModelError):
            Engine.from_model(torch.nn.Linear(2, 2))
    assert threading.active_count() == threads


def test_a_closed_engine_refuses_every_call_clearly() -> None:
    engine = Engine.from_model(tiny_model())
    engine.close()
    engine.close()
    for call in (
        engine.master_weights,
        engine.weights.flush,
        lambda: engine.save_pretrained("x"),
        lambda: engine.step([]),
    ):
        with pytest.raises(DeviceError, match="the engine is closed"):
            call()


def test_misspelt_options_are_not_ignored(tmp_path: Path) -> None:
    config = tiny_model().config
    with pytest.raises(TypeError, match="no option 'precison'; did you mean 'precision'"):
        Engine.from_config(config.to_dict(), precison="fp32")  # type: ignore[call-arg]
    with Engine.from_model(tiny_model()) as engine, pytest.raises(TypeError, match="precison"):
        engine.save_pretrained(tmp_path / "model", precison="fp32")  # type: ignore[call-arg]
    assert not (tmp_path / "model").exists()


def test_creating_an_engine_leaves_random_state_unchanged() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    Engine.from_model(model).close()
    assert torch.equal(torch.rand(3), expected)


def test_single_weights_are_set_exactly_and_others_are_refused() -> None:
    with Engine.from_model(tiny_model(), verify=False) as engine:
        engine.step([batch(2, 8, 0)])
        before, value = engine.master_weights(), torch.randn(32)
        engine.weights.update({"model.norm.weight": value})
        assert equal(engine.master_weights(), {**before, "model.norm.weight": value})
        for odd in ({"model.norm.weight": torch.zeros(31)}, {"model.norm.wight": value}):
            with pytest.raises(ModelError, match=r"has no parameter model\.norm\.we?ight of shape"):
                engine.weights.update({"lm_head.weight": torch.zeros(96, 32), **odd})
        assert engine.master_weights()["lm_head.weight"].any()


@pytest.mark.parametrize("norm", [None, 1e9])
def test_hyperparameters_set_between_steps_apply_to_the_next(norm: float | None) -> None:
    """As in torch, at once or with updates that are applied a step later."""
    first = AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, no_decay=("*norm*",))
    second = replace(first, betas=(0.5, 0.6), eps=1e-2, weight_decay=20.0)
    model, batches = tiny_model(), [batch(2, 8, 0)]
    named = [*model.named_parameters()]
    groups = [{"params": [p for n, p in named if first.decays(n, p.shape) is decays]} for decays in (True, False)]
    stock = torch.optim.AdamW(groups, lr=1e-2)
    with Engine.from_model(model, precision="fp32", optimizer=first, max_grad_norm=norm, verify=False) as engine:
        for settings in (first, second, first):
            for group, decay in zip(stock.param_groups, (settings.weight_decay, 0.0), strict=True):
                group.update(betas=settings.betas, eps=settings.eps, weight_decay=decay)
            stock.zero_grad()
            model(**batches[0]).loss.backward()
            stock.step()
            engine.set_optimizer(settings)
            engine.step(batches)
        for name, value in engine.master_weights().items():
            assert relative_error(value, model.get_parameter(name)) < 1e-5
        with pytest.raises(ConfigError, match="other parameters would decay"):
            engine.set_optimizer(replace(first, no_decay=()))


def test_the_state_of_another_optimizer_is_refused_or_starts_as_zeros(tmp_path: Path) -> None:
    """As from the same weights without a state: AdamW counts its updates from 1."""
    with Engine.from_model(tiny_model(), "cpu", "fp32", Lion(lr=1e-3), verify=False) as engine:
        engine.step(unequal_batches())
        folder = engine.save(tmp_path).wait()
        with pytest.raises(ConfigError, match="AdamW cannot go on with what Lion has kept; make another engine"):
            engine.set_optimizer(AdamW())
    found: list[dict[str, Tensor]] = []
    options: EngineOptions = {"precision": "fp32", "optimizer": AdamW(lr=1e-2), "verify": False}
    with pytest.raises(CheckpointError, match="was trained by lion, and adamw cannot go on with its state; use lion"):
        Engine.from_checkpoint(folder, **options)
    for engine in (Engine.from_checkpoint(folder, new="zero", **options), Engine.from_pretrained(folder, **options)):
        with engine:
            engine.step(unequal_batches(1))
            engine.step(unequal_batches(3))
            found.append(engine.master_weights())
    assert equal(*found)
    with Engine.from_model(tiny_model(), **options) as engine:
        before = engine.master_weights()
        with pytest.raises(CheckpointError, match="was trained by lion"):
            engine.restore(folder)
        assert equal(engine.master_weights(), before)
        engine.step(unequal_batches())


@pytest.mark.parametrize("placement", [Placement(), Placement(weights="disk"), Placement("device", "device", "device")])
def test_weights_can_be_viewed_in_place(placement: Placement, tmp_path: Path) -> None:
    """Pending updates applied; not where it lies elsewhere, or a device has a copy of it."""
    model = tiny_model()
    device: str | SimDevice = "cpu" if placement == Placement() else SimDevice(0)
    policy = Policy(shares_memory=placement == Placement(), placements=(placement,) * 5)
    with Engine.from_model(model, device, "fp32", policy=policy, verify=False, disk=[tmp_path]) as engine:
        engine.step([batch(2, 8, 0)])
        view = engine.weights.view("lm_head.weight")
        if placement != Placement():
            assert view is None
            return
        assert view is not None
        assert torch.equal(view, engine.weights["lm_head.weight"])
        view.zero_()
        assert not engine.weights["lm_head.weight"].any()
