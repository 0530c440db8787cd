"""`megatrain plan`: a model, a machine and a question in; tables, a page and a file out.

Wires what reads models (`model`), what describes machines (`plan.machines`) and what plans (`plan`), and prints. The
model's structure is read without its weights, on the meta device, and not at all where a saved plan brings its
specification or an earlier call has measured it (`plan.measured_models`); so a laptop can plan for a machine it has
never seen. A probed machine, where there is a file of one, is the default. It leaves out the arithmetic (`plan`) and
the arguments (`cli`).
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain.errors import ConfigError, DeviceError, DoesNotFit, ModelError, PlanError
from megatrain.plan import (
    Outlook,
    Plan,
    Question,
    Sweep,
    find_plan,
    load_hardware,
    look,
    read_model,
    render_page,
    survey,
    sweep,
    upgrades,
)
from megatrain.plan.measured_models import measured_file, recall, remember
from megatrain.plan.question import MOST_TOKENS
from megatrain.plan.report import (
    amount,
    as_content,
    configuration,
    free_rows,
    rate_lines,
    sensitivity_rows,
    summary_rows,
    upgrade_rows,
    use_rows,
    warning_rows,
    without_gain,
)
from megatrain.run.this_machine import described_machine, probed_machine, this_machine
from megatrain.spec import Hardware, Limits, ModelSpec, Precision
from megatrain.spec.limits import parse_nbytes
from megatrain.system.paths import read_json, read_text, usable_path, written_whole

LENGTH, TOKENS_PER_STEP = 4096, 65_536
"""What is taken where the user says nothing; fewer tokens where so many do not fit."""

SHADES = " ░▒▓█"


def run_plan(
    model: str,
    console: Console,
    *,
    hardware: str | None = None,
    tokens_per_step: int | None = None,
    length: int | None = None,
    precision: Precision = "bf16",
    clips: bool = True,
    device_memory: str | None = None,
    host_memory: str | None = None,
    disk_memory: str | None = None,
    token_budget: float | None = None,
    sweeps: bool = False,
    html: str | None = None,
    json_file: str | None = None,
    attention: str = "auto",
    adapter: str | None = None,
    trust_remote_code: bool = False,
) -> Outlook:
    """Plan, print, and write what was asked for.

    model: hub name, folder, config.json, or a file that `json_file` of an earlier plan names. hardware: a machine of
    the library or a hardware file; `None` is this machine. Memories are texts such as `24GB` or `80%`; `0` of the disk
    leaves it alone. adapter: what trains over the model, `lora:16` say; `None` is the model itself.

    Raises a `MegaTrainError` for whatever is wrong, before the model is read where that tells nothing: `DoesNotFit`
    with the nearest change that fits.
    """
    if precision not in ("bf16", "fp32"):
        raise ConfigError(f"{precision!r} is no precision", where="--precision", fix="use bf16 or fp32")
    if token_budget is not None and not 0 < token_budget <= 1e18:
        raise ConfigError(f"{token_budget:g} tokens", where="--token-budget", fix="give a number such as 1e12")
    files = {"--html": html, "--json": json_file}
    targets = {option: _writable(option, file) for option, file in files.items() if file is not None}
    _refuse_tokens(length, tokens_per_step)
    memories = {"device": device_memory, "host": host_memory, "disk": disk_memory}
    for tier, text in memories.items():
        _nbytes(tier, text, 10**12)  # before a machine is measured
    machine = find_hardware(hardware, precision)
    limits = _limits(machine, memories, is_this_one=hardware is None)
    with Console(stderr=True).status("reading the model") as now:
        spec = find_model(model, precision, attention=attention, adapter=adapter, trust_remote_code=trust_remote_code)
        now.update("planning")
        length = _length(spec, length, tokens_per_step)
        tokens = max(length, TOKENS_PER_STEP) if tokens_per_step is None else tokens_per_step
        question = Question(spec, machine, tokens, length, precision, clips, saves=True, limits=limits)
        plan = _planned(question, may_shrink=tokens_per_step is None)
        now.update("looking at upgrades")
        outlook = look(plan, token_budget)
        swept = sweep(plan) if sweeps else None
    facts = _facts(plan)
    show(console, outlook, facts, swept)
    _show_next(console, plan, _model_keys(model, attention, trust_remote_code=trust_remote_code), adapter)
    if "--html" in targets:
        _write(targets["--html"], render_page(outlook, facts, swept))
    if "--json" in targets:
        _write(targets["--json"], json.dumps(as_content(outlook, swept), indent=1) + "\n")
    return outlook


# The question ------------------------------------------------------------------------------------------------------


def find_model(
    source: str,
    precision: Precision,
    *,
    attention: str = "auto",
    adapter: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """The specification of a model, by hub name, folder, config.json, or saved plan; no weight is read.

    adapter: what trains over it, `lora:16` say; `None` is the model itself.

    A hub name is looked up in the hub's cache, then among the shapes that are built in, then on the hub. What is
    measured is remembered, unless it is from the hub or of code that comes with the model.
    """
    path, where = usable_path(source, where="model", error=ModelError), f"model {source}"
    exists = path.exists()
    if exists and path.is_file():
        content = _content(path, where)
        if isinstance(content, dict) and "model" in content:
            if "data" in content or "train" in content:
                raise _is_configuration(where, content["model"])
            if adapter is not None:
                raise ModelError(
                    "is a saved plan, which says itself what trains", where=where, fix="leave --adapter out"
                )
            return read_model(content, where)
    place = path.resolve() if exists else path
    name = place.parent.name if place.is_file() else place.name
    config = None if trust_remote_code else _config_text(source, path)
    file = measured_file([config or f"built in: {source}", precision, attention, *_adapter_facts(adapter)])
    if not trust_remote_code and (spec := recall(file)):
        return replace(spec, name=name)
    spec, is_built_in = _measured(source, path, precision, attention, adapter, trust_remote_code=trust_remote_code)
    if config or is_built_in:
        remember(file, spec)
    return replace(spec, name=name)


def _config_text(source: str, path: Path) -> str | None:
    """The config.json of a model that is on this machine, if it is."""
    with suppress(OSError, UnicodeDecodeError):
        if path.exists():
            return read_text(path if path.is_file() else path / "config.json")
        if cached := _cached_config(source):
            return read_text(cached)
    return None


def _cached_config(name: str) -> Path | None:
    """In the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if f"models--{name.replace('/', '--')}" not in _names_in(HF_HUB_CACHE):
        return None  # before the library is asked, which takes a while to import
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def _measured(
    source: str, path: Path, precision: Precision, attention: str, adapter: str | None, *, trust_remote_code: bool
) -> tuple[ModelSpec, bool]:
    """The specification of a model, and whether its shape is built in."""
    import torch

    from megatrain.model import lora_config, lora_named, model_named, port_model
    from megatrain.model.adapters import with_adapter
    from megatrain.model.architecture import read_config
    from megatrain.model.known_models import known_config
    from megatrain.model.skeleton import blueprint

    exists, where = path.exists(), f"model {source}"
    try:
        built_in = None if exists or trust_remote_code else known_config(source)
        if built_in and _cached_config(source):
            built_in = None
        named = model_named(str(path)) if exists else source
        config = built_in or read_config(named, where=where, trust_remote_code=trust_remote_code)
    except ModelError as error:
        if exists or not (near := _nearest_models(source)):
            raise
        raise ModelError(error.what, where=where, fix=f"did you mean {' or '.join(near)}?") from error
    structure = blueprint(config, attention=attention, trust_remote_code=trust_remote_code)
    if adapter is not None:
        structure = with_adapter(structure, lora_config(**lora_named(adapter)))
    spec = port_model(structure, torch.bfloat16 if precision == "bf16" else torch.float32).spec
    return spec, built_in is not None


