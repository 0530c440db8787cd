"""A checkpoint is the state of one moment, whatever trains on meanwhile, and goes on by any policy to the same bits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain import AdamW, Engine, Policy
from megatrain.checkpoint import manifest
from megatrain.checkpoint.folder import open_checkpoint
from megatrain.checkpoint.listing import checkpoints
from megatrain.checkpoint.manifest import full_check
from megatrain.checkpoint.range_writer import RangeWriter
from megatrain.errors import CheckpointError, DamagedCheckpoint, DoesNotFit, NonFinite
from megatrain.memory import unit_state
from megatrain.memory.unit_state import UnitState
from megatrain.model import pretrained
from megatrain.plan import Choice
from megatrain.spec import Numerics, Placement, Precision
from tests.integration.test_rank_loads import Meter
from tests.saved import set_saved_at_once
from tests.tiny import equal, tiny_model, unequal_batches

DISK, DEVICE = Placement("disk", "disk", "disk"), Placement("device", "device", "device")
HOMES: dict[str, tuple[Placement, ...]] = {
    "host": (),
    "disk": (DISK,) * 5,
    "moments on disk": (Placement(moments="disk"),) * 5,
    "mixed": (Placement("disk"), Placement(low_bits="disk"), Placement(moments="disk"), Placement(), DISK),
}
DROPOUT = {"attention_dropout": 0.3}


def chosen(precision: Precision = "bf16", update: str = "next_forward", **fields: Any) -> Choice:
    return Choice(Numerics(precision, loss_chunk_tokens=5), Policy(update=update, **fields))  # type: ignore[arg-type]


def made(how: Choice, disk: Path, device: str = "cpu", family: str = "llama", **changes: Any) -> Engine:
    clip = None if how.policy.update == "during_backward" else 0.5
    model = tiny_model(family, **{**(DROPOUT if family == "llama" else {}), **changes})
    return Engine.from_model(
        model, device, None, AdamW(lr=1e-2), clip, how.policy, seed=4, verify=False, disk=[disk], numerics=how.numerics
    )


def steps(engine: Engine, count: int) -> list[float]:
    return [engine.step(unequal_batches(2)).loss for _ in range(count)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class SlowDisk:
    """A disk whose writes take their time, and that stands still, once told to, until training has met a save."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.waits, self.met = threading.Event(), threading.Event()

    def stand_until_met(self, engine: Engine) -> None:
        """Until an update comes to a unit that has not been written."""
        honest = engine.parts.optimizer.before_update

        def noted(unit: int) -> None:
            if unit in engine.saver.gate.unwritten:
                self.met.set()
            honest(unit)

        engine.parts.optimizer.before_update = noted
        self.waits.set()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    honest, disk = RangeWriter.write, SlowDisk()

    def slow(self: RangeWriter, *given: Any) -> None:
        disk.threads.add(threading.current_thread().name)
        if disk.waits.is_set():
            disk.met.wait(20)
        time.sleep(0.001)
        honest(self, *given)

    monkeypatch.setattr(RangeWriter, "write", slow)
    return disk


# One moment ----------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("how", "device"),
    [
        (chosen(shares_memory=True), "cpu"),
        pytest.param(chosen("fp32", shares_memory=True), "cpu", marks=pytest.mark.slow),
        pytest.param(chosen("bf16", "during_backward", shares_memory=True), "cpu", marks=pytest.mark.slow),
        pytest.param(chosen(shares_memory=True, placements=HOMES["mixed"]), "cpu", marks=pytest.mark.slow),
        (chosen("fp32", placements=HOMES["disk"]), "sim:5"),
        pytest.param(
            chosen(placements=(Placement(), DEVICE, Placement("device"), Placement(), DISK)),
            "sim:2",
            marks=pytest.mark.slow,
        ),
        (
            chosen("bf16", "during_backward", placements=(DEVICE, Placement(), DEVICE, Placement(), Placement())),
            "sim:3",
        ),
        pytest.param(chosen(streamed_updates=1.0, shard_nbytes=60_000), "sim:4", marks=pytest.mark.slow),
        (chosen("bf16", "during_backward", streamed_updates=1.0, shard_nbytes=60_000), "cpu"),
    ],
)
def test_async_saves_write_the_state_of_their_step(
    how: Policy, device: str, tmp_path: Path, slow_disk: SlowDisk
) -> None:
    with made(how, tmp_path, device) as engine:
        steps(engine, 2)
        quiet = engine.save(tmp_path / "quiet", {"note": 1}).wait()
        under_way = engine.save(tmp_path / "busy", {"note": 1})
        slow_disk.stand_until_met(engine)
        losses = steps(engine, 3)
        busy = under_way.wait()
        assert slow_disk.met.is_set(), "training was to overtake the save"
        assert files(busy) == files(quiet)
    assert slow_disk.threads == {"megatrain-save"}
    with made(how, tmp_path, device) as undisturbed:
        assert steps(undisturbed, 5)[2:] == losses


