"""Trains a model of any size from disk and compares it with a small model that has the same answers.

    python -m bench.hundred --parameters 105e9 --folder FOLDER [--precision bf16|fp32] [--experts N]
                            [--lora | --muon | --known-checkpoint] [--clip NORM] [--times N] [--json FILE]
    python -m bench.hundred --parameters 1e9 2e9 --times 16 --folder FOLDER [...]

A narrow Llama (with `--experts` a Mixtral) is repeated over its width until it has about so many parameters: the same
function (`bench/wide.py`), so what plain PyTorch computes for the narrow model in minutes is what each number
of the wide one must be. Four parts follow each other, each in a process of its own; what a part finds is in
`FOLDER/hundred.json` as it ends, and a run that was cut off goes on with the first part that is missing there:

    files    the wide model is written as a folder of safetensors, a shard at a time, in bfloat16 (exact)
    narrow   plain PyTorch trains the narrow model for three steps
    steps    `Engine.from_pretrained` reads the folder, takes two steps of AdamW and saves a checkpoint
    resumed  `Engine.from_checkpoint` takes the third step, and exports the model

With `--known-checkpoint` the first and third parts write no model and take no steps: the checkpoint after two steps is
made of the narrow model's weights and moments, by the functions with which an engine saves. So a machine that is lent
for too few hours can resume at a size at which another day has stepped and saved.

Losses and norms are compared, and rows of every tensor of the checkpoint and of the export, chosen at random: by the
error of what training has changed, relative to it, in the root mean square, for the worst tensor. What is divided by
the times of repetition learns at the rate divided by them, and all has one epsilon; the narrow model's AdamW has one
for each parameter (PyTorch's groups), so that the two are the same rule. What is known is computed in float32. bf16 may
be twice as far from it, in the same rows, as the narrow model is when plain PyTorch trains it in bf16. Tokens of a
mixture go to two experts; in bf16 to all, since rounding would choose others, and then every number is another one.

`--muon` gives the matrices of layers to Muon, each expert's by itself. Repeated k times over both sides, a matrix has
the same singular values but for a factor, and zeros: its orthogonal direction is the narrow one's over k, as its weight
is. `match_rms_adamw` multiplies rates by sqrt(k) more, so they are divided by it. A gradient of 32 tokens has no more
than 32 singular values; the others are rounding, which Newton-Schulz makes up to 3.4445**5 = 485 times larger in both
models: so the narrow one's error in bf16 bounds Muon's, too. The exact answers are from torch's iteration in float32.

State is periodic, so a file system that compresses holds it in a fraction of its size, and speed here says nothing of a
drive. `bench/deduplicating_drive.sh` mounts one that keeps each distinct block once, compressed, in memory. (btrfs with
`compress-force` keeps a 32nd of the bytes at best.)
`--times` fixes the width, so that another size differs in depth alone. Of two sizes the parts take turns, and what has
grown more than the parameters is told: seconds, processor's seconds and bytes as a ratio to them, peaks of memory as
they are. Left out: planning, since the policy is given.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import subprocess
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from numpy.typing import NDArray
from peft import get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bench.tiers import peak_nbytes
from bench.wide import Repeated, WideModel, find_recipe, with_width
from megatrain import AdamW, Engine, Muon, Policy
from megatrain.checkpoint.run_state import read_training
from megatrain.checkpoint.save import CheckpointFacts, PlannedCheckpoint, StateReader, write_checkpoint
from megatrain.engine import DTYPES
from megatrain.formatting import amount, duration
from megatrain.memory import Disk
from megatrain.model import lora_config, port_model
from megatrain.model.skeleton import blueprint
from megatrain.model.tiny import perturb
from megatrain.optim.clip import clip_scale
from megatrain.spec import Placement, Precision, Tier, Work
from megatrain.spec.layout import Layout, layout_of
from megatrain.system.paths import compresses_what_is_not_preallocated, written_whole
from megatrain.train.parity import group_of, stock_loss
from tests.tiny import tiny_model

LR, EPS, RANK = 1e-3, 1e-4, 4
ROWS, LENGTH, MICRO_BATCHES = 2, 8, 2
SHARD_NBYTES = 1 << 30
SAMPLED_ROWS = 8
RESULTS = "hundred.json"
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
VOCABULARY = 2048
NARROW: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
TIMES = ((2e10, 64), (2e9, 32), (2e8, 16), (3e7, 8), (0, 4))
"""From so many parameters on, the narrow model is repeated so often."""
LEAST: Mapping[Precision, tuple[float, float, float]] = {"bf16": (2e-3, 1e-2, 0.1), "fp32": (1e-5, 1e-5, 1e-3)}
"""Relative errors of a loss, of a norm, and of what training has changed, that are rounding in any case."""
ROUNDING = 2.0
"""How many times as far from float32 as the narrow model in the same precision the wide one may be."""
PARTS = ("files", "narrow", "steps", "resumed")
SAVED_STEP = 2
"""After which the checkpoint is."""


@dataclass(frozen=True)
class Run:
    """What was asked, and the two models."""

    parameters: float
    folder: Path
    precision: Precision = "bf16"
    experts: int = 0
    lora: bool = False
    muon: bool = False
    known_checkpoint: bool = False
    clip: float | None = None
    times: int = 0

    @property
    def asked(self) -> dict[str, Any]:
        """What a run has to have in common with the one that it goes on with."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "folder"}

    @property
    def repetitions(self) -> int:
        return self.times or next(times for least, times in TIMES if self.parameters >= least)

    def model(self, layers: int) -> PreTrainedModel:
        """The narrow model of so many layers."""
        per_token = self.experts if self.precision == "bf16" else 2
        experts = {"num_local_experts": self.experts, "num_experts_per_tok": per_token} if self.experts else {}
        kind = "mixtral" if self.experts else "llama"
        model: PreTrainedModel = tiny_model(kind, **NARROW, **experts, num_hidden_layers=layers)
        return model

    @cached_property
    def narrow(self) -> PreTrainedModel:
        """The narrow model, whose weights are bfloat16 numbers, as deep as the wide one has to be."""
        one, two = (self._numel(layers) for layers in (1, 2))
        model = self.model(max(2, 1 + round((self.parameters - one) / (two - one))))
        model.config.architectures = [type(model).__name__]
        perturb(model, 0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        return model

    @cached_property
    def wide(self) -> WideModel:
        recipe = find_recipe(self.model(2).config)  # all layers are alike
        return WideModel(self.narrow, self.repetitions, recipe)

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        """The micro-batches of a step, counted from 1."""
        generator = torch.Generator().manual_seed(step)
        ids = [torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(MICRO_BATCHES)]
        return [{"input_ids": each, "labels": each} for each in ids]

    def repeated(self, name: str, shape: Sequence[int]) -> Repeated:
        """How a tensor of a folder is repeated: a parameter, or one whose dimensions are those of parameters."""
        if name in self.wide.parameters:
            return self.wide.parameters[name]
        heads = (NARROW["num_attention_heads"], NARROW["num_key_value_heads"])
        widths = {NARROW["hidden_size"], NARROW["intermediate_size"], *(count * NARROW["head_dim"] for count in heads)}
        times = tuple(self.repetitions if size in widths else 1 for size in shape)
        return Repeated(tuple(shape), times, tuple(shape), 1 / times[-1] if len(shape) > 1 else 1.0)

    def matrices(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Views of what Muon makes orthogonal in a tensor of a parameter's shape: none if AdamW updates it."""
        return tensor.view(-1, *tensor.shape[-2:]).unbind() if self.muon and "_proj" in name else ()

    def files(self, step: int, precision: Precision = "fp32") -> Path:
        """Where the narrow model is after so many steps that were computed in a precision."""
        return self.folder / "narrow" / (f"{precision}-{step}" if step else "begin")

    @property
    def known_state(self) -> Path:
        """The narrow model's masters and moments after the step that is saved, by parameter and number."""
        return self.files(SAVED_STEP).with_suffix(".state")

    def _numel(self, layers: int) -> int:
        config: PreTrainedConfig = with_width(self.model(layers).config, Fraction(self.repetitions))
        return int(blueprint(config).num_parameters())


# The parts ------------------------------------------------------------------------------------------------------------


def write_files(run: Run) -> dict[str, Any]:
    """The narrow model as the library saves it, and the wide one."""
    began, base = time.perf_counter(), run.folder / "narrow" / "base"
    trained = _adapted(run) if run.lora else run.narrow
    trained.save_pretrained(run.files(0))
    run.narrow.save_pretrained(base)
    (run.folder / "model").mkdir(exist_ok=True)
    if not run.known_checkpoint:
        write_wide(run, base, run.folder / "model", DTYPES[run.precision] if run.lora else torch.bfloat16)
    run.wide.config.save_pretrained(run.folder / "model")
    if run.lora:
        write_wide(run, run.files(0), run.folder / "adapter", torch.float32)
        config = json.loads((run.files(0) / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(run.folder / "model")
        (run.folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    wide = run.wide.model
    written = sum(path.stat().st_size for path in (run.folder / "model").iterdir())
    return {
        "parameters": wide.num_parameters(),
        "layers": wide.config.num_hidden_layers,
        "hidden_size": wide.config.hidden_size,
        "repetitions": run.repetitions,
        "narrow_parameters": run.narrow.num_parameters(),
        "tokens_per_step": MICRO_BATCHES * ROWS * LENGTH,
        "compresses": compresses_what_is_not_preallocated(run.folder),
        "written_nbytes": written,
        "seconds": time.perf_counter() - began,
    }


def write_wide(run: Run, narrow: Path, wide: Path, dtype: torch.dtype) -> None:
    """A folder of safetensors with each tensor of another one repeated, with no more than a shard in memory. Shards
    that are there already, of a run that was cut off, stay."""
    wide.mkdir(exist_ok=True)
    tensors = tensors_in(narrow)
    copies = {name: run.repeated(name, tensor.shape) for name, tensor in tensors.items()}
    shapes = {name: torch.empty(copy.wide_shape, dtype=dtype, device="meta") for name, copy in copies.items()}
    pattern = next(narrow.glob("*.safetensors")).stem.partition("-")[0] + "{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(shapes, filename_pattern=pattern, max_shard_size=SHARD_NBYTES)
    for file, names in split.filename_to_tensors.items():
        if not (wide / file).exists():
            values = {name: copies[name].values(tensors[name].to(dtype), 0, shapes[name].numel()) for name in names}
            shard = {name: value.view(shapes[name].shape) for name, value in values.items()}
            save_file(shard, wide / f"{file}.part", {"format": "pt"})
            (wide / f"{file}.part").rename(wide / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (wide / "model.safetensors.index.json").write_text(json.dumps(index))


def train_narrow(run: Run) -> dict[str, Any]:
    """Three steps of plain PyTorch in float32, and in the run's precision, to know how far rounding leads."""
    began = time.perf_counter()
    told, rounded = (plain_steps(run, precision) for precision in ("fp32", run.precision))
    told["rounding"] = {name: _relative(rounded[name], told[name]) for name in told}
    return {**told, "seconds": time.perf_counter() - began}


def plain_steps(run: Run, precision: Precision) -> dict[str, Any]:
    """Losses and norms of three steps with float32 masters, computed in a precision; saves the model after each."""
    model = _adapted(run) if run.lora else copy.deepcopy(run.narrow)
    model.train()
    kept = copy.deepcopy(model)
    masters = {name: parameter.data for name, parameter in kept.named_parameters()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    repeated = {name: run.repeated(name, parameter.shape) for name, parameter in trained.items()}
    matrices = {name: run.matrices(name, masters[name]) for name in trained}
    eps = {name: EPS / run.repetitions / each.gradient_factor for name, each in repeated.items()}
    groups = [{"params": [masters[name]], "eps": eps[name]} for name in trained if not matrices[name]]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=LR, weight_decay=0.0)]
    if run.muon:
        of_muon = [matrix for stack in matrices.values() for matrix in stack]
        optimizers.append(torch.optim.Muon(of_muon, lr=LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    losses, norms = [], []
    for step in (1, 2, 3):
        for name, parameter in model.named_parameters():
            parameter.data = masters[name].to(DTYPES[precision])
        losses.append(0.0)
        sums = {name: torch.zeros_like(masters[name]) for name in trained}
        for batch in run.batches(step):
            loss = stock_loss(model, batch) / MICRO_BATCHES
            losses[-1] += loss.item()
            for name, gradient in zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True):
                sums[name] += gradient
        factors = {name: each.copies**0.5 * each.gradient_factor for name, each in repeated.items()}
        norms.append(math.hypot(*(factors[name] * float(gradient.double().norm()) for name, gradient in sums.items())))
        for name, gradient in sums.items():
            gradient *= 1.0 if run.clip is None else clip_scale(norms[-1], run.clip)
            masters[name].grad = gradient
            for matrix, gradient_of_it in zip(matrices[name], run.matrices(name, gradient), strict=True):
                matrix.grad = gradient_of_it
        # Newton-Schulz in `torch.optim.Muon` converts to bfloat16; in fp32 it is to stay in float32.
        with patch.object(Tensor, "bfloat16", Tensor.clone if precision == "fp32" else Tensor.bfloat16):
            for optimizer in optimizers:
                optimizer.step()
        kept.save_pretrained(run.files(step, precision))
        if (step, precision) == (SAVED_STEP, "fp32") and run.known_checkpoint:
            moments = {name: optimizers[0].state[masters[name]] for name in trained}
            arrays = [masters, *({name: moments[name][key] for name in trained} for key in ("exp_avg", "exp_avg_sq"))]
            save_file({f"{name}.{n}": of[name] for n, of in enumerate(arrays) for name in trained}, run.known_state)
    return {"losses": losses, "norms": norms}


class KnownState:
    """The wide model's masters and moments at the save, read a range of elements at a time."""

    def __init__(self, run: Run, layouts: Sequence[Layout]) -> None:
        self._layouts, self._repeated, self._narrow = layouts, run.wide.parameters, load_file(run.known_state)

    def __call__(self, unit: int, array: int, start: int, stop: int) -> NDArray[np.float32]:
        """Elements [start, stop) of one array of a unit (`StateReader.read`), all of one parameter."""
        fields = self._layouts[unit].fields
        field = fields[bisect_right(fields, start, key=attrgetter("start")) - 1]
        repeated = self._repeated[field.name]
        factor = repeated.gradient_factor**array if array else repeated.factor
        of_copies = replace(repeated, factor=factor)
        narrow = self._narrow[f"{field.name}.{array}"]
        return of_copies.values(narrow, start - field.start, stop - field.start).numpy()


def write_known_checkpoint(run: Run) -> dict[str, Any]:
    """The checkpoint after two steps, of the narrow model's numbers."""
    began = time.perf_counter()
    planned = PlannedCheckpoint(port_model(run.wide.model, DTYPES[run.precision]))
    layouts = [layout_of(unit) for unit in planned.spec.units]
    state = StateReader(KnownState(run, layouts), layouts)
    with Engine.from_pretrained(run.files(0), optimizer=_optimizer(run), precision=run.precision) as engine:
        for step in range(1, SAVED_STEP + 1):
            engine.step(run.batches(step))
        settings = read_training(engine.save(run.folder / "narrow").wait())  # they do not depend on the width
        # As long as the engine is open, the C library keeps freed memory: fresh pages took most of the time.
        checkpoint = write_checkpoint(run.folder / "checkpoints", planned, state, CheckpointFacts(SAVED_STEP, settings))
    told: dict[str, Any] = {"losses": [], "norms": [], "writing_seconds": time.perf_counter() - began}
    told["checkpoint_nbytes"] = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    return told | compared(run, checkpoint, SAVED_STEP)


def take_steps(run: Run) -> dict[str, Any]:
    """Two steps from the model's files, and a checkpoint."""
    if run.known_checkpoint:
        return write_known_checkpoint(run)
    source = run.folder / ("adapter" if run.lora else "model")
    with (
        measured(run) as (told, disk, began),
        Engine.from_pretrained(source, optimizer=_optimizer(run), **_options(run, disk)) as engine,
    ):
        told["loading_seconds"] = began()
        told.update(_stepped(run, engine, disk, range(1, SAVED_STEP + 1)))
        began()
        checkpoint = engine.save(run.folder / "checkpoints").wait()
        told["saving_seconds"] = began()
        told["memory"] = defaultdict(int)
        for (tier, _), nbytes in engine.diagnostics.memory_table().items():
            told["memory"][tier] += nbytes
    told["checkpoint_nbytes"] = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    return told | compared(run, checkpoint, SAVED_STEP)


def resume(run: Run) -> dict[str, Any]:
    """The third step from the checkpoint, and the export."""
    (checkpoint,) = (run.folder / "checkpoints").glob("step-*")
    with measured(run) as (told, disk, began), Engine.from_checkpoint(checkpoint, **_options(run, disk)) as engine:
        told["loading_seconds"] = began()
        print(f"  loaded in {duration(told['loading_seconds'])}", flush=True)
        told.update(_stepped(run, engine, disk, (3,)))
        began()
        export = engine.save_pretrained(run.folder / "export")
        told["exporting_seconds"] = began()
    return told | compared(run, export, 3)


RUN_PART = dict(zip(PARTS, (write_files, train_narrow, take_steps, resume), strict=True))


@contextmanager
def measured(run: Run) -> Iterator[tuple[dict[str, Any], Disk, Callable[[], float]]]:
    """A dictionary for what the block takes, the disk tier for it, and a stopwatch: seconds since the last look."""
    disk = Disk([run.folder], preallocate=not compresses_what_is_not_preallocated(run.folder))
    looked, told = [time.perf_counter()], dict[str, Any]()

    def since() -> float:
        looked.append(time.perf_counter())
        return looked[-1] - looked[-2]

    yield told, disk, since
    told |= {"cpu_seconds": time.process_time(), "peak_process_nbytes": peak_nbytes()}


def _options(run: Run, disk: Disk) -> dict[str, Any]:
    frozen: Tier = "file" if run.lora and not run.experts else "disk"
    placement = Placement(frozen, "disk", "disk", "disk")
    policy = Policy(
        shares_memory=True,
        update="during_backward" if run.clip is None else "next_forward",
        placements=(placement,) * (run.narrow.config.num_hidden_layers + 2),
    )
    return {"precision": run.precision, "max_grad_norm": run.clip, "policy": policy, "disk": disk}


def _optimizer(run: Run) -> AdamW | Muon:
    """The rule that, for each copy, is that of `train_narrow`."""
    whole = ["*lora_B*"] if run.lora else {group_of(n) for n, how in run.wide.parameters.items() if how.factor == 1}
    rates = tuple((pattern, LR) for pattern in sorted(whole))
    adamw = AdamW(lr=LR / run.repetitions, eps=EPS / run.repetitions, weight_decay=0.0, learning_rates=rates)
    rate = LR / run.repetitions**0.5
    return Muon(lr=rate, weight_decay=0.0, newton_schulz=run.precision, adamw=adamw) if run.muon else adamw


def _stepped(run: Run, engine: Engine, disk: Disk, steps: Sequence[int]) -> dict[str, Any]:
    """Losses, norms, seconds and bytes of steps."""
    told: dict[str, list[float]] = {
        name: [] for name in ("losses", "norms", "step_seconds", "read_nbytes", "written_nbytes")
    }
    began = time.perf_counter()
    engine.parts.prepare(Work((ROWS * LENGTH,) * MICRO_BATCHES))
    prepared = time.perf_counter() - began
    for step in steps:
        before, began = (disk.read_nbytes, disk.written_nbytes), time.perf_counter()
        out = engine.step(run.batches(step))
        engine.weights.flush()
        seconds, moved = time.perf_counter() - began, (disk.read_nbytes - before[0], disk.written_nbytes - before[1])
        for name, number in zip(told, (out.loss, out.grad_norm, seconds, *moved), strict=True):
            told[name].append(number)
        print(f"  step {step}: loss {out.loss:.6f}, {duration(seconds)}", flush=True)
    return {**told, "preparing_seconds": prepared}


def _adapted(run: Run) -> Any:
    """The narrow model with a LoRA whose second matrices are not zero."""
    model = get_peft_model(copy.deepcopy(run.narrow), lora_config(r=RANK, alpha=RANK, target_modules=ADAPTED))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5).bfloat16())
    return model


# The comparison -------------------------------------------------------------------------------------------------------


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder of safetensors."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def compared(run: Run, folder: Path, step: int) -> dict[str, Any]:
    """What training has changed in rows of every tensor of a folder, against the narrow model after so many steps.

    Returns of the worst tensor the error relative to the change (`error_of_change`), and of the one that is farthest
    beyond rounding, or nearest to it, the error relative to what rounding explains (`to_rounding`): that is
    `ROUNDING` times the narrow model's own error in these rows of the tensors of this kind, the largest of all layers'.
    """
    begin, known, rounded = (tensors_in(run.files(*which)) for which in ((0,), (step,), (step, run.precision)))
    errors, draw = dict[str, float](), random.Random(step)
    explained: dict[str, float] = defaultdict(lambda: LEAST[run.precision][-1])
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                repeated, stored = run.repeated(name, known[name].shape), opened.get_slice(name)
                if tuple(stored.get_shape()) != repeated.wide_shape:
                    raise SystemExit(f"{file}: {name} has shape {stored.get_shape()}, not {repeated.wide_shape}")
                rows = _rows(repeated, known[name] != begin[name], draw)
                values = torch.stack([stored[row] for row in rows]) if known[name].dim() > 1 else stored[:].unsqueeze(0)
                first, exact, near = (repeated.rows(of[name], torch.tensor(rows)) for of in (begin, known, rounded))
                change, error, rounding = (float((one - exact).norm()) for one in (first, values, near))
                errors[name] = error / change if change and error >= 0 else math.inf if error else 0.0  # inf for NaN
                if change:
                    explained[group_of(name)] = max(explained[group_of(name)], ROUNDING * rounding / change)
    if missing := known.keys() ^ errors.keys():
        raise SystemExit(f"{folder}: not the same tensors: {sorted(missing)[:3]}")
    excess = {name: error / explained[group_of(name)] for name, error in errors.items()}
    worst, farthest = (max(of, key=of.__getitem__) for of in (errors, excess))
    told = {"error_of_change": errors[worst], "worst": worst, "to_rounding": excess[farthest], "farthest": farthest}
    return {"tensors": len(errors), **told}


def _rows(repeated: Repeated, changed: Tensor, draw: random.Random) -> list[int]:
    """Numbers of rows to compare: the first, the last, and some at random; of a table of which few have changed, most
    of those."""
    if changed.dim() == 1:
        return [0]
    last = repeated.wide_shape[0] - 1
    touched = changed.any(dim=-1).nonzero().flatten().tolist() if repeated.times[0] == 1 else range(last + 1)
    return sorted({0, last, *draw.choices(touched or [0], k=SAMPLED_ROWS)})


def _relative(numbers: Sequence[float], known: Sequence[float]) -> list[float]:
    return [abs(number - other) / other for number, other in zip(numbers, known, strict=True)]


def verdict(run: Run, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The largest errors of all parts, and whether rounding explains them."""
    known, computed = parts["narrow"], [parts[name] for name in ("steps", "resumed")]
    told: dict[str, Any] = {"holds": max(part["to_rounding"] for part in computed) <= 1}
    for name, least in zip(("losses", "norms"), LEAST[run.precision][:2], strict=True):
        numbers = [number for part in computed for number in part[name]]
        errors = _relative(numbers, known[name][-len(numbers) :])  # no step led to a known checkpoint
        told["holds"] &= max(errors) <= max(least, ROUNDING * max(known["rounding"][name]))
        told[f"errors_of_{name}"] = errors
    return told | {"error_of_change": max(part["error_of_change"] for part in computed)}


# The command ----------------------------------------------------------------------------------------------------------


def results_in(run: Run) -> dict[str, Any]:
    """What earlier processes have found. Ends the program for a folder of another run."""
    path = run.folder / RESULTS
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"asked": run.asked, "parts": {}}
    if Run(0, run.folder).asked | found["asked"] != run.asked:  # an older file does not name newer options
        raise SystemExit(f"{path} is of another run ({found['asked']}); name another folder, or delete it")
    return found


def run_part(run: Run, name: str) -> dict[str, Any]:
    """Run a part and keep what it finds."""
    results = results_in(run)
    results["parts"][name] = RUN_PART[name](run)
    if name == PARTS[-1]:
        results |= verdict(run, results["parts"])
    with written_whole(run.folder / RESULTS) as draft:
        draft.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, nargs="+", default=[1e9])
    parser.add_argument("--folder", type=Path, required=True, help="for the models, the state and the results")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--experts", type=int, default=0, help="of each layer, two of which compute each token")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--lora", action="store_true", help="train an adapter, with the model's weights in its files")
    what.add_argument("--muon", action="store_true", help="update the matrices of layers by Muon, all else by AdamW")
    what.add_argument(
        "--known-checkpoint", action="store_true", help="resume from a checkpoint that repeats the narrow model's state"
    )
    parser.add_argument("--clip", type=float, help="by the global norm")
    parser.add_argument("--times", type=int, default=0, help="how often the narrow model is repeated")
    parser.add_argument("--json", type=Path, help="another place for the results")
    parser.add_argument("--part", choices=PARTS, help="only this one, in this process")
    given = parser.parse_args(arguments)
    asked = {each.name: getattr(given, each.name) for each in fields(Run)}
    runs = [Run(**asked | {"parameters": size}) for size in given.parameters]
    if len(runs) > 1:
        runs = [replace(run, folder=run.folder / f"{run.parameters:g}") for run in runs]
    if given.part:
        run_part(runs[0], given.part)
        return
    for name in PARTS:
        for run in runs:
            in_its_process(run, name)
    results = [results_in(run) for run in runs]
    told = {"runs": results, "growth": growth(results[0]["parts"], results[-1]["parts"])}
    if given.json:
        given.json.write_text(json.dumps(told if runs[1:] else results[0], indent=1) + "\n")
    for each in results:
        losses, changes = max(each["errors_of_losses"]), each["error_of_change"]
        print(f"losses within {losses:.1e}, changes of weights within {changes:.1e}")
    if runs[1:]:
        print(json.dumps(told["growth"], indent=1))
    if not all(each["holds"] for each in results):
        raise SystemExit("not what the narrow model says")


def in_its_process(run: Run, name: str) -> None:
    """Run a part that is missing, in a process of its own, and show what it finds."""
    run.folder.mkdir(parents=True, exist_ok=True)
    if name not in results_in(run)["parts"]:
        print(f"{name} of {run.parameters:g} ...", flush=True)
        given = {f"--{name.replace('_', '-')}": value for name, value in (run.asked | {"folder": run.folder}).items()}
        words = [str(word) for name, value in given.items() if value for word in (name, value)[: 2 - (value is True)]]
        subprocess.run([sys.executable, "-m", "bench.hundred", *words, "--part", name], check=True)
    print(f"{name}: {shown(results_in(run)['parts'][name])}", flush=True)


def growth(small: Mapping[str, Any], large: Mapping[str, Any]) -> dict[str, float]:
    """How much more than the parameters what parts take has grown from one size to another; peaks as they are."""
    more = large["files"]["parameters"] / small["files"]["parameters"]
    grown = dict[str, float]()
    for part in PARTS[2:]:
        for name, value in large[part].items():
            if name.endswith(("seconds", "nbytes")):
                before, after = (sum(each) if isinstance(each, list) else each for each in (small[part][name], value))
                grown[f"{part}: {name}"] = round(after / before / (1 if name.startswith("peak") else more), 3)
    return grown


def shown(part: Mapping[str, Any]) -> str:
    """A part's times, bytes and errors, in words."""
    words = {"seconds": duration, "nbytes": amount, "error": "{:.3f}".format, "to": "{:.2f}".format}
    said = []
    for name, value in part.items():
        for kind in words.keys() & name.split("_"):
            said.append(" ".join([name, *map(words[kind], value if isinstance(value, list) else [value])]))
    return ", ".join(said)


if __name__ == "__main__":
    main()
