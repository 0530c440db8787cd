"""All configuration keys of a run, as one frozen tree of pydantic sections.

This tree is the reference: each key has a type, a default where a sensible one exists, and a docstring, which
`megatrain train --keys` prints (`describe_keys`). Reading files and wording error messages happens in `load`.
"""

from __future__ import annotations

import re
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Literal

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
    ValidationInfo,
    field_validator,
    model_validator,
)

from megatrain.config.field_types import (
    MOST_COUNT,
    Betas,
    Folder,
    Folders,
    Fraction,
    Names,
    PathOrName,
    Rate,
    Share,
    Sources,
    as_list,
    checked_path,
    reasonable,
)
from megatrain.spec import Keep, UpdateTime
from megatrain.spec.work import MOST_TOKENS
from megatrain.system.paths import usable_path


def _no_reward(value: object) -> object:
    if value in ("reward", "reward_model", "reward_modeling", "rm"):
        raise ValueError(
            "reward models are not supported; use TRL's RewardTrainer, or dpo, which needs no reward model"
        )
    return value


def _as_named(value: object) -> object:
    """A list of sources as {name: source}; the name is the file's (`called`), or the source where two would collide."""
    given = as_list(value)
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        return given
    short = [called(each) for each in given]
    return {name if short.count(name) == 1 else each: each for name, each in zip(short, given, strict=True)}


def called(source: str) -> str:
    """Name under which a source's loss is reported: `math` for `data/math.jsonl.gz`; `org/name` stays as it is."""
    name = source.rstrip("/").rpartition("/")[2]
    bare = re.sub(r"(?<=.)(\.[A-Za-z]\w*)+$", "", name)
    return source if bare == name else bare


Named = Annotated[dict[str, PathOrName], BeforeValidator(_as_named)]
KeepRows = Annotated[tuple[Annotated[tuple[Keep, ...], Strict(False)], ...], Strict(False)]
Amount = Annotated[PositiveInt | str, Field(union_mode="left_to_right")]
Trackers = Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], Strict(False), BeforeValidator(as_list)]
Weights = Annotated[tuple[PositiveFloat, ...], Strict(False)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]


USUAL_SEQUENCES = 8
"""Default sequences per step."""


KTO_ROWS = 16
"""Default upper bound on the sequences of a KTO micro-batch, over which its KL term is averaged."""


class Section(BaseModel):
    """Base class of all sections: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="after")
    @classmethod
    def _within_reason(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse absurdly large or small numbers here, before they overflow somewhere in a run."""
        metadata = cls.model_fields[str(info.field_name)].metadata
        bounded = any(hasattr(entry, "lt") or hasattr(entry, "le") for entry in metadata)
        for entry in value if isinstance(value, tuple) else (value,):
            if isinstance(entry, int) and entry > MOST_COUNT and not bounded:
                raise ValueError(f"{str(entry)[:40]} is out of range; give {MOST_COUNT:.0e} at most")
            reasonable(entry)
        return value