def find_hardware(source: str | None, precision: Precision = "bf16") -> Hardware:
    """A described machine or a hardware file; `None` is the probed machine, or else this one, roughly.

    Raises `PlanError` for a GPU that nobody has described or probed, and for a name or a file that is wrong.
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
            what = f"nobody has described a {getattr(device, 'model', device.name)}"
            raise PlanError(what, where="hardware", fix="run `megatrain probe --device cuda:0`")
        return this_machine(device, precision)
    finally:
        device.close()


def _refuse_tokens(length: int | None, tokens_per_step: int | None) -> None:
    """Raise `ConfigError` for numbers of tokens that no model can have."""
    if length is not None and length < 1:
        raise ConfigError(f"sequences of {length} tokens", where="--sequence-length", fix="give 1 or more")
    tokens = (length or 1) if tokens_per_step is None else tokens_per_step
    if tokens > MOST_TOKENS:
        what, fix = f"{tokens:,} tokens per step are more than anyone trains with", f"give {MOST_TOKENS:,} or less"
        raise ConfigError(what, where="--sequence-length" if tokens_per_step is None else "--tokens-per-step", fix=fix)
    if tokens < (length or 1):
        what = f"{tokens:,} tokens per step of sequences of {length or 1:,}"
        raise ConfigError(what, where="--tokens-per-step", fix="give at least one sequence's tokens")


def _nbytes(tier: str, text: str | None, there: int) -> int | None:
    """From a text such as `24GB` or `80%`; of the disk `0` too."""
    if text is None:
        return None
    return 0 if tier == "disk" and text.strip() == "0" else parse_nbytes(text, f"--{tier}-memory", there)


def _limits(machine: Hardware, memories: Mapping[str, str | None], *, is_this_one: bool) -> Limits:
    """Of each tier, from a text.

    More than a described machine has describes another configuration of it; what is not in this machine cannot be used.
    """
    if memories["device"] is not None and machine.shares_memory:
        what = f"{machine.name} computes in host memory"
        raise ConfigError(what, where="--device-memory", fix="give --host-memory alone")
    there = {"device": machine.device_nbytes, "host": machine.host_nbytes, "disk": machine.disk_nbytes or 0}
    found = {tier: _nbytes(tier, text, there[tier]) for tier, text in memories.items()}
    for tier, nbytes in found.items():
        if is_this_one and nbytes and 0 < there[tier] < nbytes:
            what = f"{amount(nbytes)} of {tier} memory, and this machine has {amount(there[tier])}"
            raise ConfigError(what, where=f"--{tier}-memory", fix="give less, or name another machine with --hardware")
    return Limits(found["device"], found["host"], found["disk"])


def _length(spec: ModelSpec, length: int | None, tokens_per_step: int | None) -> int:
    most = spec.max_positions
    if length is None:
        return max(1, min(LENGTH, most or LENGTH, LENGTH if tokens_per_step is None else tokens_per_step))
    if most is not None and length > most:
        what = f"sequences of {length:,} tokens, and the model has {most:,} positions"
        raise ConfigError(what, where="--sequence-length", fix=f"give {most} or less")
    return length


def _planned(question: Question, *, may_shrink: bool) -> Plan:
    """The plan; with fewer tokens per step where the user left them open and so many do not fit."""
    try:
        return find_plan(question)
    except DoesNotFit as error:
        while may_shrink and question.sequences > 1:
            question = replace(question, tokens_per_step=question.sequences // 2 * question.length)
            if question.sequences == 1 or survey(question, [question.budgets()]) != [None]:
                return _planned(question, may_shrink=True)  # where one sequence does not fit, its refusal is told
        helps = [upgrade for upgrade in upgrades(question, None) if upgrade.tokens_per_second is not None]
        words = [f"{upgrade.name} would make it fit ({upgrade.tokens_per_second:,.0f} tokens/s)" for upgrade in helps]
        fix = f"{error.fix}; {' or '.join(words) or 'no single upgrade makes it fit'}"
        raise DoesNotFit(error.what, where=error.where, fix=fix) from error


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


def _nearest_models(source: str) -> list[str]:
    """Folders and configs beside where `source` would be, models that the hub's cache holds, and those built in."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from megatrain.model.known_models import known_names

    path = usable_path(source)
    near = [str(path.parent / name) for name in difflib.get_close_matches(path.name, _names_in(path.parent), 2, 0.7)]
    cached = [name for name in _names_in(HF_HUB_CACHE) if name.startswith("models--")]
    names = [name.removeprefix("models--").replace("--", "/") for name in cached]
    names += known_names()
    return [*near, *difflib.get_close_matches(source, names, n=2, cutoff=0.6)]


