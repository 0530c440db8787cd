"""Measures what two ranks lose: tokens per second of one run of two against two independent runs, one thread each.

    python -m bench.rank_throughput [--pairs N] [--delivery gather|shared] [--sequences N]

Two processes on this machine's processors take turns, at the same time as each other: a step of one model that both
train over gloo, each with its own sequences, and a step in which each trains a model of its own on as many. What the
two do apart is what their processors give; the ratio of tokens per second, summed over both, is what training together
keeps of it, formed turn by turn; and that of processor time, which other programs disturb less, and waits not at all.
The model is a Llama of 12M parameters in float32. On processors nothing hides what ranks exchange: the cores that
compute move it, too, so a step keeps more the more tokens it has. It counts as compute-bound where the exchange alone
(weights gathered twice, gradients summed once), timed with nothing else to do, takes at most a twenty-fifth of compute:
0.95 leaves a twentieth for everything. The table says how much it takes. Left out: GPUs, and links of several machines.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.spec.policy import Delivery

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from megatrain.dist import World

RANKS = 2
SEQUENCES, LENGTH = 4, 512
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


@dataclass(frozen=True)
class Found:
    """Of one delivery, turn by turn: tokens per second, and tokens per second of processor time; and what the exchange
    alone takes of what compute does."""

    turns: list[Turn]
    processor_turns: list[Turn]
    exchange_share: float


def exchange_seconds(world: World, elements: int) -> float:
    """To gather so many float32 numbers twice and to sum them once, the quickest of some times."""
    import torch

    own, whole, received = (torch.zeros(count) for count in (elements // RANKS, elements, elements))
    taken = []
    for _ in range(5):
        world.meet()
        begin = time.perf_counter()
        for _ in range(2):
            world.gather(whole.view(torch.uint8), own.view(torch.uint8))
        world.reduce(own, received, whole)
        taken.append(time.perf_counter() - begin)
    return max(world.exchange("seconds", min(taken)))


def serve(rank: int, port: int, pairs: int, delivery: Delivery, sequences: int, answers: SimpleQueue[Found]) -> None:
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
    ids = torch.randint(SHAPE["vocab_size"], (sequences, LENGTH), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids, "labels": ids}
    world = join(rank, RANKS, "cpu")

    def engine(of: int) -> Engine:
        alone = of == 1
        policy = Policy(shares_memory=alone, host_threads=1, delivery="gather" if alone else delivery)
        numbered = ALONE if alone else world
        return Engine.from_model(model, precision="fp32", policy=policy, verify=False, world=numbered)

    def rates(one: Engine, *, waits: bool) -> Turn:
        """Tokens per second, and per second of processor time, of both in a step; of ranks that wait for each other, by
        the time of the slower."""
        world.meet()
        begin, processor = time.perf_counter(), time.process_time()
        one.step([batch], 1e-4)
        mine = time.perf_counter() - begin, time.process_time() - processor
        taken, used = zip(*world.exchange("seconds", mine), strict=True)
        tokens = sequences * LENGTH
        return RANKS * tokens / max(taken) if waits else sum(tokens / each for each in taken), RANKS * tokens / sum(
            used
        )

    elements = sum(each.numel() for each in model.parameters()) // RANKS * RANKS
    exchange = exchange_seconds(world, elements)
    found, used, compute = list[Turn](), list[Turn](), list[float]()
    with engine(RANKS) as together, engine(1) as apart:
        for turn in range(1 + pairs):  # the first warms up
            turns = [(together, True), (apart, False)]
            both = {waits: rates(one, waits=waits) for one, waits in (turns if turn % 2 else reversed(turns))}
            of_clock, of_processor = zip(both[True], both[False], strict=True)
            found.append(of_clock)
            used.append(of_processor)
            timeline = apart.parts.streamer.timeline
            assert timeline is not None
            compute.append(timeline.busy_seconds("compute"))
    if rank == 0:
        answers.put(Found(found[1:], used[1:], exchange / min(compute)))


def measured(pairs: int, delivery: Delivery, sequences: int) -> Found:
    """Raises `RuntimeError` where a process fails."""
    import multiprocessing

    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers: SimpleQueue[Found] = spawn.SimpleQueue()
    processes = [
        spawn.Process(target=serve, args=(rank, port, pairs, delivery, sequences, answers)) for rank in range(RANKS)
    ]
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


def table(found: dict[Delivery, Found]) -> list[str]:
    lines = [
        "| delivery | together, tokens/s | apart, tokens/s | ratio, median of turns | least, most "
        "| ratio by processor time | the exchange alone, of compute |",
        "|---" * 7 + "|",
    ]
    for delivery, each in found.items():
        ratios, processor = ([together / apart for together, apart in of] for of in (each.turns, each.processor_turns))
        both = " | ".join(f"{statistics.median(rates):,.0f}" for rates in zip(*each.turns, strict=True))
        cells = [delivery, both, f"{statistics.median(ratios):.3f}", f"{min(ratios):.2f}, {max(ratios):.2f}"]
        lines.append(f"| {' | '.join(cells)} | {statistics.median(processor):.3f} | {each.exchange_share:.1%} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="two ranks against two runs apart, in tokens per second")
    parser.add_argument("--pairs", type=int, default=9, help="turns (default: 9)")
    parser.add_argument("--delivery", choices=("gather", "shared"), help="of weights (default: both, one by one)")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help=f"of a step of each, of {LENGTH} tokens")
    arguments = parser.parse_args()
    deliveries: list[Delivery] = [arguments.delivery] if arguments.delivery else ["gather", "shared"]
    print("\n".join(table({each: measured(arguments.pairs, each, arguments.sequences) for each in deliveries})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
