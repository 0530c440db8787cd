"""Which of a machine's memory nodes a device is at, and how memory and threads come to lie there.

On a machine with several, half of what a copy or the optimizer touches would else lie behind the link between them.
Memory is bound by the system call itself (no libnuma), as a preference: a node that is full makes a slow page and no
failure. Where a container forbids it, nothing is bound, which `bind` says. With one node there is nothing to do. It
leaves out machines other than Linux on x86-64 and arm64, which are taken to have one node.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