def _names_in(folder: str | Path) -> list[str]:
    """None where there is no such folder, or it may not be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# What is shown -----------------------------------------------------------------------------------------------------


def _facts(plan: Plan) -> list[tuple[str, str]]:
    from megatrain.train.progress import describe_model, describe_policy

    hardware = plan.question.hardware
    device = "" if hardware.shares_memory else f"{amount(hardware.device_nbytes)} device, "
    return [
        ("model", describe_model(plan.question.model)),
        ("machine", f"{hardware.name}: {device}{amount(hardware.host_nbytes)} host"),
        *_beyond(plan.question),
        ("attention", plan.question.model.attention),
        ("policy", "; ".join(describe_policy(plan.numerics, plan.policy))),
        *_disk_tier(plan),
    ]


def _beyond(question: Question) -> list[tuple[str, str]]:
    """Memories of which more is asked about than the described machine has."""
    hardware = question.hardware
    there = {"device": hardware.device_nbytes, "host": hardware.host_nbytes, "disk": hardware.disk_nbytes or 0}
    return [
        (f"{tier} memory", f"{amount(asked)} as asked; the described machine has {amount(there[tier])}")
        for tier in there
        if (asked := question.limits.of(tier) or 0) > there[tier]
    ]


def _disk_tier(plan: Plan) -> list[tuple[str, str]]:
    """How the disk is read and written, whether past the page cache or through it, where the plan uses it."""
    if not any(placement.uses_disk for placement in plan.policy.placements):
        return []
    sources = dict(plan.question.hardware.sources)
    return [("disk tier", sources.get("disk_read_bandwidth", "its speed is assumed; `megatrain probe` measures it"))]


def show(
    console: Console,
    outlook: Outlook,
    facts: Sequence[tuple[str, str]],
    swept: Sweep | None = None,
) -> None:
    """Print a plan with everything that follows from it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for name, fact in (*warning_rows(outlook), *facts, *summary_rows(outlook)):
        grid.add_row(name, Text(fact))
    console.print(grid)
    console.print(_memory(outlook.plan))
    heads = ("resource", "busy", "step with 10% more of it")
    console.print(_table("what limits", heads, sensitivity_rows(outlook)))
    console.print(Text("\n".join(rate_lines(outlook))), end="\n\n" if outlook.decisive_rates else "")
    for title, rows in (("changes that cost nothing", free_rows(outlook)), ("one upgrade", upgrade_rows(outlook))):
        if rows:
            console.print(_table(title, ("change", "tokens/s", "gain"), rows))
    if words := without_gain(outlook):
        console.print(Text(words), end="\n\n")
    if swept is not None:
        console.print(_heat_map(swept))


