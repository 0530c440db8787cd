"""`megatrain plan`: plan a model on a machine, print it, and write it as JSON or its step as a trace.

Combines reading models (`model`), describing machines (`plan.machines`) and planning (`plan`). A model's structure is
read on the meta device, without weights, unless a saved plan or an earlier measurement (`plan.measured_models`) has it;
so a laptop can plan for any machine. The default machine is this one as `megatrain probe` measured it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from megatrain.errors import ConfigError, DeviceError, DoesNotFit, ModelError, PlanError
from megatrain.formatting import amount, at_least, at_most, counted, counted_epochs, duration
from megatrain.formatting import rate as _rate
from megatrain.optim import described, kind_described, kind_named
from megatrain.plan import (
    Outlook,
    Plan,
    Question,
    advised,
    changes,
    find_plan,
    fits,
    load_hardware,
    look,
    question_of_one,
    ranks_on_each,
    read_model,
    share_of,
    step_flops,
)
from megatrain.plan.cost import duplex_disk_bandwidths, product_flops
from megatrain.plan.estimates import gc_paused
from megatrain.plan.measured_models import built_in, known_name, measured_file, recall, remember
from megatrain.plan.placement import host_nbytes
from megatrain.plan.ranks import limits_of_machine
from megatrain.plan.report import (
    Table,
    as_content,
    describe_images,
    describe_matrices,
    gains,
    memory,
    summary_rows,
    warning_rows,
    without_gain,
)
from megatrain.run.this_machine import described_machine, probed_machine, this_machine
from megatrain.schedule import chrome_trace
from megatrain.spec import Hardware, Limits, ModelSpec, Numerics, Policy, Precision
from megatrain.spec.limits import parse_nbytes
from megatrain.spec.work import refuse_huge_step
from megatrain.system.hub_client import holds_weights, names_in
from megatrain.system.paths import read_json, read_text, usable_path, written_or_refused

if TYPE_CHECKING:
    from megatrain.config import Config

LENGTH, TOKENS_PER_STEP = 4096, 65_536
"""Defaults for sequence length and tokens per step; fewer tokens per step if these do not fit."""

DRIVE_DECIDES = 2.0
"""Seconds in which state goes to the disk and back, over those of a step's useful operations, from which a step gets
more tokens than usual."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `megatrain plan` is asked beside the model, as its options are called.

    hardware: built-in machine name or a file; `None`: this machine. Memory limits are per machine, such as `24GB` or
    `80%`; `disk_memory` of `0`: no disk tier. adapter: e.g. `lora:16`. optimizer: e.g. `lion`; `None`: AdamW, or that
    of a saved plan. overrides: keys to set in the configuration of a run. ranks: GPUs that train together, on `nodes`
    machines. json, trace: files for the numbers, and for the ops of the step.
    """

    hardware: str | None = None
    tokens_per_step: int | None = None
    sequence_length: int | None = None
    precision: Precision = "bf16"
    clip: bool = True
    device_memory: str | None = None
    host_memory: str | None = None
    disk_memory: str | None = None
    token_budget: float | None = None
    json: str | None = None
    trace: str | None = None
    attention: str = "auto"
    adapter: str | None = None
    optimizer: str | None = None
    trust_remote_code: bool = False
    overrides: Sequence[str] = ()
    ranks: int = 1
    nodes: int = 1

    @property
    def memories(self) -> dict[str, str | None]:
        return {"device": self.device_memory, "host": self.host_memory, "disk": self.disk_memory}


def run_plan(model: str, console: Console, options: Options) -> Outlook:
    """Plan, print the plan, and write the files asked for.

    model: hub name, folder, config.json, the JSON file of an earlier plan, or the configuration of a run (`.yaml`),
    which decides everything but the machine.

    Raises a `MegaTrainError` for any mistake, if possible before the model is read; `DoesNotFit` names the nearest
    change that fits.
    """
    _refuse_words(options.precision, options.token_budget)
    files = {"--json": options.json, "--trace": options.trace}.items()
    targets = {option: _writable(option, file) for option, file in files if file is not None}
    _refuse_numbers(options.sequence_length, options.tokens_per_step, options.memories)
    run = _run_configuration(model, options.overrides)
    if run is not None:
        _refuse_given(options)
        hardware = options.hardware or run.train.hardware
        options = replace(options, precision=run.train.precision, hardware=hardware)
    is_this_one = options.hardware is None
    machine, here = _machine_of_ranks(options)
    with Console(stderr=True).status("reading the model"):
        question = _question_of(run, machine) if run is not None else _question_by(model, options, machine)
    with gc_paused():
        with Console(stderr=True).status("planning"):
            may_shrink = run is None and options.tokens_per_step is None
            plan = _planned(question_of_one(question, options.ranks, here), may_shrink=may_shrink)
            outlook = look(plan, options.token_budget)
        facts = _facts(plan, question, run, is_this_one=is_this_one)
        show(console, outlook, facts)
        with Console(stderr=True).status("looking for improvements"):
            outlook = advised(outlook)
    show_changes(console, outlook)
    command = _train(plan, model, *options.overrides) if run is not None else _init(plan, model, options)
    console.print(Text.assemble(("next: ", "bold"), command), soft_wrap=True)
    if "--json" in targets:
        _write(targets["--json"], json.dumps(as_content(outlook), indent=1) + "\n")
    if "--trace" in targets:
        _write(targets["--trace"], json.dumps(chrome_trace([plan.timeline])))
    return outlook


# The question ------------------------------------------------------------------------------------------------------


def _refuse_words(precision: str, token_budget: float | None) -> None:
    """Raise `ConfigError` for options that are wrong on any machine."""
    if precision not in ("bf16", "fp32"):
        raise ConfigError(f"unknown precision {precision!r}", where="--precision", fix="use bf16 or fp32")
    if token_budget is not None and not 0 < token_budget <= 1e18:
        raise ConfigError(f"{token_budget:g} is out of range", where="--token-budget", fix="give a number such as 1e12")


def _machine_of_ranks(options: Options) -> tuple[Hardware, int]:
    """The machine, and the number of ranks on each. Raises errors here, before the model is read."""
    here = ranks_on_each(options.ranks, options.nodes)
    machine = find_hardware(options.hardware, options.precision)
    share_of(machine, options.ranks, here)
    return machine, here


def _usual_tokens(least: int) -> int:
    """Default tokens per step, at least `least`, which is one sequence for each rank."""
    return max(1, TOKENS_PER_STEP // least) * least


def _run_configuration(name: str, overrides: Sequence[str]) -> Config | None:
    """The run configuration in the file `name`; `None` if `name` is a model."""
    path = usable_path(name, where="model", error=ModelError)
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        from megatrain.config import load_config

        return load_config(path, overrides)
    if overrides:
        fix = "leave it out, or name the .yaml of a run"
        raise ConfigError("sets a key, but a model has no keys", where=repr(overrides[0]), fix=fix)
    return None


SAID_BY_A_RUN = {
    "tokens_per_step": "train.global_batch_size",
    "sequence_length": "data.sequence_length",
    "precision": "train.precision",
    "clip": "train.max_grad_norm",
    "device_memory": "memory.device",
    "host_memory": "memory.host",
    "disk_memory": "memory.disk",
    "attention": "model.attention",
    "adapter": "adapter",
    "optimizer": "train.optimizer",
    "trust_remote_code": "model.trust_remote_code",
}
"""Option -> the configuration key that decides it for a run."""


def _refuse_given(options: Options) -> None:
    """Raise `ConfigError` if an option that a run's configuration decides is given too."""
    for name, key in SAID_BY_A_RUN.items():
        if getattr(options, name) != getattr(Options, name):  # the default
            option = "no-clip" if name == "clip" else name.replace("_", "-")
            fix = f"set {key}, in the file or as {key}=VALUE"
            raise ConfigError("is decided by the configuration", where=f"--{option}", fix=fix)


