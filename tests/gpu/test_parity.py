"""On a real GPU: the same numbers as on the cpu, the same bits whatever the schedule, copies beside compute."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import AdamW, Engine, Policy
from megatrain.device import open_device
from megatrain.engine import fused_forms, streamer
from megatrain.errors import DeviceError, StreamFailed
from megatrain.spec import Numerics, Precision
from megatrain.train.parity import truth
from tests import standin_cuda
from tests.stock.image_models import image_batch, image_model, text_batch
from tests.tiny import FAMILIES, equal, relative_error, stock_gradients, tiny_model, unequal_batches

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_stock_model_in_fp32(family: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model(family)
    loss, expected = stock_gradients(model, unequal_batches())
    with Engine.from_model(model, "cuda:0", "fp32") as engine:
        found = engine.gradients(unequal_batches())
        assert engine.evaluate(unequal_batches()) == pytest.approx(loss, rel=1e-5)
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
def test_fused_functions_have_the_stock_models_gradients(family: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, numerics = tiny_model(family), Numerics("fp32", kernels="fused")
    _, expected = stock_gradients(model, unequal_batches())
    with Engine.from_model(model, "cuda:0", numerics=numerics) as engine:
        found = engine.gradients(unequal_batches())
        assert equal(found, engine.gradients(unequal_batches()))
    assert fused_forms.has_gpu_kernels()
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_attention_with_a_mask_is_not_cudnns(monkeypatch: pytest.MonkeyPatch, activations: str) -> None:
    """Its gradients can be NaN on Hopper. Without a mask PyTorch may choose it, in the forward and when recomputing."""
    calls, attention = list[tuple[bool, bool]](), torch.nn.functional.scaled_dot_product_attention

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        if args[0].is_cuda:
            calls.append((kwargs["attn_mask"] is not None, torch.backends.cuda.cudnn_sdp_enabled()))
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    ids, mask = torch.arange(128).view(2, 64) % 50, torch.ones(2, 64, dtype=torch.long)
    mask[0, 40:] = 0
    whole: dict[str, Any] = {"input_ids": ids, "labels": ids}
    with Engine.from_model(tiny_model("llama"), "cuda:0", "fp32", policy=Policy(activations=activations)) as engine:
        engine.gradients([whole, {**whole, "attention_mask": mask}])
    assert set(calls) == {(False, True), (True, False)}
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "lfm2_vl", "qwen3_vl"])
def test_images_have_the_stock_models_gradients(kind: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, batches = image_model(kind), [image_batch(kind, 1), text_batch(2)]
    _, expected = truth(model, batches)  # type: ignore[arg-type]
    with Engine.from_model(model, "cuda:0", "fp32", verify=False) as engine:
        found = engine.gradients(batches)
    floor = 1e-3 * max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        assert float((found[name] - value).norm()) < 1e-5 * max(float(value.norm()), floor), name


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("streamed", [0.0, 1.0])
def test_parameters_without_a_gradient_are_left_alone(clip: float | None, streamed: float) -> None:
    """An image tower in steps with and without images: the bits of a step that updates in host memory."""
    update = "during_backward" if clip is None else "next_forward"
    found = []
    for policy in (Policy(update=update), Policy(update=update, streamed_updates=streamed, shard_nbytes=4096)):  # type: ignore[arg-type]
        optimizer = AdamW(lr=1e-2, weight_decay=0.1)
        with Engine.from_model(image_model("llava"), "cuda:0", "fp32", optimizer, clip, policy, verify=False) as engine:
            start = engine.master_weights()
            engine.step([text_batch(1)])
            tower = {name: value for name, value in engine.master_weights().items() if "vision" in name}
            assert tower
            assert all(torch.equal(value, start[name]) for name, value in tower.items())
            for number in range(3):
                engine.step([image_batch("llava", number) if number % 2 else text_batch(number)])
            found.append(engine.master_weights())
    assert equal(*found)


SWITCHES = """
import sys, torch
from megatrain import Engine
from megatrain.engine import fused_forms, streamer
from tests.tiny import tiny_model, unequal_batches
precision, names = sys.argv[1:]
cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
if names == "older":
    torch.set_float32_matmul_precision("medium")
    cudnn.allow_tf32 = True
    read = lambda: (torch.get_float32_matmul_precision(), cudnn.allow_tf32)
    loose, exact = ("medium", True), ("highest", False)
