"""Whole runs on streams: said to be one, without a length, and gone on with bit for bit."""

from __future__ import annotations

import gzip
import json
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch

from megatrain.checkpoint.listing import checkpoints, step_of
from megatrain.data import read_rows, stream_rows
from megatrain.data.tokenizer import load_tokenizer
from megatrain.dist import ALONE, World
from megatrain.errors import ConfigError
from megatrain.run.data import open_corpus
from tests.fake_hub import Hub, settings_for
from tests.fork_server import Preloaded
from tests.integration import killed_run
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
    data = {"sources": [str(tmp_path / "rows")], "streaming": True, "chat_template": "none", "bad_samples": "leave_out"}
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
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub moves on before it answers the second."""
    config = streamed(tmp_path, "run", 1)
    commits = [
        hub.publish("organisation/data", {path.name: path.read_bytes() for path in (tmp_path / "rows").iterdir()}),
        hub.publish("organisation/data", {"train.jsonl": b'{"text": "another"}\n' * 30}),
    ]
    data = config.data.model_copy(update={"sources": ("organisation/data",), "packing": "grouped"})
    config = config.model_copy(update={"data": data})
    library, here, one = datasets.load_dataset, threading.local(), threading.Lock()

    def load_dataset(*named: Any, **how: Any) -> Any:
        with one:  # of two threads: the library's progress bars are made for one, and ranks are processes
            return library(*named, **how)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(read_rows, "commit_or_download", lambda _: commits[here.rank])

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


def run_on_hub(endpoint: str, cache: Path, tree: dict[str, Any], place: str | None, count: float) -> None:
    """In a child: see `killed_run.run`."""
    for module, name, value in settings_for(endpoint, cache):
        setattr(module, name, value)
    for name, value in (("READ_ROWS", 2), ("BLOCK_ROWS", 6), ("BLOCK_SEQUENCES", 1)):
        setattr(stream_rows, name, value)
    killed_run.run(tree, place, count)


@pytest.mark.slow  # three runs
def test_a_killed_run_on_a_hub_data_set_resumes_bit_for_bit(tmp_path: Path, hub: Hub, preloaded: Preloaded) -> None:
    """The hub has moved on meanwhile, and drops a connection."""
    files = {}
    for part in range(3):
        rows = [{"prompt": f"{n}?", "completion": "a" * (n % 9 + 1)} for n in range(part, 30, 3)]
        files[f"data/part-{part}.jsonl.gz"] = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    first = hub.publish("org/chats", files)

    def run(name: str, expected: int, place: str | None = None, count: float = 0) -> str:
        data = {"sources": ["org/chats"], "streaming": True}
        config = config_of(tmp_path, name, "auto", data=data, train={"steps": 8}, checkpoint={"every": 3})
        child = preloaded.start(
            run_on_hub, hub.endpoint, tmp_path / "cache", config.model_dump(mode="json"), place, count
        )
        assert child.wait() == expected, child.said
        return child.said

    run("whole", 0)
    run("killed", -signal.SIGKILL, "LOSS", 9)
    (taken, *_) = checkpoints(tmp_path / "killed" / "checkpoints")
    assert step_of(taken) == 3
    hub.publish("org/chats", {"data/part-0.jsonl": b'{"prompt": "b", "completion": "c"}\n' * 9})
    hub.drops, hub.asked = 1, []
    said = run("killed", 0)
    assert "peer closed connection" in said
    assert any(first in each and "resolve" in each for each in hub.asked)
    assert losses(tmp_path / "killed")[-5:] == losses(tmp_path / "whole")[-5:]
    whole, killed = (weights(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
