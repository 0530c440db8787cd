"""Whole runs by several ranks: the losses, the folder and the checkpoints of one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatrain.checkpoint.folder import open_checkpoint
from megatrain.checkpoint.listing import checkpoints, step_of
from megatrain.config import Config, save_config
from megatrain.device import Device
from megatrain.dist import World
from megatrain.dist import processes as of_processes
from megatrain.dist import watch as of_watch
from megatrain.errors import ConfigError, RankError
from megatrain.optim import AdamW
from megatrain.run import ranks as of_ranks
from megatrain.run.ranks import Ranks, refuse_what_ranks_lack
from megatrain.spec import Policy
from megatrain.spec.layout import Ownership
from megatrain.train.optimizer import StreamedOptimizer
from megatrain.train.options import threads_of
from tests.fork_server import Child, Preloaded, command_line
from tests.rank_processes import free_port
from tests.ranks import together, worlds
from tests.run.test_training import configuration, lines, losses, train
from tests.small import small_spec

ROOT = Path(__file__).parents[2]


HURRY = 5
"""How many times as fast as time a hurried clock goes. A rank's clock takes no more for one look at it."""


def begin(preloaded: Preloaded, ranks: int, config: Config, *overrides: str, seconds: float = 600.0) -> list[Child]:
    """Ranks that nothing looks after but they themselves, and that wait for each other for so long, by a clock that
    hurries once there is a file `hurry` beside the run."""
    path = config.folder.parent / "config.yaml"
    save_config(config, path)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = []
    for rank in range(ranks):
        numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        environment = meeting | {name: str(number) for name, number in numbers.items()}
        how = seconds, config.folder.parent / "hurry"
        found.append(preloaded.start(patient, *how, "train", str(path), *overrides, environment=environment))
    return found


def patient(seconds: float, hurry: Path, *arguments: str) -> None:
    """A command whose rank waits for the others for so long; see `begin`."""
    of_processes.SECONDS = seconds
    hurried = SimpleNamespace(**vars(time))
    hurried.monotonic = lambda: time.monotonic() * (HURRY if hurry.exists() else 1)
    of_watch.time = cast(Any, hurried)
    command_line(*arguments)


def ended(processes: Sequence[Child]) -> str:
    """What the first tells the person, once all have ended well."""
    for process in processes:
        assert process.wait() == 0, process.said
    return processes[0].said