def _question_by(model: str, options: Options, machine: Hardware) -> Question:
    """The question of a model that is no run, from the options alone."""
    limits = _limits(machine, options.memories, is_this_one=options.hardware is None)
    spec = find_model(
        model,
        options.precision,
        attention=options.attention,
        adapter=options.adapter,
        trust_remote_code=options.trust_remote_code,
    )
    if options.optimizer is not None:
        spec = described(spec, kind_named(options.optimizer, "--optimizer")())
    length = length_for(spec, options.sequence_length, options.tokens_per_step)
    tokens = options.tokens_per_step or _usual_tokens(length * options.ranks)
    return Question(spec, machine, tokens, length, options.precision, options.clip, saves=True, limits=limits)


def _question_of(run: Config, machine: Hardware) -> Question:
    """The planning question of a run on a machine, with its adapter and frozen parameters. Reads no weights."""
    from megatrain.data.processor import load_processor, refuse_without_tower
    from megatrain.engine import DTYPES
    from megatrain.engine.batch import TEXT_ENTRIES
    from megatrain.model import freeze_parameters, lora_config, port_model
    from megatrain.model.adapters import with_adapter
    from megatrain.model.encoder_stack import stream_encoder
    from megatrain.model.fuse_layers import fuse_layers
    from megatrain.model.profile_prologue import see, values_of, values_per_token
    from megatrain.model.skeleton import blueprint
    from megatrain.run.planner_inputs import question_of

    named = run.model.path or run.model.config
    assert named is not None  # validated by `Config`
    trusts = run.model.trust_remote_code
    known = None
    if isinstance(named, str) and not (trusts or usable_path(named).exists() or _cached_config(named)):
        known = known_name(named)
    config = _library_config(named, known, trust_remote_code=trusts)
    structure = blueprint(config, attention=run.model.attention, trust_remote_code=trusts)
    if run.adapter is not None:
        fresh = lora_config(**run.adapter.model_dump(exclude={"type", "path"}))
        structure = with_adapter(structure, run.adapter.path or fresh)
    else:
        freeze_parameters(structure, run.train.freeze)
    ported = port_model(structure, DTYPES[run.train.precision])
    if run.policy.kernels == "fused":
        fuse_layers(ported)
    if run.data.images is not None:  # as many as a row has room for, since the data are not read
        processor = load_processor(run.tokenizer)
        refuse_without_tower(processor, type(structure).__name__, ported.arguments)
        row = processor.full_row(run.data.sequence_length)
        values = values_of(row, TEXT_ENTRIES)
        stream_encoder(ported, row, values)
        see(ported, row, values)
    spec = ported.spec
    if run.adapter is not None and run.model.path is not None:
        spec = _over_files(spec, run.train.precision)
    return question_of(run, spec, machine, {}, values_per_token(ported))


