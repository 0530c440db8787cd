"""On a GPU: what surrounds a step. Failures, memory, checkpoints, losses, trainers, commands, a second device."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import small_probe
from megatrain import AdamW, Engine, Policy
from megatrain.device import open_device
from megatrain.engine import streamer
from megatrain.errors import DeviceError, MegaTrainError, NonFinite, OutOfDeviceMemory, StreamFailed
from megatrain.losses import DPO, with_reference
from megatrain.model import port_model
from megatrain.plan import Question, find_plan, machine
from megatrain.spec import Limits, Numerics, Placement
from tests import standin_cuda
from tests.tiny import batch, equal, stock_gradients, tiny_model, unequal_batches

pytestmark = pytest.mark.gpu

ON_DEVICE = (Placement("device", "device", "device"),) * 5


def small(precision: Any = "bf16", clip: float | None = 0.5, **how: Any) -> Engine:
    model = tiny_model(attn_implementation="eager")
    numerics, policy = Numerics(precision, loss_chunk_tokens=8), Policy(shard_nbytes=4096, **how)
    return Engine.from_model(
        model, "cuda:0", precision, AdamW(lr=1e-2), clip, policy, seed=2, verify=False, numerics=numerics
    )


def step(engine: Engine) -> float:
    return engine.step(unequal_batches(2)).loss


# Failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["FETCH", "FORWARD", "LOSS", "BACKWARD", "GRAD", "NORM", "UPDATE", "OFFLOAD", "RELOAD"]
)
def test_a_failure_in_any_stream_is_reported_and_costs_one_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    how: dict[str, Any] = {"activations_by_layer": (("offload",),)}
    with small(**how) as engine, small(**how) as other:
        step(engine)
        step(other)
        with monkeypatch.context() as patch:
            patch.setitem(streamer.ACTIONS, kind, broken)
            with pytest.raises(StreamFailed, match="broken on purpose"):
                step(engine)
        losses = [step(each) for each in (engine, other) for _ in range(2)]
        assert losses[:2] == losses[2:]
        assert equal(engine.master_weights(), other.master_weights())


def test_code_that_leaves_another_stream_current_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ops would run there, behind nothing."""
    loss, before = streamer.ACTIONS["LOSS"], torch.cuda.current_stream()

    def leaving(*of_op: Any) -> None:
        loss(*of_op)
        torch.cuda.set_stream(torch.cuda.Stream())

    with small() as engine:
        first = engine.evaluate(unequal_batches(2))
        with monkeypatch.context() as patch:
            patch.setitem(streamer.ACTIONS, "LOSS", leaving)
            with pytest.raises(DeviceError, match=r"op LOSS .*: .* changed the current CUDA stream"):
                step(engine)
        assert torch.cuda.current_stream() == before
        assert engine.evaluate(unequal_batches(2)) == first


@pytest.mark.parametrize("how", [{}, {"placements": ON_DEVICE}], ids=["host", "device"])
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_nonfinite_gradients_change_nothing(how: dict[str, Any], update: Any) -> None:
    """Where state is on the device, the device alone knows in time."""
    clip = 0.5 if update == "next_forward" else None

    def endless(log_probs: torch.Tensor, _: Any) -> torch.Tensor:
        """A loss that is infinite."""
        return -(log_probs * 1e38 * 1e5).sum()

    def wild(log_probs: torch.Tensor, _: Any) -> torch.Tensor:
        """A finite loss, whose gradient is not."""
        return -log_probs.sum() + (log_probs - log_probs.detach()).abs().sqrt().sum()

    with small("fp32", clip, update=update, **how) as engine:
        step(engine)
        before = engine.master_weights()
        applied = engine.diagnostics.applied_updates()
        for loss in (endless, wild):
            with pytest.raises(NonFinite):
                engine.step(unequal_batches(2), loss_fn=loss)
            assert engine.diagnostics.applied_updates() == applied
            assert equal(engine.master_weights(), before)
        assert step(engine) > 0
        assert not equal(engine.master_weights(), before)


# Memory -------------------------------------------------------------------------------------------------------------


def test_an_oversized_policy_is_refused_and_the_device_stays_usable() -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(max(1, int(free) - (24 << 20)), dtype=torch.uint8, device="cuda")
    wide = tiny_model(hidden_size=1024, intermediate_size=4096)
    with pytest.raises(MegaTrainError) as raised:
        Engine.from_model(wide, "cuda:0", "bf16", policy=Policy(weight_slots=4), verify=False)
    assert isinstance(raised.value, OutOfDeviceMemory) or "of device memory" in str(raised.value)
    del hog
    torch.cuda.empty_cache()
    with small() as engine:
        assert step(engine) > 0


def test_a_device_without_memory_for_a_context_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual.")

    monkeypatch.setattr(torch.cuda, "Stream", full)
    with pytest.raises(OutOfDeviceMemory, match="cannot be used: CUDA error: out of memory; run `nvidia-smi`"):
        open_device("cuda:0")


