"""Changes to a trainer's model after its engine was created work as in a stock run, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from megatrain.checkpoint.folder import open_checkpoint
from megatrain.errors import ConfigError
from megatrain.hf import StreamedTrainer
from megatrain.hf.model_changes import refuse_changes, snapshot_of
from megatrain.hf.optimizer import EngineOptimizer
from megatrain.optim import AdamW, Lion, Muon, Optimizer
from megatrain.train.restore import optimizer_in
from tests.hf.test_trainer import QUICK, arguments, rows
from tests.tiny import relative_error, tiny_model

pytest.importorskip("accelerate", reason="a Trainer needs accelerate")
pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings, which change with each release

Change = Callable[[Any], Any]

CHANGES: dict[str, tuple[Change, str]] = {
    "unfrozen": (lambda m: m.lm_head.requires_grad_(True), r"lm_head\.weight\.requires_grad was False .* is True now"),
    "frozen": (lambda m: m.model.norm.requires_grad_(False), r"model\.norm\.weight\.requires_grad was True"),
    "gradient hook": (
        lambda m: m.model.embed_tokens.weight.register_hook(lambda g: g * 0),
        r"model\.embed_tokens\.weight\._backward_hooks has been added",
    ),
    "hook after accumulation": (
        lambda m: m.model.norm.weight.register_post_accumulate_grad_hook(lambda p: None),
        r"model\.norm\.weight\._post_accumulate_grad_hooks has been added",
    ),
    "hook": (
        lambda m: m.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out * 5),
        r"model\.layers\.1\.mlp\._forward_hooks has been added",
    ),
    "number": (
        lambda m: setattr(m.model.norm, "variance_epsilon", 10.0),
        r"model\.norm\.variance_epsilon was 1e-06 when the engine was created and is 10\.0 now",
    ),
    "a tensor for a number": (
        lambda m: setattr(m.model.norm, "variance_epsilon", torch.tensor(1e-6)),
        r"model\.norm\.variance_epsilon has been changed",
    ),
    "dropout": (
        lambda m: setattr(m.model.layers[0].self_attn, "attention_dropout", 0.9),
        r"model\.layers\.0\.self_attn\.attention_dropout was 0\.0 when .* is 0\.9 now",
    ),
    "another module": (
        lambda m: setattr(m.model.layers[1], "mlp", copy.deepcopy(m.model.layers[1].mlp)),
        r"model\.layers\.1\.mlp has been changed",
    ),
    "a module of another layer": (
        lambda m: setattr(m.model.layers[1], "mlp", m.model.layers[0].mlp),
        r"model\.layers\.1\.mlp has been changed",
    ),
    "one module more": (
        lambda m: m.model.norm.add_module("more", torch.nn.Identity()),
        r"model\.norm\.more has been added",
    ),
    "another class": (
        lambda m: setattr(m.model.norm, "__class__", type("Own", (type(m.model.norm),), {})),
        r"model\.norm has been changed",
    ),
    "a forward": (
        lambda m: setattr(m.model.layers[1].mlp, "forward", lambda x: x),
        r"model\.layers\.1\.mlp\.forward has been added",
    ),
    "the model's forward": (lambda m: setattr(m, "forward", lambda **_: None), r"model: forward has been added"),
    "a buffer": (lambda m: m.model.rotary_emb.inv_freq.mul_(2), r"model\.rotary_emb\.inv_freq has been changed"),
    "rounded": (lambda m: m.model.norm.to(torch.bfloat16), r"model\.norm\.weight\.dtype was torch\.float32 when"),
    "tied": (lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), r"lm_head\.weight has been removed"),
    "config": (lambda m: setattr(m.config, "rms_norm_eps", 0.5), r"config\.rms_norm_eps was 1e-06 .* is 0\.5 now"),
    "rope": (lambda m: m.config.rope_parameters.update(rope_theta=7.0), r"config\.rope_parameters has been changed"),
    "attention": (lambda m: m.set_attn_implementation("eager"), r"config\._attn_implementation was 'sdpa' .* 'eager'"),
    "loss": (lambda m: setattr(m, "loss_function", lambda *_, **__: 0), r"model: loss_function has been changed"),
}
"""Name -> the change, and the error message."""


class At(TrainerCallback):
    """Calls `change` at an event of a step."""

    def __init__(self, event: str, change: Callable[..., Any], step: int = 0) -> None:
        def called(args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == step:
                change(given["optimizer" if event == "on_train_begin" else "model"])

        setattr(self, event, called)


def trainer(folder: Path, *callbacks: Any, kind: type = StreamedTrainer, model: Any = None, **changes: Any) -> Any:
    args = arguments(folder, **{"max_steps": 3, "eval_strategy": "no", "save_strategy": "no", **changes})
    more: dict[str, Any] = {} if kind is Trainer else QUICK
    given, data = tiny_model() if model is None else model, {"train_dataset": rows(12, 1), "eval_dataset": rows(4, 2)}
    return kind(model=given, args=args, callbacks=[*callbacks], **data, **more)


def losses(of: Any) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", CHANGES)
def test_changes_to_the_model_are_named(name: str) -> None:
    model = tiny_model()
    model.lm_head.requires_grad_(False)
    before, (change, what) = snapshot_of(model), CHANGES[name]
    refuse_changes(before, snapshot_of(model))
    change(model)
    with pytest.raises(ConfigError, match=f"{what}.*; change it before the first train"):
        refuse_changes(before, snapshot_of(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.train(not m.training),
        lambda m: m.gradient_checkpointing_enable(),
        lambda m: m.enable_input_require_grads(),
        lambda m: m.model.embed_tokens.weight.data.mul_(2),
        lambda m: m.config.update({"use_cache": False, "eos_token_id": 3}),
        lambda m: m(torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]]), output_hidden_states=True).loss.backward(),
        lambda m: m.generate(torch.tensor([[5, 6]]), max_new_tokens=40, do_sample=False),
        lambda m: setattr(m.model.rotary_emb, "table", torch.ones(3)),
        lambda m: m.model.records.append(torch.ones(3)),
        lambda m: m.to(torch.float64).to(torch.float32),
        lambda m: m.register_forward_hook(lambda *_: None).remove(),
    ],
)
@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_harmless_changes_are_not_reported(rope: str, change: Change) -> None:
    """A mode, a cache, the libraries' hooks, a rotary embedding that adapts to the length."""
    scaling = {"rope_type": rope, "rope_theta": 1e4} | ({} if rope == "default" else {"factor": 2.0})
    model = tiny_model(rope_parameters=scaling, max_position_embeddings=16)
    model.model.records = []
    before = snapshot_of(model)
    change(model)
    refuse_changes(before, snapshot_of(model))


