"""Memory nodes: read from a folder like the kernel's, bound by its call, and threads kept beside them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megatrain.device.base import Errand
from megatrain.device.host_memory import Node, bind, binds, mapped, node_of, numbers
from megatrain.device.worker import WorkerStream, close_workers, worker_of

GPU = "0000:65:00.0"


def machine(root: Path, *, nodes: dict[int, str], gpu: str | None) -> tuple[Path, Path]:
    """Folders like /sys/devices/system/node and /sys/bus/pci/devices. nodes: number -> its processors."""
    system, devices = root / "node", root / "pci"
    (devices / GPU).mkdir(parents=True)
    for number, processors in nodes.items():
        (system / f"node{number}").mkdir(parents=True)
        (system / f"node{number}" / "cpulist").write_text(processors + "\n")
    system.mkdir(exist_ok=True)
    (system / "has_memory").write_text(",".join(map(str, nodes)) + "\n")
    if gpu is not None:
        (devices / GPU / "numa_node").write_text(gpu + "\n")
    return system, devices


def test_a_devices_numa_node_is_found(tmp_path: Path) -> None:
    mine = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    folders = machine(tmp_path, nodes={0: "900-907", 1: f"{mine},908"}, gpu="1")
    assert node_of(GPU.upper(), *folders) == Node(1, 2, frozenset(os.sched_getaffinity(0)))
    assert node_of("0000:01:00.0", *folders) is None, "a device that is not there"


@pytest.mark.parametrize(
    ("nodes", "gpu"), [({0: "0-1"}, "0"), ({0: "0", 1: "1"}, "-1"), ({0: "0", 1: "1"}, None), ({0: "0", 1: "1"}, "5")]
)
def test_no_numa_node_without_choice_or_information(nodes: dict[int, str], gpu: str | None, tmp_path: Path) -> None:
    assert node_of(GPU, *machine(tmp_path, nodes=nodes, gpu=gpu)) is None


def test_no_numa_node_without_sysfs(tmp_path: Path) -> None:
    assert node_of(GPU, tmp_path / "a", tmp_path / "b") is None


def test_kernel_cpu_lists_are_parsed() -> None:
    assert numbers("") == set()
    assert numbers("0") == {0}
    assert numbers("0-2,5,8-9") == {0, 1, 2, 5, 8, 9}


def test_memory_is_allocated_even_if_binding_fails() -> None:
    for number in (0, 63):  # one that is there, and one that is not
        _, memory = mapped(100_000, Node(number, 2, frozenset()))
        assert not memory.any()
        memory.fill_(7)
        assert int(memory.sum()) == 700_000
    assert not binds(63)
    assert not bind(12345, 4096, 0), "no address of a page"


def test_threads_are_bound_to_the_numa_node() -> None:
    before, one = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}
    workers = {"host": WorkerStream("host", one)}
    found: list[set[int]] = []

    def work() -> None:
        found.append(os.sched_getaffinity(0))
        helper = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        helper.start()
        helper.join()

    for name in ("host", "pack"):
        worker_of(workers, name).submit(Errand("look"), work).wait()
    close_workers(workers)
    assert found == [one] * 4
    assert os.sched_getaffinity(0) == before
