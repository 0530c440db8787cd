"""Memory of our own: what a process that is forked sees of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.device.host_memory import keep_from_children, mapped

SMAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> list[str]:
    """What the kernel says of the mapping in which an address lies."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    return []


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not tell")
def test_copy_buffers_are_not_shared_with_child_processes() -> None:
    """Else the page that the device knows would be the child's as soon as we write to ours."""
    mapping, memory = mapped(1 << 20)
    assert "dc" not in flags_at(memory.data_ptr())
    keep_from_children(mapping)
    assert "dc" in flags_at(memory.data_ptr())
