"""What a run asks the planner, from its configuration: its question, memory limits and disk tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import ceil
from pathlib import Path
from typing import Any

from megatrain.config import Config, DiskSection, MemorySection, TrainSection
from megatrain.errors import ConfigError, DiskError
from megatrain.formatting import amount, at_least, at_most
from megatrain.memory import Disk
from megatrain.memory.probe_disk import disk_speed
from megatrain.model import InFiles, listed
from megatrain.optim import AdamW, Muon, Optimizer, described, kind_named
from megatrain.plan import Plan, Question, written_nbytes_per_day
from megatrain.plan.host_resources import available_disk_nbytes, lies_in_memory
from megatrain.spec import Batching, Hardware, Limits, ModelSpec
from megatrain.spec.limits import parse_nbytes
from megatrain.system.paths import compresses_what_is_not_preallocated

ROWS_OF: Mapping[str, Batching] = {"best_fit": "packed", "grouped": "padded"}
"""data.packing -> how rows are packed; `auto` is decided only after planning, when the data are read."""


STAGED = 2
"""Steps whose images are in host memory besides those read ahead: the running one's, as read and as staged."""

SAMPLE_NBYTES, SAMPLE_SECONDS = 64 << 20, 1.0
"""Bytes written to and read from each folder to measure its bandwidth."""


def optimizer_for(train: TrainSection) -> Optimizer:
    given: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": train.betas,
        "eps": train.eps,
        "weight_decay": train.weight_decay,
        "no_decay": train.no_decay,
        "learning_rates": tuple(train.learning_rates.items()),
    }
    if train.optimizer != "muon":
        kind = kind_named(train.optimizer)
        return kind(**{field.name: given[field.name] for field in fields(kind)})
    muon = train.muon
    others = {"lr": muon.adamw_learning_rate, "weight_decay": muon.adamw_weight_decay}
    return Muon(
        train.learning_rate,
        train.weight_decay,
        muon.momentum,
        muon.nesterov,
        adjust_lr_fn=muon.adjust,
        newton_schulz=muon.newton_schulz,
        adamw=AdamW(**given | {name: value for name, value in others.items() if value is not None}),
        matrices=tuple(muon.matrices.items()),
        cut=tuple(muon.cut.items()),
    )


def question_of(
    config: Config, spec: ModelSpec, hardware: Hardware, overrides: Mapping[str, Any], values_per_token: float = 0.0
) -> Question:
    """The planning question of one rank. overrides: policy fields in addition to `config.policy`'s. values_per_token:
    see `Work`.

    Raises `ConfigError` if nothing is left to train.
    """
    train = config.train
    if not spec.trained_numel:
        raise ConfigError("freezes all parameters", where="train.freeze", fix="freeze fewer of them")
    hardware = with_disk(hardware, config.disk)
    pinned = {**overrides, **config.policy.overrides}
    if train.micro_batch_override is not None:
        pinned["micro_batch"] = train.micro_batch_override
    return Question(
        described(spec, optimizer_for(train)),
        hardware,
        tokens_per_step=train.sequences * config.data.sequence_length,
        length=config.data.sequence_length,
        precision=train.precision,
        clips=train.max_grad_norm is not None,
        overrides=pinned,
        batching="padded" if train.prefers or config.data.images else ROWS_OF.get(config.data.packing, "uniform"),
        values_per_token=values_per_token,
        read_ahead=STAGED + (config.data.workers + 1 if config.data.workers else 0),
        saves=config.checkpoint.every > 0,
        limits=limits_of(config.memory, config.disk, hardware),
    )


def with_disk(hardware: Hardware, disk: DiskSection) -> Hardware:
    """`hardware` with the free space of the disk tier's folders; unchanged without folders, so that a plan can say what
    a disk would gain.

    Raises `ConfigError` for a folder that is missing or in host memory.
    """
    if not disk.folders:
        return hardware
    for folder in disk.paths:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}", where="disk.folders", fix="create it, or name another")
        if lies_in_memory(folder):
            what = f"{folder} is in host memory (tmpfs), where a disk tier is useless"
            raise ConfigError(what, where="disk.folders", fix="name a folder on a drive")
    systems = {folder.stat().st_dev: folder for folder in disk.paths}
    return replace(hardware, disk_nbytes=sum(available_disk_nbytes(folder) for folder in systems.values()))


