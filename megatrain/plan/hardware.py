"""What this machine has to offer a plan: host memory and threads, as the operating system and its cgroup allow.

It leaves out bandwidths and rates, which have to be measured.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def available_host_nbytes() -> int:
    """Bytes of host memory that a new allocation can use: what the system has free, within the cgroup's limit."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), int(_CGROUP_USED.read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def available_threads() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
