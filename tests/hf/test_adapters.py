"""A TRL SFT script with an adapter, stock and on the engine: same losses, same saved adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from megatrain.errors import ConfigError, ModelError
from tests.adapted import config_of
from tests.hf.test_sft import assert_equal_logs, script
from tests.tiny import relative_error

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own warnings, which change with each release


def with_adapter(tmp_path: Path, streams: bool, **changes: Any) -> Any:
    torch.manual_seed(3)
    return script(tmp_path, streams, peft_config=config_of("lora"), **changes)


@pytest.mark.parametrize("by_name", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_adapter_trains_as_in_the_stock_run_and_is_saved_as_by_it(tmp_path: Path, by_name: bool) -> None:
    stock = with_adapter(tmp_path / "stock", False, by_name=by_name)
    ours = with_adapter(tmp_path / "ours", True, by_name=by_name)
    assert_equal_logs(ours, stock)
    mine, theirs = (peft.load_peft_weights(str(tmp_path / n / "final"), device="cpu") for n in ("ours", "stock"))
    assert mine.keys() == theirs.keys()
    assert max(relative_error(mine[name], theirs[name]) for name in theirs) < 1e-4
    assert not (tmp_path / "ours/final/model.safetensors").exists()


def test_a_run_resumes_from_a_trainer_checkpoint(tmp_path: Path) -> None:
    with_adapter(tmp_path / "whole", True)
    with_adapter(tmp_path / "cut", True, save_strategy="steps", save_steps=5)
    again = with_adapter(tmp_path / "cut", True, resume=str(tmp_path / "cut/checkpoint-5"))
    assert again.state.global_step == again.engine.steps == 10
    ours, theirs = (peft.load_peft_weights(str(tmp_path / n / "final"), device="cpu") for n in ("cut", "whole"))
    assert max(relative_error(ours[name], theirs[name]) for name in theirs) < 1e-5


def test_unsupported_adapters_are_refused(tmp_path: Path) -> None:
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises((ConfigError, ModelError), match="PROMPT_TUNING adds learned tokens"):
        script(tmp_path, True, peft_config=prompts)
    with pytest.raises(ConfigError, match="load_best_model_at_end is not supported with adapters"):
        with_adapter(tmp_path, True, load_best_model_at_end=True, save_strategy="steps", save_steps=5)
