"""Compares published measurements of other systems with replays of their own schedules, and fits what lies between.

    python -m bench.published [--json FILE]

`bench/published.json` has what others measured: each point with its source, the words that say it, and what is known of
model, machine and schedule. Each point that can be expressed is replayed as a schedule of our own ops that moves and
computes what that system does, on the described machine with the point's own host memory where it is stated. Four
physical efficiencies (`Efficiencies`) are then fitted by least squares on logarithms of replayed over measured time.
Every third point of a system stays out of the fit, and the errors of those are what a plan's are likely to be. They are
no blind test: how each system runs its step (`way`) was written down with all points in view.

Nothing is fitted to a single system or machine. Left out are points that cannot be expressed (`why_not`), activations
on their way to host memory, which hide behind compute in every point here, and communication within one node.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, cached_property
from math import ceil, inf, log2
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import numpy as np

from bench.zero3 import FEW, ONE_MORE, MicroMajor, UpdatesLast
from megatrain.commands.plan import find_model
from megatrain.plan import contention, machine, op_seconds, optimizer_bandwidth, step_flops
from megatrain.plan.cost import duplex_bandwidths
from megatrain.plan.estimates import shallow
from megatrain.plan.placement import ON_DEVICE
from megatrain.schedule import Op, Schedule, replay
from megatrain.spec import Hardware, ModelSpec, Numerics, Policy, Work
from megatrain.spec.contention import Contention
from megatrain.spec.hardware import ElementwiseRate
from megatrain.spec.layout import layout_of

FILE = Path(__file__).with_suffix(".json")

STREAM_SHARE = 0.8
"""Of the host memory's bandwidth that a source states: what STREAM reaches of it, as in `machines.json`."""

FLASH_2 = {
    512: (191.0e12, 123.2e12),
    1024: (260.0e12, 166.8e12),
    2048: (298.0e12, 203.0e12),
    4096: (319.0e12, 228.1e12),
    8192: (333.0e12, 239.2e12),
    16384: (335.0e12, 260.2e12),
}
"""Length -> FLOPs per second of FlashAttention-2 on an H100, causal: forward by the FlashAttention-3 paper's figure,
backward by what the forward leaves of both ways together in the FlashAttention repository's figure; a backward counts
twice a forward, not 2.5 times. The systems here were measured with it or with FlashAttention-3; `machines.json` has the
rates of cuDNN, which PyTorch chooses on Hopper from 2.11 on."""

FLASH_3 = 1.75, 1.6
"""FlashAttention-3 over -2 on Hopper, forward and backward: the middle of its paper's 1.5 to 2.0 and 1.5 to 1.75."""

FUSED_LOSS = 1 / 4
"""Traffic of a fused loss, which reads logits in bf16 twice and writes their gradient once, over ours in float32."""

SUM_NBYTES, NATIVE_SUM_NBYTES = 12, 4
"""Bytes of a parameter that our sum of gradients reads and writes, and that a product takes that adds to a sum."""

WITH_SUMS = 1.0, 2.0
"""As `Way.fetched`, where the sum of gradients comes to the device beside the weights, and leaves again."""

SERVER = "l40s"
"""Whose host DeepSpeed's points get: a server with 500 GB by the file of those points, and not said which."""

SHARD_NBYTES = 1 << 40
"""All of a unit in one copy: fewer ops."""


# Points ---------------------------------------------------------------------------------------------------------------

MACHINES = {
    "H100 SXM5 80GB (1 of a multi-GPU machine)": "h100",
    "H100 80GB": "h100",
    "H100": "h100",
    "H100 (1 of 4)": "h100",
    "8x H100 80GB": "h100",
    "GH200 (96GB HBM3)": "gh200",
    "A100 80GB (1 of a multi-GPU machine)": "a100-pcie",  # its source says SXM5 of the H100 beside it, and PCIe of both
    "8x A100 80GB": "a100-sxm",  # NVLink
    "L40S": "l40s",
    "RTX PRO 6000": "rtx-pro-6000",
    "RTX 3090": "rtx-3090",
    "RTX 4090": "rtx-4090",
    "RTX 5090": "rtx-5090",
}
"""What a point calls its device -> the described machine."""

NODES = {"llm-foundry (in memory)": 8}
"""Systems whose GPUs each do the same on their own, with NVLink between them -> how many there are."""

