"""Translate another trainer's YAML to ours, and report every key that is not taken over as it is.

`other_trainers.yaml` says what a key is called here, or why it has no counterpart; error messages use it too. Keys that
need more (sizes, lengths, rates, validation) are taken out first, by a function per subject. For keys that a
file leaves out the other trainer's default is written, because ours may differ. What only one trainer has is in
`llama_factory` and `axolotl`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatrain.config.keys import Config, describe_keys
from megatrain.config.load import YamlDumper, put
from megatrain.config.renamed_keys import answer, keys_here, tables
from megatrain.errors import ConfigError

TABLES = tables()
SCHEDULERS, ATTENTION = TABLES["schedulers"], TABLES["attention"]
OF_PREFERENCES = tuple(
    f"train.{name}"
    for name in (
        "beta",
        "dpo_loss",
        "dpo_label_smoothing",
        "simpo_gamma",
        "kto_desirable_weight",
        "kto_undesirable_weight",
    )
)
OTHER_ADAMW = ("galore", "adopt", "apollo", "schedule_free", "stable", "grok")
"""Optimizers with `adamw` in their names that compute other updates."""
TRACKERS = ("tensorboard", "wandb", "trackio")
UNSENT = "wandb writes to the run folder, for `wandb sync`; set output.trackers_online to send during the run"
STEPS_ALONE = "{} counts steps; `megatrain train` says at its start how many steps an epoch has"


@dataclass
class Translation:
    """A configuration by our keys, and what became of all other keys."""

    tree: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Keys that were taken over but mean something different here, `key=value: difference`."""
    left_out: list[str] = field(default_factory=list)
    """Keys that were not taken over, `key=value: why`."""
    unknown: list[str] = field(default_factory=list)
    """Keys of unknown meaning, `key=value`."""
    unset: list[str] = field(default_factory=list)
    """Keys that are null, or switches that are off."""

    def text(self, head: Sequence[str]) -> str:
        """The configuration as YAML, below comments: the lines `head`, then `lines()`."""
        comments = [f"# {line}".rstrip() for line in (*head, *(("", *self.lines()) if self.lines() else ()))]
        sections = [{name: self.tree[name]} for name in Config.model_fields if self.tree.get(name)]
        options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 110}
        keys = [yaml.dump(section, Dumper=YamlDumper, **options).rstrip("\n") for section in sections]
        return "\n\n".join(["\n".join(comments), *keys]) + "\n"

    def lines(self) -> list[str]:
        """A report for the user on all keys that were not simply taken over, under headings."""
        parts = {"Taken over, but:": self.notes, "Left out:": self.left_out, "Of no known meaning:": self.unknown}
        report = [line for head, lines in parts.items() if lines for line in (head, *(f"  {each}" for each in lines))]
        return [*report, f"Not set there: {', '.join(self.unset)}"] if self.unset else report