def _show_next(console: Console, plan: Plan, model: Mapping[str, Any], adapter: str | None) -> None:
    """What asks for this plan in the configuration of a run, and the commands that write one and train."""
    question = plan.question
    tree = {"model": model} | ({} if adapter is None else {"adapter": adapter_keys(adapter)}) | configuration(plan)
    lines = [_yaml(name, section) for name, section in tree.items()]
    init = ["megatrain", "init", "config.yaml", "--model", str(model.get("path") or model["config"]), "--data", "FILE"]
    init += ["--sequence-length", str(question.length)]
    init += ["--precision", question.precision] if question.precision != "bf16" else []
    init += ["--disk", "FOLDER"] if plan.nbytes.get("disk") else []
    init += ["--from-scratch"] if "config" in model else []
    init += ["--adapter", adapter] if adapter is not None else []
    init += ["--trust-remote-code"] if "trust_remote_code" in model else []
    console.print(Text.assemble(("in a configuration:\n", "bold"), "\n".join(lines)), soft_wrap=True)
    console.print(
        Text.assemble(("next: ", "bold"), f"{shlex.join(init)}, then megatrain train config.yaml"), soft_wrap=True
    )


def _adapter_facts(adapter: str | None) -> list[str]:
    """What the specification of a model with an adapter depends on besides."""
    from importlib.metadata import version

    return [] if adapter is None else [json.dumps(adapter_keys(adapter)), version("peft")]


