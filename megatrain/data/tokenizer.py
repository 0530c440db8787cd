"""Loads tokenizers by name and encodes text; the only module in data/ that imports `transformers` and `tokenizers`.

`bytes` is built in, so that a run needs no download: one token per byte, with the byte as its id, and `<|endoftext|>`
with id 256. It is an ordinary Hugging Face tokenizer (byte-level BPE without merges), so it is exported with the model
and loaded by `AutoTokenizer`. Since its ids are the text's UTF-8 bytes, `encode_texts` has a fast path for it, which is
tested against calling the tokenizer.

A document is encoded as plain text: no special tokens are added, and the text of one stays text, so a document cannot
contain an end-of-text token. The libraries are imported on first use, because that takes seconds. Not supported:
tokenizers with their own Python code (`trust_remote_code`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from megatrain.data.token_files import TokenArray
from megatrain.errors import DataError, SampleError, first_line
from megatrain.system import hub_client
from megatrain.system.paths import may_be_hub_name, missing, usable_path

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
Item = TypeVar("Item")

END_OF_TEXT = "<|endoftext|>"
SENTENCEPIECE_MODEL = "tokenizer.model"
CACHED = ("tokenizer_config.json", "tokenizer.json", SENTENCEPIECE_MODEL, "config.json")
"""Files of which the local cache has one if it may have the tokenizer."""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: `bytes`, a local folder, or a name on the Hugging Face hub.

    A hub name is looked up in the local cache first. If it is not there, the hub is asked once, without retries. Raises
    `DataError` if there is no usable tokenizer.
    """
    if name == "bytes":
        return _byte_tokenizer()
    if (folder := _local_folder(name)) is not None:
        return _from_pretrained(str(folder), local=True)
    try:
        return _from_pretrained(name, local=True)
    except DataError:
        _require_reachable(name)
        return _from_pretrained(name, local=False)


PROCESSOR_FIX = "name a model folder with its preprocessor (and pip install torchvision if it asks for that)"


