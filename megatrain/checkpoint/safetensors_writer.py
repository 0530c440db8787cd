"""Writes safetensors files tensor by tensor.

The library's `save_file` needs all tensors of a file in memory at once. Here the header is written first, from names,
dtypes and shapes, and each tensor is written to its place when it arrives, rounded to its dtype a few MiB at a time.
Within a file, tensors are in that library's order (largest elements first, so that each is aligned, then by name), so
a model that fits into one file gives the same file as `save_pretrained`.

Format: 8 bytes little-endian length of the header, the header (JSON, padded with spaces), the tensors without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatrain.errors import ExportError
from megatrain.model import WrittenTensor
from megatrain.model.carried import STORED_DTYPES

INDEX = "model.safetensors.index.json"
BLOCK_NBYTES = 8 << 20
"""Bytes of a tensor converted and written at a time."""

_RANK = {dtype: rank for rank, dtype in enumerate(STORED_DTYPES)}


@dataclass(frozen=True)
class Shard:
    """One file: its name, its header, and the byte offset of each tensor."""

    name: str
    header: bytes
    starts: dict[str, int]
    nbytes: int


def plan_shards(tensors: Iterable[WrittenTensor], shard_nbytes: int, stem: str = "model") -> list[Shard]:
    """Divide tensors, in order, into as few files of at most `shard_nbytes` as possible.

    A larger tensor gets a file of its own. Raises `ExportError` for a dtype that the format lacks.
    """
    return _named([sorted(tensors_of_file, key=_place) for tensors_of_file in _dealt(tensors, shard_nbytes)], stem)


def plan_front_to_back(
    tensors: Sequence[WrittenTensor],
    shard_nbytes: int,
    stem: str,
    apart: Collection[str] = (),
    copied: Sequence[WrittenTensor] = (),
) -> list[Shard]:
    """As `plan_shards`, for files named after `stem` that are written sequentially.

    Within a file, tensors keep their given order. Those in `apart` get separate files, and so do those that are not
    float32, which come after all others, so that each tensor is aligned, and then `copied`, in files of their own.
    Without tensors there is no file.
    """
    floats = [tensor for tensor in tensors if tensor.dtype == torch.float32]
    others = sorted((tensor for tensor in tensors if tensor.dtype != torch.float32), key=_place)
    groups = [tensor for tensor in floats if tensor.name not in apart], [t for t in floats if t.name in apart], others
    dealt = [of_file for group in (*groups, sorted(copied, key=_place)) for of_file in _dealt(group, shard_nbytes)]
    return _named([of_file for of_file in dealt if of_file], stem)


def _dealt(tensors: Iterable[WrittenTensor], shard_nbytes: int) -> list[list[WrittenTensor]]:
    dealt: list[list[WrittenTensor]] = [[]]
    room = shard_nbytes
    for tensor in tensors:
        if tensor.dtype not in STORED_DTYPES:
            raise ExportError(f"tensor {tensor.name} is {tensor.dtype}, which safetensors files cannot hold")
        if dealt[-1] and tensor.nbytes > room:
            dealt.append([])
            room = shard_nbytes
        dealt[-1].append(tensor)
        room -= tensor.nbytes
    return dealt


def _named(dealt: Sequence[Sequence[WrittenTensor]], stem: str) -> list[Shard]:
    if len(dealt) == 1:
        return [_shard(f"{stem}.safetensors", dealt[0])]
    count = len(dealt)
    return [_shard(f"{stem}-{1 + at:05d}-of-{count:05d}.safetensors", tensors) for at, tensors in enumerate(dealt)]


def _place(tensor: WrittenTensor) -> tuple[int, str]:
    """Sort key of a tensor within its file, as in the safetensors library."""
    return -_RANK[tensor.dtype], tensor.name


def _shard(name: str, tensors: Sequence[WrittenTensor]) -> Shard:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for tensor in tensors:
        offsets[tensor.name], end = end, end + tensor.nbytes
        fields[tensor.name] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (offsets[tensor.name], end),
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Shard(name, header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + end)


def tensor_blocks(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The elements of a tensor in row-major order, as bytes of `dtype`, block by block."""
    rows = tensor.reshape(-1) if tensor.is_contiguous() or tensor.dim() == 0 else tensor
    if not tensor.numel():
        return
    row_nbytes = rows[0].numel() * max(dtype.itemsize, tensor.dtype.itemsize)
    for block in rows.detach().split(max(1, BLOCK_NBYTES // row_nbytes)):
        flat = block.to(dtype).contiguous().view(-1)
        yield memoryview(flat.view(torch.uint8).numpy())


def write_index(folder: Path, shards: Sequence[Shard], tensors: Iterable[WrittenTensor], numel: int) -> None:
    """Write the index of tensors if there are several files. `numel`: parameters of the model."""
    if len(shards) < 2:
        return
    index = {
        "metadata": {"total_parameters": numel, "total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {name: shard.name for shard in shards for name in shard.starts},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
