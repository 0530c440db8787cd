"""What whole runs of several ranks do beside training on text: preferences, budgets, and what the disk holds.

Ranks are threads, or for whole runs processes that are started once; `test_ranks` has them as `torchrun` starts them.
"""

from __future__ import annotations

import io
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain import Engine, Policy
from megatrain.checkpoint.listing import checkpoints
from megatrain.config import Config
from megatrain.data.packing import SampleRows
from megatrain.data.tokenizer import load_tokenizer
from megatrain.device import open_device
from megatrain.dist import ALONE, World
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.model import port_model
from megatrain.plan import Plan, share_of
from megatrain.run import training
from megatrain.run.data import open_corpus
from megatrain.run.objective import FILE, loss_of, take_up_reference
from megatrain.run.ranks import LINK_NBYTES, Ranks, with_links
from megatrain.spec import Hardware, Limits
from tests.rank_processes import RankProcesses
from tests.ranks import together, worlds
from tests.run.test_planner_inputs import DEEP
from tests.run.test_preferences import dpo_run, kto_run, steps
from tests.run.test_training import configuration, lines, losses
from tests.tiny import tiny_model

MAKING = threading.Lock()


def asked(world: World, config: Config, folder: Path) -> tuple[list[Any], float]:
    """What the reference has said of all samples, and the loss of a step that goes by it."""
    config = config.model_copy(update={"output": config.output.model_copy(update={"folder": str(folder)})})
    plan = cast(Any, SimpleNamespace(micro_batch=4, work=SimpleNamespace(micro_batches=2)))
    with MAKING:
        model = tiny_model("llama", vocab_size=257, max_position_embeddings=64)
        engine = Engine.from_model(model, precision="fp32", policy=Policy(), verify=False, world=world)
    corpus = open_corpus(config, plan, load_tokenizer("bytes"), 257, model, world)
    with engine:
        take_up_reference(config, corpus, engine, plan, None, lambda done, total: None)
        said = [rows.reference.values for rows in corpus.loader.sources if isinstance(rows, SampleRows)]
        loss = engine.step(next(iter(corpus.loader)), loss_fn=loss_of(config)).loss
    corpus.loader.close()
    return [np.asarray(each) for each in said], loss


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_compute_the_same_reference_log_probabilities_as_one(tmp_path: Path, size: int) -> None:
    """Bit for bit, whoever asked; what was asked once is found in the cache by any number of ranks."""
    cache = {"sequence_length": 32, "cache": str(tmp_path / "many")}
    config = dpo_run(tmp_path, data=cache, train={"micro_batch_size": 4, "gradient_accumulation_steps": 4})
    alone = config.model_copy(update={"data": config.data.model_copy(update={"cache": str(tmp_path / "one")})})
    said, loss = asked(ALONE, alone, tmp_path / "a")
    many = together(worlds(size), lambda world: asked(world, config, tmp_path / "b"))
    with patch.object(Engine, "log_probs", side_effect=AssertionError("asked again")):
        again, _ = asked(ALONE, config, tmp_path / "c")
    for theirs, of_ranks in many:
        assert all(np.array_equal(one, other) for one, other in zip(theirs, said, strict=True))
        assert of_ranks == pytest.approx(loss, rel=1e-6)
    assert all(np.array_equal(one, other) for one, other in zip(again, said, strict=True))
    assert (tmp_path / "b" / FILE).exists()


def test_a_failed_reference_write_on_rank_zero_ends_all(tmp_path: Path) -> None:
    config = dpo_run(tmp_path, train={"micro_batch_size": 4, "gradient_accumulation_steps": 4})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / FILE).mkdir()
    with pytest.raises(MegaTrainError) as caught:
        together(worlds(2), lambda world: asked(world, config, tmp_path / "b"))
    assert "cannot be written" in str(caught.value)


def test_host_memory_budgets_are_per_machine(tmp_path: Path) -> None:
    """Here each has half, and half of that is for what the device computes in."""
    config = configuration(tmp_path, memory={"host": 4 << 30})
    ported = port_model(tiny_model(), torch.float32)
    assert ported.spec.layers  # measured once, before the ranks ask for it

    def limits(world: World) -> Limits:
        ranks = Ranks(world, world.rank, world.size)
        with MAKING:
            device = open_device("cpu")
        return training._plan(config, ported, device, ranks, None).question.limits

    assert together(worlds(2), limits) == [Limits(1 << 30, 1 << 30, 0)] * 2


TIGHT: dict[str, Any] = {"model": {"config": DEEP}, "train": {"precision": "fp32", "gradient_accumulation_steps": 4}}
"""Four micro-batches a step of a model that `HOST` bytes have no room for."""
HOST = 10_000_000


