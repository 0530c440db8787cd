"""Carries over into checkpoints and exports what a model's folder holds and its class does not read, unchanged.

Layers that predict several tokens at once, say, which a causal language model leaves out, and the files of a processor.
The tensors are not loaded: their files stay open, and their bytes are copied when a model is written. So they are there
to the end, even if the folder, or the checkpoint that a run was resumed from, has been removed meanwhile.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from megatrain.errors import ExportError, ModelError
from megatrain.model.hub import is_local
from megatrain.spec import FileBytes

STORED_DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""The names of dtypes in safetensors files, in the format's own order, by rising element size."""

DTYPES_STORED = {name: dtype for dtype, name in STORED_DTYPES.items()}

PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
BESIDE_PROCESSOR = ("chat_template.jinja", "chat_template.json", "audio_tokenizer_config.json")
"""Files of a processor besides those that make a folder's processor; a tokenizer's are written by the tokenizer."""

WAS_QUANTIZED = "published_quantized"
"""The field of a checkpoint's config.json that keeps `Carried.was_quantized`; exports do not have it."""

BLOCK_NBYTES = 8 << 20
"""Bytes copied at a time."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Carried:
    """Tensors by their names in the files, and small files by name. Copies of a model share one such object."""

    def __init__(
        self,
        tensors: Mapping[WrittenTensor, FileBytes | Tensor] | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        was_quantized: bool = False,
    ) -> None:
        """tensors: a tensor -> the bytes that hold it, or itself if its file is no safetensors file. was_quantized:
        whether the source was published quantized. Raises `OSError` if a file cannot be opened."""
        self.tensors, self.files, self.was_quantized = dict(tensors or {}), dict(files or {}), was_quantized
        self._opened: dict[str, int] = {}
        for place in self.tensors.values():
            if isinstance(place, FileBytes) and place.file not in self._opened:
                self._opened[place.file] = os.open(place.file, os.O_RDONLY)
                weakref.finalize(self, os.close, self._opened[place.file])
        self._nbytes = {file: os.fstat(opened).st_size for file, opened in self._opened.items()}

    def __deepcopy__(self, memo: object) -> Carried:
        return self

    def without(self, names: Collection[str]) -> list[WrittenTensor]:
        """The tensors that are not called that, in the order of the files."""
        return [tensor for tensor in self.tensors if tensor.name not in names]

    def blocks(self, tensor: WrittenTensor) -> Iterator[memoryview]:
        """The tensor's bytes, block by block. Raises `ExportError` if its file has been written to since."""
        place = self.tensors[tensor]
        if isinstance(place, Tensor):
            held = memoryview(place.contiguous().view(-1).view(torch.uint8).numpy().data)
            yield from (held[start : start + BLOCK_NBYTES] for start in range(0, len(held), BLOCK_NBYTES))
            return
        opened, end = self._opened[place.file], place.place + place.nbytes
        if os.fstat(opened).st_size != self._nbytes[place.file]:
            what = f"holds {tensor.name}, which is carried over, but has been overwritten since the model was loaded"
            raise ExportError(what, where=place.file, fix="restore that file and resume the run")
        for start in range(place.place, end, BLOCK_NBYTES):
            yield memoryview(os.pread(opened, min(BLOCK_NBYTES, end - start), start))


NOTHING = Carried()


def carried_by(model: nn.Module) -> Carried:
    """What the source of a model's structure holds besides it; copies of the structure have it, too."""
    carried = model.__dict__.get("carried_over", NOTHING)
    assert isinstance(carried, Carried)
    return carried


def carry(model: nn.Module, carried: Carried) -> None:
    """Say what a structure's source holds besides it."""
    model.__dict__["carried_over"] = carried


def stored_dtype(name: str, tensor: str, where: str) -> torch.dtype:
    """The dtype of that name in safetensors files. Raises `ModelError` for one that torch has not."""
    if name not in DTYPES_STORED:
        what = f"{tensor} is not loaded, and holds {name} values, which cannot be copied to an export"
        raise ModelError(what, where=where, fix="use float32 or bfloat16 weights")
    return DTYPES_STORED[name]


def processor_files(source: str, config: PreTrainedConfig, revision: str | None) -> dict[str, bytes]:
    """The files of a folder's or a hub name's processor, by name; none if there is no processor.

    The hub is asked only about models with parts besides text.
    """
    if not (Path(source).is_dir() or config.sub_configs):
        return {}
    files = {name: content for name in PROCESSOR if (content := _file(source, name, revision)) is not None}
    if files:
        files |= {name: content for name in BESIDE_PROCESSOR if (content := _file(source, name, revision)) is not None}
    return files


def _file(source: str, name: str, revision: str | None) -> bytes | None:
    if Path(source).is_dir():
        return (Path(source) / name).read_bytes() if (Path(source) / name).is_file() else None
    quietly: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    quietly["_raise_exceptions_for_connection_errors"] = False
    path = cached_file(source, name, revision=revision or "main", local_files_only=is_local(source), **quietly)
    return None if path is None else Path(path).read_bytes()
