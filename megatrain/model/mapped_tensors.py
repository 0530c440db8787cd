"""Memory straight from the operating system, so that what is let go of is gone at once.

The C library keeps what is freed between small allocations that stay, and while a model streams by, parameter after
parameter, such holes add up to a good part of the model.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # Python names it from 3.13 on
_GIVE_BACK: int | None = getattr(mmap, "MADV_DONTNEED", None)


def whole_pages(nbytes: int) -> int:
    """The bytes of the pages that so many bytes take."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def map_private(nbytes: int) -> mmap.mmap:
    """A range of addresses filled with zeros. A page of it exists from its first touch on."""
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def give_back(mapping: mmap.mmap, start: int, nbytes: int) -> None:
    """Let go of the pages that hold these bytes, and of their values; they may be touched again.

    `start` is a multiple of the page size. A system that cannot do it keeps them.
    """
    if _GIVE_BACK is not None and nbytes:
        mapping.madvise(_GIVE_BACK, start, whole_pages(nbytes))


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory goes back when they die, and that take none unless they are written, however many: on Linux,
    pages that were never written are read as one page of zeros. `torch.zeros` writes every byte."""
    numel = torch.Size(shape).numel()
    if not numel:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.frombuffer(map_private(numel * dtype.itemsize), dtype=dtype, count=numel).view(tuple(shape))
