"""The disk tier against DeepSpeed's ZeRO-3 with parameters and optimizer state on NVMe: tokens per second, peak memory.

    python -m bench.zero_nvme --python DEEPSPEEDS_PYTHON [--against NAME ...] [--plain] [--folder FOLDER]
                              [--precision fp32] [--rows N] [--turns N] [--hardware FILE] [--out FOLDER]

The model, the work and the optimizer are the same: the 134M Llama and the 4 x 512 tokens of `bench.step`, or fewer rows
(what the disk has to do does not depend on them, what the processor has to do does), AdamW, clipping by the global
norm, the same first weights: the losses must agree. *MegaTrain* runs as `megatrain`, with every part of every unit's
state on the disk, recomputing; and for each of the others as `megatrain_half_of_NAME`, with whatever plan its planner
finds for half of that one's peak memory, told what `megatrain probe` finds on this machine (now, or in `--hardware`).
*DeepSpeed* runs on its CPU accelerator, with its own AdamW for the cpu and its asynchronous I/O, one optimizer tile per
layer, and buffers no larger than the largest parameter: as `deepspeed` with the fewest buffers, as
`deepspeed_pipelined` with as many as it needs to read the next tile and write the last one meanwhile, which takes more
memory, and as `deepspeed_graphs`, which keeps what the others compute again in the backward pass. *Plain* PyTorch with
everything in memory, on demand, is the speed of a model that fits.

Each lives in a process of its own, and they take turns, a step each, so that the machine's drift hits all alike. A
speed is the median over turns of the ratio within a turn. Peak memory is the kernel's count of the process's resident
memory (`VmHWM`), interpreter and libraries included, reset when the model has been built, after which come all steps;
pinned buffers count, the page cache does not (both sides read and write past it). Beside it, what that is above the
process with everything imported and no model yet. The last step of each is profiled, and not counted: the seconds that
its thread of computation spends in products and attention, which no offloading can save. DeepSpeed is no dependency:
`--python` names an interpreter that has it, with what it takes to compile its operators; without one its side is left
out. Left out too are models that need the disk: there its buffers would weigh less.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.step import LENGTH, SEQUENCES, SHAPE, _resident
from megatrain.spec import Numerics, Part, Placement

if TYPE_CHECKING:
    from megatrain.plan import Plan
    from megatrain.spec import ModelSpec

OURS, HALF_OF, PLAIN = "megatrain", "megatrain_half_of_", "plain"
THEIRS = ("deepspeed", "deepspeed_pipelined", "deepspeed_graphs")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "scaled_dot_product")
"""What the names of operators begin with that compute a product or attention."""
SPEED_GOAL, MEMORY_GOAL = 1.5, 0.5
LOSS_TOLERANCE = 0.01
WARM_UP = 2
"""Steps that are not counted: before the second nothing waits to be updated, and buffers come to be."""
COUNTED = 0.75
"""Of the memory for a plan; the rest is left to what no plan counts: kernels' workspace, the C library's heap."""
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1
STATES = 4
"""Buffers of one optimizer tile: master, both moments and the gradient."""
SHOWN = ("loss", "seconds", "peak_nbytes", "read_nbytes", "written_nbytes")
ROOT = Path(__file__).parents[1]
Settings = dict[str, Any]
Built = tuple[int, Callable[[], float], dict[str, Any]]
"""Resident bytes before there was a model, a step, which returns its loss, and what there is to tell."""


def compare(settings: Settings, against: Sequence[str], turns: int, python: str) -> dict[str, Any]:
    """Run all contenders in turn, DeepSpeed's by that interpreter. Settings: see `main`."""
    contenders: dict[str, Contender] = {}
    told: dict[str, dict[str, Any]] = {}
    done: dict[str, list[dict[str, Any]]] = {}

    def enter(name: str, **given: Any) -> None:
        contenders[name] = Contender(name, python if name in THEIRS else sys.executable, settings)
        told[name] = contenders[name].ask("build", given)
        done[name] = [contenders[name].ask("step") for _ in range(WARM_UP)]

    try:
        for name in against:
            enter(name)
        enter(OURS)
        for name in set(against) & set(THEIRS):
            enter(HALF_OF + name, limit_nbytes=int(MEMORY_GOAL * done[name][-1]["peak_nbytes"]))
        for _ in range(turns):
            for name, contender in contenders.items():
                done[name].append(contender.ask("step"))
        for name, contender in contenders.items():
            told[name] |= contender.ask("profile")
    finally:
        for contender in contenders.values():
            contender.close()
    figures = {name: _figures(settings, told[name], done[name]) for name in contenders}
    from megatrain.plan.host_resources import processor_name  # not in the processes that are measured

    return {
        "machine": processor_name(),
        "cpus": os.cpu_count(),
        "settings": {key: value for key, value in settings.items() if key not in ("folder", "hardware")},
        "tokens_per_step": settings["rows"] * settings["length"],
        "turns": turns,
        "contenders": figures,
        "ratios": {
            ours: {name: ratios(figures[ours], figures[name]) for name in against}
            for ours in figures
            if ours not in against
        },
    }