class ModelSection(Section):
    path: PathOrName | None = None
    """Pretrained model to start from: a model folder, a run folder or a hub name. Give this or `config`."""
    config: PathOrName | dict[str, Any] | None = None
    """Fresh model: the fields of its Hugging Face configuration, including `model_type`, or a file that holds them."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = "auto"
    """Attention kernel; auto: the one transformers chooses for the model, which the plan shows. Without the package of
    flash_attention_2 or flash_attention_3, `pip install kernels` loads a prebuilt kernel from the hub."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model."""
    verify: bool = True
    """Whether to check a small model of this architecture against the stock code, once per architecture."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.config is None):
            raise ValueError("needs exactly one of `path` (a trained model) and `config` (a fresh one)")
        return self


class AdapterSection(Section):
    type: Literal["lora"] = "lora"
    """lora: low-rank adapters by `peft`, two small matrices beside each linear layer. Other methods: from Python."""
    path: PathOrName | None = None
    """Folder of a saved `peft` adapter to continue training, with its own settings; null: a fresh adapter."""
    r: PositiveInt = 16
    """Rank of the adapter's matrices."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / r."""
    dropout: Fraction = 0.0
    """Dropout probability of the adapter's inputs during training."""
    target_modules: Annotated[tuple[str, ...], Strict(False), BeforeValidator(as_list)] = ("auto",)
    """Layers that get an adapter: all-linear, names such as [q_proj, v_proj], or auto: all but fused experts."""
    modules_to_save: Names = ()
    """Modules trained in full and saved with the adapter, e.g. [embed_tokens, lm_head] after adding tokens."""
    ensure_weight_tying: bool = False
    """Whether a tied embedding that trains by `modules_to_save` stays one weight with the head."""
    trainable_token_indices: Annotated[tuple[NonNegativeInt, ...], Strict(False)] = ()
    """Ids of tokens whose rows of the embedding train too, and of the head if it is tied."""
    use_rslora: bool = False
    """Whether to scale by alpha / sqrt(r) instead (rank-stabilized LoRA)."""
    use_dora: bool = False
    """Whether to learn magnitude and direction of each weight row separately (DoRA)."""

    @model_validator(mode="after")
    def _its_own(self) -> AdapterSection:
        given = sorted(self.model_fields_set - {"type", "path"})
        if self.path is not None and any(getattr(self, key) != type(self).model_fields[key].default for key in given):
            raise ValueError(f"the adapter at `path` brings its own settings; leave {', '.join(given)} out")
        return self


class DataSection(Section):
    sources: Sources
    """Text, or samples in JSON, JSON lines, CSV, TSV, Parquet or Arrow: files (also .gz and .zst), folders, hub names
    or dataset_info.json#NAME; a file of token ids; or `python-stdlib`, the source code of Python's library."""
    streaming: bool = False
    """Read sources (also on the hub) during training, without tokenizing or counting them first. Needs train.steps,
    and weights if there are several sources."""
    weights: Weights | None = None
    """Relative weight of each source, e.g. [3, 1]; null: every sequence is seen equally often."""
    format: Literal["auto", "text", "chat", "sharegpt", "alpaca", "completion", "tokens", "preference", "unpaired"] = (
        "auto"
    )
    """What the sources hold; auto detects it for each file. preference: chosen and rejected answers, for dpo, orpo and
    simpo; unpaired: answers labelled good or bad, for kto."""
    columns: dict[str, str] = {}
    """Field names in your data that differ from the usual ones: {messages: dialog} reads `dialog` as messages."""
    tags: dict[str, str] = {}
    """Role and key names in ShareGPT data: {role_tag: who, user_tag: human} for turns like {who: human, ...}."""
    images: Annotated[str, Field(min_length=1)] | None = None
    """Column of a chat's images (relative to its source, or bytes), for a model with images and a processor; parts of
    messages may bring theirs. null: only text is trained."""
    split: str = "train"
    """Split of a hub or saved data set to read."""
    subset: str | None = None
    """Configuration (subset) of a hub data set to read."""
    chat_template: PathOrName = "model"
    """How a chat becomes text: the `model`'s own template, `chatml`, `none` (one message per line) or a template file.
    `trl`: text and targets exactly as TRL's assistant_only_loss, which often trains the newline after an answer."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments for the chat template, e.g. {enable_thinking: false}."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens are targets: every assistant message, the last one only, or all text."""
    bos: bool = True
    """Whether each plain text begins with the tokenizer's bos token, if the tokenizer puts one before texts."""
    packing: Literal["auto", "windows", "best_fit", "grouped"] = "auto"
    """windows: cut continuous text into sequences; best_fit: several whole samples per sequence, which do not attend to
    each other; grouped: one sample per sequence, batched by similar length. auto: windows for text; for samples
    best_fit if the model can keep them apart, else grouped."""
    too_long: Literal["cut", "drop"] = "cut"
    """Whether samples longer than sequence_length are truncated or dropped; either way they are counted."""
    bad_samples: Literal["stop", "leave_out"] = "stop"
    """For a sample that cannot be used: stop with an error that says where it is, or skip and count it."""
    pattern: str = "*"
    """Glob pattern of the files to read in a folder, e.g. `*.md`."""
    tokenizer: PathOrName | None = None
    """`bytes` (built in), a folder or a hub name; null: the model's own (`model.path`)."""
    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Tokens per training sequence."""
    validation: Named = {}
    """Sources for the validation loss, not trained on: a list, or {name: source}, e.g. {math: data/math.jsonl}. Each
    loss is reported under its name."""
    validation_split: str = "validation"
    """Split of a hub or saved data set to read for `validation`."""
    validation_fraction: Fraction = 0.02
    """Share of `sources` held out for the validation loss: the end of a text, or evenly spaced samples that have no
    duplicate. 0 holds out nothing, and is the default if `validation` is given."""
    cache: Folder = "~/.cache/megatrain/tokens"
    """Folder that caches tokenized data for later runs."""
    workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Threads that prepare batches ahead; the order of the data does not depend on them."""

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
        """`cache` as a path. Raises `ConfigError` if it starts with `~` and the home folder is unknown."""
        return usable_path(self.cache, where="data.cache", to_write="folder")

    @model_validator(mode="after")
    def _keys_that_fit(self) -> DataSection:
        if self.streaming and self.validation_fraction:
            what = "nothing can be held out of a stream"
            raise ValueError(f"{what}; set data.validation instead of data.validation_fraction")
        if self.streaming and len(self.sources) > 1 and self.weights is None:
            raise ValueError("several streamed sources have no known length to mix them by; set data.weights")
        if self.streaming and self.images:
            raise ValueError("images cannot be streamed yet; leave data.streaming or data.images out")
        if self.images and self.packing not in ("auto", "grouped"):
            raise ValueError(f"chats with images are padded, not packed; leave data.packing={self.packing} out")
        if self.weights is not None and len(self.weights) != len(self.sources):
            counts = f"{len(self.sources)} in data.sources, and {len(self.weights)} in data.weights"
            raise ValueError(f"data.weights needs one weight per source; there are {counts}")
        return self