NOT_EXPRESSED = {
    "dataflow (als244, successor of ml_dataflow)": "how much it computes again is its planner's choice and not stated",
    "MegaTrain-Plus (fork), baseline mode = stock MegaTrain": "no optimizer step, and a machine without an entry",
    "MegaTrain (then Horizon-LM)": "its rate counts tokens that carry loss, and the padded ones are not stated",
    "SuperOffload": "the formula of its rate is not stated",
}


@dataclass(frozen=True)
class Point:
    """One published measurement that can be replayed."""

    system: str
    source: str
    quote: str
    model: str
    shape: tuple[tuple[str, Any], ...]
    gpu: str
    host: str
    schedule: str
    comment: str
    length: int
    sequences: int
    """Of a step, on one GPU."""
    micro_batch: int
    measured: tuple[str, float]
    """What was measured, in `tokens/s`, `seconds` or `TFLOPS`, and how much of it."""

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @cached_property
    def spec(self) -> ModelSpec:
        return _spec(self.system.startswith("llm-foundry"), "Qwen2.5-" in self.model, self.shape)

    @property
    def seconds(self) -> float:
        """Measured, of a step."""
        what, value = self.measured
        if what == "TFLOPS":  # as its comment says: 6 for each parameter and token
            return 6 * self.spec.numel * self.tokens / (1e12 * value)
        return value if what == "seconds" else self.tokens / (value / NODES.get(self.system, 1))


def read(entry: Mapping[str, Any]) -> Point:
    """An entry of the file; a point of a node is that of one of its GPUs."""
    gpus = NODES.get(entry["system"], 1)
    texts = {name: entry[name] or "" for name in ("system", "source", "quote", "model", "gpu", "host", "schedule")}
    return Point(
        **texts,
        comment=entry["comment"] or "",
        shape=tuple(entry["shape"].items()),
        length=entry["sequence_length"],
        sequences=entry["sequences_per_step"] // gpus,
        micro_batch=entry["micro_batch"] or 1,
        measured=(entry["what"], entry["value"]),
    )


def why_not(entry: Mapping[str, Any]) -> str:
    """Why an entry cannot be replayed; empty where it can."""
    if entry["system"] in NOT_EXPRESSED:
        return NOT_EXPRESSED[entry["system"]]
    if entry["shape"] is None:
        return "the model's shape is not stated"
    if not entry["sequence_length"] or not entry["sequences_per_step"]:
        return "batch or sequence length is not stated"
    if "fp16" in str(entry["precision"]):
        return "fp16"
    if re.match(r"\d+x ", entry["gpu"]) and entry["system"] not in NODES:
        return "more than one GPU"
    return "" if entry["gpu"] in MACHINES else "no machine of the library has this device"


def entries() -> list[dict[str, Any]]:
    """The points of the file, each with what it shares with others of its system and machine, and its model's shape."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    shapes: dict[str | None, Any] = {None: None, **content["shapes"]}
    whole = [{**system, **point} for system in content["systems"] for point in system.pop("points", [{}])]
    return [{**entry, "shape": shapes[entry["shape"]]} for entry in whole]


def points() -> list[Point]:
    """Those that can be expressed, by system and within it by machine, model, length and speed."""
    found = [read(entry) for entry in entries() if not why_not(entry)]
    return sorted(found, key=lambda each: (each.system, each.gpu, each.model, each.length, each.measured[1]))


def stays_out(found: Sequence[Point]) -> list[bool]:
    """Of each point whether it is kept out of the fit: the second, fifth, eighth ... of each system."""
    seen: defaultdict[str, int] = defaultdict(int)
    out = []
    for point in found:
        out.append(seen[point.system] % 3 == 1)
        seen[point.system] += 1
    return out


@cache
def _spec(gpt: bool, biases: bool, shape: tuple[tuple[str, Any], ...]) -> ModelSpec:
    """As the library builds it. MPT, whose attention the library runs without a kernel, as a GPT-2 of its size."""
    of = dict(shape)
    if gpt:
        sizes = {"n_embd": "hidden_size", "n_inner": "feed_forward", "n_layer": "layers", "n_head": "heads"}
        more: dict[str, Any] = {"model_type": "gpt2", "activation_function": "gelu", "n_positions": 8192}
        more |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    else:
        sizes = {"hidden_size": "hidden_size", "intermediate_size": "feed_forward", "num_hidden_layers": "layers"}
        sizes |= {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads"}
        more = {"model_type": "qwen2" if biases else "llama", "max_position_embeddings": 1 << 20}
    config = {name: of[field] for name, field in sizes.items()}
    config |= {"vocab_size": of["vocab"], "tie_word_embeddings": of["tied"], **more}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        return find_model(str(file), "bf16")


# Systems --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a system runs its step, for each micro-batch and at the end. Bytes are of a parameter."""

    kernels: Literal["fused", "eager"]
    streams: bool = False
    """Whether layers' weights come over the bus, and their gradients leave over it, in each micro-batch."""
    again: float = 0.0
    """Forward operations of layers that are done again, as a share."""
    interval: int = 1
    """Every so manieth boundary of layers is kept, and those between are computed from it first."""
    fetched: tuple[float, float] = (1.0, 1.0)
    """What comes over the bus for a layer's forward and backward in each micro-batch, over its weights."""
    slots: int = 2
    """Layers whose weights the device has room for."""
    sums_in_host: bool = False
    """Whether the processor adds up the gradients of micro-batches."""
    device_nbytes: float = 0.0
    """Read and written by an optimizer on the GPU."""
    bus_nbytes: float = 0.0
    """What of it comes over the bus, and goes back."""
    host_nbytes: float = 0.0
    """Read and written by an optimizer on the processor."""
    native: bool = False
    """Whether no Python launches kernels, and gradients are summed by the products that make them."""
    loss_tokens: int = 512
    """Tokens whose logits exist at one time."""
    flash_3: bool = False
    """Whether attention on Hopper is FlashAttention-3's, or as quick."""


