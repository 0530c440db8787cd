"""Host memory as a mapping of its own: exactly as large as asked for, zeroed, in huge pages where the system has them.

The optimizer walks through all of it once a step, which small pages slow down by their misses in the translation
cache. It leaves out page-locking (`cuda`), and binding to a NUMA node: a page lies on the node of the thread that first
touches it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch


def mapped(nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    """A mapping and uint8[nbytes] over it; the memory is there as long as one of them is."""
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