def test_memory_is_freed_between_engines() -> None:
    torch._C._cuda_clearCublasWorkspaces()  # of whoever came before
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with small(placements=ON_DEVICE) as engine:
            step(engine)
        del engine
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_step_takes_the_device_memory_that_is_planned(share: float) -> None:
    model = tiny_model(vocab_size=16_000, hidden_size=128)
    question = Question(port_model(model, torch.bfloat16).spec, machine("h200"), 512, 64)
    kept = find_plan(question).nbytes["device"]
    plan = find_plan(replace(question, limits=Limits(device_nbytes=int(share * kept))))
    ids = torch.randint(16_000, (question.sequences, 64))
    batches = [{"input_ids": each, "labels": each} for each in ids.split(plan.micro_batch)]
    how: Any = {"policy": plan.policy, "numerics": plan.numerics, "verify": False}
    with Engine.from_model(model, "cuda:0", **how) as engine:
        engine.step(batches)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            engine.step(batches)
        found = torch.cuda.max_memory_allocated()
    workspaces = 0 if standin_cuda.installed() else 2 * 32 << 20  # of cuBLAS, in no plan
    planned = plan.nbytes["device"]
    assert 0.97 * planned <= found <= 1.01 * planned + workspaces


# State and losses ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_resumes_bit_for_bit_on_another_device(tmp_path: Path) -> None:
    with small() as engine:
        step(engine)
        folder = engine.save(tmp_path).wait()
        expected = [step(engine) for _ in range(2)], engine.master_weights()
    how: Any = {"policy": Policy(placements=ON_DEVICE), "numerics": Numerics("bf16", loss_chunk_tokens=8)}
    again = Engine.from_checkpoint(folder, device="cuda:0", max_grad_norm=0.5, **how, attention="eager", verify=False)
    with again as engine:
        found = [step(engine) for _ in range(2)], engine.master_weights()
    assert found[0] == expected[0]
    assert equal(found[1], expected[1])


def test_preference_steps_match_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda:0"):
        with Engine.from_model(tiny_model(), device, "fp32", AdamW(lr=1e-2), verify=False) as engine:
            given = with_reference(
                [batch(4, 12, 0), batch(2, 9, 1)], engine.log_probs([batch(4, 12, 0), batch(2, 9, 1)])
            )
            outs = [engine.step(given, loss_fn=DPO(0.5)) for _ in range(3)]
            results.append([value for out in outs for value in (out.loss, *out.metrics.values())])
            del results[-1][4]  # accuracy before the first update: all pairs are ties, decided by the last bit
    assert results[1] == pytest.approx(results[0], rel=1e-3, abs=1e-5)


def test_batches_already_on_the_device_are_accepted() -> None:
    there = [{key: value.cuda() for key, value in each.items()} for each in unequal_batches(2)]
    with small() as engine, small() as other:
        assert engine.step(there).loss == step(other)


def test_evaluation_and_logits_equal_the_stock_model() -> None:
    model = tiny_model()
    loss, _ = stock_gradients(model, unequal_batches(2))
    ids = batch(2, 9, 3)["input_ids"]
    with Engine.from_model(model, "cuda:0", "fp32", verify=False) as engine:
        assert engine.evaluate(unequal_batches(2)) == pytest.approx(loss, rel=1e-5)
        found = engine.logits({"input_ids": ids}).cpu()
    torch.testing.assert_close(found, model.eval()(ids).logits.detach(), rtol=1e-4, atol=1e-4)


# What a user starts ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")  # the library's own, of which some come with each release
def test_trainer_losses_match_the_cpu(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="a Trainer needs accelerate")
    from megatrain.hf import StreamedTrainer

    losses = []
    for use_cpu in (True, False):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(use_cpu)), max_steps=4, logging_steps=1, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, learning_rate=5e-3, report_to="none", disable_tqdm=True, use_cpu=use_cpu,
            save_strategy="no",
        )  # fmt: skip
        rows = [{key: value[0] for key, value in batch(1, 10, seed).items()} for seed in range(16)]
        trainer = StreamedTrainer(
            model=tiny_model(), args=arguments, train_dataset=rows, engine_options={"verify": False}
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_command_line_trains_and_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer", reason="the command line needs typer")
    from megatrain.cli import main
    from megatrain.config import save_config
    from tests.run.test_training import configuration

    config = configuration(tmp_path, train={"device": "cuda:0"})
    save_config(config, tmp_path / "config.yaml")
    assert _status(main, "train", str(tmp_path / "config.yaml")) == 0, capsys.readouterr().err
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in metrics)
    probed = tmp_path / "hardware.json"
    words = ("probe", "--device", "cuda:0", "--path", str(tmp_path), "--output", str(probed), "--seconds", "2")
    with small_probe() if standin_cuda.installed() else nullcontext():
        assert _status(main, *words) == 0, capsys.readouterr().err
    assert probed.is_file()


def _status(main: Any, *words: str) -> int:
    """What the command line exits with."""
    before, sys.argv = sys.argv, ["megatrain", *words]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


OTHER = """
import torch
from megatrain import Engine
from tests.tiny import tiny_model, unequal_batches
with Engine.from_model(tiny_model(), "cuda:1", verify=False) as engine:
    for _ in range(2):
        engine.step(unequal_batches(2))
    engine.generate(unequal_batches(1)[0]["input_ids"], max_new_tokens=2)
    assert torch.cuda.memory_allocated(1) > 0
assert torch.cuda.memory_reserved(0) == 0, torch.cuda.memory_reserved(0)
"""


def test_only_the_named_device_is_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(OTHER)
    words = [sys.executable, str(tmp_path / "other.py")]
    if standin_cuda.installed() is not None:
        monkeypatch.setenv("STANDIN_DEVICES", "2")
        words[1:1] = ["-m", "tests.standin_cuda"]
    elif torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