def pretrained_processor(name: str) -> Any:
    """The processor of a folder or a model on the hub, of transformers. Raises `DataError` if none can be loaded."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers passes on whatever its parsers and optional packages raise
        what = f"data.images needs a processor, and none could be loaded ({first_line(error)})"
        raise DataError(what, where=name, fix=PROCESSOR_FIX) from error


def refuse_absent_tokenizer(name: str, known: Iterable[str] = ()) -> None:
    """Raise `DataError` for a name that `load_tokenizer` would not find, with similar names, also among `known`."""
    if name != "bytes" and _local_folder(name) is None and not hub_client.is_cached(name, CACHED):
        _require_reachable(name, known)


def batched(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """The items, in order, in batches that end as their sizes reach `most` together."""
    batch, total = list[Item](), 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= most:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def encode_text(tokenizer: Tokenizer, text: str) -> TokenArray:
    """The ids of `text`, without special tokens; see `encode_texts`."""
    return encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[TokenArray]:
    """The ids of each text as a 1-D array. No special token is added, and the text of one stays text.

    For the byte-level tokenizer the ids are the text's bytes (uint8); any other tokenizer runs its pipeline, in
    parallel. Raises `DataError` for text that is not Unicode (a lone surrogate).
    """
    try:
        if _is_byte_level(tokenizer):
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        if not texts:
            return []
        encoded = tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
    except UnicodeEncodeError as error:
        raise DataError(f"text that is not Unicode ({error.reason})", fix="remove the lone surrogate") from error
    return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]


def require_unicode(text: str, place: str) -> None:
    """Raise `SampleError` for a text that is not Unicode (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = "text that holds a lone surrogate"
        raise SampleError(what, reason="not Unicode", where=place, fix="remove its escape") from error


def encode_with_offsets(
    tokenizer: Tokenizer, texts: Sequence[str], *, special_tokens: Literal["read", "text"]
) -> list[tuple[TokenArray, npt.NDArray[np.int64]]]:
    """(ids, offsets) of each text; offsets, int64 (tokens, 2), are the characters [start, stop) of each token.

    No special token is added. special_tokens: whether the text of one is read as the token or stays text. Raises
    `DataError` if the tokenizer does not provide offsets.
    """
    if not tokenizer.is_fast:
        what = "the tokenizer does not provide the characters of each token"
        raise DataError(what, where=str(tokenizer.name_or_path), fix="use one with a tokenizer.json")
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=special_tokens == "text",
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [
        (np.asarray(ids, dtype=np.int64), np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
        for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into a model's folder so that transformers 4 and llama.cpp's converter read it, too.

    transformers 5 writes new names of the general class and of special tokens without a role, with which version 4
    fails (both know the old ones), and omits the SentencePiece model, the only file from which llama.cpp converts
    Gemma's vocabulary.
    """
    tokenizer.save_pretrained(folder)
    described = folder / "tokenizer_config.json"
    keys = json.loads(described.read_text("utf-8"))
    if keys.get("tokenizer_class") == "TokenizersBackend":
        keys["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(keys.get("extra_special_tokens"), list):
        keys["additional_special_tokens"] = keys.pop("extra_special_tokens")
    described.write_text(json.dumps(keys, indent=2, ensure_ascii=False) + "\n", "utf-8")
    pieces = Path(str(tokenizer.init_kwargs.get("vocab_file")))
    if pieces.name == SENTENCEPIECE_MODEL and pieces.is_file() and not (folder / SENTENCEPIECE_MODEL).exists():
        shutil.copyfile(pieces, folder / SENTENCEPIECE_MODEL)


def leading_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer puts before a text: a beginning-of-text token, or nothing."""
    bare: list[int] = tokenizer("x", add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer("x", add_special_tokens=True)["input_ids"]
    starts = (at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare)
    return full[: next(starts, 0)]


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id that ends a document. Raises `DataError` if the tokenizer has none."""
    eos: int | None = tokenizer.eos_token_id
    if eos is None:
        raise DataError(
            "the tokenizer has no end-of-text token to put between documents",
            where=str(tokenizer.name_or_path),
            fix="set its eos_token and save it to a folder",
        )
    return eos


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """The texts that are read as special tokens, including added ones without a role such as bos or eos."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*tokenizer.all_special_tokens, *added})


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """The largest id plus one, added tokens included: the smallest vocabulary that a model needs."""
    return 1 + max(tokenizer.get_vocab().values())


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """A hash of everything that the ids of a text depend on, independent of where the tokenizer was loaded from."""
    if hasattr(tokenizer, "backend_tokenizer"):
        rules = _rules(tokenizer)
    else:
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return hashlib.sha256(json.dumps([rules, tokenizer.eos_token_id], sort_keys=True).encode()).hexdigest()


def byte_alphabet() -> list[str]:
    """The character of each byte in a byte-level vocabulary, in the order of the bytes.

    Printable bytes of Latin-1 are themselves; the others take the code points from 256 on, as in GPT-2 (Radford et al.,
    2019, `encoder.py`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def _local_folder(name: str) -> Path | None:
    """The folder of that name; `None` for what may be a name on the hub. Raises `DataError` for anything else."""
    folder = usable_path(name, error=DataError)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise DataError("is a file, not a tokenizer folder", where=name, fix=f"name its folder: {folder.parent}")
    if folder.exists() or not may_be_hub_name(name):
        raise missing(folder, DataError)
    return None


@cache
def _byte_tokenizer_rules() -> dict[str, Any]:
    return _rules(_byte_tokenizer())


def _byte_tokenizer() -> Tokenizer:
    import tokenizers
    import transformers

    rules = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[])
    )
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rules.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=rules,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        name_or_path="bytes",
    )


def _rules(tokenizer: Tokenizer) -> dict[str, Any]:
    """A `tokenizers` pipeline as JSON, without truncation and padding, which every call sets."""
    rules: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the ids of plain text are its bytes. Special tokens do not matter, since `encode_texts` reads none."""
    if tokenizer.vocab_size != 256 or not hasattr(tokenizer, "backend_tokenizer"):
        return False
    rules, built_in = _rules(tokenizer), _byte_tokenizer_rules()
    alike = all(rules[name] == built_in[name] for name in ("normalizer", "pre_tokenizer", "model"))
    return alike and all(token["special"] for token in rules["added_tokens"])


def _is_of_a_tokenizer(path: Path) -> bool:
    return path.name.startswith(("tokenizer", "vocab", "merges")) or path.suffix in (".model", ".tiktoken")


def _from_pretrained(name: str, *, local: bool) -> Tokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    fix = "name `bytes`, a folder that `save_pretrained` wrote, or a model on the Hugging Face hub"
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
    except Exception as error:  # transformers passes on whatever its parsers and optional packages raise
        if local and Path(name).is_dir() and not any(map(_is_of_a_tokenizer, Path(name).iterdir())):
            raise DataError("holds no tokenizer (no file like tokenizer.json)", where=name, fix=fix) from error
        raise DataError(f"no tokenizer could be loaded ({first_line(error)})", where=name, fix=fix) from error
    # For a folder with a model configuration only, transformers silently builds an empty vocabulary.
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        raise DataError("holds no tokenizer, or an empty one", where=name, fix=fix)
    _refuse_other_pieces(tokenizer, name)
    if _has_rules_of_its_file(tokenizer, name):
        return tokenizer
    kept = {field: getattr(tokenizer, field) for field in ("padding_side", "truncation_side", "model_input_names")}
    of_file: Tokenizer = PreTrainedTokenizerFast.from_pretrained(name, local_files_only=True, **kept)
    return of_file  # all else is as its class and tokenizer_config.json say


PROBE = " A  b\t'll I'M the1234567 x=Yy9;\r\n\n  é e\u0301 ﬁ Ⅳ ½ 漢字かな🎉\u00a0… don\u2019t </s>  \n "
PROBES = (PROBE, PROBE.strip())
"""Texts that show differences between tokenizers: in what they put before a text, how they normalize and split it."""


def _has_rules_of_its_file(tokenizer: Tokenizer, name: str) -> bool:
    """Whether `tokenizer` encodes `PROBES` as the tokenizer.json from which it was loaded; true if there is none.

    Most classes of transformers 5 take only the vocabulary and the merges from that file, and for some models the
    model's type decides the class. transformers 4, and what reads the file without transformers, follow the file.
    """
    import tokenizers

    file = _file_of(name, "tokenizer.json")
    if file is None or not hasattr(tokenizer, "backend_tokenizer"):
        return True
    return _encoded_probes(tokenizer.backend_tokenizer) == _encoded_probes(tokenizers.Tokenizer.from_file(file))


def _refuse_other_pieces(tokenizer: Tokenizer, name: str) -> None:
    """Raise `DataError` if `tokenizer` was loaded from a SentencePiece model and encodes a probe otherwise.

    transformers 5 takes the pieces from such a file, and neither its normalization nor what it puts before a text. A
    text with a space in front is let pass: the class of Llama 2 drops that space, and is trained so.
    """
    file = _file_of(name, SENTENCEPIECE_MODEL)
    if file is None or _file_of(name, "tokenizer.json"):
        return
    try:
        import sentencepiece

        wanted = sentencepiece.SentencePieceProcessor(model_file=file).encode([PROBES[-1]])
    except (ImportError, RuntimeError):  # a file of that name in the format of tiktoken
        return
    if [ids.tolist() for ids in encode_texts(tokenizer, PROBES[-1:])] != wanted:
        what = f"transformers splits text otherwise than its {SENTENCEPIECE_MODEL}, from which it was loaded"
        raise DataError(what, where=name, fix="add a tokenizer.json that gives the ids of that file")


def _file_of(name: str, file: str) -> str | None:
    """The path of a file of a local folder or a cached repository, or `None`."""
    from transformers.utils.hub import cached_file

    quiet: Any = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    path: str | None = cached_file(name, file, **quiet)
    return path


def _encoded_probes(rules: tokenizers.Tokenizer) -> list[tuple[list[str], list[int]]]:
    """(the pieces into which each of `PROBES` is split before merging, its ids; none if the vocabulary lacks one)."""
    return [_encoded(rules, probe) for probe in PROBES]


def _encoded(rules: tokenizers.Tokenizer, text: str) -> tuple[list[str], list[int]]:
    normal = rules.normalizer.normalize_str(text) if rules.normalizer else text
    pieces = [piece for piece, _ in rules.pre_tokenizer.pre_tokenize_str(normal)] if rules.pre_tokenizer else [normal]
    try:
        return pieces, rules.encode(text, add_special_tokens=False).ids
    except Exception:  # a vocabulary of some words, without a token for all others
        return pieces, []


def _require_reachable(name: str, known: Iterable[str] = ()) -> None:
    """Ask the hub once whether `name` exists, since `from_pretrained` would retry for most of a minute."""
    if reason := hub_client.look_up_model(name)[1]:
        nearest = difflib.get_close_matches(name.lower(), ["bytes"]) or hub_client.nearest_names(name, known)
        fix = f"did you mean {' or '.join(nearest)}?" if nearest else "name a local tokenizer folder, or `bytes`"
        what = "neither a local folder nor in the local cache, and the Hugging Face hub did not provide it"
        raise DataError(f"{what} ({reason})", where=f"tokenizer {name}", fix=fix)
