"""TRL SFT scripts, stock and on the engine: the same losses to 1e-5 in float32, and the same logs."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig

from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import ConfigError
from tests.saved import config_as_stock_saves_it
from tests.tiny import FAMILIES, relative_error

trl = pytest.importorskip("trl", reason="TRL is not installed; it is a development dependency")
pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own warnings, which change with each release

KEPT = ("step", "loss", "grad_norm", "learning_rate", "entropy", "accuracy", "num_tokens")
"""Ends of the names of a log's entries, except times."""
GPT_OSS: dict[str, Any] = {
    **FAMILIES["mixtral"], "model_type": "gpt_oss", "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 8,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip


GLM: dict[str, Any] = {
    **FAMILIES["qwen3-moe"], "model_type": "glm4_moe", "n_routed_experts": 4, "first_k_dense_replace": 1,
}  # fmt: skip


def model(family: str) -> Any:
    fields = {**FAMILIES, "gpt-oss": GPT_OSS, "glm4-moe": GLM}[family] | {"vocab_size": 320}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))


def script(tmp_path: Path, streams: bool, family: str = "llama", by_name: bool = False, **changes: Any) -> Any:
    """The script. The runs differ in two lines, the import and the class. `changes`: training arguments, perhaps with
    `peft_config` and `resume`."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from megatrain.hf import streamed

    kind: Any = streamed(SFTTrainer) if streams else SFTTrainer
    rows = [{"prompt": f"{n} and {n + 1} is", "completion": f" {2 * n + 1}" * (1 + n % 3)} for n in range(24)]
    usual: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 10, "per_device_train_batch_size": 2, "learning_rate": 3e-3,
        "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 1, "max_grad_norm": 0.5,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "bf16": False, "max_length": 48,
    }  # fmt: skip
    more = {"peft_config": changes.pop("peft_config")} if "peft_config" in changes else {}
    resume = changes.pop("resume", None)
    made = model(family)
    if by_name:
        made.save_pretrained(tmp_path / "model")
        made = str(tmp_path / "model")
    trainer = kind(
        model=made,
        args=SFTConfig(**{**usual, **changes}),
        train_dataset=Dataset.from_list(rows[:20]),
        eval_dataset=Dataset.from_list(rows[20:]),
        processing_class=load_tokenizer("bytes"),
        **more,
        **({"engine_options": {"verify": False}} if streams else {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(tmp_path / "final"))
    return trainer


def assert_equal_logs(ours: Any, stock: Any) -> None:
    """All entries except times, to 1e-5: losses, norms, rates, entropies, accuracies, auxiliary losses."""
    assert len(ours.state.log_history) == len(stock.state.log_history)
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs.keys() - {name for name in theirs if name.endswith(("runtime", "per_second"))}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), (name, theirs)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("CI", "1")  # no telemetry from TRL


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="nll"),
        pytest.param({"loss_type": "dft", "eval_strategy": "no", "max_steps": 4}, id="dft", marks=pytest.mark.slow),
    ],
)
def test_the_script_gives_the_same_losses_stock_and_streamed(tmp_path: Path, changes: dict[str, Any]) -> None:
    stock = script(tmp_path / "stock", False, **changes)
    ours = script(tmp_path / "ours", True, **changes)
    assert_equal_logs(ours, stock)
    folders = [
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / n / "final").named_parameters()) for n in ("ours", "stock")
    ]
    assert max(relative_error(folders[0][name], value) for name, value in folders[1].items()) < 1e-5
    assert json.loads(config_as_stock_saves_it(tmp_path / "ours/final")) == read_json(
        tmp_path / "stock/final/config.json"
    )


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("family", "by_name", "changes"),
    [
        ("mixtral", True, {}),
        pytest.param("gpt-oss", False, {"router_aux_loss_coef": 0.5}, marks=pytest.mark.slow),
        pytest.param("mixtral", False, {"router_aux_loss_coef": 0.5}, marks=pytest.mark.slow),
        pytest.param("gpt-oss", True, {}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", True, {"router_aux_loss_coef": 0.5}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", False, {"router_aux_loss_coef": 0.0}, marks=pytest.mark.slow),
        pytest.param("gpt-oss", True, {"router_aux_loss_coef": 0.5, "loss_type": "dft"}, marks=pytest.mark.slow),
        pytest.param(
            "mixtral", True, {"router_aux_loss_coef": 0.5, "label_smoothing_factor": 0.1}, marks=pytest.mark.slow
        ),
    ],
)
def test_moe_auxiliary_loss_matches_trl(tmp_path: Path, family: str, by_name: bool, changes: dict[str, Any]) -> None:
    """By name and loaded, over two micro-batches with different numbers of target tokens: losses, gradient norms and
    `aux_loss`."""
    quick = {"max_steps": 2, "eval_steps": 2, **changes}
    stock = script(tmp_path / "stock", False, family, by_name, **quick)
    ours = script(tmp_path / "ours", True, family, by_name, **quick)
    assert_equal_logs(ours, stock)
    assert ("aux_loss" in ours.state.log_history[0]) == (changes.get("router_aux_loss_coef") != 0.0)


@pytest.mark.skipif(not hasattr(Glm4MoeConfig(), "output_router_logits"), reason="TRL refuses it by itself")
def test_an_auxiliary_loss_the_model_lacks_is_refused(tmp_path: Path) -> None:
    """TRL computes one from recorded router logits; the engine has only that of the model's own forward."""
    with pytest.raises(
        ConfigError, match=r"router_aux_loss_coef=0\.5 is not supported: the model's own forward has no"
    ):
        script(tmp_path, True, "glm4-moe", router_aux_loss_coef=0.5)


