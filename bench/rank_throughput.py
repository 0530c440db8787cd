"""Measures what two ranks lose: tokens per second of one run of two against two independent runs, one thread each.

    python -m bench.rank_throughput [--pairs N] [--delivery gather|shared]

Two processes on this machine's processors take turns, at the same time as each other: a step of one model that both
train over gloo, each with its own sequences, and a step in which each trains a model of its own on as many. What the
two do apart is what their processors give; the ratio of tokens per second, summed over both, is what training together
keeps of it, formed turn by turn. The model is a Llama of 12M parameters in float32, in steps of so many tokens that
compute is most of them. Left out: GPUs, and links of several machines.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from typing import TYPE_CHECKING

from megatrain.spec.policy import Delivery

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

RANKS = 2
SEQUENCES, LENGTH = 2, 512
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}

Turn = tuple[float, float]
"""Tokens per second of both: together, and apart."""


def serve(rank: int, port: int, pairs: int, delivery: Delivery, answers: SimpleQueue[list[Turn]]) -> None:
    """One of the two processes: both kinds of step, by turns. The first tells what they have reached."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatrain import Engine
    from megatrain.dist import ALONE
    from megatrain.dist.processes import join
    from megatrain.spec import Policy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))  # type: ignore[arg-type]
    ids = torch.randint(SHAPE["vocab_size"], (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids, "labels": ids}
    world = join(rank, RANKS, "cpu")

    def engine(of: int) -> Engine:
        alone = of == 1
        policy = Policy(shares_memory=alone, host_threads=1, delivery="gather" if alone else delivery)
        numbered = ALONE if alone else world
        return Engine.from_model(model, precision="fp32", policy=policy, verify=False, world=numbered)

    def rate(one: Engine, *, waits: bool) -> float:
        """Tokens per second of both in a step; of ranks that wait for each other, by the time of the slower."""
        world.meet()
        begin = time.perf_counter()
        one.step([batch], 1e-4)
        taken = world.exchange("seconds", time.perf_counter() - begin)
        tokens = SEQUENCES * LENGTH
        return RANKS * tokens / max(taken) if waits else sum(tokens / each for each in taken)

    found = []
    with engine(RANKS) as together, engine(1) as apart:
        for turn in range(1 + pairs):  # the first warms up
            turns = [(together, True), (apart, False)]
            rates = {waits: rate(one, waits=waits) for one, waits in (turns if turn % 2 else reversed(turns))}
            found.append((rates[True], rates[False]))
    if rank == 0:
        answers.put(found[1:])


def measured(pairs: int, delivery: Delivery) -> list[Turn]:
    """Of each turn. Raises `RuntimeError` where a process fails."""
    import multiprocessing

    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers: SimpleQueue[list[Turn]] = spawn.SimpleQueue()
    processes = [spawn.Process(target=serve, args=(rank, port, pairs, delivery, answers)) for rank in range(RANKS)]
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        for process in processes:
            process.start()
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a rank has failed")
    return answers.get()


def table(found: dict[Delivery, list[Turn]]) -> list[str]:
    lines = [
        "| delivery | together, tokens/s | apart, tokens/s | ratio, median of turns | least, most |",
        "|---" * 5 + "|",
    ]
    for delivery, turns in found.items():
        ratios = [together / apart for together, apart in turns]
        both = " | ".join(f"{statistics.median(rates):,.0f}" for rates in zip(*turns, strict=True))
        span = f"{min(ratios):.2f}, {max(ratios):.2f}"
        lines.append(f"| {delivery} | {both} | {statistics.median(ratios):.2f} | {span} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="two ranks against two runs apart, in tokens per second")
    parser.add_argument("--pairs", type=int, default=9, help="turns (default: 9)")
    parser.add_argument("--delivery", choices=("gather", "shared"), help="of weights (default: both, one by one)")
    arguments = parser.parse_args()
    deliveries: list[Delivery] = [arguments.delivery] if arguments.delivery else ["gather", "shared"]
    print("\n".join(table({each: measured(arguments.pairs, each) for each in deliveries})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
