"""How fast the pieces of a step were measured to run on a machine: rows of `spec.Hardware`.

They are values that files hold and the planner interpolates between (`plan.cost`). `Precision` is known by `spec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True, slots=True)
class ProductRate:
    """How fast a product [m, k] x [k, n] runs: its 2 m k n floating-point operations per second."""

    precision: Precision
    m: int
    k: int
    n: int
    flops: float


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """How fast causal attention over sequences of `length` runs, in the operations that it needs, per second.

    Forward 2 x length x head size for each token and head (half of the full square), backward twice that.
    """

    precision: Precision
    length: int
    head_size: int
    forward_flops: float
    backward_flops: float


@dataclass(frozen=True, slots=True)
class ElementwiseRate:
    """How fast a layer goes besides products and attention: bytes that autograd keeps of it, per second of each way."""

    precision: Precision
    forward_bandwidth: float
    backward_bandwidth: float


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Bytes per second of reads and writes of `block_nbytes` each, `depth` of them under way at any time."""

    block_nbytes: int
    depth: int
    read_bandwidth: float
    write_bandwidth: float
