"""The options common to all constructors of `Engine`, and the policy derived from them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Annotated, Literal, TypedDict, get_args

import torch
from torch import Tensor, nn

from megatrain.device import Device
from megatrain.dist import ALONE, World
from megatrain.dist.processes import join
from megatrain.engine import DTYPES
from megatrain.engine.batch import TEXT_ENTRIES
from megatrain.errors import ConfigError, DiskError, DoesNotFit, PlanError
from megatrain.formatting import at_least, at_most
from megatrain.memory import Disk
from megatrain.memory.model_files import ModelFiles, extents_of
from megatrain.model import AdaptedSource, PortedModel, Source, port_model
from megatrain.model.encoder_stack import stream_encoder
from megatrain.model.fuse_layers import fuse_layers
from megatrain.model.profile_prologue import values_of
from megatrain.optim import AdamW, Muon, Optimizer, described
from megatrain.plan import available_threads, choose_policy, fit_lock_limit, memory_table
from megatrain.plan.host_resources import available_cores
from megatrain.plan.placement import host_nbytes, spill
from megatrain.schedule.passes.state_buffers import state_name, state_nbytes
from megatrain.spec import IN_HOST, Limits, ModelSpec, Numerics, Part, Policy, Precision, Work
from megatrain.spec.layout import layout_of
from megatrain.spec.validate_fields import Bounds, checked, shown
from megatrain.system.environment import find_launch
from megatrain.system.paths import usable_path
from megatrain.train.schedule_cache import budgets, refuse_contradictions, refuse_no_files

Seed = Annotated[int, Bounds(-(1 << 63), (1 << 63) - 1)]
Folders = tuple[str | Path, ...]


class RunOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.from_model` that few need; documented there."""

    seed: int
    disk: str | Path | Sequence[str | Path] | Disk
    limits: Limits | None
    verify: bool
    numerics: Numerics | None
    world: World | None
    image_row: Mapping[str, Tensor] | None


class EngineOptions(RunOptions, total=False):
    """Keyword arguments common to all constructors of `Engine`; documented in `Engine.from_model`."""

    device: str | torch.device | Device
    precision: Precision | None
    optimizer: Optimizer | None
    max_grad_norm: float | None
    policy: Policy | Literal["auto"]


@dataclass(frozen=True)
class SourceInUnits:
    source: Source
    ported: PortedModel


def checked_options(options: EngineOptions) -> EngineOptions:
    """Validate and normalize the options before anything is read or allocated.

    Raises `TypeError` for an unknown option, as Python does, and `ConfigError`, `PlanError` or `DeviceError` for
    an invalid value; contradictions with the model, the device or other options are found later.
    """
    if unknown := sorted(options.keys() - EngineOptions.__annotations__.keys()):
        near = get_close_matches(unknown[0], EngineOptions.__annotations__, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"an engine takes no option {unknown[0]!r}{hint}")
    accepted = options.copy()
    if accepted.get("precision") is not None and accepted["precision"] not in get_args(Precision):
        raise PlanError(f"must be bf16 or fp32, not {shown(accepted['precision'])}", where="precision")
    if not isinstance(policy := accepted.get("policy", "auto"), Policy) and policy != "auto":
        raise PlanError(f"{shown(policy)} is not a policy", where="policy", fix="give a megatrain.Policy, or 'auto'")
    accepted["numerics"] = checked(accepted.get("numerics"), Numerics | None, PlanError, "numerics")
    numerics_of(accepted)
    accepted["limits"] = checked(accepted.get("limits"), Limits | None, PlanError, "limits")
    if "seed" in accepted:
        accepted["seed"] = checked(accepted["seed"], Seed, ConfigError, "seed")
    if "verify" in accepted:
        accepted["verify"] = checked(accepted["verify"], bool, ConfigError, "verify")
    norm: object = accepted.get("max_grad_norm")
    if norm is not None:
        number = float(norm) if not isinstance(norm, bool) and isinstance(norm, Real) else 0.0
        if not number > 0:
            what = f"{shown(norm)} is not a norm to clip to"
            raise ConfigError(what, where="max_grad_norm", fix="give a number above 0, or None not to clip")
        accepted["max_grad_norm"] = number  # infinity is allowed: reports the norm without clipping
    if (optimizer := accepted.get("optimizer")) is not None:
        refuse_other_optimizers(optimizer)
    accepted["world"] = checked(accepted.get("world"), World | None, ConfigError, "world")
    if isinstance(disk := accepted.get("disk", ()) or (), str | Path):
        accepted["disk"] = [disk]
    elif not isinstance(disk, Disk):
        accepted["disk"] = checked(disk, Folders, ConfigError, "disk")
    return accepted


