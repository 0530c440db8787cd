"""What a training step asks of a GPU's driver and of the host, counted on the stand-in CUDA device.

    python -m bench.launches [--out FOLDER]

For a dense, a mixture-of-experts and a hybrid model, per policy: hidden waits for the device, copies of pageable
memory, kernels per layer and micro-batch beside those of the stock model (which checkpoints where we recompute), bytes
over the bus beside the least that there are, CUDA events made per op, and the host's microseconds per op where no op
does anything, which is all that is timed. The models are tiny: what is counted does not depend on their width.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bench.gpu import checkpoint_layers, least_nbytes
from megatrain import AdamW, Engine, Policy
from megatrain.engine import step as engine_step
from megatrain.spec import Home
from tests import standin_cuda
from tests.kinds import KINDS
from tests.tiny import unequal_batches

LAYERS, MORE_LAYERS, MICRO_BATCHES, ROUNDS = 2, 5, 3, 25
MODELS = {"dense": "llama", "experts": "mixtral", "hybrid": "bamba"}
POLICIES: dict[str, dict[str, Any]] = {
    "graphs kept": {"activations": "keep"},
    "recompute": {"activations": "recompute"},
    "offload": {"activation_rows": (("offload",),)},
    "gates": {"activations": "recompute", "gates": "shard", "weight_slots": 1},
    "resident": {"activations": "recompute"},
}
NAME = "launches"


@dataclass(frozen=True)
class Row:
    """Of one steady step of one model by one policy.

    hidden_waits: in ops; waits: all of the foreground, with those that are meant. kernels: of a layer and a
    micro-batch; stock_kernels: the stock model's. in_ratio, out_ratio: bytes over the bus, over the least.
    op_microseconds: of the host's thread that submits, for each op more.
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
    events_per_op: float
    op_microseconds: float


def model_of(kind: str, layers: int) -> PreTrainedModel:
    fields = {**KINDS[kind], "num_hidden_layers": layers}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    config._experts_implementation = "batched_mm"  # which asks for no number on the host
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config).train()
    return made


def engine_of(kind: str, layers: int, name: str) -> Engine:
    how = dict(POLICIES[name])
    if name == "resident":
        how["homes"] = (Home("device", "device", "device"),) * (layers + 2)
    return Engine.from_model(
        model_of(kind, layers), "cuda:0", "bf16", AdamW(), 1.0, Policy("bf16", **how), verify=False
    )


def counted(kind: str, layers: int, name: str) -> tuple[dict[str, int], int, tuple[int, int], float]:
    """Counters of a step, its ops, the least bytes in and out, and seconds where no op does anything."""
    device = standin_cuda.install()
    with engine_of(kind, layers, name) as engine:
        batches = unequal_batches(MICRO_BATCHES)
        schedules: list[int] = []
        with noted(schedules):
            for _ in range(2):
                engine.step(batches)  # the second is the first with pending updates
            device.reset_counters()
            engine.step(batches)
        found = dict(device.counters())
        least = (0, 0) if name == "resident" else least_nbytes(engine)
        return found, schedules[-1], least, idle_seconds(engine, batches)


@contextmanager
def noted(sizes: list[int]) -> Iterator[None]:
    """In the block, the number of ops of each schedule that runs."""
    whole = engine_step.Streamer._execute

    def execute(self: Any, schedule: Any, now: Any) -> None:
        sizes.append(len(schedule.ops))
        whole(self, schedule, now)

    engine_step.Streamer._execute = execute  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine_step.Streamer._execute = whole  # type: ignore[method-assign]


def idle_seconds(engine: Engine, batches: Any) -> float:
    """Of a step whose ops do nothing: submitting, leasing, waiting in order. The state is worthless afterwards."""
    kept, engine_step.ACTIONS = engine_step.ACTIONS, dict.fromkeys(engine_step.ACTIONS, lambda *_: None)
    try:
        best = float("inf")
        for _ in range(ROUNDS):
            began = time.perf_counter()
            engine.step(batches)
            best = min(best, time.perf_counter() - began)
        return best
    finally:
        engine_step.ACTIONS = kept


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
        for batch in batches:
            there(**batch, use_cache=False).loss.backward()
    return int(device.counters()["kernels"])


def row(kind_of: str, name: str) -> Row:
    kind = MODELS[kind_of]
    few, few_ops, _, idle = counted(kind, LAYERS, name)
    more, more_ops, least, longer = counted(kind, MORE_LAYERS, name)
    extra = (MORE_LAYERS - LAYERS) * MICRO_BATCHES
    recomputes = name != "graphs kept"
    stock = stock_kernels(kind, MORE_LAYERS, recomputes=recomputes) - stock_kernels(kind, LAYERS, recomputes=recomputes)
    hidden = more["op_syncs"] + more["copy_syncs"]
    per_unit = (more["kernels"] - few["kernels"]) / extra
    return Row(
        kind_of,
        name,
        hidden,
        hidden + more["stream_syncs"] + more["device_syncs"],
        more["unpinned"],
        per_unit,
        stock / extra,
        more["h2d_bytes"] / least[0] if least[0] else 0.0,
        more["d2h_bytes"] / least[1] if least[1] else 0.0,
        more["events"] / more_ops,
        (longer - idle) / (more_ops - few_ops) * 1e6,
    )


def table(rows: list[Row]) -> str:
    """In Markdown."""
    lines = [
        "| model | policy | waits in ops | all waits | pageable copies | kernels per layer | stock's | bytes in / least"
        " | bytes out / least | events per op | host µs per op |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        ratios = " | ".join(f"{ratio:.2f}" if ratio else "-" for ratio in (each.in_ratio, each.out_ratio))
        lines.append(
            f"| {each.model} | {each.policy} | {each.hidden_waits} | {each.waits} | {each.pageable_copies} |"
            f" {each.kernels:.0f} | {each.stock_kernels:.0f} | {ratios} | {each.events_per_op:.2f} |"
            f" {each.op_microseconds:.0f} |"
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
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{NAME}.json").write_text(json.dumps([asdict(each) for each in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
