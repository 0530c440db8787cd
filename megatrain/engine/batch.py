"""Checks and stages the micro-batches of a step, before anything is computed or changed.

Each entry must be read by the model or by the loss (its `own`). An entry that nothing reads is refused, since it is
probably misspelt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.errors import BatchError
from megatrain.model import Arguments, only_single_rows
from megatrain.spec import Batching, ModelSpec, Work

IGNORED = -100
"""The label of a token that is not a target, by Hugging Face's convention."""

MicroBatch = Mapping[str, Any]
"""`input_ids` and `labels`, int64[batch, length], and whatever else the model's forward takes, such as
`attention_mask`. An entry that is `None` counts as absent."""

REQUIRED = ("input_ids", "labels")

DECIDED_BY_ENGINE: dict[str, tuple[Any, str]] = {
    "num_items_in_batch": (
        None,
        "the loss is divided by the step's target tokens: give a loss_fn with another divisor",
    ),
    "use_cache": (False, "nothing is cached between steps: leave it out"),
    "past_key_values": (None, "nothing is cached between steps: leave it out"),
    "inputs_embeds": (None, "the embedding is trained: give input_ids instead"),
    "logits_to_keep": (0, "the labels decide which logits are computed: leave it out"),
    "output_attentions": (False, "attentions are not kept when layers are streamed: leave it out"),
    "output_hidden_states": (False, "hidden states are not kept when layers are streamed: leave it out"),
    "output_router_logits": (False, "set output_router_logits in the model's config before creating the engine"),
    "return_dict": (True, "the engine reads the logits from the output itself: leave it out"),
}
"""Arguments of a forward that the engine sets: the one value accepted, and the fix for any other."""

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Boundaries of packed samples that collators give beside `position_ids`, in the form that some kernels want."""

TEXT_ENTRIES = frozenset((*REQUIRED, "attention_mask", "position_ids", *PACKED))
"""The entries of a text, for which what the tiny runs tell of a model holds (`model.split_into_units`)."""


def as_list(micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of any iterable as a list. Raises `BatchError` if it is not one of mappings."""
    if isinstance(micro_batches, Mapping):
        raise BatchError("expected a list of micro-batches, not one", where="step", fix="put it into a list")
    if not isinstance(micro_batches, Iterable) or isinstance(micro_batches, str | bytes | Tensor):
        what = f"expected a list of micro-batches, not {_type_name(micro_batches)}"
        raise BatchError(what, where="step", fix="give a list of dicts")
    batches = []
    for index, batch in enumerate(micro_batches):
        check_mapping(batch, f"micro-batch {index}")
        batches.append(batch)
    return batches


STAGED_NBYTES = 64 << 20
"""Largest tensor that is staged; a larger one, such as a teacher's logits, stays where it is."""


def stage(device: Device, batches: Sequence[MicroBatch], loss_entries: Collection[str]) -> list[MicroBatch]:
    """The micro-batches with their tensors in staging buffers that the device copies from (`Device.staged`).

    loss_entries: the loss's own entries, which are not staged if they are on a GPU.
    """
    to_stage = [
        (index, key)
        for index, batch in enumerate(batches)
        for key, value in batch.items()
        if _can_be_staged(value) and (value.device.type == "cpu" or key not in loss_entries)
    ]
    staged = [dict(batch) for batch in batches]
    tensors = device.staged([batches[index][key] for index, key in to_stage])
    for (index, key), tensor in zip(to_stage, tensors, strict=True):
        staged[index][key] = tensor
    return list(staged)


def _can_be_staged(value: object) -> bool:
    if type(value) is not Tensor or value.layout != torch.strided or value.device.type not in ("cpu", "cuda"):
        return False
    return value.nbytes <= STAGED_NBYTES


def check_mapping(batch: object, where: str) -> None:
    """Raise `BatchError` if `batch` is not a mapping."""
    if not isinstance(batch, Mapping):
        fix = "give a dict with input_ids and labels"
        raise BatchError(f"is {_type_name(batch)}, not a mapping of names to tensors", where=where, fix=fix)