class Reader:
    """Translates one YAML: holds the keys not yet translated and the result so far."""

    def __init__(self, path: Path, given: Mapping[str, Any], places: Mapping[str, str], trainer: str) -> None:
        """trainer: the entry of `defaults` in the tables."""
        self.translation = Translation({"model": {}, "data": {}, "train": {}})
        self.path, self.places = path, places
        self.given = {name: value for name, value in given.items() if value is not None}
        self.said = dict(self.given)
        self.translation.unset = [name for name, value in given.items() if value is None]
        self.defaults = {**TABLES["defaults"]["both"], **TABLES["defaults"][trainer]}
        self.came_from: dict[str, str] = {}
        self._taken: set[str] = set()
        self._accounted: set[str] = set()
        for name in TABLES["other_runs"].keys() & self.given.keys():
            if self.given[name]:
                self.refuse(name, f"{TABLES['other_runs'][name]}, which is not supported", "remove it to train without")

    def take(self, name: str) -> Any:
        """Take the value of a key out of the file, or its default. Account for it with `put` or `leave` afterwards."""
        self._taken.add(name)
        return self.given.pop(name, self.defaults.get(name))

    def number(self, name: str) -> Any:
        """As `take`. Raises `ConfigError` if the value is not a finite number."""
        value = self.take(name)
        if value is not None and not _is_number(value):
            self.refuse(name, "is not a finite number")
        return value

    def switch(self, name: str) -> bool:
        """As `take`, false if unset. Raises `ConfigError` for anything but true, false, 1 or 0; also for "true"."""
        value = self.take(name)
        if value not in (None, 0, 1):
            self.refuse(name, "is neither true nor false", "write it without quotes")
        return bool(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """As `take`, empty if unset. Raises `ConfigError` if the value is not a mapping."""
        value = self.take(name)
        if not isinstance(value, dict | None):
            self.refuse(name, "is not a mapping")
        return dict(value or {})

    def texts(self, name: str, value: Any) -> list[str]:
        """A list, or what a text holds between commas. Raises `ConfigError` for what is neither."""
        listed = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        names = [
            str(part).strip() for part in listed if isinstance(part, str | int | float) and not isinstance(part, bool)
        ]
        if len(names) < len(listed) or "" in names:
            self.refuse(name, "is neither a name nor a list of names", "give names, with commas between")
        return names

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set our `key`, translated from the other trainer's key or keys `names`."""
        put(self.translation.tree, key.split("."), value)
        self.came_from[key] = self.places.get(names[0], str(self.path))
        self.account(*names)

    def ours(self, key: str) -> Any:
        """The value that our `key` has been given, `None` if none."""
        section, _, name = key.partition(".")
        return self.translation.tree.get(section, {}).get(name) if name else self.translation.tree.get(section)

    def account(self, *names: str) -> None:
        """Mark keys as translated: their meaning is in a key that was put."""
        self._accounted.update(names)

    def note(self, name: str, what: str) -> None:
        """Report a difference in the meaning of a key that was taken over, if the file has it."""
        if name in self.said:
            self.translation.notes.append(f"{self._shown(name)}: {what}")

    def leave(self, name: str, why: str) -> None:
        """Report why a key is left out, if the file has it and it was not translated."""
        self.given.pop(name, None)
        if name in self.said and name not in self._accounted:
            self._accounted.add(name)
            self.translation.left_out.append(f"{self._shown(name)}: {why}")

    def refuse(self, name: str, what: str, fix: str = "") -> NoReturn:
        """Raise `ConfigError` at the key."""
        raise ConfigError(f"{self._shown(name)} {what}", where=self.places.get(name, str(self.path)), fix=fix)

    def by_the_table(self) -> None:
        """Translate the remaining keys by the tables, and report every key that is still unaccounted for."""
        known, tree = {each.key for each in describe_keys()}, self.translation.tree
        silent = {name: value for name, value in self.defaults.items() if name not in self._taken}
        for name, value in (silent | self.given).items():
            key, is_switch, choice = keys_here().get(name, "").partition("=")
            if value is True and choice and self.ours(key) == choice:
                self.account(name)  # another key says it too
            is_free = key in known and key not in self.came_from
            is_read = "adapter" in tree if key.startswith("adapter.") else key not in OF_PREFERENCES or prefers(self)
            if value is False or not is_free or not is_read:
                continue
            if not is_switch:
                self.put(key, value, name)
            elif value is True:
                self.put(key, choice, name)
        for name, value in self.said.items():
            if name in self._accounted:
                continue
            if name in self.given and not answer(name):
                self.translation.unknown.append(self._shown(name))
            elif not value:
                self.translation.unset.append(name)
            elif name not in self.given:
                self.leave(name, "has no effect with the rest of the file as it is")
            else:
                self.leave(name, answer(name))

    def _shown(self, name: str) -> str:
        text = yaml.dump(self.said.get(name), Dumper=YamlDumper, default_flow_style=True, width=10_000)
        text = text.removesuffix("\n").removesuffix("\n...")
        return f"{name}={text if len(text) <= 60 else text[:57] + '...'}"


def _is_number(value: Any) -> bool:
    """Whether `value` is a number within a float's range."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) <= sys.float_info.max


def prefers(reader: Reader) -> bool:
    return "objective" in reader.translation.tree["train"]


def rows_of_a_sample(reader: Reader) -> int:
    """Our sequences per sample of the other trainer: 2 for preference objectives, else 1."""
    return 2 if prefers(reader) else 1


def put_model(reader: Reader, name: str, afresh: str) -> None:
    """Put the model; afresh: the other trainer's switch for fresh weights."""
    model = reader.take(name)
    if reader.switch(afresh):
        reader.put("model.config", model, name, afresh)
        reader.put("data.tokenizer", model, name)
    else:
        reader.put("model.path", model, name)


def put_kto_weights(reader: Reader, names: tuple[str, str], *, is_kto: bool) -> None:
    """Put the weights of good and bad answers; `names` are the other trainer's keys for them."""
    for name, ours in zip(names, ("desirable", "undesirable"), strict=True):
        value = reader.number(name)
        if is_kto and value is not None:
            reader.put(f"train.kto_{ours}_weight", value, name)


def put_sizes(reader: Reader, name: str, rows: int, together: float | None = None) -> None:
    """Put the batch size. together: samples per step, if the file has that instead of accumulation steps."""
    size, count = reader.number(name), reader.number("gradient_accumulation_steps")
    if together:
        count = max(1, together // size)
        reader.account("batch_size")
    if reader.translation.tree["train"].get("objective") == "kto":
        reader.put("train.micro_batch_size", size * rows, name)
        reader.put("train.gradient_accumulation_steps", count, "gradient_accumulation_steps")
        reader.note(name, "also counts each answer's mismatched sequence here, for the KL term of a micro-batch")
        return
    reader.put("train.global_batch_size", size * count * rows, name, "gradient_accumulation_steps")
    pairs = " and counts both answers of a pair" if rows == 2 else ""
    what = f"train.global_batch_size is for one GPU{pairs}; multiply it by the number of GPUs the file was written for"
    reader.note(name, f"{what}. The planner chooses how many sequences are computed at once")


def put_length(reader: Reader, name: str) -> None:
    steps, epochs = reader.take("max_steps"), reader.take(name)
    if steps is None or steps == -1:
        reader.put("train.epochs", epochs, name)
    else:
        reader.put("train.steps", steps, "max_steps")
        reader.leave(name, "max_steps takes precedence")


def put_streaming(reader: Reader) -> None:
    """Put data.streaming if it is possible. Needs sources, weights, length and objective to be put before."""
    train, data = reader.translation.tree["train"], reader.translation.tree["data"]
    if not reader.switch("streaming"):
        return
    if "steps" in train and not prefers(reader) and (len(data["sources"]) == 1 or "weights" in data):
        reader.put("data.streaming", True, "streaming")
    else:
        what = "data.streaming needs cross-entropy, max_steps, and weights if there are several sources; it is left off"
        reader.leave("streaming", what)


def put_learning_rate(reader: Reader, name: str) -> None:
    shape, more = str(reader.take(name)), reader.mapping("lr_scheduler_kwargs")
    decay = more.pop("decay_type", "cosine") if shape == "warmup_stable_decay" else "linear"
    steps, ratio, rate = (reader.number(each) for each in ("warmup_steps", "warmup_ratio", "learning_rate"))
    if rate is None:
        reader.refuse("learning_rate", "is required", "give a number")
    reader.put("train.learning_rate", rate, "learning_rate")
    if shape in SCHEDULERS:
        reader.put("train.lr_scheduler", SCHEDULERS[shape], name)
        if decay != "linear":
            reader.note(name, f"the decay is linear here, {decay} there")
    else:
        reader.leave(
            name, f"train.lr_scheduler is {', '.join(dict.fromkeys(SCHEDULERS.values()))}; it is left at cosine"
        )
    _put_shape(reader, more, rate)
    if shape == "constant":
        for warmup in ("warmup_steps", "warmup_ratio"):
            reader.leave(warmup, "the constant schedule has no warm-up there either; constant_with_warmup has")
    elif isinstance(steps, float) and 0 < steps < 1:
        reader.put("train.warmup_ratio", steps, "warmup_steps")
    elif steps is not None and steps > 0:
        reader.put("train.warmup_steps", ceil(steps), "warmup_steps")
        reader.leave("warmup_ratio", "warmup_steps takes precedence")
    elif ratio and steps is None:
        reader.put("train.warmup_ratio", ratio, "warmup_ratio")


def _put_shape(reader: Reader, more: dict[str, Any], rate: float) -> None:
    """Put the final learning rate and the length of the decay; `more` holds the scheduler's keyword arguments."""
    known = ("min_lr", "min_lr_rate", "min_lr_ratio", "num_decay_steps")
    given = {name: more.pop(name) for name in known if _is_number(more.get(name))}
    least = given.get("min_lr", 0.0) / (rate or 1.0)
    share = given.get("min_lr_rate") or given.get("min_lr_ratio") or least
    reader.put("train.min_lr_ratio", reader.number("cosine_min_lr_ratio") or share, "cosine_min_lr_ratio")
    if decay := given.get("num_decay_steps"):
        reader.put("train.decay_steps", decay, "lr_scheduler_kwargs")
    if more:
        reader.leave("lr_scheduler_kwargs", f"nothing reads {', '.join(more)}")
    else:
        reader.account("lr_scheduler_kwargs")


def put_optimizer(reader: Reader, name: str) -> None:
    kind = str(reader.take(name))
    if "adamw" not in kind or any(word in kind for word in OTHER_ADAMW):
        reader.leave(
            name, "AdamW is the only optimizer here, with the betas below; the learning rate may not carry over"
        )
    elif any(word in kind for word in ("8bit", "4bit", "fp8")):
        reader.note(name, "AdamW's state is in float32 here, in host memory")
    betas = ("adam_beta1", "adam_beta2")
    reader.put("train.betas", [reader.take(each) for each in betas], *betas)
    reader.account(name)
    reader.put("train.eps", reader.take("adam_epsilon"), "adam_epsilon")
    reader.put("train.weight_decay", reader.take("weight_decay"), "weight_decay")
    reader.put("train.max_grad_norm", reader.take("max_grad_norm") or None, "max_grad_norm")


def put_precision(reader: Reader) -> None:
    names = ("bf16", "fp16", "fp32", "pure_bf16", "bfloat16", "float16", "float32")
    given = {name: value for name in names if (value := reader.take(name)) is not None}
    for name, value in given.items():
        if value not in (0, 1, "auto", "full"):
            reader.refuse(name, "is neither true nor false", "write it without quotes")
    reader.account(*given)
    if given.get("fp32") or given.get("float32") or (given and not any(given.values())):
        reader.put("train.precision", "fp32", next(iter(given)))
        return
    reader.put("train.precision", "bf16", "bf16")
    for name in ("fp16", "float16"):
        if given.get(name) and not given.get("bf16"):
            reader.note(name, "bfloat16 takes its place, which needs no loss scaling")
    for name in ("pure_bf16", "bfloat16"):
        if given.get(name):
            reader.note(name, "exact float32 masters are kept beside the bfloat16 weights")


def put_attention(reader: Reader, name: str) -> None:
    name = name if name in reader.given else "attn_implementation"
    asked = None if (given := reader.take(name)) is None else str(given)
    for switch, kernel in TABLES["attention_switches"].items():
        if reader.given.get(switch) is True:
            asked = asked or kernel
            reader.take(switch)
            reader.account(switch)
    if asked in ATTENTION:
        reader.put("model.attention", ATTENTION[asked], name)
    elif asked is not None:
        reader.leave(name, f"model.attention is {', '.join(dict.fromkeys(ATTENTION.values()))}")


def put_saving(reader: Reader) -> None:
    strategy, every = reader.take("save_strategy"), reader.number("save_steps")
    if strategy == "best":
        reader.put("checkpoint.keep_best", 1, "save_strategy")
    elif strategy in ("no", False):  # YAML reads an unquoted `no` as false
        reader.put("checkpoint.every", 0, "save_strategy")
    elif strategy == "epoch" or isinstance(every, float):
        name = "save_strategy" if strategy == "epoch" else "save_steps"
        reader.leave(name, STEPS_ALONE.format("checkpoint.every"))
    elif every is not None:
        reader.put("checkpoint.every", every, "save_steps", "save_strategy")
    if (kept := reader.take("save_total_limit")) is not None:
        reader.put("checkpoint.keep_last", kept, "save_total_limit")
    if "saves_per_epoch" in reader.given:
        reader.leave("saves_per_epoch", STEPS_ALONE.format("checkpoint.every"))
    reader.put("output.folder", reader.take("output_dir"), "output_dir")
    if "resume_from_checkpoint" in reader.given:
        reader.leave("resume_from_checkpoint", "another trainer's checkpoint cannot be resumed; model.path may name it")


def put_validation(reader: Reader, name: str) -> None:
    held, others = reader.number(name), "validation" in reader.translation.tree["data"]
    strategy, every = reader.take("eval_strategy"), reader.number("eval_steps")
    strategy = strategy if (earlier := reader.take("evaluation_strategy")) is None else earlier
    if strategy == "steps" and every is None:
        every = reader.given.get("logging_steps")
    if not others and held is not None and 0 <= held < 1:
        reader.put("data.validation_fraction", float(held), name)
    elif held and not others:
        reader.leave(name, "is a number of samples; data.validation_fraction is a share and is left at its default")
    if not others and not held:
        for key in ("eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch"):
            reader.leave(key, "there is no validation data")
    elif strategy in ("no", False):
        reader.put("train.eval_every", 0, "eval_strategy", "evaluation_strategy")
    elif strategy == "epoch" or isinstance(every, float):
        for key in ("eval_strategy", "evaluation_strategy") if strategy == "epoch" else ("eval_steps",):
            reader.leave(key, STEPS_ALONE.format("train.eval_every"))
    elif every is not None:
        reader.put("train.eval_every", every, "eval_steps", "eval_strategy", "evaluation_strategy")
    if "evals_per_epoch" in reader.given:
        reader.leave("evals_per_epoch", STEPS_ALONE.format("train.eval_every"))


def put_trackers(reader: Reader, names: Sequence[str], key: str) -> None:
    known = [name for name in names if name in TRACKERS]
    if [name for name in names if name not in (*TRACKERS, "none")]:
        reader.leave(key, f"output.trackers can be {', '.join(TRACKERS)}")
    elif names:
        reader.put("output.trackers", known, key)
    if "wandb" in known:
        reader.note(key, UNSENT)


def goes_on_from(reader: Reader, name: str, path: Any) -> None:
    folders = reader.texts(name, path)
    if len(folders) != 1:
        reader.refuse(name, "is not one adapter", "name the one to continue from")
    reader.put("adapter.path", folders[0], name)
    reader.note(name, "an adapter that is trained further keeps its own settings")
