"""Whole runs on streams: said to be one, without a length, and gone on with bit for bit."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch

from megatrain.checkpoint import checkpoints, step_of
from megatrain.data import load_tokenizer, stream_rows
from megatrain.dist import ALONE, World
from megatrain.errors import ConfigError
from megatrain.run.data import open_corpus
from tests.ranks import together, worlds
from tests.run.test_resume import config_of, weights
from tests.run.test_training import losses, train


def streamed(tmp_path: Path, name: str, steps: int, **more: Any) -> Any:
    (tmp_path / "rows").mkdir(exist_ok=True)
    for part in range(2):
        rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a" * (n % 9)}]}
                for n in range(part, 30, 2)]  # fmt: skip
        rows.append({"messages": []})
        (tmp_path / "rows" / f"train-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "sources": [str(tmp_path / "rows")],
        "streaming": True,
        "chat_template": "none",
        "bad_samples": "leave_out",
    }
    schedule = {"steps": steps, "lr_scheduler": "constant"}
    return config_of(tmp_path, name, data=data, train=schedule, **more)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("READ_ROWS", 2), ("BLOCK_ROWS", 6), ("BLOCK_SEQUENCES", 1)):
        monkeypatch.setattr(stream_rows, name, value)


def test_streamed_runs_say_so(tmp_path: Path) -> None:
    said = " ".join(train(streamed(tmp_path, "run", 4, checkpoint={"every": 0})).split())
    assert "/rows begins with " in said
    assert "length 4 steps" in said
    assert "the first sample; trained text is green 0?" in said
    assert re.search(r"left out of the stream of .*: .*no messages \(first: ", said)
    assert "loaded with from_pretrained" not in said


def test_text_without_rows_is_refused_by_name(tmp_path: Path) -> None:
    config = streamed(tmp_path, "run", 1)
    data = config.data.model_copy(update={"sources": ("python-stdlib",)})
    with pytest.raises(ConfigError, match=r"^data\.sources: python-stdlib cannot be streamed; leave"):
        train(config.model_copy(update={"data": data}))


def test_ranks_stream_rank_zeros_revision_and_split_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub moves on before it answers the second."""
    config = streamed(tmp_path, "run", 1)
    data = config.data.model_copy(update={"sources": ("organisation/data",), "packing": "grouped"})
    config = config.model_copy(update={"data": data})
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "train.jsonl").write_text('{"text": "another"}\n' * 30)
    library, here = datasets.load_dataset, threading.local()

    def load_dataset(*_: Any, revision: str = "rows", data_dir: None, **how: Any) -> Any:
        return library(str(tmp_path / revision), **how)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    answer = lambda *_, timeout: SimpleNamespace(sha="new" if here.rank else "rows")  # noqa: E731
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)

    def first_step(world: World) -> Any:
        here.rank = world.rank
        plan: Any = SimpleNamespace(micro_batch=4, work=SimpleNamespace(micro_batches=2))
        loader = open_corpus(config, plan, load_tokenizer("bytes"), 257, None, world).loader
        step = [each["input_ids"].tolist() for each in next(loader)]
        loader.close()
        return step

    first, second = together(worlds(2), first_step)
    assert [*first, *second] == first_step(ALONE)
    assert first != second


@pytest.mark.slow  # two runs
def test_a_streamed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    train(streamed(tmp_path, "whole", 4))
    (taken,) = [path for path in checkpoints(tmp_path / "whole" / "checkpoints") if step_of(path) == 2]
    train(streamed(tmp_path, "part", 4, resume=str(taken)))
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")[2:]
    whole, part = (weights(tmp_path / name) for name in ("whole", "part"))
    assert all(torch.equal(whole[name], part[name]) for name in whole)
