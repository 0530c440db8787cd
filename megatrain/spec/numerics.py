"""`Numerics`: everything besides model and data that a run's numbers depend on. Fixed for the whole run."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from megatrain.errors import PlanError
from megatrain.spec.validate_fields import Bounds, check_fields
from megatrain.spec.work import Tokens

Precision = Literal["bf16", "fp32"]
Kernels = Literal["stock", "fused"]
WEIGHT_NBYTES: dict[Precision, int] = {"bf16": 2, "fp32": 4}
"""Bytes per parameter of streamed weights, and of gradients that cross the bus in the compute dtype."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Precisions, and the sizes of pieces in which things are computed: all of it changes numbers, by rounding."""

    precision: Precision = "bf16"
    _: KW_ONLY
    grad_precision: Precision | None = None
    """Precision of gradients that cross the bus; `None` means the compute precision."""
    loss_chunk_tokens: Tokens = 512
    """Target tokens whose logits exist at a time."""
    mlp_chunk_tokens: Annotated[int, Bounds(0, 1 << 60)] = 0
    """Tokens that a layer's token-wise parts (mainly the MLP) compute at a time; of longer inputs they keep only the
    input. 0 means all."""
    kernels: Kernels = "stock"
    """Kernels of layers: the library's, or with norms, gated activations and rotary embeddings as one kernel each."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "numerics.")
        if self.precision == "fp32" and self.grad_precision == "bf16":
            raise PlanError(
                "gradients in bf16 would hold less than precision fp32 promises",
                where="policy.grad_precision",
                fix="leave it unset or use precision bf16",
            )

    @property
    def weight_nbytes(self) -> int:
        """Bytes per parameter of streamed weights."""
        return WEIGHT_NBYTES[self.precision]

    @property
    def grad_nbytes(self) -> int:
        """Bytes per parameter of a gradient in host memory."""
        return WEIGHT_NBYTES[self.grad_precision or self.precision]

    def accumulator_nbytes(self, partial_sums: int) -> int:
        """Bytes per parameter of a gradient on the device: float32 if more than one term is summed."""
        return 4 if partial_sums > 1 else self.weight_nbytes