class MuonSection(Section):
    """What only `train.optimizer: muon` has."""

    adamw_learning_rate: Rate | None = None
    """Peak learning rate of all that is no matrix (embeddings, head, routers, norms, biases), which AdamW updates with
    train.betas, train.eps and train.no_decay; null: train.learning_rate."""
    adamw_weight_decay: Rate | None = None
    """Its weight decay; null: train.weight_decay."""
    momentum: Fraction = 0.95
    """Decay rate of the running mean of the gradient."""
    nesterov: bool = True
    """Whether the newest gradient counts twice."""
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate by a matrix's shape. match_rms_adamw: updates as long as AdamW's, so that its rates
    carry over; original: sqrt(max(1, rows / columns)), for rates some 20 times larger."""
    newton_schulz: Literal["bf16", "fp32"] = "bf16"
    """Precision of the iteration that makes a matrix's update orthogonal."""
    matrices: dict[str, bool] = {}
    """Glob patterns of parameter names for which the choice should differ: {"*.router.weight": true} takes these, too,
    as matrices; with false they are left to AdamW."""
    cut: dict[str, Annotated[int, Field(ge=2, le=1 << 20)]] = {}
    """Glob patterns of weights that hold several projections as equal blocks of rows, and into how many to cut them:
    {"*.gate_up_proj.weight": 2}. All others are made orthogonal whole."""


