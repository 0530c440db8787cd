"""Limits of cgroups, of locked memory and of file systems count, whichever kernel has set them."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from megatrain.plan import host_resources

GB = 10**9


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for files that the kernel would show, and 100 GB free on the machine."""
    for name, file in (("_MEMBERSHIP", "cgroup"), ("_STATUS", "status"), ("_CGROUPS", "sys")):
        monkeypatch.setattr(host_resources, name, tmp_path / file)
    free = psutil.virtual_memory()._replace(available=100 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_cgroups_all_free_memory_is_available(kernel: Path) -> None:
    assert host_resources.available_host_nbytes() == 100 * GB


def test_the_tightest_cgroup_v2_limit_counts_minus_page_cache(kernel: Path) -> None:
    write(kernel, cgroup="0::/job/step")
    write(kernel / "sys", memory__max="max", memory__current=90 * GB)
    write(kernel / "sys/job", memory__max=40 * GB, memory__current=30 * GB, memory__stat=f"anon 1\ninactive_file {GB}")
    write(kernel / "sys/job/step", memory__max="max", memory__current=GB)
    assert host_resources.available_host_nbytes() == 11 * GB


def test_cgroup_v1_limits_count_and_unlimited_ones_do_not(kernel: Path) -> None:
    write(kernel, cgroup="5:cpu,cpuacct:/box\n4:memory:/box\n0::/")
    folder = kernel / "sys/memory/box"
    write(folder, memory__limit_in_bytes=8 * GB, memory__usage_in_bytes=5 * GB, memory__stat="total_inactive_file 7")
    write(kernel / "sys/memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GB)
    assert host_resources.available_host_nbytes() == 3 * GB + 7
    write(folder, memory__usage_in_bytes=9 * GB)
    assert host_resources.available_host_nbytes() == 0


def test_cgroups_outside_the_namespace_resolve_to_the_root(kernel: Path) -> None:
    write(kernel, cgroup="0::/../../other")
    write(kernel / "sys", memory__max=2 * GB, memory__current=0)
    assert host_resources.available_host_nbytes() == 2 * GB


def test_cpu_quotas_limit_threads(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_resources.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert host_resources.available_threads() == 64
    write(kernel, cgroup="0::/job")
    write(kernel / "sys/job", cpu__max="250000 100000")
    assert host_resources.available_threads() == 3
    write(kernel / "sys/job", cpu__max="max 100000")
    assert host_resources.available_threads() == 64
    write(kernel, cgroup="7:cpu,cpuacct:/job")
    write(kernel / "sys/cpu,cpuacct/job", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    assert host_resources.available_threads() == 1


def test_pinned_memory_is_limited_unless_privileged(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    assert host_resources.pinnable_nbytes(GB) == 8 << 20
    write(kernel, status="Name:\tx\nCapEff:\t0000000000004000")
    assert host_resources.pinnable_nbytes(GB) == GB
    write(kernel, status="CapEff:\t0000000000000001")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert host_resources.pinnable_nbytes(GB) == GB


def test_tmpfs_folders_are_not_disks(tmp_path: Path) -> None:
    assert host_resources.available_disk_nbytes(tmp_path) > 0
    if Path("/dev/shm").is_dir():
        kinds = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
        assert host_resources.lies_in_memory(Path("/dev/shm")) == (kinds.get("/dev/shm") == "tmpfs")
    assert host_resources.processor_name()