def _over_files(spec: ModelSpec, precision: Precision) -> ModelSpec:
    """A model whose frozen base is read from its files, assumed to be in bfloat16, as nearly all are; a run checks."""
    names = {param.name for unit in spec.units for param in unit.params} if precision == "bf16" else ()
    return replace(spec, base_apart=True).with_in_files(names)


def _length_of(run: Config, plan: Plan) -> str:
    """Steps, epochs and time of a run, estimated from file sizes."""
    from megatrain.data.files import about_tokens

    held = about_tokens(run.data.sources, run.tokenizer, run.data.pattern)
    tokens = plan.question.tokens_of_all
    epoch = None if held is None else held * (1 - run.data.validation_fraction) / tokens
    steps, epochs = run.train.steps, run.train.epochs
    if steps is None:
        assert epochs is not None  # one of the two
        if epoch is None:
            return f"{counted_epochs(epochs)}; how long depends on the size of the data"
        steps = max(1, round(epochs * epoch))
        words = f"{counted_epochs(epochs)} = about {counted(steps, 'step')}"
    else:
        words = counted(steps, "step") + ("" if epoch is None else f" = about {counted_epochs(steps / epoch, 2)}")
    return f"{words}, estimated from file sizes; takes {duration(plan.seconds * steps)}"


