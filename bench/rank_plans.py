"""What several GPUs would reach, as the planner sees it, beside what other systems have published.

    python -m bench.rank_plans [--docs FILE ...]

Nothing of ours here is measured: rows that say so are planned, `megatrain plan MODEL --hardware MACHINE --ranks N` for
as many sequences on each GPU, or in each step, as the row says. Machines are described (`machines.json`), with what
joins their GPUs. `--docs` replaces the table between its marks. Left out: how others run their steps, which differs in
precision and in what is offloaded (`bench.published` replays some on one GPU), so that rows of one model tell a class
of speed and no contest. It takes some minutes of processor time, and no network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.scaling import filled
from megatrain.commands.plan import find_model
from megatrain.plan import Question, find_plan, machine, question_of_one
from megatrain.spec import ModelSpec

RANKS = (1, 2, 4, 8)

ROUNDPIPE = "RoundPipe, fp16"
"""github.com/ITcarrot/RoundPipe @e813c67, docs/draw/index.fig3.py: one node with 8 RTX 4090; optimizer in float32 on
the host; length and batch are not stated."""

LLMQ = "LLMQ, bf16 master weights and moments"
"""github.com/IST-DASLab/llmq @b77d969, benchmarks/4090x1.md, 4090x4.md, H100x1.md and H100x8.md: bf16, step 3."""

ZERO = "DeepSpeed ZeRO-3, CPU offload, by LLaMA-Factory"
"""The same files: the second step alone."""


@dataclass(frozen=True)
class Row:
    """model on a machine: so many sequences of `length` on each GPU, or of a whole step, and what others have
    published of it, by the number of GPUs."""

    model: str
    machine: str
    length: int
    each: int = 0
    together: int = 0
    others: tuple[tuple[str, Mapping[int, float]], ...] = ()

    def sequences(self, ranks: int) -> int:
        return self.together or self.each * ranks

    @property
    def step(self) -> str:
        return f"{self.together} x {self.length:,}" if self.together else f"{self.each} x {self.length:,} each"


ROWS = (
    Row(
        *("Qwen/Qwen3-1.7B", "8x-rtx-4090", 4096, 16),
        others=((ROUNDPIPE, {1: 8880.99, 2: 17025.55, 4: 33178.39, 8: 65416.83}),),
    ),
    Row(
        *("meta-llama/Llama-3.1-8B", "8x-rtx-4090", 4096, 16),
        others=((ROUNDPIPE, {1: 3142.17, 2: 6259.09, 4: 12277.77, 8: 24274.54}),),
    ),
    Row(
        *("Qwen/Qwen3-32B", "8x-rtx-4090", 4096, 4),
        others=((ROUNDPIPE, {1: 740.46, 2: 1476.11, 4: 2897.08, 8: 5516.22}),),
    ),
    Row(
        *("Qwen/Qwen2.5-7B", "4x-rtx-4090", 1024),
        together=512,
        others=((LLMQ, {1: 2779, 4: 10927}), (ZERO, {1: 2523, 4: 6929})),
    ),
    Row(
        *("Qwen/Qwen2.5-14B", "4x-rtx-4090", 1024),
        together=512,
        others=((LLMQ, {1: 1349, 4: 5261}), (ZERO, {1: 1135, 4: 2630})),
    ),
    Row(*("Qwen/Qwen2.5-7B", "8x-h100", 1024), together=512, others=((LLMQ, {1: 13818, 8: 112_000}),)),
    Row("meta-llama/Llama-3.3-70B-Instruct", "8x-h100", 4096, 16),
    Row("meta-llama/Llama-3.1-8B", "2x-rtx-5090", 4096, 16),
    Row("meta-llama/Llama-3.1-8B", "4x-gh200", 4096, 16),
)


def planned(row: Row, model: ModelSpec, ranks: int) -> float:
    """Tokens per second of all ranks."""
    question = Question(model, machine(row.machine), row.sequences(ranks) * row.length, row.length, saves=True)
    return find_plan(question_of_one(question, ranks, ranks)).tokens_per_second


def table(rows: tuple[Row, ...] = ROWS) -> list[str]:
    lines = [f"| model, machine, sequences of a step | tokens/s | {' | '.join(map(str, RANKS))} |"]
    lines.append("|---" * (2 + len(RANKS)) + "|")
    for row in rows:
        model = find_model(row.model, "bf16")
        counts = [ranks for ranks in RANKS if ranks <= machine(row.machine).devices]
        name = f"{row.model.partition('/')[2]}, {row.machine}, {row.step}"
        lines.append(_line(name, "**planned**", {ranks: planned(row, model, ranks) for ranks in counts}))
        print(lines[-1], file=sys.stderr, flush=True)
        lines += [_line("", who, rates) for who, rates in row.others]
    return lines


def _line(name: str, who: str, rates: Mapping[int, float]) -> str:
    cells = " | ".join(f"{rates[ranks]:,.0f}" if ranks in rates else "" for ranks in RANKS)
    return f"| {name} | {who} | {cells} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="planned speeds of several GPUs beside published ones")
    parser.add_argument("--docs", type=Path, nargs="*", default=(), help="files in which to replace the table")
    arguments = parser.parse_args()
    lines = table()
    for file in arguments.docs:
        file.write_text(filled(file.read_text(), {"table": lines}, by="bench.rank_plans"))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
