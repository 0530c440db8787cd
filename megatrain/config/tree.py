"""The keys of a run: one frozen tree of sections.

The tree is the reference: every key has a type, a default where there is a sensible one, and a docstring, which is
what `megatrain train --keys` prints. Left out: files (`load`), and what is said about a wrong value (`complaints`).
"""

from __future__ import annotations

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
    model_validator,
)


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