class TrainSection(Section):
    steps: PositiveInt | None = None
    """Optimizer steps of the run. Give this or `epochs`."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Length of the run in passes over the packed data; may be a fraction. Counts the sequences of all sources together
    and is rounded up to whole steps; with data.weights some sources are seen more often than others."""
    objective: Annotated[Literal["cross_entropy", "dpo", "orpo", "simpo", "kto"], BeforeValidator(_no_reward)] = (
        "cross_entropy"
    )
    """Loss: next-token cross-entropy, or a preference loss. dpo (against `dpo_reference`), orpo and simpo (without a
    reference) train on pairs of answers: a pair counts as two sequences, so micro_batch_size must be even. kto trains
    on single answers, good or bad, against `dpo_reference`; a second, mismatched sequence for each estimates the KL."""
    beta: PositiveFloat | None = None
    """Strength of a preference loss. dpo and kto: penalty for departing from the reference (default 0.1); orpo: weight
    of the preference relative to the chosen answer's cross-entropy (0.1); simpo: scale of the reward (2)."""
    simpo_gamma: NonNegativeFloat = 1.0
    """simpo: target margin between the rewards of the chosen and the rejected answer."""
    dpo_reference: Literal["start", "base"] = "start"
    """dpo and kto: the reference model. start: the model as the run begins; base: the model below the adapter, for runs
    that continue an adapter."""
    dpo_loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """dpo: loss of a pair."""
    dpo_label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo with dpo_loss=sigmoid: assumed share of pairs with chosen and rejected swapped by mistake."""
    kto_loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: loss of an answer. apo_zero_unpaired needs no second sequence."""
    kto_desirable_weight: PositiveFloat = 1.0
    """kto: weight of good answers."""
    kto_undesirable_weight: PositiveFloat = 1.0
    """kto: weight of bad answers; the two weights can balance unequal numbers."""
    global_batch_size: PositiveInt | None = None
    """Sequences per step; 8 if this and the next two keys are null."""
    micro_batch_size: PositiveInt | None = None
    """Sequences that the device computes at once; null: the planner chooses."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per step: global_batch_size is micro_batch_size times this; null: the planner chooses."""
    target_tokens_per_step: Annotated[int, Field(gt=0, le=MOST_TOKENS)] | None = None
    """Minimum target tokens per step: micro-batches are added until it is reached, whatever the batch size says."""
    optimizer: Literal["adamw", "lion", "muon"] = "adamw"
    """adamw keeps 8 bytes of each trained parameter, lion 4, muon 4 of the matrices of layers and 8 of all others. Lion
    wants a learning rate 3 to 10 times smaller than AdamW's, and a weight decay as many times larger; muon takes
    AdamW's."""
    muon: MuonSection = MuonSection()
    learning_rate: NonNegativeFloat = 3e-4
    """Peak learning rate; 1e-4 by default for lion."""
    learning_rates: dict[str, Rate] = {}
    """Peak learning rates by glob pattern of parameter names: {"*embed_tokens*": 1e-5}. They follow the same schedule
    as learning_rate. A pattern that matches nothing, or two that match one parameter, or with muon one that matches a
    matrix, are errors."""
    lr_scheduler: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises to its peak, even if the run is shorter."""
    warmup_ratio: Share = 0.0
    """Warm-up as a share of the run, instead of warmup_steps."""
    decay_steps: NonNegativeInt = 0
    """Final steps over which `wsd` lowers the learning rate; other schedules ignore it."""
    min_lr_ratio: Share = 0.1
    """Final learning rate relative to the peak; `constant` ignores it."""
    betas: Betas = (0.9, 0.95)
    """adamw, also beside muon: decay rates for running means of the gradient and of its square. lion: of the momentum
    in what a step takes the sign of, and in what is kept; 0.9 and 0.99 by default."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the square root in the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    no_decay: Names = ("vectors",)
    """Parameters without weight decay: `vectors` (all of one dimension, so norms and biases), and glob patterns. muon's
    matrices all decay."""
    freeze: Names = ()
    """Glob patterns of parameters that are not trained; they need no gradient and no optimizer state. Also parts of a
    model with images: vision, projector, language."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip gradients to this global norm, exactly; null: no clipping."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: compute in bfloat16 with exact float32 masters. fp32: everything in float32."""
    device: str = "cpu"
    """cpu, cuda:0, or sim:SEED (CPU arithmetic behind a hostile simulated accelerator)."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Random seed for fresh weights, data order, dropout and text samples."""
    hardware: PathOrName | None = None
    """Machine to plan for: a file written by `megatrain probe`, or a built-in name; null: this machine."""
    eval_every: NonNegativeInt = 100
    """Steps between measurements of the validation loss; 0: at the end only."""
    eval_batches: PositiveInt | None = None
    """Micro-batches for the validation loss, always the same ones, from all sources in turn; null: 16 of the held-out
    data, and all of data.validation."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many measurements in a row without a lower validation loss; null: never."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """Smallest drop below the lowest validation loss that counts as an improvement."""
    metrics: Names = ()
    """Your own validation metrics, each as module:function; see the guide to validation."""
    sample_every: NonNegativeInt = 0
    """Steps between text samples; 0: at the end only."""
    sample_prompts: Annotated[Names, Field(min_length=1)] = ("",)
    """Prompts for text samples; with chat data, questions to answer. "" starts a new document, or with chats and other
    samples, asks the first of them (held out, if any are)."""
    sample_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 200
    """Tokens per text sample; 0: no samples."""
    sample_temperature: NonNegativeFloat = 0.8
    """Sampling temperature; 0: always the most likely token."""
    sample_top_k: NonNegativeInt = 50
    """Sample from this many most likely tokens; 0: from all."""
    log_every: PositiveInt = 10
    """Steps between progress lines if the output is not a terminal; also the steps that speeds are averaged over."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "skip"
    """After a loss or gradient that is not finite: stop the run; skip the update and continue; or roll back to the last
    checkpoint and leave out the data of that step."""
    nonfinite_limit: PositiveInt = 3
    """Stop after this many non-finite steps in a row, each skipped or rolled back."""
    stall_seconds: Seconds = 600.0
    """Report an operation or checkpoint that makes no progress for this long, with its name and age."""

    @model_validator(mode="before")
    @classmethod
    def _as_the_optimizer_is_used(cls, value: Any) -> Any:
        is_lion = isinstance(value, dict) and value.get("optimizer") == "lion"
        return {"learning_rate": 1e-4, "betas": (0.9, 0.99), **value} if is_lion else value

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if self.optimizer == "lion" and self.eps != type(self).model_fields["eps"].default:
            raise ValueError("lion has no eps; leave it out")
        if self.optimizer != "muon" and (given := self.muon.model_dump(exclude_defaults=True)):
            raise ValueError(f"muon.{next(iter(given))} has no effect without optimizer=muon; set that too")
        if self.optimizer == "muon" and self.muon.adjust == "original" and self.muon.adamw_learning_rate is None:
            what = "the learning rates of muon.adjust=original are too high for AdamW, which updates all but matrices"
            raise ValueError(f"{what}; set muon.adamw_learning_rate, to 3e-4 or so")
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
            raise ValueError("warmup_steps and warmup_ratio are both set; leave one out")
        if self.learning_rates and not self.learning_rate:
            raise ValueError("learning_rates follow learning_rate, which is 0; freeze the other parameters instead")
        if self.dpo_loss == "ipo" and self.dpo_label_smoothing:
            raise ValueError("dpo_loss=ipo does not use dpo_label_smoothing; leave it out")
        of_kto = ("kto_loss", "kto_desirable_weight", "kto_undesirable_weight")
        for key in ("beta", "dpo_reference", "dpo_loss", "dpo_label_smoothing", "simpo_gamma", *of_kto):
            shared = {"beta": self.prefers, "dpo_reference": self.has_reference}
            reads = shared.get(key, key.startswith(self.objective))
            if not reads and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"objective={self.objective} does not use {key}; leave it out")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold needs early_stopping_patience; set that too")
        return self

    @property
    def prefers(self) -> bool:
        """Whether the objective is a preference loss (pairs of answers, or answers labelled good or bad)."""
        return self.objective != "cross_entropy"

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs a reference model."""
        return self.objective in ("dpo", "kto")

    @property
    def rows_together(self) -> int:
        """Sequences that stay in one micro-batch: 2 for a pair, or a KTO answer with its mismatched one; else 1."""
        alone = self.objective == "cross_entropy" or (self.objective, self.kto_loss) == ("kto", "apo_zero_unpaired")
        return 1 if alone else 2

    @property
    def sequences(self) -> int:
        """Sequences per step."""
        size, count = self.micro_batch_size, self.gradient_accumulation_steps
        usual = USUAL_SEQUENCES if size is None and count is None else (size or 1) * (count or 1)
        return self.global_batch_size or usual

    @property
    def micro_batch_override(self) -> int | None:
        """Sequences per micro-batch if the keys fix it, `None` if the planner chooses."""
        size, count = self.micro_batch_size, self.gradient_accumulation_steps
        if size is None and count is None:
            return gcd(self.sequences, KTO_ROWS) if self.objective == "kto" else 2 if self.prefers else None
        return size or self.sequences // (count or 1)


class PolicySection(Section):
    """Overrides for fields of `spec.Policy` and `spec.Numerics`; the planner chooses those that are null."""

    weight_slots: PositiveInt | None = None
    """Device buffers that the layers' weights pass through."""
    read_ahead_nbytes: NonNegativeInt | None = None
    """Instead of weight_slots: all units share one slot, and shards of the next layer are prefetched into a buffer of
    this many bytes. Best with wait_for=shard."""
    grad_slots: PositiveInt | None = None
    """Device buffers that the layers' gradients pass through."""
    shard_nbytes: PositiveInt | None = None
    """Largest piece of a unit that one copy moves, in bytes."""
    activations: Literal["keep", "recompute"] | None = None
    """Keep each layer's autograd graph until its backward, or keep only its input and recompute the layer."""
    activations_by_layer: KeepRows | None = None
    """Instead of `activations`: a row per layer with an entry per micro-batch: graph, chosen, attention, input,
    offload_chosen, offload_attention, offload, disk or drop; short lists repeat."""
    offload_slots: PositiveInt | None = None
    """Device buffers for offloaded inputs, and as many again for offloaded outputs."""
    recompute_slots: PositiveInt | None = None
    """Device buffers per micro-batch for recomputed inputs; null: one for each."""
    micro_batches_per_round: NonNegativeInt | None = None
    """Micro-batches that run forward and backward through all layers before the next ones start; 0: all of a step. Not
    for models whose head is tied to the embedding."""
    grad_precision: Literal["bf16", "fp32"] | None = None
    """Data type of gradients on their way from the device to the host."""
    update: UpdateTime | None = None
    """Update each unit during the next forward (needed to clip by the global norm), or when its gradient arrives."""
    streamed_updates: Share | None = None
    """Share of the layers updated on the device although their optimizer state lives in (pinned) host memory."""
    loss_chunk_tokens: PositiveInt | None = None
    """Target tokens per chunk of the loss: their logits exist at one time."""
    mlp_chunk_tokens: NonNegativeInt | None = None
    """Tokens per chunk of MLPs and other modules that treat each token by itself; 0: all at once."""
    wait_for: Literal["unit", "shard"] | None = None
    """What compute waits for: all weights of a unit, or only the shard that the layer's code needs next."""
    kernels: Literal["stock", "fused"] | None = None
    """Layer kernels. stock: the library's; fused: norms, gated activations and rotary embeddings in one kernel each."""
    host_threads: PositiveInt | None = None
    """Threads of the optimizer pass."""
    transfer: Literal["pinned", "pageable"] | None = None
    """Weights and gradients cross the bus from pinned host memory, or from pageable memory."""
    pinned_staging_slots: PositiveInt | None = None
    """Pinned buffers, of a shard each, for weights from the disk."""
    delivery: Literal["gather", "shared"] | None = None
    """With several ranks. gather: each rank fetches its own part of the weights and gets the rest over the link between
    devices; shared: all ranks of a machine fetch from shared host memory, where gradients are summed too."""
    disk_staging_slots: PositiveInt | None = None
    """Host buffers, for each kind of state, for reads from and writes to the disk."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields that are not null, by name."""
        return self.model_dump(exclude_none=True)


