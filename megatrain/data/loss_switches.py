"""Reads what a row says about which of its messages are trained, in the words of other trainers.

A message is not trained if one of these keys says so:

    weight, loss_weight             0            OpenAI, mistral-finetune; LLaMA-Factory
    loss, loss_scale                false or 0   ms-swift, XTuner
    train, training, trainable      false        Axolotl, Tinker
    loss_mask, step_loss_mask       0            slime
    masked                          true         torchtune

`only_last` (mistral-finetune) of a row trains its last answer only. What cannot be honoured is refused: weights between
0 and 1, messages of which only a part is trained (Axolotl's `train_detail`, such keys in parts of a content), user
messages that are to be trained, such a key as a column of the row, and the names in `UNREAD`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
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
"""Axolotl's keys for the characters of a content that are trained."""
WHOLE_FIX = "train the whole message or none of it, or give the row as token ids with labels"
ONLY_LAST = "only_last"
ROLES_OF_USERS = ("user", "human", "system", "prompt", "")
"""Roles that NeMo's key `mask` of a row names for what is done here anyway."""
WEIGHTS = ("weight", "loss_weight", "loss_scale", "weights", "loss_weights", "sample_weight")
UNREAD: dict[str, bool | None] = {
    **dict.fromkeys(("weights", "loss_weights", "sample_weight", "completion_mask", "assistant_masks"), True),
    **dict.fromkeys(("train_mask", "is_trained"), True),
    **dict.fromkeys(("no_loss", "ignore_loss", "skip"), False),
    "mask": None,  # 1 may mean either
}
"""Names of keys and columns that may say so, but are no trainer's key of a message -> their value if it is trained."""

NUMBER = re.compile(r"\s*\d*\.?\d+\s*")


def as_label(value: Any) -> bool | None:
    """0, 1, true or false, or one of these as text, as a boolean; None for anything else."""
    if isinstance(value, str):
        return {"0": False, "1": True, "false": False, "true": True}.get(value.strip().lower())
    return bool(value) if isinstance(value, int | float | np.integer | np.bool_) and value in (0, 1) else None


def take_switches(messages: Sequence[dict[str, Any]], place: str) -> tuple[tuple[dict[str, Any], ...], set[int]]:
    """(`messages` without the keys that say what is trained, the messages that are not). Raises `SampleError` if the
    keys cannot be honoured. place: of the row, for errors."""
    off = set[int]()
    for index, message in enumerate(messages):
        where = f"message {index + 1}"
        on = is_on(message, where, place)
        if message["role"] != "assistant" and on:
            key = next(key for key in SWITCHES if key in message and key not in ANY_ROLE)
            fix = "remove the key; data.train_on=all trains all text"
            raise _refused(f"{where} ({message['role']}) has {key!r}, but only answers are trained", place, fix)
        if on is False:
            off.add(index)
    return tuple({key: value for key, value in message.items() if key not in SWITCHES} for message in messages), off


def is_on(item: Mapping[str, Any], where: str, place: str) -> bool | None:
    """Whether the keys of a message or of a part say that it is trained; None if they do not say. Raises `SampleError`
    for a value that is neither, and for an unknown key that may say so."""
    said: dict[str, bool] = {}
    for key, value in item.items():
        if _is_missing(value):
            continue
        if key in SWITCHES:
            if (label := as_label(value)) is None:
                what = f"{where} has a {key} of {value!r}"
                raise SampleError(what, reason="fractional weight", where=place, fix="a weight is 0 or 1")
            said[key] = label is SWITCHES[key]
        elif key in DETAILS:
            raise _refused(f"{where} has {key!r}, which trains a part of it", place, WHOLE_FIX)
        elif _may_switch_off(key, value):
            what = f"{where} has {key!r}: {_short(value)}, which may say whether it is trained"
            raise _refused(what, place, "write `train`: true or false in the message, or remove the key")
    if not all(said.values()):
        return False
    return True if said.keys() - {*ANY_ROLE} else None


def join_switches(parts: Sequence[tuple[str, bool | None]], where: str, place: str) -> dict[str, Any]:
    """The key of a message whose content consists of `parts`: (text, whether it is trained, if it says so).

    Raises `SampleError` if only some are trained.
    """
    if all(on is not False for _, on in parts):
        return {}
    if any(text and on is not False for text, on in parts):
        raise _refused(f"{where} has parts that are trained beside others that are not", place, WHOLE_FIX)
    return {"train": False}


def refuse_row_switches(fields: Mapping[str, Any], known: Collection[str], place: str, *, is_text: bool) -> None:
    """Raise `SampleError` for a column that says that the row, or some of it, is not trained, and is not honoured.

    known: the columns that are read. is_text: whether the row is a plain text, whose weights are ignored: they belong
    to the mixing of corpora.
    """
    for name, value in fields.items():
        weighs = name.lower() in WEIGHTS
        if name in known or _is_missing(value) or (weighs and is_text):
            continue
        text = value
        if isinstance(value, str) and NUMBER.fullmatch(value):  # in a CSV file
            value = float(value)
        if isinstance(value, str) and as_label(value) is None:
            refused = name.lower() == "mask" and value.strip().lower() not in ROLES_OF_USERS
        elif isinstance(value, int | float | np.number) and as_label(value) is None:
            refused = weighs  # other numbers are facts: a loss of 2.31
        else:
            refused = _may_switch_off(name, value)
        if refused:
            what = f"{name!r} is {_short(text)}, which may say what of the row is trained"
            raise _refused(what, place, "remove the column, and rows that are not to be trained")


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)  # pandas' nan


def _may_switch_off(name: str, value: Any) -> bool:
    """Whether a name tells what is trained, and this value is not the one of something trained."""
    trained = {**SWITCHES, **UNREAD}
    return name.lower() in trained and (trained[name.lower()] is None or as_label(value) is not trained[name.lower()])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refused(what: str, place: str, fix: str) -> SampleError:
    return SampleError(what, reason="a key that may say what is trained", where=place, fix=fix)
