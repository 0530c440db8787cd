"""Host memory as a mapping of its own: exactly as large as asked for, zeroed, in huge pages where the system has them.

The optimizer walks through all of it once a step, which small pages slow down by their misses in the translation
cache. With a memory node the pages come from there, else from that of the thread which first touches them. It leaves
out page-locking (`cuda`).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from megatrain.device.numa import Node, bind


def mapped(nbytes: int, node: Node | None = None) -> tuple[mmap.mmap, torch.Tensor]:
    """A mapping and uint8[nbytes] over it, on `node` if it can be; the memory is there as long as one of them is."""
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
    if node is not None:
        bind(memory.data_ptr(), len(mapping), node.number)
    return mapping, memory


def keep_from_children(mapping: mmap.mmap) -> None:
    """A process that is forked from now on (a worker that loads data, say) does not see the mapping.

    For memory that a device copies by itself: whoever writes to a page first after a fork is given a copy of it, and
    the device would go on with the old one (`madvise(2)`).
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        with suppress(OSError):
            mapping.madvise(mmap.MADV_DONTFORK)