def _figures(settings: Settings, told: dict[str, Any], steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [step["seconds"] for step in steps[WARM_UP:]]
    return {
        **told,
        **steps[-1],  # of which the bytes read and written are of the last step alone
        "peak_nbytes_per_parameter": steps[-1]["peak_nbytes"] / told["parameters"],
        "tokens_per_second": settings["rows"] * settings["length"] / median(seconds),
        "seconds": seconds,
        "losses": [step["loss"] for step in steps],
    }


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | bool]:
    """Our figures to theirs: speed, turn by turn, and both counts of memory; and whether the claim is true of them."""
    speed = median(their / our for our, their in zip(ours["seconds"], theirs["seconds"], strict=True))
    memory, above = (ours[key] / theirs[key] for key in ("peak_nbytes", "above_start_nbytes"))
    apart = [abs(our / their - 1) for our, their in zip(ours["losses"], theirs["losses"], strict=True)]
    fits = memory <= MEMORY_GOAL and all(each < LOSS_TOLERANCE for each in apart)
    found = {"speed": speed, "memory": memory, "memory_above_start": above, "losses_apart": max(apart)}
    return {**found, "fits": fits, "holds": fits and speed >= SPEED_GOAL}


class Contender:
    """The process of one contender. It answers each line with a line of JSON."""

    def __init__(self, name: str, python: str, settings: Settings) -> None:
        self._name, self._log = name, tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        threads = str(len(os.sched_getaffinity(0)))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}
        environment |= {"LOCAL_RANK": "0"}  # what DeepSpeed's launcher sets
        command = [python, "-m", "bench.zero_nvme", "--contend", name, json.dumps(settings)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)  # type: ignore[call-overload]

    def ask(self, order: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Its answer. Raises `RuntimeError` with the end of its log where the process has died."""
        with suppress(BrokenPipeError):
            print(json.dumps([order, given or {}]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self._name} has ended:\n{self._log.read()[-4000:]}")
        found: dict[str, Any] = json.loads(line)
        print(f"{self._name}: {order}", *(f"{found[key]:.6g}" for key in SHOWN if key in found), flush=True)
        return found

    def close(self) -> None:
        """Let it tidy up, and end it."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def contend(name: str, settings: Settings) -> None:
    """One process: answers until its input ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    size, drawing = (settings["rows"], settings["length"]), torch.Generator().manual_seed(1)
    ids = torch.randint(0, settings["shape"]["vocab_size"], size, generator=drawing)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory(dir=settings["folder"]) as folder:
        for line in iter(sys.stdin.readline, ""):
            order, given = json.loads(line)
            answer: dict[str, Any]
            if order == "build":
                build = _deepspeed if name in THEIRS else _plain if name == PLAIN else _megatrain
                start, step, answer = build(name, settings, ids, Path(folder), **given)
                answer["versions"] |= versions
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)  # nothing that only construction took shall count
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            elif order == "profile":
                answer = {"products_seconds": _products_seconds(step)}
            else:
                (read, written), began = _disk_nbytes(), time.perf_counter()
                answer = {"loss": step(), "seconds": time.perf_counter() - began}
                answer |= {"read_nbytes": _disk_nbytes()[0] - read, "written_nbytes": _disk_nbytes()[1] - written}
                peak = _resident("VmHWM")
                answer |= {"peak_nbytes": peak, "above_start_nbytes": peak - start}
            print(json.dumps(answer), file=answers, flush=True)


def _products_seconds(step: Callable[[], float]) -> float:
    """What a step spends in products and attention, as the threads that ask for them see it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    names = tuple(f"aten::{name}" for name in PRODUCTS) + tuple(f"aten::_{name}" for name in PRODUCTS)
    averages = profiled.key_averages()
    return float(sum(each.self_cpu_time_total for each in averages if each.key.startswith(names)) / 1e6)


def _disk_nbytes() -> tuple[int, int]:
    """Bytes that this process has had read from drives, and written to them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def _megatrain(name: str, settings: Settings, ids: Any, folder: Path, limit_nbytes: int | None = None) -> Built:
    """The engine with all state on the disk, or with what the planner finds for a limit of the whole process."""
    import torch
    import transformers

    import megatrain
    from megatrain.model import port_model
    from megatrain.model.architecture import read_config
    from megatrain.model.skeleton import blueprint
    from megatrain.optim import AdamW
    from megatrain.plan import choose_policy

    AdamW().warm_up()
    fields, precision = {"model_type": "llama", **settings["shape"]}, settings["precision"]
    optimizer = megatrain.AdamW(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    start = _resident("VmRSS")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    spec = port_model(blueprint(read_config(fields, where="bench")), dtype).spec
    told: dict[str, Any] = {"parameters": spec.numel}
    if limit_nbytes is None:
        numerics = Numerics(precision)
        lean = choose_policy(shares_memory=True, clips=True, host_threads=torch.get_num_threads())
        everything = Placement("disk", "disk" if precision == "bf16" else "host", "disk", "disk")
        policy, parts = replace(lean, placements=(everything,) * len(spec.units)), [ids]
    else:
        plan = planned(spec, settings, folder, limit_nbytes - start)
        numerics, policy, parts = plan.numerics, plan.policy, list(ids.split(plan.micro_batch))
        told |= {"limit_nbytes": limit_nbytes, "predicted_seconds": plan.seconds, "plan": headline(plan)}
    engine = megatrain.Engine.from_config(
        fields, optimizer=optimizer, numerics=numerics, policy=policy, disk=[folder], verify=False
    )
    table = engine.diagnostics.memory_table()
    tiers = {tier: sum(n for (of, _), n in table.items() if of == tier) for tier in ("host", "disk")}
    versions = {"megatrain": megatrain.__version__, "transformers": transformers.__version__}
    batches = [{"input_ids": part, "labels": part} for part in parts]
    return start, lambda: engine.step(batches).loss, told | {"nbytes_by_tier": tiers, "versions": versions}


def planned(spec: ModelSpec, settings: Settings, folder: Path, nbytes: int) -> Plan:
    """The quickest plan for so many bytes of host memory, a part of which is left to kernels and threads."""
    from megatrain.device import open_device
    from megatrain.plan import Question, available_threads, find_plan
    from megatrain.plan.host_resources import available_disk_nbytes
    from megatrain.run.this_machine import this_machine
    from megatrain.spec import Limits

    machine = this_machine(open_device("cpu"), settings["precision"], settings["hardware"])
    return find_plan(
        Question(
            spec,
            replace(machine, disk_nbytes=available_disk_nbytes(folder)),
            settings["rows"] * settings["length"],
            settings["length"],
            precision=settings["precision"],
            overrides={"host_threads": available_threads()},
            limits=Limits(host_nbytes=int(COUNTED * nbytes)),
        )
    )


def headline(plan: Plan) -> dict[str, Any]:
    """What a plan has chosen, in short."""
    policy = plan.policy
    kept = Counter(policy.activations_by_layer[0] if policy.activations_by_layer else (policy.activations,))
    for row in policy.activations_by_layer[1:]:
        kept.update(row)
    placements = {part.value: sum(each.tier(part) == "disk" for each in policy.placements) for part in Part}
    return {
        "layers_keep": dict(kept),
        "units_with_their_on_disk": placements,
        "micro_batches": plan.work.micro_batches,
        "disk_staging_slots": policy.disk_staging_slots,
        "loss_chunk_tokens": plan.numerics.loss_chunk_tokens,
    }


def _plain(name: str, settings: Settings, ids: Any, folder: Path) -> Built:
    """The library's own model in memory, with PyTorch's fused AdamW."""
    import torch
    import transformers

    start = _resident("VmRSS")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings["shape"])).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings["precision"] == "bf16"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    versions = {"transformers": transformers.__version__}
    return start, step, {"parameters": sum(each.numel() for each in model.parameters()), "versions": versions}


def _deepspeed(name: str, settings: Settings, ids: Any, folder: Path) -> Built:
    """ZeRO-3 over the library's own model, which is built whole and then handed over."""
    import deepspeed
    import torch
    import transformers
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import AsyncIOBuilder

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    AsyncIOBuilder().load(verbose=False)
    DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])  # compiles, where it has not been compiled yet
    start = _resident("VmRSS")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings["shape"]))
    # Not the newer checkpointing: it keeps views of swap buffers that are refilled before they are used, so that the
    # gradients come out wrong without a word (0.19.8, one process).
    model.train()
    if name != "deepspeed_graphs":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    numels = [each.numel() for each in model.parameters()]
    tile = sum(each.numel() for each in model.model.layers[0].parameters())
    config = deepspeed_config(settings, folder, tile, max(numels), pipelined=name != THEIRS[0])
    if settings["precision"] == "bf16":
        model.bfloat16()
    deepspeed.zero.Init(module=model, config_dict_or_path=config)  # `initialize` alone would take bf16 on a cpu
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    del model

    def step() -> float:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    versions = {"deepspeed": deepspeed.__version__, "transformers": transformers.__version__}
    shown = json.loads(json.dumps(config).replace(str(folder), "FOLDER"))
    return start, step, {"parameters": sum(numels), "config": shown, "versions": versions}


