"""Host memory from the operating system: exact mappings, NUMA nodes, and what the C library keeps of freed memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.errors import DeviceError

# Mappings -------------------------------------------------------------------------------------------------------------
#
# Each allocation is a mapping of exactly its size, zeroed, with huge pages if available: the optimizer goes through all
# of it once a step, and small pages would cause TLB misses. Pages come from the given NUMA node, else that of the
# thread which first touches them. Page-locking is done in `cuda`.


def mapped(nbytes: int, node: Node | None = None) -> tuple[mmap.mmap, torch.Tensor]:
    """A mapping, on `node` if possible, and uint8[nbytes] over it; the memory lives as long as either of them."""
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not supported by the kernel
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
    if node is not None:
        bind(memory.data_ptr(), len(mapping), node.number)
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
    return _text(Path("/proc/sys/kernel/random/boot_id")) or platform.node()


# Freed memory ---------------------------------------------------------------------------------------------------------
#
# Makes the C library keep freed memory for reuse. A training step allocates and frees the same memory repeatedly, and
# fresh pages from the system are expensive, above all on virtual machines (`python -m bench.pages`). By default the C
# library maps every block above 32 MiB anew, and returns the top of its heap when much of it is free. From a device's
# first step until it is closed, it does neither; freed memory is returned on request (`trim`), and when the last device
# closes. Only for glibc, and for the main thread: heaps of others end at 64 MiB.


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


# Memory nodes ---------------------------------------------------------------------------------------------------------
#
# Places memory and threads on a device's NUMA node. Otherwise half of what a copy or the optimizer touches would be
# behind the link between nodes. Memory is bound by the system call itself (no libnuma), as a preference: a full node
# means slower pages, not failure. If a container forbids it, nothing is bound, and `bind` returns false. Systems other
# than Linux on x86-64 and arm64 are taken to have one node.


NODES, PCI = Path("/sys/devices/system/node"), Path("/sys/bus/pci/devices")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Architecture -> number of the system call."""
_PREFERRED = 1
"""Memory policy: from this node while it has free memory (`linux/mempolicy.h`)."""


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node, and those of its processors that this process may use."""

    number: int
    of: int
    """Number of nodes of the machine."""
    processors: frozenset[int]


def node_of(pci_address: str, nodes: Path = NODES, devices: Path = PCI) -> Node | None:
    """The NUMA node of the device at `0000:65:00.0`; `None` if there is only one, or it is unknown."""
    known = numbers(_text(nodes / "has_memory") or _text(nodes / "online"))
    text = _text(devices / pci_address.lower() / "numa_node")
    number = int(text) if text.lstrip("-").isdigit() else -1  # machines report -1 if they do not know
    if len(known) < 2 or number not in known:
        return None
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return Node(number, len(known), frozenset(numbers(_text(nodes / f"node{number}" / "cpulist")) & usable))


def numbers(text: str) -> set[int]:
    """Parse a list in the kernel's format: `0-2,5` is 0, 1, 2 and 5."""
    parsed: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        parsed |= set(range(int(first), int(last or first) + 1))
    return parsed


def bind(address: int, nbytes: int, node: int) -> bool:
    """Prefer `node` for pages of a mapping that are touched from now on. `address` is page-aligned.

    Returns whether the system agreed; a container may forbid it.
    """
    number = _MBIND.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    bits = 64 * len(mask) + 1  # the kernel subtracts one
    arguments = (number, address, nbytes, _PREFERRED, ctypes.addressof(mask), bits, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    return int(call(*(ctypes.c_long(argument) for argument in arguments))) == 0


def binds(node: int) -> bool:
    """Whether the system lets this process choose where its memory is."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        view = ctypes.c_char.from_buffer(page)
        try:
            return bind(ctypes.addressof(view), mmap.PAGESIZE, node)
        finally:
            del view  # otherwise the mapping could not be closed


def run_on(processors: Iterable[int]) -> None:
    """Restrict the calling thread, and threads that it starts later, to these processors; none means all."""
    chosen = set(processors)
    if chosen and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # another system, or hidden by a container
        return ""
