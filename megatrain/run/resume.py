"""Choose the checkpoint that a run resumes from, and report or refuse changes since then.

A run *starts* from a Hugging Face folder (`model.path`): its weights, with a new optimizer, at step 0. It *resumes*
from a checkpoint (`resume`): all of the state, at the next step. A finished run is *extended* by resuming it with more
`train.steps` or `train.epochs`; the learning rate schedule then follows the new length.

Numbers that were chosen when the run began, such as micro-batch sizes, are kept unless given again. Loading the state
is in `train.restore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.checkpoint.folder import newest_sound, open_verifying_on_load
from megatrain.checkpoint.listing import checkpoints
from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.manifest import quick_check
from megatrain.checkpoint.peer_checkpoints import PeerCheckpoint
from megatrain.config import Config, PolicySection, TrainSection
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint, DataError
from megatrain.formatting import counted
from megatrain.model import Source, listed
from megatrain.model.hub import ADAPTER
from megatrain.optim import Optimizer
from megatrain.run.existing_run import AUTO, Say, check_overwriting, has_model, is_own, named_checkpoint
from megatrain.spec import Numerics
from megatrain.system.atomic import put_all_right
from megatrain.system.paths import usable_path
from megatrain.train.checkpoints import LowestLoss
from megatrain.train.loop import Feed
from megatrain.train.restore import optimizer_in

SIZES = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
"""Keys of `train` that divide a step into micro-batches."""
NUMERICS = tuple(field.name for field in fields(Numerics) if field.name != "precision")
"""Keys of `policy` that affect results, by rounding."""

FREE = (
    *("output", "trace", "resume", "accept_changes", "checkpoint", "memory", "disk", "lm_eval"),
    *("data.cache", "data.workers"),
    *("model.verify", "model.trust_remote_code", "train.hardware", "train.log_every", "train.stall_seconds"),
    *("data.validation", "data.validation_split", "train.eval_every", "train.eval_batches", "train.metrics"),
    *("train.early_stopping_patience", "train.early_stopping_threshold"),
    *("train.sample_every", "train.sample_prompts", "train.sample_tokens"),
    *("train.sample_temperature", "train.sample_top_k", "train.on_nonfinite", "train.nonfinite_limit"),
    *(f"policy.{name}" for name in PolicySection.model_fields if name not in NUMERICS),
)
"""Keys and sections that do not affect the results of training."""

REFUSED = (
    "model.path",
    "model.config",
    "adapter",
    "data",
    "train.seed",
    "train.freeze",
    "train.precision",
    "train.objective",
    "train.optimizer",
)
"""Keys, or sections, whose change means another model or other data, so resuming is refused."""

COMPARED = ("data.sources",)
"""Keys within `REFUSED` that may change, because their content is compared instead."""


Opens = Callable[[Path], Checkpoint]
"""Opens a checkpoint. Raises `DamagedCheckpoint`."""


class DamageFound(Exception):
    """A checkpoint has proved to be damaged as it was loaded, so that the run needs another one."""

    def __init__(self, folder: Path, what: str) -> None:
        self.folder, self.what = folder, what


@contextmanager
def loading_checked(resumed: Checkpoint | None) -> Iterator[None]:
    """In the block, turn damage in a checkpoint that is compared with its checksums as it loads into `DamageFound`."""
    try:
        yield
    except DamagedCheckpoint as error:
        if resumed is None or resumed.unverified is None or error.where != str(resumed.folder):
            raise
        raise DamageFound(resumed.folder, error.what) from error


def opens_to_load(damaged: Mapping[Path, str]) -> Opens:
    """`open_verifying_on_load`, for which these folders are damaged: what is wrong in each."""

    def check(folder: Path) -> list[str]:
        return [damaged[folder]] if folder in damaged else quick_check(folder)

    return partial(open_verifying_on_load, check=check)


def find(config: Config, say: Say, opens: Opens) -> Checkpoint | None:
    """The checkpoint that the run resumes from, which `opens` has opened; `None` for a new run.

    Also reports which files of an earlier run will be deleted: most when training begins, the model when the new one is
    complete. Raises `ConfigError` if those are more than metrics and `output.overwrite` is not set, `CheckpointError`
    if the run should resume and no checkpoint is valid.
    """
    if config.folder.exists() and not config.folder.is_dir():
        raise ConfigError("is a file", where=str(config.folder), fix="choose another output.folder")
    put_all_right(config.checkpoints)
    resumed = _wanted(config, say, opens)
    check_overwriting(config, resumed, say)
    return resumed


def is_finished(config: Config, resumed: Checkpoint) -> bool:
    """Whether a run's last checkpoint belongs to this run, and the model has been written."""
    return has_model(config) and is_own(config, resumed)


def lowest_loss_at(config: Config, resumed: Checkpoint | None, of: str) -> LowestLoss:
    """The lowest validation loss so far, from a checkpoint of this run. of: identity of the data measured now.

    It starts empty after another run's checkpoint, because this run does not have that run's better states.
    """
    lowest = LowestLoss(config.train.early_stopping_patience, config.train.early_stopping_threshold, of)
    if resumed is not None:
        lowest.restore(facts_of(resumed).get("validation") if is_own(config, resumed) else None, resumed.step)
    return lowest


