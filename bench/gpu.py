"""Training on a GPU compared with plain PyTorch and DeepSpeed: speed, memory, and how accurate the plan was.

    python -m bench.gpu [--out FOLDER] [--seconds 600] [--sizes 160M,1.5B] [--contenders NAME,NAME] [--again] [--dry]
    python -m bench.gpu --field --seconds 1800 [--out FOLDER] [--sizes NAME,NAME] [--contenders NAME,NAME] [--dry]
    python -m bench.gpu --replan [--out FOLDER]

The machine is probed. Then, for each size whose state fits into memory, the engine trains the model by the plan that
`megatrain train` would make for this machine, with the library's kernels and with fused ones in all of the device's
memory, and once in 24 GB of it (an RTX 4090's), which a model must stream through. Beside it, with the same tokens,
train: plain PyTorch with everything in device memory (float32 parameters, bfloat16 autocast, fused AdamW, clipping), as
it is, with checkpointing, compiled, and both; and DeepSpeed ZeRO-3 with parameters and optimizer in host memory where
it is installed. Why a contender did not run is printed. They run one after another.

With `--field` the sizes are those for which others publish what they reach on one H100, whose peak is an H200's: the
same shape, sequences and tokens of a step, and where they state it the same device memory. Their figures are quoted
beside the result. llmq and dataflow hold weights, gradients and optimizer state in bfloat16, where this engine has
float32 masters and moments. The parts run by contender, the most telling first, so that 30 minutes fill the table.

Each contender on each size is a part; its result is in `gpu.json` as soon as it is known, and a later call goes on with
the parts that are not there, on the same machine only (`--again` begins anew). No part starts after `--seconds`.
`--dry` runs all of it at tiny sizes, for a machine on which speed means nothing. `--replan` measures nothing: today's
planner plans the steps in `gpu.json`, for the machine that was probed there. Nothing is printed that was not measured
in a run, but for what is called planned.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.errors import typed_line
from megatrain.schedule.ops import STREAMS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megatrain.schedule import Schedule, Timeline
    from megatrain.spec import Hardware

Batches = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Published:
    """What a system reaches on one H100, and the bytes of device memory that it takes, if stated."""

    system: str
    tokens_per_second: float
    device_nbytes: int | None = None


@dataclass(frozen=True)
class Size:
    """A shape of the library's `kind` of model, and how a step is cut: `rows` sequences in each of `count`
    micro-batches. groups: heads of keys and values, all if None. `steps` are timed, after two that warm up."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    rows: int
    count: int
    length: int = 2048
    vocabulary: int = 32000
    kind: str = "llama"
    groups: int | None = None
    tied: bool = False
    steps: int = 3
    published: Published | None = None

    @property
    def tokens(self) -> int:
        return self.rows * self.count * self.length

    @property
    def key_value_heads(self) -> int:
        return self.groups or self.heads

    @property
    def parameters(self) -> int:
        """Of its matrices."""
        narrow = self.hidden // self.heads * self.key_value_heads
        layer = 2 * self.hidden * (self.hidden + narrow) + 3 * self.hidden * self.intermediate
        return self.layers * layer + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def is_limited(self) -> bool:
        return self.published is not None and self.published.device_nbytes is not None