def limits_of(memory: MemorySection, disk: DiskSection, hardware: Hardware) -> Limits:
    """The user's limit for each tier, capped at what there is; without disk folders no disk is used.

    Raises `ConfigError` for a limit on a tier that does not exist, or a malformed one.
    """
    totals = hardware.capacities
    if memory.device is not None and hardware.shares_memory:
        what = "the device has no memory of its own, it uses host memory"
        raise ConfigError(what, where="memory.device", fix="set memory.host only")
    if memory.disk is not None and not disk.folders:
        raise ConfigError("there is no disk tier", where="memory.disk", fix="set disk.folders too")
    given = {"device": memory.device, "host": memory.host, "disk": memory.disk}
    limits: dict[str, int | None] = {}
    for tier, value in given.items():
        nbytes = parse_nbytes(value, f"memory.{tier}", totals[tier]) if isinstance(value, str) else value
        limits[tier] = None if nbytes is None else min(nbytes, totals[tier])
    return Limits(limits["device"], limits["host"], limits["disk"] if disk.folders else 0)


def refuse_wear(plan: Plan, disk: DiskSection) -> None:
    """Raise `ConfigError` if the ranks of a machine would write more to the disk per day than the user allows."""
    if disk.max_write_per_day is None:
        return
    value = disk.max_write_per_day
    most = parse_nbytes(value, "disk.max_write_per_day") if isinstance(value, str) else value
    written = plan.question.hardware.sharing_ranks * written_nbytes_per_day(plan)
    if written > most:
        raise ConfigError(
            f"the plan writes {at_least(ceil(written))} to the disk per day, but {at_most(most)} are allowed",
            where="disk.max_write_per_day",
            fix="give more host memory, more tokens per step (each step writes once), or a higher limit",
        )


def open_disk(disk: DiskSection, hardware: Hardware) -> Disk | None:
    """Open the disk tier's files with the best measured block size and depth. Raises `ConfigError` if that fails."""
    if not disk.folders:
        return None
    measured: dict[str, int] = {}
    if hardware.disk_block_nbytes and hardware.disk_depth:
        measured = {"block_nbytes": hardware.disk_block_nbytes, "depth": hardware.disk_depth}
    try:
        return Disk(
            disk.paths,
            shares=_shares(disk.paths),
            checksums=disk.checksums,
            preallocate=disk.preallocate,
            **measured,  # type: ignore[arg-type]
        )
    except DiskError as error:
        raise ConfigError(error.what, where=f"disk.folders: {error.where}", fix=error.fix) from error


def _shares(folders: Sequence[Path]) -> list[float] | None:
    """Each folder's share of the data, by measured bandwidth, so that all finish together; `None` for a single folder.

    Folders on one file system share its bandwidth.
    """
    if len(folders) == 1:
        return None
    systems = [folder.stat().st_dev for folder in folders]
    speeds = {}
    for folder, system in zip(folders, systems, strict=True):
        if system not in speeds:
            best = disk_speed(folder, SAMPLE_NBYTES, SAMPLE_SECONDS).best
            speeds[system] = 1 / (1 / best.read_bandwidth + 1 / best.write_bandwidth)
    return [speeds[system] / systems.count(system) for system in systems]


def describe_memory(plan: Plan) -> str:
    """A plan's use of each tier and its limit, and how much of that is for checkpoints."""
    budgets = plan.question.budgets()
    tiers = ", ".join(f"{amount(plan.nbytes[tier])} of {amount(most)} {tier}" for tier, most in budgets.items() if most)
    return tiers + (f" ({amount(plan.save_nbytes)} of it for checkpoints)" if plan.save_nbytes else "")


def describe_disk(disk: Disk | None, section: DiskSection) -> list[tuple[str, str]]:
    """(name, fact) about the disk tier, if there is one."""
    if disk is None:
        return []
    access = "direct I/O" if disk.direct else "through the page cache, because the file system has no direct I/O"
    sums = "checksums compared" if section.checksums else "checksums off"
    facts = [("disk tier", f"{', '.join(map(str, section.paths))}: {access}, {sums}")]
    if compressing := [folder for folder in section.paths if compresses_what_is_not_preallocated(folder)]:
        told = "compresses what is written; a full disk is found by a write"
        if section.preallocate:
            told = "compresses, but not space that is allocated in advance (disk.preallocate: false)"
        facts.append(("compression", f"the file system of {', '.join(map(str, compressing))} {told}"))
    return facts


def describe_files(plan: Plan, in_files: InFiles) -> list[tuple[str, str]]:
    """(name, fact) about weights that are read from the model's own files, and why others are not."""
    if not plan.read_from_files_nbytes:
        return []
    read = f"{amount(plan.read_from_files_nbytes)} of frozen weights per step are read from the model's files"
    by_reason: dict[str, list[str]] = {}
    for name, why in in_files.others.items():
        by_reason.setdefault(why, []).append(name)
    held = [f"{listed(names, most=2)}, which {why}" for why, names in by_reason.items()]
    return [("files", read + (f"; kept in memory instead: {'; '.join(held)}" if held else ""))]
