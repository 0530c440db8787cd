"""Which checkpoint a run goes on from, and whether it may: what has changed since is told, or refused.

Three things are different, and stay so. A run *starts* from a Hugging Face folder (`model.path`): its weights, with a
new optimizer, from step 0. It *goes on* from a checkpoint (`resume`): all of the state, from the step after. And a
finished run is *extended* by going on with more `train.steps` or `train.epochs`; the learning rate then follows its new
length.

Numbers that were chosen when the run began (how a step is cut into micro-batches, say) are kept, unless they are given
anew. It leaves out the state itself (`train.restore`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatrain.checkpoint import Checkpoint, checkpoints, newest_sound, open_checkpoint
from megatrain.config import Config, PolicySection, TrainSection
from megatrain.config.renamed_keys import with_new_names
from megatrain.errors import CheckpointError, ConfigError, DataError
from megatrain.run.existing_run import AUTO, Say, check_overwriting, has_model, is_own, named_checkpoint
from megatrain.spec import Numerics
from megatrain.system.atomic import put_all_right
from megatrain.train.batch_feed import Feed
from megatrain.train.early_stopping import LowestLoss

SIZES = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
"""Keys of `train` that say how a step is cut."""
NUMERICS = tuple(field.name for field in fields(Numerics) if field.name != "precision")
"""Keys of `policy` that numbers depend on, by rounding."""

BY_ROWS = "rows"
"""What compute waited for in an earlier version, which rounded products otherwise: that it is gone is told."""

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
"""Keys, or sections, that no number of the training depends on."""

REFUSED = (
    "model.path",
    "model.config",
    "adapter",
    "data",
    "train.seed",
    "train.freeze",
    "train.precision",
    "train.objective",
)
"""Keys, or sections, whose change means another model or other data, which a run is not to go on with by mistake."""

COMPARED = ("data.sources",)
"""Keys under `REFUSED` that may change, since what they stand for is compared itself."""


def find(config: Config, say: Say) -> Checkpoint | None:
    """The checkpoint that the run goes on from, checked in every byte; `None` where it starts.

    Nothing of an earlier run is replaced by mistake. What has to go from the run folder and the folder of checkpoints
    is said here; it is removed when training begins, and the model when the new one is whole. Raises `ConfigError`
    where more than metrics would go and `output.overwrite` does not allow it, and `CheckpointError` where the run is to
    go on and no checkpoint is sound.
    """
    if config.folder.exists() and not config.folder.is_dir():
        raise ConfigError("is a file", where=str(config.folder), fix="choose another output.folder")
    put_all_right(config.checkpoints)
    taken = _wanted(config, say)
    check_overwriting(config, taken, say)
    return taken


def is_finished(config: Config, taken: Checkpoint) -> bool:
    """Whether a checkpoint at which a run is over is of this very run, and its model is there."""
    return has_model(config) and is_own(config, taken)


def lowest_loss_at(config: Config, taken: Checkpoint | None, of: str) -> LowestLoss:
    """The lowest validation loss when a run begins, or goes on from a checkpoint. of: what is measured now.

    It begins anew behind another run's checkpoint: this run has none of the states that were better.
    """
    lowest = LowestLoss(config.train.early_stopping_patience, config.train.early_stopping_threshold, of)
    if taken is not None:
        lowest.restore(facts_of(taken).get("validation") if is_own(config, taken) else None, taken.step)
    return lowest


def _wanted(config: Config, say: Say) -> Checkpoint | None:
    """The checkpoint that `resume` asks for. Raises `ConfigError`, `CheckpointError`."""
    if config.resume is None:
        return None
    if config.resume == AUTO:
        return _newest(config.checkpoints, say) if checkpoints(config.checkpoints) else None
    return _at(named_checkpoint(config), say)


def facts_of(taken: Checkpoint) -> Mapping[str, Any]:
    """What the run told when it was saved. Raises `CheckpointError` for a checkpoint that no run has written."""
    facts = taken.training.get("run")
    if not isinstance(facts, dict) or not {"step", "data", "config"} <= facts.keys():
        fix = "start from it with model.path, or take a checkpoint of `megatrain train`"
        raise CheckpointError("was not written by a run", where=str(taken.folder), fix=fix)
    config = with_new_names(facts["config"])
    return {**facts, "config": {**config, "policy": _renamed(config.get("policy") or {})}}


def _renamed(policy: Mapping[str, Any]) -> dict[str, Any]:
    """A policy with the names of now: `kernels` was `compile`, true or false."""
    found = dict(policy)
    if "compile" in found:
        compiles = found.pop("compile")
        found.setdefault("kernels", None if compiles is None else "compile" if compiles else "stock")
    return found


def with_numbers(config: Config, numerics: Numerics) -> Config:
    """The configuration with what the plan has chosen and numbers depend on; what checkpoints tell about the run."""
    chosen = {name: getattr(numerics, name) for name in NUMERICS}
    return config.model_copy(update={"policy": config.policy.model_copy(update=chosen)})


def as_begun(config: Config, taken: Checkpoint) -> Config:
    """The configuration with the sizes that the run began with, where they are open now and go with those given."""
    train, then = config.train, _sizes(facts_of(taken)["config"]["train"])
    given = {name: getattr(train, name) for name in SIZES if getattr(train, name) is not None}
    goes_on = all(then[name] == size for name, size in given.items())
    kept = {name: then[name] for name in ("micro_batch_size", "gradient_accumulation_steps")} if goes_on else {}
    oldest = {"mlp_chunk_tokens": 0, "kernels": "stock"}  # which had neither key
    engine = taken.training["engine"]
    numerics = {**oldest, **_renamed(engine["policy"]), **engine.get("numerics", {})}  # once among the policy's fields
    overrides = config.policy.overrides
    held = {name: numerics.get(name) for name in NUMERICS if name not in overrides}
    return config.model_copy(
        update={"train": train.model_copy(update=kept), "policy": config.policy.model_copy(update=held)}
    )


def refuse_changes(config: Config, taken: Checkpoint, say: Say) -> None:
    """Tell in a line what has changed since the checkpoint. Raises `ConfigError` for what must not, unless accepted."""
    then = facts_of(taken)["config"]
    if (then.get("adapter") is None) != (config.adapter is None):
        kinds = ("an adapter", "a whole model") if config.adapter is None else ("a whole model", "an adapter")
        what = f"was written by a run that trained {kinds[0]}, and this one trains {kinds[1]}"
        raise ConfigError(what, where=str(taken.folder), fix="set `adapter` as it was, or start a new run")
    changes = changes_between(then, config.model_dump(mode="json"))
    if not changes:
        return
    told = {key: f"{key} {_short(before)} -> {_short(now)}" for key, (before, now) in changes.items()}
    if kept := [line for key, line in told.items() if _within(key, ("adapter",)) and key != "adapter.path"]:
        what = f"is of an adapter with other settings, which it keeps: {'; '.join(kept)}"
        fix = "set them as they were, or start a new run"
        raise ConfigError(what, where=str(taken.folder), fix=fix)
    wrong = [line for key, line in told.items() if _within(key, REFUSED) and not _within(key, COMPARED)]
    if wrong and not config.accept_changes:
        raise ConfigError(
            f"was written with other settings: {'; '.join(wrong)}",
            where=str(taken.folder),
            fix="set them as they were, start a new run, or set accept_changes=true to go on all the same",
        )
    say(f"changed since the checkpoint: {'; '.join(told.values())}")


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> its value before and now, of those that differ and that numbers depend on.

    Sizes that are left open now are the plan's to choose, and no change; the windows of a step follow from the others.
    """
    flat_before, flat_now = _flat(before), _flat(now)
    for flat, tree in ((flat_before, before), (flat_now, now)):
        flat |= {f"train.{name}": size for name, size in _sizes(tree["train"]).items()}
    left_open = {f"train.{name}" for name in SIZES if flat_now[f"train.{name}"] is None}
    keys = [key for key in flat_now if not _within(key, FREE) and key not in left_open]
    keys += ["policy.wait_for"] if flat_before.get("policy.wait_for") == BY_ROWS else []
    usual = _flat({"train": TrainSection.model_construct().model_dump(mode="json")})  # what an earlier version did
    known = {key: flat_before.get(key, usual.get(key, flat_now[key])) for key in keys}
    return {key: (value, flat_now[key]) for key, value in known.items() if value != flat_now[key]}


