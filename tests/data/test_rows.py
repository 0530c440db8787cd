"""Claims about rows of samples, and about the loader over several sources, ranks and workers."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data.encode import EncodedSample
from megatrain.data.loader import Loader
from megatrain.data.packing import Batching, PackedRows, SampleRows, grouped_order, next_source, split_samples
from megatrain.data.sample_cache import SampleFile, is_sample_file, open_samples, write_samples
from megatrain.data.text_sources import pack
from megatrain.data.token_files import write_tokens
from megatrain.errors import DataError
from tests.fork_server import Preloaded

WINDOW = 32
VOCABULARY = 20_000


def encoded(count: int, first: int, longest: int = WINDOW) -> list[EncodedSample]:
    """Samples whose tokens identify them."""
    generator = np.random.default_rng(first)
    samples = []
    for number in range(count):
        length = int(generator.integers(2, longest + 1))
        trained = generator.random(length) < 0.5
        trained[0], trained[-1] = False, True
        samples.append(EncodedSample(np.full(length, first + number, np.int32), trained, f"{number}"))
    return samples


def samples_at(folder: Path, count: int, first: int) -> SampleFile:
    return write_samples(folder / f"samples{first}.bin", encoded(count, first), VOCABULARY, {})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Batching]:
    """Packed samples, windows of text, and packed samples of another file."""
    return sources_in(tmp_path_factory.mktemp("rows"))


def sources_in(folder: Path) -> list[Batching]:
    chats, more = samples_at(folder, 90, 0), samples_at(folder, 40, 1000)
    text = write_tokens(folder / "text.bin", [np.repeat(np.arange(2000, 2070), WINDOW)], VOCABULARY)
    return [
        PackedRows(chats, np.arange(len(chats)), WINDOW, 3),
        pack(text, window=WINDOW, vocab_size=VOCABULARY),
        PackedRows(more, np.arange(len(more)), WINDOW, 3),
    ]


def told(step: list[dict[str, torch.Tensor]]) -> str:
    """A hash of a step's arrays."""
    digest = hashlib.sha256()
    for batch in step:
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name}{list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def loader_of(sources: list[Batching], workers: int = 0, **changed: Any) -> Loader:
    options = {"micro_batch": 3, "micro_batches": 2, "seed": 5, "weights": [5.0, 3.0, 1.0], **changed}
    return Loader(sources, **options).read_ahead(workers)


def test_samples_round_trip(tmp_path: Path) -> None:
    written = encoded(50, 7)
    file = write_samples(tmp_path / "x.bin", written, VOCABULARY, {"note": 1})
    assert is_sample_file(tmp_path / "x.bin")
    assert len(file) == 50
    for number, sample in enumerate(written):
        ids, trained = file.sample(number)
        assert (ids.tolist(), trained.tolist()) == (sample.ids.tolist(), sample.trained.tolist())
        assert file.targets[number] == sample.trained.sum()
    assert not list(tmp_path.glob("*.tmp"))
    other = [EncodedSample(sample.ids, ~sample.trained, sample.origin) for sample in written]
    assert write_samples(tmp_path / "y.bin", other, VOCABULARY, {}).fingerprint != file.fingerprint


def test_one_changed_token_changes_the_fingerprint(tmp_path: Path) -> None:
    """Otherwise a resumed run would silently continue with other rows."""
    samples = [EncodedSample(np.full(1000, 5, np.int32), np.arange(1000) > 0, "")] * 500
    changed = EncodedSample(np.where(np.arange(1000) == 500, 6, 5).astype(np.int32), np.arange(1000) > 0, "")
    one = write_samples(tmp_path / "x.bin", samples, 10, {})
    other = write_samples(tmp_path / "y.bin", [*samples[:333], changed, *samples[334:]], 10, {})
    assert one.fingerprint != other.fingerprint


def test_data_is_flushed_before_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    samples_at(tmp_path, 5, 0)
    assert [Path(name).suffix for name in flushed[:3]] == [".arrow", ".bin", ".json"]


def test_duplicates_of_training_samples_are_not_held_out(tmp_path: Path) -> None:
    samples = encoded(60, 0)
    copied = {5, 25, 45, 55}
    samples += [samples[number] for number in sorted(copied)]
    file = write_samples(tmp_path / "x.bin", samples, VOCABULARY, {})
    training, held_out, copies = split_samples(file, 0.5)
    assert sorted([*training, *held_out]) == list(range(64))
    trained = {file.sample(number)[0].tobytes() for number in training.tolist()}
    assert not [number for number in held_out.tolist() if file.sample(number)[0].tobytes() in trained]
    assert len(held_out) + copies == 32
    assert copies > 0
    training, held_out, copies = split_samples(write_samples(tmp_path / "y.bin", samples[:1] * 9, VOCABULARY, {}), 0.3)
    assert (len(training), len(held_out), copies) == (9, 0, 3)


def test_files_of_several_data_sets_are_refused(tmp_path: Path) -> None:
    for name, count in (("x", 5), ("y", 6)):
        write_samples(tmp_path / f"{name}.bin", encoded(count, 0), VOCABULARY, {})
    (tmp_path / "x.arrow").write_bytes((tmp_path / "y.arrow").read_bytes())
    with pytest.raises(DataError, match="do not belong together"):
        open_samples(tmp_path / "x.bin")
    (tmp_path / "y.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match="is not a sample file"):
        open_samples(tmp_path / "y.bin")
    (tmp_path / "y.arrow").unlink()
    assert not is_sample_file(tmp_path / "y.bin")
    with pytest.raises(DataError, match="is not a sample file"):
        open_samples(tmp_path / "y.bin")


def test_a_failed_encoding_leaves_no_samples(tmp_path: Path) -> None:
    def fails() -> Any:
        yield from encoded(3, 0)
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        write_samples(tmp_path / "x.bin", fails(), VOCABULARY, {})
    assert list(tmp_path.iterdir()) == []


def test_a_packed_row_has_whole_samples_with_restarting_positions(tmp_path: Path) -> None:
    file = samples_at(tmp_path, 60, 0)
    rows = PackedRows(file, np.arange(10, 60), WINDOW, 0)
    seen: Counter[int] = Counter()
    for number in range(len(rows)):
        row = rows.row(number)
        assert row.positions is not None
        starts = np.flatnonzero(row.positions == 0)
        for start, stop in itertools.pairwise([*starts, len(row.ids)]):
            (sample,) = set(row.ids[start:stop].tolist())
            ids, trained = file.sample(sample)
            assert stop - start == len(ids)
            assert row.positions[start:stop].tolist() == list(range(len(ids)))
            assert (row.labels[start:stop] != -100).tolist() == trained.tolist()
            seen[sample] += 1
        assert rows.targets(number) == (row.labels != -100).sum()
    assert seen == Counter(range(10, 60))
    assert 0.9 < rows.efficiency <= 1


@pytest.mark.parametrize("packed", [True, False])
def test_padding_is_masked_and_separate(tmp_path: Path, packed: bool) -> None:
    file, every = samples_at(tmp_path, 30, 1), np.arange(30)
    rows = PackedRows(file, every, WINDOW, 0) if packed else SampleRows(file, every, 4)
    for batch in next(Loader(rows, micro_batch=4, micro_batches=3, seed=1)):
        assert set(batch) == {"input_ids", "labels", "position_ids" if packed else "attention_mask"}
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())
        padding = batch["input_ids"] == 0  # no sample holds it
        assert bool((batch["labels"][padding] == -100).all())
        if packed:
            first = padding & ~torch.nn.functional.pad(padding, (1, 0))[:, :-1]
            assert bool((batch["position_ids"][first] == 0).all())
        else:
            assert torch.equal(batch["attention_mask"] == 0, padding)


def test_similar_lengths_are_grouped_in_random_order() -> None:
    lengths = np.random.default_rng(0).integers(2, 500, 4000)
    order = grouped_order(1, 0, lengths, 8)
    assert sorted(order.tolist()) == list(range(4000))
    assert order.tolist() != grouped_order(1, 1, lengths, 8).tolist()
    groups = lengths[order].reshape(-1, 8)
    assert groups.sum() / (groups.max(axis=1) * 8).sum() > 0.97
    means = groups.mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2  # batches of all lengths, not from short to long


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(1, 300))
def test_sources_keep_close_to_their_shares(weights: list[float], draws: int) -> None:
    positions = [0] * len(weights)
    for _ in range(draws):
        positions[next_source(positions, weights)] += 1
    for position, weight in zip(positions, weights, strict=True):
        assert abs(position - draws * weight / sum(weights)) < len(weights)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.3])
