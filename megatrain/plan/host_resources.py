"""Finds this machine's available memory, disk and threads, within the limits of the operating system and cgroups.

The limits of all cgroups that contain the process apply, in version 1 and 2, and `RLIMIT_MEMLOCK` for page-locked
memory. File pages that the kernel can drop at once count as free. Bandwidths are measured by
`megatrain.commands.probe`. Quotas of file systems are ignored, since no portable call reports them.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from megatrain.system.paths import file_system

_MEMBERSHIP = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")
_CPUINFO = Path("/proc/cpuinfo")
_CGROUPS = Path("/sys/fs/cgroup")

_MEMORY_FILES = (  # limit, usage, and the key in memory.stat of the file pages that can be dropped at once
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),  # a process beyond this is throttled
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_CAP_IPC_LOCK = 14
"""Number of the Linux capability to lock memory without limit."""


def available_host_nbytes() -> int:
    """Bytes of host memory that new allocations can use, within the limits of cgroups."""
    free = int(psutil.virtual_memory().available)
    for folder in _cgroups("memory"):
        for limit_file, used_file, droppable in _MEMORY_FILES:
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None:
                free = min(free, limit - used + _statistic(folder / "memory.stat", droppable))
    return max(0, free)


def available_cores() -> list[int]:
    """Indices of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def available_threads() -> int:
    """Number of cores that this process may run on, or fewer if its cgroups grant less CPU time."""
    cores = len(available_cores())
    for folder in _cgroups("cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quota, period = int(words[0]), int(words[1])
        if quota is not None and period and quota > 0:
            cores = min(cores, math.ceil(quota / period))
    return max(1, cores)


def available_disk_nbytes(folder: Path) -> int:
    """Bytes that this user can still write to the file system of `folder`, which must exist."""
    return shutil.disk_usage(folder).free


def pinnable_nbytes(host_nbytes: int) -> int:
    """Bytes, of `host_nbytes`, that the operating system lets this process lock. Some drivers ignore this limit."""
    capabilities = next((line.split()[1] for line in _text(_STATUS).splitlines() if line.startswith("CapEff:")), "0")
    if int(capabilities, 16) >> _CAP_IPC_LOCK & 1:
        return host_nbytes
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return host_nbytes if limit == resource.RLIM_INFINITY else min(host_nbytes, limit)


def lies_in_memory(folder: Path) -> bool:
    """Whether `folder` is on a file system that keeps its files in host memory."""
    return file_system(folder)[0] in ("tmpfs", "ramfs")


def processor_name() -> str:
    """The model name of the CPU."""
    names = (line.partition(":")[2].strip() for line in _text(_CPUINFO).splitlines() if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


# Kernel files ------------------------------------------------------------------------------------------------------


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders of all cgroups that limit this process: in each hierarchy with `controller`, from its own to the
    root."""
    for line in _text(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers  # version 2 has a single hierarchy with no name
        folder = root if ".." in path else root / path.lstrip("/")
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not on this kernel or in this version, or not readable for this user
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _statistic(path: Path, key: str) -> int:
    return next((int(line.split()[1]) for line in _text(path).splitlines() if line.split()[0] == key), 0)
