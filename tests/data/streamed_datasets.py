"""Streams of short rows, in blocks of a few: how they are made, and what they give."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import stream_rows
from megatrain.data.encode import EncodeOptions, Encoder
from megatrain.data.loader import Loader
from megatrain.data.packing import TrainingRow
from megatrain.data.sample_sources import Source
from megatrain.data.stream_rows import Packing, StreamRows
from megatrain.data.tokenizer import load_tokenizer

WINDOW = 24
TOKENIZER = load_tokenizer("bytes")


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """A few rows are many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("READ_ROWS", 3), ("BLOCK_ROWS", 8), ("BLOCK_SEQUENCES", 2), ("CACHED_STARTS", 5)):
            patch.setattr(stream_rows, name, value)
        yield


def stream(path: Path | str, how: Packing = "grouped", seed: int = 5, **more: Any) -> StreamRows:
    options = EncodeOptions(max_tokens=None if how == "windows" else WINDOW)
    encoder = Encoder(TOKENIZER, options)
    return StreamRows(Source(str(path)), encoder, how, window=WINDOW, micro_batch=2, seed=seed, **more)


def loader(path: Path | str, how: Packing = "grouped", workers: int = 0, **more: Any) -> Loader:
    return Loader(stream(path, how), **{"micro_batch": 2, "micro_batches": 2, "seed": 5, **more}).read_ahead(workers)


def steps(found: Loader, count: int) -> list[list[dict[str, list[Any]]]]:
    return [[{name: part.tolist() for name, part in each.items()} for each in step] for step in islice(found, count)]


def text(row: TrainingRow) -> str:
    return bytes(row.ids[:-1].tolist()).decode()