def test_trls_script_runs_with_two_changed_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script passes a revision and an attention that is `None`; it packs, saves, and resumes from a checkpoint."""
    stock = (Path(trl.__file__).parent / "scripts" / "sft.py").read_text()
    ours = re.sub(
        r"^( *)(from trl import SFTTrainer,.*)$", r"\1\2\n\1from megatrain.hf import streamed", stock, flags=re.M
    )
    ours = ours.replace("trainer = SFTTrainer(", "trainer = streamed(SFTTrainer)(")
    assert len(set(ours.splitlines()) - set(stock.splitlines())) == 2
    model("llama").save_pretrained(tmp_path / "model")
    load_tokenizer("bytes").save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({"text": f"{n} and {n + 1} is {2 * n + 1}"}) for n in range(8)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))

    def run(name: str, text: str, *more: str) -> list[dict[str, float]]:
        (tmp_path / "sft.py").write_text(text)
        command = f"""sft.py --model_name_or_path {tmp_path}/model --dataset_name {tmp_path}/data
            --output_dir {tmp_path}/{name} --eval_strategy steps --eval_steps 2 --max_steps 2 --save_steps 1 --use_cpu
            --bf16 false --report_to none --packing --max_length 32 --gradient_accumulation_steps 2 --logging_steps 1"""
        monkeypatch.setattr(sys, "argv", [*command.split(), *more])
        runpy.run_path(str(tmp_path / "sft.py"), run_name="__main__")
        log = read_json(tmp_path / name / "checkpoint-2" / "trainer_state.json")["log_history"]
        return [{name: value for name, value in entry.items() if name.endswith(KEPT)} for entry in log]

    expected, found = run("stock", stock), run("ours", ours)
    assert found == [pytest.approx(entry, rel=1e-5) for entry in expected]
    again = run("ours", ours, "--resume_from_checkpoint", f"{tmp_path}/ours/checkpoint-1")
    assert [entry["loss"] for entry in again[:2]] == [entry["loss"] for entry in found[:2]]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").config.model_type == "llama"


def test_trainers_with_custom_losses_are_refused() -> None:
    from trl import DPOTrainer

    from megatrain.hf import streamed

    with pytest.raises(ConfigError, match=r"DPOTrainer\.\w+ would not be run"):
        streamed(DPOTrainer)
