"""What steers a run: a YAML file and `key=value` overrides, checked into one frozen tree.

The tree is the reference: every key has a type, a default where there is a sensible one, and a docstring, which is
what `megatrain train --keys` prints. A key that does not exist is an error that names the nearest one that does; a key
given twice and a value of the wrong type are errors too, each with its line. Paths start at the working directory.

YAML is read with the floats of YAML 1.2, because PyYAML takes `3e-4` for text. Of the environment, only a default for
OpenMP is set, here too. Left out: including one file in another.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    ValidationError,
    model_validator,
)

from megatrain.errors import ConfigError


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_section(value: object) -> object:
    return {} if value == "auto" else value


Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Betas = Annotated[tuple[Fraction, Fraction], Strict(False)]
Names = Annotated[tuple[str, ...], Strict(False), BeforeValidator(_as_list)]


USUAL_ROWS = 8
"""Windows of a step where the user names no number."""


class Section(BaseModel):
    """What all parts of the tree have in common."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelSection(Section):
    path: str | None = None
    """Folder or hub name of the model to go on from. Give this or `config`."""
    config: str | dict[str, Any] | None = None
    """Fresh model: the fields of its Hugging Face configuration, `model_type` among them, or a file that holds them."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = "auto"
    """Attention kernel; auto is what the library chooses for the model, and the plan says which."""
    trust_remote_code: bool = False
    """Whether to run code that comes with the model."""
    verify: bool = True
    """Whether to compare a small model of its kind with the stock code when an architecture is first met."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.config is None):
            raise ValueError("needs exactly one of `path` (a trained model) and `config` (a fresh one)")
        return self


class DataSection(Section):
    sources: Annotated[Names, Field(min_length=1)]
    """Text files, folders, JSONL, one file of token ids, or `python-stdlib`, the code of Python's own library."""
    pattern: str = "*"
    """Which files of a folder are read, `*.md` say."""
    tokenizer: str | None = None
    """`bytes`, a folder or a hub name; without it, the model's own (`model.path`)."""
    window: Annotated[int, Field(ge=2)] = 512
    """Tokens of a training sequence."""
    validation_fraction: Fraction = 0.02
    """Share of the text, from its end, that is held out to measure the loss on; 0 holds out nothing."""
    cache: str = "~/.cache/megatrain/tokens"
    """Folder that keeps tokenised text for the next run."""


class TrainSection(Section):
    steps: PositiveInt
    """Optimizer steps of the run."""
    windows_per_step: PositiveInt | None = None
    """Windows that a step sees; 8 where this and the two below are all left open."""
    micro_batch: PositiveInt | None = None
    """Windows that the device computes at once; null is for the plan to choose."""
    micro_batches: PositiveInt | None = None
    """Micro-batches of a step, which sees micro_batch x micro_batches windows; null is for the plan to choose."""
    lr: NonNegativeFloat = 3e-4
    """Peak learning rate."""
    lr_schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Shape of the learning rate after its warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises to its peak; a run that is shorter ends while it rises."""
    decay_steps: NonNegativeInt = 0
    """Last steps in which `wsd` lowers the learning rate; the other shapes ignore it."""
    min_lr_ratio: Share = 0.1
    """Where the learning rate ends, relative to its peak; `constant` ignores it."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of AdamW's running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the root in AdamW."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, per unit of learning rate."""
    no_decay: Names = ("*norm*", "*.bias")
    """Glob patterns of parameter names that do not decay."""
    freeze: Names = ()
    """Glob patterns of parameters that stay as they are; they cost no gradient and no optimizer state."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global norm that the gradient is clipped to, exactly; null does not clip."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: compute in bfloat16 with exact float32 masters. fp32: everything in float32."""
    device: str = "cpu"
    """cpu, cuda:0, or sim:SEED (CPU arithmetic behind a hostile simulated accelerator)."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Decides fresh weights, the order of the data, dropout and samples."""
    hardware: str | None = None
    """What the plan is made for: a file of `megatrain probe` or a described machine; null is this machine."""
    eval_every: NonNegativeInt = 100
    """Steps between measurements of the validation loss; 0 measures it at the end only."""
    eval_batches: PositiveInt = 16
    """Micro-batches that the validation loss is measured on, always the same."""
    sample_every: NonNegativeInt = 0
    """Steps between samples of text; 0 samples at the end only."""
    sample_prompt: str = ""
    """What a sample continues; empty starts a new document."""
    sample_tokens: NonNegativeInt = 200
    """Tokens of a sample; 0 draws none at all."""
    sample_temperature: NonNegativeFloat = 0.8
    """Below 1 sharpens what is drawn; 0 takes the likeliest token each time."""
    sample_top_k: NonNegativeInt = 50
    """Draw among this many likeliest tokens; 0 draws among all."""
    log_every: PositiveInt = 10
    """Steps between lines of progress where the output is not a terminal, and what speeds are averaged over."""
    nonfinite_limit: PositiveInt = 3
    """Steps in a row with a loss or gradient that is not finite, each skipped, after which the run stops."""

    @model_validator(mode="after")
    def _agreeing_sizes(self) -> TrainSection:
        rows, size, count = self.windows_per_step, self.micro_batch, self.micro_batches
        divides = rows is None or all(part is None or rows % part == 0 for part in (size, count))
        if not divides or (rows and size and count and rows != size * count):
            raise ValueError(f"windows_per_step={rows} is not micro_batch={size} x micro_batches={count}")
        return self

    @property
    def rows(self) -> int:
        """Windows of a step."""
        pinned = None if self.micro_batch is None and self.micro_batches is None else (self.micro_batch or 1)
        return self.windows_per_step or (USUAL_ROWS if pinned is None else pinned * (self.micro_batches or 1))

    @property
    def pinned_micro_batch(self) -> int | None:
        """Windows of a micro-batch where the keys decide it, `None` where the plan does."""
        if self.micro_batch is None and self.micro_batches is None:
            return None
        return self.micro_batch or self.rows // (self.micro_batches or 1)