@pytest.mark.parametrize("name", ["unfrozen", "hook"])
def test_changes_by_a_callback_are_refused_at_that_step(tmp_path: Path, name: str) -> None:
    change, what = CHANGES[name]
    model = tiny_model()
    model.lm_head.requires_grad_(False)
    ours = trainer(tmp_path, At("on_step_begin", change, 1), model=model)
    with pytest.raises(ConfigError, match=what):
        ours.train()
    assert ours.engine.steps == 1


def test_changes_between_evaluation_and_training_are_refused(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    ours.evaluate()
    change, what = CHANGES["gradient hook"]
    change(ours.model)
    with pytest.raises(ConfigError, match=what):
        ours.train()


def test_a_custom_model_loss_function_is_refused(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    ours.model.loss_function = lambda *_, **__: 0
    with pytest.raises(ConfigError, match=r"its loss_function, <lambda>, would not be run; give loss_fn"):
        ours.train()
    ours.loss_fn = lambda found, batch: -found.sum()
    ours.train()


def set_groups(**values: Any) -> Change:
    def change(optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = values.pop("weight_decay", 0.1)
        for group in optimizer.param_groups:
            group.update(values)

    return change


@pytest.mark.parametrize(
    ("values", "norm"),
    [pytest.param({"weight_decay": 50.0}, 0.5, marks=pytest.mark.slow), ({"betas": (0.5, 0.6), "eps": 1e-2}, 0.0)],
)
def test_param_group_settings_match_the_stock_trainer(tmp_path: Path, values: dict[str, Any], norm: float) -> None:
    made = []
    for kind in (Trainer, StreamedTrainer):
        made.append(trainer(tmp_path, At("on_train_begin", set_groups(**values)), kind=kind, max_grad_norm=norm))
        made[-1].train()
    plain = trainer(tmp_path, max_grad_norm=norm)
    plain.train()
    assert losses(made[1]) == pytest.approx(losses(made[0]), rel=1e-5)
    assert losses(plain) != pytest.approx(losses(made[0]), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda o: o.param_groups[1].update(weight_decay=0.1), r"weight_decay=0\.1 in a group without weight decay"),
        (
            lambda o: o.param_groups[1].update(lr=1e-2),
            r"have different learning rates: \[.*; set rates by name in engine_options=.*learning_rates=\.\.\.",
        ),
        (lambda o: o.param_groups[1].update(eps=1e-2), r"have different values of eps: \[1e-08, 0\.01\]"),
        (lambda o: o.param_groups[0].update(amsgrad=True), r"amsgrad in a parameter group"),
        (lambda o: o.param_groups[0]["params"].pop(), r"moved to other groups"),
        (lambda o: o.add_param_group({"params": [torch.zeros(1)]}), r"moved to other groups"),
        (lambda o: o.param_groups[0].update(weight_decay=-1.0), r"weight_decay"),
    ],
)
def test_unsupported_param_group_settings_are_refused(tmp_path: Path, change: Change, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        trainer(tmp_path, At("on_train_begin", change)).train()


def test_param_groups_of_older_checkpoints_load() -> None:
    made = EngineOptimizer(tiny_model(), AdamW(1e-3, betas=(0.5, 0.6), no_decay=("*norm*",)))
    saved = made.state_dict()
    for group in saved["param_groups"]:
        del group["betas"], group["eps"]
    expected = made.algorithm
    made.load_state_dict(saved)
    assert made.algorithm == expected


class WithRates(Trainer):
    """The stock trainer with separate learning rates for the head and for norms, whose rate is 0."""

    def create_optimizer(self, model: Any = None) -> Any:
        others = [p for n, p in self.model.named_parameters() if "norm" not in n and "lm_head" not in n]
        norms = [p for n, p in self.model.named_parameters() if "norm" in n]
        groups = [
            {"params": others, "weight_decay": 0.1},
            {"params": norms, "lr": 0.0, "weight_decay": 0.0},
            {"params": list(self.model.lm_head.parameters()), "lr": 5e-2, "weight_decay": 0.1},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate)
        return self.optimizer


def test_per_parameter_rates_follow_the_scheduler(tmp_path: Path) -> None:
    """From a warm-up that starts at 0 to a rate that a callback sets at the end."""
    rates = (("*norm*", 0.0), ("lm_head*", 5e-2))
    made = AdamW(5e-3, weight_decay=0.1, no_decay=("*norm*",), learning_rates=rates)

    class Lowered(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            for group in given["optimizer"].param_groups:
                if state.global_step == 4 and any(each.shape == (96, 32) for each in group["params"][-1:]):
                    group["lr"] = 1e-3

    trained = []
    for kind in (WithRates, StreamedTrainer):
        more = {} if kind is WithRates else {"engine_options": {**QUICK["engine_options"], "optimizer": made}}
        ours = kind(
            model=tiny_model(), args=arguments(tmp_path, max_steps=5, eval_strategy="no", save_strategy="no"),
            train_dataset=rows(20, 1), callbacks=[Lowered()], **more,
        )  # fmt: skip
        ours.train()
        trained.append((ours, losses(ours), {name: p.detach().clone() for name, p in ours.model.named_parameters()}))
    (_, expected, weights), (ours, found, masters) = trained
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(relative_error(masters[name], weights[name]) < 1e-4 for name in weights)
    assert torch.equal(masters["model.norm.weight"], tiny_model().model.norm.weight)
    assert ours.engine.optimizer.learning_rates == (("*norm*", 0.0), ("lm_head*", 1e-3))


@pytest.mark.parametrize("rates", [(), (("*norm*", 1e-4), ("lm_head*", 5e-2))])
def test_a_checkpoint_holds_peak_learning_rates(rates: tuple[tuple[str, float], ...], tmp_path: Path) -> None:
    """Not those that the scheduler has come to: 0 at the last step, which nothing could be scaled from."""
    made = AdamW(5e-3, weight_decay=0.1, no_decay=("*norm*",), learning_rates=rates)
    args = arguments(tmp_path, max_steps=2, save_steps=1, eval_strategy="no", lr_scheduler_type="linear")
    options = {**QUICK["engine_options"], "optimizer": made}
    StreamedTrainer(model=tiny_model(), args=args, train_dataset=rows(8, 1), engine_options=options).train()
    for step in (1, 2):
        held = optimizer_in(open_checkpoint(tmp_path / f"checkpoint-{step}"))
        assert (held.lr, held.learning_rates) == (args.learning_rate, rates)


def test_engine_optimizer_options_are_kept(tmp_path: Path) -> None:
    made = AdamW(5e-3, betas=(0.5, 0.6), weight_decay=0.3, no_decay=("*norm*",))
    ours = StreamedTrainer(
        model=tiny_model(), args=arguments(tmp_path, max_steps=1, eval_strategy="no", weight_decay=0.0),
        train_dataset=rows(4, 1), engine_options={"verify": False, "optimizer": made},
    )  # fmt: skip
    ours.train()
    assert ours.engine.optimizer == made


@pytest.mark.parametrize(
    ("made", "given", "what"),
    [
        (AdamW(2e-3), {}, "learning_rate=0.005 in the arguments, and lr=0.002 of AdamW; set both to the peak$"),
        (AdamW(1e-3), {"learning_rate": 5e-5}, "learning_rate=5e-05 in the arguments, and lr=0.001 of AdamW"),
        (Lion(2e-4), {}, "learning_rate=0.005 in the arguments, and lr=0.0002 of Lion; set both"),
        (
            Muon(5e-3),
            {"weight_decay": 0.3},
            "weight_decay=0.3 in the arguments, and 0.1 of Muon; leave weight_decay out",
        ),
        (Muon(5e-3), {"adam_beta1": 0.5}, "adam_beta1=0.5 in the arguments, and 0.9 of Muon"),
        (
            Lion(5e-3),
            {"weight_decay": 0.0, "adam_epsilon": 1e-4},
            "adam_epsilon=0.0001 in the arguments, and none of Lion",
        ),
    ],
)
def test_arguments_and_an_optimizer_that_differ_are_refused(
    made: Optimizer, given: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """One of the two would be ignored."""
    options = {**QUICK["engine_options"], "optimizer": made}
    args = arguments(tmp_path, max_steps=1, eval_strategy="no", **given)
    trainer = StreamedTrainer(model=tiny_model(), args=args, train_dataset=rows(4, 1), engine_options=options)
    with pytest.raises(ConfigError, match=what):
        trainer.train()


@pytest.mark.parametrize(
    ("patterns", "what"),
    [
        (
            ("*o_proj*", "*q_proj*"),
            r"optimizer.pt: was saved with learning_rates for '\*q_proj\*', '\*o_proj\*', and now",
        ),
        ((), "and now they are for no pattern"),
    ],
)
def test_a_checkpoint_with_other_rate_patterns_is_refused(patterns: tuple[str, ...], what: str) -> None:
    """Groups are matched by position, so each would get the rate of another."""
    rates = {"*q_proj*": 1e-5, "*o_proj*": 1e-3}
    before = EngineOptimizer(tiny_model(), AdamW(learning_rates=tuple(rates.items()))).state_dict()
    EngineOptimizer(tiny_model(), AdamW(learning_rates=tuple(rates.items()))).load_state_dict(before)
    now = AdamW(learning_rates=tuple((pattern, rates[pattern]) for pattern in patterns))
    with pytest.raises(ConfigError, match=what):
        EngineOptimizer(tiny_model(), now).load_state_dict(before)
