"""A Hugging Face folder from the float32 masters, with its model card, streamed unit by unit; whole or not at all."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from megatrain.checkpoint.safetensors_writer import Shard, ShardWriter, plan_shards, write_index
from megatrain.errors import ExportError
from megatrain.model import PortedModel, Written, written_of, written_parameters
from megatrain.spec import Precision
from megatrain.system.atomic import appearing
from megatrain.system.paths import usable_path

# The model card -------------------------------------------------------------------------------------------------------
#
# The model card of an exported folder: what it is, how to load it, and the facts that the caller knows.
#
# It states nothing that was not measured or configured, and says what is missing.


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
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


def model_card(title: str, summary: str, classes: Mapping[str, str], arguments: str, facts: Mapping[str, str]) -> str:
    """The text of README.md.

    summary: one sentence on what the model is. classes: variable -> the class of transformers that loads it.
    arguments: what `from_pretrained` takes after the folder, with a leading comma. facts: rows of the table of
    training facts, none if empty.
    """
    homes = {kind: "peft" if "Peft" in kind else "transformers" for kind in classes.values()}
    loading = [
        f"from {home} import {', '.join(kind for kind in homes if homes[kind] == home)}"
        for home in dict.fromkeys(homes.values())
    ]
    loading.append("")
    loading += [
        f'{variable} = {kind}.from_pretrained("path/to/this/folder"{arguments})' for variable, kind in classes.items()
    ]
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()]
    table = "\n".join(["", "## Training", "", "| | |", "|---|---|", *rows, ""]) if rows else ""
    return _CARD.format(title=title, summary=summary, loading="\n".join(loading), facts=table)


def _cell(text: str) -> str:
    """Text that cannot break out of its cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


# The folder -----------------------------------------------------------------------------------------------------------
#
# A Hugging Face folder from the float32 masters, streamed unit by unit. It appears whole or not at all.
#
# Everything about the files of weights is known before the first byte (`model.WrittenModel`), so the space is checked,
# and then each unit's masters are gathered, brought into the names and layout of the original checkpoints, rounded and
# written, one unit in memory at a time. Left out: where masters come from, and tokenizers, which the caller writes into
# the same folder before it appears.


SHARD_NBYTES = 4 << 30
"""Most bytes of tensors in one file, unless a single tensor is larger."""

_LIBRARY_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".md", ".txt", ".py")
_TOKENIZER_SUFFIXES = (".tiktoken", ".spm", ".bpe", ".vocab")
MODEL_SUFFIXES = (*_LIBRARY_SUFFIXES, *_TOKENIZER_SUFFIXES)
"""Endings of the files that a Hugging Face model folder is made of."""
MODEL_FOLDERS = ("additional_chat_templates",)

_WRITTEN_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class ExportOptions(TypedDict, total=False):
    """Keyword arguments of everything that writes a model, as `export_units` takes them."""

    precision: Precision
    """`fp32`, the default, writes the masters, `bf16` rounds them to nearest even; buffers keep their dtype."""
    shard_nbytes: int
    """Most bytes of tensors in one file."""
    facts: Mapping[str, str] | None
    """Rows of the model card's table of training facts."""
    write_more: Callable[[Path], object] | None
    """Called with the folder before it appears, to add a tokenizer, say; its README.md, if any, replaces our card."""
    progress: Callable[[int, int], None] | None
    """Called with (bytes written, bytes in all) after each tensor."""


def export_model(
    ported: PortedModel,
    masters: Callable[[str], Tensor],
    folder: str | Path,
    **options: Unpack[ExportOptions],
) -> Path:
    """Write a Hugging Face folder that `from_pretrained` loads, replacing a model that is there.

    masters: the float32 master of a parameter, by name and in its shape; asked unit by unit, for each once.

    Returns the folder, absolute and with symbolic links resolved. Raises `ExportError` when it cannot be written, has
    too little space, or holds anything that does not belong to a model; what was there is then there as before.
    """
    wanted = written_parameters(ported)
    units = (
        {param.name: masters(param.name) for param in unit.params if param.name in wanted}
        for unit in ported.structure.units
    )
    return export_units(ported, units, folder, **options)