def adapter_keys(adapter: str) -> dict[str, Any]:
    """The section of a configuration that `lora:16` stands for."""
    from megatrain.model import lora_named

    keys = lora_named(adapter)
    return {
        "type": "lora",
        **keys,
        **({"target_modules": list(keys["target_modules"])} if adapter.count(":") > 1 else {}),
    }


def _model_keys(source: str, attention: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """`path` of a trained model or `config` of a fresh one; a saved plan does not say where its model is."""
    path, keys = usable_path(source, where="model", error=ModelError), {"path": source}
    if path.is_file():
        content = read_json(path)
        keys = {"path": "MODEL"} if isinstance(content, dict) and "model" in content else {"config": source}
    more = {"attention": attention} if attention != "auto" else {}
    return keys | more | ({"trust_remote_code": True} if trust_remote_code else {})


def _yaml(name: str, section: Mapping[str, object]) -> str:
    return (
        f"{name}: {{{', '.join(f'{key}: {json.dumps(value, ensure_ascii=False)}' for key, value in section.items())}}}"
    )


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> Table:
    """The first `texts` columns hold words, the others numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < texts else "right", no_wrap=place >= texts)
    for row in rows:
        table.add_row(*(Text(text) for text in row))
    return table


def _memory(plan: Plan) -> Table:
    rows: list[tuple[str, str, str, str]] = []
    budgets = plan.question.budgets()
    for tier, uses in use_rows(plan).items():
        total, budget = plan.nbytes[tier], budgets[tier]
        rows += [(tier, use, amount(nbytes), f"{nbytes / budget:.1%}") for use, nbytes in uses]
        rows.append((tier, f"total of {amount(budget)}", amount(total), f"{total / budget:.1%}"))
    return _table("memory at its peak", ("tier", "what for", "bytes", "of the budget"), rows, texts=2)


def _heat_map(swept: Sweep) -> Table:
    """Shades for a terminal without colours; numbers for one with narrow shades."""
    most = max((rate for row in swept.tokens_per_second for rate in row if rate is not None), default=1.0)
    heads = ["host \\ device", *(amount(nbytes) if nbytes else "shared" for nbytes in swept.device_nbytes)]
    rows = []
    for host, rates in zip(swept.host_nbytes, swept.tokens_per_second, strict=True):
        cells = []
        for rate in rates:
            if rate is None:
                cells.append("-")
            else:
                cells.append(f"{SHADES[max(1, round(rate / most * (len(SHADES) - 1)))] * 2} {rate:,.0f}")
        rows.append([amount(host), *cells])
    return _table("tokens per second by memory; - does not fit", heads, rows)


# Files -------------------------------------------------------------------------------------------------------------


def _writable(option: str, file: str) -> Path:
    path = usable_path(file, where=option, to_write="file")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", where=option, fix="make it, or choose another file")
    if not os.access(path.parent, os.W_OK):
        what = f"nothing can be written into the folder {path.parent}"
        raise ConfigError(what, where=option, fix="choose a file in a folder of yours")
    return path


def _write(path: Path, text: str) -> None:
    """The whole file, or the one that was there."""
    try:
        with written_whole(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ConfigError(what, where=str(path), fix="choose a file in a folder of yours") from error
