"""Host memory from the operating system: exact mappings, NUMA nodes, and what the C library keeps of what is freed."""

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
# Host memory as a mapping of its own: exactly as large as asked for, zeroed, in huge pages where the system has them.
#
# The optimizer walks through all of it once a step, which small pages slow down by their misses in the translation
# cache. With a memory node the pages come from there, else from that of the thread which first touches them. It leaves
# out page-locking (`cuda`).


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


# Memory of several processes ------------------------------------------------------------------------------------------
#
# A file in memory that has no name: other processes of the same user open it by the process that has it open, and it
# is gone with the last mapping. Not in /dev/shm, of which containers have little.


def anonymous_file(nbytes: int) -> int:
    """A descriptor of such a file, of zeros. Raises `DeviceError`."""
    try:
        file = os.memfd_create("megatrain")
        os.ftruncate(file, nbytes)
        return file
    except (AttributeError, OSError) as error:
        what = f"cannot make memory for several processes ({error})"
        raise DeviceError(what, where="policy.delivery", fix="use gather") from error


def identity_of(file: int) -> tuple[int, int]:
    """Of the file of a descriptor: no two files of a machine have the same, whoever asks."""
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def mapped_file(process: int, file: int, identity: Sequence[int], nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    """The file of a process's descriptor as `mapped` gives memory. Raises `DeviceError`; also where it has another
    identity: containers of one machine each count their processes, so a number may tell another one here."""
    try:
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if identity_of(opened) != tuple(identity):
                raise OSError("it is another process here")
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
    """The same in all processes of a machine since it was started, and on no other."""
    return _text(Path("/proc/sys/kernel/random/boot_id")) or platform.node()


# Freed memory ---------------------------------------------------------------------------------------------------------
#
# What the C library does with memory that is freed: keep it for what comes next, rather than hand it back.
#
# A training step takes and frees the same memory over and over, and the system's fresh pages are dear, most of all on a
# virtual machine (`python -m bench.pages`). By itself the C library maps every block above 32 MiB afresh, and gives
# back the top of its heap whenever much of it is free. From a device's first step until it is closed, it does neither;
# what has been freed goes back when there is reason to (`trim`), and when the last device closes. Left out: any C
# library but glibc, and threads other than the first, whose heaps end at 64 MiB.


TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of `mallopt`, by their numbers in malloc.h."""
NEVER, NONE = -1, 0
USUAL_TRIM_NBYTES, USUAL_MMAPS = 64 << 20, 65536
"""Where the C library's own thresholds end up once blocks of 32 MiB have been freed."""

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
    """From now on freed memory stays with the process, until `let_go` has been called as often."""
    global _open
    with _lock:
        _open += 1
        if _open == 1 and _library is not None:
            _library.mallopt(MMAP_MAX, NONE)
            _library.mallopt(TRIM_THRESHOLD, NEVER)


def let_go() -> None:
    """The end of one `keep_freed`; with the last one, what is free goes back."""
    global _open
    with _lock:
        _open -= 1
        if _open == 0 and _library is not None:
            _library.mallopt(MMAP_MAX, USUAL_MMAPS)
            _library.mallopt(TRIM_THRESHOLD, USUAL_TRIM_NBYTES)
    trim()


def trim() -> None:
    """Give what is free back to the system."""
    if _library is not None:
        _library.malloc_trim(0)


# Memory nodes ---------------------------------------------------------------------------------------------------------
#
# Which of a machine's memory nodes a device is at, and how memory and threads come to lie there.
#
# On a machine with several, half of what a copy or the optimizer touches would else lie behind the link between them.
# Memory is bound by the system call itself (no libnuma), as a preference: a node that is full makes a slow page and no
# failure. Where a container forbids it, nothing is bound, which `bind` says. With one node there is nothing to do. It
# leaves out machines other than Linux on x86-64 and arm64, which are taken to have one node.


NODES, PCI = Path("/sys/devices/system/node"), Path("/sys/bus/pci/devices")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Machine -> number of the system call."""
_PREFERRED = 1
"""Memory policy: from this node as long as it has any (`linux/mempolicy.h`)."""


@dataclass(frozen=True, slots=True)
class Node:
    """A memory node and the processors beside it, of those that this process may use."""

    number: int
    of: int
    """How many nodes the machine has."""
    processors: frozenset[int]


def node_of(pci_address: str, nodes: Path = NODES, devices: Path = PCI) -> Node | None:
    """The node of the device at `0000:65:00.0`; `None` where the machine has one node only, or does not tell."""
    there = numbers(_text(nodes / "has_memory") or _text(nodes / "online"))
    text = _text(devices / pci_address.lower() / "numa_node")
    number = int(text) if text.lstrip("-").isdigit() else -1  # -1 is also what a machine says that does not know
    if len(there) < 2 or number not in there:
        return None
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return Node(number, len(there), frozenset(numbers(_text(nodes / f"node{number}" / "cpulist")) & usable))


def numbers(text: str) -> set[int]:
    """What a list of the kernel's holds: `0-2,5` is 0, 1, 2 and 5."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def bind(address: int, nbytes: int, node: int) -> bool:
    """Have pages of a mapping that are touched from now on lie on `node`. `address` begins a page.

    Says whether the system does; it may be forbidden in a container.
    """
    number = _MBIND.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    bits = 64 * len(mask) + 1  # the kernel takes one off
    arguments = (number, address, nbytes, _PREFERRED, ctypes.addressof(mask), bits, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    return int(call(*(ctypes.c_long(argument) for argument in arguments))) == 0


def binds(node: int) -> bool:
    """Whether the system lets this process choose where its memory lies."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        view = ctypes.c_char.from_buffer(page)
        try:
            return bind(ctypes.addressof(view), mmap.PAGESIZE, node)
        finally:
            del view  # or the mapping could not be closed


def run_on(processors: Iterable[int]) -> None:
    """Keep the calling thread, and threads that it starts from now on, on these processors; none is all there are."""
    chosen = set(processors)
    if chosen and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # another system, or a container that hides it
        return ""