def check_micro_batches(model: ModelSpec, micro_batches: Sequence[MicroBatch], *, alone: bool = True) -> Work:
    """The work of a step. Raises `BatchError` naming the micro-batch, the key and the value that is wrong.

    alone: whether this is the only rank, so that at least one target token must be among these micro-batches.
    """
    if not micro_batches:
        raise BatchError("a step needs at least one micro-batch", where="step")
    targets = 0
    for index, batch in enumerate(micro_batches):
        check_inputs(model, batch, f"micro-batch {index}")
        targets += count_targets(batch)
    if targets == 0 and alone:
        raise BatchError(
            "no target token in the whole step (every label but the first of each row is -100)",
            where="labels",
            fix="give at least one token a label",
        )
    sizes, lengths = zip(*(tuple(batch["input_ids"].shape) for batch in micro_batches), strict=True)
    tokens = tuple(rows * length for rows, length in zip(sizes, lengths, strict=True))
    length = lengths[0] if len(set(lengths)) == 1 else None
    return Work(tokens, length, batching=_batching_of(micro_batches))


def _batching_of(micro_batches: Sequence[MicroBatch]) -> Batching:
    """Whether any micro-batch is packed or padded."""
    if any(batch.get("position_ids") is not None for batch in micro_batches):
        return "packed"
    return "padded" if any(batch.get("attention_mask") is not None for batch in micro_batches) else "uniform"


def target_mask(batch: MicroBatch) -> Tensor:
    """bool[batch, length]: which labels are targets. The first of a row never is."""
    mask: Tensor = batch["labels"] != IGNORED
    mask[:, 0] = False
    return mask


def count_targets(batch: MicroBatch) -> int:
    """Number of target tokens in a micro-batch."""
    return int(target_mask(batch).sum())


def sequences_of(batch: MicroBatch) -> list[tuple[int, int]]:
    """(count, length) of the sequences in a micro-batch, not counting masked tokens; packed sequences count separately.

    Rows without a mask are packed if their positions start again, as in transformers' `find_packed_sequence_indices`.
    """
    rows, length = batch["input_ids"].shape
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if isinstance(mask, Tensor):
        return [(1, int(count)) for count in mask.sum(dim=1)] if mask.dim() == 2 else [(rows, length)]
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return [(rows, length)]
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=1) != 1
    starts = begins.flatten().nonzero().squeeze(-1)
    lengths = torch.diff(starts, append=torch.tensor([rows * length]))
    return [(count, length) for length, count in Counter(lengths.tolist()).items()]


def shifted(labels: Tensor) -> Tensor:
    """The target of each position: the next token's label, and -100 at the last. Both int64[batch, length]."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets


def targets_of(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The positions that have a target, in the flattened micro-batch, and the targets; both int64[targets].

    labels: int64[batch, length].
    """
    targets = shifted(labels).reshape(-1)
    positions = (targets != IGNORED).nonzero().squeeze(-1)
    return positions, targets[positions]


