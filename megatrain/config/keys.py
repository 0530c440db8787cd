"""The keys of a run: one frozen tree of sections.

The tree is the reference: every key has a type, a default where there is a sensible one, and a docstring, which is
what `megatrain train --keys` prints (`describe_keys`). Left out: files, and what is said about a wrong value (`load`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import gcd
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from megatrain.errors import ConfigError
from megatrain.spec import Keep, UpdateTime
from megatrain.system.paths import usable_path


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_section(value: object) -> object:
    return {} if value == "auto" else value


def _checked_path(to_write: Literal["", "folder", "file"] = "") -> AfterValidator:
    """A text that is, or may be, a path; see `usable_path` for what is refused."""

    def check(value: Any) -> Any:
        try:
            usable_path(value, to_write=to_write)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    return AfterValidator(check)


def _as_named(value: object) -> object:
    """Sources as a mapping of names to them, each called as its file, or by itself where two would be called so."""
    given = _as_list(value)
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        return given
    short = [called(each) for each in given]
    return {name if short.count(name) == 1 else each: each for name, each in zip(short, given, strict=True)}


def called(source: str) -> str:
    """What a source is called where its loss is told: `math` of `data/math.jsonl.gz`, and `org/name` as it is."""
    name = source.rstrip("/").rpartition("/")[2]
    bare = re.sub(r"(?<=.)(\.[A-Za-z]\w*)+$", "", name)
    return source if bare == name else bare


PathOrName = Annotated[str, _checked_path()]
Folder = Annotated[str, _checked_path("folder")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Betas = Annotated[tuple[Fraction, Fraction], Strict(False)]
Names = Annotated[tuple[str, ...], Strict(False), BeforeValidator(_as_list)]
Sources = Annotated[tuple[PathOrName, ...], Strict(False), BeforeValidator(_as_list), Field(min_length=1)]
Named = Annotated[dict[str, PathOrName], BeforeValidator(_as_named)]
Folders = Annotated[tuple[Folder, ...], Strict(False), BeforeValidator(_as_list)]


KeepRows = Annotated[tuple[Annotated[tuple[Keep, ...], Strict(False)], ...], Strict(False)]
Amount = Annotated[PositiveInt | str, Field(union_mode="left_to_right")]
Trackers = Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], Strict(False), BeforeValidator(_as_list)]
Weights = Annotated[tuple[PositiveFloat, ...], Strict(False)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]


MOST_TOKENS = 1 << 26
"""Of a step, as a plan has it (`plan.question`)."""

USUAL_SEQUENCES = 8
"""Windows of a step where the user names no number."""


KTO_ROWS = 16
"""Of a micro-batch of kto at most, where the user names no number: its KL term is a mean over them."""


MOST_COUNT, LEAST, MOST = 10**18, 1e-30, 1e30
"""Of any whole number, and of any other that is not 0. Within them no arithmetic with a key overflows."""


def _reasonable(value: Any) -> Any:
    if isinstance(value, float) and value and not LEAST <= abs(value) <= MOST:
        raise ValueError(f"{value:g} is beyond reason; give 0, or a number from {LEAST:g} to {MOST:g}")
    return value


Rate = Annotated[NonNegativeFloat, AfterValidator(_reasonable)]


class Section(BaseModel):
    """What all parts of the tree have in common."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="after")
    @classmethod
    def _within_reason(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses numbers that only a mistake can mean, here rather than where a run trips over them."""
        metadata = cls.model_fields[str(info.field_name)].metadata
        bounded = any(hasattr(each, "lt") or hasattr(each, "le") for each in metadata)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int) and each > MOST_COUNT and not bounded:
                raise ValueError(f"{str(each)[:40]} is beyond reason; give {MOST_COUNT:.0e} at most")
            _reasonable(each)
        return value


class ModelSection(Section):
    path: PathOrName | None = None
    """Folder (of a model or of a run) or hub name of the model to go on from. Give this or `config`."""
    config: PathOrName | dict[str, Any] | None = None
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


class AdapterSection(Section):
    type: Literal["lora"] = "lora"
    """Low-rank adapters by `peft`: two small matrices beside each linear layer. Other methods are for Python."""
    path: PathOrName | None = None
    """Folder of an adapter to go on from, as `peft` saves them, with its own settings; null begins a fresh one."""
    r: PositiveInt = 16
    """Rank: columns of the one matrix and rows of the other."""
    alpha: PositiveFloat = 32.0
    """What the adapter adds is multiplied by alpha / r."""
    dropout: Fraction = 0.0
    """Share of an adapter's inputs that is dropped while it trains."""
    target_modules: Annotated[tuple[str, ...], Strict(False), BeforeValidator(_as_list)] = ("auto",)
    """Layers that have one: all-linear, names such as [q_proj, v_proj], or auto: all but fused experts."""
    modules_to_save: Names = ()
    """Modules that train whole and are saved with the adapter: [embed_tokens, lm_head] where tokens are new."""
    use_rslora: bool = False
    """Whether to multiply by alpha / sqrt(r) instead."""
    use_dora: bool = False
    """Whether the size of each weight's rows is learned apart from their direction (DoRA)."""

    @model_validator(mode="after")
    def _its_own(self) -> AdapterSection:
        given = sorted(self.model_fields_set - {"type", "path"})
        if self.path is not None and any(getattr(self, key) != type(self).model_fields[key].default for key in given):
            raise ValueError(f"path names an adapter, whose own settings hold; leave {', '.join(given)} out")
        return self


class DataSection(Section):
    sources: Sources
    """Text, or samples in JSON, JSON lines, CSV, TSV, Parquet or Arrow: files, .gz and .zst too, folders, hub names,
    dataset_info.json#NAME; a file of token ids; or `python-stdlib`, the code of Python's own library."""
    streaming: bool = False
    """Read all sources as they come, on the hub too, neither encoded nor counted before the run: train.steps then says
    how long it is, and several sources need weights."""
    weights: Weights | None = None
    """Share of each source in what is trained on, 3 or 0.3 say; without them, each is seen as often as another."""
    format: Literal["auto", "text", "chat", "sharegpt", "alpaca", "completion", "tokens", "preference", "unpaired"] = (
        "auto"
    )
    """What the sources hold; auto finds out, file by file. preference: two answers, for dpo, orpo and simpo; unpaired:
    answers with a label, for kto."""
    columns: dict[str, str] = {}
    """Names of fields in your data, if not the usual ones: {messages: dialog} reads `dialog` as messages."""
    tags: dict[str, str] = {}
    """Names of roles and keys in ShareGPT data: {role_tag: who, user_tag: human} where a turn is {who: human, ...}."""
    split: str = "train"
    """Which split of a hub or saved data set is read."""
    subset: str | None = None
    """Which configuration of a hub data set is read."""
    chat_template: PathOrName = "model"
    """How a chat becomes text: the model's own template, `chatml`, `none` (contents on lines of their own), a file;
    `trl` has the text and the targets of TRL's assistant_only_loss, which often include the line end of an answer."""
    chat_template_kwargs: dict[str, Any] = {}
    """What the template is handed beside the messages, {enable_thinking: false} say."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What of a sample is trained: every answer, the last one, or everything."""
    packing: Literal["auto", "windows", "best_fit", "grouped"] = "auto"
    """windows: text runs on from one sequence to the next; best_fit: whole samples, several to a sequence, none
    of which sees another; grouped: one to a sequence, batched with others of like length. auto: windows for text; for
    samples best_fit where the model keeps them apart, else grouped."""
    too_long: Literal["cut", "drop"] = "cut"
    """What happens to a sample that is longer than sequence_length; it is counted."""
    bad_samples: Literal["stop", "leave_out"] = "stop"
    """What happens to a sample that cannot be used: end with its place, or leave it out and count it."""
    pattern: str = "*"
    """Which files of a folder are read, `*.md` say."""
    tokenizer: PathOrName | None = None
    """`bytes`, a folder or a hub name; without it, the model's own (`model.path`)."""
    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Tokens of a training sequence."""
    validation: Named = {}
    """Sources that are not trained on, to measure the loss on: a list, or names and sources, {math: data/math.jsonl}.
    The loss of each is told by its name."""
    validation_split: str = "validation"
    """Which split of a hub or saved data set is read for `validation`."""
    validation_fraction: Fraction = 0.02
    """Share of `sources` that is held out to measure the loss on: of text its end, of samples evenly spaced ones
    without a copy; 0 holds out nothing, and is meant where `validation` is given and this is not."""
    cache: Folder = "~/.cache/megatrain/tokens"
    """Folder that keeps tokenised text for the next run."""
    workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Threads that read ahead; they change nothing about what is read."""

    @model_validator(mode="before")
    @classmethod
    def _holds_out_for_want_of_others(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "validation_fraction" in value:
            return value
        if value.get("validation") or value.get("streaming"):
            return {**value, "validation_fraction": 0.0}
        return value

    @property
    def cache_folder(self) -> Path:
        """Where tokenised text is kept. Raises `ConfigError` where the default lies in a home that nobody knows."""
        return usable_path(self.cache, where="data.cache", to_write="folder")

    @model_validator(mode="after")
    def _streams_what_has_no_end(self) -> DataSection:
        if self.streaming and self.validation_fraction:
            raise ValueError(
                "nothing is held out of a stream; set data.validation in place of data.validation_fraction"
            )
        if self.streaming and len(self.sources) > 1 and self.weights is None:
            raise ValueError("streams have no known length to be mixed by; set data.weights")
        return self

    @model_validator(mode="after")
    def _a_weight_each(self) -> DataSection:
        if self.weights is not None and len(self.weights) != len(self.sources):
            counts = f"{len(self.sources)} in data.sources, and {len(self.weights)} in data.weights"
            raise ValueError(f"needs a weight for each source; there are {counts}")
        return self


class TrainSection(Section):
    steps: PositiveInt | None = None
    """Optimizer steps of the run. Give this or `epochs`."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Length of the run in passes over the data as it is packed: as many sequences as all sources hold, this many times
    (0.5 is half of them), and the step that this ends in whole. Sources with weights are then passed over unevenly."""
    objective: Literal["cross_entropy", "dpo", "orpo", "simpo", "kto"] = "cross_entropy"
    """What training goes down: cross-entropy of the next token, or a loss of preferences: dpo, against `dpo_reference`,
    orpo or simpo, without one. Then a sequence is an answer, a pair two of them, and micro_batch_size is even. kto:
    answers that are good or bad by themselves, against `dpo_reference`; a second sequence beside each measures the
    distance from it."""
    beta: PositiveFloat | None = None
    """Of preferences. dpo and kto: how much a departure from the reference costs; orpo: what the preference weighs
    beside the cross-entropy of the chosen answer; all 0.1. simpo: how steep the reward is; 2."""
    simpo_gamma: NonNegativeFloat = 1.0
    """Of simpo: by how much the chosen answer's reward is to be above the other's."""
    dpo_reference: Literal["start", "base"] = "start"
    """Of dpo and kto: start is the model that the run begins with; base the one below its adapter, where a run goes on
    from an adapter."""
    dpo_loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """Of dpo: the loss of a pair."""
    dpo_label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Of dpo with dpo_loss=sigmoid: the assumed share of pairs whose chosen and rejected answers are swapped."""
    kto_loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """Of kto: the loss of an answer. apo_zero_unpaired needs no second sequence."""
    kto_desirable_weight: PositiveFloat = 1.0
    """Of kto: what an answer weighs that is good."""
    kto_undesirable_weight: PositiveFloat = 1.0
    """Of kto: what an answer weighs that is not; weights may make up for unequal numbers."""
    global_batch_size: PositiveInt | None = None
    """Sequences of a step; 8 where this and the two below are all left open."""
    micro_batch_size: PositiveInt | None = None
    """Sequences that the device computes at once; null is for the plan to choose."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches of a step: global_batch_size is micro_batch_size times this; null is for the plan to choose."""
    target_tokens_per_step: Annotated[int, Field(gt=0, le=MOST_TOKENS)] | None = None
    """Target tokens that a step has at least: it takes micro-batches until it has them, whatever is said above."""
    learning_rate: NonNegativeFloat = 3e-4
    """Peak learning rate."""
    learning_rates: dict[str, Rate] = {}
    """Peaks of other parameters, by glob patterns of their names: {"*embed_tokens*": 1e-5}. They rise and fall with
    learning_rate; a pattern that nothing matches, and a parameter that two match, are refused."""
    lr_scheduler: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Shape of the learning rate after its warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises to its peak; a run that is shorter ends while it rises."""
    warmup_ratio: Share = 0.0
    """In place of warmup_steps: their share of the run, for one whose length is told in epochs."""
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
    hardware: PathOrName | None = None
    """What the plan is made for: a file of `megatrain probe` or a described machine; null is this machine."""
    eval_every: NonNegativeInt = 100
    """Steps between measurements of the validation loss; 0 measures it at the end only."""
    eval_batches: PositiveInt | None = None
    """Micro-batches that the validation loss is measured on, always the same, of all sources in turn; null: 16 of what
    is held out, and all of data.validation."""
    early_stopping_patience: PositiveInt | None = None
    """End the run after so many measurements in a row in which the validation loss has not fallen; null does not."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """By how much the validation loss has to fall below its lowest to count as fallen."""
    metrics: Names = ()
    """Measures of your own beside the validation loss, module:function each; see the guide to validation."""
    sample_every: NonNegativeInt = 0
    """Steps between samples of text; 0 samples at the end only."""
    sample_prompts: Annotated[Names, Field(min_length=1)] = ("",)
    """What samples continue, or the questions that they answer where chats are trained; "" starts a new document."""
    sample_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 200
    """Tokens of a sample; 0 draws none at all."""
    sample_temperature: NonNegativeFloat = 0.8
    """Below 1 sharpens what is drawn; 0 takes the likeliest token each time."""
    sample_top_k: NonNegativeInt = 50
    """Draw among this many likeliest tokens; 0 draws among all."""
    log_every: PositiveInt = 10
    """Steps between lines of progress where the output is not a terminal, and what speeds are averaged over."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "skip"
    """After a loss or gradient that is not finite: stop; go on with the next step, this one not applied; or go back to
    the last checkpoint and on from there without the data of that step."""
    nonfinite_limit: PositiveInt = 3
    """Steps in a row that are not finite, each skipped or gone back from, after which the run stops."""
    stall_seconds: Seconds = 600.0
    """An operation, or a checkpoint, that stands still for longer is reported, with its name and age."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if (self.steps is None) == (self.epochs is None):
            are = "neither is set" if self.steps is None else "both are set; null unsets one"
            raise ValueError(f"needs exactly one of `steps` and `epochs` (passes over the data); {are}")
        return self

    @model_validator(mode="after")
    def _agreeing_sizes(self) -> TrainSection:
        rows, size, count = self.global_batch_size, self.micro_batch_size, self.gradient_accumulation_steps
        if rows and size and count and rows != size * count:
            what = f"micro_batch_size={size} x gradient_accumulation_steps={count}"
            raise ValueError(f"global_batch_size={rows} is not {what}")
        for name, part in (("micro_batch_size", size), ("gradient_accumulation_steps", count)):
            if rows and part and rows % part:
                raise ValueError(f"global_batch_size={rows} is no multiple of {name}={part}")
        if self.rows_together == 2 and ((self.micro_batch_override or 2) % 2 or self.sequences % 2):
            raise ValueError(f"{self.objective} takes pairs: micro_batch_size and global_batch_size must be even")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio say the same; leave one out")
        if self.learning_rates and not self.learning_rate:
            raise ValueError("learning_rates rise and fall with learning_rate, which is 0; use freeze for the others")
        if self.dpo_loss == "ipo" and self.dpo_label_smoothing:
            raise ValueError("dpo_loss=ipo has no dpo_label_smoothing")
        own = ("kto_loss", "kto_desirable_weight", "kto_undesirable_weight")
        for key in ("beta", "dpo_reference", "dpo_loss", "dpo_label_smoothing", "simpo_gamma", *own):
            shared = {"beta": self.prefers, "dpo_reference": self.has_reference}
            reads = shared.get(key, key.startswith(self.objective))
            if not reads and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"objective={self.objective} does not read {key}; leave it out")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold is read with early_stopping_patience alone; set that, too")
        return self

    @property
    def prefers(self) -> bool:
        """Whether it trains on which answers are better, or good."""
        return self.objective != "cross_entropy"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with what another model says."""
        return self.objective in ("dpo", "kto")

    @property
    def rows_together(self) -> int:
        """Sequences that stay together: of a pair, or an answer of kto with its mismatched one."""
        alone = self.objective == "cross_entropy" or (self.objective, self.kto_loss) == ("kto", "apo_zero_unpaired")
        return 1 if alone else 2

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        size, count = self.micro_batch_size, self.gradient_accumulation_steps
        usual = USUAL_SEQUENCES if size is None and count is None else (size or 1) * (count or 1)
        return self.global_batch_size or usual

    @property
    def micro_batch_override(self) -> int | None:
        """Sequences of a micro-batch where the keys decide it, `None` where the plan does."""
        size, count = self.micro_batch_size, self.gradient_accumulation_steps
        if size is None and count is None:
            return gcd(self.sequences, KTO_ROWS) if self.objective == "kto" else 2 if self.prefers else None
        return size or self.sequences // (count or 1)


class PolicySection(Section):
    """Fields of `spec.Policy` and `spec.Numerics` that are fixed; what is null is chosen for the model and machine."""

    weight_slots: PositiveInt | None = None
    """Device buffers that the layers' weights pass through."""
    read_ahead_nbytes: NonNegativeInt | None = None
    """In place of weight_slots: all units share one slot, and shards of the next layer come ahead into so many bytes.
    Best with wait_for=shard."""
    grad_slots: PositiveInt | None = None
    """Device buffers that the layers' gradients pass through."""
    shard_nbytes: PositiveInt | None = None
    """Largest piece of a unit that one copy moves, in bytes."""
    activations: Literal["keep", "recompute"] | None = None
    """Keep each layer's graph until its backward, or keep its input and compute the layer again."""
    activations_by_layer: KeepRows | None = None
    """In place of `activations`, a row per layer of an entry per micro-batch: graph, chosen, attention, input,
    offload_chosen, offload_attention, offload or drop; both start over at their end."""
    offload_slots: PositiveInt | None = None
    """Device buffers that offloaded inputs pass through, and as many for offloaded outputs."""
    recompute_slots: PositiveInt | None = None
    """Device buffers per micro-batch for inputs that are computed again; null takes as many as they are."""
    micro_batches_per_round: NonNegativeInt | None = None
    """Micro-batches that go through all layers, forward and back, before the next ones do; 0 is all of a step's. Not
    for models whose head is tied to the embedding."""
    grad_precision: Literal["bf16", "fp32"] | None = None
    """What gradients cross the bus in."""
    update: UpdateTime | None = None
    """Update each unit during the next forward (needed to clip by the global norm), or as its gradient lands."""
    streamed_updates: Share | None = None
    """Share of the layers that are updated on the device while their state stays in host memory, all of it pinned."""
    loss_chunk_tokens: PositiveInt | None = None
    """Target tokens whose logits exist at one time."""
    mlp_chunk_tokens: NonNegativeInt | None = None
    """Tokens that feed-forwards, and other parts that treat each token by itself, compute at one time; 0 is all."""
    wait_for: Literal["unit", "shard"] | None = None
    """What compute waits for: a unit's weights, or the shard that a layer's code comes to."""
    kernels: Literal["stock", "compile", "liger"] | None = None
    """Kernels of layers: as the library calls them; or fused by `torch.compile`, which takes some minutes at the start,
    once for each kind of layer and shape of batch. Liger's are refused."""
    host_threads: PositiveInt | None = None
    """Threads of the optimizer pass."""
    transfer: Literal["pinned", "staged", "pageable"] | None = None
    """How weights and gradients cross the bus: from pinned (page-locked) host memory, through pinned staging buffers,
    or from pageable memory."""
    pinned_staging_slots: PositiveInt | None = None
    """Pinned buffers of a shard in each direction, where transfer is staged."""
    delivery: Literal["gather", "shared"] | None = None
    """Of several ranks: bring own parts of weights over each bus and the others' over the link between devices, or
    fetch all out of host memory that the ranks of one machine share, where gradients are then summed, too."""
    disk_staging_slots: PositiveInt | None = None
    """Host buffers that each kind of state passes through on its way from and to the disk."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields that are given, by name."""
        return self.model_dump(exclude_none=True)


class MemorySection(Section):
    """What a run may take: bytes, `24GB`, or a share of what is free, `80%`. Null is all, but for a reserve."""

    device: Amount | None = None
    """Of the device's own memory."""
    host: Amount | None = None
    """Of host memory, pinned or not."""
    disk: Amount | None = None
    """Of the folders of the disk tier."""


class DiskSection(Section):
    """The disk tier, which holds what the host has no room for, the coldest first."""

    folders: Folders = ()
    """Folders on fast drives; several share the load. Without one, no state leaves memory."""
    max_write_per_day: Amount | None = None
    """What may be written to the drives in a day, 500GB say; a plan that writes more is refused."""
    checksums: bool = True
    """Whether what comes back from the drives is compared with what was written."""

    @property
    def paths(self) -> list[Path]:
        return [Path(folder).expanduser() for folder in self.folders]


class LmEvalSection(Section):
    """Tasks of lm_eval; `pip install megatrain[eval]`."""

    tasks: Names = ()
    """Tasks of EleutherAI's lm_eval that the model is asked while it trains: names of the harness, or of `folder`."""
    every: NonNegativeInt = 0
    """Steps between; 0 asks at the end only."""
    folder: PathOrName | None = None
    """Folder of the YAML files of tasks of your own."""
    limit: PositiveInt | None = None
    """Examples of each task; null is all."""
    num_fewshot: NonNegativeInt | None = None
    """Examples that stand in front of each question; null is what the task says."""

    @model_validator(mode="after")
    def _has_tasks(self) -> LmEvalSection:
        if not self.tasks and (given := self.model_dump(exclude_defaults=True)):
            raise ValueError(f"{', '.join(given)} without tasks is read by nothing; set tasks, or leave it out")
        return self


class CheckpointSection(Section):
    every: NonNegativeInt = 500
    """Steps between checkpoints, written while training goes on, with one when the run ends or is stopped; 0: none."""
    keep_last: PositiveInt = 2
    """How many of the newest are kept."""
    keep_every: PositiveInt | None = None
    """Keep those of every so many steps too, for good."""
    keep_best: NonNegativeInt = 0
    """Keep so many with the lowest validation loss too; a state with a lower one than all before is saved at once."""
    folder: Folder | None = None
    """Where they go; null is `checkpoints` in the run folder."""
    deadline_seconds: Seconds | None = None
    """Time from a stop signal until the machine is taken away: a step that leaves none for the checkpoint is broken
    off, and done again when the run goes on."""


class OutputSection(Section):
    folder: Folder
    """Run folder: resolved configuration, metrics, and the trained model in `model/`."""
    overwrite: bool = False
    """Whether to replace what another run has left in the folder: its checkpoints and metrics when training begins, its
    model when the new one is whole. Without it such a folder is refused; the run's config.yaml does not repeat it."""
    best: bool = False
    """Whether `model/` is the state with the lowest validation loss, by its checkpoint, in place of the last one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the weights in `model/`: the exact masters, or those rounded to bfloat16."""
    push: str | None = None
    """Name on the Hugging Face hub, organisation/model, under which the finished model is uploaded, to a private
    repository if there is none yet. Whether the hub lets you is asked before training."""
    trackers: Trackers = ("tensorboard",)
    """What else draws the curves: tensorboard, wandb, trackio (the latter two are to be installed); [] for none."""
    trackers_online: bool = False
    """Whether wandb may send what it is told; else it writes below the run folder, and `wandb sync` sends it."""
    project: str = "megatrain"
    """Under which wandb and trackio gather runs."""
    verify_export: bool = True
    """Whether to load the saved model with `from_pretrained` and compare its loss (below 1e9 parameters)."""

    @model_validator(mode="before")
    @classmethod
    def _as_earlier(cls, value: Any) -> Any:
        """Files that were written before there were other trackers say whether there is TensorBoard."""
        if not isinstance(value, dict) or not isinstance(value.get("tensorboard"), bool):
            return value
        rest = {key: each for key, each in value.items() if key != "tensorboard"}
        named = _as_list(rest.get("trackers", ()))
        if not isinstance(named, list | tuple):
            return rest
        others = [name for name in named if name != "tensorboard"]
        return {**rest, "trackers": ["tensorboard", *others] if value["tensorboard"] else others}


class Config(Section):
    """The whole tree."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    adapter: AdapterSection | None = None
    """Train an adapter over the model, which is frozen and costs 2 bytes a parameter; null trains the model itself."""
    policy: Annotated[PolicySection, BeforeValidator(_as_section)] = PolicySection()
    memory: MemorySection = MemorySection()
    disk: DiskSection = DiskSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output: OutputSection
    lm_eval: LmEvalSection = LmEvalSection()
    resume: PathOrName | None = None
    """auto: go on from this run's newest sound checkpoint, if it has any; or a checkpoint, or a run folder with some.
    With more train.steps or train.epochs than a finished run had, it goes on behind its end."""
    accept_changes: bool = False
    """Whether to go on although model, data or precision have changed since in a way that a resumed run refuses."""
    trace: Annotated[str, _checked_path("file")] | None = None
    """File for a trace of three early steps, op by op, which Perfetto and chrome://tracing open."""

    @model_validator(mode="after")
    def _one_thing_trains(self) -> Config:
        if self.adapter is not None and self.train.freeze:
            raise ValueError("an adapter alone trains; leave train.freeze out")
        return self

    @model_validator(mode="after")
    def _can_go_back(self) -> Config:
        if self.train.on_nonfinite == "rollback" and not self.checkpoint.every:
            raise ValueError("train.on_nonfinite=rollback needs checkpoints; set checkpoint.every")
        return self

    @model_validator(mode="after")
    def _measures_what_it_goes_by(self) -> Config:
        asked = {"train.early_stopping_patience": self.train.early_stopping_patience, "output.best": self.output.best}
        for key in (key for key, value in asked.items() if value):
            if not self.data.validation and not self.data.validation_fraction:
                raise ValueError(f"{key} goes by the validation loss; set data.validation or data.validation_fraction")
            if not self.train.eval_every:
                raise ValueError(f"{key} goes by the validation loss; set train.eval_every")
        if self.output.best and not self.checkpoint.every:
            raise ValueError("output.best goes by checkpoints; set checkpoint.every")
        return self

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output.folder).expanduser()

    @property
    def trace_file(self) -> Path | None:
        """Where the trace goes that was asked for."""
        return None if self.trace is None else Path(self.trace).expanduser()

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints. Raises `ConfigError` where the one in the run folder is of no use."""
        return usable_path(self.checkpoint.folder or self.folder / "checkpoints", to_write="folder")

    @model_validator(mode="after")
    def _has_pairs(self) -> Config:
        prefers, objective = self.train.prefers, self.train.objective
        needed = "unpaired" if objective == "kto" else "preference"
        if prefers and self.data.format not in ("auto", needed):
            raise ValueError(f"train.objective={objective} needs data.format={needed}, and it is {self.data.format}")
        if prefers and self.data.packing not in ("auto", "grouped"):
            raise ValueError(f"pairs are not packed; leave data.packing={self.data.packing} out")
        if self.train.dpo_reference == "base" and self.adapter is None:
            raise ValueError("train.dpo_reference=base is the model below an adapter, and there is no adapter")
        if not prefers and self.data.format == "preference":
            raise ValueError("data.format=preference needs train.objective=dpo, orpo or simpo")
        if not prefers and self.data.format == "unpaired":
            raise ValueError("data.format=unpaired needs train.objective=kto")
        return self

    @model_validator(mode="after")
    def _has_length(self) -> Config:
        if self.data.streaming and self.train.steps is None:
            raise ValueError("data.streaming reads data of unknown length; set train.steps in place of train.epochs")
        if self.data.streaming and self.train.objective != "cross_entropy":
            raise ValueError(f"train.objective={self.train.objective} needs its data whole; leave data.streaming out")
        return self

    @model_validator(mode="after")
    def _has_tokenizer(self) -> Config:
        if self.data.tokenizer is None and self.model.path is None:
            raise ValueError("a fresh model has no tokenizer of its own; set data.tokenizer (`bytes` is built in)")
        return self

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer, the model's own unless one was named."""
        return self.data.tokenizer or self.model.path or "bytes"


class Described(NamedTuple):
    """A key as `--keys` lists it."""

    key: str
    """Dotted."""
    kind: str
    """What it takes: `whole number of 1 or more, or null`, or its choices with bars between."""
    default: str
    """As YAML; empty where the key is required."""
    meaning: str


def describe_keys() -> list[Described]:
    """Every key, in order."""
    return list(_keys(Config, ""))


def _keys(section: type[Section], prefix: str) -> Iterator[Described]:
    for name, field in section.model_fields.items():
        nested = section_of(field.annotation)
        if nested is None:
            default = "" if field.is_required() else _flow(field.default)
            meaning = " ".join((field.description or "").split())
            yield Described(f"{prefix}{name}", _kind(field.annotation, field.metadata), default, meaning)
        else:
            yield from _keys(nested, f"{prefix}{name}.")


KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "anything"}


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds or choices."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inside[0], _flat_metadata(inside[1:]))
    if origin is Literal:
        return " | ".join(map(str, inside))
    if origin in (Union, UnionType):
        words = [_kind(each) for each in inside if each is not NoneType]
        return ", or ".join([*words, *(["null"] if NoneType in inside else [])])
    if origin is tuple:
        kinds = [_kind(each) for each in inside if each is not Ellipsis]
        return f"list of: {kinds[0]}" if Ellipsis in inside else f"{len(kinds)} of: {kinds[0]}"
    if origin is dict:
        return "names and their values"
    return f"{KINDS[annotation]}{_bounds(metadata, whole=annotation is int)}"


