"""What fresh memory costs on this machine: first touch of ordinary and of huge pages, beside a copy into touched ones,
and zeros written to fresh pages by one thread and by all, as host memory is before it is page-locked.

python -m bench.pages [--mib N] [--rounds N]
"""

from __future__ import annotations

import argparse
import mmap
import time
from statistics import median

import numpy as np
import torch

from megatrain.device.host_memory import mapped
from megatrain.plan.host_resources import available_threads


def milliseconds_per_mib(mib: int, rounds: int, *advice: int) -> tuple[float, float]:
    """Medians for a copy into fresh pages and one into touched pages; `advice` goes to `madvise`."""
    source = np.ones(mib << 20, np.uint8)
    mapping = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for each in advice:
        mapping.madvise(each)
    target = np.frombuffer(mapping, np.uint8)
    fresh: list[float] = []
    touched: list[float] = []
    for _ in range(rounds):
        for times in (fresh, touched):
            began = time.perf_counter()
            target[:] = source
            times.append((time.perf_counter() - began) * 1e3 / mib)
        mapping.madvise(mmap.MADV_DONTNEED)
    return median(fresh), median(touched)


def zeroing_milliseconds_per_mib(mib: int, rounds: int) -> dict[int, float]:
    """Threads -> the median for zeros into fresh memory of the engine's kind, by turns."""
    spent: dict[int, list[float]] = {1: [], available_threads(): []}
    before = torch.get_num_threads()
    for _ in range(rounds):
        for threads, times in spent.items():
            _, memory = mapped(mib << 20)
            torch.set_num_threads(threads)
            began = time.perf_counter()
            memory.zero_()
            times.append((time.perf_counter() - began) * 1e3 / mib)
    torch.set_num_threads(before)
    return {threads: median(times) for threads, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="what fresh memory costs")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for name, advice in (("ordinary pages", ()), ("huge pages", (mmap.MADV_HUGEPAGE,))):
        fresh, touched = milliseconds_per_mib(arguments.mib, arguments.rounds, *advice)
        print(f"{name:<15} fresh {fresh:.3f} ms/MiB, touched {touched:.3f} ms/MiB")
    for threads, spent in zeroing_milliseconds_per_mib(8 * arguments.mib, arguments.rounds).items():
        print(f"zeros by {threads} threads: {spent:.3f} ms/MiB")


if __name__ == "__main__":
    main()