@pytest.mark.parametrize("most", [None, "1GB"])
def test_drives_are_shared_by_all_ranks_of_a_machine(tmp_path: Path, most: str | None) -> None:
    """Each has half of its bandwidth, puts half of what the host lacks there, and counts the writes of both."""
    disk = {"folders": [str(tmp_path)], "max_write_per_day": most}
    config = configuration(tmp_path, memory={"host": HOST}, disk=disk, **TIGHT)
    ported = port_model(LlamaForCausalLM(LlamaConfig(**DEEP)), torch.float32)
    assert ported.spec.layers
    machine = Hardware("plain", HOST, HOST, 1e10, 1e10, 1e12, 1e10, shares_memory=True, disk_read_bandwidth=1e9)

    def planned(world: World) -> Plan:
        with MAKING:
            device = open_device("cpu")
        return training._plan(config, ported, device, Ranks(world, world.rank, world.size), None)

    with patch.object(training, "this_machine", lambda *_: machine):
        if most is not None:
            with pytest.raises(ConfigError, match=r"per day, but 1\.00 GB are allowed"):
                together(worlds(2), planned)
            return
        plans = together(worlds(2), planned)
    assert plans[0].policy == plans[1].policy
    for plan in plans:
        assert plan.question.hardware.disk_read_bandwidth == 5e8
        assert 0 < plan.nbytes["disk"] < 14 * ported.spec.numel / 2


@pytest.mark.parametrize(("here", "seconds"), [(2, 0.05), (1, 0.1)])
def test_undescribed_links_are_measured_by_all_ranks(here: int, seconds: float) -> None:
    """An all-to-all that is held up by the seconds of its bytes: on one machine, or between two."""
    machine = Hardware("plain", 1 << 30, 1 << 30, 1e10, 1e10, 1e12, 1e10)

    def timed(world: World) -> Hardware:
        carrier = world.device
        assert carrier is not None

        def slow(received: torch.Tensor, sent: torch.Tensor) -> None:
            time.sleep(seconds * sent.numel() / LINK_NBYTES["cpu"])
            type(carrier).all_to_all(carrier, received, sent)  # type: ignore[arg-type]

        with MAKING:
            device = open_device("cpu")
        with patch.object(carrier, "all_to_all", slow):
            return with_links(machine, world, device, here)

    first, second = together(worlds(2), timed)
    assert first == second
    rate = first.link_bandwidth if here == 2 else first.node_bandwidth
    assert rate is not None
    assert 0.5 < rate * seconds / (LINK_NBYTES["cpu"] / 2) < 1.2  # half of what each sends is for the other
    assert (first.node_bandwidth is None) == (here == 2)
    sources = dict(first.sources)
    assert sources["link_bandwidth"].startswith("measured")
    assert first.link_route == "bus"
    assert share_of(replace(first, devices=2), 2, here).sharing_ranks == here


# Whole runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    found = RankProcesses()
    yield found
    found.close()


def run_here(world: World, config: Config) -> str:
    """What this rank tells."""
    console = Console(file=io.StringIO(), width=120)
    with patch.object(training, "joined", lambda config: Ranks(world, world.rank, world.size)):
        training.run_training(config, console)
    return cast(io.StringIO, console.file).getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("run", [dpo_run, kto_run])
def test_ranks_train_preferences_like_one(run: Any, ranks: RankProcesses, tmp_path: Path) -> None:
    """Also what is told, where it is a mean over answers of a kind that each rank has another number of."""
    how: dict[str, Any] = {"steps": 4, "precision": "fp32", "micro_batch_size": 4}
    for size, name in ((1, "one"), (2, "two")):
        config = run(tmp_path, name, train=how) if run is dpo_run else run(tmp_path, name, **how)
        ranks.run(run_here, size, config=config)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    told = [[line.get("rewards/rejected") for line in steps(tmp_path / name)] for name in ("one", "two")]
    assert told[1] == pytest.approx(told[0], rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_ranks_share_host_memory(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each is held to its part of the budget, and one that is too small for that is refused by all."""
    for name, host in (("two", "1GB"), ("none", "1MB")):
        how: dict[str, Any] = {"train": {"precision": "fp32"}, "output": {"folder": str(tmp_path / name)}}
        config = configuration(tmp_path, memory={"host": host}, **how)
        if name == "two":
            ranks.run(run_here, 2, config=config)
            assert len(losses(tmp_path / name)) == 4
        else:
            with pytest.raises(AssertionError, match="DoesNotFit"):
                ranks.run(run_here, 2, config=config)


@pytest.mark.slow
def test_ranks_overflow_state_to_disk(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each has files of its own there, without names; one rank goes on from what they save."""
    drive = tmp_path / "drive"
    drive.mkdir()
    same = {"loss_chunk_tokens": 64}  # which a plan chooses by memory, and rounding depends on

    def of(name: str, **changed: Any) -> Config:
        how: dict[str, Any] = {**TIGHT, "output": {"folder": str(tmp_path / name)}, "policy": same}
        return configuration(tmp_path, **how | changed)

    tight = {"memory": {"host": HOST}, "disk": {"folders": [str(drive)]}}
    ranks.run(run_here, 2, config=of("plain"))
    config = of("tight", checkpoint={"every": 2, "keep_last": 2}, **tight)
    ranks.run(run_here, 2, config=config)
    assert losses(tmp_path / "tight") == losses(tmp_path / "plain")
    assert not list(drive.iterdir())
    wrote = [line["written_nbytes"] for line in lines(tmp_path / "tight") if line["event"] == "stepped"]
    assert min(wrote) > 0
    shutil.rmtree(checkpoints(tmp_path / "tight" / "checkpoints")[-1])
    ranks.run(run_here, 1, config=config.model_copy(update={"resume": "auto"}))
    assert losses(tmp_path / "tight") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