def deepspeed_config(settings: Settings, folder: Path, tile: int, largest: int, *, pipelined: bool) -> dict[str, Any]:
    """What `deepspeed.initialize` is told; tile and largest are numbers of parameters."""
    place = {"device": "nvme", "nvme_path": str(folder), "pin_memory": True}
    ahead = {"pipeline_read": pipelined, "pipeline_write": pipelined}
    tiles_at_once = 3 if pipelined else 1  # read, updated, written
    return {
        "train_micro_batch_size_per_gpu": settings["rows"],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": settings["precision"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": tile,
            "offload_param": {**place, "buffer_count": 5, "buffer_size": largest, "max_in_cpu": 0},
            "offload_optimizer": {**place, "buffer_count": STATES * tiles_at_once, **ahead},
            "stage3_max_live_parameters": largest,
            "stage3_max_reuse_distance": 0,  # with more, small parameters that stay take all buffers, and it ends
            "stage3_prefetch_bucket_size": tile,
            "reduce_bucket_size": tile,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "overlap_events": True, "single_submit": False},
    }


def show(result: dict[str, Any]) -> str:
    """The comparison as text."""
    lines = [f"{'':<36}{'tokens/s':>9}{'products s':>11}{'peak MiB':>9}{'B/param':>9}"]
    for name, found in result["contenders"].items():
        lines.append(
            f"{name:<36}{found['tokens_per_second']:>9.0f}{found['products_seconds']:>11.2f}"
            f"{found['peak_nbytes'] / (1 << 20):>9,.0f}{found['peak_nbytes_per_parameter']:>9.1f}"
        )
    for ours, each in result["ratios"].items():
        for name, ratio in each.items():
            speed, memory, above = (f"{ratio[key]:.2f}x" for key in ("speed", "memory", "memory_above_start"))
            lines.append(f"{ours} to {name}: speed {speed}, memory {memory} ({above} above start)")
    lines.append(f"the claim: {SPEED_GOAL}x at {MEMORY_GOAL}x")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", help="an interpreter that has DeepSpeed; this one, if it has it")
    parser.add_argument("--against", nargs="+", choices=THEIRS, default=THEIRS[:2])
    parser.add_argument("--plain", action="store_true", help="plain PyTorch in memory too")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the drive that holds the state")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rows", type=int, default=SEQUENCES, help=f"sequences of {LENGTH} tokens in a step")
    parser.add_argument("--turns", type=int, default=4, help="counted steps of each")
    parser.add_argument("--hardware", help="what `megatrain probe` has found here; else it is asked now")
    parser.add_argument("--out", type=Path, help="folder for zero_nvme_TOKENS.json")
    parser.add_argument("--contend", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="?", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contend:
        contend(given.contend, json.loads(given.settings))
        return 0
    settings = {"shape": SHAPE, "rows": given.rows, "length": LENGTH, "precision": given.precision}
    settings |= {"folder": str(Path(given.folder).resolve())}
    python = given.python or (sys.executable if importlib.util.find_spec("deepspeed") else None)
    against = [*(given.against if python else ()), *([PLAIN] if given.plain else ())]
    with tempfile.TemporaryDirectory() as folder:
        settings["hardware"] = given.hardware or probed(given.folder, Path(folder))
        result = compare(settings, against, given.turns, python or "")
    print(show(result))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"zero_nvme_{given.rows * LENGTH}.json").write_text(json.dumps(result, indent=1) + "\n")
    best = [max(each["speed"] for each in _met(result, name)) for name in against if name in THEIRS]
    return 0 if all(speed >= SPEED_GOAL for speed in best) else 1


def _met(result: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Our ratios to that contender within the goal of memory, with the same losses; the first is no ratio at all."""
    found = [each[name] for each in result["ratios"].values()]
    return [{"speed": 0.0}, *(each for each in found if each["fits"])]


def probed(folder: str, target: Path) -> str:
    """The file of what `megatrain probe` finds here."""
    path = str(target / "hardware.json")
    subprocess.run(
        [sys.executable, "-m", "megatrain", "probe", "--path", folder, "--output", path], cwd=ROOT, check=True
    )
    return path


if __name__ == "__main__":
    sys.exit(main())