SIZES = {
    "160M": Size(768, 2048, 12, 12, 16, 2),
    "1.5B": Size(2048, 5632, 26, 16, 8, 4),
    "7B": Size(4096, 11008, 32, 32, 8, 4),
    "13B": Size(5120, 13824, 40, 40, 8, 4),
    "30B": Size(6656, 17920, 60, 52, 8, 4),
}
DRY_SIZES = {"tiny": Size(64, 128, 2, 2, 2, 2, length=32, vocabulary=256)}
GIB = 1 << 30
_QWEN: dict[str, Any] = {"length": 1024, "kind": "qwen2", "steps": 1}
_LLAMA_8B: dict[str, Any] = {"length": 1024, "vocabulary": 128256, "groups": 8, "steps": 1}
FIELD = {
    "Qwen2.5-1.5B": Size(
        *(1536, 8960, 28, 12, 16, 32),
        **_QWEN,
        vocabulary=151936,
        groups=2,
        tied=True,
        published=Published("llmq", 59254),
    ),
    "Qwen2.5-7B": Size(
        *(3584, 18944, 28, 28, 8, 64), **_QWEN, vocabulary=152064, groups=4, published=Published("llmq", 13818)
    ),
    "8B in 67 GiB": Size(4096, 14336, 32, 32, 8, 32, **_LLAMA_8B, published=Published("dataflow", 12500, 67 * GIB)),
    "8B in 8.8 GiB": Size(
        *(4096, 14336, 32, 32, 8, 32), **_LLAMA_8B, published=Published("dataflow", 10300, int(8.8 * GIB))
    ),
    "Qwen2.5-14B": Size(
        *(5120, 13824, 48, 40, 8, 64), **_QWEN, vocabulary=152064, groups=8, published=Published("llmq", 6315)
    ),
}
"""llmq: step 3 of its bf16 logs, 512 sequences a step (https://github.com/IST-DASLab/llmq @7f895bd:
benchmarks/H100x1.md). dataflow: as issue 46 quotes it, 256 sequences a step; its source was not found again, and
`published.json` has what ml_dataflow records for other lengths."""
DRY_FIELD = {
    "tiny": replace(DRY_SIZES["tiny"], kind="qwen2", groups=1, tied=True, steps=1, published=Published("nobody", 1.0)),
    "tiny in 1 GiB": replace(DRY_SIZES["tiny"], groups=1, steps=1, published=Published("nobody", 1.0, GIB)),
}
STATE_NBYTES = 14
"""Per parameter in host memory: masters, moments and gradients of a bf16 engine."""
HOST_SHARE = 0.8
STREAMED, FUSED, IN_24_GB = "megatrain", "megatrain fused", "megatrain in 24 GB"
OURS = (STREAMED, FUSED, IN_24_GB)
LIMIT_NBYTES = 24 * 10**9
PLAIN: dict[str, set[str]] = {
    "plain": set(),
    "plain checkpointed": {"checkpoint"},
    "plain compiled": {"compile"},
    "plain checkpointed and compiled": {"checkpoint", "compile"},
}
ZERO = "deepspeed zero-3 offload"
CONTENDERS = (*OURS, *PLAIN, ZERO)
FIELD_CONTENDERS = (FUSED, STREAMED, "plain compiled", "plain checkpointed and compiled", ZERO)
"""The others have no limit of device memory."""
FEWER = 4, 16
"""Steps of so many times fewer tokens are timed too: there the host's time shows."""
WARM_UP = 2
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Part:
    """One contender on one size. Of those that did not run, `why` alone. Seconds are of a step, the median.

    mfu: the step's necessary operations over the device's peak, or where nobody has stated it, over what it does in
    large products. stalls: stream of the engine -> share of the step that it was idle. in_nbytes, out_nbytes: over the
    bus in a step. busy: kind of op -> seconds of a step that its ops took, measured and planned. fewer: tokens of a
    smaller step by the same policy -> its seconds, measured and planned. planned_*: what the plan says.
    """

    size: str
    contender: str
    why: str = ""
    policy: str = ""
    tokens_per_step: int = 0
    seconds: float = 0.0
    spread: tuple[float, float] = (0.0, 0.0)
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    stalls: dict[str, float] = field(default_factory=dict)
    in_nbytes: int = 0
    out_nbytes: int = 0
    busy: dict[str, tuple[float, float]] = field(default_factory=dict)
    fewer: dict[int, tuple[float, float]] = field(default_factory=dict)
    device_peak_nbytes: int = 0
    host_peak_nbytes: int = 0
    planned_seconds: float = 0.0
    planned_device_nbytes: int = 0
    planned_host_nbytes: int = 0
    loss: float = 0.0