def test_held_out_samples_are_evenly_spaced_and_no_others(tmp_path: Path, fraction: float) -> None:
    file = samples_at(tmp_path, 50, 0)
    training, held_out, copies = split_samples(file, fraction)
    assert copies == 0
    assert sorted([*training, *held_out]) == list(range(50))
    assert len(held_out) == (max(1, round(50 * fraction)) if fraction else 0)
    assert len(held_out) < 2 or np.ptp(np.diff(held_out)) <= 1


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_the_number_of_workers_changes_nothing(sources: list[Batching], workers: int) -> None:
    alone = [told(step) for step in itertools.islice(loader_of(sources), 30)]
    loader = loader_of(sources, workers=workers)
    assert [told(step) for step in itertools.islice(loader, 30)] == alone
    state = loader.state_dict()
    ahead = told(next(loader))
    loader.load_state_dict(state)
    assert told(next(loader)) == ahead
    loader.close()
    assert told(next(loader)) == told(next(itertools.islice(loader_of(sources), 31, None)))


def test_read_ahead_is_bounded(sources: list[Batching], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(
        PackedRows, "row", lambda self, index, row=PackedRows.row: read.append(index) or row(self, index)
    )
    loader = Loader(sources[0], micro_batch=2, micro_batches=2, seed=0).read_ahead(3)
    next(loader)
    time.sleep(0.2)
    assert len(read) <= 4 * (3 + 1)
    loader.close()


@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(1, 4), steps=st.integers(1, 12), targets=st.none() | st.integers(1, 200))
def test_ranks_split_a_step_without_overlap_or_loss(
    sources: list[Batching], ranks: int, steps: int, targets: int | None
) -> None:
    count = ranks + 1
    shares = [{"part": (rank, ranks), "targets": targets} for rank in range(ranks)]
    loaders = [loader_of(sources, micro_batches=count, **share) for share in shares]
    single = loader_of(sources, micro_batches=count)
    for _ in range(steps):
        parts = [next(loader) for loader in loaders]
        whole = [batch for batches in zip_longest(*parts) for batch in batches if batch is not None]
        assert [len(part) for part in parts] == [len(whole[rank::ranks]) for rank in range(ranks)]
        if targets is not None:
            single.micro_batches = len(whole)
            assert sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in whole) >= targets
        assert told(next(single)) == told(whole)
    assert all(loader.state_dict() == single.state_dict() for loader in loaders)


