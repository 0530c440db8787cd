"""Every option of the installed `TrainingArguments` and `SFTConfig` is in the table and does what it says."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.integrations.neftune import neftune_post_forward_hook
from trl import SFTConfig

from megatrain.engine.context import call_seed
from megatrain.errors import ConfigError
from megatrain.hf import StreamedTrainer
from megatrain.hf.trainer import Streamed
from megatrain.hf.training_options import OPTIONS, SFT, TRAINING, refuse_arguments
from tests.hf.test_trainer import QUICK, arguments, history, rows, run
from tests.tiny import tiny_model

pytest.importorskip("accelerate", reason="a Trainer needs accelerate")
pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings, which change with each release

REFUSED: dict[str, Any] = {
    "optim": "adafactor", "optim_target_modules": ["mlp"], "fp16": True, "fp16_full_eval": True,
    "torch_compile": True, "use_liger_kernel": True,
    "auto_find_batch_size": True, "parallelism_config": object(), "label_names": ["start_positions"],
    "ddp_find_unused_parameters": True, "fsdp": True, "deepspeed": "zero3.json", "debug": ["underflow_overflow"],
}  # fmt: skip
"""A refused value of each option that is refused with one process."""

COMPARED: tuple[dict[str, Any], ...] = (
    {
        "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 1.5,
        "learning_rate": 2e-3, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0},
        "warmup_steps": 1, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-4,
        "max_grad_norm": 0.2, "optim": "adamw_torch", "average_tokens_across_devices": False,
        "logging_first_step": True, "logging_nan_inf_filter": False, "include_num_input_tokens_seen": "all",
        "eval_steps": 2, "eval_on_start": True, "per_device_eval_batch_size": 2, "prediction_loss_only": True,
        "data_seed": 3, "seed": 11, "dataloader_drop_last": True, "save_only_model": True, "save_steps": 2,
        "save_total_limit": 1,
    },
    {
        "label_smoothing_factor": 0.2, "max_steps": 2, "gradient_accumulation_steps": 1, "eval_steps": 2,
        "max_grad_norm": 0.0, "remove_unused_columns": False, "load_best_model_at_end": True, "save_steps": 2,
        "use_cache": True, "activation_checkpointing": True, "label_names": ["labels"], "torch_empty_cache_steps": 1,
    },
    {
        "max_steps": 4, "eval_steps": 2, "train_sampling_strategy": "group_by_length", "length_column_name": "size",
        "dataloader_num_workers": 1, "dataloader_prefetch_factor": 3,
        "dataloader_multiprocessing_context": "fork", "dataloader_in_order": False, "dataloader_pin_memory": False,
        "skip_memory_metrics": False, "eval_delay": 3, "logging_steps": 2, "log_level": "error", "do_train": True,
    },
    {
        "max_steps": 4, "eval_steps": 2, "save_strategy": "best", "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": True, "train_sampling_strategy": "sequential",
        "logging_strategy": "steps", "eval_strategy": "steps",
    },
    {"max_steps": 4, "eval_steps": 2, "full_determinism": True},
)  # fmt: skip
"""Settings under which a stock and a streamed run have the same logs."""

MEASURED: tuple[dict[str, Any], ...] = (
    {"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1},
    {"include_for_metrics": ["loss"], "batch_eval_metrics": True},
    {"eval_do_concat_batches": False, "eval_use_gather_object": True},
)
"""Settings under which metrics are computed from the same values."""

ELSEWHERE = {
    "other tests": "bf16 bf16_full_eval enable_jit_checkpoint neftune_noise_alpha",
    "tests of whole scripts and of their ranks": "output_dir resume_from_checkpoint ignore_data_skip use_cpu "
    "accelerator_config save_on_each_node ddp_backend ddp_timeout restore_callback_states_from_checkpoint",
    "what the library's own callbacks and uploads read": "disable_tqdm report_to run_name project trackio_space_id "
    "trackio_bucket_id trackio_static_space_id log_level_replica log_on_each_node push_to_hub hub_token "
    "hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
    "what scripts or the arguments themselves read": "do_eval do_predict local_rank tf32",
    "PyTorch waits seconds for such workers to end": "dataloader_persistent_workers",
}
"""Options that are said to be the same as in the stock trainer and that no setting above has."""


def test_the_option_table_covers_the_installed_libraries() -> None:
    both = [each.name for each in fields(SFTConfig)]
    assert set(both) <= set(OPTIONS)  # an older library has fewer
    assert {each.name for each in fields(TrainingArguments)} <= set(TRAINING)
    assert not set(TRAINING) & set(SFT)


def test_options_are_refused_as_the_table_says(tmp_path: Path) -> None:
    alone = {name for name, option in OPTIONS.items() if option.refuses is not None or option.effect == "refused"}
    assert alone == set(REFUSED) | {name for name, option in OPTIONS.items() if option.with_ranks}
    for name, value in REFUSED.items():
        args = arguments(tmp_path)
        refuse_arguments(args)
        setattr(args, name, value)
        with pytest.raises(ConfigError, match=name):
            refuse_arguments(args)


def test_options_handled_by_the_engine_match_the_stock_trainer() -> None:
    """Each option read by a method that we replace is part of the comparison below. The library itself handles what its
    other methods read."""
    replaced = [
        name
        for name, ours in vars(Streamed).items()
        if name in vars(Trainer) and inspect.isfunction(ours) and "super()." not in inspect.getsource(ours)
    ]
    assert "training_step" in replaced
    text = "".join(inspect.getsource(getattr(Trainer, name)) for name in (*replaced, "compute_loss"))
    read = {name for name in re.findall(r"args\.(\w+)", text) if name in TRAINING}
    assert "max_grad_norm" in read
    compared = {name for changes in COMPARED for name in changes}
    assert {name for name in read if OPTIONS[name].effect == "same"} <= compared


def test_each_option_that_is_the_same_is_compared() -> None:
    compared = {name for changes in (*COMPARED, *MEASURED) for name in changes}
    elsewhere = {name for names in ELSEWHERE.values() for name in names.split()}
    same = {name for name, option in TRAINING.items() if option.effect == "same"}
    assert elsewhere | (compared & same) == same
    assert not elsewhere & compared


@pytest.fixture
def _determinism(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`full_determinism` is for the whole process, which takes it back here."""
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags


@pytest.mark.few(3)
@pytest.mark.usefixtures("_determinism")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(COMPARED[0], id="sizes, optimizer and logs"),
        pytest.param(COMPARED[1], id="smoothing and the best model"),
        pytest.param(COMPARED[2], id="data by length"),
        pytest.param(COMPARED[3], id="the best checkpoint"),
        pytest.param(COMPARED[4], id="determinism", marks=pytest.mark.slow),  # torch imports its compiler for it
    ],
)
def test_options_match_the_stock_trainer(tmp_path: Path, changes: dict[str, Any]) -> None:
    known = {each.name for each in fields(TrainingArguments)}  # an older library has fewer
    changes = {name: value for name, value in changes.items() if name in known}
    (stock, _), (ours, _) = (run(kind, tmp_path / kind.__name__, **changes) for kind in (Trainer, StreamedTrainer))
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "num_input_tokens_seen", "epoch")
    mine, theirs = history(ours, *names), history(stock, *names)
    assert len(theirs) > 3
    assert mine == [pytest.approx(each, rel=1e-4) for each in theirs]


@pytest.mark.parametrize("changes", MEASURED, ids=lambda changes: ", ".join(changes))
def test_metrics_are_given_what_the_stock_trainer_gives(tmp_path: Path, changes: dict[str, Any]) -> None:
    seen: dict[type, list[Any]] = {Trainer: [], StreamedTrainer: []}
    for kind, given in seen.items():

        def metric(found: Any, compute_result: bool | None = None, given: list[Any] = given) -> dict[str, float]:
            parts = {name: getattr(found, name) for name in ("predictions", "label_ids", "inputs", "losses")}
            given.append((compute_result, {name: summary(part) for name, part in parts.items()}))
            return {"calls": len(given)}

        run(kind, tmp_path / kind.__name__, max_steps=2, eval_steps=2, more={"compute_metrics": metric}, **changes)
    assert seen[Trainer]
    assert str(seen[StreamedTrainer]) == str(seen[Trainer])


def summary(part: Any) -> Any:
    """What values are like: kinds, shapes and roughly their sums."""
    if isinstance(part, Mapping):
        return {name: summary(each) for name, each in part.items()}
    if part is None or isinstance(part, list | tuple):
        return part and [summary(each) for each in part]
    return type(part).__name__, tuple(part.shape), f"{float(abs(part).sum()):.3g}"


@dataclass
class Own(TrainingArguments):
    """A user's arguments."""

    prompt_style: str = "plain"


def test_unknown_options_are_refused_when_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_arguments(Own(output_dir=str(tmp_path), use_cpu=True, prompt_style="loud"))
    monkeypatch.delitem(OPTIONS, "eval_delay")
    refuse_arguments(arguments(tmp_path))
    with pytest.raises(ConfigError, match="eval_delay is not known"):
        refuse_arguments(arguments(tmp_path, eval_delay=3))


def trainer_of(folder: Path, model: Any, **changes: Any) -> Any:
    args = arguments(folder, save_strategy="no", **changes)
    data = {"train_dataset": rows(4, 1), "eval_dataset": rows(3, 2)}
    return StreamedTrainer(model=model, args=args, **data, **QUICK)


def test_neftune_noise_is_replayed_in_the_backward_pass(tmp_path: Path) -> None:
    """Compared to the library's own hook on the stock model, with the seed of the engine's first unit."""
    once = {"max_steps": 1, "gradient_accumulation_steps": 1, "eval_strategy": "no", "neftune_noise_alpha": 40.0}
    trainer = trainer_of(tmp_path, tiny_model("llama"), **once)
    before = trainer.evaluate()["eval_loss"]
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    twin = tiny_model("llama").train()
    embedding = twin.get_input_embeddings()
    embedding.neftune_noise_alpha = 40.0
    embedding.register_forward_hook(neftune_post_forward_hook)
    torch.manual_seed(call_seed(7, 0, 0, 0))
    loss = twin(**batch).loss
    loss.backward()
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.nn.utils.get_total_norm([each.grad for each in twin.parameters()]).item()
    assert trainer._norm == pytest.approx(norm, rel=1e-5)
    assert before == pytest.approx(trainer_of(tmp_path, tiny_model("llama")).evaluate()["eval_loss"], rel=1e-6)
    assert not trainer.model.get_input_embeddings()._forward_hooks


@pytest.mark.slow
def test_bf16_full_eval_is_handled_by_the_engine(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path, tiny_model("llama"), bf16=True, bf16_full_eval=True)
    rounded = trainer_of(tmp_path, tiny_model("llama").to(torch.bfloat16))
    assert plain.evaluate()["eval_loss"] == pytest.approx(rounded.evaluate()["eval_loss"], rel=1e-5)
    assert plain.args.bf16_full_eval
    assert plain.model.dtype == torch.float32