def refuse_other_optimizers(optimizer: object) -> None:
    """Raise `ConfigError` for anything but ours."""
    if isinstance(optimizer, Optimizer):
        return
    if isinstance(optimizer, type):
        what = f"{optimizer.__name__} is a class"
        raise ConfigError(what, where="optimizer", fix="make one: megatrain.AdamW(lr=...)")
    what = f"{shown(optimizer)} is not an optimizer of megatrain"
    if isinstance(optimizer, torch.optim.Optimizer):
        name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        what = f"a {name} cannot update streamed weights, nor can its learning-rate scheduler"
    fix = "give megatrain.AdamW, Lion or Muon (matrices of layers; its `adamw` updates all else) with the same settings"
    raise ConfigError(what, where="optimizer", fix=f"{fix}, and the rate of each step as lr")


def optimizer_of(options: EngineOptions, ported: PortedModel) -> Optimizer:
    """The given optimizer, or the default, which describes the model's parameters. Raises `ConfigError` if a pattern
    matches none of them."""
    optimizer = options.get("optimizer") or AdamW()
    ported.change(lambda spec: described(spec, optimizer))
    params = [param for unit in ported.structure.units for param in unit.params]
    frozen = [param.name for param in params if not param.trainable]
    optimizer.refuse_patterns([param for param in params if param.trainable], frozen)
    return optimizer


def refuse_other_groups(before: Optimizer, now: Optimizer) -> None:
    """Raise `ConfigError` for another kind of optimizer than before, or if the parameters that decay, or have their own
    learning rate, would change."""
    refuse_other_optimizers(now)
    if type(now) is not type(before):
        what = f"{type(now).__name__} cannot go on with what {type(before).__name__} has kept"
        raise ConfigError(what, where="optimizer", fix="make another engine")
    if isinstance(before, Muon) and isinstance(now, Muon):
        kept = [(each.orthogonalization, each.matrices, each.cut) for each in (before, now)]
        if kept[0] != kept[1]:
            what = "other matrices would be updated whole than before, or otherwise"
            fix = "leave matrices, cut, newton_schulz and ns_steps as they were"
            raise ConfigError(what, where="optimizer", fix=fix)
        return refuse_other_groups(before.elementwise, now.elementwise)
    if now.no_decay != before.no_decay:
        raise ConfigError("other parameters would decay than before", where="no_decay", fix="leave it as it was")
    patterns = [[pattern for pattern, _ in each.learning_rates] for each in (before, now)]
    if patterns[0] != patterns[1]:
        what = "other parameters would have their own learning rate than before"
        raise ConfigError(what, where="learning_rates", fix="leave its patterns as they were")


def numerics_of(options: EngineOptions) -> Numerics:
    """The given numerics, or the default for the precision. Raises `PlanError` if they contradict."""
    numerics, precision = options.get("numerics"), options.get("precision")
    if numerics is None:
        return Numerics(precision or "bf16")
    if precision is not None and precision != numerics.precision:
        raise PlanError(f"precision is {precision!r} but the numerics' is {numerics.precision!r}", where="numerics")
    return numerics


def limits_of(options: EngineOptions) -> Limits:
    return options.get("limits") or Limits()


def policy_of(options: EngineOptions, device: Device, spec: ModelSpec) -> Policy:
    """The given policy, if it agrees with the other options, or the default for the device.

    If there are disk folders but no placements, only as much state goes to the disk as the host's budget requires;
    the default page-locks no more than the device allows. Raises `PlanError` for a policy that contradicts the
    other options, and `DoesNotFit`.
    """
    policy = _placed(options, device, spec)
    if options.get("policy", "auto") == "auto" and device.host.lockable_nbytes is not None:
        return fit_lock_limit(spec, numerics_of(options), policy, device.host.lockable_nbytes)
    return policy


def _placed(options: EngineOptions, device: Device, spec: ModelSpec) -> Policy:
    """The policy with as little state on the disk as the host's budget requires, if there is a choice."""
    numerics, policy = numerics_of(options), _without_homes(options, device)
    refuse_no_files(policy, spec)
    limits = limits_of(options)
    if not options.get("disk") or policy.placements or limits.disk_nbytes == 0:
        return policy
    budget = budgets(limits, device)["host"]
    beside = _beside_state(spec, numerics, policy)
    placed = spill(spec, numerics, policy, budget - beside)
    if (least := host_nbytes(spec, numerics, placed, saves=False) + beside) > budget:
        what = f"needs at least {at_least(least)} of host memory, even with state on the disk"
        lacks = f"{at_least(least - budget)} more than its budget of {at_most(budget)}"
        raise DoesNotFit(f"{what}, {lacks}", where="host memory", needed={"host": least})
    return policy if all(placement == IN_HOST for placement in placed.placements) else placed


