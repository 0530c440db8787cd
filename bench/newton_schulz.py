"""Times Newton-Schulz with symmetric products computed by blocks and whole, and compares the bits.

    python -m bench.newton_schulz [--rows N] [--columns N] [--device D] [--precision P] [--rounds N] [--threads N]

Both run in turn; of each the least seconds count: of the processor on a cpu, where others may run beside, and of the
clock on a GPU. Counted beside them: operations, by torch's own counter.
"""

from __future__ import annotations

import argparse
import time
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatrain.optim import Muon
from megatrain.spec import layout
from megatrain.train.torch_muon import orthogonalize


def main() -> None:
    parser = argparse.ArgumentParser(description="symmetric products of Newton-Schulz in blocks")
    for name, least in (("rows", 4096), ("columns", 4096), ("rounds", 2), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=least)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape, on_gpu = (1, args.rows, args.columns), args.device != "cpu"
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    matrix = torch.randn(args.rows * args.columns, generator=torch.Generator().manual_seed(0)).to(args.device, dtype)
    heights = {"whole": 1 << 30, "in blocks": layout.SYMMETRIC_ROWS}
    results, seconds, flops = {}, dict.fromkeys(heights, float("inf")), {}
    for _ in range(args.rounds):
        for name, height in heights.items():
            with patch.object(layout, "SYMMETRIC_ROWS", height), FlopCounterMode(display=False) as counter:
                results[name] = matrix.clone()
                synchronize(on_gpu)
                clock = time.perf_counter if on_gpu else time.process_time
                began = clock()
                orthogonalize(results[name], shape, Muon(newton_schulz=args.precision))
                synchronize(on_gpu)
                seconds[name] = min(seconds[name], clock() - began)
            flops[name] = counter.get_total_flops()
    first, second = results.values()
    print(f"{args.rows} x {args.columns}, {args.precision}, {args.device}, blocks of {layout.SYMMETRIC_ROWS} rows")
    print(f"seconds    {seconds['whole']:.3f} whole, {seconds['in blocks'] / seconds['whole']:.3f} of that in blocks")
    print(f"operations {flops['whole']:.3g} whole, {flops['in blocks'] / flops['whole']:.3f} of that in blocks")
    print(f"bits       {'equal' if torch.equal(first, second) else 'differ'}")


def synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
