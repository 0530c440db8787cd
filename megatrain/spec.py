"""What a model, a machine, a step's work and a policy *are*, as frozen values.

Everything that is decided without touching a device is decided on these: layouts, schedules, plans and reports all
take them and nothing else, so a laptop can plan for a machine it has never seen. The module leaves out how a
specification is read from a real model (`model.unit`) and how a policy is chosen (`plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from megatrain.errors import PlanError

Precision = Literal["bf16", "fp32"]
UnitKind = Literal["prologue", "layer", "epilogue"]
ActivationPlan = Literal["keep", "recompute"]
UpdateTime = Literal["next_forward", "during_backward"]

WEIGHT_NBYTES: dict[Precision, int] = {"bf16": 2, "fp32": 4}
"""Bytes per parameter of what the device streams, and of a gradient that crosses the bus in the compute dtype."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, by its full Hugging Face name, stored once however many names it is tied to."""

    name: str
    shape: tuple[int, ...]
    active: float = 1.0
    """Share of the elements that one token uses: below 1 for experts."""
    trainable: bool = True
    """A frozen parameter streams like any other, has no gradient and is never updated."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What streams as one. `borrows` names parameters of the prologue that this unit also uses (tied weights)."""

    name: str
    kind: UnitKind
    params: tuple[ParamSpec, ...]
    borrows: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A causal language model as a sequence of units: prologue, layers in order of use, epilogue."""

    name: str
    units: tuple[UnitSpec, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int | None = None

    def __post_init__(self) -> None:
        kinds = [unit.kind for unit in self.units]
        if len(kinds) < 3 or kinds != ["prologue", *["layer"] * (len(kinds) - 2), "epilogue"]:
            raise PlanError(
                f"units must be a prologue, layers and an epilogue, not {kinds}", where=f"model {self.name}"
            )

    @property
    def layers(self) -> range:
        """Indices of the decoder layers among the units."""
        return range(1, len(self.units) - 1)

    @property
    def epilogue(self) -> int:
        return len(self.units) - 1

    @property
    def tied(self) -> bool:
        """Whether the epilogue uses a parameter of the prologue (a tied head)."""
        return bool(self.units[-1].borrows)

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as the planner and `replay` see it. Rates are per second; capacities are in bytes."""

    name: str
    device_nbytes: int
    host_nbytes: int
    fetch_bandwidth: float
    """Host to device, bytes per second."""
    grad_bandwidth: float
    """Device to host, bytes per second."""
    flops: float
    """Floating-point operations per second of a large matrix product in the compute dtype."""
    host_bandwidth: float
    """Bytes per second, read plus written, of the optimizer pass in host memory."""
    shares_memory: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """What one step has to do: the token count (batch x length, padding included) of each micro-batch."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise PlanError(f"a step needs micro-batches of at least one token, not {self.tokens}")

    @property
    def micro_batches(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a model is streamed. The numbers that come out of a step never depend on it, only time and memory do."""

    precision: Precision = "bf16"
    weight_slots: int = 2
    """Device buffers that the layers' weights pass through; 2 hides each fetch behind the layer before."""
    grad_slots: int = 2
    """Device buffers that the layers' gradients pass through."""
    shard_nbytes: int = 64 << 20
    """Largest piece of a unit that one copy moves."""
    activations: ActivationPlan = "recompute"
    """Keep each layer's autograd graph until its backward, or keep its input and compute the layer again."""
    grad_precision: Precision | None = None
    """What gradients cross the bus in; `None` is the compute precision."""
    update: UpdateTime = "next_forward"
    """Apply each unit's update during the next forward (needed for an exact global norm), or as its gradient lands."""
    loss_chunk_tokens: int = 512
    """Target tokens whose logits exist at one time."""
    shares_memory: bool = False
    """The device computes in host memory: weights need no fetch, and gradients of the right dtype are born at home."""
    host_threads: int = 0
    """Threads of the optimizer pass; 0 is one per available core."""
    device_budget_nbytes: int | None = None
    host_budget_nbytes: int | None = None

    def __post_init__(self) -> None:
        self._require("precision", self.precision in WEIGHT_NBYTES, "bf16 or fp32")
        self._require("grad_precision", self.grad_precision in (None, *WEIGHT_NBYTES), "bf16, fp32 or None")
        self._require("activations", self.activations in ("keep", "recompute"), "keep or recompute")
        self._require("update", self.update in ("next_forward", "during_backward"), "next_forward or during_backward")
        for key in ("weight_slots", "grad_slots", "shard_nbytes", "loss_chunk_tokens"):
            self._require(key, getattr(self, key) >= 1, "at least 1")
        self._require("host_threads", self.host_threads >= 0, "0 or more")
        if self.precision == "fp32" and self.grad_precision == "bf16":
            raise PlanError(
                "gradients in bf16 would hold less than precision fp32 promises",
                where="policy.grad_precision",
                fix="leave it unset or use precision bf16",
            )

    def _require(self, key: str, holds: bool, expected: str) -> None:
        if not holds:
            raise PlanError(f"{getattr(self, key)!r} is not valid", where=f"policy.{key}", fix=f"use {expected}")

    @property
    def weight_nbytes(self) -> int:
        """Bytes per parameter of the weights that stream."""
        return WEIGHT_NBYTES[self.precision]

    @property
    def grad_nbytes(self) -> int:
        """Bytes per parameter of a gradient in host memory."""
        return WEIGHT_NBYTES[self.grad_precision or self.precision]

    def accumulator_nbytes(self, partial_sums: int) -> int:
        """Bytes per parameter of a gradient on the device: float32 as soon as more than one term is summed."""
        return 4 if partial_sums > 1 else self.weight_nbytes