class MemorySection(Section):
    """Memory limits of a run: bytes, `24GB`, or a share of what is free, `80%`. Null: all but a reserve."""

    device: Amount | None = None
    """Limit on device memory: bytes, `24GB`, or a share of what is free, `80%`; null: all but a reserve."""
    host: Amount | None = None
    """Limit on host memory, pinned or not, in the same forms."""
    disk: Amount | None = None
    """Limit on disk space in disk.folders, in the same forms."""


class DiskSection(Section):
    """The disk tier: holds state that does not fit into host memory, the least used first."""

    folders: Folders = ()
    """Folders on fast drives for state that does not fit into memory; several share the load. []: no disk tier."""
    max_write_per_day: Amount | None = None
    """Most bytes to write to these drives per day, e.g. 500GB; a plan that writes more is refused."""
    checksums: bool = True
    """Whether to verify by checksum that data read from the drives is what was written."""
    preallocate: bool = True
    """Whether space is allocated before the first step; with false, btrfs compresses, and a full disk is found late."""

    @property
    def paths(self) -> list[Path]:
        return [Path(folder).expanduser() for folder in self.folders]


class LmEvalSection(Section):
    """Evaluation by lm_eval during training; needs `pip install megatrain[eval]`."""

    tasks: Names = ()
    """Tasks of EleutherAI's lm_eval to run during training: names that lm_eval knows, or of tasks in `folder`."""
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: at the end only."""
    folder: PathOrName | None = None
    """Folder with YAML files of your own tasks."""
    limit: PositiveInt | None = None
    """Examples per task; null: all."""
    num_fewshot: NonNegativeInt | None = None
    """Solved examples in front of each question; null: the task's default."""

    @model_validator(mode="after")
    def _has_tasks(self) -> LmEvalSection:
        if not self.tasks and (given := self.model_dump(exclude_defaults=True)):
            raise ValueError(f"{', '.join(given)} has no effect without tasks; set tasks, or leave it out")
        return self


