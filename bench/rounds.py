"""Planned tokens per second of an 8B model against sequences per step: in rounds where those are quicker, and without.

python -m bench.rounds
"""

from __future__ import annotations

from dataclasses import replace

from bench.shapes import llama_shape
from megatrain.errors import DoesNotFit
from megatrain.plan import Question, find_plan, machine
from megatrain.spec import Limits

LENGTH = 8192
SEQUENCES = (2, 4, 16, 64)
DEVICES = {"H200": ("h200", None), "H100": ("h100", None), "H100, 24 GiB": ("h100", 24), "RTX 5090": ("rtx-5090", None)}


def rate(question: Question) -> str:
    """Tokens per second, and sequences of a round where there are several rounds."""
    try:
        plan = find_plan(question)
    except DoesNotFit:
        return "does not fit"
    size = plan.policy.micro_batches_per_round * plan.micro_batch
    return f"{plan.tokens_per_second:,.0f}" + (f" (rounds of {size})" if 0 < size < question.sequences else "")


def main() -> None:
    print("| planned tokens/s | " + " | ".join(f"{count} x {LENGTH:,}" for count in SEQUENCES) + " |")
    print("|---|" + "---|" * len(SEQUENCES))
    model = llama_shape("8B", 32, 4096)
    for words, (name, gigabytes) in DEVICES.items():
        limits = Limits(device_nbytes=gigabytes << 30 if gigabytes else None)
        asked = [Question(model, machine(name), count * LENGTH, LENGTH, limits=limits) for count in SEQUENCES]
        one = [replace(question, overrides={"micro_batches_per_round": 0}) for question in asked]
        print(f"| {words} | " + " | ".join(map(rate, asked)) + " |", flush=True)
        print(f"| {words}, one round | " + " | ".join(map(rate, one)) + " |", flush=True)


if __name__ == "__main__":
    main()
