"""Checks and stages the micro-batches of a step, before anything is computed or changed.

An entry is for the model, for the loss (its `own`), or refused: what nobody reads was meant for somebody.
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
from megatrain.model import Arguments
from megatrain.spec import Batching, ModelSpec, Work

IGNORED = -100
"""The label that marks a token as no target (Hugging Face convention)."""

MicroBatch = Mapping[str, Any]
"""`input_ids` and `labels`, int64[batch, length], and whatever else the model's forward takes, `attention_mask` say.
`None` is as good as absent."""

NEEDED = ("input_ids", "labels")

ENGINES: dict[str, tuple[Any, str]] = {
    "num_items_in_batch": (
        None,
        "the loss is divided by the step's target tokens: give a loss_fn with another divisor",
    ),
    "use_cache": (False, "nothing is cached between steps: leave it out"),
    "past_key_values": (None, "nothing is cached between steps: leave it out"),
    "inputs_embeds": (None, "the embedding is trained, so give input_ids alone"),
    "logits_to_keep": (0, "which logits are computed is decided by the labels: leave it out"),
    "output_attentions": (False, "attentions are not kept where layers stream: leave it out"),
    "output_hidden_states": (False, "hidden states are not kept where layers stream: leave it out"),
    "output_router_logits": (False, "set output_router_logits in the model's config before the engine is made"),
    "return_dict": (True, "the engine takes the logits out of it: leave it out"),
}
"""Arguments that the engine decides about: the value that it has anyway, and what to do about any other."""

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What collators say of packed samples beside `position_ids`, for kernels that would rather have it so."""