else:
    matmul.fp32_precision = cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
    read = lambda: (matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    loose, exact = ("tf32",) * 3, ("ieee",) * 3
seen, plain = [], streamer.ACTIONS["BACKWARD"]
streamer.ACTIONS["BACKWARD"] = lambda *args: (seen.append(read()), plain(*args))[1]
with Engine.from_model(tiny_model(), "cuda:0", precision, verify=False) as engine:
    engine.step(unequal_batches())
assert set(seen) == {exact if precision == "fp32" else loose}, seen
assert read() == loose, read()
"""


@pytest.mark.parametrize("names", ["older", "newer"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_float32_matmuls_ignore_tf32_settings(precision: Precision, names: str, tmp_path: Path) -> None:
    """Products and convolutions, by PyTorch's older and newer names; in bf16 the user's choice stands. Afterwards it is
    as it was. In a process of its own, since the two kinds of names do not go together."""
    (tmp_path / "switches.py").write_text(SWITCHES)
    words = [sys.executable, str(tmp_path / "switches.py"), precision, names]
    if standin_cuda.installed() is not None:
        words[1:1] = ["-m", "tests.standin_cuda"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_no_schedule_changes_a_bit(precision: Precision, update: str) -> None:
    clip = 0.5 if update == "next_forward" else None
    results = []
    ways = ((1, 500, "keep", "pageable"), (2, 1 << 20, "recompute", "pinned"), (4, 3000, "keep", "pageable"))
    for slots, shard, activations, transfer in ways:
        policy = Policy(
            weight_slots=slots,
            grad_slots=slots,
            shard_nbytes=shard,
            activations=activations,  # type: ignore[arg-type]
            update=update,  # type: ignore[arg-type]
            transfer=transfer,
        )
        model = tiny_model(attn_implementation="eager")  # fused attention sums its gradients in any order
        with Engine.from_model(model, "cuda:0", precision, AdamW(lr=1e-2), clip, policy) as engine:
            for _ in range(5):
                engine.step(unequal_batches(3))
            results.append(engine.master_weights())
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


def test_a_failure_on_a_copy_thread_surfaces_and_the_engine_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no copy")

    with Engine.from_model(tiny_model(), "cuda:0") as engine:
        with monkeypatch.context() as patch:
            patch.setitem(streamer.ACTIONS, "FETCH", broken)
            with pytest.raises(StreamFailed, match="no copy"):
                engine.step(unequal_batches())
        assert engine.step(unequal_batches()).tokens > 0


@pytest.mark.silicon
def test_copies_run_beside_compute(tmp_path: Path) -> None:
    """From a real trace: copies and compute overlap for at least half of the shorter of the two."""
    model = tiny_model(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=16,
        max_position_embeddings=256,
    )
    ids = torch.randint(3, 96, (64, 256))
    path = tmp_path / "trace.json"
    with Engine.from_model(model, "cuda:0", policy=Policy(activations="recompute")) as engine:
        engine.diagnostics.trace(path, steps=1)
        for _ in range(3):
            engine.step([{"input_ids": ids, "labels": ids}] * 2)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    compute = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] in ("FORWARD", "LOSS", "BACKWARD")]
    copies = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] in ("FETCH", "GRAD")]
    hidden = sum(max(0.0, min(e, stop) - max(b, start)) for b, e in copies for start, stop in compute)
    shorter = min(sum(stop - start for start, stop in intervals) for intervals in (copies, compute))
    assert hidden > 0.5 * shorter


def test_device_memory_is_what_the_ledger_says() -> None:
    gc.collect()  # engines of other tests
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model = tiny_model(hidden_size=1024, intermediate_size=4096, vocab_size=8192)  # whose embedding is not small
    with Engine.from_model(model, "cuda:0") as engine:
        engine.step(unequal_batches())
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one for each stream, outside any ledger
        held = sum(n for (tier, _), n in engine.diagnostics.memory_table().items() if tier == "device")
        assert held <= torch.cuda.memory_allocated() - before <= held * 1.05 + (1 << 20)


def test_host_memory_is_pinned_in_its_exact_size() -> None:
    device = open_device("cuda:0")
    memory = device.host.allocate(123_457, "x")
    assert memory.numel() == 123_457
    assert not memory.any()
    assert memory.is_pinned()
    assert not device.host.allocate_pageable(123_457, "x").is_pinned()
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.stream("compute")


def test_a_device_index_out_of_range_is_refused() -> None:
    with pytest.raises(DeviceError, match="use a lower index"):
        open_device(f"cuda:{torch.cuda.device_count()}")