def _sizes(train: Mapping[str, Any]) -> dict[str, int | None]:
    """How a step is cut, by the section of a configuration; `None` for what that leaves open."""
    rows = TrainSection.model_construct(**train).sequences
    return {name: rows if name == "global_batch_size" else train.get(name) for name in SIZES}


def take_up_data(feed: Feed, taken: Checkpoint, config: Config, say: Say) -> int:
    """Go on where the data was left, and return the step that it begins with: 0, or where it is another one, that of
    the checkpoint. Raises `DataError` where that is not accepted."""
    try:
        feed.restore(facts_of(taken)["data"])
        return 0
    except DataError as error:
        if not config.accept_changes:
            error.fix = f"{error.fix}; or set accept_changes=true to go on with this one from its beginning"
            raise
        say(f"the data is another than before, and begins anew ({error.what})")
        return taken.step


def _newest(folder: Path, say: Say) -> Checkpoint:
    found = newest_sound(folder)
    for line in found.skipped:
        say(f"skipped a checkpoint that is not sound: {line}")
    if found.checkpoint is None:
        raise CheckpointError(
            "holds no checkpoint that is sound",
            where=str(folder),
            fix="begin again in another output.folder, or with output.overwrite=true and resume=null",
        )
    return found.checkpoint


def _at(path: Path, say: Say) -> Checkpoint:
    """The checkpoint at a path, or the newest in a folder of them, or in a run folder."""
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and checkpoints(folder):
            return _newest(folder, say)
    return open_checkpoint(path)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; what is free-form inside stays whole."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and not prefix:
            found |= _flat(value, f"{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _short(value: Any, most: int = 60) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
