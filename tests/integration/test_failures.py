"""Bad input and failures raise one typed error, leave the state unchanged, and never hang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatrain import AdamW, Engine, Numerics, Policy
from megatrain.device.sim import SimDevice
from megatrain.errors import BatchError, ConfigError, NonFinite, PlanError, StreamFailed
from megatrain.spec import Placement
from megatrain.spec.policy import UpdateTime
from megatrain.train import optimizer
from megatrain.train.optimizer import StreamedOptimizer
from tests.adapted import adapted
from tests.tiny import VOCAB, batch, equal, tiny_model, unequal_batches

DEVICES = ["cpu", "sim:3"]


def good() -> dict[str, Tensor]:
    return batch(2, 8, 0)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ([{**good(), "labels": torch.zeros(2, 7, dtype=torch.long)}], "differ in shape"),
        ([{**good(), "input_ids": torch.zeros(8, dtype=torch.long)}], r"\[batch, length\]"),
        (
            [good(), {**good(), "input_ids": torch.full((2, 8), VOCAB)}],
            f"micro-batch 1: input_ids contains token {VOCAB}",
        ),
        ([{**good(), "labels": torch.full((2, 8), -5)}], "token -5, outside the vocabulary"),
        ([{**good(), "labels": torch.full((2, 8), -100)}], "no target token"),
        ([batch(1, 65, 0)], "64 positions"),
        ([batch(1, 1, 0)], "no target token"),
    ],
)
def test_an_invalid_batch_is_a_one_line_error_without_effect(broken: list[dict[str, Tensor]], says: str) -> None:
    with Engine.from_model(tiny_model()) as engine:
        before = engine.master_weights()
        for call in (engine.step, engine.gradients, engine.evaluate):
            with pytest.raises(BatchError, match=says) as caught:
                call(broken)
            assert "\n" not in str(caught.value)
        assert equal(engine.master_weights(), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_nonfinite_losses_are_not_applied(device: str, where: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(where)[5] = float("nan")
    everything = [{"input_ids": torch.arange(3, 60)[None], "labels": torch.arange(3, 60)[None]}]
    with Engine.from_model(model, device, "fp32", AdamW(lr=0.1)) as engine:
        before = {name: w.view(torch.int32) for name, w in engine.master_weights().items()}
        for _ in range(2):
            with pytest.raises(
                NonFinite, match="^the loss is nan, and some weights are not finite either: " + where
            ) as caught:
                engine.step(everything)
            assert caught.value.parameters == (where,)
        with pytest.raises(NonFinite, match=f"^generate: the logits are not finite, and some weights .*: {where}"):
            engine.generate(everything[0]["input_ids"], max_new_tokens=1)
        after = {name: w.view(torch.int32) for name, w in engine.master_weights().items()}
    assert equal(before, after)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("module", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_a_nonfinite_loss_of_finite_weights_names_the_first_module(device: str, module: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1e6)
        model.get_submodule(module).weight[5] = 3e38  # its output overflows
    with Engine.from_model(model, device, "fp32", AdamW(lr=0.1)) as engine:
        before = engine.master_weights()
        says = f"^the loss is (nan|inf), first not finite: the output of {module}; nothing was updated"
        with pytest.raises(NonFinite, match=says) as caught:
            engine.step(unequal_batches())
        assert not caught.value.parameters
        with pytest.raises(NonFinite, match=f"first not finite: the output of {module}"):
            engine.evaluate(unequal_batches())
        assert equal(engine.master_weights(), before)


@pytest.mark.few(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("targets", "parameter", "says"),
    [
        (["q_proj"], "mlp.down_proj.weight", "mlp.down_proj"),
        ("all-linear", "mlp.down_proj.base_layer.weight", "mlp.down_proj.base_layer"),
        ("all-linear", "mlp.down_proj.lora_A.default.weight", "mlp.down_proj.lora_A.default"),
        ("all-linear", "mlp.down_proj.lora_B.default.weight", "mlp.down_proj.lora_B.default"),
    ],
)
def test_a_nonfinite_loss_under_an_adapter_names_the_first_module(
    device: str, targets: Any, parameter: str, says: str
) -> None:
    """Of the frozen model, or of the adapter itself."""
    model = adapted("llama", target_modules=targets)
    layer = model.base_model.model.model.layers[1]
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name.startswith("mlp.up_proj") and "lora" not in name:
                weight.mul_(1e6)
        layer.get_parameter(parameter)[:] = 3e38  # its output overflows
    with Engine.from_model(model, device, "fp32", AdamW(lr=0.1), verify=False) as engine:
        before = engine.master_weights()
        for call in (engine.step, engine.evaluate):
            with pytest.raises(NonFinite, match=f"first not finite: the output of model.layers.1.{says}; ") as caught:
                call(unequal_batches())
            assert not caught.value.parameters
        assert equal(engine.master_weights(), before)


def test_weights_set_after_a_failed_step_are_looked_at_again() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1e6)
        model.lm_head.weight[5] = 3e38
    with Engine.from_model(model, precision="fp32") as engine:
        with pytest.raises(NonFinite, match="first not finite: the output of lm_head"):
            engine.step(unequal_batches())
        engine.weights.update({"model.norm.weight": torch.full((32,), torch.nan)})
        with pytest.raises(NonFinite, match=r"some weights are not finite either: model\.norm\.weight"):
            engine.step(unequal_batches())


@pytest.mark.parametrize("device", DEVICES)
def test_attention_that_returns_nan_is_told_from_the_module_behind_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = sdpa(module, query, key, value, *args, **kwargs)
        return (found[0] * float("nan"), *found[1:]) if module.layer_idx == 1 else found

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with Engine.from_model(tiny_model(), device, "fp32") as engine:
        engine.step(unequal_batches())
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", broken)
        with pytest.raises(NonFinite, match=r"first not finite: the input of model\.layers\.1\.self_attn\.o_proj;"):
            engine.step(unequal_batches())


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_function_that_returns_nan_is_told_from_the_model(device: str) -> None:
    broken = 2

    def loss(log_probs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        nonlocal broken
        broken -= 1
        return -log_probs.sum() * (float("nan") if broken >= 0 else 1.0)

    with Engine.from_model(tiny_model(), device, "fp32") as engine:
        with pytest.raises(NonFinite, match="the loss is nan, although the outputs of all modules are finite; "):
            engine.step(unequal_batches(1), loss_fn=loss)
        broken = 1
        with pytest.raises(NonFinite, match="the loss is nan, and finite when computed again; nothing was"):
            engine.step(unequal_batches(1), loss_fn=loss)
        assert engine.step(unequal_batches(1), loss_fn=loss).tokens


@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_looking_for_the_cause_of_a_nonfinite_loss_leaves_no_trace(
    device: str, max_grad_norm: float | None, tmp_path: Path
) -> None:
    """Of all state on the disk, with dropout, with updates that waited to be applied."""

    def broken(log_probs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        return log_probs.sum() * float("nan")

    on_disk = Placement(weights="disk", low_bits="disk", moments="disk", gradients="disk")
    update: UpdateTime = "next_forward" if max_grad_norm else "during_backward"
    policy = Policy(placements=(on_disk,) * 5, shares_memory=device == "cpu", update=update)
    found = []
    for fails in (False, True):
        model = tiny_model(attention_dropout=0.3)
        adamw = AdamW(lr=0.1)
        with Engine.from_model(model, device, "bf16", adamw, max_grad_norm, policy, disk=tmp_path) as engine:
            for _ in range(2):
                engine.step(unequal_batches())
                if fails:
                    with pytest.raises(NonFinite, match="the outputs of all modules are finite"):
                        engine.step(unequal_batches(3), loss_fn=broken)
            found.append(engine.master_weights())
    assert equal(*found)


@pytest.mark.parametrize("device", DEVICES)
def test_nonfinite_gradients_are_not_applied_and_training_continues(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.engine import gradient_accumulation as sums

    with Engine.from_model(tiny_model(), device, "fp32", AdamW(lr=0.1)) as engine:
        engine.step(unequal_batches())
        before = engine.master_weights()
        finish = sums.GradientAccumulator.finish

        def poisoned(self: sums.GradientAccumulator) -> list[str]:
            for name, view in self._views.items():
                if name.endswith("layers.1.mlp.up_proj.weight"):
                    view *= float("inf")
            return finish(self)

        monkeypatch.setattr(sums.GradientAccumulator, "finish", poisoned)
        named = r"model.layers.1: the gradient is not finite for model.layers.1.mlp.up_proj.weight; nothing was updated"
        with pytest.raises(NonFinite, match=named):
            engine.step(unequal_batches())
        assert equal(engine.master_weights(), before)
        monkeypatch.undo()
        engine.step(unequal_batches())
        after = engine.master_weights()
    with Engine.from_model(tiny_model(), device, "fp32", AdamW(lr=0.1)) as engine:
        engine.step(unequal_batches())
        engine.step(unequal_batches())
        assert equal(engine.master_weights(), after), "the failed step must leave no trace"


@pytest.mark.parametrize("device", DEVICES)
def test_without_clipping_the_error_lists_units_already_updated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.engine import gradient_accumulation as sums

    finish = sums.GradientAccumulator.finish

    def poisoned(self: sums.GradientAccumulator) -> list[str]:
        for name, view in self._views.items():
            if "embed" in name:
                view *= float("nan")
        return finish(self)

    monkeypatch.setattr(sums.GradientAccumulator, "finish", poisoned)
    engine = Engine.from_model(tiny_model(), device, "fp32", max_grad_norm=None)
    with engine, pytest.raises(NonFinite, match=r"already updated: .*epilogue.*set max_grad_norm"):
        engine.step(unequal_batches())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.timeout(60)
def test_a_background_failure_is_raised_and_the_next_step_works(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.from_model(tiny_model(), device, optimizer=AdamW(lr=0.1)) as engine:
        engine.step(unequal_batches())
        update = StreamedOptimizer.update
        calls = []

        def failing(self: StreamedOptimizer, unit: int, *arguments: Any) -> None:
            calls.append(unit)
            if len(calls) == 3:
                raise RuntimeError("the third update fails")
            update(self, unit, *arguments)

        monkeypatch.setattr(StreamedOptimizer, "update", failing)
        with pytest.raises(StreamFailed, match=r"op UPDATE u\d on stream host.*the third update fails") as caught:
            engine.step(unequal_batches())
        assert isinstance(caught.value.__cause__, RuntimeError)
        monkeypatch.undo()
        engine.weights.flush()
        after_one = engine.master_weights()
    with Engine.from_model(tiny_model(), device, optimizer=AdamW(lr=0.1)) as engine:
        engine.step(unequal_batches())
        assert equal(engine.master_weights(), after_one), "each unit is updated once, by the failed step or the flush"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.timeout(60)
def test_a_failure_in_a_layer_names_the_op_and_returns_every_lease(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.from_model(tiny_model(), device) as engine:

        def failing(*_: object) -> Tensor:
            raise RuntimeError("no such kernel")

        monkeypatch.setattr(type(engine.parts.ported), "layer", failing)
        with pytest.raises(StreamFailed, match="op FORWARD u1 m1 on stream compute: RuntimeError: no such kernel"):
            engine.step(unequal_batches())
        assert engine.parts.pool.leases == 0
        monkeypatch.undo()
        assert engine.step(unequal_batches()).tokens > 0


def test_contradictory_options_are_refused() -> None:
    with pytest.raises(PlanError, match="numerics"):
        Engine.from_model(tiny_model(), precision="fp32", numerics=Numerics("bf16"))
    with pytest.raises(PlanError, match="exact global norm"):
        Engine.from_model(tiny_model(), policy=Policy(update="during_backward"))
    with pytest.raises(PlanError, match="does not compute in host memory"):
        Engine.from_model(tiny_model(), "sim:0", policy=Policy(shares_memory=True))
    with pytest.raises(ConfigError, match="max_grad_norm"):
        Engine.from_model(tiny_model(), max_grad_norm=0.0)


def test_a_refused_engine_releases_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ConfigError("on purpose")

    monkeypatch.setattr("megatrain.train.optimizer.trained_parameters", refused)
    device = SimDevice(1)
    with pytest.raises(ConfigError, match="on purpose"):
        Engine.from_model(tiny_model(), device, verify=False)
    assert not any(device._owners.values())
    assert not device.host.locked
    device.close()


def test_returned_logits_belong_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an op's memory belongs to its stream, which reuses it even if another stream still reads it."""
    with Engine.from_model(tiny_model(), "sim:3", "fp32", verify=False) as engine:
        made: list[Tensor] = []
        head = engine.parts.ported.head

        def noting(*given: Any) -> Tensor:
            made.append(head(*given))
            return made[-1]

        monkeypatch.setattr(engine.parts.ported, "head", noting)
        found = engine.logits({"input_ids": good()["input_ids"]})
    assert torch.equal(found.flatten(0, 1), made[0])
    assert found.untyped_storage().data_ptr() != made[0].untyped_storage().data_ptr()


