"""Finds this machine's available memory, disk and threads, within the limits of the operating system and cgroups.

Limits are those of every cgroup that the process is in, version 1 or 2, its own and those around it; what it may
page-lock is `RLIMIT_MEMLOCK`. File pages that the kernel can drop at once count as free. It leaves out bandwidths and
rates, which have to be measured (`megatrain.commands.probe`), and quotas of file systems, which no portable call tells.
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

_MEMBERSHIP = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")
_CPUINFO = Path("/proc/cpuinfo")
_CGROUPS = Path("/sys/fs/cgroup")

_MEMORY_FILES = (  # limit, used, and the key in memory.stat of what could be dropped at once
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),  # beyond it a process crawls
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_CAP_IPC_LOCK = 14
"""Number of the capability whose holder may lock memory without limit."""


def available_host_nbytes() -> int:
    """Bytes of host memory that a new allocation can use: what the system has free, within the cgroups' limits."""
    free = int(psutil.virtual_memory().available)
    for folder in _cgroups("memory"):
        for limit_file, used_file, droppable in _MEMORY_FILES:
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None:
                free = min(free, limit - used + _statistic(folder / "memory.stat", droppable))
    return max(0, free)


def available_cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def available_threads() -> int:
    """Cores that this process may run on, or fewer where its cgroups grant less processor time than that."""
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
    """Bytes that this user can still write to the file system of `folder`, which exists."""
    return shutil.disk_usage(folder).free


def pinnable_nbytes(host_nbytes: int) -> int:
    """How many of `host_nbytes` the operating system lets this process lock. A driver may not ask it."""
    capabilities = next((line.split()[1] for line in _text(_STATUS).splitlines() if line.startswith("CapEff:")), "0")
    if int(capabilities, 16) >> _CAP_IPC_LOCK & 1:
        return host_nbytes
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return host_nbytes if limit == resource.RLIM_INFINITY else min(host_nbytes, limit)


def lies_in_memory(folder: Path) -> bool:
    """Whether `folder` is on a file system that keeps its files in host memory."""
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    absolute = folder.resolve()
    kind = next((mounts[each] for each in (absolute, *absolute.parents) if each in mounts), "")
    return kind in ("tmpfs", "ramfs")


def processor_name() -> str:
    """What the processor calls itself."""
    names = (line.partition(":")[2].strip() for line in _text(_CPUINFO).splitlines() if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


# Files of the kernel -----------------------------------------------------------------------------------------------


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders that limit this process: in each hierarchy with `controller`, from its own group to the root."""
    for line in _text(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers  # version 2 has one hierarchy, without a name
        folder = root if ".." in path else root / path.lstrip("/")
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another kernel, another version, or none of our business
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _statistic(path: Path, key: str) -> int:
    return next((int(line.split()[1]) for line in _text(path).splitlines() if line.split()[0] == key), 0)