class CheckpointSection(Section):
    every: NonNegativeInt = 500
    """Steps between checkpoints, written in the background; also one when the run ends or is stopped. 0: none."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep, for good, the checkpoint of every so many steps."""
    keep_best: NonNegativeInt = 0
    """Also keep this many with the lowest validation loss; each new lowest loss is saved at once."""
    folder: Folder | None = None
    """Folder for checkpoints; null: `checkpoints` in the run folder."""
    deadline_seconds: Seconds | None = None
    """Seconds between a stop signal and the loss of the machine. A step that would leave no time for the checkpoint is
    abandoned, and repeated on resume."""


class OutputSection(Section):
    folder: Folder
    """Run folder: holds the resolved configuration, metrics, and the trained model in `model/`."""
    overwrite: bool = False
    """Whether to replace an earlier run in the folder: its checkpoints and metrics when training begins, its model when
    the new one is complete. Otherwise such a folder is refused. Not saved in the run's config.yaml."""
    best: bool = False
    """Whether `model/` is the checkpoint with the lowest validation loss instead of the last state."""
    precision: Literal["fp32", "bf16"] | None = None
    """Data type of the weights in `model/`: the exact float32 masters, or rounded to bfloat16. Unset: `fp32`, or `bf16`
    for a model that was published quantized."""
    trackers: Trackers = ("tensorboard",)
    """Experiment trackers: tensorboard, wandb, trackio (install the latter two yourself); [] for none."""
    trackers_online: bool = False
    """Whether wandb may send data; otherwise it writes to the run folder, for `wandb sync` to send."""
    project: str = "megatrain"
    """Project name for wandb and trackio."""
    stop_at_turn_end: bool = True
    """Whether the saved model also stops generating at the tokens that ended its training data (a turn, a text)."""
    verify_export: bool = True
    """Whether to load the saved model with `from_pretrained` and compare its loss (below 1e9 parameters)."""