def test_an_update_that_fails_halfway_is_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of its elements it has changed is not known."""
    honest, failures = optimizer.update_on_host, iter([MemoryError("none left")])

    def failing(state: Any, values: Any, scalars: Any, segments: Any, threads: int) -> None:
        honest(state, values, scalars, segments[:1], threads)
        if failure := next(failures, None):
            raise failure
        honest(state, values, scalars, segments[1:], threads)

    with Engine.from_model(tiny_model(), optimizer=AdamW(lr=0.1)) as engine:
        engine.step([good()])
        monkeypatch.setattr(optimizer, "update_on_host", failing)
        with pytest.raises(StreamFailed, match="none left"):
            engine.step([good()])
        for call in (lambda: engine.step([good()]), engine.weights.flush, lambda: engine.evaluate([good()])):
            with pytest.raises(NonFinite, match="has changed only parts of these units"):
                call()


@pytest.mark.parametrize("device", ["cpu", "sim:3"])
def test_a_backward_pass_left_in_the_middle_leaves_no_gradient_behind(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves and sums outlive a step: Ctrl-C before a leaf's gradient is taken, or before one in its sum is."""
    from megatrain.engine import gradient_accumulation as sums

    take, left, policy = sums.GradientAccumulator.accumulate, list[str](), Policy(shares_memory=device == "cpu")

    def interrupted(self: sums.GradientAccumulator, name: str, leaf: Tensor) -> None:
        left.append(name)
        if len(left) == 13:
            raise KeyboardInterrupt
        take(self, name, leaf)

    monkeypatch.setattr(sums.GradientAccumulator, "accumulate", interrupted)
    with Engine.from_model(tiny_model("llama-tied"), device, "fp32", policy=policy, verify=False) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.gradients(unequal_batches())
        found = engine.gradients(unequal_batches())
    with Engine.from_model(tiny_model("llama-tied"), device, "fp32", policy=policy, verify=False) as engine:
        for name, gradient in engine.gradients(unequal_batches()).items():
            assert torch.equal(found[name], gradient), name