def launched(ranks: int, config: Config, launcher: str, *overrides: str, restarts: int = 0) -> subprocess.Popen[str]:
    """By torchrun, or by `--ranks`, which becomes one."""
    path = config.folder.parent / "config.yaml"
    save_config(config, path)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    torchrun += ["--max-restarts", str(restarts)]
    own = ["--ranks", str(ranks)]
    command = ["-m", "megatrain", "train", str(path), *overrides]
    command = [sys.executable, *(command + own if launcher == "--ranks" else torchrun + command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def shared(tmp_path: Path, name: str, **train_: Any) -> Config:
    """Five micro-batches a step, in full precision."""
    sizes = {"gradient_accumulation_steps": 5, "precision": "fp32", "eval_batches": 2, **train_}
    return configuration(
        tmp_path, train=sizes, output={"folder": str(tmp_path / name), "trackers": [], "verify_export": False}
    )


@pytest.mark.parametrize("launcher", ["", pytest.param("--ranks", marks=pytest.mark.slow)])
def test_ranks_leave_the_same_folder_and_losses_as_one(tmp_path: Path, preloaded: Preloaded, launcher: str) -> None:
    one, two = shared(tmp_path, "one"), shared(tmp_path, "two")
    train(one)
    if launcher:
        process = launched(2, two, launcher)
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said
    else:
        said = ended(begin(preloaded, 2, two))
    assert losses(two.folder) == pytest.approx(losses(one.folder), rel=1e-6)
    alone, many = ([line for line in lines(each.folder) if line["event"] != "replanned"] for each in (one, two))
    assert [line["event"] for line in many] == [line["event"] for line in alone]
    for ours, theirs in zip(many, alone, strict=True):
        for key in ("tokens", "flops", "text"):
            assert ours.get(key) == theirs.get(key)
        if ours["event"] == "evaluated":
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    files = [sorted(path.name for path in each.folder.iterdir() if path.name != "logs") for each in (one, two)]
    assert files[0] == files[1]
    assert said.count("step 4/4") == 1
    assert re.search(r"slowest rank [01] 1\.\d\dx", said)
    assert "step 4/4" in (two.folder / "logs" / "rank-1.log").read_text()
    kept = [open_checkpoint(each.folder / "checkpoints" / "step-00000004").training["run"] for each in (one, two)]
    assert kept[0]["data"] == kept[1]["data"]


@pytest.mark.slow
def test_one_rank_under_torchrun_trains_to_the_bits_of_a_plain_run(tmp_path: Path) -> None:
    plain, ranked = shared(tmp_path, "plain"), shared(tmp_path, "ranked")
    train(plain)
    process = launched(1, ranked, "torchrun")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert losses(ranked.folder) == losses(plain.folder)
    weights = [(each.folder / "model" / "model.safetensors").read_bytes() for each in (plain, ranked)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("launcher", ["", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_signal_stops_all_ranks_at_one_step_and_any_number_resumes(
    tmp_path: Path, preloaded: Preloaded, launcher: str
) -> None:
    many = shared(tmp_path, "many", steps=100_000, lr_scheduler="constant", eval_every=0, sample_tokens=0)
    ranks = 3 if launcher else 2
    processes = [launched(ranks, many, launcher)] if launcher else begin(preloaded, ranks, many)
    metrics = many.folder / "metrics.jsonl"
    while not (metrics.exists() and losses(many.folder)):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    if isinstance(processes[0], subprocess.Popen):
        said, _ = processes[0].communicate(timeout=120)
    else:
        said = ended(processes)
    assert "not finished; `resume=auto` continues after step" in said
    kept = [path.name for path in (many.folder / "checkpoints").iterdir()]
    done = losses(many.folder)
    assert kept == [f"step-{len(done):08}"]
    assert f"continues after step {len(done):,}" in (many.folder / "logs" / f"rank-{ranks - 1}.log").read_text()
    steps = len(done) + 2
    ended(begin(preloaded, ranks - 1, many, "resume=auto", f"train.steps={steps}"))
    one = shared(tmp_path, "one", steps=steps, lr_scheduler="constant", eval_every=0, sample_tokens=0)
    train(one)
    assert losses(many.folder) == pytest.approx(losses(one.folder), rel=1e-5)


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("train", {"device": "cuda:1"}, "train.device: with several ranks each rank uses the GPU with its local"),
        ("checkpoint", {"deadline_seconds": 30.0}, "deadline_seconds: with several ranks one rank"),
    ],
)
def test_keys_unsupported_on_ranks_are_refused_by_name(
    tmp_path: Path, section: str, values: dict[str, Any], told: str
) -> None:
    config = configuration(tmp_path, **{section: values})
    with pytest.raises(ConfigError, match=told):
        refuse_what_ranks_lack(config)


@pytest.mark.parametrize(("shown", "names"), [(2, ["cuda:0", "cuda:1"]), (1, ["cuda:0", "cuda:0"])])
def test_each_rank_takes_its_local_gpu_or_the_only_visible_one(
    shown: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU that is every rank's first, the identity tells whether it is the same."""
    own = {"rank 0": "a", "rank 1": "b"}

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=own[threading.current_thread().name] if shown == 1 else str(index))

    monkeypatch.setattr("torch.cuda.device_count", lambda: shown)
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)

    def device_of(world: World) -> str:
        return Ranks(world, local_rank=world.rank, local_size=2).device_of("cuda:0")

    assert together(worlds(2), device_of) == names
    if shown == 1:
        own["rank 1"] = "a"
        with pytest.raises(ConfigError, match=r"train\.device: ranks 0 and 1 use the same GPU"):
            together(worlds(2), device_of)


@pytest.mark.parametrize(
    ("cores", "machines", "threads"),
    [
        ([range(6)] * 3, "aaa", [2, 2, 2]),
        ([range(2)] * 3, "aaa", [1, 1, 1]),
        ([range(4), range(4, 8)], "aa", [4, 4]),
        ([range(4), range(2, 4)], "aa", [3, 1]),
        ([range(4)] * 3, "aba", [2, 4, 2]),
    ],
)
def test_each_rank_gets_its_share_of_the_allowed_cores(
    cores: list[range], machines: str, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound to cores of its own by a launcher it has all of these; in a run, and of a script that says nothing."""

    def own(of_ranks: Sequence[Any]) -> Any:
        return of_ranks[int(threading.current_thread().name.removeprefix("rank "))]

    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(own(cores)))
    monkeypatch.setattr("socket.gethostname", lambda: own(machines))
    monkeypatch.setattr("megatrain.plan.host_resources._cgroups", lambda kind: [])

    def found(world: World) -> tuple[int, int]:
        spec, device = small_spec(3).over(world.size), cast(Device, None)
        optimizer = StreamedOptimizer(AdamW(), None, spec, Policy(), device, Ownership(world.rank), world)
        optimizer.begin(1e-3)
        return threads_of(world), optimizer.threads

    assert together(worlds(len(cores)), found) == [(each, each) for each in threads]


def killed(processes: Sequence[Child], config: Config, chance: random.Random) -> None:
    """Kill one once there is a step more; the others end by themselves, each with a line about it."""
    metrics = config.folder / "metrics.jsonl"
    before = len(losses(config.folder)) if metrics.exists() else 0
    victim = chance.randrange(len(processes))
    try:
        while not (metrics.exists() and len(losses(config.folder)) > before):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        time.sleep(chance.random() * 0.3)
        processes[victim].kill()
        for rank, process in enumerate(processes):
            status = process.wait(60)  # sooner than they would stop waiting for it: the line says that it was killed
            if rank != victim:
                told = [line for line in process.said.splitlines() if line.startswith("error: ")]
                assert len(told) == 1
                assert re.match(rf"error: rank {victim} of {len(processes)}, at .*: was killed", told[0])
                assert status != 0
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_killed_rank_is_named_and_any_number_resumes(tmp_path: Path, preloaded: Preloaded, kills: int) -> None:
    """Bit for bit: a run whose ranks were as many in each of its steps, and that nothing broke."""
    chance = random.Random(kills)
    steps = {"lr_scheduler": "constant", "warmup_steps": 0, "eval_every": 0, "sample_tokens": 0}
    many = shared(tmp_path, "many", steps=100_000, **steps)
    many = many.model_copy(update={"checkpoint": many.checkpoint.model_copy(update={"every": 1})})
    parts: dict[int, int] = {}  # the step that they end with -> ranks
    for kill in range(kills):
        ranks = (2, 3, 4)[kill % 3]
        killed(begin(preloaded, ranks, many, "resume=auto"), many, chance)
        for folder in checkpoints(many.checkpoints):
            open_checkpoint(folder)  # raises for a torn one
        parts.setdefault(max(map(step_of, checkpoints(many.checkpoints)), default=0), ranks)
    done = max(parts) + 2
    ended(begin(preloaded, 1, many, "resume=auto", f"train.steps={done}"))
    assert {line["streamed"] for line in lines(many.folder) if line["event"] == "saved"} == {""}
    whole = many.model_copy(update={"output": many.output.model_copy(update={"folder": str(tmp_path / "whole")})})
    for end, ranks in {**parts, done: 1}.items():
        if end > 0:
            ended(begin(preloaded, ranks, whole, "resume=auto", f"train.steps={end}"))
    assert losses(many.folder) == losses(whole.folder)


@pytest.mark.slow
def test_torchrun_restarts_all_ranks_after_a_kill_and_they_resume(tmp_path: Path, preloaded: Preloaded) -> None:
    steps = {"lr_scheduler": "constant", "warmup_steps": 0, "eval_every": 0, "sample_tokens": 0, "steps": 60}
    many, whole = shared(tmp_path, "many", **steps), shared(tmp_path, "whole", **steps)
    many = many.model_copy(update={"checkpoint": many.checkpoint.model_copy(update={"every": 1})})
    process = launched(2, many, "torchrun", "resume=auto", restarts=1)
    try:
        while not checkpoints(many.checkpoints):
            assert process.poll() is None
            time.sleep(0.05)
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        said, _ = process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    assert [line["event"] for line in lines(many.folder)].count("resumed") == 1
    ended(begin(preloaded, 2, whole))
    assert losses(many.folder) == losses(whole.folder)


def elsewhere(folder: str, libraries: str, *arguments: str) -> None:
    """A command on another machine: with other files, and another version of each library."""
    os.chdir(folder)
    of_ranks.version = lambda name: libraries  # type: ignore[assignment]  # the process ends with it
    command_line(*arguments)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("unlike", "told"),
    [
        ("configuration", "has train.seed 5, where rank 0 has 0; start all alike"),
        ("code", 'has torch "2", where rank 0 has "1"; start all alike'),
        ("data", r"reads source 0 {.*}, where rank 0 reads {.*}; start all alike"),
    ],
)
def test_ranks_that_run_something_else_are_told_what(
    tmp_path: Path, preloaded: Preloaded, unlike: str, told: str
) -> None:
    """As on machines with environments and files of their own: without, no number would say so."""
    config = shared(tmp_path, "run", steps=2, eval_every=0, sample_tokens=0)
    config = config.model_copy(update={"data": config.data.model_copy(update={"sources": ("corpus.txt",)})})
    save_config(config, tmp_path / "config.yaml")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "corpus.txt").write_text((tmp_path / "corpus.txt").read_text()[: -40 * (unlike == "data")])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = []
    for rank, folder in enumerate((tmp_path, tmp_path / "other")):
        libraries = str(1 + rank * (unlike == "code"))
        given = [
            "train",
            str(tmp_path / "config.yaml"),
            *(["train.seed=5"] if unlike == "configuration" and rank else []),
        ]
        ranks.append(
            preloaded.start(elsewhere, str(folder), libraries, *given, environment={**meeting, "RANK": str(rank)})
        )
    for rank in ranks:
        assert rank.wait(60) != 0
        (line,) = [line for line in rank.said.splitlines() if line.startswith("error: ")]
        assert re.search(f"rank 1: {told}", line), line


def test_a_failed_rank_is_named_by_the_others(tmp_path: Path, preloaded: Preloaded) -> None:
    config = shared(tmp_path, "run", steps=100_000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("in the way of the second rank")
    processes = begin(preloaded, 2, config)
    assert all(process.wait(60) for process in processes)
    told = [[line for line in each.said.splitlines() if line.startswith("error: ")] for each in processes]
    path = tmp_path / "run" / "logs"
    assert told == [
        [f"error: rank 1 of 2, at loading the model: {path}/rank-1.log: cannot be written (File exists)"],
        [f"error: {path}/rank-1.log: cannot be written (File exists)"],
    ]


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stalled_rank_is_named_within_the_timeout_and_a_second(
    tmp_path: Path, preloaded: Preloaded, victim: int
) -> None:
    """A process that is stopped, not killed: its connections stay, and nothing comes over them."""
    config, seconds = shared(tmp_path, "run", steps=100_000, lr_scheduler="constant", eval_every=0), 8.0
    ranks = begin(preloaded, 3, config, seconds=seconds)
    metrics = config.folder / "metrics.jsonl"
    try:
        while not (metrics.exists() and len(losses(config.folder)) > 2):
            assert all(rank.poll() is None for rank in ranks), [rank.said for rank in ranks]
            time.sleep(0.05)
        ranks[victim].send_signal(signal.SIGSTOP)
        (tmp_path / "hurry").touch()
        for number, rank in enumerate(ranks):
            if number != victim:
                assert rank.wait(60) != 0
                (told,) = [line for line in rank.said.splitlines() if line.startswith("error: ")]
                still = rf"error: rank {victim} of 3, at step \d+: hangs and does not answer; "
                found = re.match(rf"{still}the others have waited for (\d+) s in .", told)
                assert found is not None, told
                assert seconds <= int(found[1]) <= seconds + 1
        status = json.loads((config.folder / "status.json").read_text())
        assert (status["state"] == "failed") == (victim != 0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_rank_stopped_before_training_names_the_rank_that_ended() -> None:
    """`torchrun` tells all others so as soon as one has ended."""
    told = RankError("rank 1 of 2, at the plan: was killed, or its machine failed")
    watch: Any = SimpleNamespace(explained=lambda error: told, failed=lambda error: error, close=lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RankError, match="rank 1 of 2, at the plan"), Ranks(World(0, 2, watch=watch)).watched():
        assert watch.owns_process
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
