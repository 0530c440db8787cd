"""Checkpoints of other trainers: the next steps after taking one over are those that the other trainer makes itself."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from megatrain import Engine
from megatrain.checkpoint.folder import open_checkpoint
from megatrain.checkpoint.peer_checkpoints import RECORDS, _partitions, _Record
from megatrain.config import AdapterSection
from megatrain.errors import CheckpointError, ConfigError, ModelError
from megatrain.hf import streamed
from megatrain.model import PretrainedSource, freeze_parameters
from megatrain.optim import AdamW
from tests.run.test_training import configuration, losses, train
from tests.tiny import BYTE_LLAMA, FAMILIES, VOCAB, causal_lm_from_config, tiny_model

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own warnings

DONE, MORE = 3, 3
"""Steps of the other trainer, and steps that both then make."""

RATE, CLIP = 1e-3, 0.5


def slow(value: Any) -> Any:
    """A case that a quick one of the same claim stands for."""
    return pytest.param(value, marks=pytest.mark.slow)


QUICK: dict[str, Any] = {"precision": "fp32", "verify": False}


def rows(count: int = 2 * (DONE + MORE), seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(3, VOCAB, (10,), generator=generator) for _ in range(count)]
    # the first label, which nothing predicts, is masked: the Trainer counts it for some models
    return [{"input_ids": ids, "labels": torch.cat([torch.tensor([-100]), ids[1:]])} for ids in made]


def batches() -> list[dict[str, Tensor]]:
    """The batches of two rows, in order."""
    each = rows()
    return [{key: torch.stack([a[key], b[key]]) for key in a} for a, b in zip(each[::2], each[1::2], strict=True)]


def trainer_of(kind: type, folder: Path, model: Any, more: Any = None, **changes: Any) -> Any:
    usual: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "learning_rate": RATE, "weight_decay": 0.1,
        "lr_scheduler_type": "linear", "max_grad_norm": CLIP, "max_steps": DONE + MORE, "save_steps": DONE,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 7,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    args = TrainingArguments(**{**usual, **changes})
    return kind(model=model, args=args, train_dataset=rows(), **(more or {}))


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def largest_difference(engine: Engine, model: Any) -> float:
    ours = {name: engine.weights[name] for name, _ in model.named_parameters()}
    return float(max((ours[name] - each.detach()).abs().max() for name, each in model.named_parameters()))


@pytest.mark.parametrize("family", ["llama-tied", slow("gpt2"), slow("qwen3-moe")])
def test_a_trainers_next_steps_are_ours(family: str, tmp_path: Path) -> None:
    trainer = trainer_of(Trainer, tmp_path, tiny_model(family))
    trainer.train()
    with taken(tmp_path / f"checkpoint-{DONE}") as engine:
        rates = [RATE * (DONE + MORE - step) / (DONE + MORE) for step in range(DONE, DONE + MORE)]
        assert engine.steps == DONE
        assert engine.optimizer.lr == pytest.approx(rates[0])
        ours = [engine.step([batch], lr=rate).loss for batch, rate in zip(batches()[DONE:], rates, strict=True)]
        engine.weights.flush()
        assert ours == pytest.approx(losses_of(trainer)[DONE:], abs=1e-6)
        assert largest_difference(engine, trainer.model) < 1e-6


# Plain torch, and the formats of others ------------------------------------------------------------------------------

Write = Callable[[Path, Any, torch.optim.Optimizer], None]


def named_groups(model: Any) -> list[list[str]]:
    """The parameters with weight decay, and those without, as transformers' Trainer orders them."""
    decays = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    names = [name for name, _ in model.named_parameters()]
    return [[name for name in names if (name in decays) is side] for side in (True, False)]