def find_model(
    source: str,
    precision: Precision,
    *,
    attention: str = "auto",
    adapter: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """The specification of a model, by hub name, folder, config.json, or saved plan. Reads no weights.

    adapter: e.g. `lora:16`; `None`: the model itself is trained.

    A hub name is looked up in the local hub cache, then among the built-in models, then on the hub. Measurements are
    cached, except for models from the hub or with code of their own.
    """
    path, where = usable_path(source, where="model", error=ModelError), f"model {source}"
    exists = path.exists()
    if exists and path.is_file():
        content = _content(path, where)
        if isinstance(content, dict) and "model" in content:
            if "data" in content or "train" in content:
                raise _is_configuration(where, content["model"])
            if adapter is not None:
                raise ModelError("is a saved plan, which includes its adapter", where=where, fix="leave --adapter out")
            planned, asked = read_model(content, where), content.get("question")
            if attention not in ("auto", planned.attention):
                what = f"is a saved plan, which includes its attention kernel, {planned.attention}"
                raise ModelError(what, where=where, fix="leave --attention out")
            if isinstance(asked, dict) and asked.get("precision", precision) != precision:
                what = f"is a saved plan in {asked['precision']}"
                raise ModelError(what, where=where, fix=f"add --precision {asked['precision']}")
            return planned.over(1)
    place = path.resolve() if exists else path
    name = place.parent.name if place.is_file() else place.name
    config = None if trust_remote_code else _config_text(source, path)
    known = None if config or exists or trust_remote_code else known_name(source)
    if known and (precision, attention, adapter) == ("bf16", "auto", None):
        return _named(built_in(known), name, precision, adapter)
    file = measured_file([config or f"built in: {known}", precision, attention, *_adapter_facts(adapter)])
    if (config or known) and (spec := recall(file)):
        return _named(spec, name, precision, adapter)
    spec = _measured(source, precision, attention, adapter, known=known, trust_remote_code=trust_remote_code)
    if config or known:
        remember(file, spec)
    return _named(spec, name, precision, adapter)


def _named(spec: ModelSpec, name: str, precision: Precision, adapter: str | None) -> ModelSpec:
    spec = replace(spec, name=name)
    return spec if adapter is None else _over_files(spec, precision)


def _config_text(source: str, path: Path) -> str | None:
    """Text of a model's config.json, if it is on this machine."""
    with suppress(OSError, UnicodeDecodeError):
        if path.exists():
            return read_text(path if path.is_file() else path / "config.json")
        if cached := _cached_config(source):
            return read_text(cached)
    return None


def _cached_config(name: str) -> Path | None:
    """Path of a model's config.json in the local hub cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if f"models--{name.replace('/', '--')}" not in names_in(HF_HUB_CACHE):
        return None  # saves importing the hub library, which is slow
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def _measured(
    source: str,
    precision: Precision,
    attention: str,
    adapter: str | None,
    *,
    known: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """Measure the specification of a model without weights. known: its name, if it is a built-in model."""
    import torch

    from megatrain.model import lora_config, lora_named, port_model
    from megatrain.model.adapters import with_adapter
    from megatrain.model.skeleton import blueprint

    config = _library_config(source, known, trust_remote_code=trust_remote_code)
    structure = blueprint(config, attention=attention, trust_remote_code=trust_remote_code)
    if adapter is not None:
        structure = with_adapter(structure, lora_config(**lora_named(adapter)))
    return port_model(structure, torch.bfloat16 if precision == "bf16" else torch.float32).spec


def _library_config(source: str | Mapping[str, Any], known: str | None, *, trust_remote_code: bool) -> Any:
    """The transformers config of a model. known: its name, if it is a built-in model."""
    from megatrain.model import model_named
    from megatrain.model.architecture import read_config
    from megatrain.model.hub import known_config

    if isinstance(source, Mapping):
        return read_config(source, where="model.config")
    if known:
        return known_config(known)
    path = usable_path(source, where="model", error=ModelError)
    named = model_named(str(path)) if path.exists() else source
    return read_config(named, where=f"model {source}", trust_remote_code=trust_remote_code)


def find_hardware(source: str | None, precision: Precision = "bf16") -> Hardware:
    """A built-in machine or a hardware file; `None`: this machine as probed, or else a rough description of it.

    Raises `PlanError` for a GPU that is neither built in nor probed, and for an unknown name or malformed file.
    """
    if source is not None:
        return load_hardware(source)
    return probed_machine() or _unprobed_machine(precision)


def _unprobed_machine(precision: Precision) -> Hardware:
    from megatrain.device import open_device

    try:
        device = open_device("cuda:0")
    except DeviceError:
        device = open_device("cpu")
    try:
        if not device.shares_memory and described_machine(device) is None:
            what = f"there is no description of a {getattr(device, 'model', device.name)}"
            raise PlanError(what, where="hardware", fix="run `megatrain probe --device cuda:0`")
        return this_machine(device, precision)
    finally:
        device.close()


def _refuse_numbers(length: int | None, tokens_per_step: int | None, memories: Mapping[str, str | None]) -> None:
    """Raise `ConfigError` for impossible token counts and malformed memory limits, before the machine is measured."""
    for tier, text in memories.items():
        _nbytes(tier, text, 10**12)
    if length is not None and length < 1:
        raise ConfigError(f"{length} is too small", where="--sequence-length", fix="give 1 or more")
    tokens = (length or 1) if tokens_per_step is None else tokens_per_step
    where = "--sequence-length" if tokens_per_step is None else "--tokens-per-step"
    refuse_huge_step(tokens, where, ConfigError)
    if tokens < (length or 1):
        what = f"{tokens:,} tokens per step are less than one sequence of {length or 1:,}"
        raise ConfigError(what, where="--tokens-per-step", fix="give at least the tokens of one sequence")


def _nbytes(tier: str, text: str | None, total: int) -> int | None:
    """Bytes from a string such as `24GB` or `80%` of `total`; for the disk also `0`."""
    if text is None:
        return None
    return 0 if tier == "disk" and text.strip() == "0" else parse_nbytes(text, f"--{tier}-memory", total)


def _limits(machine: Hardware, memories: Mapping[str, str | None], *, is_this_one: bool) -> Limits:
    """Memory limits by tier, from strings.

    A limit above what a built-in machine has stands for a larger configuration of it; for this machine it is an error.
    """
    if memories["device"] is not None and machine.shares_memory:
        what = f"{machine.name} has no device memory of its own"
        raise ConfigError(what, where="--device-memory", fix="give --host-memory only")
    totals = machine.capacities
    limits = {tier: _nbytes(tier, text, totals[tier]) for tier, text in memories.items()}
    for tier, nbytes in limits.items():
        if is_this_one and nbytes and 0 < totals[tier] < nbytes:
            what = f"{at_least(nbytes)} of {tier} memory are asked for, but this machine has {at_most(totals[tier])}"
            raise ConfigError(what, where=f"--{tier}-memory", fix="give less, or name another machine with --hardware")
    total = machine.device_nbytes + machine.host_nbytes
    if machine.divided_memory and total < sum(limits[tier] or totals[tier] for tier in ("device", "host")):
        given, other = ("device", "host") if memories["device"] is not None else ("host", "device")
        what = f"device and host of {machine.name} divide one memory of {at_most(total)}"
        raise ConfigError(what, where=f"--{given}-memory", fix=f"give --{other}-memory too, so that both are no more")
    return Limits(limits["device"], limits["host"], limits["disk"])


def length_for(spec: ModelSpec, length: int | None, tokens_per_step: int | None = None) -> int:
    """`length` tokens per sequence, or a default if None. Raises `ConfigError` if the model has fewer positions."""
    most = spec.max_positions
    if length is None:
        return max(1, min(LENGTH, most or LENGTH, LENGTH if tokens_per_step is None else tokens_per_step))
    if most is not None and length > most:
        what = f"sequences of {length:,} tokens exceed the model's {most:,} positions"
        raise ConfigError(what, where="--sequence-length", fix=f"give {most} or less")
    return length


def _planned(question: Question, *, may_shrink: bool) -> Plan:
    """The plan; if the user gave no number of tokens per step, with fewer than the default if it does not fit, and with
    more where the drive decides."""
    asked = question
    question = more_tokens(question) if may_shrink else question
    while True:
        question = fewer_tokens(question) if may_shrink else question
        try:
            return find_plan(question)
        except DoesNotFit as error:
            if not may_shrink or question.sequences == 1:
                raise _with_upgrades(error, question, has_shrunk=question is not asked) from error
        question = _halved(question)


def more_tokens(question: Question) -> Question:
    """The question with twice its sequences, if the drive decides how long a step takes: what it reads and writes of
    state does not depend on its tokens, so they go by nearly twice as fast, and wear it half as much."""
    model, hardware, budgets = question.model, question.hardware, question.budgets()
    policy = Policy(update="next_forward" if question.clips else "during_backward")
    state = host_nbytes(model, Numerics(question.precision), policy, question.saves)
    overflow = state - budgets["host"]
    if overflow <= 0 or not budgets.get("disk"):
        return question
    computed = step_flops(model, [(question.sequences, question.length)]) / product_flops(hardware, question.precision)
    if overflow / min(duplex_disk_bandwidths(hardware)) < DRIVE_DECIDES * computed:
        return question
    return replace(question, tokens_per_step=2 * question.sequences * question.length)


def fewer_tokens(question: Question) -> Question:
    """The question with the most of all, a half, a quarter, ... of its sequences that fit by their estimate, or one."""
    one = replace(question, tokens_per_step=question.length)
    if question.sequences > 1 and not fits(question) and not fits(one):
        return one  # without a look at those in between
    while question.sequences > 1 and not fits(question):
        question = _halved(question)
    return question


def _halved(question: Question) -> Question:
    return replace(question, tokens_per_step=question.sequences // 2 * question.length)


def _with_upgrades(error: DoesNotFit, question: Question, *, has_shrunk: bool) -> DoesNotFit:
    """The refusal of a question, with the upgrades of the machine that would make it fit."""
    step = f" with {counted(question.tokens_of_all, 'token')} per step" if has_shrunk else ""
    helps = {change.name: change.tokens_per_second for change in changes(question, None) if change.tokens_per_second}
    words = [f"{name} would make it fit ({_rate(speed)} tokens/s{step})" for name, speed in helps.items()]
    fix = f"{error.fix}; {' or '.join(words) or 'no single upgrade makes it fit'}"
    return DoesNotFit(error.what, where=error.where, fix=fix, needed=error.needed)


def _is_configuration(where: str, model: Any) -> ModelError:
    path = model.get("path") if isinstance(model, dict) else None
    fix = f"name its model, {path}" if path else "name its model, or its run folder"
    return ModelError("is the configuration of a run, not of a model", where=where, fix=fix)


def _content(path: Path, where: str) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        if path.suffix in (".yaml", ".yml"):
            raise _is_configuration(where, None) from error
        what = f"cannot be read ({getattr(error, 'strerror', None) or 'not JSON'})"
        raise ModelError(what, where=where, fix="give a folder, a config.json or a saved plan") from error


# What is shown -----------------------------------------------------------------------------------------------------


def _facts(plan: Plan, question: Question, run: Config | None, *, is_this_one: bool) -> list[tuple[str, str]]:
    """question: that of all ranks, and of a whole machine."""
    from megatrain.train.progress import describe_model, describe_policy

    hardware = question.hardware
    device = "" if hardware.shares_memory else f"{amount(hardware.device_nbytes)} device, "
    return [
        ("model", describe_model(plan.question.model)),
        ("machine", f"{hardware.name}: {device}{amount(hardware.host_nbytes)} host"),
        *_asked(question, "this machine" if is_this_one else "the described machine"),
        ("attention", plan.question.model.attention),
        ("policy", "; ".join(describe_policy(plan.numerics, plan.policy))),
        *_disk_tier(plan),
        *describe_matrices(plan),
        *describe_images(plan),
        *([] if run is None else [("length", _length_of(run, plan))]),
    ]


def _asked(question: Question, machine: str) -> list[tuple[str, str]]:
    """Rows for memory limits that differ from what the machine has, and for device memory that is assumed."""
    hardware = question.hardware
    totals = hardware.capacities
    rows = [
        (f"{tier} memory", f"{amount(asked)} as asked; {machine} has {amount(totals[tier])}")
        for tier in totals
        if (asked := question.limits.of(tier)) and asked != totals[tier]
    ]
    if hardware.divided_memory:
        rows.insert(0, ("device memory", dict(hardware.sources).get("device_nbytes", "a part of the host's")))
    return rows


def _disk_tier(plan: Plan) -> list[tuple[str, str]]:
    """How the disk is accessed (direct I/O or through the page cache), if the plan uses it."""
    if not plan.policy.uses_disk:
        return []
    sources = dict(plan.question.hardware.sources)
    return [("disk tier", sources.get("disk_read_bandwidth", "a speed assumed until `megatrain probe` measures it"))]


def show(console: Console, outlook: Outlook, facts: Sequence[tuple[str, str]]) -> None:
    """Print a plan and what limits its speed."""
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for name, fact in (*warning_rows(outlook), *facts, *summary_rows(outlook)):
        grid.add_row(name, Text(fact))
    console.print(grid)
    console.print(_laid_out(memory(outlook.plan)))


def show_changes(console: Console, outlook: Outlook) -> None:
    """Print changes of the run and of the machine that would make the step faster."""
    table = gains(outlook)
    if table.rows:
        console.print(_laid_out(table))
    if words := without_gain(outlook):
        console.print(Text(words), end="\n\n")


def _init(plan: Plan, model: str, options: Options) -> str:
    """The commands that write a configuration for a model, and train by it."""
    path = usable_path(model, where="model", error=ModelError)
    content = read_json(path) if path.is_file() else None
    is_saved = isinstance(content, dict) and "model" in content  # which names neither its model nor its adapter
    command = ["megatrain", "init", "config.yaml", "--model", "MODEL" if is_saved else model, "--data", "FILE"]
    command += ["--sequence-length", str(plan.question.length)]
    command += ["--precision", plan.question.precision] if plan.question.precision != "bf16" else []
    command += ["--disk", "FOLDER"] if plan.nbytes.get("disk") else []
    is_fresh = path.exists() and not is_saved and not holds_weights(path)
    command += ["--from-scratch"] if is_fresh else []
    adapter = "ADAPTER" if is_saved and plan.question.model.base_apart else options.adapter
    command += ["--adapter", adapter] if adapter is not None else []
    command += ["--trust-remote-code"] if options.trust_remote_code else []
    keys = [f"{key}={value}" for key, value in _keys_beside_init(plan, options).items()]
    return f"{shlex.join(command)}, then {_train(plan, 'config.yaml', *keys)}"


def _keys_beside_init(plan: Plan, options: Options) -> dict[str, object]:
    """Configuration keys of this plan that `megatrain init` would not write."""
    question, hardware = plan.question, plan.question.hardware
    keys: dict[str, object] = {}
    is_usual = question.tokens_of_all <= _usual_tokens(question.length * question.model.ranks)
    if options.tokens_per_step is not None or not is_usual:
        keys["train.global_batch_size"] = round(question.parts * question.sequences)
    if not question.clips:
        keys["train.max_grad_norm"] = "null"
    if options.attention != "auto":
        keys["model.attention"] = options.attention
    if (name := options.optimizer or kind_described(question.model)) is not None:
        keys["train.optimizer"] = name
    totals = hardware.capacities
    limits = {tier: nbytes for tier in totals if 0 < (nbytes := question.limits.of(tier) or 0) <= totals[tier]}
    if hardware.divided_memory:  # a run would take each to be as large as what is free
        limits = {tier: question.budgets()[tier] for tier in ("device", "host")} | limits
    of_machine = limits_of_machine(question, limits)
    return keys | {f"memory.{tier}": _exact(nbytes) for tier, nbytes in of_machine.items()}


def _exact(nbytes: int) -> str | int:
    """In whole megabytes, or quarters of a GiB, where that is no rounding."""
    if nbytes % 10**6 == 0:
        return f"{nbytes / 1e9:.12g}GB"
    return nbytes if nbytes % (1 << 28) else f"{nbytes / (1 << 30):.12g}GiB"


def _train(plan: Plan, *arguments: str) -> str:
    """The training command to run on each machine."""
    ranks, here = plan.question.model.ranks, plan.question.hardware.sharing_ranks
    place = f"--nnodes {ranks // here} --nproc-per-node {here} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    train = shlex.join(["megatrain", "train", *arguments])
    if ranks > here:
        return f"torchrun {place} -m {train}"
    return f"{train} --ranks {ranks}" if ranks > 1 else train


def _adapter_facts(adapter: str | None) -> list[str]:
    """What else a cached specification depends on with an adapter: its settings and peft's version."""
    from importlib.metadata import version

    return [] if adapter is None else [json.dumps(adapter_keys(adapter)), version("peft")]


def adapter_keys(adapter: str) -> dict[str, Any]:
    """The configuration section for a short form such as `lora:16`."""
    from megatrain.model import lora_named

    keys = lora_named(adapter)
    return {
        "type": "lora",
        **keys,
        **({"target_modules": list(keys["target_modules"])} if adapter.count(":") > 1 else {}),
    }


def _laid_out(table: Table) -> RichTable:
    """A table whose words are aligned left, and its numbers right."""
    laid = RichTable(box=box.SIMPLE, pad_edge=False, title=table.title, title_justify="left", title_style="bold")
    for place, head in enumerate(table.heads):
        is_number = place >= table.words
        laid.add_column(head, justify="right" if is_number else "left", no_wrap=is_number)
    for row in table.rows:
        laid.add_row(*(Text(text) for text in row))
    return laid


# Files -------------------------------------------------------------------------------------------------------------


def _writable(option: str, file: str) -> Path:
    path = usable_path(file, where=option, to_write="file")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", where=option, fix="create it, or choose another file")
    if not os.access(path.parent, os.W_OK):
        what = f"the folder {path.parent} is not writable"
        raise ConfigError(what, where=option, fix="choose a file in another folder")
    return path


def _write(path: Path, text: str) -> None:
    with written_or_refused(path, ConfigError, "choose a file in another folder") as draft:
        draft.write_text(text, encoding="utf-8")
