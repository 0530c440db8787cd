"""What is changed in a trainer's model once there is an engine is honoured as in a stock run, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from megatrain.errors import ConfigError
from megatrain.hf import StreamedTrainer
from megatrain.hf.optimizer import EngineOptimizer
from megatrain.optim import AdamW
from tests.hf.test_trainer import QUICK, arguments, rows
from tests.tiny import tiny_model

pytest.importorskip("accelerate", reason="a Trainer needs accelerate")
pytestmark = pytest.mark.filterwarnings("default")  # the library's own, of which some come with each release

Change = Callable[[Any], Any]


class At(TrainerCallback):
    """Changes something, when its time has come."""

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


def set_groups(**values: Any) -> Change:
    def change(optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = values.pop("weight_decay", 0.1)
        for group in optimizer.param_groups:
            group.update(values)

    return change


@pytest.mark.parametrize("norm", [0.5, 0.0])
@pytest.mark.parametrize("values", [{"weight_decay": 50.0}, {"betas": (0.5, 0.6), "eps": 1e-2}])
def test_what_is_set_in_the_optimizers_groups_is_honoured(tmp_path: Path, values: dict[str, Any], norm: float) -> None:
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
        (lambda o: o.param_groups[1].update(weight_decay=0.1), r"weight_decay=0\.1 of the parameters that do not"),
        (lambda o: o.param_groups[1].update(eps=1e-2), r"have values of eps \[1e-08, 0\.01\]"),
        (lambda o: o.param_groups[0].update(amsgrad=True), r"amsgrad of a group"),
        (lambda o: o.param_groups[0]["params"].pop(), r"put into other groups"),
        (lambda o: o.add_param_group({"params": [torch.zeros(1)]}), r"put into other groups"),
        (lambda o: o.param_groups[0].update(weight_decay=-1.0), r"weight_decay"),
    ],
)
def test_what_groups_cannot_have_is_refused(tmp_path: Path, change: Change, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        trainer(tmp_path, At("on_train_begin", change)).train()


def test_groups_of_an_older_checkpoint_are_taken() -> None:
    made = EngineOptimizer(tiny_model(), AdamW(1e-3, betas=(0.5, 0.6), no_decay=("*norm*",)))
    saved = made.state_dict()
    for group in saved["param_groups"]:
        del group["betas"], group["eps"]
    expected = made.adamw
    made.load_state_dict(saved)
    assert made.adamw == expected


def test_an_optimizer_of_the_engines_options_stays(tmp_path: Path) -> None:
    made = AdamW(1e-3, betas=(0.5, 0.6), weight_decay=0.3, no_decay=("*norm*",))
    ours = StreamedTrainer(
        model=tiny_model(), args=arguments(tmp_path, max_steps=1, eval_strategy="no"), train_dataset=rows(4, 1),
        engine_options={"verify": False, "optimizer": made},
    )  # fmt: skip
    ours.train()
    assert ours.engine.optimizer == made