def way(point: Point) -> Way:
    """How the point's system runs it, by what the entry says."""
    rows = point.micro_batch * point.length
    match point.system:
        case "ml_dataflow":  # weights, gradients and both moments in bf16 come for the optimizer
            again, fused = _again_by_columns(point), Way("fused", native=True, flash_3=True, loss_tokens=rows)
            fused = replace(fused, fetched=WITH_SUMS, slots=4, device_nbytes=14, bus_nbytes=8)
            return replace(fused, streams=True, again=again)
        case "llmq":
            return _llmq(point)
        case "MegaTrain":
            loss_tokens = 128 * point.micro_batch  # so many positions at a time, by its cpu_master.py
            return Way("eager", streams=True, interval=4, host_nbytes=22, loss_tokens=loss_tokens)
        case "llm-foundry (in memory)":  # each GPU updates its share
            again = 1.0 if "checkpointing" in point.schedule else 0.0
            return Way("eager", again=again, device_nbytes=26 / NODES[point.system], loss_tokens=rows)
        case "LLaMA-Factory (no offload)":
            return Way("fused", again=1.0, device_nbytes=26, loss_tokens=_liger_tokens(point))
        case "DeepSpeed ZeRO offload by LLaMA-Factory":  # ZeRO-2's weights stay on the GPU
            stays = "ZeRO-2" in point.schedule
            taken = Way("fused", streams=True, again=1.0, sums_in_host=True, host_nbytes=22)
            return replace(taken, fetched=(0.0, 0.0) if stays else (1.0, 1.0), loss_tokens=_liger_tokens(point))
    raise ValueError(point.system)


def _again_by_columns(point: Point) -> float:
    """From the share of its operations that a row of ml_dataflow's files says are done again. That counts a product
    within each attention's backward, a sixth of attention's necessary operations, which is in any rate of it."""
    share = float(point.quote.split(",")[14])
    sequences = [(point.sequences, point.length)]
    with_head, layers = step_flops(point.spec, sequences), _layer_flops(point.spec, point.length) * point.tokens
    attention = 3 * point.tokens * _attention_flops(point.spec, point.length)
    return (with_head * share / (1 - share) - attention / 6) / layers


def _layer_flops(model: ModelSpec, length: int) -> float:
    """Forward operations of all layers for a token."""
    products = sum(2.0 * param.numel for index in model.layers for param in model.units[index].params)
    return products + _attention_flops(model, length)


def _attention_flops(model: ModelSpec, length: int) -> float:
    profiles = [model.units[index].profile for index in model.layers]
    return sum(each.attention_flops * each.attended(length) for each in profiles)


