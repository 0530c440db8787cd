"""What ranks tell each other and compute together, in threads; between processes in `tests/integration`."""

from __future__ import annotations

import math
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatrain.dist import ALONE, World
from megatrain.dist.processes import join, name_of_start
from megatrain.errors import RankError
from tests.ranks import together, worlds
from tests.references import reference_reduce


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduce_equals_the_reference_bit_for_bit(size: int, dtype: torch.dtype) -> None:
    """In the order of the ranks, rounded once; signed zeros among the terms."""
    torch.manual_seed(size)
    terms = [torch.randn(size * 64) * 10.0 ** torch.randint(-6, 6, (size * 64,)) for _ in range(size)]
    for each in terms:
        each[::7] = -0.0

    def work(world: World) -> tuple[torch.Tensor, list[float]]:
        own = torch.empty(64, dtype=dtype)
        largest = world.reduce(own, torch.empty(size * 64), terms[world.rank].clone())
        return own, largest.tolist()

    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for rank, ((own, largest), expected) in enumerate(
        zip(together(worlds(size, seed=1), work), reference_reduce(terms, dtype), strict=True)
    ):
        assert torch.equal(own.view(bits), expected.view(bits))
        assert largest == [each[rank * 64 : rank * 64 + 64].abs().max().item() for each in terms]
    in_another_order = sum(terms[1:], terms[0].clone()) if size == 2 else sum(terms[:-1], terms[-1].clone())
    assert size == 2 or not torch.equal(in_another_order, torch.cat(reference_reduce(terms, torch.float32)))


def test_each_rank_gets_what_the_others_send_it_of_any_sizes() -> None:
    """Some send nothing, and one gets nothing."""
    sizes = [[3, 0, 2], [0, 0, 4], [1, 0, 0]]

    def work(world: World) -> list[int]:
        go, come = sizes[world.rank], [of_rank[world.rank] for of_rank in sizes]
        sent = torch.tensor(
            [10 * world.rank + to for to, size in enumerate(go) for _ in range(size)], dtype=torch.uint8
        )
        received = torch.empty(sum(come), dtype=torch.uint8)
        world.all_to_all(received, sent, come, go)
        return received.tolist()

    assert together(worlds(3, seed=1), work) == [[0, 0, 0, 20], [], [2, 2, 12, 12, 12, 12]]


def test_nonfinite_contributions_are_attributed_to_their_rank() -> None:
    def work(world: World) -> list[float]:
        terms = torch.ones(12)
        if world.rank == 1:
            terms[9] = math.nan
        return world.reduce(torch.empty(4), torch.empty(12), terms).tolist()

    found = together(worlds(3), work)
    assert [[math.isfinite(each) for each in largest] for largest in found] == [[True] * 3] * 2 + [[True, False, True]]


@given(st.lists(st.text(), min_size=2, max_size=4), st.integers(0, 3000))
def test_broadcast_values_reach_all_ranks(texts: list[str], longer: int) -> None:
    """Also what does not fit into one piece, and floats that are not finite."""
    values = [[text * 3, index * longer * "x", 0.1 + index, -math.inf] for index, text in enumerate(texts)]
    found = together(worlds(len(texts)), lambda world: world.exchange("a test", values[world.rank]))
    assert found == [values] * len(texts)


def test_a_rank_knows_how_long_it_waited_for_a_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]

    class Slow:
        def all_gather(self, whole: Tensor, own: Tensor) -> None:
            now[0] += 7.0
            whole.view(2, -1).copy_(own)

    monkeypatch.setattr("megatrain.dist.world.time", SimpleNamespace(perf_counter=lambda: now[0]))
    host: Any = Slow()
    world = World(0, 2, host)
    world.exchange("a test", 0)
    now[0] += 3.0  # its own work
    world.exchange("a test", 1)
    assert world.waited_seconds == 14.0
    assert World().waited_seconds == 0


