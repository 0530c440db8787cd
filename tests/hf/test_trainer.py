"""A `transformers.Trainer` script through the engine: the same losses, logs, calls, checkpoints and model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from megatrain.errors import CheckpointError, ConfigError, MegaTrainError, ModelError
from megatrain.hf import StreamedTrainer, streamed
from tests.tiny import VOCAB, relative_error, tiny_model

pytest.importorskip("accelerate", reason="a Trainer needs accelerate")
pytestmark = pytest.mark.filterwarnings("default")  # the library's own, of which some come with each release

QUICK: dict[str, Any] = {"engine_options": {"verify": False}}


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows of one length with prompts of several, so that micro-batches differ in their target tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(3, VOCAB, (10,), generator=generator)
        labels = ids.clone()
        labels[: 1 + number % 7] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


class Seen(TrainerCallback):
    """Remembers what is called, in order, with what a callback can see."""

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
    """The script: train, and save the model."""
    seen = Seen()
    more = dict(changes.pop("more", {}))
    if kind is not Trainer:
        more = {**QUICK, **more}
    trainer = kind(
        model=tiny_model(changes.pop("family", "llama")) if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=rows(18, 1),
        eval_dataset=rows(7, 2),
        callbacks=[seen],
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    return trainer, seen


def history(trainer: Any, *names: str) -> list[dict[str, float]]:
    return [{n: entry[n] for n in names if n in entry} for entry in trainer.state.log_history]


def assert_equal_histories(ours: Any, stock: Any) -> None:
    """Losses to 1e-5, and the same keys, rates, epochs and steps."""
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


def test_a_script_gives_what_it_gave(tmp_path: Path) -> None:
    """Ten steps with accumulation (of an uneven epoch), clipping, cosine, evaluation and checkpoints, in float32."""
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


def test_a_run_that_is_resumed_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole, _ = run(StreamedTrainer, tmp_path / "run")
    expected = weights_of(tmp_path / "run" / "final")
    again, _ = run(StreamedTrainer, tmp_path / "again", resume=str(tmp_path / "run" / "checkpoint-5"))
    found = weights_of(tmp_path / "again" / "final")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
    assert history(again, *names)[:-1] == history(whole, *names)[:-1]


def test_a_checkpoint_of_the_stock_trainer_is_refused_and_its_weights_are_not(tmp_path: Path) -> None:
    run(Trainer, tmp_path / "stock", max_steps=5)
    with pytest.raises(CheckpointError, match=r"holds no state of the engine.*start from its weights as a model"):
        run(StreamedTrainer, tmp_path / "a", resume=str(tmp_path / "stock" / "checkpoint-5"))


@pytest.mark.slow
def test_a_folder_in_place_of_a_model_is_never_loaded_and_gives_the_same(tmp_path: Path) -> None:
    tiny_model("qwen3-tied").save_pretrained(tmp_path / "model")
    ours, _ = run(StreamedTrainer, tmp_path / "a", family="qwen3-tied", eval_strategy="no")
    streams, _ = run(StreamedTrainer, tmp_path / "b", model=str(tmp_path / "model"), eval_strategy="no")
    assert history(streams, "loss")[:-1] == history(ours, "loss")[:-1]
    mine, theirs = weights_of(tmp_path / "b" / "final"), weights_of(tmp_path / "a" / "final")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(ModelError, match=r"weights are in the streaming engine.*trainer\.evaluate"):
        streams.model(input_ids=torch.tensor([[5, 6]]))


def test_label_smoothing_and_the_best_model(tmp_path: Path) -> None:
    """The loss falls, and the largest is called the best, so that an earlier model is loaded at the end."""
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


def test_metrics_of_predictions(tmp_path: Path) -> None:
    def right(predicted: Any) -> dict[str, float]:
        return {"right": float((predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]).mean())}

    changes: dict[str, Any] = {"more": {"compute_metrics": right}, "max_steps": 2, "eval_steps": 1}
    stock, _ = run(Trainer, tmp_path / "stock", **changes)
    ours, _ = run(StreamedTrainer, tmp_path / "ours", **changes)
    assert history(ours, "eval_right") == history(stock, "eval_right")
    assert any("eval_right" in entry for entry in ours.state.log_history)


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    plain, _ = run(StreamedTrainer, tmp_path / "a", max_steps=3)
    mine, _ = run(StreamedTrainer, tmp_path / "b", max_steps=3, more={"loss_fn": lambda found, batch: -2 * found.sum()})
    assert history(mine, "loss")[0]["loss"] == pytest.approx(2 * history(plain, "loss")[0]["loss"], rel=1e-5)


class OwnLoss(Trainer):
    def compute_loss(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"optim": "sgd"}, "optim=sgd cannot be honoured"),
        ({"torch_compile": True}, "torch_compile cannot be honoured"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size.*per_device_train_batch_size"),
        ({"more": {"compute_loss_func": lambda *_: None}}, "compute_loss_func cannot be honoured.*loss_fn"),
        ({"more": {"optimizers": (None, object())}}, "optimizers cannot be honoured"),
        ({"more": {"model_init": tiny_model}}, "model_init"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        run(StreamedTrainer, tmp_path, **changes)


def test_a_trainer_with_a_loss_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OwnLoss\.compute_loss would not be run.*loss_fn"):
        streamed(OwnLoss)


def test_a_model_that_is_run_while_it_trains_says_where_its_weights_are(tmp_path: Path) -> None:
    class Runs(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
            model.generate(torch.tensor([[5, 6]]), max_new_tokens=1)

    trainer = StreamedTrainer(
        model=tiny_model(), args=arguments(tmp_path, max_steps=1, eval_strategy="no"), train_dataset=rows(4, 1),
        callbacks=[Runs()], **QUICK,
    )  # fmt: skip
    with pytest.raises(MegaTrainError, match="its weights are in the streaming engine"):
        trainer.train()
    assert not any(bool(parameter.isnan().any()) for parameter in trainer.model.parameters())
