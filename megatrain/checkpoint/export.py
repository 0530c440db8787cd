"""Exports a Hugging Face folder with a model card from the float32 masters, piece by piece, all or nothing."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain.checkpoint.range_writer import TensorWriter, writing_ranges
from megatrain.checkpoint.safetensors_writer import Shard, plan_shards, write_index
from megatrain.checkpoint.tensor_pieces import TensorPiece, tensor_pieces
from megatrain.errors import ExportError, MegaTrainError
from megatrain.formatting import at_least, at_most
from megatrain.model import PortedModel, Written, WrittenTensor, written_of, written_precision
from megatrain.spec import Precision
from megatrain.spec.validate_fields import checked
from megatrain.system.atomic import appearing
from megatrain.system.paths import usable_path

# The model card -------------------------------------------------------------------------------------------------------
#
# The card says what the model is, how to load it, and the caller's facts: nothing that was not measured or configured.


_CARD = """---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- megatrain
---

# {title}

{summary} Exported by MegaTrain.

## How to load it

```python
{loading}
```
{facts}
## What this card does not say

It was written by a program. Purpose, licence, origin of the data, evaluation and limits are for whoever publishes the
model to add.
"""


_PIPELINES = {"AutoModelForImageTextToText": "image-text-to-text", "AutoModelForMultimodalLM": "any-to-any"}
"""Auto class -> the hub's name of what its models do; for all others `text-generation`."""

_FIRST = {"base": '"path/to/its/base"', "PeftModel": 'base, "path/to/this/folder"'}
"""Variable or class -> first arguments of its `from_pretrained`, if they are not this folder alone."""


def model_card(title: str, summary: str, classes: Mapping[str, str], arguments: str, facts: Mapping[str, str]) -> str:
    """The text of README.md.

    summary: one sentence about the model. classes: variable -> the class that loads it; `base` is that of an adapter.
    arguments: further arguments of `from_pretrained` after the folder, with a leading comma. facts: rows of the table
    of training facts; no table if empty.
    """
    homes = {kind: "peft" if "Peft" in kind else "transformers" for kind in classes.values()}
    loading = [
        f"from {home} import {', '.join(kind for kind in homes if homes[kind] == home)}"
        for home in dict.fromkeys(homes.values())
    ]
    loading.append("")
    for variable, kind in classes.items():
        first = _FIRST.get(variable) or _FIRST.get(kind, '"path/to/this/folder"')
        loading.append(f"{variable} = {kind}.from_pretrained({first}{arguments})")
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()]
    table = "\n".join(["", "## Training", "", "| | |", "|---|---|", *rows, ""]) if rows else ""
    pipeline = next((_PIPELINES[kind] for kind in classes.values() if kind in _PIPELINES), "text-generation")
    return _CARD.format(pipeline=pipeline, title=title, summary=summary, loading="\n".join(loading), facts=table)


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


# The folder -----------------------------------------------------------------------------------------------------------
#
# Everything about the weight files is known before the first byte (`model.WrittenModel`), so space is checked first.
# Then masters are read by ranges, as the names and layout of original checkpoints want them, rounded and written. The
# caller supplies masters, and may add a tokenizer before the folder appears.


SHARD_NBYTES = 4 << 30
"""Maximum bytes of tensors in one file, unless a single tensor is larger."""

_LIBRARY_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".md", ".txt", ".py")
_TOKENIZER_SUFFIXES = (".tiktoken", ".spm", ".bpe", ".vocab")
MODEL_SUFFIXES = (*_LIBRARY_SUFFIXES, *_TOKENIZER_SUFFIXES)
"""Suffixes of files in a Hugging Face model folder."""
MODEL_FOLDERS = ("additional_chat_templates",)

_WRITTEN_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class ExportOptions(TypedDict, total=False):
    """Keyword arguments of all functions that write a model (see `export_pieces`)."""

    precision: Precision | None
    """`fp32` writes the masters, `bf16` rounds them to nearest even; buffers keep their dtype. `None` (default) is
    `fp32`, or `bf16` for a model that was published quantized."""
    shard_nbytes: int
    """Maximum bytes of tensors in one file."""
    facts: Mapping[str, str] | None
    """Rows of the model card's table of training facts."""
    write_more: Callable[[Path], object] | None
    """Called with the folder before it appears, to add a tokenizer, say; its README.md, if any, replaces our card."""
    progress: Callable[[int, int], None] | None
    """Called with (bytes written, total bytes)."""


Masters = Callable[[str, int, int], NDArray[np.float32]]
"""Reads elements [start, stop) of a parameter's float32 master, given as (name, start, stop). What it returns need only
be valid until the next call."""