def listed(micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches from whatever gives them. Raises `BatchError` for what is none."""
    if isinstance(micro_batches, Mapping):
        raise BatchError("expected a list of micro-batches, not one", where="step", fix="put it into a list")
    if not isinstance(micro_batches, Iterable) or isinstance(micro_batches, str | bytes | Tensor):
        what = f"expected a list of micro-batches, not {_kind(micro_batches)}"
        raise BatchError(what, where="step", fix="give a list of dicts")
    found = []
    for index, batch in enumerate(micro_batches):
        check_mapping(batch, f"micro-batch {index}")
        found.append(batch)
    return found


STAGED_NBYTES = 64 << 20
"""Of a tensor that is staged, at most: what is larger (a teacher's logits) stays where it is."""


def staged(device: Device, batches: Sequence[MicroBatch], own: Collection[str]) -> list[MicroBatch]:
    """The micro-batches with their tensors where a device copies them from (`Device.staged`).

    own: entries of the loss's own, which stay on a device that they are on.
    """
    plain = [
        (index, key)
        for index, batch in enumerate(batches)
        for key, value in batch.items()
        if _is_plain(value) and (value.device.type == "cpu" or key not in own)
    ]
    found = [dict(batch) for batch in batches]
    tensors = device.staged([batches[index][key] for index, key in plain])
    for (index, key), tensor in zip(plain, tensors, strict=True):
        found[index][key] = tensor
    return list(found)


def _is_plain(value: object) -> bool:
    if type(value) is not Tensor or value.layout != torch.strided or value.device.type not in ("cpu", "cuda"):
        return False
    return value.nbytes <= STAGED_NBYTES


def check_mapping(batch: object, where: str) -> None:
    """Raise `BatchError` for what has no entries by name."""
    if not isinstance(batch, Mapping):
        fix = "give a dict with input_ids and labels"
        raise BatchError(f"is {_kind(batch)}, not a mapping of names to tensors", where=where, fix=fix)


def check_micro_batches(model: ModelSpec, micro_batches: Sequence[MicroBatch], *, alone: bool = True) -> Work:
    """The work of a step. Raises `BatchError` naming the micro-batch, the key and the value that is wrong.

    alone: whether no other rank may have what these lack of target tokens.
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
    alike = lengths[0] if len(set(lengths)) == 1 else None
    return Work(tokens, alike, batching=_rows_of(micro_batches))


def _rows_of(micro_batches: Sequence[MicroBatch]) -> Batching:
    """What rows are, where some are padded or packed."""
    if any(batch.get("position_ids") is not None for batch in micro_batches):
        return "packed"
    return "padded" if any(batch.get("attention_mask") is not None for batch in micro_batches) else "uniform"


def target_mask(batch: MicroBatch) -> Tensor:
    """bool[batch, length]: where a label is a target, which the first of a row never is."""
    mask: Tensor = batch["labels"] != IGNORED
    mask[:, 0] = False
    return mask


def count_targets(batch: MicroBatch) -> int:
    """Target tokens of a micro-batch."""
    return int(target_mask(batch).sum())


def sequences_of(batch: MicroBatch) -> list[tuple[int, int]]:
    """(count, length) of the sequences in a micro-batch: without what a mask hides, and packed ones each for itself.

    Packed are rows without a mask whose positions start again, as `find_packed_sequence_indices` of the library has it.
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
    return [(count, each) for each, count in Counter(lengths.tolist()).items()]


def shifted(labels: Tensor) -> Tensor:
    """The target of each position: its successor's label, and none for the last; int64[batch, length] both."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets


def targets_of(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of a micro-batch that have a target, counted through all rows, and the targets; int64[targets].

    labels: int64[batch, length].
    """
    targets = shifted(labels).reshape(-1)
    places = (targets != IGNORED).nonzero().squeeze(-1)
    return places, targets[places]


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


def for_model(batch: MicroBatch, own: Collection[str] = ()) -> dict[str, Any]:
    """What of a micro-batch the model is given, its labels included: less the entries that are the loss's own, those
    that are `None`, and those that say what the engine does anyway."""
    return {key: value for key, value in batch.items() if key not in own and value is not None and key not in ENGINES}


def check_arguments(arguments: Arguments, batch: MicroBatch, own: Collection[str], where: str) -> None:
    """Raise `BatchError` for an entry that neither the model nor the loss reads, with the nearest name that one does,
    and for one that would have the engine do what it does not. own: entries of the loss's own."""
    for key, value in batch.items():
        if key in NEEDED or key in own or value is None:
            continue
        if key in ENGINES:
            usual, fix = ENGINES[key]
            if not isinstance(value, bool | int) or value != usual:
                raise BatchError(f"{key} cannot be honoured", where=where, fix=fix)
        elif key not in arguments and not _is_so_anyway(key, value, batch):
            raise BatchError(f"nothing reads {key}", where=where, fix=_instead_of(key, arguments, batch, own))


def _is_so_anyway(key: str, value: Any, batch: MicroBatch) -> bool:
    """Whether an entry that nothing reads would change nothing: it says of packed samples what their positions say, or
    hides only the ends of rows, which no token before them sees, and no target is there."""
    if key in PACKED:
        return _says_as_positions_do(key, value, batch)
    ids, labels = batch["input_ids"], batch.get("labels")
    if key != "attention_mask" or not isinstance(value, Tensor) or value.shape != ids.shape:
        return False
    hidden = value.cpu() == 0
    targets = isinstance(labels, Tensor) and bool((labels.cpu()[hidden] != IGNORED).any())
    return not targets and not bool((hidden[:, :-1] & ~hidden[:, 1:]).any())


def _instead_of(key: str, arguments: Arguments, batch: MicroBatch, own: Collection[str]) -> str:
    if key in PACKED:
        return "tell packed samples apart by position_ids, which start again with each"
    known = sorted({*arguments.own, *own, *NEEDED} - ENGINES.keys())
    if near := get_close_matches(str(key).lower(), known, n=1, cutoff=0.75):
        return f"did you mean {near[0]!r}?"
    return f"leave it out, or name it in `own` of a loss that reads it; the model takes {', '.join(known)}"


def _says_as_positions_do(key: str, value: Any, batch: MicroBatch) -> bool:
    """Whether what says where packed samples begin says the same as the positions of the micro-batch do."""
    ids, positions = batch["input_ids"], batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != ids.shape:
        return False
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    try:
        said = torch.as_tensor(value).to(positions.device)
    except (TypeError, ValueError, RuntimeError):
        return False
    if key == "seq_idx":
        if said.numel() != ids.numel():
            return False
        numbers, changes = said.reshape(ids.shape), torch.ones_like(begins)
        changes[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        return torch.equal(changes, begins)
    starts = begins.flatten().nonzero().flatten()
    offsets = torch.cat([starts, starts.new_tensor([ids.numel()])])
    expected = offsets if key.startswith("cu_seq_lens") else offsets.diff().max()
    return torch.equal(said.to(expected.dtype), expected)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _check_positions(model: ModelSpec, batch: MicroBatch, where: str) -> None:
    """Raise `BatchError` for a mask or positions of another shape than the ids, or beyond the model's."""
    ids, mask, places = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
    rows, length = ids.shape
    is_own_kind = mask is None or isinstance(mask, Mapping) or hasattr(mask, "kv_num_blocks")  # or flex_attention's
    if not is_own_kind and not (isinstance(mask, Tensor) and (mask.dim() == 4 or mask.shape == ids.shape)):
        what = f"attention_mask is {_shape(mask)}, and input_ids {_shape(ids)}"
        raise BatchError(what, where=where, fix="give a tensor [batch, length], 1 where a token is and 0 where none is")
    as_long = isinstance(places, Tensor) and places.dim() > 1 and places.shape[-1] == length
    if places is not None and not (as_long and (places.dim() > 2 or len(places) in (1, rows))):
        what = f"position_ids is {_shape(places)}, and input_ids {_shape(ids)}"
        raise BatchError(what, where=where, fix="give an integer tensor [batch, length]")
    last = int(places.max()) + 1 if isinstance(places, Tensor) else length  # texts packed into a row begin anew
    if model.max_positions is not None and last > model.max_positions:
        has = f"the model has {model.max_positions:,} positions"
        if places is not None:
            fix = f"give positions below {model.max_positions:,}, or raise max_position_embeddings in its config"
            raise BatchError(f"position_ids go to {last - 1:,}, but {has}", where=where, fix=fix)
        raise BatchError(f"{length} tokens long, but {has}", where=where, fix="use a shorter window")


def _shape(value: object) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else _kind(value)


def check_inputs(model: ModelSpec, batch: MicroBatch, where: str) -> None:
    """Raise `BatchError` unless ids and labels are integers of one shape that the model can take."""
    for key, value in batch.items():
        if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided):
            what = "has no values (meta device)" if value.is_meta else f"is {value.layout}"
            raise BatchError(f"{key} {what}", where=where, fix="give a dense tensor on the cpu or the device")
    for key in NEEDED:
        value = batch.get(key)
        if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype not in (torch.int64, torch.int32):
            found = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            what = f"{key} must be an int64 or int32 tensor [batch, length], not {found}"
            near = get_close_matches(
                key, [str(name) for name, other in batch.items() if name not in NEEDED and other is not None], n=1
            )
            raise BatchError(what, where=where, fix=f"is {near[0]!r} what is meant?" if near and value is None else "")
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
                f"{key} holds token {bad}, outside the vocabulary of {model.vocab_size}",
                where=where,
                fix="use the tokenizer that belongs to the model",
            )
