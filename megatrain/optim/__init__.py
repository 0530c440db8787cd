"""The float32 truth: the exact master, AdamW over it, the gradient norm, and the learning rate.

    split.py      a float32 master as bfloat16 bits and the 16 bits below them
    adamw.py      hyperparameters, the fused update and its reference
    clip.py       sum of squares of a gradient, and the clipping factor
    lr.py         learning-rate schedules
    blocks.py     arrays checked, cut into blocks and handed to threads
    kernels.py    the compiled loops; numba's only home

Everything works on numpy arrays in host memory; bfloat16 travels as its bits, uint16. `split` here is the
function; to reach more of its module, write `from megatrain.optim.split_master import ...`. Left out: torch,
devices, and the names of parameters in memory; a caller gives the element ranges to update.
"""

from megatrain.optim.adamw import AdamW, StepScalars, update_fp32, update_split, warm_up
from megatrain.optim.clip import clip_scale, expansion, own_square_sums, sum_of_squares
from megatrain.optim.lr_schedules import LrSchedule, lr_schedule
from megatrain.optim.split_master import join, join_into, split, split_into

__all__ = [
    "AdamW",
    "LrSchedule",
    "StepScalars",
    "clip_scale",
    "expansion",
    "join",
    "join_into",
    "lr_schedule",
    "own_square_sums",
    "split",
    "split_into",
    "sum_of_squares",
    "update_fp32",
    "update_split",
    "warm_up",
]