def model_inputs(batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """The keyword arguments of the model's forward: everything but the labels, on the device."""
    return {
        key: _to_device(value, device) if isinstance(value, Tensor) else value
        for key, value in batch.items()
        if key != "labels"
    }


def _to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copied to the device; cloned if it was made in inference mode, so that autograd may save it."""
    return (value.clone() if value.is_inference() else value).to(device, non_blocking=True)


def model_entries(batch: MicroBatch, loss_entries: Collection[str] = ()) -> dict[str, Any]:
    """The entries that the model gets, labels included. Left out are the loss's own, those that are `None`, and those
    in `DECIDED_BY_ENGINE`."""
    return {
        key: value
        for key, value in batch.items()
        if key not in loss_entries and value is not None and key not in DECIDED_BY_ENGINE
    }


def check_arguments(arguments: Arguments, batch: MicroBatch, loss_entries: Collection[str], where: str) -> None:
    """Raise `BatchError` for an entry that neither the model nor the loss reads, naming the nearest one that they do,
    and for an entry that asks for something the engine does not do. loss_entries: the loss's own entries."""
    for key, value in batch.items():
        if key in REQUIRED or key in loss_entries or value is None:
            continue
        if key in DECIDED_BY_ENGINE:
            accepted, fix = DECIDED_BY_ENGINE[key]
            if not isinstance(value, bool | int) or value != accepted:
                raise BatchError(f"{key} is not supported", where=where, fix=fix)
        elif key not in arguments and not _changes_nothing(key, value, batch):
            raise BatchError(
                f"nothing reads {key}", where=where, fix=_fix_for_unread(key, arguments, batch, loss_entries)
            )


def _changes_nothing(key: str, value: Any, batch: MicroBatch) -> bool:
    """Whether an entry that nothing reads would make no difference: it gives the boundaries of packed samples that the
    positions give too, or it masks only the ends of rows, where there is no target and which no other token sees."""
    if key in PACKED:
        return _agrees_with_positions(key, value, batch)
    ids, labels = batch["input_ids"], batch.get("labels")
    if key != "attention_mask" or not isinstance(value, Tensor) or value.shape != ids.shape:
        return False
    hidden = value.cpu() == 0
    targets = isinstance(labels, Tensor) and bool((labels.cpu()[hidden] != IGNORED).any())
    return not targets and not bool((hidden[:, :-1] & ~hidden[:, 1:]).any())


def _fix_for_unread(key: str, arguments: Arguments, batch: MicroBatch, loss_entries: Collection[str]) -> str:
    if key in PACKED:
        return "separate packed samples by position_ids that start again with each"
    known = sorted({*arguments.own, *loss_entries, *REQUIRED} - DECIDED_BY_ENGINE.keys())
    if near := get_close_matches(str(key).lower(), known, n=1, cutoff=0.75):
        return f"did you mean {near[0]!r}?"
    return f"leave it out, or name it in `own` of a loss that reads it; the model takes {', '.join(known)}"


def _agrees_with_positions(key: str, value: Any, batch: MicroBatch) -> bool:
    """Whether an entry of `PACKED` gives the same boundaries of packed samples as `position_ids`."""
    ids, positions = batch["input_ids"], batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != ids.shape:
        return False
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    try:
        given = torch.as_tensor(value).to(positions.device)
    except (TypeError, ValueError, RuntimeError):
        return False
    if key == "seq_idx":
        if given.numel() != ids.numel():
            return False
        numbers, changes = given.reshape(ids.shape), torch.ones_like(begins)
        changes[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        return torch.equal(changes, begins)
    starts = begins.flatten().nonzero().flatten()
    offsets = torch.cat([starts, starts.new_tensor([ids.numel()])])
    expected = offsets if key.startswith("cu_seq_lens") else offsets.diff().max()
    return torch.equal(given.to(expected.dtype), expected)


def _type_name(value: object) -> str:
    """The type of a value with its article, for messages."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _check_positions(model: ModelSpec, batch: MicroBatch, where: str) -> None:
    """Raise `BatchError` for a mask or positions that do not fit `input_ids`, or positions the model does not have."""
    ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
    rows, length = ids.shape
    unchecked = mask is None or isinstance(mask, Mapping) or hasattr(mask, "kv_num_blocks")  # flex_attention's
    if not unchecked:
        _check_mask(mask, ids, where)
    fits = isinstance(positions, Tensor) and positions.dim() > 1 and positions.shape[-1] == length
    integers = isinstance(positions, Tensor) and positions.dtype in (torch.int64, torch.int32)
    if positions is not None and not (fits and integers and (positions.dim() > 2 or len(positions) in (1, rows))):
        what = f"position_ids is {_dtype_and_shape(positions)}, and input_ids {_dtype_and_shape(ids)}"
        raise BatchError(what, where=where, fix="give an integer tensor [batch, length]")
    if isinstance(positions, Tensor) and positions.min() < 0:
        raise BatchError(f"position_ids contains {int(positions.min())}", where=where, fix="give positions from 0 on")
    single = only_single_rows(model.attention) and rows > 1 and mask is None
    if single and isinstance(positions, Tensor) and (positions.diff() != 1).any():
        what = f"{model.attention} tells packed samples apart only in a micro-batch of one row"
        raise BatchError(what, where=where, fix="give each row in a micro-batch of its own, or use attention=sdpa")
    needed = int(positions.max()) + 1 if isinstance(positions, Tensor) else length  # fewer than `length` if packed
    if model.max_positions is not None and needed > model.max_positions:
        has = f"the model has {model.max_positions:,} positions"
        if positions is not None:
            fix = f"give positions below {model.max_positions:,}, or raise max_position_embeddings in its config"
            raise BatchError(f"position_ids go up to {needed - 1:,}, but {has}", where=where, fix=fix)
        raise BatchError(f"{length} tokens long, but {has}", where=where, fix="use a shorter window")


def _check_mask(mask: object, ids: Tensor, where: str) -> None:
    """Raise `BatchError` unless a mask is 0 and 1 in the shape of `ids`, or bool or float[batch, heads, length, length]
    as attention kernels take it."""
    rows, length = ids.shape
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        odd = mask[(mask != 0) & (mask != 1)]
        if odd.numel():
            what = f"attention_mask contains {odd[0].item():g}"
            fix = "give 1 for tokens and 0 for padding; separate packed samples by position_ids"
            raise BatchError(what, where=where, fix=fix)
        return
    fits = isinstance(mask, Tensor) and mask.dim() == 4 and len(mask) in (1, rows) and mask.shape[2] == length
    if isinstance(mask, Tensor) and fits and (mask.dtype == torch.bool or mask.is_floating_point()):
        return
    what = f"attention_mask is {_dtype_and_shape(mask)}, and input_ids {_dtype_and_shape(ids)}"
    raise BatchError(what, where=where, fix="give a tensor [batch, length], 1 for tokens and 0 for padding")


def _dtype_and_shape(value: object) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else _type_name(value)


def _fix_for_missing(key: str, batch: MicroBatch) -> str:
    others = [str(name) for name, other in batch.items() if name not in REQUIRED and other is not None]
    if near := get_close_matches(key, others, n=1):
        return f"did you mean {near[0]!r}?"
    return "to train on every token, give labels=input_ids" if key == "labels" else ""


def check_inputs(model: ModelSpec, batch: MicroBatch, where: str) -> None:
    """Raise `BatchError` unless `input_ids` and `labels` are integers of one shape and the model can take them."""
    for key, value in batch.items():
        if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided):
            what = "has no values (meta device)" if value.is_meta else f"is {value.layout}"
            raise BatchError(f"{key} {what}", where=where, fix="give a dense tensor on the cpu or the device")
    for key in REQUIRED:
        value = batch.get(key)
        if value is None:
            raise BatchError(f"has no {key}", where=where, fix=_fix_for_missing(key, batch))
        if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype not in (torch.int64, torch.int32):
            actual = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            what = f"{key} must be an int64 or int32 tensor [batch, length], not {actual}"
            raise BatchError(what, where=where)
    ids, labels = batch["input_ids"], batch["labels"]
    if ids.shape != labels.shape:
        raise BatchError(f"labels {list(labels.shape)} and input_ids {list(ids.shape)} differ in shape", where=where)
    if ids.numel() == 0:
        raise BatchError("is empty", where=where)
    _check_positions(model, batch, where)
    for key, value in (("input_ids", ids), ("labels", labels[labels != IGNORED])):
        if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < model.vocab_size:
            bad = int(value.min()) if value.min() < 0 else int(value.max())
            raise BatchError(
                f"{key} contains token {bad}, outside the vocabulary of {model.vocab_size}",
                where=where,
                fix="use the model's own tokenizer",
            )
