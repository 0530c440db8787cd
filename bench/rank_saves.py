"""Counts the bytes that ranks receive from each other for one checkpoint: written by all of them, and by the first.

    python -m bench.rank_saves [--ranks N] [--parameters N]

Ranks are threads, and what carries bytes between them while they save is counted. A Llama is saved in a folder that all
ranks know, and in one that each of them knows as another. The clock is not asked: threads of one process share
processors and a drive.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.exporting import config_of
from megatrain import Engine, Policy
from megatrain.dist import Collectives, World
from tests.ranks import together, worlds

MAKING = threading.Lock()
"""Making an engine draws random numbers, for all threads."""


@dataclass
class Counting:
    """Carries bytes between ranks, and counts those that come from others."""

    carrier: Collectives
    received: int = 0

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        self.received += whole.numel() - own.numel()
        self.carrier.all_gather(whole, own)

    def all_to_all(self, received: Tensor, sent: Tensor, *nbytes: object) -> None:
        raise NotImplementedError("a save does not sum")

    def close(self) -> None:
        self.carrier.close()


def received_nbytes(model: PreTrainedModel, world: World, folder: Path, *, shared: bool) -> tuple[int, int]:
    """What this rank has received for a checkpoint, and the bytes of that."""
    assert world.beside is not None
    counting = Counting(world.beside)
    with MAKING:
        engine = Engine.from_model(model, policy=Policy(), verify=False, world=replace(world, beside=counting))
    with engine:
        with MAKING:
            save = engine.save(folder if shared or world.rank == 0 else folder / str(world.rank))
        save.wait()
        assert bool(save.streamed) != shared
        return counting.received, save.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes that ranks receive from each other for one checkpoint")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parameters", type=float, default=3e7)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_config(config_of(arguments.parameters, 0))
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters, {arguments.ranks} ranks")
    print("| written by | bytes of the checkpoint | received by each rank |\n|---|---|---|")
    for shared in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            found = together(
                worlds(arguments.ranks),
                lambda world, folder=folder, shared=shared: received_nbytes(model, world, Path(folder), shared=shared),
            )
        print(f"| {'all' if shared else 'the first'} | {found[0][1]:,} | {max(nbytes for nbytes, _ in found):,} |")


if __name__ == "__main__":
    main()