def _llmq(point: Point) -> Way:
    """Its states are in bf16. With the master and sharded weights in host memory, layers take their weights from it."""
    asked = point.schedule + point.comment
    streams = "shard-weights" in asked
    offloaded = 2.0 * sum(part in point.schedule for part in ("opt-m", "opt-v", "master", "gradients"))
    again = 0.0
    if re.search("recomputes? (whole )?block", point.schedule):
        again = 1.0
    elif re.search("recomputes .*ffn", point.schedule):  # its last product is needed by nothing
        sizes = [param.numel for param in point.spec.units[1].params if "mlp" in param.name]
        again = 2 / 3 * sum(sizes) / point.spec.units[1].numel
    sums = streams and re.search("Offloaded.*gradients", point.schedule)
    basis = Way("fused", native=True, flash_3=True, device_nbytes=14, bus_nbytes=offloaded)
    chunks = re.search(r"lmhead(?:-chunks=| in )(\d+)", asked)
    loss_tokens = point.micro_batch * point.length // int(chunks[1] if chunks else 1)
    fetched = WITH_SUMS if sums else (1.0, 1.0)
    return replace(basis, streams=streams, again=again, fetched=fetched, loss_tokens=loss_tokens)


def _liger_tokens(point: Point) -> int:
    """Of a chunk of Liger's fused head and loss: as many bytes of logits as of hidden states, to a power of two."""
    model = point.spec
    wanted = point.micro_batch * point.length * model.hidden_size / model.vocab_size
    return int(2 ** ceil(log2(wanted)))


# Replays --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Efficiencies:
    """What is fitted: of every system and machine together."""

    products: float
    """Of the machine's rate of large products, what they reach in training."""
    fused: float
    """Traffic of a layer beside products and attention, over the bytes that autograd keeps of the library's: with fused
    kernels."""
    eager: float
    """And with PyTorch's, one by one."""
    host: float
    """Of the optimizer's bandwidth in host memory, what DeepSpeed's reaches, with norm and clipping ahead of it."""


BEFORE = Efficiencies(1.0, 1 / 3, 1.0, 1.0)
"""What `plan.cost` took for granted before there was a fit."""

BACKWARD_PASSES = 2
"""Elementwise time backward over forward, as where nothing was measured (`plan.cost`)."""


def described(point: Point, taken: Way, at: Efficiencies) -> Hardware:
    """The point's machine with these efficiencies, and its own host memory where that is stated."""
    found = machine(MACHINES[point.gpu])
    if point.system.startswith("DeepSpeed"):
        server = machine(SERVER)
        found = replace(found, host_dram_bandwidth=server.host_dram_bandwidth, host_bandwidth=server.host_bandwidth)
        found = replace(found, optimizer_bandwidth=server.optimizer_bandwidth)
    if stated := re.search(r"([\d.]+) GB/s", point.host):
        found = replace(found, host_dram_bandwidth=STREAM_SHARE * 1e9 * float(stated[1]))
    attention = found.attention
    if found.name.startswith(("NVIDIA H", "NVIDIA GH")):
        forward, backward = FLASH_3 if taken.flash_3 else (1.0, 1.0)
        rates = [FLASH_2[row.length] for row in attention]
        attention = tuple(
            replace(row, forward_flops=forward * rate[0], backward_flops=backward * rate[1])
            for row, rate in zip(attention, rates, strict=True)
        )
    passing = (found.device_bandwidth or inf) / (at.fused if taken.kernels == "fused" else at.eager)
    softmax = (found.device_bandwidth or inf) / (FUSED_LOSS if taken.kernels == "fused" else 1.0)
    rows = ElementwiseRate("bf16", passing, passing / BACKWARD_PASSES), ElementwiseRate("fp32", softmax, softmax)
    launch = None if taken.native else found.launch_seconds
    return replace(found, flops=at.products * found.flops, attention=attention, elementwise=rows, launch_seconds=launch)


@dataclass(frozen=True)
class Part:
    """A schedule of few layers and micro-batches, and how often it counts."""

    weight: float
    builder: UpdatesLast
    schedule: Schedule