class PolicySection(Section):
    """Fields of `spec.Policy` to pin; `auto` pins none. What is null is chosen for the model and the machine."""

    weight_slots: PositiveInt | None = None
    """Device buffers that the layers' weights pass through."""
    grad_slots: PositiveInt | None = None
    """Device buffers that the layers' gradients pass through."""
    shard_nbytes: PositiveInt | None = None
    """Largest piece of a unit that one copy moves, in bytes."""
    activations: Literal["keep", "recompute"] | None = None
    """Keep each layer's graph until its backward, or keep its input and compute the layer again."""
    grad_precision: Literal["bf16", "fp32"] | None = None
    """What gradients cross the bus in."""
    update: Literal["next_forward", "during_backward"] | None = None
    """Update each unit during the next forward (needed to clip by the global norm), or as its gradient lands."""
    loss_chunk_tokens: PositiveInt | None = None
    """Target tokens whose logits exist at one time."""
    host_threads: PositiveInt | None = None
    """Threads of the optimizer pass."""
    device_budget_nbytes: PositiveInt | None = None
    """Device memory that the run may take, in bytes."""
    host_budget_nbytes: PositiveInt | None = None
    """Host memory that the run may take, in bytes."""

    @property
    def pinned(self) -> dict[str, Any]:
        """The fields that are given, by name."""
        return self.model_dump(exclude_none=True)


class OutputSection(Section):
    folder: str
    """Run folder: resolved configuration, metrics, and the trained model in `model/`."""
    overwrite: bool = False
    """Whether to train into a folder that holds a finished run; its model is replaced when the new one is whole."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the weights in `model/`: the exact masters, or those rounded to bfloat16."""
    tensorboard: bool = True
    """Whether to write TensorBoard events too."""
    verify_export: bool = True
    """Whether to load the saved model with `from_pretrained` and compare its loss (below 1e9 parameters)."""


