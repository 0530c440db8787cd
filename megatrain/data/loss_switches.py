"""Reads what a row says about which of its messages are trained, in the words of other trainers.

A message is not trained if one of these keys says so:

    weight, loss_weight             0            OpenAI, mistral-finetune; LLaMA-Factory
    loss, loss_scale                false or 0   ms-swift, XTuner
    train, training, trainable      false        Axolotl, Tinker
    loss_mask, step_loss_mask       0            slime
    masked                          true         torchtune

`train_detail` (Axolotl) lists the characters of a content that are trained, as {"begin_offset", "end_offset", "train"}
with the last character included; so do these keys in the parts of a content. `only_last` (mistral-finetune) of a row
trains its last answer only. What cannot be honoured is refused: weights between 0 and 1, user messages that are to be
trained, and unknown keys with the words of such a key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from megatrain.errors import SampleError

SWITCHES = {
    **dict.fromkeys(("weight", "loss_weight", "loss", "loss_scale", "train", "training", "trainable"), True),
    **dict.fromkeys(("loss_mask", "step_loss_mask"), True),
    "masked": False,
}
"""Key of a message or part -> its value if that is trained."""
ANY_ROLE = ("weight", "loss_mask", "step_loss_mask")
"""Keys that their trainers give to messages of any role, and read in the assistant's."""
DETAILS = ("train_detail", "training_detail")
ONLY_LAST = "only_last"
WEIGHTS_OF_ROWS = ("weight", "loss_weight", "sample_weight", "loss_scale", "loss_multiplier")
ROLES_OF_USERS = ("user", "human", "system", "prompt", "")
"""Roles that NeMo's key `mask` of a row names for what is done here anyway."""
ON_WORDS = {*("loss", "train", "trains", "training", "trained", "trainable", "learn", "learned", "learnable")} | {
    *("supervise", "supervised", "weight", "weights", "backprop")
}
OFF_WORDS = {"mask", "masks", "masked", "ignore", "ignored", "skip", "skipped", "exclude", "excluded", "untrained"}
NEGATIONS = {"no", "not", "without", "non", "never"}
OTHER_MASKS = ("attention_mask", "special_tokens_mask")
FIX = "write `train`: true or false in the message, or remove the key"

Parts = tuple[tuple[int, int], ...]
"""Characters [start, stop) of a content."""


@dataclass(frozen=True)
class Switches:
    """Which messages of a row its keys leave out of training. off: wholly. parts: message -> the trained characters of
    its content."""

    off: frozenset[int] = frozenset()
    parts: Mapping[int, Parts] = field(default_factory=dict)


def as_label(value: Any) -> bool | None:
    """0, 1, true or false, or one of these as text, as a boolean; None for anything else."""
    if isinstance(value, str):
        return {"0": False, "1": True, "false": False, "true": True}.get(value.strip().lower())
    return bool(value) if isinstance(value, int | float | np.integer | np.bool_) and value in (0, 1) else None


def take_switches(messages: Sequence[dict[str, Any]], place: str) -> tuple[tuple[dict[str, Any], ...], Switches]:
    """(`messages` without the keys that say what is trained, what they say). Raises `SampleError` if that cannot be
    honoured. place: of the row, for errors."""
    off, parts = set[int](), dict[int, Parts]()
    for index, message in enumerate(messages):
        where = f"message {index + 1}"
        on = is_on(message, where, place)
        ranges = next((_ranges(message, key, where, place) for key in DETAILS if key in message), None)
        if message["role"] != "assistant":
            key = next((key for key in (*SWITCHES, *DETAILS) if key in message and key not in ANY_ROLE), None)
            if on or (on is None and ranges):
                fix = "remove the key; data.train_on=all trains all text"
                raise _refused(f"{where} ({message['role']}) has {key!r}, but only answers are trained", place, fix)
        if on is False or (on is None and ranges == ()):
            off.add(index)
        elif ranges is not None:
            parts[index] = ranges
    known = {*SWITCHES, *DETAILS}
    return tuple({key: value for key, value in each.items() if key not in known} for each in messages), Switches(
        frozenset(off), parts
    )


