"""What a training step asks of a GPU's driver and of the host, counted on the stand-in CUDA device.

    python -m bench.launches [--out FOLDER]

For a dense, a mixture-of-experts and a hybrid model, per policy: hidden waits for the device, copies of pageable
memory, kernels per layer and micro-batch beside those of the stock model (which checkpoints where we recompute), bytes
over the bus beside the least that there are, CUDA events made, and what submitting, leasing and binding an op takes on
a device where nothing runs: calls of functions, and the only thing that is timed, microseconds. Last, the calls that a
step on a CPU makes for each layer and each chunk of tokens. The models are tiny: what is counted does not depend on
their width.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bench.gpu import checkpoint_layers
from megatrain import AdamW, Engine, Policy
from megatrain.device.base import Stream
from megatrain.device.cpu import CpuDevice
from megatrain.engine import Executor, streamer
from megatrain.spec import Numerics, Placement
from megatrain.spec.layout import layout_of
from tests import standin_cuda
from tests.kinds import KINDS
from tests.tiny import batch, tiny_model, unequal_batches

LAYERS, MORE_LAYERS, MANY_LAYERS, MICRO_BATCHES, ROUNDS = 2, 5, 14, 3, 50
MODELS = {"dense": "llama", "experts": "mixtral", "hybrid": "bamba"}
POLICIES: dict[str, dict[str, Any]] = {
    "graphs kept": {"activations": "keep"},
    "recompute": {"activations": "recompute"},
    "offload": {"activations_by_layer": (("offload",),)},
    "by shard": {"activations": "recompute", "wait_for": "shard", "weight_slots": 1, "shard_nbytes": 1 << 14},
    "resident": {"activations": "recompute"},
}
NAME = "launches"


@dataclass(frozen=True)
class Row:
    """Of one steady step of one model by one policy.

    hidden_waits: in ops; waits: all of the foreground, with those that are meant. kernels: of a layer and a
    micro-batch; stock_kernels: the stock model's. in_ratio, out_ratio: bytes over the bus, over the least. events: that
    were made. op_calls: Python and C functions called for each op more, on a device where nothing runs;
    op_microseconds: what they took.
    """

    model: str
    policy: str
    hidden_waits: int
    waits: int
    pageable_copies: int
    kernels: float
    stock_kernels: float
    in_ratio: float
    out_ratio: float
    events: int
    op_calls: float
    op_microseconds: float


def least_nbytes(engine: Engine) -> tuple[int, int]:
    """Bytes that must cross the bus in a step that keeps no weights, to the device and back.

    Each unit's weights on the way up, and on the way down but for the layers that still lie in slots; each gradient
    once, in the weights' dtype.
    """
    weights = [engine.numerics.weight_nbytes * layout_of(unit).size for unit in engine.parts.ported.spec.units]
    return sum(weights) + sum(weights[: -1 - engine.policy.weight_slots]), sum(weights)


def model_of(kind: str, layers: int) -> PreTrainedModel:
    fields = {**KINDS[kind], "num_hidden_layers": layers}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    config._experts_implementation = "batched_mm"  # which asks for no number on the host
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config).train()
    return made


class NullDevice(CpuDevice):
    """Memory of its own, and streams that do what they are given at once, on the thread that submits it."""

    shares_memory = False

    def free_nbytes(self) -> int:
        return 1 << 40

    def stream(self, name: str) -> Stream:
        return super().stream("compute")


def engine_of(kind: str, layers: int, name: str, device: Any = "cuda:0") -> Engine:
    how = dict(POLICIES[name])
    if name == "resident":
        how["placements"] = (Placement("device", "device", "device"),) * (layers + 2)
    return Engine.from_model(model_of(kind, layers), device, "bf16", AdamW(), 1.0, Policy(**how), verify=False)


def counted(kind: str, layers: int, name: str) -> tuple[dict[str, int], tuple[int, int]]:
    """Counters of a step, and the least bytes in and out."""
    device = standin_cuda.install()
    with engine_of(kind, layers, name) as engine:
        batches = unequal_batches(MICRO_BATCHES)
        for _ in range(2):
            engine.step(batches)  # the second is the first with pending updates
        device.reset_counters()
        engine.step(batches)
        return dict(device.counters()), (0, 0) if name == "resident" else least_nbytes(engine)


def idle(kind: str, layers: int, name: str) -> tuple[int, int, float]:
    """Ops of a step, and the calls and seconds that it takes where no op does anything: submitting, leasing, waiting in
    order."""
    with engine_of(kind, layers, name, NullDevice()) as engine:
        batches = unequal_batches(MICRO_BATCHES)
        schedules: list[int] = []
        with noted(schedules):
            for _ in range(2):
                engine.step(batches)
        kept, streamer.ACTIONS = streamer.ACTIONS, dict.fromkeys(streamer.ACTIONS, lambda *_: None)
        try:
            with counting_calls() as calls_of:
                called = calls_of(lambda: engine.step(batches))
            return schedules[-1], called, quickest(lambda: engine.step(batches))
        finally:
            streamer.ACTIONS = kept


@contextmanager
def counting_calls() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Yields a function that runs another one and returns the Python and C functions that it called, on this thread and
    on those that were started in the block."""
    found: list[str] = []

    def count(_: object, event: str, __: object) -> None:
        if event in ("call", "c_call"):
            found.append(event)

    def calls_of(function: Callable[[], object]) -> int:
        found.clear()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            function()
        finally:
            sys.setprofile(before)
        return len(found)

    before = threading.getprofile()
    threading.setprofile(count)
    try:
        yield calls_of
    finally:
        threading.setprofile(before)


