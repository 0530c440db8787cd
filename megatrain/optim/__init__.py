"""Optimizers' arithmetic on numpy arrays in host memory: the split float32 master, norms, learning rates.

bfloat16 arrays are passed as their bits, uint16. No torch, no devices, no parameter names in memory: callers pass the
element ranges to update.
"""

from megatrain.optim.adamw import AdamW, AdamWScalars
from megatrain.optim.clip import clip_scale, expansion, own_square_sums, sum_of_squares
from megatrain.optim.lion import Lion
from megatrain.optim.lr_schedules import LrSchedule
from megatrain.optim.muon import (
    MatrixScalars,
    MomentumArrays,
    Muon,
    apply_on_host,
    matrix_shape,
    momentum_on_host,
    orthogonalize_flops,
)
from megatrain.optim.optimizer import (
    Optimizer,
    StepScalars,
    described,
    kind_described,
    kind_named,
    optimizer_from,
    update_on_host,
)
from megatrain.optim.split_master import HostArrays, StateArrays, join, join_into, split, split_into

__all__ = [
    "AdamW",
    "AdamWScalars",
    "HostArrays",
    "Lion",
    "LrSchedule",
    "MatrixScalars",
    "MomentumArrays",
    "Muon",
    "Optimizer",
    "StateArrays",
    "StepScalars",
    "apply_on_host",
    "clip_scale",
    "described",
    "expansion",
    "join",
    "join_into",
    "kind_described",
    "kind_named",
    "matrix_shape",
    "momentum_on_host",
    "optimizer_from",
    "orthogonalize_flops",
    "own_square_sums",
    "split",
    "split_into",
    "sum_of_squares",
    "update_on_host",
]
