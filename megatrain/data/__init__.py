"""From a user's text to batches of token ids.

    sources --prepare_tokens--> TokenFile --pack--> Windows --split_windows--> Windows --Loader--> steps

Each arrow takes a value and gives the next. All that can be wrong with data is a `DataError`, raised before
training starts wherever it can be known by then. Left out: chat data and fine-tuning formats.
"""

from megatrain.data.loader import Batch, Loader, evaluation_batches
from megatrain.data.pack import Windows, pack, split_windows, unused_tokens
from megatrain.data.prepare import describe_tokens, prepare_tokens
from megatrain.data.tokenizer import Tokenizer, load_tokenizer, vocabulary_size
from megatrain.data.tokens import TokenFile, open_tokens, write_tokens

__all__ = [
    "Batch",
    "Loader",
    "TokenFile",
    "Tokenizer",
    "Windows",
    "describe_tokens",
    "evaluation_batches",
    "load_tokenizer",
    "open_tokens",
    "pack",
    "prepare_tokens",
    "split_windows",
    "unused_tokens",
    "vocabulary_size",
    "write_tokens",
]
