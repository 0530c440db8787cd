"""Host memory from the operating system: exact mappings, and what the C library keeps of freed memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from megatrain.errors import DeviceError

# Mappings -------------------------------------------------------------------------------------------------------------
#
# Each allocation is a mapping of exactly its size, zeroed, with huge pages if available: the optimizer goes through all
# of it once a step, and small pages would cause TLB misses. Page-locking is done in `cuda`.


def mapped(nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    """A mapping, and uint8[nbytes] over it; the memory lives as long as either of them."""
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not supported by the kernel
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
    return mapping, memory


def keep_from_children(mapping: mmap.mmap) -> None:
    """Hide the mapping from processes forked later (data loading workers, say).

    Needed for memory that a device accesses by itself: after a fork, whoever first writes to a page gets a copy,
    and the device would keep using the old one (`madvise(2)`).
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        with suppress(OSError):
            mapping.madvise(mmap.MADV_DONTFORK)


# Memory of several processes ------------------------------------------------------------------------------------------
#
# A nameless file in memory: other processes of the same user open it through the process that has it open, and it
# disappears with the last mapping. Not in /dev/shm, which is small in containers.


def anonymous_file(nbytes: int) -> int:
    """A descriptor of such a file, filled with zeros. Raises `DeviceError`."""
    try:
        file = os.memfd_create("megatrain")
        os.ftruncate(file, nbytes)
        return file
    except (AttributeError, OSError) as error:
        what = f"cannot make memory for several processes ({error})"
        raise DeviceError(what, where="policy.delivery", fix="use gather") from error


def identity_of(file: int) -> tuple[int, int]:
    """An identity of a descriptor's file that is unique on the machine."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def mapped_file(process: int, file: int, identity: Sequence[int], nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    """Map the file of another process's descriptor, as `mapped`. Raises `DeviceError`, also for an unexpected
    identity.

    The process number may mean another process here: containers on one machine count their processes separately.
    """
    try:
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if identity_of(opened) != tuple(identity):
                raise OSError("the number belongs to another process here")
            mapping = mmap.mmap(opened, nbytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(opened)
    except OSError as error:
        what = f"the memory of process {process} cannot be mapped ({error.strerror or error})"
        fix = "run the ranks of a machine in one container, by one user, or use gather"
        raise DeviceError(what, where="policy.delivery", fix=fix) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def machine_id() -> str:
    """A string that is equal in all processes of a machine since its start, and on no other machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # another system, or hidden by a container
        return platform.node()


# Freed memory ---------------------------------------------------------------------------------------------------------
#
# Makes the C library keep freed memory for reuse. A training step allocates and frees the same memory repeatedly, and
# fresh pages from the system are expensive, above all on virtual machines (`megatrain probe` measures them). By default
# the C library maps every block above 32 MiB anew, and returns the top of its heap when much of it is free. From a
# device's first step until it is closed, it does neither; freed memory is returned on request (`trim`), and when the
# last device closes. Only for glibc, and for the main thread: heaps of others end at 64 MiB.


TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of `mallopt`, numbered as in malloc.h."""
NEVER, NONE = -1, 0
USUAL_TRIM_NBYTES, USUAL_MMAPS = 64 << 20, 65536
"""The values that the C library's own thresholds reach once blocks of 32 MiB have been freed."""

_lock = threading.Lock()
_open = 0


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except OSError:
        return None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


_library = _glibc()


def keep_freed() -> None:
    """Keep freed memory in the process, until `let_go` has been called as often."""
    global _open
    with _lock:
        _open += 1
        if _open == 1 and _library is not None:
            _library.mallopt(MMAP_MAX, NONE)
            _library.mallopt(TRIM_THRESHOLD, NEVER)


def let_go() -> None:
    """End one `keep_freed`; the last one returns free memory to the system."""
    global _open
    with _lock:
        _open -= 1
        if _open == 0 and _library is not None:
            _library.mallopt(MMAP_MAX, USUAL_MMAPS)
            _library.mallopt(TRIM_THRESHOLD, USUAL_TRIM_NBYTES)
    trim()


def trim() -> None:
    """Return free memory to the system."""
    if _library is not None:
        _library.malloc_trim(0)
