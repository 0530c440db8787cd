"""What a run notes in `training.json` comes back exactly as it was, or is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.checkpoint.run_state import TRAINING, read_training, write_training
from megatrain.errors import CheckpointError, DamagedCheckpoint

KEYS = st.text(max_size=5).filter(lambda key: not key.startswith("$"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    """Equal in type too, with the sign of a zero, and a not-a-number equal to itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_values_round_trip(tmp_path_factory: pytest.TempPathFactory, training: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("training")
    write_training(folder, training)
    assert same(read_training(folder), training)
    json.loads((folder / TRAINING).read_text(), parse_constant=pytest.fail)  # strict JSON, for any reader


def test_large_and_odd_values_round_trip(tmp_path: Path) -> None:
    training = {
        "rng": bytes(range(256)) * 20,
        "state": 2**1000 + 1,
        "loss": -math.inf,
        "lr": 0.1 + 0.2,
        "text": "a\n\udcff",
    }
    write_training(tmp_path, training)
    assert same(read_training(tmp_path), training)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((1, 2), "training.json, training.loader.place: a tuple cannot be written"),
        ([1, {"a": Path("x")}], r"training.json, training.loader.place\[1\].a: a \w*Path cannot be written"),
        ({1: 2}, "training.json, training.loader.place: the key 1 cannot be written"),
        ({"$bytes": "x"}, r"training.json, training.loader.place: the key '\$bytes' cannot be written"),
    ],
)
def test_values_that_cannot_round_trip_are_refused_with_their_path(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        write_training(tmp_path, {"step": 1, "loader": {"place": value}})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "{}", '{"format": 1}', '{"format": 1, "training": []}', '{"format": "1"}'),
        "[" * 100_000,
        '{"format": 1, "training": {"a": %s}}' % ("[" * 2000 + "]" * 2000),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / TRAINING).write_text(text)
    with pytest.raises(DamagedCheckpoint, match=r"training.json is damaged"):
        read_training(tmp_path)


def test_newer_formats_and_missing_files_have_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"training.json cannot be read \(No such file"):
        read_training(tmp_path)
    (tmp_path / TRAINING).write_text('{"format": 2, "training": {}}')
    with pytest.raises(
        DamagedCheckpoint, match=r"training.json has format 2, but this MegaTrain reads up to 1; use the"
    ):
        read_training(tmp_path)
