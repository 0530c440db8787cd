"""The weight files of a checkpoint: found, checked from their headers, and read range by range.

safetensors are memory-mapped and closed again after each use, since the pages of an open map count as ours; a large
tensor is even read in blocks, each from a map of its own. `pytorch_model.bin` is mapped too, where torch can. It leaves
out what the tensors mean: see `pretrained`.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.modeling_utils import _get_resolved_checkpoint_files

from megatrain.errors import ModelError, first_line
from megatrain.files import lies_within
from megatrain.model.architecture import plain_errors
from megatrain.model.hub import cached_folder, is_local
from megatrain.model.pages import float32_pages

Unread = Any
"""A tensor that `[...]` reads: safetensors' own type, a mapped tensor, or `_InBlocks`."""

LARGE_NBYTES = 1 << 19
"""From which size on a tensor of half precision is read in blocks."""

BLOCK_NBYTES = 8 << 20
"""How much of it is mapped at once."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of the dtypes that a float32 master takes without a scale."""


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a tensor without reading it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Shards:
    """The tensors of a checkpoint, by their names in its files."""

    def __init__(self, source: str, config: PreTrainedConfig, *, where: str, revision: str | None = None) -> None:
        """Find the files of a folder or a hub name, and read their headers.

        Raises `ModelError`, naming the file, for one that is missing, truncated or damaged.
        """
        self.where = where
        self.headers: dict[str, Header] = {}
        for file in _files(source, config, where, revision):
            self.headers.update(_headers(file, where))

    @property
    def dtype(self) -> torch.dtype:
        """Of the first tensor of floating point, float32 where there is none."""
        return next((DTYPES[each.dtype] for each in self.headers.values() if each.dtype in DTYPES), torch.float32)

    @contextmanager
    def open(self, names: Iterable[str], dtype: torch.dtype = torch.float32) -> Iterator[dict[str, Unread]]:
        """These tensors, unread, until the end of the block. Only the files that hold them are opened.

        dtype: what they will be wanted in. What is mapped stays so for as long as somebody holds it.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.headers[name].file, []).append(name)
        with ExitStack() as files:
            slices: dict[str, Unread] = {}
            for file, held in by_file.items():
                with _damage_named(file, self.where):
                    if file.suffix == ".safetensors":
                        opened = files.enter_context(safe_open(file, framework="pt"))
                        slices.update({name: self._unread(opened, name, dtype) for name in held})
                    else:
                        mapped = _mapped(file)
                        slices.update({name: mapped[name] for name in held})
            try:
                yield slices
            finally:
                slices.clear()  # a slice keeps its file mapped

    def _unread(self, opened: Any, name: str, dtype: torch.dtype) -> Unread:
        header = self.headers[name]
        is_large = len(header.shape) > 0 and 2 * math.prod(header.shape) >= LARGE_NBYTES
        widened = dtype == torch.float32 and header.dtype in ("BF16", "F16")
        return _InBlocks(name, header) if is_large and widened else opened.get_slice(name)


class _InBlocks:
    """A large tensor of half precision, read as float32 (exactly), so that no more than the result is in memory."""

    def __init__(self, name: str, header: Header) -> None:
        self.name, self.header = name, header

    def __getitem__(self, everything: Any) -> torch.Tensor:
        assert everything is Ellipsis
        shape = self.header.shape
        value = float32_pages(shape)
        rows = max(1, BLOCK_NBYTES * shape[0] // (2 * value.numel()))
        for start in range(0, shape[0], rows):
            with safe_open(self.header.file, framework="pt") as opened:
                value[start : start + rows] = opened.get_slice(self.name)[start : start + rows]
        return value


def _files(source: str, config: PreTrainedConfig, where: str, revision: str | None) -> list[Path]:
    with plain_errors(where):
        found, _ = _get_resolved_checkpoint_files(
            source,
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=True,  # keeps the library from asking the hub to convert the files
            transformers_explicit_filename=getattr(config, "transformers_weights", None),
            download_kwargs={"local_files_only": is_local(source), "revision": revision or "main"},
        )
    files = [Path(file) for file in found or ()]
    folder = Path(source) if Path(source).is_dir() else cached_folder(source, revision)
    for file in files:
        if folder is not None and not lies_within(file, folder):
            what = f"its index names a file outside its folder, {os.path.relpath(file, folder)}"
            raise ModelError(what, where=where, fix="download the model again from where you trust it")
        if not file.is_file():
            raise ModelError(f"its file {file.name} is missing", where=where, fix="copy or download it again")
    return files


def _headers(file: Path, where: str) -> dict[str, Header]:
    with _damage_named(file, where):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
                return {name: Header(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
        names = {dtype: name for name, dtype in DTYPES.items()}
        return {
            name: Header(file, tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in _mapped(file).items()
        }


@contextmanager
def _damage_named(file: Path, where: str) -> Iterator[None]:
    """What goes wrong while a file is opened, as a `ModelError` that names the file."""
    try:
        yield
    except SafetensorError as error:
        raise ModelError(
            f"its file {file.name} is truncated or damaged ({first_line(error)})",
            where=where,
            fix="copy or download it again",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"its file {file.name} cannot be read ({first_line(error)})",
            where=where,
            fix="copy or download it again, or save the model as safetensors",
        ) from error


def _mapped(file: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a `.bin` file, on disk until they are used."""
    held = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