def export_pieces(ported: PortedModel, masters: Masters, folder: str | Path, **options: Unpack[ExportOptions]) -> Path:
    """Write a Hugging Face folder for `from_pretrained`, replacing a model that is already there.

    Returns the folder, absolute and with symbolic links resolved. Raises `ExportError`, changing nothing, if
    it cannot be written, lacks space, or holds anything that does not belong to a model, and `TypeError` for an
    unknown option.
    """
    if unknown := sorted(options.keys() - ExportOptions.__annotations__.keys()):
        raise TypeError(f"an export takes no option {unknown[0]!r}")
    target = usable_path(folder, error=ExportError, to_write="folder").resolve()
    _refuse_foreign(target)
    asked, write_more = options.get("precision"), options.get("write_more")
    precision = checked(asked, Precision | None, ExportError, "precision") or written_precision(ported)
    written = written_of(ported, _WRITTEN_DTYPES[precision])
    nbytes = options.get("shard_nbytes", SHARD_NBYTES) if ported.adapter is None else 1 << 62  # `peft` reads one file
    shards = plan_shards([*_ours(written), *_copied(written)], nbytes, written.stem)
    with writing_to(target, ExportError), appearing(target) as staging:
        refuse_too_little_space(target, sum(shard.nbytes for shard in shards))
        written.write_small_files(staging)
        _write_weights(written, masters, staging, shards, options.get("progress"))
        if write_more is not None:
            add_files(write_more, staging)
        if not (staging / "README.md").exists():
            card = _card(written, target.name, staging, precision, options.get("facts") or {})
            (staging / "README.md").write_text(card)
    return target


@contextmanager
def writing_to(target: Path, kind: type[MegaTrainError]) -> Iterator[None]:
    """Turn errors of the file system into errors of this kind."""
    try:
        yield
    except OSError as error:
        fix = "check space and permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space"
        elif error.errno in (errno.EBUSY, errno.EXDEV):
            fix = "a mount point cannot be replaced: choose a folder inside it"
        raise kind(f"cannot be written ({error.strerror or error})", where=str(target), fix=fix) from error


def refuse_too_little_space(target: Path, needed: int) -> None:
    """Raise `OSError` unless there is space. What is replaced stays until then, so its space does not count as free."""
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"needs {at_least(needed)}, and {at_most(free)} are free")


def exported_pieces(written: Written, masters: Masters) -> Iterator[TensorPiece]:
    """The tensors of a model's files piece by piece, unit after unit, without those copied from its source."""

    def read(name: str, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        yield start, masters(name, start, stop)

    for unit, tensors in enumerate(written.units):
        yield from tensor_pieces(written, unit, tensors, read)


def _write_weights(
    written: Written, masters: Masters, folder: Path, shards: list[Shard], progress: Callable[[int, int], None] | None
) -> None:
    tensors = [*_ours(written), *_copied(written)]
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def wrote(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    with writing_ranges(folder, shards) as ranges:
        writer = TensorWriter(ranges, shards)
        for piece in exported_pieces(written, masters):
            writer.write(piece.tensor, piece.values, piece.at)
            wrote(piece.values.numel() * piece.tensor.dtype.itemsize)
        for tensor in _copied(written):
            writer.copy(tensor, written.carried.blocks(tensor))
            wrote(tensor.nbytes)
    write_index(folder, shards, tensors, written.numel)


def _ours(written: Written) -> list[WrittenTensor]:
    return [tensor for unit in written.units for tensor in unit]


def _copied(written: Written) -> list[WrittenTensor]:
    """The tensors of the model's source that are copied after the model's own."""
    return written.carried.without({tensor.name for tensor in _ours(written)})


def add_files(write_more: Callable[[Path], object], folder: Path) -> None:
    """Call `write_more`, turning the plain `Exception` that the tokenizers library raises for I/O errors into an
    `OSError`."""
    try:
        write_more(folder)
    except OSError:
        raise
    except Exception as error:
        match = re.fullmatch(r"(.*) \(os error (\d+)\)", str(error), re.DOTALL)
        if match is None:
            raise
        raise OSError(int(match[2]), match[1]) from error


def _card(written: Written, title: str, folder: Path, precision: Precision, facts: Mapping[str, str]) -> str:
    classes = {"model": written.auto_class}
    if written.stem != "model":
        of_text = written.auto_class == "AutoModelForCausalLM"
        classes = (
            {"model": "AutoPeftModelForCausalLM"} if of_text else {"base": written.auto_class, "model": "PeftModel"}
        )
    if (folder / "tokenizer_config.json").exists():
        classes["tokenizer"] = "AutoTokenizer"
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    what = f"A `{written.spec.name}`" if written.stem == "model" else f"An adapter of a `{written.spec.name}`,"
    summary = f"{what} of {written.numel:,} parameters in {dtype}."
    return model_card(title, summary, classes, ", trust_remote_code=True" if written.needs_remote_code else "", facts)


def _refuse_foreign(target: Path) -> None:
    """Raise `ExportError` for files that do not belong to a model, since an export replaces the whole folder."""
    if not target.exists():
        return
    where, fix = str(target), "choose another folder"
    if not target.is_dir():
        raise ExportError("is a file", where=where, fix=fix)
    try:
        inside = sorted(target.iterdir())
    except OSError as error:
        raise ExportError(f"cannot be read ({error.strerror or error})", where=where, fix=fix) from error
    for path in inside:
        if path.name not in MODEL_FOLDERS and (path.is_dir() or path.suffix not in MODEL_SUFFIXES):
            raise ExportError(f"contains {path.name!r}, which is not part of a model", where=where, fix=fix)
    if inside and not any((target / name).exists() for name in ("config.json", "adapter_config.json")):
        raise ExportError("is not a model folder", where=where, fix=fix)
