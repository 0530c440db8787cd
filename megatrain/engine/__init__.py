"""Walks a schedule on a device: binds weights, runs layers, sums gradients. Imports neither optimizer nor ranks."""

from megatrain.engine.batch import (
    MicroBatch,
    check_inputs,
    check_micro_batches,
    count_targets,
    sequences_of,
    target_mask,
)
from megatrain.engine.chunked_loss import KeepLogProbs, LogitsLoss, LogProbLoss, LossFn, StepResult, Summed, Sums
from megatrain.engine.context import DTYPES
from megatrain.engine.executor import Executor
from megatrain.engine.step_state import StepInput
from megatrain.engine.streamer import Streamer

__all__ = [
    "DTYPES",
    "Executor",
    "KeepLogProbs",
    "LogProbLoss",
    "LogitsLoss",
    "LossFn",
    "MicroBatch",
    "StepInput",
    "StepResult",
    "Streamer",
    "Summed",
    "Sums",
    "check_inputs",
    "check_micro_batches",
    "count_targets",
    "sequences_of",
    "target_mask",
]