def step_calls(layers: int, activations: str = "keep", **numerics: Any) -> int:
    """Calls of a steady step of a tiny Llama on a CPU: 32 tokens, in chunks as `numerics` says."""
    work, policy = [batch(4, 8, 0)], Policy(activations=activations)  # type: ignore[arg-type]
    how: Any = {"policy": policy, "numerics": Numerics("bf16", **numerics), "verify": False}
    model = tiny_model(num_hidden_layers=layers)
    with counting_calls() as calls_of, Engine.from_model(model, "cpu", None, **how) as engine:
        for _ in range(2):
            engine.step(work)
        return calls_of(lambda: engine.step(work))


def stock_calls(layers: int) -> int:
    """Calls of plain PyTorch's forward and backward, as in `step_calls`."""
    model, work = tiny_model(num_hidden_layers=layers).to(torch.bfloat16), batch(4, 8, 0)

    def step() -> None:
        model.zero_grad()
        model(**work, use_cache=False).loss.backward()

    with counting_calls() as calls_of:
        for _ in range(2):
            step()
        return calls_of(step)


def calls() -> dict[str, float]:
    """What -> the calls that a step takes more with one more of it. A layer's include its copies, norm and update."""
    chunks, whole = 4, step_calls(LAYERS)
    tokens = 32 // chunks

    def per_layer(count: Callable[[int], int]) -> float:
        return (count(MORE_LAYERS) - count(LAYERS)) / (MORE_LAYERS - LAYERS)

    return {
        "layer, graphs kept": per_layer(step_calls),
        "layer, recompute": per_layer(partial(step_calls, activations="recompute")),
        "layer, stock": per_layer(stock_calls),
        "chunk of an MLP": (step_calls(LAYERS, mlp_chunk_tokens=tokens) - whole) / (LAYERS * chunks),
        "chunk of the loss": (step_calls(LAYERS, loss_chunk_tokens=tokens) - whole) / (chunks - 1),
    }


def quickest(function: Callable[[], object]) -> float:
    """Seconds, the least of `ROUNDS`."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best


@contextmanager
def noted(sizes: list[int]) -> Iterator[None]:
    """In the block, the number of ops of each schedule that runs."""
    whole = Executor.run

    def run(self: Executor, schedule: Any, *how: Any) -> None:
        sizes.append(len(schedule.ops))
        whole(self, schedule, *how)

    Executor.run = run  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Executor.run = whole  # type: ignore[method-assign]


def stock_kernels(kind: str, layers: int, *, recomputes: bool) -> int:
    """Of forward and backward by plain PyTorch."""
    device = standin_cuda.install()
    model = torch.nn.Module.to(model_of(kind, layers), torch.bfloat16)
    there: Any = torch.nn.Module.cuda(model)
    if recomputes:
        checkpoint_layers(there)
    batches = [{key: value.cuda() for key, value in batch.items()} for batch in unequal_batches(MICRO_BATCHES)]
    for _ in range(2):
        device.reset_counters()
        for each in batches:
            there(**each, use_cache=False).loss.backward()
    return int(device.counters()["kernels"])


def row(kind_of: str, name: str) -> Row:
    kind = MODELS[kind_of]
    (few, _), (more, least) = (counted(kind, layers, name) for layers in (LAYERS, MORE_LAYERS))
    ops, called, seconds = (
        after - before for before, after in zip(*(idle(kind, n, name) for n in (LAYERS, MANY_LAYERS)), strict=True)
    )
    extra = (MORE_LAYERS - LAYERS) * MICRO_BATCHES
    recomputes = name != "graphs kept"
    stock = stock_kernels(kind, MORE_LAYERS, recomputes=recomputes) - stock_kernels(kind, LAYERS, recomputes=recomputes)
    hidden = more["op_syncs"] + more["copy_syncs"]
    return Row(
        kind_of,
        name,
        hidden,
        hidden + more["stream_syncs"] + more["device_syncs"],
        more["unpinned"],
        (more["kernels"] - few["kernels"]) / extra,
        stock / extra,
        more["h2d_bytes"] / least[0] if least[0] else 0.0,
        more["d2h_bytes"] / least[1] if least[1] else 0.0,
        more["events"],
        called / ops,
        seconds / ops * 1e6,
    )


def table(rows: list[Row]) -> str:
    """In Markdown."""
    lines = [
        "| model | policy | waits in ops | all waits | pageable copies | kernels per layer | stock's | bytes in / least"
        " | bytes out / least | events made | calls per op | µs per op |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        ratios = " | ".join(f"{ratio:.2f}" if ratio else "-" for ratio in (each.in_ratio, each.out_ratio))
        lines.append(
            f"| {each.model} | {each.policy} | {each.hidden_waits} | {each.waits} | {each.pageable_copies} |"
            f" {each.kernels:.0f} | {each.stock_kernels:.0f} | {ratios} | {each.events} |"
            f" {each.op_calls:.0f} | {each.op_microseconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="counts of a training step on the stand-in CUDA device")
    parser.add_argument("--out", type=Path, help="folder for launches.json")
    arguments = parser.parse_args()
    if reason := standin_cuda.unavailable():
        print(f"no stand-in CUDA device: {reason}")
        return 1
    rows = [row(model, policy) for model in MODELS for policy in POLICIES]
    print(table(rows))
    for what, count in calls().items():
        print(f"{what}: {count:,.0f} calls")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{NAME}.json").write_text(json.dumps([asdict(each) for each in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
