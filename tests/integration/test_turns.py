"""From where an engine is called: several threads, inside one of its calls, and forked children."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatrain import AdamW, Engine, Policy
from megatrain.device import Errand
from megatrain.engine import MicroBatch
from megatrain.errors import DeviceError, MegaTrainError
from megatrain.memory import Disk
from megatrain.spec import Placement, Work
from megatrain.train.diagnostics import Diagnostics
from megatrain.train.one_call_at_a_time import one_at_a_time
from megatrain.train.parts import Parts
from megatrain.train.weights import Weights
from tests.tiny import batch, equal, tiny_model, unequal_batches

# Threads --------------------------------------------------------------------------------------------------------------

PUBLIC = [
    *(
        "step",
        "gradients",
        "evaluate",
        "measure",
        "log_probs",
        "logits",
        "generate",
        "master_weights",
        "save_pretrained",
    ),
    *("save", "restore", "adopt", "set_optimizer", "parts.prepare", "diagnostics.peak_flops"),
    *(f"weights.{name}" for name in ("__getitem__", "view", "update", "fill", "flush")),
]


def test_calls_on_an_engine_are_serialised() -> None:
    marked = one_at_a_time(lambda self: None).__code__
    kinds = {"": Engine, "parts.": Parts, "weights.": Weights, "diagnostics.": Diagnostics}
    found = {
        prefix + name
        for prefix, kind in kinds.items()
        for name in dir(kind)
        if getattr(getattr(kind, name), "__code__", None) is marked
    }
    assert found == set(PUBLIC)


def test_a_concurrent_call_is_refused_without_harm() -> None:
    def run(beside: bool) -> dict[str, Tensor]:
        inside, go_on = threading.Event(), threading.Event()

        def loss(log_probs: Tensor, batch: MicroBatch) -> Tensor:
            inside.set()
            go_on.wait(30)
            return -log_probs.sum()

        if not beside:
            go_on.set()
        with Engine.from_model(tiny_model(), optimizer=AdamW(lr=1e-2), verify=False) as engine:
            stepping = threading.Thread(target=engine.step, args=(unequal_batches(),), kwargs={"loss_fn": loss})
            stepping.start()
            assert inside.wait(30)
            if beside:
                others: list[Callable[[], object]] = [
                    lambda: engine.step(unequal_batches()),
                    lambda: engine.evaluate(unequal_batches()),
                    engine.master_weights,
                    lambda: engine.adopt(engine.policy),
                    lambda: engine.save("nowhere"),
                    engine.close,
                ]
                for call in others:
                    with pytest.raises(DeviceError, match=r"was called while step was running; .* need a lock"):
                        call()
                assert "0 steps" in repr(engine)
            go_on.set()
            stepping.join()
            engine.step(unequal_batches())
            return engine.master_weights()

    assert equal(run(beside=True), run(beside=False))


def test_threads_can_share_an_engine_with_a_lock() -> None:
    lock, failures = threading.Lock(), []

    def work() -> None:
        try:
            for _ in range(3):
                with lock:
                    engine.step(unequal_batches())
        except BaseException as failure:
            failures.append(failure)

    with Engine.from_model(tiny_model(), verify=False) as engine:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert engine.steps == 9


@pytest.mark.parametrize("device", ["cpu", "sim:2"])
def test_unlocked_threads_get_only_typed_errors(device: str) -> None:
    failures: list[BaseException] = []
    done: list[int] = []

    def work() -> None:
        for _ in range(4):
            try:
                engine.step(unequal_batches())
                done.append(1)
            except BaseException as failure:
                failures.append(failure)

    with Engine.from_model(tiny_model(), device, verify=False) as engine:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {type(failure) for failure in failures} <= {DeviceError}
        assert engine.steps == len(done) > 0
        assert engine.step(unequal_batches()).tokens > 0


@pytest.mark.parametrize("device", ["cpu", "sim:2"])
def test_a_loss_that_calls_its_engine_is_an_error_not_a_deadlock(device: str) -> None:
    def loss(log_probs: Tensor, batch: MicroBatch) -> Tensor:
        engine.evaluate(unequal_batches())
        return -log_probs.sum()

    policy: Any = (
        "auto" if device == "cpu" else Policy(wait_for="shard", shard_nbytes=4096)
    )  # on a thread of the call's
    with Engine.from_model(tiny_model(), device, policy=policy, verify=False) as engine:
        with pytest.raises(MegaTrainError, match="evaluate was called while step was running"):
            engine.step(unequal_batches(), loss_fn=loss)
        assert engine.step(unequal_batches()).tokens > 0


# Forked children ------------------------------------------------------------------------------------------------------


def outcome_of(work: Callable[[], object]) -> str:
    try:
        return f"returned {work()!r}"
    except BaseException as failure:
        return f"{type(failure).__name__}: {failure}"


def in_a_child(*works: Callable[[], object]) -> str:
    """What a forked child says of each of `works`, in a line; one that hangs is killed, and says so."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads is the point
        child = os.fork()
    if child == 0:
        try:
            os.write(writing, "\n".join(map(outcome_of, works)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    with os.fdopen(reading) as told:
        return told.read()


fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")

REFUSED = r"DeviceError: engine: belongs to process {}; this process, \d+, is a fork .*; create the engine in the"


@pytest.fixture(scope="module", params=["cpu", "cpu with a disk", "sim:1"])
def parent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    device, *with_disk = request.param.split(" ", 1)
    policy: Any = "auto"
    folder: Any = ()
    if with_disk:
        placements = (Placement("disk", "disk", "disk", "disk"),) * 5
        policy, folder = Policy(placements=placements, shares_memory=True), tmp_path_factory.mktemp("disk")
    with Engine.from_model(tiny_model(), device, policy=policy, disk=folder, verify=False) as engine:
        engine.step(unequal_batches())
        yield engine


@fork
def test_a_forked_child_cannot_use_the_parents_engine(parent: Engine, tmp_path: Path) -> None:
    """In one line and at once; the parent's engine goes on, with the numbers of one that has not been forked."""
    arguments: dict[str, tuple[Any, ...]] = {
        "weights.__getitem__": ("lm_head.weight",),
        "save": (tmp_path,),
        "save_pretrained": (tmp_path,),
        "restore": (None,),
        "weights.fill": (None,),
        "adopt": (parent.policy,),
        "parts.prepare": (Work((4,)),),
        "generate": (batch(1, 4, 0)["input_ids"],),
        "logits": (batch(1, 4, 0),),
        **dict.fromkeys(("step", "gradients", "evaluate", "measure", "log_probs"), (unequal_batches(),)),
    }

    calls = [partial(attrgetter(name)(parent), *arguments.get(name, ())) for name in PUBLIC]
    for name, said in zip(PUBLIC, in_a_child(*calls).split("\n"), strict=True):
        assert re.match(REFUSED.format(os.getpid()), said), f"{name}: {said}"


@pytest.mark.few(2)
@fork
def test_a_forked_child_cannot_harm_the_parents_engine(parent: Engine) -> None:
    before = parent.master_weights()

    def leave() -> str:
        with parent:
            pass
        parent.close()
        parent.parts.device.close()
        if parent.parts.disk is not None:
            parent.parts.disk.close()
        gc.collect()
        return repr(parent)

    assert "returned" in in_a_child(leave)
    assert "<Engine of LlamaForCausalLM" in in_a_child(lambda: repr(parent))
    assert equal(parent.master_weights(), before)
    loss = parent.evaluate(unequal_batches())
    assert parent.evaluate(unequal_batches()) == loss
    assert parent.step(unequal_batches()).tokens > 0


@pytest.mark.few(2)
@fork
def test_parts_of_an_engine_refuse_forked_children(parent: Engine, tmp_path: Path) -> None:
    """A stream, a device and a disk that somebody holds; a disk's files are those of the parent."""
    if parent.parts.device.name == "cpu":

        def submit() -> object:
            return parent.parts.device.stream("host").submit(Errand("x"), lambda: None)

        for call in (
            parent.parts.device.synchronize,
            lambda: parent.parts.device.stream("host").submit(Errand("x"), lambda: None),
        ):
            assert re.match("DeviceError: the device: belongs to process", in_a_child(call))
    disk = Disk([tmp_path])
    disk.provide({"a": (5000, "a")})
    disk.write("a", torch.full((5000,), 7, dtype=torch.uint8))
    for use in (
        lambda: disk.write("a", torch.zeros(5000, dtype=torch.uint8)),
        lambda: disk.provide({"b": (50_000, "b")}),
        lambda: disk.forget("a"),
        disk.free_nbytes,
    ):
        assert re.match("DeviceError: disk: belongs to process", in_a_child(use))
    assert in_a_child(disk.close) == "returned None"
    found = torch.empty(5000, dtype=torch.uint8)
    disk.read("a", found)
    assert found.eq(7).all()
    disk.close()


@fork
def test_a_forked_child_does_not_wait_for_the_parents_save(tmp_path: Path) -> None:
    go_on = threading.Event()
    with Engine.from_model(tiny_model(), verify=False) as engine:
        save = engine.save(tmp_path, write_more=lambda _: go_on.wait(30))
        try:
            assert re.match("DeviceError: checkpoint of step 0: belongs to process", in_a_child(save.wait))
            assert in_a_child(engine.close) == "returned None"
        finally:
            go_on.set()
        folder = save.wait()
        assert in_a_child(save.wait) == f"returned {folder!r}"


class Forked(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return batch(1, 6, index)["input_ids"][0]


@pytest.mark.few(1)
@fork
@pytest.mark.parametrize("persistent", [False, True])
def test_forked_data_loader_workers_can_feed_an_engine(persistent: bool) -> None:
    """Workers start while the engine is open and end while it steps; it has the numbers that it has without them."""

    def run(workers: int) -> tuple[list[float], dict[str, Tensor]]:
        losses = []
        with Engine.from_model(tiny_model(), optimizer=AdamW(lr=1e-2), verify=False) as engine:
            keeps: Any = {"persistent_workers": persistent, "multiprocessing_context": "fork"} if workers else {}
            loader = DataLoader(Forked(), batch_size=2, num_workers=workers, **keeps)
            for _ in range(2):
                for ids in loader:
                    losses.append(engine.step([{"input_ids": ids, "labels": ids}]).loss)
            return losses, engine.master_weights()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        losses, weights = run(2)
    expected, others = run(0)
    assert losses == expected
    assert equal(weights, others)


@fork
def test_a_forked_child_can_make_its_own_engine() -> None:
    """Where torch itself does: with one thread, as the workers of a data loader have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Engine.from_model(tiny_model(), verify=False) as engine:
            loss = engine.step(unequal_batches()).loss

            def fresh() -> float:
                with Engine.from_model(tiny_model(), verify=False) as own:
                    return own.step(unequal_batches()).loss

            assert in_a_child(fresh) == f"returned {loss!r}"
    finally:
        torch.set_num_threads(threads)