def test_a_state_fits_another_number_of_ranks(sources: list[Batching]) -> None:
    one = loader_of(sources, micro_batches=4)
    next(one)
    two = [loader_of(sources, part=(rank, 2), micro_batches=4) for rank in range(2)]
    for loader in two:
        loader.load_state_dict(one.state_dict())
    parts = [next(loader) for loader in two]
    assert told([batch for pair in zip(*parts, strict=True) for batch in pair]) == told(next(one))


def test_a_state_of_other_sources_or_weights_is_refused(sources: list[Batching]) -> None:
    state = json.loads(json.dumps(loader_of(sources).state_dict()))
    for other in (
        loader_of(sources, weights=[1.0, 1.0, 1.0]),
        loader_of(sources[::-1]),
        loader_of(sources[:1], weights=None),
    ):
        with pytest.raises(DataError, match=r"loader state: was saved with"):
            other.load_state_dict(state)


def told_for_ever(folder: Path) -> None:
    loader = loader_of(sources_in(folder), workers=3)
    for step in loader:
        print(json.dumps([told(step), loader.state_dict()]), flush=True)


def test_a_killed_run_continues_the_same_stream(preloaded: Preloaded, tmp_path: Path) -> None:
    """Mixed, packed, shuffled, with workers, and killed in the middle of an epoch."""
    (tmp_path / "child").mkdir()
    child = preloaded.start(told_for_ever, tmp_path / "child")
    try:
        while child.said.count("\n") < 9:
            assert child.poll() is None, child.said
            time.sleep(0.01)
    finally:
        child.kill()
    child.wait()
    printed = child.said.splitlines()[:9]
    hashes, states = zip(*map(json.loads, printed), strict=True)
    rows = sources_in(tmp_path)
    whole = [told(step) for step in itertools.islice(loader_of(rows), 40)]
    assert list(hashes) == whole[:9]
    assert 0 < states[-1]["positions"][0] % len(rows[0]) < len(rows[0])
    resumed = loader_of(rows, workers=2)
    resumed.load_state_dict(states[-1])
    assert [told(step) for step in itertools.islice(resumed, 31)] == whole[9:]
    resumed.close()


def test_a_loader_is_much_faster_than_a_step_in_constant_memory(tmp_path: Path) -> None:
    """A step of the cpu takes thousands of tokens a second. Measured in time of the cpu, which a busy machine does not
    stretch.
    """
    file = write_samples(tmp_path / "x.bin", encoded(2000, 0, longest=500), VOCABULARY, {})
    loader = Loader(PackedRows(file, np.arange(2000), 1024, 0), micro_batch=4, micro_batches=4, seed=0)
    began, before = time.process_time(), psutil.Process().memory_info().rss
    tokens = sum(batch["input_ids"].numel() for step in itertools.islice(loader, 20) for batch in step)
    assert tokens / (time.process_time() - began) > 1e6
    assert psutil.Process().memory_info().rss - before < 64 << 20