def batches(size: Size, rows: int, sequences: int) -> Batches:
    """Random sequences, the same for every contender, in micro-batches of `rows`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(size.vocabulary, (sequences, size.length), generator=generator)
    return [{"input_ids": each, "labels": each} for each in ids.split(rows)]


def on_device(size: Size) -> Batches:
    """The batches of a step as the other contenders take them."""
    return [
        {key: value.cuda() for key, value in each.items()} for each in batches(size, size.rows, size.rows * size.count)
    ]


def build(size: Size, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A fresh model in host memory, initialised on the device, because that is fast, and then rounded to `dtype`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.length,
        "tie_word_embeddings": size.tied,
    }
    torch.manual_seed(0)
    fits = torch.cuda.mem_get_info()[0] > 5 * size.parameters
    with torch.device("cuda" if fits else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(size.kind, **fields))
    fresh: PreTrainedModel = torch.nn.Module.to(model, dtype).cpu().train()
    return fresh


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Have the library compute each layer again in the backward pass."""
    older = model.gradient_checkpointing_enable  # its name in transformers before the one that we test with
    getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})


def timed(step: Callable[[], float], steps: int) -> tuple[list[float], float, int]:
    """Seconds of each step after those that warm up, the last loss, and the most device memory."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds, loss = [], 0.0
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds, loss, torch.cuda.max_memory_allocated()


def host_peak_nbytes(*, anew: bool = False) -> int:
    """The most memory that this process has had since it was last asked to count anew."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(found.split()[1]) * 1024


