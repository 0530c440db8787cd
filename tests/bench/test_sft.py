"""The proof that fine-tuning teaches: its questions are what it says, and at full size its claim holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench import sft
from megatrain.config import load_config
from megatrain.run.training import run_training

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_generated_sums_are_unique_and_correct() -> None:
    every = sft.pairs()
    assert len(every) == len(set(every)) == 756
    assert all(sft.words(a + b).split()[0] and a + b < 100 for a, b in every)
    sample = next(iter(sft.chats([(42, 35)])))
    assert [message["content"] for message in sample["messages"]] == [
        "What is forty two plus thirty five?",
        "seventy seven",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fine_tuning_raises_exact_match_from_nothing_to_nearly_all(tmp_path: Path) -> None:
    overrides = [f"output.folder={tmp_path}", "train.steps=150", "train.sample_tokens=0", "output.trackers=[]"]
    run_training(load_config(QUICKSTART, overrides), Console(quiet=True))
    found = sft.measure(tmp_path / "model", steps=500, asked=60)
    assert found["before"] < 0.05
    assert found["after"] > 0.90