class Replayed:
    """A point's schedule, built once and priced again and again."""

    def __init__(self, point: Point) -> None:
        self.point, self.way = point, way(point)
        count = point.sequences / point.micro_batch
        rows = point.micro_batch * point.length
        works: list[tuple[float, Work]] = [(1.0, Work((rows,) * round(count), point.length))]
        if self.way.streams and count > ONE_MORE:
            each = {FEW: ONE_MORE - count, ONE_MORE: count - FEW}
            works = [(times, Work((rows,) * micros, point.length)) for micros, times in each.items()]
        elif not self.way.streams and count > 2:
            works = [(1.0, Work((rows,) * 2, point.length, repeats=count / 2))]
        self.parts = [
            Part(times * weight, builder, builder.step())
            for times, work in works
            for weight, model in shallow(point.spec)
            for builder in [self._builder(model, work)]
        ]

    def _builder(self, model: ModelSpec, work: Work) -> UpdatesLast:
        kept: dict[str, Any] = {"activations": "keep"}
        if self.way.interval > 1:
            kept = {"activations_by_layer": (("input",), *(("drop",),) * (self.way.interval - 1))}
        placements = () if self.way.streams else (ON_DEVICE,) * len(model.units)
        policy = Policy(shard_nbytes=SHARD_NBYTES, placements=placements, weight_slots=self.way.slots, **kept)
        make = MicroMajor if self.way.streams else UpdatesLast
        return make(model, Numerics("bf16", loss_chunk_tokens=self.way.loss_tokens), policy, work)

    def seconds(self, at: Efficiencies) -> float:
        """Of a step."""
        hardware = described(self.point, self.way, at)
        return sum(part.weight * self._replayed(part, hardware, at) for part in self.parts)

    def _replayed(self, part: Part, hardware: Hardware, at: Efficiencies) -> float:
        builder, taken = part.builder, self.way
        price = op_seconds(builder.model, builder.numerics, builder.policy, builder.work, hardware)
        forward = {(op.unit, op.micro): price(op) for op in part.schedule.ops if op.kind == "FORWARD"}
        fetched = _fetched(part.schedule, taken)
        layers, repeats = set(builder.model.layers), builder.work.repeats
        spared = SUM_NBYTES - NATIVE_SUM_NBYTES if taken.native and builder.work.micro_batches > 1 else 0
        sums = [spared * trained.size / (hardware.device_bandwidth or inf) for trained in builder.trained]

        def seconds(op: Op) -> float:
            match op.kind:
                case "UPDATE":
                    return layout_of(builder.model.units[op.unit]).trained.size * self._update(hardware, at)
                case "FETCH":
                    return fetched[id(op)] * price(op)
                case "BACKWARD" if op.unit in layers:
                    return price(op) + taken.again * forward[op.unit, op.micro] - repeats * sums[op.unit]
                case "NORM":
                    return 0.0  # in the update's
                case "REDUCE":
                    return self._sum_nbytes(op) / hardware.host_bandwidth
            return price(op)

        shared = contention(builder.model, builder.numerics, hardware)

        def dram_nbytes(op: Op) -> float:
            match op.kind:
                case "UPDATE":
                    passing = taken.bus_nbytes + min(6.0, taken.bus_nbytes)  # gradients do not go back
                    return layout_of(builder.model.units[op.unit]).trained.size * (taken.host_nbytes or passing)
                case "NORM":
                    return 0.0
                case "FETCH":
                    return fetched[id(op)] * op.nbytes
                case "REDUCE":
                    return self._sum_nbytes(op)
            return shared.dram_nbytes(op)

        return replay(
            part.schedule, seconds, Contention(shared.host_dram_bandwidth, dram_nbytes, shared.duplex)
        ).seconds

    def _sum_nbytes(self, op: Op) -> float:
        moved = sum(access.stop - access.start for access in (*op.reads, *op.writes))
        return float(moved) if self.way.sums_in_host else 0.0

    def _update(self, hardware: Hardware, at: Efficiencies) -> float:
        """Of a parameter."""
        on_host = self.way.host_nbytes / (at.host * optimizer_bandwidth(hardware, 0))
        on_device = self.way.device_nbytes / (hardware.device_bandwidth or inf)
        return max(on_host, on_device, self.way.bus_nbytes / min(duplex_bandwidths(hardware)))


def _fetched(schedule: Schedule, taken: Way) -> dict[int, float]:
    """Of each fetch (by its identity), what comes over its weights: by the next op that computes with them."""
    found, following = {}, dict[int, float]()
    for op in reversed(schedule.ops):
        if op.kind == "FETCH":
            found[id(op)] = following.get(op.unit, 1.0)
        elif op.stream == "compute" and op.kind != "UPDATE":
            following[op.unit] = taken.fetched[op.kind == "BACKWARD"]
    return found


# The fit --------------------------------------------------------------------------------------------------------------

ROUNDS, NUDGE, RESTRAINT = 12, 0.02, 1e-3

LEAST = Efficiencies(0.5, 0.1, 0.1, 0.02)
MOST = Efficiencies(1.5, 10.0, 10.0, 1.5)
"""What the fit keeps to."""


