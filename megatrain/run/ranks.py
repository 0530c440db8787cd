"""A training run with several ranks: what rank 0 does for all, what each does alone, and what they agree on.

Rank 0 finds the checkpoint to resume from, plans, prints and writes the run folder; the others follow it and print to
log files of their own. The plan is for one rank with its share of the step, the state and the machine (`plan.ranks`);
the link between ranks is timed if its bandwidth is unknown. The steps themselves are in `train.engine`.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch

from megatrain.config import Config
from megatrain.dist import ALONE, World
from megatrain.dist.processes import join
from megatrain.dist.world import refuse_unlike
from megatrain.errors import ConfigError, RankError
from megatrain.plan import Plan, Question, available_threads, find_plan, question_of_one
from megatrain.plan.ranks import lacking_links
from megatrain.spec import Hardware
from megatrain.system.environment import find_launch
from megatrain.train.events import Ended, Event, Resumed, Saved, Skipped, Stepped
from megatrain.train.options import threads_of
from megatrain.train.parity import own_sources

if TYPE_CHECKING:
    from megatrain.device import Device

T = TypeVar("T")

OWN = ("data.cache", "data.workers")
"""Keys that may differ between machines."""

LINK_NBYTES: Mapping[str, int] = {"cuda": 256 << 20, "cpu": 16 << 20}
"""Device type -> bytes that each rank sends, including to itself: about a float32 shard, and less where CPUs copy."""

FEW_NBYTES = 4096
"""Small size, for the fixed cost of a collective, in bytes per part."""

TIMES = 3
"""Timed exchanges, of which the fastest counts."""


@dataclass(frozen=True)
class Ranks:
    """This rank of a run; `local_rank` of `local_size` on its machine."""

    world: World = ALONE
    local_rank: int = 0
    local_size: int = 1
    threads: int = field(default_factory=available_threads)
    """Number of threads: this rank's share of its machine's cores."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the block, a failure of this rank is reported to the others and theirs here, as `RankError`. Until steps
        begin, a launcher's SIGTERM raises it too, as launchers end all ranks when one has ended.
        """
        if (watch := self.world.watch) is None:
            yield
            return
        watch.owns_process = True
        before = signal.signal(signal.SIGTERM, self._told_to_end)
        try:
            yield
        except BaseException as error:
            told = watch.failed(error)
            if told is error:
                raise
            raise told from error
        finally:
            signal.signal(signal.SIGTERM, before)
            watch.close()

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        assert self.world.watch is not None
        where = f"rank {self.world.rank} of {self.world.size}"
        raise self.world.watch.explained(RankError("was stopped (SIGTERM)", where=where))

    def at(self, what: str) -> None:
        """Note for the other ranks' error messages what this rank is doing from now on."""
        if self.world.watch is not None:
            self.world.watch.at(what)

    def before_it_is_ended(self, tell: Callable[[str], object]) -> None:
        """Have a thread call `tell` with the reason before this rank is ended because of another."""
        if self.world.watch is not None:
            self.world.watch.ending.append(tell)

    def follow(self, event: Event) -> None:
        """Event watcher that notes the step this rank is in."""
        if isinstance(event, Stepped | Skipped | Resumed):
            self.at(f"step {event.step + 1:,}")
        elif isinstance(event, Ended):
            self.at("the end")

    @property
    def alone(self) -> bool:
        return self.world.size == 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.world.rank == 0

    def device_of(self, name: str) -> str:
        """The device name for this rank: `cuda` becomes its own GPU. Raises `ConfigError` if two ranks share a GPU."""
        if self.alone or not name.startswith("cuda"):
            return name
        from megatrain.device.cuda import gpu_of

        device, identity = gpu_of(self.local_rank)
        told = self.world.exchange("GPUs", f"{identity} of {socket.gethostname()}")
        for rank, each in enumerate(told):
            if (first := told.index(each)) < rank:
                what, fix = f"ranks {first} and {rank} use the same GPU", "start one process per GPU"
                raise ConfigError(what, where="train.device", fix=fix)
        return device

    def planned(self, question: Question, device: Device) -> Plan:
        """The plan for one rank's share, found by rank 0, on all ranks. question: of a whole step on this machine.

        Raises `ConfigError` for steps that cannot be divided among the ranks, and rank 0's errors from `find_plan`.
        """
        size, sequences = self.world.size, question.sequences
        micro_batch = question.overrides.get("micro_batch")
        if micro_batch is None and sequences % size:
            what = f"{sequences:,} sequences per step cannot be divided evenly among {size} ranks"
            fix = "set train.micro_batch_size, or use a multiple of the number of ranks"
            raise ConfigError(what, where="train.global_batch_size", fix=fix)
        if micro_batch is not None and (count := -(-sequences // micro_batch)) < size:
            what = f"a step has {count} micro-batch{'es' * (count > 1)}, and each of {size} ranks needs one"
            raise ConfigError(what, where="train.gradient_accumulation_steps", fix="give more, or start fewer ranks")
        here = max(self.world.exchange("ranks on a machine", self.local_size))
        hardware = replace(question.hardware, devices=max(question.hardware.devices, here))
        if self.world.exchange("links", lacking_links(hardware, size, here))[0]:
            hardware = with_links(hardware, self.world, device, here)
        mine = question_of_one(replace(question, hardware=hardware), size, here)
        plans: list[Plan] = []

        def chosen() -> dict[str, Any] | None:
            if not self.leads:
                return None
            plans.append(find_plan(mine))
            return {"micro_batch": plans[0].micro_batch, **asdict(plans[0].numerics), **asdict(plans[0].policy)}

        told = self.world.agree("the plan", chosen)[0]
        assert told is not None
        if not self.leads:
            plans.append(find_plan(replace(mine, overrides=told)))
        return plans[0]

    def open_log(self, folder: Path) -> TextIO:
        """Open the log file of a rank other than 0. Raises `ConfigError` if it cannot be written."""
        path = folder / "logs" / f"rank-{self.world.rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("w", buffering=1)
        except OSError as error:
            raise ConfigError(f"cannot be written ({error.strerror or error})", where=str(path)) from error


class StopsInTime:
    """A watcher that says, once, where torchrun would kill a rank before its step and their checkpoint are over.

    seconds: from the signal until then; `None` where nobody kills.
    """

    def __init__(self, seconds: float | None, say: Callable[[str], None]) -> None:
        self._seconds, self._say, self._step = seconds, say, 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._step = event.seconds
        elif isinstance(event, Saved) and self._seconds is not None and self._step + event.seconds > self._seconds:
            needed = self._step + event.seconds
            what = f"a step and its checkpoint take {needed:.0f} s, and torchrun kills {self._seconds:.0f} s"
            fix = f"set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * needed:.0f} to leave them the time"
            self._say(f"{what} after a signal; {fix}")
            self._seconds = None


def joined(config: Config) -> Ranks:
    """Join the other ranks, if a launcher started several, and return this one.

    Raises `ConfigError` for keys that several ranks do not support, and `RankError` if the others do not join, or have
    another configuration or other code.
    """
    launch = find_launch()
    if launch is None:
        return Ranks()
    refuse_what_ranks_lack(config)
    device = "cuda" if config.train.device.startswith("cuda") else "cpu"
    world = join(launch.rank, launch.size, device, launch.address)
    local_size = world.exchange("machines", socket.gethostname()).count(socket.gethostname())
    shared = {name: value for name, value in _rows(config.model_dump(mode="json")).items() if name not in OWN}
    refuse_unlike("has", world.exchange("what each runs", {**_libraries(), **shared}))
    ranks = Ranks(world, launch.local_rank, local_size, threads_of(world))
    torch.set_num_threads(ranks.threads)  # torchrun's default is 1
    return ranks


def _libraries() -> dict[str, str]:
    """What numbers and the order of collectives come from, besides the configuration. Machines of one cluster may have
    environments of their own, of which one was forgotten."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {**versions, "megatrain with the sources": own_sources()[:12]}


def _rows(tree: Mapping[str, Any], above: str = "") -> dict[str, object]:
    """A configuration as dotted keys, for a line about one."""
    rows: dict[str, object] = {}
    for name, value in tree.items():
        key = f"{above}{name}"
        rows |= _rows(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return rows


def refuse_what_ranks_lack(config: Config) -> None:
    """Raise `ConfigError` for keys that several ranks do not support."""
    lacking = {
        "train.device": (
            config.train.device not in ("cpu", "cuda", "cuda:0"),
            "each rank uses the GPU with its local rank",
            "set cuda:0, or cpu",
        ),
        "checkpoint.deadline_seconds": (
            config.checkpoint.deadline_seconds is not None,
            "one rank cannot abandon a step: the others would wait in a collective, and save nothing",
            "leave it out, and allow enough time for a step and a save (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
        ),
    }
    for key, (lacks, why, fix) in lacking.items():
        if lacks:
            raise ConfigError(f"with several ranks {why}", where=key, fix=fix)


def own_of(world: World, batches: Sequence[T]) -> Sequence[T]:
    """This rank's share of the micro-batches for a validation loss; if there are too few, all ranks get all."""
    return batches[world.rank :: world.size] if len(batches) >= world.size else batches


def with_links(hardware: Hardware, world: World, device: Device, here: int) -> Hardware:
    """`hardware` with link bandwidths measured by a few timed all-to-alls. Collective.

    Gradients are summed by all-to-alls, which are most of a step's traffic. All-gathers are not timed. Collectives are
    assumed to use the bus unless they are faster than it. here: number of ranks on each machine.
    """
    size = world.size
    part = LINK_NBYTES.get(device.torch_device.type, LINK_NBYTES["cpu"]) // size
    few, many = (_exchange_seconds(world, device, nbytes) for nbytes in (FEW_NBYTES, part))
    carrying = max(many - few, 0.01 * many)
    rates: dict[str, Any] = {"link_bandwidth": max(1, here - 1) * part / carrying, "link_seconds": few}
    rates["node_bandwidth"] = here * (size - here) * part / carrying if size > here else None
    told = "measured: an all-to-all among the ranks of this run"
    apart = max(1, here - 1) * part / carrying > hardware.fetch_bandwidth
    route = "links of its own, which are quicker than the bus" if apart else "the bus, which is quicker than the link"
    sources = dict(hardware.sources) | dict.fromkeys(rates, told) | {"link_route": f"assumed: {route}"}
    return replace(hardware, **rates, link_route="direct" if apart else "bus", sources=tuple(sources.items()))


def _exchange_seconds(world: World, device: Device, nbytes: int) -> float:
    """Seconds of an all-to-all of `nbytes` from each rank to each: the best of several, on the slowest rank."""
    assert world.device is not None
    sent, received = (torch.zeros(world.size * nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
    times = []
    for _ in range(1 + TIMES):  # the first opens connections
        world.exchange("timing the link", nbytes)
        device.synchronize()
        begin = time.perf_counter()
        world.device.all_to_all(received, sent)
        device.synchronize()
        times.append(time.perf_counter() - begin)
    return max(world.exchange("the link's seconds", min(times[1:])))
