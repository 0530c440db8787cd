"""A TRL SFT script, run twice, stock and through the engine: the same losses to 1e-5 in float32, and the same logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from megatrain.data import load_tokenizer
from megatrain.errors import ConfigError
from tests.tiny import relative_error, tiny_model

pytest.importorskip("trl", reason="TRL is not installed; it is a development dependency")
pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own, of which some come with each release

LOGGED = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "eval_num_tokens", "step")


def script(tmp_path: Path, streams: bool, **changes: Any) -> Any:
    """The script. Two lines tell the runs apart: the import and the class."""
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
    trainer = kind(
        model=tiny_model("llama", vocab_size=320),
        args=SFTConfig(**{**usual, **changes}),
        train_dataset=Dataset.from_list(rows[:20]),
        eval_dataset=Dataset.from_list(rows[20:]),
        processing_class=load_tokenizer("bytes"),
        **({"engine_options": {"verify": False}} if streams else {}),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    return trainer


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("CI", "1")  # TRL tells nobody


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
    assert len(ours.state.log_history) == len(stock.state.log_history)
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        assert mine.keys() == theirs.keys()
        for name in LOGGED:
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5), (name, theirs)
        for name in ("entropy", "mean_token_accuracy"):  # over a step's tokens here, over micro-batches there
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=0.2, abs=0.1)
    folders = [
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / n / "final").named_parameters()) for n in ("ours", "stock")
    ]
    assert max(relative_error(folders[0][name], value) for name, value in folders[1].items()) < 1e-5


def test_trainers_with_losses_of_their_own_are_refused() -> None:
    from trl import DPOTrainer

    from megatrain.hf import streamed

    with pytest.raises(ConfigError, match=r"DPOTrainer\.\w+ would not be run"):
        streamed(DPOTrainer)