class Config(Section):
    """The whole configuration of a run."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    adapter: AdapterSection | None = None
    """Train an adapter on the frozen model, which takes 2 bytes per parameter; null: train the model itself."""
    policy: Annotated[PolicySection, BeforeValidator(lambda value: {} if value == "auto" else value)] = PolicySection()
    memory: MemorySection = MemorySection()
    disk: DiskSection = DiskSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output: OutputSection
    lm_eval: LmEvalSection = LmEvalSection()
    resume: PathOrName | None = None
    """auto: resume from this run's newest valid checkpoint, if there is one; or name a checkpoint or a run folder.
    A finished run is extended by resuming it with more train.steps or train.epochs."""
    accept_changes: bool = False
    """Whether to resume even though model, data or precision have changed in a way that is normally refused."""
    trace: Annotated[str, checked_path("file")] | None = None
    """Write a trace of three early steps, op by op, to this file, for Perfetto or chrome://tracing."""

    @model_validator(mode="after")
    def _one_thing_trains(self) -> Config:
        if self.adapter is not None and self.train.freeze:
            raise ValueError("with an adapter the model is frozen anyway; leave train.freeze out")
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
                raise ValueError(f"{key} needs a validation loss; set data.validation or data.validation_fraction")
            if not self.train.eval_every:
                raise ValueError(f"{key} needs a validation loss; set train.eval_every")
        if self.output.best and not self.checkpoint.every:
            raise ValueError("output.best needs checkpoints; set checkpoint.every")
        return self

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output.folder).expanduser()

    @property
    def trace_file(self) -> Path | None:
        """Path of `trace`, if set."""
        return None if self.trace is None else Path(self.trace).expanduser()

    @property
    def checkpoints(self) -> Path:
        """The run's checkpoint folder. Raises `ConfigError` if no folder can be created there."""
        return usable_path(self.checkpoint.folder or self.folder / "checkpoints", to_write="folder")

    @model_validator(mode="after")
    def _has_pairs(self) -> Config:
        prefers, objective = self.train.prefers, self.train.objective
        needed = "unpaired" if objective == "kto" else "preference"
        if prefers and self.data.format not in ("auto", needed):
            raise ValueError(f"train.objective={objective} needs data.format={needed}, not {self.data.format}")
        if prefers and self.data.images:
            raise ValueError(f"train.objective={objective} trains text only; leave data.images out")
        if prefers and self.data.packing not in ("auto", "grouped"):
            raise ValueError(f"pairs cannot be packed; leave data.packing={self.data.packing} out")
        if self.train.dpo_reference == "base" and self.adapter is None:
            raise ValueError("train.dpo_reference=base means the model below an adapter; set adapter, or use start")
        if not prefers and self.data.format == "preference":
            raise ValueError("data.format=preference needs train.objective=dpo, orpo or simpo")
        if not prefers and self.data.format == "unpaired":
            raise ValueError("data.format=unpaired needs train.objective=kto")
        return self

    @model_validator(mode="after")
    def _has_length(self) -> Config:
        if self.data.streaming and self.train.steps is None:
            raise ValueError("a stream has no known length; set train.steps instead of train.epochs")
        if self.data.streaming and self.train.objective != "cross_entropy":
            raise ValueError(f"train.objective={self.train.objective} cannot stream its data; leave data.streaming out")
        return self

    @model_validator(mode="after")
    def _has_tokenizer(self) -> Config:
        if self.data.tokenizer is None and self.model.path is None:
            raise ValueError("a fresh model has no tokenizer; set data.tokenizer (`bytes` is built in)")
        return self

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer: `data.tokenizer`, else the model's own."""
        return self.data.tokenizer or self.model.path or "bytes"
