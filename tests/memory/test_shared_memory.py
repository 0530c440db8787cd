"""Memory that ranks of a machine share: what one writes another reads, and who cannot share is told, on all ranks."""

from __future__ import annotations

import itertools
import os

import pytest

from megatrain.device import open_device
from megatrain.device.host_memory import anonymous_file, identity_of, mapped_file
from megatrain.dist import World
from megatrain.errors import DeviceError, MegaTrainError, PlanError
from megatrain.memory import LeasedBuffers, Pool, SharedMemory, shared_memory
from megatrain.memory.ledger import Ledger
from megatrain.schedule import Buffer, Use
from megatrain.schedule.contents import USED
from megatrain.schedule.ops import Access, Op, Peer
from tests.ranks import together, worlds

SIZES = {"host/weights/0": 100, "host/shared_gradients/0": 64}


def test_ranks_share_memory_and_count_only_their_own() -> None:
    def work(world: World) -> None:
        with_others = SharedMemory(SIZES, device := open_device("cpu"), world)
        ledger = Ledger({"host": 100})
        pool = Pool(device, ledger, shared=with_others)
        own = Buffer("host/weights/0", "host", 100, Use.WEIGHTS)
        others = [Peer(rank, own.name) for rank in {0, 1, 2} - {world.rank}]
        peers = [own._replace(name=f"peer/{peer.rank}", tier="peer", peer=peer) for peer in others]
        pool.provide([own, *peers])
        pool.memory(own.name).fill_(world.rank + 1)
        world.meet()
        accesses = tuple(Access(each.name, 0, 100, USED) for each in peers)
        with LeasedBuffers(pool, Op("FETCH", "fetch", 0, reads=accesses, writes=())) as held:
            for each in peers:
                assert each.peer is not None
                assert held[each.name].tolist() == [each.peer.rank + 1] * 100
        assert ledger.table() == {("host", "weights"): 100}
        world.meet()
        pool.release()

    together(worlds(3), work)


def test_ranks_of_several_machines_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(shared_memory, "machine_id", lambda: str(next(numbers)))

    def work(world: World) -> str:
        with pytest.raises(PlanError) as caught:
            SharedMemory(SIZES, open_device("cpu"), world)
        return str(caught.value)

    (line,) = set(together(worlds(2), work))
    assert line.startswith("policy.delivery: the ranks are on several machines")


def test_shared_memory_one_rank_cannot_open_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(process: int, file: int, identity: object, nbytes: int) -> object:
        raise DeviceError("may not be opened", where="policy.delivery")

    def work(world: World) -> str:
        if world.rank == 1:
            monkeypatch.setattr(shared_memory, "mapped_file", refuses)
        world.meet()
        with pytest.raises(MegaTrainError) as caught:
            SharedMemory(SIZES, open_device("cpu"), world)
        return str(caught.value)

    assert all("may not be opened" in line for line in together(worlds(2), work))


def test_missing_shared_memory_is_reported() -> None:
    file = anonymous_file(10)
    identity = identity_of(file)
    os.close(file)
    with pytest.raises(DeviceError, match="cannot be mapped"):
        mapped_file(os.getpid(), file, identity, 10)


def test_a_rank_in_another_container_with_the_same_pid_is_detected() -> None:
    """Its memory would be one's own, and each rank train on its part for that of all."""
    own, other = anonymous_file(10), anonymous_file(10)
    try:
        with pytest.raises(DeviceError, match="the number belongs to another process here"):
            mapped_file(os.getpid(), own, identity_of(other), 10)
    finally:
        os.close(own)
        os.close(other)