def test_mismatched_collectives_are_reported() -> None:
    with pytest.raises(RankError, match="rank 1: is at an evaluation, but rank 0 at a step"):
        together(worlds(2), lambda world: world.exchange("an evaluation" if world.rank else "a step", 0))


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    def refuse(world: World) -> str:
        def make() -> int:
            if world.rank == 1:
                raise ValueError("no such thing")
            return world.rank

        try:
            world.agree("a test", make)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "agreed"

    assert together(worlds(3), refuse) == [
        "RankError: rank 1: ValueError: no such thing",
        "ValueError: no such thing",
        "RankError: rank 1: ValueError: no such thing",
    ]
    with pytest.raises(ValueError, match="of its own"):
        ALONE.agree("a test", lambda: int("of its own"))


@given(st.integers(1, 5), st.integers(1, 20))
def test_micro_batches_are_dealt_round_robin(size: int, count: int) -> None:
    all_of_them = list(range(count))
    dealt = [all_of_them[rank::size] for rank in range(size)]
    assert World(0, size).dealt(dealt) == all_of_them
    for rank, own in enumerate(dealt):
        assert [World(rank, size).number(micro) for micro in range(len(own))] == own


@pytest.mark.parametrize("dealt", [[[1], [2, 3]], [[1, 2, 3], [4]], [[], [1]]])
def test_other_micro_batch_assignments_are_refused(dealt: list[list[int]]) -> None:
    with pytest.raises(RankError, match=r"deal the . in turns"):
        World(0, 2).dealt(dealt)


def test_a_single_rank_needs_no_process_group() -> None:
    assert ALONE.exchange("a test", {"left": math.pi}) == [{"left": math.pi}]
    assert torch.equal(ALONE.together(torch.ones(3)), torch.ones(1, 3))


def test_all_ranks_take_rank_zeros_value() -> None:
    def work(world: World) -> list[float]:
        return world.of_first(torch.tensor([float(world.rank), -0.0])).tolist()

    assert together(worlds(3, seed=0), work) == [[0.0, -0.0]] * 3
    assert ALONE.of_first(torch.tensor([5.0])).tolist() == [5.0]


@pytest.mark.parametrize(("device", "carrier"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_cuda_uses_nccl_and_the_host_uses_gloo(device: str, carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each a group of its own, over the library's calls for equal parts; NCCL returns before it is done."""
    asked: list[str] = []
    carried: list[tuple[str, object]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "new_group", lambda *, backend, timeout: asked.append(backend) or len(asked))
    for name in ("all_gather_into_tensor", "all_gather_single", "all_to_all_single"):
        record = lambda target, source, group, name=name: carried.append((name, group))  # noqa: E731
        monkeypatch.setattr(dist, name, record, raising=False)
    world = join.__wrapped__(0, 2, device)
    assert asked == ["gloo", carrier, "gloo"]
    whole = torch.zeros(4096)
    world.gather(whole, whole[:2048])
    world.reduce(torch.zeros(2048), torch.zeros(4096), whole)
    world.meet()
    assert [group for _, group in carried] == [2, 2, 1]
    assert [name.removesuffix("_single") for name, _ in carried][1] == "all_to_all"
    assert all(each._queues == (carrier == "nccl" and each is world.device) for each in (world.host, world.device))


def test_ranks_that_are_started_again_agree_on_a_name_whatever_earlier_ones_have_left_in_the_store() -> None:
    """As `torchrun` keeps its store. They come one after the other, and one was killed before it had answered."""
    store, chance = dist.HashStore(), random.Random(0)

    def name_of(world: World) -> str:
        time.sleep(chance.random() * 0.1)
        return name_of_start(store, world.rank, 3, 10.0)

    names = []
    for _ in range(4):
        (name,) = set(together(worlds(3), name_of))
        names.append(name)
        store.set("asks 1", "killed")
    assert len(set(names)) == 4
    with pytest.raises(RankError, match="no sign of rank 1; start all of them"):
        name_of_start(store, 0, 3, 0.05)