def streamed(name: str, contender: str, size: Size, hardware: Hardware) -> Part:
    """MegaTrain, by the plan that it makes for this machine."""
    import megatrain
    from megatrain.model import ModelSource, port_model
    from megatrain.model.fuse_layers import fuse_layers
    from megatrain.plan import Question, examine, find_plan
    from megatrain.plan.host_resources import available_host_nbytes
    from megatrain.spec import Limits
    from megatrain.train.options import SourceInUnits

    model = build(size, torch.bfloat16)  # which takes host memory while it is planned
    ported = port_model(model, torch.bfloat16)
    if contender == FUSED:
        fuse_layers(ported)
    limits = Limits(device_nbytes=device_limit(size, contender))
    free = replace(hardware, host_nbytes=available_host_nbytes(), device_nbytes=torch.cuda.mem_get_info()[0])
    told = {"kernels": "fused" if contender == FUSED else "stock"}
    question = Question(ported.spec, free, size.tokens, size.length, overrides=told, limits=limits)
    plan = find_plan(question)
    optimizer = megatrain.AdamW(lr=LEARNING_RATE)
    how: Any = {"device": "cuda:0", "optimizer": optimizer, "policy": plan.policy, "numerics": plan.numerics}
    with megatrain.Engine.from_source(SourceInUnits(ModelSource(model), ported), limits=limits, **how) as engine:
        del model
        gc.collect()
        work = batches(size, plan.micro_batch, question.sequences)
        seconds, loss, peak = timed(lambda: engine.step(work).loss, size.steps)
        host = host_peak_nbytes()
        engine.diagnostics.record_timeline = True
        engine.step(work)
        timeline = engine.diagnostics.timeline
        engine.diagnostics.record_timeline = False
        assert timeline is not None
        fewer = {}
        steps = () if size.published else FEWER
        for tokens in sorted({size.tokens // each for each in steps if size.tokens // each >= size.length}):
            smaller = replace(question, tokens_per_step=tokens)
            rows = min(plan.micro_batch, smaller.sequences)
            step = partial(engine.step, batches(size, rows, smaller.sequences))
            taken = statistics.median(timed(lambda step=step: step().loss, size.steps)[0])  # type: ignore[misc]
            fewer[tokens] = taken, examine(smaller, plan.choice, rows).seconds
        return Part(
            name,
            contender,
            policy=str(engine.policy),
            **_speed(size, seconds, engine.diagnostics.step_flops(work), hardware),
            stalls=idle_shares(timeline),
            in_nbytes=bus_nbytes(timeline.schedule, ("FETCH", "RELOAD")),
            out_nbytes=bus_nbytes(timeline.schedule, ("GRAD", "OFFLOAD")),
            busy=busy(timeline, plan.timeline),
            fewer=fewer,
            device_peak_nbytes=peak,
            host_peak_nbytes=host,
            planned_seconds=plan.seconds,
            planned_device_nbytes=plan.nbytes["device"],
            planned_host_nbytes=plan.nbytes["host"],
            loss=loss,
        )


def device_limit(size: Size, contender: str) -> int | None:
    """Bytes of device memory that the engine may take; None for all."""
    if contender == IN_24_GB:
        return LIMIT_NBYTES
    return size.published.device_nbytes if size.published else None


def busy(measured: Timeline, planned: Timeline) -> dict[str, tuple[float, float]]:
    """Kind of op -> seconds of all its ops."""
    both: list[defaultdict[str, float]] = []
    for timeline in (measured, planned):
        both.append(defaultdict(float))
        for op, start, end in zip(timeline.schedule.ops, timeline.starts, timeline.ends, strict=True):
            both[-1][op.kind] += end - start
    return {kind: (both[0][kind], both[1][kind]) for kind in sorted(both[0].keys() | both[1].keys())}


def _speed(size: Size, seconds: Sequence[float], flops: float, hardware: Hardware) -> dict[str, Any]:
    each = statistics.median(seconds)
    return {
        "tokens_per_step": size.tokens,
        "seconds": each,
        "spread": (min(seconds), max(seconds)),
        "tokens_per_second": size.tokens / each,
        "mfu": flops / each / (hardware.peak_flops or hardware.flops),
    }


def bus_nbytes(schedule: Schedule, kinds: Sequence[str]) -> int:
    """What the ops of these kinds copy over the bus."""
    return sum(op.nbytes for op in schedule.ops if op.kind in kinds and not op.is_within_device)


def idle_shares(timeline: Timeline) -> dict[str, float]:
    """Stream -> the share of the step that no op of it ran."""
    whole = timeline.seconds or 1.0
    return {name: max(0.0, 1.0 - timeline.busy_seconds(name) / whole) for name in STREAMS}


def plain(name: str, contender: str, size: Size, hardware: Hardware) -> Part:
    """PyTorch with the model in device memory."""
    if 16 * size.parameters > torch.cuda.mem_get_info()[0]:
        return Part(name, contender, f"its {16 * size.parameters:,} bytes of state do not fit into device memory")
    ways, source = PLAIN[contender], build(size)
    if "checkpoint" in ways:
        checkpoint_layers(source)
    flops = necessary(source, size)
    model = torch.nn.Module.cuda(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    forward: Any = torch.compile(model) if "compile" in ways else model
    work = on_device(size)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device="cuda")
        for each in work:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = forward(**each, use_cache=False).loss / len(work)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(total)

    seconds, loss, peak = timed(step, size.steps)
    host = host_peak_nbytes()
    speed = _speed(size, seconds, flops, hardware)
    return Part(name, contender, **speed, device_peak_nbytes=peak, host_peak_nbytes=host, loss=loss)


def necessary(model: PreTrainedModel, size: Size) -> float:
    """Operations of a step, as the engine counts them."""
    from megatrain.model import port_model
    from megatrain.plan import step_flops

    return step_flops(port_model(model, torch.bfloat16).spec, [(size.rows * size.count, size.length)])


def zero(name: str, size: Size, hardware: Hardware) -> Part:
    """DeepSpeed ZeRO-3 on one rank, parameters and optimizer in host memory, bf16 with float32 masters."""
    if importlib.util.find_spec("deepspeed") is None:
        return Part(name, ZERO, "deepspeed is not installed")
    import deepspeed

    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0"}.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed("nccl", auto_mpi_discovery=False)
    model = build(size)
    flops = necessary(model, size)
    checkpoint_layers(model)
    place = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": size.rows,
        "gradient_accumulation_steps": size.count,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": place, "offload_optimizer": place},
    }
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    work = on_device(size)

    def step() -> float:
        total = torch.zeros((), device="cuda")
        for each in work:
            loss = engine(**each, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(work)
        return float(total)

    seconds, loss, peak = timed(step, size.steps)
    host = host_peak_nbytes()
    speed = _speed(size, seconds, flops, hardware)
    return Part(name, ZERO, **speed, device_peak_nbytes=peak, host_peak_nbytes=host, loss=loss)


def measured(name: str, contender: str, size: Size, hardware: Hardware) -> Part:
    """The part; what stands in the way of one is told in it."""
    host_peak_nbytes(anew=True)
    try:
        if contender in OURS:
            return streamed(name, contender, size, hardware)
        if contender == ZERO:
            return zero(name, size, hardware)
        return plain(name, contender, size, hardware)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Part(name, contender, f"does not fit ({str(error).splitlines()[0]})")
    except Exception as error:  # whatever a contender's libraries raise: the others are still to be measured
        return Part(name, contender, f"fails ({typed_line(error)})")


def probed(*, dry: bool) -> Hardware:
    from megatrain.commands.probe import probe
    from megatrain.device import open_device

    device = open_device("cuda:0")
    try:
        with tempfile.TemporaryDirectory() as folder, small_probe() if dry else nullcontext():
            return probe(device, Path(folder), 2.0 if dry else 30.0)
    finally:
        device.close()


@contextmanager
def small_probe() -> Iterator[None]:
    """In the block, a GPU is measured with what a cpu is measured with."""
    from megatrain.device import probe

    tables = [each for each in vars(probe).values() if isinstance(each, dict) and "cuda" in each]
    kept = [(table, table["cuda"]) for table in tables]
    for table, _ in kept:
        table["cuda"] = table["cpu"]
    probe.LARGEST["cuda"] = 64
    try:
        yield
    finally:
        for table, value in kept:
            table["cuda"] = value


def recorded(found: Mapping[str, Any]) -> Hardware:
    """The machine that was probed for `gpu.json`."""
    from megatrain.spec import Hardware
    from megatrain.spec.hardware import AttentionRate, ElementwiseRate, ProductRate

    rows = {"products": ProductRate, "attention": AttentionRate, "elementwise": ElementwiseRate}
    fields = dict(found["hardware"])
    for name, kind in rows.items():
        fields[name] = tuple(kind(**each) for each in fields[name])
    for name in ("optimizer_bandwidth", "sources"):
        fields[name] = tuple(map(tuple, fields[name]))
    return Hardware(**fields)


def replanned(found: Mapping[str, Any]) -> Iterator[tuple[str, int, float, float, float]]:
    """(part, tokens per step, seconds measured, planned then and planned now) of each step of the engine in `gpu.json`.
    Each model is one on paper, and planned with all of the machine's host memory."""
    from bench.shapes import llama_shape
    from megatrain.plan import Question, examine, find_plan
    from megatrain.spec import Limits

    hardware = recorded(found)
    for key, part in found["parts"].items():
        if part["why"] or part["contender"] not in OURS:
            continue
        size = {**SIZES, **FIELD}[part["size"]]
        widths: Any = {"feed_forward": size.intermediate, "vocabulary": size.vocabulary, "tied": size.tied}
        widths["key_value_heads"] = size.key_value_heads
        model = llama_shape(part["size"], size.layers, size.hidden, **widths)
        limits = Limits(device_nbytes=device_limit(size, part["contender"]))
        told = {"kernels": "fused" if part["contender"] == FUSED else "stock"}
        question = Question(model, hardware, size.tokens, size.length, overrides=told, limits=limits)
        plan = find_plan(question)
        yield key, size.tokens, part["seconds"], part["planned_seconds"], plan.seconds
        for tokens, (measured, then) in part["fewer"].items():
            smaller = replace(question, tokens_per_step=int(tokens))
            now = examine(smaller, plan.choice, min(plan.micro_batch, smaller.sequences)).seconds
            yield key, int(tokens), measured, then, now


def show(part: Part) -> str:
    """A line."""
    if part.why:
        return f"{part.size:>5} {part.contender}: {part.why}"
    line = f"{part.size:>5} {part.contender}: {part.tokens_per_second:,.0f} tokens/s, MFU {part.mfu:.1%}"
    line += f", device {part.device_peak_nbytes / 1e9:.2f} GB, host {part.host_peak_nbytes / 1e9:.2f} GB"
    if part.size in FIELD and (known := FIELD[part.size].published):
        share = part.tokens_per_second / known.tokens_per_second
        line += f", {share:.2f}x of {known.system}'s {known.tokens_per_second:,.0f} on an H100"
    if part.planned_seconds:
        line += f", planned {part.planned_seconds / part.seconds:.2f}x of the measured time"
        line += f", {part.in_nbytes / 1e9:.1f} GB in and {part.out_nbytes / 1e9:.1f} GB out a step"
        line += f"; compute idle {part.stalls.get('compute', 0.0):.0%}"
        for tokens, (measured, planned) in part.fewer.items():
            line += f"\n      {tokens:,} tokens a step: {measured:.3f} s, planned {planned:.3f} s"
        for kind, (measured, planned) in part.busy.items():
            line += f"\n      {kind}: {measured:.3f} s, planned {planned:.3f} s"
    return line


def chosen(parser: argparse.ArgumentParser, what: str, given: str | None, known: Iterable[str]) -> list[str]:
    """Names with commas between them, or all that are known."""
    names = list(known) if given is None else given.split(",")
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="train on a GPU beside other systems")
    parser.add_argument("--out", type=Path, help="folder of gpu.json: bench/results, or with --dry a temporary one")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no part after this long")
    parser.add_argument("--field", action="store_true", help="the sizes for which others publish figures")
    parser.add_argument("--sizes", help="only these, with commas between them")
    parser.add_argument("--contenders", help=f"only these, with commas between them: {', '.join(CONTENDERS)}")
    parser.add_argument("--again", action="store_true", help="leave out what an earlier call has found")
    parser.add_argument("--dry", action="store_true", help="tiny sizes: does it all run?")
    parser.add_argument("--replan", action="store_true", help="plan again what was measured")
    given = parser.parse_args(arguments)
    out = given.out or Path(tempfile.mkdtemp() if given.dry else "bench/results")
    path = out / "gpu.json"
    if given.replan:
        for key, tokens, took, then, now in replanned(json.loads(path.read_text())):
            print(f"{key}, {tokens:,} tokens: {took:.3f} s, planned {then:.3f} s then and {now:.3f} s now")
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    began = time.monotonic()
    sizes = (DRY_FIELD if given.dry else FIELD) if given.field else DRY_SIZES if given.dry else SIZES
    sizes = {name: sizes[name] for name in chosen(parser, "size", given.sizes, sizes)}
    contenders = chosen(parser, "contender", given.contenders, FIELD_CONTENDERS if given.field else CONTENDERS)
    found: dict[str, Any] = {} if given.again or not path.exists() else json.loads(path.read_text())
    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    if found.setdefault("machine", machine) != machine:
        parser.error(f"{path} is of {found['machine']}, and this is {machine}: use another --out, or --again")
    parts = found.setdefault("parts", {})
    hardware = recorded(found) if "hardware" in found else probed(dry=given.dry)
    found["hardware"] = asdict(hardware)
    for name, contender in ordered(sizes, contenders, hardware, by_contender=given.field):
        key = f"{name} {contender}"
        if key in parts:
            continue
        if time.monotonic() - began > given.seconds:
            print(f"{key}: no time left; call again to go on")
            continue
        part = measured(name, contender, sizes[name], hardware)
        parts[key] = asdict(part)
        print(show(part), flush=True)
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1, default=str) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def ordered(
    sizes: Mapping[str, Size], contenders: Sequence[str], hardware: Hardware, *, by_contender: bool
) -> Iterator[tuple[str, str]]:
    """(size, contender) of each part that this machine can run, in the order in which they do."""
    for name, size in list(sizes.items()):
        device_nbytes = min(hardware.device_nbytes, device_limit(size, STREAMED) or hardware.device_nbytes)
        if STATE_NBYTES * size.parameters > HOST_SHARE * hardware.host_nbytes + device_nbytes:
            print(f"{name:>5}: its state does not fit into memory")
            sizes = {other: each for other, each in sizes.items() if other != name}
    pairs = [(name, contender) for name in sizes for contender in contenders]
    if by_contender:
        pairs = [(name, contender) for contender in contenders for name in sizes]
    return (pair for pair in pairs if pair[1] in OURS or not sizes[pair[0]].is_limited)


if __name__ == "__main__":
    sys.exit(main())
