"""How fast the fused AdamW is, beside torch's fused AdamW and beside a plain copy of as many bytes.

    python -m bench.adamw [--millions N] [--rounds N] [--threads N] [--json FILE]

Contenders, with the bytes that each moves (read plus written) per parameter:

    split master    26    ours: split master, bfloat16 gradients
    float32 master  28    ours: float32 weights and gradients
    torch fused     28    torch.optim.AdamW(fused=True): float32 weights and gradients
    torch bf16      40    the job of the first in torch: cast gradient up, torch fused, cast weight down
    copy            26    Tensor.copy_ of 13 bytes

The update is bound by memory, so bytes are the honest unit: two passes that use memory equally well differ in
parameters per second by their bytes, 28 / 26 for torch fused to the split master and 40 / 26 for torch bf16.

Contenders run in turn, a round at a time, in an order that rotates, and a ratio is the median over rounds of
the ratio within a round: what slows the machine for a while slows all of them. Those that can share arrays
do, because some memory is slower than other memory for as long as a process lives. Arrays begin at a page, as
in the engine, and are written before they are timed, so that no page is the shared page of zeros. Left out:
other dtypes, and the GPU.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain.optim import AdamW, StateArrays, update_on_host
from megatrain.plan.host_resources import processor_name

TORCH, TORCH_BF16, COPY = "torch fused", "torch bf16", "copy"
SETTLE_SECONDS = 0.02  # torch's OpenMP threads spin for a while after their work and would take a core from the next
COPY_NBYTES = 26  # per parameter, read plus written; half of it is the size of what is copied


@dataclass(frozen=True)
class Contender:
    """Something to time: `run` moves `nbytes_per_param` (read plus written) for each parameter."""

    name: str
    nbytes_per_param: int
    run: Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Medians over rounds. Ratios to torch are of parameters per second, that to the copy of bytes per second."""

    name: str
    params_per_second: float
    nbytes_per_second: float
    ratio_to_torch: float
    ratio_to_torch_bf16: float
    ratio_to_copy: float


def contenders(nparams: int, threads: int) -> list[Contender]:
    """All five, on arrays of `nparams` elements that take 50 bytes per parameter."""
    adamw = AdamW()
    scalars = adamw.scalars(lr=adamw.lr, step=10)
    segments = [(0, nparams, True)]
    weight, m, v, grad = (_filled(nparams, np.float32, value) for value in (0.5, 1e-4, 1e-6, 2**-7))
    hi, lo, grad_bits, weight_bits = (_filled(nparams, np.uint16, bits) for bits in (0x3F00, 0, 0x3C00, 0x3F00))

    split, float32 = StateArrays(hi, lo, (m, v)), StateArrays(weight, None, (m, v))

    parameter = torch.nn.Parameter(torch.from_numpy(weight))
    parameter.grad = torch.from_numpy(grad)
    theirs = torch.optim.AdamW([parameter], lr=adamw.lr, fused=True)
    moments = {"exp_avg": torch.from_numpy(m), "exp_avg_sq": torch.from_numpy(v)}
    theirs.state[parameter] = {"step": torch.tensor(10.0), **moments}
    grad_f32, grad_bf16 = torch.from_numpy(grad), torch.from_numpy(grad_bits).view(torch.bfloat16)
    weight_f32, weight_bf16 = parameter.detach(), torch.from_numpy(weight_bits).view(torch.bfloat16)
    source, target = (torch.from_numpy(_filled(COPY_NBYTES // 2 * nparams, np.uint8, b)) for b in (1, 2))

    def torch_bf16() -> None:
        grad_f32.copy_(grad_bf16)
        theirs.step()
        weight_bf16.copy_(weight_f32)

    return [
        Contender("split master", 26, lambda: update_on_host(split, grad_bits, scalars, segments, threads)),
        Contender("float32 master", 28, lambda: update_on_host(float32, grad, scalars, segments, threads)),
        Contender(TORCH, 28, theirs.step),
        Contender(TORCH_BF16, 40, torch_bf16),
        Contender(COPY, COPY_NBYTES, lambda: target.copy_(source)),
    ]


def measure(nparams: int, rounds: int, threads: int) -> list[Row]:
    """Time the contenders in turn, `rounds` times after one untimed round, with `threads` threads each."""
    AdamW().warm_up()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        field = contenders(nparams, threads)
        seconds: dict[str, list[float]] = {one.name: [] for one in field}
        for one in field:
            one.run()
        for turn in range(rounds):
            for one in field[turn % len(field) :] + field[: turn % len(field)]:
                time.sleep(SETTLE_SECONDS)
                began = time.perf_counter()
                one.run()
                seconds[one.name].append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return [_row(one, nparams, seconds) for one in field]


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one line each."""
    lines = [
        f"{'':14}{'Gparam/s':>10}{'GB/s':>8}{'params/s: / torch fused':>26}{'/ torch bf16':>14}{'bytes/s: / copy':>18}"
    ]
    for row in rows:
        speeds = f"{row.params_per_second / 1e9:10.2f}{row.nbytes_per_second / 1e9:8.1f}"
        ratios = f"{row.ratio_to_torch:26.2f}{row.ratio_to_torch_bf16:14.2f}{row.ratio_to_copy:18.2f}"
        lines.append(f"{row.name:14}{speeds}{ratios}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adamw", description="Fused AdamW against torch and a copy.")
    parser.add_argument("--millions", type=float, default=64, help="parameters, in millions of 2**20")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds")
    parser.add_argument("--threads", type=int, default=2, help="threads for each contender")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args(arguments)
    nparams = int(options.millions * 2**20)
    rows = measure(nparams, options.rounds, options.threads)
    print(f"{nparams} parameters, {options.threads} threads, medians of {options.rounds} rounds")
    print(table(rows))
    if options.json:
        machine = {"machine": processor_name(), "cpus": os.cpu_count(), "torch": torch.__version__}
        run = {"nparams": nparams, "rounds": options.rounds, "threads": options.threads}
        report = machine | run | {"rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _filled(length: int, dtype: type, value: float) -> NDArray[Any]:
    """An array of one value, at the beginning of a page."""
    nbytes = length * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    skipped = -raw.ctypes.data % mmap.PAGESIZE
    array: NDArray[Any] = raw[skipped : skipped + nbytes].view(dtype)
    array[:] = value
    return array


def _row(one: Contender, nparams: int, seconds: dict[str, list[float]]) -> Row:
    mine = seconds[one.name]

    def speed_relative_to(other: str) -> float:
        return median(theirs / t for theirs, t in zip(seconds[other], mine, strict=True))

    return Row(
        name=one.name,
        params_per_second=nparams / median(mine),
        nbytes_per_second=nparams * one.nbytes_per_param / median(mine),
        ratio_to_torch=speed_relative_to(TORCH),
        ratio_to_torch_bf16=speed_relative_to(TORCH_BF16),
        ratio_to_copy=speed_relative_to(COPY) * one.nbytes_per_param / COPY_NBYTES,
    )


if __name__ == "__main__":
    main()