def peer(model: Any, *, named: bool = False, together: bool = False, **settings: Any) -> torch.optim.AdamW:
    parameters, groups = dict(model.named_parameters()), []
    for names, decay in zip(named_groups(model), (0.1, 0.0), strict=True):
        groups.append(
            {"params": [(n, parameters[n]) if named else parameters[n] for n in names], "weight_decay": decay}
        )
    if together:
        groups = [{"params": [*parameters.values()], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=RATE, **settings)


def steps(model: Any, optimizer: torch.optim.Optimizer, made: Iterable[dict[str, Tensor]]) -> list[float]:
    losses = []
    for batch in made:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def as_optimizer_file(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def as_full_fsdp(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.save_pretrained(folder)
    torch.save(get_optimizer_state_dict(model, optimizer), folder / "optimizer.bin")


def as_sharded(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    parts = {"pytorch_model_fsdp_0": {"model": model.state_dict()}}
    parts["optimizer_0"] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    for name, state in parts.items():
        dcp.save(state, checkpoint_id=folder / name, no_dist=True)  # type: ignore[attr-defined]
    model.config.save_pretrained(folder)


class LossScaler:
    """Pickled as DeepSpeed's."""

    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


LossScaler.__module__, LossScaler.__qualname__ = "deepspeed.runtime.fp16.loss_scaler", "LossScaler"


def pickled(value: Any, path: Path) -> None:
    """Saved by a program that has DeepSpeed."""
    *parents, _ = (name := LossScaler.__module__).split(".")
    modules = {".".join(parents[: end + 1]): ModuleType("deepspeed") for end in range(len(parents))}
    modules[name] = ModuleType(name)
    modules[name].LossScaler = LossScaler  # type: ignore[attr-defined]
    with patch.dict(sys.modules, modules):
        torch.save(value, path)


def as_zero3(folder: Path, model: Any, optimizer: torch.optim.Optimizer, ranks: int = 2) -> None:
    """As `engine.save_checkpoint`, with a sub-group for each group; the slow test compares it with DeepSpeed's."""
    parameters, held, groups = dict(model.named_parameters()), optimizer.state_dict(), named_groups(model)
    tag = folder / f"global_step{DONE}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    model.config.save_pretrained(folder)

    def flat(values: Iterable[Tensor], rank: int) -> Tensor:
        shares = []
        for value in values:
            share = -(-value.numel() // ranks)
            padded = torch.zeros(share * ranks)
            padded[: value.numel()] = value.detach().flatten()
            shares.append(padded[rank * share : (rank + 1) * share])
        return torch.cat(shares)

    for rank in range(ranks):
        state = {}
        for number, names in enumerate(groups):
            of = [optimizer.state[parameters[name]] for name in names]
            state[number] = {part: flat((each[part] for each in of), rank) for part in ("exp_avg", "exp_avg_sq")}
            state[number]["step"] = of[0]["step"]
        inner = [{**group, "params": [number]} for number, group in enumerate(held["param_groups"])]
        saved = {
            "zero_stage": 3,
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": state, "param_groups": inner},
            "fp32_flat_groups": [flat((parameters[name] for name in names), rank) for names in groups],
        }
        pickled({"optimizer_state_dict": saved}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        about = {
            "module": {name: torch.zeros(0) for name in parameters},
            "buffer_names": [],
            "param_shapes": [{name: parameters[name].shape for name in names} for names in groups],
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
            "shared_params": {},
            "global_steps": DONE,
        }
        torch.save(about, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def as_universal(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As `ds_to_universal` converts ZeRO-3's."""
    as_zero3(folder, model, optimizer)
    tag = folder / f"global_step{DONE}"
    for name, value in model.named_parameters():
        (tag / "zero" / name).mkdir(parents=True)
        parts = {"fp32": value.detach(), **optimizer.state[value]}
        for part in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save(parts[part].flatten().clone(), tag / "zero" / name / f"{part}.pt")
    first, *others = sorted(tag.glob("*_optim_states.pt"))
    first.rename(tag / "zero" / "optimizer_state.pt")
    with torch.serialization.safe_globals([(LossScaler, f"{LossScaler.__module__}.LossScaler")]):
        saved = torch.load(tag / "zero" / "optimizer_state.pt", weights_only=True)
    pickled(saved["optimizer_state_dict"], tag / "zero" / "optimizer_state.pt")
    for other in others:
        other.unlink()


FORMATS: dict[str, Write] = {
    "optimizer.pt": as_optimizer_file,
    "optimizer.bin": as_full_fsdp,
    "sharded": as_sharded,
    "zero3": as_zero3,
    "universal": as_universal,
}


@pytest.mark.parametrize("kind", [slow("optimizer.pt"), *(kind for kind in FORMATS if kind != "optimizer.pt")])
def test_the_next_steps_of_plain_torch_are_ours(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama-tied" if kind == "sharded" else "llama")
    optimizer = peer(model)
    steps(model, optimizer, batches()[:DONE])
    FORMATS[kind](tmp_path / "there", model, optimizer)
    with taken(tmp_path / "there") as engine:
        assert (engine.steps, engine.optimizer.weight_decay) == (DONE, 0.1)
        ours = [engine.step([batch]).loss for batch in batches()[DONE:]]
        engine.weights.flush()
        assert ours == pytest.approx(steps(model, optimizer, batches()[DONE:]), abs=1e-6)
        assert largest_difference(engine, model) < 1e-6


@pytest.mark.parametrize("kind", ["optimizer.pt", "optimizer.bin", "sharded"])
def test_parameters_without_a_gradient_in_some_steps_are_taken_over(kind: str, tmp_path: Path) -> None:
    """Those of one layer have had fewer updates than others, and those of another have no state at all."""
    model = tiny_model()
    optimizer, layers = peer(model), model.model.layers
    for number, batch in enumerate(batches()[:DONE]):
        for layer, idle in ((layers[0], number == 1), (layers[1], True)):
            layer.requires_grad_(not idle)  # so that autograd leaves None
        steps(model, optimizer, [batch])
    layers[1].requires_grad_(True)
    assert {int(each["step"]) for each in optimizer.state.values()} == {DONE, DONE - 1}
    assert not any(each in optimizer.state for each in layers[1].parameters())
    FORMATS[kind](tmp_path / "there", model, optimizer)
    with taken(tmp_path / "there") as engine:
        assert engine.structure.trained_numel == engine.structure.numel
        ours = [engine.step([batch]).loss for batch in batches()[DONE:]]
        assert ours == pytest.approx(steps(model, optimizer, batches()[DONE:]), abs=1e-6)
        assert largest_difference(engine, model) < 1e-6


def taken(folder: Path, **more: Any) -> Engine:
    return Engine.from_checkpoint(folder, max_grad_norm=CLIP, **QUICK, **more)


@pytest.fixture
def there(tmp_path: Path) -> Callable[..., Path]:
    """Makes another trainer's checkpoint of a kind, after `DONE` steps."""

    def make(kind: str, family: str = "llama", **how: Any) -> Path:
        model = tiny_model(family)
        steps(model, optimizer := peer(model, **how), batches()[:DONE])
        FORMATS[kind](tmp_path / "there", model, optimizer)
        return tmp_path / "there"

    return make


@pytest.mark.parametrize("how", [slow({"named": True}), {"together": True}])
def test_groups_are_recognised(how: dict[str, bool], there: Callable[..., Path]) -> None:
    """Groups with names in the file, and one group of all; the optimizer is that of the checkpoint."""
    with taken(there("optimizer.pt", **how)) as engine:
        model = tiny_model()
        steps(model, optimizer := peer(model, **how), batches()[:DONE])
        assert {engine.optimizer.decays(name, p.shape) for name, p in model.named_parameters()} == {
            True,
            "together" in how,
        }
        engine.step(batches()[DONE : DONE + 1])
        engine.weights.flush()
        steps(model, optimizer, batches()[DONE : DONE + 1])
        assert largest_difference(engine, model) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainers_groups_are_known(family: str) -> None:
    model = tiny_model(family)
    first, *_ = _partitions(model, [name for name, _ in model.named_parameters()])
    assert first == named_groups(model)


@pytest.mark.parametrize("kind", [slow("optimizer.pt"), "sharded", slow("zero3")])
def test_an_engine_takes_over_in_place(kind: str, there: Callable[..., Path]) -> None:
    folder = there(kind)
    with taken(folder) as other:
        how: dict[str, Any] = {"optimizer": other.optimizer, "max_grad_norm": CLIP, **QUICK}
        with Engine.from_model(tiny_model(seed=5), **how) as engine:
            engine.restore(folder)
            assert engine.steps == DONE
            for each in (engine, other):
                each.step(batches()[DONE : DONE + 1])
                each.weights.flush()
            assert all(torch.equal(engine.weights[name], other.weights[name]) for name in other.master_weights())


def test_a_streamed_trainer_resumes_from_a_stock_trainers_checkpoint(tmp_path: Path) -> None:
    """The Trainer itself restores the position in the data, the schedule and random numbers."""
    stock = trainer_of(Trainer, tmp_path / "stock", tiny_model())
    stock.train()
    ours = trainer_of(streamed(Trainer), tmp_path / "ours", tiny_model(seed=5), {"engine_options": {"verify": False}})
    ours.train(resume_from_checkpoint=str(tmp_path / "stock" / f"checkpoint-{DONE}"))
    assert losses_of(ours) == pytest.approx(losses_of(stock), abs=1e-6)
    assert len(losses_of(ours)) == DONE + MORE
    for one, other in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-6


def test_an_adapter_with_its_state_is_taken_over(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tiny_model().save_pretrained(tmp_path / "base")
    how = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), how)
    stock = trainer_of(Trainer, tmp_path / "run", model, lr_scheduler_type="constant")
    stock.train()
    with taken(tmp_path / "run" / f"checkpoint-{DONE}") as engine:
        ours = [engine.step([batch]).loss for batch in batches()[DONE:]]
    assert ours == pytest.approx(losses_of(stock)[DONE:], abs=1e-6)


def test_shards_take_their_structure_from_a_given_model(there: Callable[..., Path], tmp_path: Path) -> None:
    folder = there("sharded")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config\.json; give source="):
        taken(folder)
    tiny_model(seed=5).save_pretrained(tmp_path / "base")
    model = tiny_model()
    steps(model, peer(model), batches()[:DONE])
    with taken(folder, source=PretrainedSource(tmp_path / "base")) as engine:
        assert largest_difference(engine, model) < 1e-6


def test_a_finished_trainers_rate_of_zero_is_no_obstacle(tmp_path: Path) -> None:
    trainer_of(Trainer, tmp_path, tiny_model()).train()
    with taken(tmp_path / f"checkpoint-{DONE + MORE}") as engine:
        assert (engine.steps, engine.optimizer.lr) == (DONE + MORE, 0.0)


def test_frozen_parameters_are_counted_out(tmp_path: Path) -> None:
    model = tiny_model()
    freeze_parameters(model, ["*embed*"])
    parameters = [each for each in model.parameters() if each.requires_grad]
    steps(model, optimizer := torch.optim.AdamW(parameters, lr=RATE), batches()[:DONE])
    as_optimizer_file(tmp_path / "there", model, optimizer)
    with Engine.from_model(model, max_grad_norm=CLIP, **QUICK) as engine:
        engine.restore(tmp_path / "there")
        engine.set_optimizer(AdamW(lr=RATE, weight_decay=0.01))
        engine.step(batches()[DONE : DONE + 1])
        engine.weights.flush()
        steps(model, optimizer, batches()[DONE : DONE + 1])
        assert largest_difference(engine, model) < 1e-6
    with pytest.raises(CheckpointError, match=r"groups of 29 parameters.*freeze what was frozen"):
        taken(tmp_path / "there")


# Runs -----------------------------------------------------------------------------------------------------------------


def run_of(tmp_path: Path, resume: Path, **changed: Any) -> Any:
    """A run over one row that repeats, so that data in any order are the same."""
    (tmp_path / "row.txt").write_bytes(b"abcdefgh" * 64)
    usual = {
        "steps": DONE + MORE, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": RATE,
        "lr_scheduler": "constant", "max_grad_norm": CLIP, "precision": "fp32", "sample_tokens": 0, "eval_every": 1000,
        "betas": (0.9, 0.999),
    }  # fmt: skip
    data = {"sources": [str(tmp_path / "row.txt")], "sequence_length": 8}
    model = {"config": BYTE_LLAMA, "verify": False}
    sections: dict[str, Any] = {"model": model, "train": {**usual, **changed}, "data": data}
    return configuration(tmp_path, **sections).model_copy(update={"resume": str(resume)})


@pytest.mark.parametrize("kind", ["optimizer.pt", slow("sharded"), slow("zero3")])
def test_a_run_goes_on_and_says_what_it_lacks(kind: str, tmp_path: Path) -> None:
    model = causal_lm_from_config(BYTE_LLAMA, 3)
    ids = torch.tensor([[*b"abcdefgh"]] * 2)
    made = [{"input_ids": ids, "labels": ids}] * (DONE + MORE)
    steps(model, optimizer := peer(model), made[:DONE])
    FORMATS[kind](tmp_path / "there", model, optimizer)
    told = " ".join(train(run_of(tmp_path, tmp_path / "there")).split())
    assert losses(tmp_path / "run") == pytest.approx(steps(model, optimizer, made[DONE:]), abs=1e-6)
    assert "at step 3: weights, and AdamW's moments after 3 updates" in told
    assert "not taken over: the position in the data" in told
    assert "changed since the checkpoint" not in told
    newest = open_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{DONE + MORE:08}")
    assert newest.training["engine"]["updates"] == DONE + MORE


def test_a_run_goes_on_with_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = causal_lm_from_config(BYTE_LLAMA, 3)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    ids = torch.tensor([[*b"abcdefgh"]] * 2)
    made = [{"input_ids": ids, "labels": ids}] * (DONE + MORE)
    parameters = [each for each in model.parameters() if each.requires_grad]
    steps(model, optimizer := torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1), made[:DONE])
    as_optimizer_file(folder := tmp_path / "there", model, optimizer)
    config = run_of(tmp_path, folder)
    with pytest.raises(ConfigError, match=r"holds an adapter; set adapter\.path"):
        train(config)
    config = config.model_copy(
        update={
            "adapter": AdapterSection(path=str(folder)),
            "model": config.model.model_copy(update={"config": None, "path": str(tmp_path / "base")}),
        }
    )
    train(config)
    assert losses(tmp_path / "run") == pytest.approx(steps(model, optimizer, made[DONE:]), abs=1e-6)


def test_what_differs_from_the_other_trainer_is_told(tmp_path: Path) -> None:
    model = causal_lm_from_config(BYTE_LLAMA, 3)
    ids = torch.tensor([[*b"abcdefgh"]] * 2)
    steps(model, optimizer := peer(model), [{"input_ids": ids, "labels": ids}])
    as_optimizer_file(tmp_path / "there", model, optimizer)
    config = run_of(tmp_path, tmp_path / "there", steps=2, betas=(0.9, 0.95), no_decay=("*.bias",))
    told = " ".join(train(config).split())
    assert "changed since the checkpoint: betas (0.9, 0.999) -> (0.9, 0.95); no_decay, for" in told
    assert "model.layers.0.input_layernorm.weight" in told


def test_steps_that_are_done_count(tmp_path: Path, there: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"is 3, but 3 steps are done .* set train.steps=6 for 3 more"):
        train(run_of(tmp_path, there("optimizer.pt"), steps=DONE))


# Refused --------------------------------------------------------------------------------------------------------------


def change(folder: Path, edit: Callable[[Any], None], name: str = "optimizer.pt") -> None:
    saved = torch.load(folder / name, weights_only=True)
    edit(saved)
    torch.save(saved, folder / name)


def other_optimizer(saved: Any) -> None:
    saved["state"] = {key: {"step": 1, "state1": torch.zeros(1, dtype=torch.uint8)} for key in saved["state"]}


def by_radam(saved: Any) -> None:
    radam = torch.optim.RAdam([torch.zeros(1)], decoupled_weight_decay=True).state_dict()["param_groups"][0]
    saved["param_groups"] = [{**radam, "params": group["params"]} for group in saved["param_groups"]]


CASES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another optimizer": (other_optimizer, "another optimizer than AdamW: its state has state1"),
    "AMSGrad": (lambda saved: saved["param_groups"][0].update(amsgrad=True), "its AdamW has amsgrad"),
    "Adam": (lambda saved: saved["param_groups"][0].update(decoupled_weight_decay=False), "is of Adam"),
    "RAdam": (by_radam, "is of RAdam"),
    "several betas": (lambda saved: saved["param_groups"][0].update(betas=(0.8, 0.9)), "differ in betas"),
    "no state": (lambda saved: saved["state"].clear(), "holds no state of an optimizer"),
    "another model": (
        lambda saved: saved["param_groups"][0]["params"].pop(),
        r"not of this model: groups of 22 \+ 7 parameters, here 23 \+ 7",
    ),
    "code": (lambda saved: saved.update(surprise=Path("anywhere")), r"more than tensors and plain values \(pathlib"),
}


MALFORMED: dict[str, Callable[[Any], Any]] = {
    "a list of states": lambda saved: saved.update(state=[1]),
    "a number of groups": lambda saved: saved.update(param_groups=3),
    "a number as a state": lambda saved: saved["state"].update({0: 7}),
    "a number as a moment": lambda saved: saved["state"][0].update(exp_avg=1.0),
    "no moment": lambda saved: saved["state"][0].pop("exp_avg"),
    "a word as a count": lambda saved: saved["state"][0].update(step="x"),
    "no count": lambda saved: saved["state"][0].update(step=torch.tensor(float("nan"))),
    "a word as a rate": lambda saved: saved["param_groups"][0].update(lr="x"),
    "no betas": lambda saved: saved["param_groups"][0].update(betas=None),
    "no state": lambda saved: saved.update(state={}),
}


def test_malformed_contents_are_one_error(there: Callable[..., Path]) -> None:
    folder = there("optimizer.pt")
    whole = (folder / "optimizer.pt").read_bytes()
    for name, edit in MALFORMED.items():
        (folder / "optimizer.pt").write_bytes(whole)
        change(folder, edit)
        with pytest.raises(CheckpointError, match=re.escape(str(folder))):
            open_checkpoint(folder)
            pytest.fail(name)
    (folder / "optimizer.pt").write_bytes(whole)
    (folder / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_taken_over_is_refused(name: str, there: Callable[..., Path]) -> None:
    edit, message = CASES[name]
    change(folder := there("optimizer.pt"), edit)
    with pytest.raises(CheckpointError, match=message):
        taken(folder)


def test_missing_files_are_named(there: Callable[..., Path]) -> None:
    folder = there("sharded")
    (file := next((folder / "optimizer_0").glob("*.distcp"))).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {file.name}; copy it again"):
        taken(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_ranks_are_named(rank: int, there: Callable[..., Path]) -> None:
    folder = there("zero3")
    next(folder.glob(f"**/zero_pp_rank_{rank}_*_optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match=r"lacks the files of rank 0|written by 2 ranks, but has the files of 1"):
        taken(folder)


def test_another_models_shards_are_refused(there: Callable[..., Path]) -> None:
    folder = there("sharded")
    tiny_model("llama", num_hidden_layers=2).config.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"is of another model: only it has model\.layers\.2"):
        taken(folder)


def test_a_pickle_runs_no_code(there: Callable[..., Path], tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "harm",)

    folder = there("sharded")
    (folder / "optimizer_0" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        taken(folder)
    assert not (tmp_path / "harm").exists()


def test_a_folder_of_checkpoints_names_the_newest(there: Callable[..., Path]) -> None:
    folder = there("optimizer.pt")
    (above := folder.parent / "above").mkdir()
    for number in (9, 10):
        shutil.copytree(folder, above / f"checkpoint-{number}")
    with pytest.raises(CheckpointError, match=f"holds checkpoints, but is not one; name {above}/checkpoint-10"):
        taken(above)


@pytest.mark.parametrize(("kind", "command"), [("zero3", "zero_to_fp32.py"), ("sharded", "accelerate merge-weights")])
def test_as_a_model_the_command_is_named(kind: str, command: str, there: Callable[..., Path]) -> None:
    folder = there(kind)
    with pytest.raises(ModelError, match=command):
        Engine.from_pretrained(folder, **QUICK)


def test_a_trainers_folder_is_a_model(there: Callable[..., Path]) -> None:
    with Engine.from_pretrained(there("optimizer.pt"), **QUICK) as engine:
        assert engine.steps == 0


# The trainers themselves ----------------------------------------------------------------------------------------------


def launched(*command: str) -> None:
    more = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    done = subprocess.run([sys.executable, "-m", *command], env={**os.environ, **more}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_two_ranks_next_steps_are_ours(kind: str, tmp_path: Path) -> None:
    if kind == "zero3":
        pytest.importorskip("deepspeed")
    tool = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.stock.sharded_trainers")
    launched(*tool, kind, str(tmp_path))
    folders = [folder := tmp_path / "there"]
    if kind == "zero3":
        tag = folder / f"global_step{DONE}"
        ways = ("--input_folder", str(tag), "--output_folder", str(tmp_path / "universal"))
        launched("deepspeed.checkpoint.ds_to_universal", *ways)
        shutil.copy(folder / "config.json", tmp_path / "universal")
        folders.append(tmp_path / "universal")
        compare_layouts(tag, tmp_path / "ours")
    theirs = json.loads((tmp_path / "losses.json").read_text())
    weights = torch.load(tmp_path / "weights.pt")
    for each in folders:
        with taken(each) as engine:
            ours = [engine.step([batch]).loss for batch in batches()[DONE:]]
            engine.weights.flush()
            assert ours == pytest.approx(theirs[DONE:], abs=1e-6)
            assert max((engine.weights[name] - weights[name]).abs().max() for name in engine.master_weights()) < 1e-6


def compare_layouts(real: Path, folder: Path) -> None:
    """The quick tests' files have the entries of DeepSpeed's."""
    model = tiny_model()
    steps(model, optimizer := peer(model), batches()[:DONE])
    as_zero3(folder, model, optimizer)
    scaler: list[Any] = [(_Record, name) for name in RECORDS]
    for kind in ("optim_states", "model_states"):
        name = f"zero_pp_rank_1_mp_rank_00_{kind}.pt"
        with torch.serialization.safe_globals(scaler):
            theirs = torch.load(real / name, weights_only=True)
        with torch.serialization.safe_globals(scaler):
            ours = torch.load(folder / real.name / name, weights_only=True)
        if kind == "optim_states":
            theirs, ours = theirs["optimizer_state_dict"], ours["optimizer_state_dict"]
            one, other = (each["optimizer_state_dict"] for each in (theirs, ours))
            assert one["state"][0].keys() == other["state"][0].keys()
            assert one["param_groups"][0].keys() == other["param_groups"][0].keys()
            assert theirs.keys() == ours.keys()
        assert ours.keys() <= theirs.keys()