def _wanted(config: Config, say: Say, opens: Opens) -> Checkpoint | None:
    """The checkpoint that `resume` asks for. Raises `ConfigError` or `CheckpointError` if there is none."""
    if config.resume is None:
        return None
    if config.resume == AUTO:
        return _newest(config.checkpoints, say, opens) if checkpoints(config.checkpoints) else None
    return _at(named_checkpoint(config), say, opens)


def facts_of(resumed: Checkpoint) -> Mapping[str, Any]:
    """The facts that the run saved with a checkpoint. Raises `CheckpointError` if it was not written by a run."""
    facts = resumed.training.get("run")
    if not isinstance(facts, dict) or not {"step", "data", "config"} <= facts.keys():
        fix = "start from it with model.path, or take a checkpoint of `megatrain train`"
        raise CheckpointError("was not written by a run", where=str(resumed.folder), fix=fix)
    return facts


def with_numbers(config: Config, numerics: Numerics) -> Config:
    """The configuration with the plan's choices that affect results, as saved in checkpoints."""
    chosen = {name: getattr(numerics, name) for name in NUMERICS}
    return config.model_copy(update={"policy": config.policy.model_copy(update=chosen)})


def as_begun(config: Config, resumed: Checkpoint) -> Config:
    """The configuration with the run's original batch sizes, where they are null now and fit those given, and with its
    numerics, where they are not given now."""
    if isinstance(resumed, PeerCheckpoint):
        return config
    train, then = config.train, _sizes(facts_of(resumed)["config"]["train"])
    given = {name: getattr(train, name) for name in SIZES if getattr(train, name) is not None}
    goes_on = all(then[name] == size for name, size in given.items())
    kept = {name: then[name] for name in ("micro_batch_size", "gradient_accumulation_steps")} if goes_on else {}
    numerics, overrides = resumed.training.get("engine", {}).get("numerics"), config.policy.overrides
    if numerics is None:
        what, fix = "is of a version before the first release", "start from it with model.path"
        raise CheckpointError(what, where=str(resumed.folder), fix=fix)
    held = {name: numerics.get(name) for name in NUMERICS if name not in overrides}
    return config.model_copy(
        update={
            "train": train.model_copy(update=kept),
            "policy": config.policy.model_copy(update=held),
        }
    )


def refuse_changes(config: Config, resumed: Checkpoint, say: Say) -> None:
    """Report in a line what changed since the checkpoint. Raises `ConfigError` for forbidden changes not accepted."""
    if isinstance(resumed, PeerCheckpoint):
        return _refuse_to_take_over(config, resumed)
    then = facts_of(resumed)["config"]
    if (then.get("adapter") is None) != (config.adapter is None):
        kinds = ("an adapter", "a whole model") if config.adapter is None else ("a whole model", "an adapter")
        what = f"was written by a run that trained {kinds[0]}, but this one trains {kinds[1]}"
        raise ConfigError(what, where=str(resumed.folder), fix="set `adapter` as it was, or start a new run")
    changes = changes_between(then, config.model_dump(mode="json"))
    if not changes:
        return
    told = {key: f"{key} {_short(before, now)} -> {_short(now, before)}" for key, (before, now) in changes.items()}
    if kept := [line for key, line in told.items() if _within(key, ("adapter",)) and key != "adapter.path"]:
        what = f"holds an adapter with other settings, which cannot change: {'; '.join(kept)}"
        fix = "set them as they were, or start a new run"
        raise ConfigError(what, where=str(resumed.folder), fix=fix)
    wrong = [line for key, line in told.items() if _within(key, REFUSED) and not _within(key, COMPARED)]
    if wrong and not config.accept_changes:
        raise ConfigError(
            f"was written with other settings: {'; '.join(wrong)}",
            where=str(resumed.folder),
            fix="set them as they were, start a new run, or set accept_changes=true to resume anyway",
        )
    say(f"changed since the checkpoint: {'; '.join(told.values())}")


def _refuse_to_take_over(config: Config, resumed: PeerCheckpoint) -> None:
    """Raise `ConfigError` for a run that cannot go on from another trainer's checkpoint."""
    where, steps, adapter = str(resumed.folder), config.train.steps, resumed.folder / ADAPTER
    if steps is not None and steps <= resumed.step:
        what = f"is {steps:,}, but {counted(resumed.step, 'step')} are done in {where}, and they count"
        raise ConfigError(what, where="train.steps", fix=f"set train.steps={resumed.step + steps} for {steps:,} more")
    if config.train.has_reference:
        what = "lacks the reference model's log-probabilities"
        raise ConfigError(what, where=where, fix="train with an objective without a reference, or begin a new run")
    given = None if config.adapter is None or config.adapter.path is None else usable_path(config.adapter.path)
    if adapter.exists() and (given is None or given.resolve() != resumed.folder):
        raise ConfigError(
            "holds an adapter", where=where, fix=f"set adapter.path={where} too, and model.path to its base"
        )
    if config.adapter is not None and not adapter.exists():
        raise ConfigError("holds no adapter", where=where, fix="leave `adapter` out, or start a new run (model.path)")
    if adapter.exists() and resumed.holds_masters:
        what = f"is {resumed.kind} of an adapter, whose state is not read"
        raise ConfigError(what, where=where, fix=f"start from its weights: adapter.path={where}, resume=null")