class Config(Section):
    """The whole tree."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    policy: Annotated[PolicySection, BeforeValidator(_as_section)] = PolicySection()
    output: OutputSection
    trace: Path | None = None
    """File for a trace of three early steps, op by op, which Perfetto and chrome://tracing open."""

    @model_validator(mode="after")
    def _has_tokenizer(self) -> Config:
        if self.data.tokenizer is None and self.model.path is None:
            raise ValueError("a fresh model has no tokenizer of its own; set data.tokenizer (`bytes` is built in)")
        return self

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer, the model's own unless one was named."""
        return self.data.tokenizer or self.model.path or "bytes"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path`, with dotted `key=value` overrides applied in order: the last one wins.

    Raises `ConfigError`, with file and line, for whatever is wrong with any of them.
    """
    path = Path(path).expanduser()
    tree, places = _read(path)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError("is not KEY=VALUE", where=repr(override), fix="write train.steps=100, say")
        place = f"override {override!r}"
        _set(tree, key.split("."), _load(text, place, {}))
        for inner in [one for one in places if one.startswith(f"{key}.")]:
            del places[inner]
        places[key] = place
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _config_error(error, path, places) from None


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration; `load_config` gives it back equal.

    Raises `ConfigError` where the disk refuses.
    """
    text = yaml.dump(config.model_dump(mode="json"), Dumper=_YamlDumper, sort_keys=False, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# Every key of this run, defaults included. `megatrain train --keys` explains them.\n" + text)
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise ConfigError(what, where=str(path), fix="free some space, or choose another output.folder") from error


def let_idle_threads_sleep() -> None:
    """Make idle OpenMP threads sleep, unless the user's environment says otherwise; to be called before torch loads.

    By default they spin, and take the core from the very thread that they wait for as soon as anything else runs. With
    three other processes on two cores the quickstart came to 170 tokens/s so, and to 2,500 with sleeping threads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def describe_keys() -> list[tuple[str, str, str]]:
    """(dotted key, default, meaning) of every key, in order; the default of a required key is empty."""
    return list(_keys(Config, ""))


def _keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        nested = _section_of(field.annotation)
        if nested is None:
            default = "" if field.is_required() else _flow(field.default)
            yield f"{prefix}{name}", default, " ".join((field.description or "").split())
        else:
            yield from _keys(nested, f"{prefix}{name}.")


def _flow(value: object) -> str:
    """A default on one line, as YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    return str(yaml.safe_dump(plain, default_flow_style=True, width=1000)).removesuffix("\n").removesuffix("\n...")


def _section_of(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


# YAML --------------------------------------------------------------------------------------------------------------


class _Yaml(yaml.SafeLoader):
    """Safe YAML whose floats need no dot (`3e-4`), as in YAML 1.2."""

    close = yaml.SafeLoader.dispose


class _YamlDumper(yaml.SafeDumper):
    """Writes text that `_Yaml` would read as a float in quotes."""


for _kind in (_Yaml, _YamlDumper):  # tried after the rules of YAML 1.1, so this takes only what those leave as text
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file as nested dicts, and for each dotted key the place where it stands, `file:line`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _missing(path) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"cannot be read ({reason})", where=str(path), fix="give a YAML file") from error
    places: dict[str, str] = {}
    tree = _load(text, f"{path}:{{line}}", places)
    if not isinstance(tree, dict):
        raise ConfigError("holds no keys", where=str(path), fix="start from configs/quickstart.yaml")
    return tree, places


def _load(text: str, where: str, places: dict[str, str]) -> Any:
    """`text` as YAML. `where` says where it stands; `{line}` in it becomes the number of the line in question."""
    try:
        with closing(_Yaml(text)) as loader:
            root = loader.get_single_node()
            if root is None:
                return None
            _note_places(root, "", where, places)
            return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where.replace("{line}", str(mark.line + 1 if mark else 1))
        raise ConfigError(f"malformed YAML ({error.problem})", where=place, fix="correct the line") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason, place = str(error).splitlines()[0], where.replace(":{line}", "")
        raise ConfigError(f"malformed YAML ({reason})", where=place, fix="correct it") from None


def _note_places(node: yaml.Node, prefix: str, where: str, places: dict[str, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        place = where.replace("{line}", str(key.start_mark.line + 1))
        name = f"{prefix}{key.value}"
        if name in seen:
            raise ConfigError(f"key {name} is given twice", where=place, fix="remove one of them")
        seen.add(name)
        places[name] = place
        _note_places(value, f"{name}.", where, places)


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value


# Errors ------------------------------------------------------------------------------------------------------------


def _missing(path: Path) -> ConfigError:
    folder = path.parent
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    nearest = difflib.get_close_matches(path.name, names, n=1)
    fix = f"did you mean {folder / nearest[0]}?" if nearest else "name a YAML file, configs/quickstart.yaml say"
    return ConfigError("no such file", where=str(path), fix=fix)


def _config_error(error: ValidationError, path: Path, places: dict[str, str]) -> ConfigError:
    """The first of what pydantic found, in one line. An unknown key comes first: other errors may follow from it."""
    found = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    first = found[0]
    key, kind, message = _dotted(first["loc"]), first["type"], first["msg"]
    where = next((places[part] for part in _prefixes(key) if part in places), str(path))
    keys = {_dotted(one["loc"]) for one in found}
    more = f" ({len(keys) - 1} more to correct)" if len(keys) > 1 else ""
    if kind == "extra_forbidden":
        return ConfigError(f"unknown key {key}{more}", where=where, fix=_nearest(key))
    if kind == "missing" and isinstance(first["loc"][-1], str):
        return ConfigError(f"{key} is missing{more}", where=where, fix=f"set it in the file or as {key}=VALUE")
    if kind == "missing":
        message = "has too few values"
    if kind == "model_type":
        message = "needs keys below it"
    for prefix in ("Value error, ", "Input ", "Value ", "Tuple "):
        message = message.removeprefix(prefix)
    given = "" if kind in ("value_error", "missing", "too_long", "too_short") else f", not {first['input']!r}"
    return ConfigError(f"{key}{': ' if key else ''}{message}{given}{more}", where=where)


def _dotted(loc: tuple[int | str, ...]) -> str:
    """The key, without what pydantic adds to it: positions in a list, names of the types of a union."""
    keys: list[str] = []
    section: type[Section] | None = Config
    for part in loc:
        if section is None or not isinstance(part, str):
            break
        keys.append(part)
        section = _section_of(section.model_fields[part].annotation) if part in section.model_fields else None
    return ".".join(keys)


def _prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))


def _nearest(key: str) -> str:
    """What to do about an unknown key: the nearest one of its own section, else of all."""
    section, _, name = key.rpartition(".")
    known = [known for known, _, _ in describe_keys()] + list(Config.model_fields)
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    elsewhere = {one.rpartition(".")[2]: one for one in known}
    for names in (siblings, elsewhere):
        if nearest := difflib.get_close_matches(name, names, n=1):
            return f"did you mean {names[nearest[0]]}?"
    return f"the keys of {section or 'the file'} are {', '.join(siblings)}"
