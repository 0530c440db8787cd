"""Turns text into batches of token ids, and samples into token ids with label masks.

    sources --prepare_tokens--> TokenFile --pack--> Windows --split_windows--> Windows --Loader--> steps
    sources --prepare_samples--> SampleFile --PackedRows or SampleRows--> Loader

Whatever is wrong with data is a `DataError`, raised before training starts if it can be found by then.
"""

from megatrain.data.detect_kind import (
    begins_with_text,
    has_splits,
    holds_samples,
    is_described,
    is_of_hub,
    require_source,
    source_called,
)
from megatrain.data.encode import EncodeOptions, Encoder, try_to_render, turn_ends
from megatrain.data.files import about_tokens
from megatrain.data.loader import Batch, Loader, batch_of, evaluation_batches, source_seed
from megatrain.data.packing import Batching, PackedRows, Reference, SampleRows, copies, split_samples
from megatrain.data.sample_cache import (
    EncodingProgress,
    SampleFile,
    example_of,
    holds_chats,
    holds_pairs,
    holds_text_only,
    holds_unpaired,
    prepare_samples,
    statistics_of,
)
from megatrain.data.sample_formats import Schema
from megatrain.data.sample_sources import Source
from megatrain.data.stream_rows import StreamRows
from megatrain.data.text_sources import describe_tokens, pack, prepare_tokens, split_windows, unused_tokens
from megatrain.data.token_files import TokenFile
from megatrain.data.tokenizer import (
    Tokenizer,
    load_tokenizer,
    refuse_absent_tokenizer,
    save_tokenizer,
    vocabulary_size,
)

__all__ = [
    "Batch",
    "Batching",
    "EncodeOptions",
    "Encoder",
    "EncodingProgress",
    "Loader",
    "PackedRows",
    "Reference",
    "SampleFile",
    "SampleRows",
    "Schema",
    "Source",
    "StreamRows",
    "TokenFile",
    "Tokenizer",
    "about_tokens",
    "batch_of",
    "begins_with_text",
    "copies",
    "describe_tokens",
    "evaluation_batches",
    "example_of",
    "has_splits",
    "holds_chats",
    "holds_pairs",
    "holds_samples",
    "holds_text_only",
    "holds_unpaired",
    "is_described",
    "is_of_hub",
    "load_tokenizer",
    "pack",
    "prepare_samples",
    "prepare_tokens",
    "refuse_absent_tokenizer",
    "require_source",
    "save_tokenizer",
    "source_called",
    "source_seed",
    "split_samples",
    "split_windows",
    "statistics_of",
    "try_to_render",
    "turn_ends",
    "unused_tokens",
    "vocabulary_size",
]