def take_over(resumed: PeerCheckpoint, source: Source, optimizer: Optimizer, say: Say) -> None:
    """Match another trainer's state with the model, and report what is taken over, what is not, and what differs.

    source: with parameters frozen as in the run. Raises `CheckpointError` if the state is not this model's, and
    `ConfigError` if it is not of this kind of optimizer.
    """
    resumed.name_parameters(source.model)
    then, shapes = optimizer_in(resumed), resumed.moment_shapes
    if type(then) is not type(optimizer):
        what = f"is {optimizer.NAME}, but the state in {resumed.folder} is of {then.NAME}"
        raise ConfigError(what, where="train.optimizer", fix=f"use {then.NAME}, or start from its weights (model.path)")
    updates = counted(resumed.training["engine"]["updates"], "update")
    fewer = f" ({len(resumed.missed):,} parameters had fewer)" if resumed.missed else ""
    of = f"AdamW's moments after {updates}{fewer}"
    say(f"taken over from {resumed.kind}, at step {resumed.step:,}: weights, and {of}")
    say(
        "not taken over: the position in the data (it is read from its beginning), the learning-rate schedule (this "
        f"configuration's goes on after that step; the rate there was {then.lr:.4g}), the state of random numbers, and "
        "the scale of fp16 losses"
    )
    pairs = {key: (getattr(then, key), getattr(optimizer, key)) for key in ("betas", "eps", "weight_decay")}
    told = [f"{key} {before} -> {now}" for key, (before, now) in pairs.items() if before != now]
    if optimizer.weight_decay and then.weight_decay:
        others = [name for name, shape in shapes.items() if then.decays(name, shape) != optimizer.decays(name, shape)]
        told += [f"no_decay, for {listed(others)}"] if others else []
    if told:
        say(f"changed since the checkpoint: {'; '.join(told)}")


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value before, value now), for keys that differ and affect results.

    Sizes that are null now are chosen by the plan and count as unchanged; global_batch_size follows from the others.
    """
    flat_before, flat_now = _flat(before), _flat(now)
    for flat, tree in ((flat_before, before), (flat_now, now)):
        flat |= {f"train.{name}": size for name, size in _sizes(tree["train"]).items()}
    left_open = {f"train.{name}" for name in SIZES if flat_now[f"train.{name}"] is None}
    keys = [key for key in flat_now if not _within(key, FREE) and key not in left_open]
    usual = _flat({"train": TrainSection.model_construct().model_dump(mode="json")})  # of keys that are newer
    known = {key: flat_before.get(key, usual.get(key, flat_now[key])) for key in keys}
    return {key: (value, flat_now[key]) for key, value in known.items() if value != flat_now[key]}


def _sizes(train: Mapping[str, Any]) -> dict[str, int | None]:
    """The batch sizes in a `train` section; `None` for those left open."""
    rows = TrainSection.model_construct(**train).sequences
    return {name: rows if name == "global_batch_size" else train.get(name) for name in SIZES}


def take_up_data(feed: Feed, resumed: Checkpoint, config: Config, say: Say) -> int:
    """Continue the data where the checkpoint left it, and return the step at which this data began.

    That is 0, or the checkpoint's step if the data changed or another trainer read it. Raises `DataError` if changed
    data is not accepted.
    """
    if isinstance(resumed, PeerCheckpoint):
        return resumed.step
    try:
        feed.restore(facts_of(resumed)["data"])
        return 0
    except DataError as error:
        if not config.accept_changes:
            error.fix = f"{error.fix}; or set accept_changes=true to use the new data from its beginning"
            raise
        say(f"the data has changed, and starts from its beginning ({error.what})")
        return resumed.step


def _newest(folder: Path, say: Say, opens: Opens) -> Checkpoint:
    newest = newest_sound(folder, opens)
    for line in newest.skipped:
        say(f"skipped an invalid checkpoint: {line}")
    if newest.checkpoint is None:
        raise CheckpointError(
            "holds no valid checkpoint",
            where=str(folder),
            fix="start again in another output.folder, or with output.overwrite=true and resume=null",
        )
    return newest.checkpoint


def _at(path: Path, say: Say, opens: Opens) -> Checkpoint:
    """The checkpoint at a path, or the newest valid one in a checkpoint or run folder."""
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and checkpoints(folder):
            return _newest(folder, say, opens)
    return opens(path)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; free-form mappings are kept as values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and not prefix:
            flat |= _flat(value, f"{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _short(value: Any, other: Any, most: int = 60) -> str:
    """A changed value; of a mapping only what differs from the other one."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        value = {key: entry for key, entry in value.items() if key not in other or other[key] != entry}
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