def export_units(
    ported: PortedModel,
    units: Iterable[Mapping[str, Tensor]],
    folder: str | Path,
    *,
    precision: Precision = "fp32",
    shard_nbytes: int = SHARD_NBYTES,
    facts: Mapping[str, str] | None = None,
    write_more: Callable[[Path], object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """As `export_model`, from an iterable that gives all masters of one unit after another, by name, in the order of
    the specification. It is advanced once the unit before has been written, so whatever makes units may reuse memory.
    """
    target = usable_path(folder, error=ExportError, to_write="folder").resolve()
    _refuse_foreign(target)
    written = written_of(ported, _WRITTEN_DTYPES[precision])
    nbytes = shard_nbytes if ported.adapter is None else 1 << 62  # `peft` reads one file
    shards = plan_shards((tensor for unit in written.units for tensor in unit), nbytes, written.stem)
    try:
        with appearing(target) as staging:
            _refuse_too_little_space(target, shards)
            written.write_small_files(staging)
            _write_weights(written, units, staging, shards, progress or _unwatched)
            if write_more is not None:
                add_files(write_more, staging)
            if not (staging / "README.md").exists():
                card = _card(written, target.name, staging, precision, facts or {})
                (staging / "README.md").write_text(card)
    except OSError as error:
        raise ExportError(
            f"cannot be written ({error.strerror or error})", where=str(target), fix=_advice(error)
        ) from error
    return target


def _write_weights(
    written: Written,
    units: Iterable[Mapping[str, Tensor]],
    folder: Path,
    shards: list[Shard],
    progress: Callable[[int, int], None],
) -> None:
    every = [tensor for unit in written.units for tensor in unit]
    total, done = sum(tensor.nbytes for tensor in every), 0
    masters = iter(units)
    with ShardWriter(folder, shards) as writer:
        for unit, planned in enumerate(written.units):
            tensors = written.tensors(unit, next(masters))
            for each in planned:
                writer.write(each, tensors.pop(each.name))  # popped: its memory goes before the next unit's comes
                done += each.nbytes
                progress(done, total)
    write_index(folder, shards, every, written.numel)


def add_files(write_more: Callable[[Path], object], folder: Path) -> None:
    """Call `write_more`. The tokenizers library reports what the file system refuses as a plain `Exception`."""
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
    classes = {"model": "AutoModelForCausalLM" if written.stem == "model" else "AutoPeftModelForCausalLM"}
    if (folder / "tokenizer_config.json").exists():
        classes["tokenizer"] = "AutoTokenizer"
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    what = f"A `{written.spec.name}`" if written.stem == "model" else f"An adapter of a `{written.spec.name}`,"
    summary = f"{what} of {written.numel:,} parameters in {dtype}."
    return model_card(title, summary, classes, ", trust_remote_code=True" if written.needs_remote_code else "", facts)


def _unwatched(done: int, total: int) -> None:
    pass


def _refuse_foreign(target: Path) -> None:
    """An export replaces a whole folder, so there must be nothing in it but what belongs to a model."""
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
            raise ExportError(f"holds {path.name!r}, which is not part of a model", where=where, fix=fix)
    if inside and not any((target / name).exists() for name in ("config.json", "adapter_config.json")):
        raise ExportError("is not a model folder", where=where, fix=fix)


def _refuse_too_little_space(target: Path, shards: list[Shard]) -> None:
    """A model that is there stays until the new one is whole, so its space does not count as free."""
    needed = sum(shard.nbytes for shard in shards)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise ExportError(
            f"needs {needed:,} bytes, and {free:,} are free",
            where=str(target),
            fix="free some space, or choose another folder",
        )


def _advice(error: OSError) -> str:
    if error.errno in (errno.EBUSY, errno.EXDEV):
        return "a mount point cannot be replaced: choose a folder inside it"
    return "check space and permissions"
