"""What a step takes in: micro-batches, checked before anything is computed or changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import BatchError
from megatrain.spec import ModelSpec, Rows, Work

IGNORED = -100
"""The label that marks a token as no target (Hugging Face convention)."""

MicroBatch = Mapping[str, Any]
"""`input_ids` and `labels`, int64[batch, length], and whatever else the model's forward takes, `attention_mask` say."""


def check_micro_batches(model: ModelSpec, micro_batches: Sequence[MicroBatch]) -> Work:
    """The work of a step. Raises `BatchError` naming the micro-batch, the key and the value that is wrong."""
    if isinstance(micro_batches, Mapping):
        raise BatchError("expected a list of micro-batches, not one", where="step", fix="put it into a list")
    if not micro_batches:
        raise BatchError("a step needs at least one micro-batch", where="step")
    targets = 0
    for index, batch in enumerate(micro_batches):
        check_inputs(model, batch, f"micro-batch {index}")
        targets += count_targets(batch)
    if targets == 0:
        raise BatchError(
            "no target token in the whole step (every label but the first of each row is -100)",
            where="labels",
            fix="give at least one token a label",
        )
    sizes, lengths = zip(*(tuple(batch["input_ids"].shape) for batch in micro_batches), strict=True)
    tokens = tuple(rows * length for rows, length in zip(sizes, lengths, strict=True))
    alike = lengths[0] if len(set(lengths)) == 1 else None
    return Work(tokens, alike, rows=_rows_of(micro_batches))


def _rows_of(micro_batches: Sequence[MicroBatch]) -> Rows:
    """What rows are, where some are padded or packed."""
    if any(batch.get("position_ids") is not None for batch in micro_batches):
        return "packed"
    return "padded" if any(batch.get("attention_mask") is not None for batch in micro_batches) else "whole"


def target_mask(batch: MicroBatch) -> Tensor:
    """bool[batch, length]: where a label is a target, which the first of a row never is."""
    mask: Tensor = batch["labels"] != IGNORED
    mask[:, 0] = False
    return mask


def count_targets(batch: MicroBatch) -> int:
    """Target tokens of a micro-batch."""
    return int(target_mask(batch).sum())


def shifted(labels: Tensor) -> Tensor:
    """The target of each position: its successor's label, and none for the last; int64[batch, length] both."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets


def model_inputs(batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """What the model's forward is called with: everything but the labels, on the device."""
    return {
        key: _moved(value, device) if isinstance(value, Tensor) else value
        for key, value in batch.items()
        if key != "labels"
    }


def _moved(value: Tensor, device: torch.device) -> Tensor:
    """On the device, and a tensor that autograd may save even if the caller made it in inference mode."""
    return (value.clone() if value.is_inference() else value).to(device, non_blocking=True)


def check_inputs(model: ModelSpec, batch: MicroBatch, where: str) -> None:
    """Raise `BatchError` unless ids and labels are integers of one shape that the model can take."""
    for key in ("input_ids", "labels"):
        value = batch.get(key)
        if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype not in (torch.int64, torch.int32):
            found = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise BatchError(f"{key} must be an int64 or int32 tensor [batch, length], not {found}", where=where)
    ids, labels = batch["input_ids"], batch["labels"]
    if ids.shape != labels.shape:
        raise BatchError(f"labels {list(labels.shape)} and input_ids {list(ids.shape)} differ in shape", where=where)
    if ids.numel() == 0:
        raise BatchError("is empty", where=where)
    if model.max_positions is not None and ids.shape[1] > model.max_positions:
        raise BatchError(
            f"{ids.shape[1]} tokens long, but the model has {model.max_positions} positions",
            where=where,
            fix="use a shorter window",
        )
    for key, value in (("input_ids", ids), ("labels", labels[labels != IGNORED])):
        if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < model.vocab_size:
            bad = int(value.min()) if value.min() < 0 else int(value.max())
            raise BatchError(
                f"{key} holds token {bad}, outside the vocabulary of {model.vocab_size}",
                where=where,
                fix="use the tokenizer that belongs to the model",
            )
