"""Gets memory for tensors from the operating system, which has it back as soon as the tensor is freed.

The C library keeps freed memory that lies between small live allocations; while a model streams through, parameter
by parameter, such holes would add up to a good part of the model.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # in Python's mmap since 3.13
_GIVE_BACK: int | None = getattr(mmap, "MADV_DONTNEED", None)


def whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def map_private(nbytes: int) -> mmap.mmap:
    """A mapping filled with zeros, whose pages exist only once touched."""
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def give_back(mapping: mmap.mmap, start: int, nbytes: int) -> None:
    """Free the pages that hold these bytes, with their values; they may be touched again.

    `start` is a multiple of the page size. Systems that cannot do this keep the pages.
    """
    if _GIVE_BACK is not None and nbytes:
        mapping.madvise(_GIVE_BACK, start, whole_pages(nbytes))


def lazy_parameters(module: nn.Module) -> dict[str, Tensor]:
    """`lazy_zeros` in place of a module's parameters, by name, which train where those do."""
    named = module.named_parameters()
    return {name: lazy_zeros(like.shape, like.dtype).requires_grad_(like.requires_grad) for name, like in named}


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written, and free it immediately when they die.

    On Linux all pages that were never written share one page of zeros. `torch.zeros` writes every byte.
    """
    numel = torch.Size(shape).numel()
    if not numel:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.frombuffer(map_private(numel * dtype.itemsize), dtype=dtype, count=numel).view(tuple(shape))