def _beside_state(spec: ModelSpec, numerics: Numerics, policy: Policy) -> int:
    """Host memory of slots for gradients and, if ranks share memory, for weights."""
    work = Work.of_two_rounds(policy.micro_batches_per_round)  # sums over several micro-batches are wider
    table = memory_table(spec, numerics, policy, work)
    tiers = ("host", "device") if policy.shares_memory else ("host",)
    state = state_nbytes(spec, numerics, policy)
    return sum(nbytes for (tier, _), nbytes in table.items() if tier in tiers) - sum(state[tier] for tier in tiers)


def _without_homes(options: EngineOptions, device: Device) -> Policy:
    policy = options.get("policy", "auto")
    max_grad_norm = options.get("max_grad_norm", 1.0)
    if policy == "auto":
        world = options.get("world") or ALONE
        return choose_policy(
            shares_memory=device.shares_memory and world.size == 1,
            clips=max_grad_norm is not None,
            host_threads=available_threads() if world.size == 1 else 0,  # ranks agree at the first step
        )
    refuse_contradictions(policy, max_grad_norm, device)
    return policy


def world_of(options: EngineOptions, model: nn.Module, device: Device) -> World:
    """The given ranks, or if anything trains those that a launcher has started.

    Raises `ConfigError` for an incomplete launch environment, and `RankError` if other ranks do not connect.
    """
    given = options.get("world")
    if given is not None or not any(parameter.requires_grad for parameter in model.parameters()):
        return given or ALONE
    return launched_world(device.torch_device.type)


def is_alone(options: EngineOptions) -> bool:
    """Whether there are no other ranks, whatever trains."""
    given = options.get("world")
    return find_launch() is None if given is None else given.size == 1


def launched_world(device: str, seconds: float | None = None) -> World:
    """The ranks that a launcher has started, for that type of device. seconds: how long to wait for the others.
    Raises as `world_of`."""
    launch = find_launch()
    return ALONE if launch is None else join(launch.rank, launch.size, device, launch.address, seconds)


def threads_of(world: World) -> int:
    """Number of cores for this rank: its equal share of each core that several ranks of its machine may use. All
    ranks must call it.

    The number of threads that a launcher sets for libraries (torchrun: one per rank) is ignored.
    """
    if world.size == 1:
        return available_threads()
    machine, cores = socket.gethostname(), available_cores()
    told = world.exchange("cores", (machine, cores))
    sharing = Counter(core for where, theirs in told if where == machine for core in theirs)
    return max(1, int(available_threads() * sum(Fraction(1, sharing[core]) for core in cores) / len(cores)))


def disk_of(options: EngineOptions, policy: Policy) -> Disk | None:
    """The disk tier, if the policy uses one. Raises `PlanError`, `DiskError`."""
    folders = options.get("disk", ())
    if isinstance(folders, Disk):
        return folders
    if not folders:
        if policy.uses_disk:
            what = "puts state, or what layers keep, on the disk"
            raise PlanError(what, where="policy", fix="give folders for it as `disk`")
        return None
    listed = [folders] if isinstance(folders, str | Path) else folders
    return Disk([usable_path(folder, where="disk", error=DiskError) for folder in listed])


def ported_of(source: Source, options: EngineOptions, *, of_checkpoint: bool = False) -> PortedModel:
    """Split a source's model into units, and find which of its weights can be read from files.

    of_checkpoint: the source's files may be removed during training, except those of an adapter's base.
    """
    numerics = numerics_of(options)
    dtype = DTYPES[numerics.precision]
    ported = port_model(source.model, dtype)
    if numerics.kernels == "fused":
        fuse_layers(ported)
    row = {name: each for name, each in (options.get("image_row") or {}).items() if name != "labels"}
    if row:
        stream_encoder(ported, row, values_of(row, TEXT_ENTRIES))
    if not of_checkpoint or isinstance(source, AdaptedSource):
        ported.find_in(source, dtype)
    return ported


def files_of(ported: PortedModel) -> ModelFiles | None:
    """The model's own files that hold frozen weights, if any. Raises `DiskError` for a missing one."""
    layouts = [layout_of(unit) for unit in ported.structure.units]
    regions = {
        state_name("file", Part.WEIGHTS, unit): extents_of(layout, ported.in_files.files)
        for unit, layout in enumerate(layouts)
        if layout.files_start < layout.size
    }
    return ModelFiles(regions) if regions else None