def is_on(item: Mapping[str, Any], where: str, place: str) -> bool | None:
    """Whether the keys of a message or of a part say that it is trained; None if they do not say. Raises `SampleError`
    for a value that is neither, and for an unknown key that may say so."""
    said: list[tuple[str, bool]] = []
    for key, value in item.items():
        if key in SWITCHES and value is not None:
            if (label := as_label(value)) is None:
                what = f"{where} has a {key} of {value!r}"
                raise SampleError(what, reason="fractional weight", where=place, fix="a weight is 0 or 1")
            said.append((key, label is SWITCHES[key]))
        elif key not in DETAILS and _may_switch(key, value):
            raise _refused(f"{where} has {key!r}: {_short(value)}, which may say whether it is trained", place, FIX)
    if not all(on for _, on in said):
        return False
    return True if any(key not in ANY_ROLE for key, _ in said) else None


def join_switches(parts: Sequence[tuple[str, str, bool | None]], where: str, place: str) -> dict[str, Any]:
    """The key of a message whose content consists of `parts`: (kind, text, whether it is trained, if it says so).

    Raises `SampleError` if only some are trained and they are not all text.
    """
    if all(on is not False for _, _, on in parts):
        return {}
    if all(on is False for _, text, on in parts if text):
        return {"train": False}
    if any(kind != "text" for kind, _, _ in parts):
        what = f"{where} has parts that are not trained beside reasoning or calls"
        raise _refused(what, place, "write the message as several, or train all of its parts")
    details, start = list[dict[str, Any]](), 0
    for _, text, on in parts:
        if text:
            details.append({"begin_offset": start, "end_offset": start + len(text) - 1, "train": on is not False})
        start += len(text)
    return {DETAILS[0]: details}


def refuse_row_switches(fields: Mapping[str, Any], known: Collection[str], place: str, *, is_text: bool) -> None:
    """Raise `SampleError` for a column that says that the row, or some of it, is not trained, and is not honoured.

    known: the columns that are read. is_text: whether the row is a plain text, whose weights are ignored: they belong
    to the mixing of corpora.
    """
    for name, value in fields.items():
        if value is None or name in known or name in OTHER_MASKS:
            continue
        plain = name.lower()
        weighs = plain in WEIGHTS_OF_ROWS and as_label(value) is not True and not is_text
        is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
        switches = isinstance(value, bool | np.bool_) or (is_list and _are_numbers(value))
        masks = plain == "mask" and isinstance(value, str) and value.strip().lower() not in ROLES_OF_USERS
        if (weighs and not isinstance(value, str)) or masks or (switches and _may_switch(name, value)):
            what = f"{name!r} is {_short(value)}, which may say what of the row is trained"
            raise _refused(what, place, f"remove the column; {FIX}")


def _may_switch(key: str, value: Any) -> bool:
    """Whether an unknown key may say that something is not trained: by the words of its name, unless the value is what
    it has for something trained."""
    words = {*re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower())}
    if not words & (ON_WORDS | OFF_WORDS) or (isinstance(value, str) and as_label(value) is None) or value is None:
        return False
    if words & {"mask", "masks"}:  # 1 may mean either
        return True
    return as_label(value) is not (not words & (OFF_WORDS | NEGATIONS))


def _ranges(message: Mapping[str, Any], key: str, where: str, place: str) -> Parts:
    """The trained characters of a content by its `train_detail`, in order and disjoint."""
    details, content = message[key], message.get("content")
    wrong = "content is no text" if not isinstance(content, str) else ""
    trained = np.zeros(len(content or ""), dtype=np.bool_)
    for detail in details if isinstance(details, Sequence) and not isinstance(details, str) else [None]:
        entry = detail if isinstance(detail, Mapping) else {}
        begin, end, on = entry.get("begin_offset"), entry.get("end_offset"), as_label(entry.get("train"))
        if on is None or not isinstance(begin, int) or not isinstance(end, int) or begin < 0:
            wrong = 'an entry is not {"begin_offset", "end_offset", "train"}'
        elif on:
            trained[begin : end + 1] = True
    if wrong:
        raise _refused(f"{where} has a {key} that cannot be used: {wrong}", place, "correct it")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(np.int8), [0]]))).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _are_numbers(values: Sequence[Any] | np.ndarray[Any, Any]) -> bool:
    first = list(islice(values, 10))
    return bool(first) and all(isinstance(each, bool | int | float | np.number | np.bool_) for each in first)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refused(what: str, place: str, fix: str) -> SampleError:
    return SampleError(what, reason="a key that may say what is trained", where=place, fix=fix)


__all__ = [
    "ONLY_LAST",
    "Parts",
    "Switches",
    "as_label",
    "is_on",
    "join_switches",
    "refuse_row_switches",
    "take_switches",
]
