"""Claims about the loader: position alone decides what comes next, and nothing is dropped."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.loader import Loader, evaluation_batches
from megatrain.data.packing import epoch_order
from megatrain.data.text_sources import Windows, pack, split_windows
from megatrain.data.token_files import write_tokens
from megatrain.errors import DataError

WINDOW = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loader")


def windows_of(folder: Path, count: int, name: str = "x") -> Windows:
    """`count` windows; the first token of each identifies it."""
    ids = np.arange(count * WINDOW)
    return pack(write_tokens(folder / f"{name}.bin", [ids], len(ids)), window=WINDOW, vocab_size=len(ids))


def taken(loader: Loader, steps: int) -> list[int]:
    """The numbers of the windows in the next `steps` steps."""
    batches = [batch for step in itertools.islice(loader, steps) for batch in step]
    return [index // WINDOW for batch in batches for index in batch["input_ids"][:, 0].tolist()]


def epochs_slowly(seed: int, count: int) -> Iterator[int]:
    """The slow reference: the orders of all epochs, one after another."""
    for epoch in itertools.count():
        numbers = np.random.Philox(key=[seed, epoch]).random_raw(count).tolist()
        yield from sorted(range(count), key=numbers.__getitem__)


shapes = st.tuples(st.integers(1, 5), st.integers(1, 4))


@given(count=st.integers(1, 30), seed=st.integers(0, 1 << 62), shape=shapes, steps=st.integers(1, 8))
def test_the_row_stream_is_consecutive_epochs(
    folder: Path, count: int, seed: int, shape: tuple[int, int], steps: int
) -> None:
    size, number = shape
    loader = Loader(windows_of(folder, count), micro_batch=size, micro_batches=number, seed=seed)
    found = taken(loader, steps)
    assert found == list(itertools.islice(epochs_slowly(seed, count), steps * size * number))
    whole = len(found) // count * count
    assert all(sorted(found[i : i + count]) == list(range(count)) for i in range(0, whole, count))


@given(count=st.integers(1, 30), seed=st.integers(0, 99), shape=shapes, after=shapes, steps=st.integers(0, 8))
def test_a_resumed_loader_continues_exactly_at_any_micro_batch_size(
    folder: Path, count: int, seed: int, shape: tuple[int, int], after: tuple[int, int], steps: int
) -> None:
    windows = windows_of(folder, count)
    saved = Loader(windows, micro_batch=shape[0], micro_batches=shape[1], seed=seed)
    before = taken(saved, steps)
    state = json.loads(json.dumps(saved.state_dict()))
    resumed = Loader(windows, micro_batch=after[0], micro_batches=after[1], seed=seed)
    taken(resumed, 1)  # its own position must not matter
    resumed.load_state_dict(state)
    found = before + taken(resumed, 3)
    assert found == list(itertools.islice(epochs_slowly(seed, count), len(found)))
    resumed.load_state_dict(state)
    if shape == after:
        for old, new in zip(next(saved), next(resumed), strict=True):
            assert torch.equal(old["input_ids"], new["input_ids"])


def test_a_step_is_micro_batches_of_int64_windows_with_equal_labels(folder: Path) -> None:
    step = next(Loader(windows_of(folder, 7), micro_batch=2, micro_batches=3, seed=0))
    assert len(step) == 3
    for batch in step:
        assert set(batch) == {"input_ids", "labels"}
        assert batch["input_ids"].shape == (2, WINDOW)
        assert batch["input_ids"].dtype == torch.int64
        assert torch.equal(batch["labels"], batch["input_ids"])
        first = batch["input_ids"][:, :1]
        assert torch.equal(batch["input_ids"], first + torch.arange(WINDOW))  # each row is one whole window


def test_each_seed_and_epoch_has_a_fixed_order() -> None:
    orders = [tuple(epoch_order(seed, epoch, 50)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    # Fixed: a change of this order would break the resume of every saved run.
    assert epoch_order(1, 2, 10).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


@pytest.mark.parametrize(
    ("key", "value"),
    [("version", 0), ("seed", 8), ("dataset", "another"), ("window", 5), ("first", 1), ("windows", 11), ("seed", None)],
)
def test_another_runs_state_is_refused_without_side_effects(folder: Path, key: str, value: Any) -> None:
    loader = Loader(windows_of(folder, 10), micro_batch=2, micro_batches=1, seed=7)
    taken(loader, 3)
    with pytest.raises(DataError, match=f"was saved with {key} = {value!r}") as caught:
        loader.load_state_dict({**loader.state_dict(), "position": 2, key: value})
    assert "\n" not in str(caught.value)
    assert loader.position == 6


@pytest.mark.parametrize("position", [-1, None, 2.0, "3"])
def test_a_state_without_a_position_is_refused(folder: Path, position: Any) -> None:
    loader = Loader(windows_of(folder, 10), micro_batch=2, micro_batches=1, seed=7)
    with pytest.raises(DataError, match="is not a number of rows"):
        loader.load_state_dict({**loader.state_dict(), "position": position})


def test_other_text_of_the_same_length_is_another_dataset(folder: Path) -> None:
    windows = windows_of(folder, 10)
    other = write_tokens(folder / "other.bin", [np.arange(10 * WINDOW)[::-1]], 10 * WINDOW)
    state = Loader(windows, micro_batch=1, micro_batches=1, seed=0).state_dict()
    changed = Loader(pack(other, window=WINDOW, vocab_size=10 * WINDOW), micro_batch=1, micro_batches=1, seed=0)
    with pytest.raises(DataError, match="dataset"):
        changed.load_state_dict(state)


def test_a_failed_read_does_not_advance_the_position(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(windows_of(folder, 3), micro_batch=2, micro_batches=1, seed=0)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(Windows, "row", None)
        next(loader)
    assert loader.position == 0
    next(loader)
    assert loader.position == 2


@given(count=st.integers(2, 20), size=st.integers(1, 6), limit=st.none() | st.integers(0, 30))
def test_evaluation_takes_the_first_windows_in_order(folder: Path, count: int, size: int, limit: int | None) -> None:
    _, held_out = split_windows(windows_of(folder, 2 * count), 0.5)
    assert held_out is not None
    batches = list(evaluation_batches(held_out, size, limit))
    found = [row // WINDOW for batch in batches for row in batch["labels"][:, 0].tolist()]
    assert found == list(range(count, 2 * count))[:limit]
    assert all(len(batch["input_ids"]) == size for batch in batches[:-1])


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    shape=shapes,
    ranks=st.integers(1, 3),
    epochs=st.sampled_from([0.1, 0.5, 1.0, 2.0, 2.3]),
    targets=st.sampled_from([None, 1, 7, 30]),
)
def test_epochs_end_at_the_first_step_that_has_seen_enough_rows(
    folder: Path, counts: list[int], shape: tuple[int, int], ranks: int, epochs: float, targets: int | None
) -> None:
    sources = [windows_of(folder, count, f"epochs{index}") for index, count in enumerate(counts)]
    size, number = shape[0], max(ranks, shape[1])
    loader = Loader(sources, micro_batch=size, micro_batches=number, seed=3, targets=targets, part=(0, ranks))
    steps = loader.steps_in(epochs)
    assert loader.position == loader.epoch == 0
    seen = [0]
    for _ in itertools.islice(loader, steps):
        seen.append(loader.position)
    wanted = round(10 * epochs) * sum(counts)  # in tenths of a row
    assert 10 * seen[-2] < wanted <= 10 * seen[-1]
    assert loader.epoch == seen[-1] / sum(counts)
    assert loader.epochs_in(steps) == (loader.epoch if targets is None else None)


def test_epochs_per_source_follow_the_rows_drawn(folder: Path) -> None:
    sources = [windows_of(folder, 4, "few"), windows_of(folder, 12, "many")]
    for weights in (None, [1.0, 1.0]):
        loader = Loader(sources, micro_batch=2, micro_batches=4, seed=3, weights=weights)
        passes = loader.passes(loader.steps_in(3))
        assert passes == ([3.0, 3.0] if weights is None else [6.0, 2.0])
        taken(loader, loader.steps_in(3))
        assert [drawn / len(source) for drawn, source in zip(loader.positions, sources, strict=True)] == passes