def test_without_the_save_wait_state_would_be_torn(tmp_path: Path, slow_disk: SlowDisk) -> None:
    """The test above can fail."""
    with made(chosen(shares_memory=True), tmp_path) as engine:
        engine.parts.optimizer.before_update = lambda unit: None
        steps(engine, 2)
        quiet = engine.save(tmp_path / "quiet").wait()
        under_way = engine.save(tmp_path / "busy")
        slow_disk.stand_until_met(engine)
        steps(engine, 3)
        assert files(under_way.wait()) != files(quiet)


@pytest.mark.parametrize("at_once", [1 << 24, 1000])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_memory_for_a_save_is_one_array_of_a_unit_but_at_most_a_piece(
    precision: Precision, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_saved_at_once(monkeypatch, at_once)
    for placements in (HOMES["host"], HOMES["disk"]):
        with made(chosen(precision, shares_memory=True, placements=placements), tmp_path) as engine:
            before = engine.diagnostics.memory_table()
            engine.save(tmp_path / "run").wait()
            after = engine.diagnostics.memory_table()
        largest = max(unit.numel for unit in engine.structure.units)
        added = {owner: nbytes for owner, nbytes in after.items() if before.get(owner) != nbytes}
        if precision == "fp32" and not placements:
            assert added.get(("host", "checkpoint"), 0) == 0
        else:
            (owner,) = added
            assert owner == ("host", "checkpoint")
            assert 4 * min(largest, at_once) <= added[owner] <= 4 * min(largest + 64, at_once)


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells of a process's memory there")
@pytest.mark.parametrize(
    ("placements", "device"), [((DISK,) * 3, "cpu"), pytest.param((DEVICE,) * 3, "sim:1", marks=pytest.mark.slow)]
)
def test_saves_exports_and_loads_take_no_more_than_a_few_pieces(
    placements: tuple[Placement, ...], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 256 KiB here, beside blocks of 64 KiB written and of 4 MiB read. A layer's state takes 20 MB in float32."""
    set_saved_at_once(monkeypatch, 1 << 16)
    monkeypatch.setattr(unit_state, "AT_ONCE", 1 << 16)
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", 1 << 16)
    monkeypatch.setattr(pretrained, "BATCH_NBYTES", 1 << 17)

    calls = count()

    def looks(honest: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*given: Any, **named: Any) -> Any:
            if next(calls) % 8 == 0:
                meter.look()
            return honest(*given, **named)

        return looked

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    with made(chosen(placements=placements), tmp_path, device, "mixtral", **sizes) as engine:
        assert 12 * max(unit.numel for unit in engine.structure.units) > 20e6
        engine.save(tmp_path / "first").wait()  # which makes the buffers of the disk
        monkeypatch.setattr(RangeWriter, "write", looks(RangeWriter.write))
        monkeypatch.setattr(UnitState, "write", looks(UnitState.write))
        meter = Meter(tmp_path)
        saved = engine.save(tmp_path / "run").wait()
        assert meter.peak < 6 << 20
        meter = Meter(tmp_path)
        engine.save_pretrained(tmp_path / "model")
        assert meter.peak < 6 << 20
        meter = Meter(tmp_path)
        engine.restore(open_checkpoint(saved))
        assert meter.peak < 6 << 20
        assert files(engine.save(tmp_path / "same").wait()) == files(saved)


@pytest.mark.parametrize(
    ("how", "device"),
    [
        (chosen(placements=HOMES["disk"]), "sim:5"),
        (chosen("bf16", "during_backward", placements=(DEVICE, Placement(), DEVICE, DISK, Placement())), "sim:3"),
    ],
)
def test_a_save_by_short_ranges_gives_the_same_files(
    how: Choice, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(how, tmp_path, device) as engine:
        steps(engine, 1)
        whole = engine.save(tmp_path / "whole").wait()
        set_saved_at_once(monkeypatch, 1000)
        ranges = engine.save(tmp_path / "ranges").wait()
    assert files(ranges) == files(whole)


# Going on ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs of six steps that saved after the third: losses of the last three, weights, and the checkpoint."""
    found: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("straight")
    for precision in ("bf16", "fp32"):
        with made(chosen(precision, shares_memory=True), folder) as engine:
            steps(engine, 3)
            saved = engine.save(folder / precision, {"seen": [1, 2]}).wait()
            found[precision] = saved, steps(engine, 3), engine.master_weights()
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("precision", "placements", "device"),
    [
        ("bf16", "host", "sim:7"),
        ("bf16", "disk", "cpu"),
        ("fp32", "disk", "sim:7"),
        ("fp32", "moments on disk", "cpu"),
        ("bf16", "mixed", "sim:7"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(("bf16", "fp32"), HOMES, ("cpu", "sim:2"))),
    ],
)
def test_any_policy_and_tiers_resume_to_the_same_bits(
    straight: dict[str, Any], precision: Precision, placements: str, device: str, tmp_path: Path
) -> None:
    saved, losses, weights = straight[precision]
    other: dict[str, Any] = {"shard_nbytes": 3000, "weight_slots": 3, "disk_staging_slots": 1}
    fields = {"shares_memory": True, "activations": "keep"} if device == "cpu" else other
    how = chosen(precision, placements=HOMES[placements], **fields)
    options: dict[str, Any] = {"numerics": how.numerics, "max_grad_norm": 0.5, "policy": how.policy, "disk": [tmp_path]}
    with Engine.from_checkpoint(saved, device=device, verify=False, **options) as engine:
        engine.parts.ported.skeleton.train()
        assert engine.steps == 3
        assert steps(engine, 3) == losses
        assert equal(engine.master_weights(), weights)
        assert set(engine.diagnostics.applied_updates().values()) == {6}


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_an_engine_of_a_checkpoint_computes_as_it_did_unless_told_otherwise(clip: float | None, tmp_path: Path) -> None:
    numerics = Numerics("fp32", grad_precision="fp32", loss_chunk_tokens=5, mlp_chunk_tokens=4)
    model, optimizer = tiny_model(), AdamW(lr=1e-2)
    with Engine.from_model(model, optimizer=optimizer, numerics=numerics, max_grad_norm=clip, verify=False) as engine:
        steps(engine, 1)
        saved = engine.save(tmp_path / "run").wait()
        expected = steps(engine, 2), engine.master_weights()
    with Engine.from_checkpoint(saved, verify=False) as again:
        assert (again.numerics, steps(again, 2)) == (numerics, expected[0])
        assert equal(again.master_weights(), expected[1])
    with Engine.from_checkpoint(saved, precision="fp32", verify=False) as again:
        assert again.numerics == numerics
    with Engine.from_checkpoint(saved, precision="bf16", verify=False) as other:
        assert other.numerics == replace(numerics, precision="bf16", grad_precision=None)
    for unknown in ({"kernels": "compile"}, {"of_later_versions": 1}):
        opened = open_checkpoint(saved)
        opened.training["engine"]["numerics"] |= unknown
        with pytest.raises(CheckpointError, match=r"its numerics are of another version.*; give numerics$"):
            Engine.from_checkpoint(opened)
    opened = open_checkpoint(saved)
    opened.training["engine"]["numerics"] = {"of_later_versions": 1}
    for given in ({}, {"precision": "fp32"}):
        with pytest.raises(CheckpointError, match=r"its numerics are of another version.*; give numerics$"):
            Engine.from_checkpoint(opened, **given)


def test_an_optimizer_of_another_version_is_refused_unless_one_is_given(tmp_path: Path) -> None:
    with Engine.from_model(tiny_model(), optimizer=AdamW(lr=1e-2), verify=False) as engine:
        steps(engine, 1)
        saved = engine.save(tmp_path / "run").wait()
    later, earlier = open_checkpoint(saved), open_checkpoint(saved)
    later.training["engine"]["optimizer"] |= {"of_later_versions": 1}
    del earlier.training["engine"]["optimizer"]
    for opened in (later, earlier):
        with pytest.raises(CheckpointError, match=r"its optimizer is of another version \(.*\); give an optimizer$"):
            Engine.from_checkpoint(opened, verify=False)
        with Engine.from_checkpoint(opened, optimizer=AdamW(lr=1e-2), verify=False) as engine:
            assert engine.steps == 1


def test_an_engine_restores_in_place(tmp_path: Path) -> None:
    with made(chosen(shares_memory=True), tmp_path) as engine:
        steps(engine, 2)
        saved = open_checkpoint(engine.save(tmp_path / "run", {"a": [1, None]}).wait())
        first = steps(engine, 3), engine.master_weights()
        steps(engine, 1)  # its updates are pending
        engine.restore(saved)
        assert engine.steps == 2
        again = steps(engine, 3), engine.master_weights()
    assert first[0] == again[0]
    assert equal(first[1], again[1])
    assert saved.training["run"] == {"a": [1, None]}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", ["llama-tied", "gpt2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mixtral", "gemma2"))]
)
def test_other_architectures_resume(family: str, tmp_path: Path) -> None:
    with made(chosen(shares_memory=True), tmp_path, family=family) as engine:
        steps(engine, 2)
        saved = engine.save(tmp_path / "run").wait()
        expected = steps(engine, 2)
    how = chosen(shares_memory=True)
    options: dict[str, Any] = {"numerics": how.numerics, "policy": how.policy, "max_grad_norm": 0.5}
    with Engine.from_checkpoint(saved, verify=False, **options) as engine:
        assert steps(engine, 2) == expected


def test_state_converts_between_precisions_without_loss(straight: dict[str, Any], tmp_path: Path) -> None:
    saved = straight["fp32"][0]
    with Engine.from_checkpoint(saved, precision="bf16", verify=False) as engine:
        again = engine.save(tmp_path / "bf16").wait()
    for name in ("model.safetensors", "optimizer/moments.safetensors"):
        assert equal(load_file(saved / name), load_file(again / name))


def test_restored_freezing_is_kept_and_missing_moments_reported(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.layers[0].requires_grad_(False)
    with Engine.from_model(model, verify=False) as engine:
        steps(engine, 1)
        saved = engine.save(tmp_path / "run").wait()
        trained = engine.structure.trained_numel
    with Engine.from_checkpoint(saved, verify=False) as engine:
        assert engine.structure.trained_numel == trained
    from megatrain.model import PretrainedSource

    with pytest.raises(CheckpointError, match=r"has no m and v of model\.layers\.0.*; train what it trained, .*=true"):
        Engine.from_checkpoint(saved, source=PretrainedSource(saved), verify=False)
    with Engine.from_checkpoint(saved, source=PretrainedSource(saved), new="zero", verify=False) as engine:
        assert engine.structure.trained_numel == engine.structure.numel
        steps(engine, 1)


# Failures ------------------------------------------------------------------------------------------------------------


def full(self: RangeWriter, *given: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_failed_save_lets_training_go_on_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(chosen(shares_memory=True), tmp_path) as engine:
        steps(engine, 1)
        engine.save(tmp_path / "run").wait()
        with monkeypatch.context() as patched:
            patched.setattr(RangeWriter, "write", full)
            steps(engine, 1)
            save = engine.save(tmp_path / "run")
            found = steps(engine, 2)
            with pytest.raises(CheckpointError, match=r"No space left on device.*; free some space"):
                save.wait()
        (kept,) = checkpoints(tmp_path / "run")
        assert full_check(kept) == []
        assert engine.save(tmp_path / "run").wait().name == "step-00000004"
    with made(chosen(shares_memory=True), tmp_path) as engine:
        assert steps(engine, 4)[2:] == found


@pytest.mark.parametrize("fails", ["", "at some time", "before the end", "known"])
def test_a_with_block_ends_once_its_save_is_complete(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: SlowDisk
) -> None:
    """Nobody has to wait for the last checkpoint of a script, or to ask whether it was written."""
    failed = pytest.raises(CheckpointError, match="No space left on device")
    with failed if fails not in ("", "known") else nullcontext(), made(chosen(shares_memory=True), tmp_path) as engine:
        if fails:
            monkeypatch.setattr(RangeWriter, "write", full)
        save = engine.save(tmp_path / "run")
        if fails == "before the end":
            engine.saver.wait()
        if fails == "known":
            with failed:
                save.wait()
    assert save.is_over
    assert [full_check(found) for found in checkpoints(tmp_path / "run")] == ([] if fails else [[]])


@pytest.mark.parametrize("how", ["closed", "left by an error"])
def test_closing_an_engine_abandons_its_save(how: str, tmp_path: Path, slow_disk: SlowDisk) -> None:
    placements = (DEVICE, DISK, Placement(), Placement(), DEVICE)
    with suppress(KeyError), made(chosen(placements=placements), tmp_path, "sim:1") as engine:
        save = engine.save(tmp_path / "run")
        if how == "left by an error":
            raise KeyError
        engine.close()
    assert save.is_over
    with pytest.raises(CheckpointError, match="given up"):
        save.wait()
    assert not (tmp_path / "run").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "megatrain-save"]


def test_saves_run_one_after_another_and_waits_end(tmp_path: Path, slow_disk: SlowDisk) -> None:
    with made(chosen(shares_memory=True), tmp_path) as engine:
        first = engine.save(tmp_path / "run")
        with pytest.raises(CheckpointError, match="is not written after"):
            first.wait(timeout=0.001)
        steps(engine, 1)
        second = engine.save(tmp_path / "run")
        assert first.is_over
        second.wait()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000001", "step-00000000"]


def test_damaged_checkpoints_make_no_engine(straight: dict[str, Any], tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(straight["bf16"][0], tmp_path / "copy"))
    content = bytearray((copy / "optimizer" / "moments.safetensors").read_bytes())
    content[-9] ^= 4
    (copy / "optimizer" / "moments.safetensors").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"moments\.safetensors is damaged between"):
        Engine.from_checkpoint(copy, verify=False)


def test_user_random_state_is_unchanged(tmp_path: Path) -> None:
    with made(chosen(shares_memory=True), tmp_path) as engine:
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        engine.restore(open_checkpoint(engine.save(tmp_path / "run").wait()))
        assert torch.equal(torch.rand(3), expected)


# Beside a save -------------------------------------------------------------------------------------------------------


def test_failing_to_start_a_save_thread_costs_only_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with made(chosen(shares_memory=True), tmp_path) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", none_left)
            with pytest.raises(CheckpointError, match="can't start new thread"):
                engine.save(tmp_path / "run")
        steps(engine, 2)
        assert engine.save(tmp_path / "run").wait().name == "step-00000002"


@pytest.mark.parametrize("failure", [CheckpointError, KeyboardInterrupt])
def test_a_save_that_does_not_begin_holds_up_no_update(
    failure: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    with made(chosen(shares_memory=True), tmp_path) as engine:
        with monkeypatch.context() as patched, pytest.raises(failure):
            if failure is KeyboardInterrupt:
                patched.setattr(threading.Thread, "start", interrupted)
            engine.save(tmp_path / "run" if failure is KeyboardInterrupt else "")
        assert not engine.saver.gate.unwritten
        steps(engine, 2)
        assert engine.save(tmp_path / "run").wait().name == "step-00000002"


def test_a_config_is_saved_as_it_is_at_the_save(tmp_path: Path) -> None:
    with made(chosen(shares_memory=True), tmp_path) as engine:
        engine.save(tmp_path / "run").wait()
        engine.generation_config.max_new_tokens = 77
        engine.config.name_of_run = "second"
        folder = engine.save(tmp_path / "run", step=1).wait()
    assert '"max_new_tokens": 77' in (folder / "generation_config.json").read_text()
    assert '"name_of_run": "second"' in (folder / "config.json").read_text()


def test_after_a_restore_that_fails_only_a_restore_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise OSError(5, "Input/output error")

    with made(chosen(shares_memory=True), tmp_path) as engine:
        steps(engine, 1)
        saved = engine.save(tmp_path / "run").wait()
        after = steps(engine, 1)
        with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output"):
            patched.setattr("megatrain.train.parts.read_moments", broken)
            engine.restore(saved)
        for call in (lambda: steps(engine, 1), lambda: engine.save(tmp_path / "mixed"), engine.parts.settle):
            with pytest.raises(NonFinite, match=r"a restore that failed has changed only parts .*; restore a check"):
                call()
        engine.restore(saved)
        assert steps(engine, 1) == after


def test_extra_checkpoint_data_is_snapshotted_at_the_call(tmp_path: Path, slow_disk: SlowDisk) -> None:
    with made(chosen(shares_memory=True), tmp_path) as engine:
        slow_disk.waits.set()
        seen = {"order": [1], "by name": {"a": [2]}}
        save = engine.save(tmp_path / "run", seen)
        seen["order"].append(3)  # type: ignore[attr-defined]
        seen["by name"]["a"].append(4)  # type: ignore[index]
        slow_disk.met.set()
        assert open_checkpoint(save.wait()).training["run"] == {"order": [1], "by name": {"a": [2]}}


def test_gradients_do_not_disturb_a_running_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clipping the last op of a unit is its update, after which its state goes back to the disk."""
    how = chosen("bf16", "during_backward", shares_memory=True, placements=HOMES["disk"])
    with made(how, tmp_path) as engine:
        steps(engine, 1)
        quiet = engine.save(tmp_path / "quiet").wait()
        disk, came = engine.parts.disk, threading.Event()
        assert disk is not None
        honest_read, honest_write, honest_wait = disk.read, disk.write, engine.parts.optimizer.before_update

        def read(name: str, memory: Any, start: int = 0) -> None:
            if threading.current_thread().name == "megatrain-save" and name == "disk/moments/0":
                came.wait(20)
            honest_read(name, memory, start)

        def write(name: str, memory: Any, start: int = 0) -> None:
            if name == "disk/moments/0":
                disk._region(name).torn[:] = ["is being written"] * len(disk._region(name).blocks)
                came.set()
                time.sleep(0.2)
            honest_write(name, memory, start)

        def wait(unit: int) -> None:
            if unit == 0:
                came.set()
            honest_wait(unit)

        monkeypatch.setattr(disk, "read", read)
        monkeypatch.setattr(disk, "write", write)
        engine.parts.optimizer.before_update = wait
        save = engine.save(tmp_path / "busy")
        engine.gradients(unequal_batches(2))
        assert files(save.wait()) == files(quiet)


def test_another_model_is_refused_before_anything_is_lost(tmp_path: Path) -> None:
    with made(chosen(shares_memory=True), tmp_path) as other, made(chosen(), tmp_path, "cpu", "llama-tied") as tied:
        for engine, taken in ((tied, other), (other, tied)):
            saved = open_checkpoint(taken.save(tmp_path / taken.structure.units[-1].params[-1].name).wait())
            before = engine.step(unequal_batches(2)), engine.master_weights()
            with pytest.raises(CheckpointError, match=r"another model: (only it has|its files lack) lm_head\.weight"):
                engine.restore(saved)
            assert equal(engine.master_weights(), before[1])


def test_moving_state_leaves_memory_for_saves(tmp_path: Path) -> None:
    """Of a budget that has no byte to spare, or it is refused and the old split holds."""
    with made(chosen(), tmp_path, "sim:1") as engine:
        engine.saver.reserve()
        steps(engine, 1)
        away = chosen(placements=(DEVICE,) * 5).policy
        budgets = engine.parts.pool.ledger.budgets
        budgets["host"] = engine.parts.pool.ledger.nbytes("host")
        state = sum(
            n
            for (tier, owner), n in engine.diagnostics.memory_table().items()
            if tier == "host" and owner != "checkpoint"
        )
        needed = max(engine.parts.store.layouts[unit].size for unit in range(5)) * 4
        assert needed < state
        engine.adopt(away)
        assert engine.diagnostics.memory_table()["host", "checkpoint"] == needed
        expected = steps(engine, 1)
        engine.adopt(chosen().policy)
        budgets["host"] = needed - 1
        with pytest.raises(DoesNotFit):
            engine.adopt(away)
        budgets["host"] = 1 << 40
        assert engine.policy.placements == ()
        engine.save(tmp_path / "run").wait()
    with made(chosen(), tmp_path, "sim:1") as straight:
        assert steps(straight, 2)[1:] == expected