def _flat_metadata(metadata: Sequence[Any]) -> list[Any]:
    """Bounds, out of a `Field` too."""
    return [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else [each])]


def _bounds(metadata: Sequence[Any], *, whole: bool) -> str:
    """`of 0 or more`, `above 0`, `from 0 to 1`, `from 0 to below 1`."""
    found = {name: getattr(each, name) for each in metadata for name in ("ge", "gt", "le", "lt") if hasattr(each, name)}
    low, high = found.get("ge"), found.get("le")
    if whole and "gt" in found:
        low = found["gt"] + 1
    least = None if low is None and "gt" not in found else f"above {found['gt']:g}" if low is None else f"{low:g}"
    most = f"{high:,.10g}" if high is not None else f"below {found['lt']:,.10g}" if "lt" in found else None
    if least is None:
        return ""
    if most is None:
        return f" {least}" if low is None else f" of {least} or more"
    return f" {least}, {most} at most" if low is None else f" from {least} to {most}"


def _flow(value: object) -> str:
    """A default on one line, as YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    return str(yaml.safe_dump(plain, default_flow_style=True, width=1000)).removesuffix("\n").removesuffix("\n...")


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a key holds, or may hold where it may be null."""
    kinds = [
        kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Section)
    ]
    return kinds[0] if kinds else None
