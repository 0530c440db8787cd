"""A `transformers.Trainer` script on the engine: same losses, logs, callback calls, checkpoints and model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from megatrain import AdamW, Engine, Muon
from megatrain.errors import CheckpointError, ConfigError, ModelError, NonFinite
from megatrain.hf import StreamedTrainer, streamed
from megatrain.hf.model import LazyParameter
from tests.tiny import VOCAB, relative_error, tiny_model

pytest.importorskip("accelerate", reason="a Trainer needs accelerate")
pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings, which change with each release

QUICK: dict[str, Any] = {"engine_options": {"verify": False}}


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows of equal length with prompts of different lengths, so that micro-batches differ in target tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(3, VOCAB, (10,), generator=generator)
        labels = ids.clone()
        labels[: 1 + number % 7] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


class Seen(TrainerCallback):
    """Records the callback calls in order, with step and epoch."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, float | None]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def called(args: Any, state: Any, control: Any, **given: Any) -> None:
            self.calls.append((name, state.global_step, state.epoch))

        return called


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
        "max_grad_norm": 0.5, "max_steps": 10, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 4,
        "save_steps": 5, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 7,
        "per_device_eval_batch_size": 3,
    }  # fmt: skip
    return TrainingArguments(**{**usual, **changes})


def run(kind: type, folder: Path, model: Any = None, resume: Any = None, **changes: Any) -> tuple[Any, Seen]:
    """The script: train and save the model."""
    seen = Seen()
    more = dict(changes.pop("more", {}))
    callbacks = [seen, *more.pop("callbacks", [])]
    if kind is not Trainer:
        more = {**QUICK, **more}
    trainer = kind(
        model=tiny_model(changes.pop("family", "llama")) if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=rows(18, 1),
        eval_dataset=rows(7, 2),
        callbacks=callbacks,
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    return trainer, seen


def history(trainer: Any, *names: str) -> list[dict[str, float]]:
    return [{n: entry[n] for n in names if n in entry} for entry in trainer.state.log_history]


def assert_equal_histories(ours: Any, stock: Any) -> None:
    """Losses to 1e-5; keys, rates, epochs and steps exactly."""
    assert len(ours.state.log_history) == len(stock.state.log_history)
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        assert mine.keys() == theirs.keys()
        for name in ("step", "epoch", "learning_rate"):
            assert mine.get(name) == theirs.get(name)
        for name in ("loss", "eval_loss", "train_loss", "grad_norm"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5), (name, theirs)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_a_script_matches_its_stock_run(tmp_path: Path) -> None:
    """Ten float32 steps with gradient accumulation over an uneven epoch, clipping, cosine, evaluation, checkpoints."""
    stock, their_calls = run(Trainer, tmp_path / "stock")
    ours, our_calls = run(StreamedTrainer, tmp_path / "ours")
    assert_equal_histories(ours, stock)
    assert any("eval_loss" in entry for entry in stock.state.log_history)
    assert our_calls.calls == their_calls.calls
    for name in ("final", "checkpoint-10"):
        mine, theirs = weights_of(tmp_path / "ours" / name), weights_of(tmp_path / "stock" / name)
        assert mine.keys() == theirs.keys()
        assert max(relative_error(mine[key], theirs[key]) for key in theirs) < 1e-5
    written = {path.name for path in (tmp_path / "stock" / "final").iterdir()}
    assert written <= {path.name for path in (tmp_path / "ours" / "final").iterdir()}
    for folder in ("ours", "stock"):
        assert (tmp_path / folder / "checkpoint-5" / "trainer_state.json").is_file()
    after = dict(ours.model.named_parameters())  # the user's model is trained, as a script expects
    assert all(torch.equal(after[key], value) for key, value in weights_of(tmp_path / "ours" / "final").items())
    assert ours.model(input_ids=torch.tensor([[5, 6]])).logits.shape == (1, 2, VOCAB)


def test_a_resumed_run_ends_bit_for_bit_equal(tmp_path: Path) -> None:
    whole, _ = run(StreamedTrainer, tmp_path / "run")
    expected = weights_of(tmp_path / "run" / "final")
    again, _ = run(StreamedTrainer, tmp_path / "again", resume=str(tmp_path / "run" / "checkpoint-5"))
    found = weights_of(tmp_path / "again" / "final")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
    assert history(again, *names)[:-1] == history(whole, *names)[:-1]


def test_stock_checkpoints_without_an_optimizer_are_refused(tmp_path: Path) -> None:
    run(Trainer, tmp_path / "stock", max_steps=5, save_only_model=True)
    with pytest.raises(CheckpointError, match=r"has no complete engine state.*start from its weights as a model"):
        run(StreamedTrainer, tmp_path / "a", resume=str(tmp_path / "stock" / "checkpoint-5"))


def named(folder: Path, family: str = "llama", **changes: Any) -> str:
    """The path of a saved model."""
    tiny_model(family, **changes).save_pretrained(folder / "model")
    return str(folder / "model")


def test_a_model_name_trains_like_the_loaded_model_without_loading_it_whole(tmp_path: Path) -> None:
    model = named(tmp_path, "qwen3-tied")
    ours, _ = run(StreamedTrainer, tmp_path / "a", family="qwen3-tied", max_steps=4, eval_strategy="no")
    streams, _ = run(StreamedTrainer, tmp_path / "b", model=model, max_steps=4, eval_strategy="no")
    assert all(isinstance(parameter, LazyParameter) for parameter in streams.model.parameters())  # nobody has read one
    assert history(streams, "loss")[:-1] == history(ours, "loss")[:-1]
    mine, theirs = weights_of(tmp_path / "b" / "final"), weights_of(tmp_path / "a" / "final")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_model_by_name_can_be_read_before_and_after_training(tmp_path: Path) -> None:
    """Parameters, forward and `generate`; after training with the trained weights, in the engine's own memory."""
    stock = tiny_model()
    trainer = StreamedTrainer(
        model=named(tmp_path), args=arguments(tmp_path, max_steps=2, eval_strategy="no"), train_dataset=rows(8, 1),
        **QUICK,
    )  # fmt: skip
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    assert all(torch.equal(before[name], value) for name, value in stock.named_parameters())
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(trainer.model(ids).logits, stock.eval()(ids).logits)
    trainer.train()
    trainer.model.eval()
    expected = trainer.engine.generate(ids, max_new_tokens=4)
    assert torch.equal(trainer.model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    for name, parameter in trainer.model.named_parameters():
        assert not torch.equal(parameter, before[name])
        assert parameter.data_ptr() == trainer.engine.weights.view(name).data_ptr()


def test_weights_read_before_training_are_memory_mapped(tmp_path: Path) -> None:
    trainer = StreamedTrainer(
        model=named(tmp_path, hidden_size=256),
        args=arguments(tmp_path, eval_strategy="no"),
        train_dataset=rows(4, 1),
        **QUICK,
    )
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    assert bool(weight.isfinite().all())
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if line.endswith(str(tmp_path / "model/model.safetensors"))]
    assert any(int(start, 16) <= weight.data_ptr() < int(stop, 16) for start, stop in spans)


@pytest.mark.parametrize("by_name", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_settings_made_before_training_reach_the_engine(tmp_path: Path, by_name: bool) -> None:
    """A changed config, a frozen parameter, changed weights, and a resized vocabulary."""
    made = []
    for kind in (Trainer, StreamedTrainer):
        model: Any = tiny_model("mixtral") if kind is Trainer or not by_name else named(tmp_path, "mixtral")
        trainer: Any = kind(
            model=model,
            args=arguments(tmp_path / kind.__name__, max_steps=3, eval_strategy="no", save_strategy="no"),
            train_dataset=rows(12, 1),
            **({} if kind is Trainer else QUICK),
        )
        trainer.model.config.output_router_logits = True
        trainer.model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
        with torch.no_grad():
            trainer.model.get_output_embeddings().weight.zero_()
            trainer.model.get_input_embeddings().weight[VOCAB:] = 0.01
        trainer.model.model.norm.weight.requires_grad_(False)
        trainer.train()
        made.append(trainer)
    stock, ours = made
    assert_equal_histories(ours, stock)
    mine, theirs = dict(ours.model.named_parameters()), dict(stock.model.named_parameters())
    assert max(relative_error(mine[name], theirs[name]) for name in theirs) < 1e-5


def test_the_router_auxiliary_loss_matches_the_stock_trainer(tmp_path: Path) -> None:
    """It is added whole to each of two micro-batches with different numbers of target tokens."""
    stock, _ = run(Trainer, tmp_path / "stock", family="mixtral-balanced", max_steps=4, save_strategy="no")
    ours, _ = run(StreamedTrainer, tmp_path / "ours", family="mixtral-balanced", max_steps=4, save_strategy="no")
    assert_equal_histories(ours, stock)


def trained(folder: Path) -> Any:
    trainer = StreamedTrainer(
        model=tiny_model(), args=arguments(folder, max_steps=2, eval_strategy="no", save_strategy="no"),
        train_dataset=rows(8, 1), eval_dataset=rows(4, 2), **QUICK,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_weights_changed_after_training_are_used_next(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()
    trainer.model.model.norm.weight.data = torch.zeros(32)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(torch.tensor(VOCAB).log().item(), rel=1e-5)
    trainer.save_model(str(tmp_path / "final"))
    assert not weights_of(tmp_path / "final")["model.norm.weight"].any()


def test_config_changes_that_affect_numerics_are_refused(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    trainer.model.config.eos_token_id = 7
    trainer.model.generation_config.max_length = 17
    trainer.save_model(str(tmp_path / "final"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert (saved.config.eos_token_id, saved.generation_config.max_length) == (7, 17)
    trainer.model.config.rms_norm_eps = 0.5
    with pytest.raises(
        ConfigError, match=r"config\.rms_norm_eps was 1e-06 when the engine was created and is 0\.5 now"
    ):
        trainer.evaluate()


def test_dtypes_follow_one_rule_for_names_and_loaded_models(tmp_path: Path) -> None:
    """Weights in bfloat16, or rounded to it, train in bfloat16; float16 is refused."""
    losses = []
    for by_name in (True, False):

        def trainer(dtype: torch.dtype, by_name: bool = by_name) -> Any:
            args: Any = arguments(tmp_path, max_steps=2, eval_strategy="no", save_strategy="no")
            args.model_init_kwargs = {"dtype": dtype}  # as TRL's arguments have them
            folder = named(tmp_path, "gemma2")
            model = folder if by_name else AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            return StreamedTrainer(model=model, args=args, train_dataset=rows(8, 1), **QUICK)

        with pytest.raises(ConfigError, match=r"weights in float16; load them with dtype=torch\.float32"):
            trainer(torch.float16)
        made = trainer(torch.bfloat16)
        made.train()
        assert (made.engine.numerics.precision, made.model.dtype) == ("bf16", torch.bfloat16)
        weight = made.model.model.norm.weight
        assert bool(weight.isfinite().all())
        assert weight.data_ptr() == made.engine.weights.view("model.norm.weight").data_ptr()
        made.save_model(str(tmp_path / "final"))
        assert weights_of(tmp_path / "final")["model.norm.weight"].dtype == torch.bfloat16
        losses.append(history(made, "loss", "grad_norm")[:-1])
    assert losses[0] == losses[1]


def test_a_stock_trainer_explains_why_it_cannot_resume_our_checkpoint(tmp_path: Path) -> None:
    run(StreamedTrainer, tmp_path / "ours", max_steps=5, eval_strategy="no")
    with pytest.raises(ValueError, match="moments are in MegaTrain's files: resume with megatrain"):
        run(Trainer, tmp_path / "stock", resume=str(tmp_path / "ours" / "checkpoint-5"))


def test_a_custom_forward_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without trainers' wrappers such as autocast; the engine decides whether it is supported."""
    model = tiny_model()
    plain, seen = model.forward, []

    @wraps(plain)
    def own(*given: Any, **inputs: Any) -> Any:
        return plain(*given, **inputs)

    model.forward = own
    args = arguments(tmp_path, bf16=True, max_steps=1, eval_strategy="no")
    stock = Trainer(model=model, args=args, train_dataset=rows(4, 1), eval_dataset=rows(4, 1))
    stock.evaluate()  # accelerate puts autocast around it
    assert model.forward is not own
    trainer = StreamedTrainer(model=model, args=args, train_dataset=rows(4, 1), **QUICK)
    monkeypatch.setattr(Engine, "from_model", lambda given, **_: seen.append(given.__dict__["forward"]))
    with pytest.raises(AttributeError):
        trainer.train()
    assert seen == [own]


@pytest.mark.slow
def test_label_smoothing_and_the_best_model(tmp_path: Path) -> None:
    """The largest loss counts as the best, so that an earlier model is loaded at the end."""
    changes = {
        "label_smoothing_factor": 0.1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "greater_is_better": True, "save_steps": 4, "max_steps": 8,
    }  # fmt: skip
    stock, _ = run(Trainer, tmp_path / "stock", **changes)
    ours, _ = run(StreamedTrainer, tmp_path / "ours", **changes)
    assert_equal_histories(ours, stock)
    assert ours.state.best_model_checkpoint.endswith("checkpoint-4")
    mine, kept = weights_of(tmp_path / "ours" / "final"), weights_of(tmp_path / "ours" / "checkpoint-4")
    assert all(torch.equal(mine[name], kept[name]) for name in kept)
    assert ours.evaluate()["eval_loss"] == pytest.approx(ours.state.best_metric, rel=1e-6)


def test_a_custom_loss(tmp_path: Path) -> None:
    plain, _ = run(StreamedTrainer, tmp_path / "a", max_steps=3)
    mine, _ = run(StreamedTrainer, tmp_path / "b", max_steps=3, more={"loss_fn": lambda found, batch: -2 * found.sum()})
    assert history(mine, "loss")[0]["loss"] == pytest.approx(2 * history(plain, "loss")[0]["loss"], rel=1e-5)


def test_a_nonfinite_loss_names_the_first_module_in_training_and_evaluation(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[5] = 3e38  # its output overflows
    says = "the loss is (nan|inf), first not finite: the output of lm_head; "
    with pytest.raises(NonFinite, match=f"^{says}nothing was updated"):
        run(StreamedTrainer, tmp_path / "a", model)
    with pytest.raises(NonFinite, match=f"^evaluation: {says}"):
        run(StreamedTrainer, tmp_path / "b", model, eval_on_start=True, neftune_noise_alpha=5.0)


class OwnLoss(Trainer):
    def compute_loss(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


class Both(torch.optim.Optimizer):
    """A stock trainer's way to two optimizers: one that has the groups of both."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = iter(self.param_groups)  # other ones than at first, since accelerate loads a state into its optimizer
        for each in self.optimizers:
            each.param_groups = [next(groups) for _ in each.param_groups]
            each.step()


def of_torch(model: Any, muon: Muon) -> Both:
    """As users of `torch.optim.Muon` set it up."""
    named = dict(model.named_parameters())
    matrices = [named.pop(name) for name in list(named) if "proj" in name]
    vectors, others = ([p for p in named.values() if (p.ndim < 2) is small] for small in (True, False))
    adamw, keys = muon.elementwise, ("lr", "weight_decay", "momentum", "nesterov", "adjust_lr_fn")
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": others, "weight_decay": adamw.weight_decay}]
    return Both(
        torch.optim.Muon(matrices, **{key: getattr(muon, key) for key in keys}),
        torch.optim.AdamW(groups, adamw.lr, adamw.betas, adamw.eps),
    )


def test_muon_follows_the_schedule_as_beside_torchs_adamw(tmp_path: Path) -> None:
    """But for last bits in bfloat16, in which matrices are made orthogonal."""
    adamw = AdamW(lr=5e-3, weight_decay=0.3, no_decay=("vectors",))
    muon = Muon(lr=0.02, adjust_lr_fn="original", adamw=adamw)
    model, how = tiny_model(), {"learning_rate": 0.02, "max_steps": 6, "eval_strategy": "no"}
    run(Trainer, tmp_path / "stock", model, more={"optimizers": (of_torch(model, muon), None)}, **how)
    ours, _ = run(StreamedTrainer, tmp_path / "ours", more={"engine_options": {"optimizer": muon}}, **how)
    for name, of_torch_ in weights_of(tmp_path / "stock" / "final").items():
        assert (
            relative_error(weights_of(tmp_path / "ours" / "final")[name], of_torch_) < 0.05
        )  # at the peak rate all along: 0.3
    again, _ = run(
        StreamedTrainer,
        tmp_path / "again",
        more={"engine_options": {"optimizer": muon}},
        resume=str(tmp_path / "ours" / "checkpoint-5"),
        **how,
    )
    assert history(again, "loss", "learning_rate")[-1] == history(ours, "loss", "learning_rate")[-1]
    with pytest.raises(ConfigError, match=r"learning_rate=0.01 in the arguments, and lr=0.02 of Muon; set both"):
        run(StreamedTrainer, tmp_path / "x", more={"engine_options": {"optimizer": muon}}, learning_rate=0.01)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"optim": "sgd"}, "optim=sgd is not supported"),
        ({"torch_compile_mode": "max-autotune"}, "torch_compile is not supported"),
        ({"bf16_full_eval": True}, "bf16_full_eval is not supported.*set bf16"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size.*per_device_train_batch_size"),
        ({"more": {"compute_loss_func": lambda *_: None}}, "compute_loss_func is not supported.*loss_fn"),
        ({"more": {"optimizers": (None, object())}}, "optimizers are not supported"),
        (
            {"more": {"optimizers": (torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))], 0.02), None)}},
            r"optimizers are not supported; set optim \(or engine_options\['optimizer'\]\), learning",
        ),
        ({"more": {"model_init": tiny_model}}, "model_init"),
    ],
)
def test_unsupported_options_are_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        run(StreamedTrainer, tmp_path, **changes)


@pytest.mark.parametrize("given", ["SFTTrainer", dict, object(), None])
def test_only_trainer_classes_are_streamed(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"streamed: .* is not a trainer class; give the class"):
        streamed(given)
    assert streamed(StreamedTrainer) is StreamedTrainer
    with pytest.raises(ConfigError, match="engine_options: 'disk' is not valid; use a Mapping"):
        StreamedTrainer(engine_options="disk")


def test_a_trainer_with_a_custom_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OwnLoss\.compute_loss would not be run.*loss_fn"):
        streamed(OwnLoss)


class Uses(TrainerCallback):
    """Reads, runs, changes and saves the model between steps."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[float] = []
        self.said: list[list[int]] = []
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.seen += [parameter.norm().item() for parameter in model.parameters()]
        if state.global_step == 1:
            model.lm_head.weight.data.mul_(0.5)
        elif state.global_step == 2:
            model.model.norm.weight.data = torch.full((32,), 1.5)
        elif state.global_step == 3:
            model.save_pretrained(self.folder)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.said.append(model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False).flatten().tolist())


def test_using_the_model_between_steps_matches_a_stock_run(tmp_path: Path) -> None:
    """Callbacks read, run, change and save it."""
    used, made = [], []
    for kind in (Trainer, StreamedTrainer):
        uses = Uses(tmp_path / kind.__name__)
        trainer: Any = kind(
            model=tiny_model(),
            args=arguments(tmp_path / "run", max_steps=4, eval_steps=2, save_strategy="no"),
            train_dataset=rows(16, 1),
            eval_dataset=rows(4, 2),
            callbacks=[uses],
            **({} if kind is Trainer else QUICK),
        )
        trainer.train()
        used.append(uses)
        made.append(trainer)
    assert_equal_histories(made[1], made[0])
    assert used[1].seen == pytest.approx(used[0].seen, rel=1e-5)
    assert used[1].said == used[0].said
    mine, theirs = weights_of(tmp_path / "StreamedTrainer"), weights_of(tmp_path / "Trainer")
    assert max(relative_error(mine[name], theirs[name]) for name in theirs) < 1e-5


def test_reading_weights_does_not_undo_a_step(tmp_path: Path) -> None:
    """In bf16, reading a float32 weight makes a copy, which is outdated after the engine's next step."""
    trainer = StreamedTrainer(
        model=tiny_model(), args=arguments(tmp_path, bf16=True, eval_strategy="no"), train_dataset=rows(4, 1), **QUICK
    )
    trainer.train()
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.engine.step([{name: value[None] for name, value in rows(1, 3)[0].items()}], 1e-2)
    trainer.save_model(str(tmp_path / "final"))
    saved = weights_of(tmp_path / "final")
    assert not torch.equal(saved["lm_head.weight"], before["lm_head.weight"])
    assert torch.equal(saved["lm_head.weight"], trainer.engine.weights["lm_head.weight"])
    twin = copy.deepcopy(trainer.model)
    assert torch.equal(twin.lm_head.weight, saved["lm_head.weight"])


@pytest.mark.parametrize(
    "use",
    [StreamedTrainer.evaluate, StreamedTrainer.save_model, lambda trainer: trainer.model.lm_head.weight.norm()],
    ids=["evaluate", "save", "read"],
)
def test_the_model_is_not_used_before_the_optimizers_step(tmp_path: Path, use: Callable[[Any], object]) -> None:
    """The state is that of the step that the trainer has not counted yet."""

    class Early(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            use(found[0])

    found: list[Any] = []
    args = arguments(tmp_path, eval_strategy="no", save_strategy="no", max_steps=1)
    data = {"train_dataset": rows(4, 1), "eval_dataset": rows(3, 2)}
    found.append(StreamedTrainer(model=tiny_model(), args=args, callbacks=[Early()], **data, **QUICK))
    with pytest.raises(ModelError, match=r"weights have been updated already.*from on_optimizer_step on"):
        found[0].train()


class Terminated(TrainerCallback):
    """In place of a SIGTERM in the fourth step, and the seconds that the library waits after it."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            self.jit.jit_manager.is_checkpoint_requested = True

    jit: Any = None


@pytest.mark.parametrize("kind", [StreamedTrainer, pytest.param(Trainer, marks=pytest.mark.slow)])
def test_a_checkpoint_on_sigterm_resumes_to_the_whole_run(tmp_path: Path, kind: type) -> None:
    def made(**more: Any) -> Any:
        args = arguments(tmp_path, eval_strategy="no", save_strategy="no", enable_jit_checkpoint=True, max_steps=8)
        more |= QUICK if kind is StreamedTrainer else {}
        return kind(model=tiny_model(), args=args, train_dataset=rows(18, 1), **more)

    whole, cut = made(), made(callbacks=[terminated := Terminated()])
    whole.train()
    (terminated.jit,) = (each for each in cut.callback_handler.callbacks if hasattr(each, "jit_manager"))
    cut.train()
    (kept,) = tmp_path.glob("checkpoint-*")
    again = made()
    again.train(resume_from_checkpoint=str(kept))
    found, expected = (
        {entry["step"]: entry["loss"] for entry in history(each, "step", "loss") if "loss" in entry}
        for each in (again, whole)
    )
    assert len(found) >= 7  # a checkpoint at a step's end comes before its log
    assert expected | found == expected