def fit(replays: Sequence[Replayed], start: Efficiencies = BEFORE) -> Efficiencies:
    """The efficiencies whose replays are nearest to what was measured, in logarithms (Gauss-Newton)."""
    found, least, most = (np.log(astuple(each)) for each in (start, LEAST, MOST))
    measured = np.log([each.point.seconds for each in replays])

    def misses(at: np.ndarray) -> np.ndarray:
        there = Efficiencies(*np.exp(at))
        return np.log([each.seconds(there) for each in replays]) - measured

    for _ in range(ROUNDS):
        missed = misses(found)
        slopes = np.stack([(misses(found + NUDGE * side) - missed) / NUDGE for side in np.eye(len(found))], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + RESTRAINT * np.eye(len(found)), -slopes.T @ missed)
        before, found = found, np.clip(found + np.clip(step, -0.5, 0.5), least, most)
        if np.abs(found - before).max() < 1e-3:
            break
    return Efficiencies(*(float(each) for each in np.exp(found)))


@dataclass(frozen=True)
class Row:
    """A point beside its replays. `error`: replayed over measured speed, less 1."""

    system: str
    model: str
    machine: str
    length: int
    measured_tokens_per_second: float
    before_tokens_per_second: float
    after_tokens_per_second: float
    error: float
    in_fit: bool
    source: str


@dataclass(frozen=True)
class Found:
    """All of it."""

    efficiencies: Efficiencies
    rows: tuple[Row, ...]

    def errors(self, in_fit: bool) -> list[float]:
        return [abs(row.error) for row in self.rows if row.in_fit == in_fit]

    def range(self, in_fit: bool | None = None) -> tuple[float, float]:
        """Measured over replayed speed, between which four fifths of the points lie; of all, or those in or out."""
        tenths = quantiles(
            [1 / (1 + row.error) for row in self.rows if in_fit in (None, row.in_fit)], n=10, method="inclusive"
        )
        return tenths[0], tenths[-1]


def compare(found: Sequence[Point]) -> Found:
    """Fit to two thirds of the points, replay all."""
    replays, out = [Replayed(point) for point in found], stays_out(found)
    fitted = fit([each for each, left in zip(replays, out, strict=True) if not left])
    return Found(fitted, tuple(_rows(replays, out, fitted)))


def _rows(replays: Sequence[Replayed], out: Sequence[bool], fitted: Efficiencies) -> Iterator[Row]:
    for each, left in zip(replays, out, strict=True):
        point = each.point
        speeds = [point.tokens / seconds for seconds in (point.seconds, each.seconds(BEFORE), each.seconds(fitted))]
        words = point.system, point.model, MACHINES[point.gpu], point.length
        measured, before, after = speeds
        yield Row(*words, measured, before, after, after / measured - 1, not left, point.source)


# What is shown --------------------------------------------------------------------------------------------------------


def table(found: Found) -> list[str]:
    heads = ("system", "model", "machine", "length", "measured tokens/s", "before", "after", "error", "fit")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in found.rows:
        speeds = row.measured_tokens_per_second, row.before_tokens_per_second, row.after_tokens_per_second
        cells = [row.system, row.model, row.machine, f"{row.length:,}", *(f"{each:,.0f}" for each in speeds)]
        lines.append(f"| {' | '.join([*cells, f'{row.error:+.1%}', 'in' if row.in_fit else 'out'])} |")
    return lines


def summary(found: Found) -> list[str]:
    lines = [", ".join(f"{name} {value:.3f}" for name, value in asdict(found.efficiencies).items())]
    for words, in_fit in (("in the fit", True), ("out of the fit", False)):
        errors, (low, high) = found.errors(in_fit), found.range(in_fit)
        lines.append(
            f"{words}: {len(errors)} points, error {median(errors):.1%} in the middle and {max(errors):.1%} at worst, "
            f"measured over replayed speed {low:.2f} to {high:.2f} (10% to 90%)"
        )
    return lines


def left_out() -> list[str]:
    """Reason -> which points, a line each."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for entry in entries():
        if reason := why_not(entry):
            reasons[reason].append(f"{entry['system']} {entry['model']} on {entry['gpu']}")
    return [f"{len(names)} left out: {reason} ({'; '.join(sorted(set(names)))})" for reason, names in reasons.items()]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="published measurements beside replays of their own schedules")
    parser.add_argument("--json", type=Path, help="write efficiencies, errors and rows to this file")
    arguments = parser.parse_args(given)
    found = compare(points())
    print("\n".join([*table(found), "", *summary(found), "", *left_out()]))
    if arguments.json:
        content = {
            "efficiencies": asdict(found.efficiencies),
            "range_out_of_fit": found.range(False),
            "rows": [asdict(row) for row in found.rows],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
