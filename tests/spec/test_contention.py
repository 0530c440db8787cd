"""Pieces of work on streams that share host memory, a bus and a drive."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.spec.contention import Contention, StreamClock, TimedTask


def ran(contention: Contention, *pieces: TimedTask) -> float:
    """Seconds until all have ended."""
    clock = StreamClock(contention)
    for piece in pieces:
        clock.submit(piece)
    return clock.run()


def test_streams_exceeding_host_bandwidth_slow_down_equally() -> None:
    fetch, update = TimedTask("fetch", 1.0, 100.0), TimedTask("host", 2.0, 600.0)
    compute = TimedTask("compute", 3.0)
    # 100 + 300 a second of the 200 there are: half as fast until the fetch has ended, and then 200 of 300
    assert ran(Contention(host_dram_bandwidth=200.0), fetch, update, compute) == pytest.approx(3.5)
    assert (fetch.ended, update.ended, compute.ended) == pytest.approx((2.0, 3.5, 3.0))


def test_each_bus_direction_gets_its_duplex_share() -> None:
    fetch, grad = TimedTask("fetch", 1.0), TimedTask("grad", 3.0)
    ran(Contention(duplex={"fetch": 0.5, "grad": 0.8}), fetch, grad)
    assert (fetch.ended, grad.ended) == pytest.approx((2.0, 3.4))
    alone = TimedTask("fetch", 1.0)
    assert ran(Contention(duplex={"fetch": 0.5}), alone, TimedTask("read", 1.0)) == pytest.approx(1.0)


def test_a_stream_is_fifo_and_waits_for_others() -> None:
    first = TimedTask("fetch", 2.0)
    product = TimedTask("compute", 1.0, waits=(first,))
    behind = TimedTask("compute", 1.0)
    assert ran(Contention(), first, product, behind) == 4.0
    assert (product.began, behind.began) == (2.0, 3.0)
    assert (product.stalled, behind.stalled) == (2.0, 0.0)


def test_the_clock_advances_to_a_requested_piece() -> None:
    clock = StreamClock(Contention(host_dram_bandwidth=100.0))
    fetch, update = TimedTask("fetch", 1.0, 80.0), TimedTask("host", 4.0, 320.0)
    clock.submit(fetch)
    clock.submit(update)
    now = clock.run(fetch)
    assert now == pytest.approx(1.6)
    assert update.ended == inf
    later = TimedTask("grad", 1.0, submitted=3.0)
    clock.submit(later)
    assert clock.run(later) == pytest.approx(4.0)
    assert clock.run() == pytest.approx(1.6 + 3.0)


RATES = st.floats(0.0, 10.0)
WORK = st.lists(
    st.tuples(st.sampled_from(["fetch", "grad", "host", "compute"]), st.floats(0.0, 5.0), RATES), max_size=12
)


@given(WORK, st.floats(1.0, 30.0))
def test_total_time_is_between_memory_bound_and_serial(work: list[tuple[str, float, float]], dram: float) -> None:
    pieces = [TimedTask(stream, seconds, seconds * rate) for stream, seconds, rate in work]
    moved = sum(piece.dram_nbytes for piece in pieces)
    seconds = ran(Contention(dram), *pieces)
    assert seconds >= 0.999999 * moved / dram
    assert seconds <= 1.000001 * sum(max(piece.seconds, piece.dram_nbytes / dram) for piece in pieces) + 1e-9
    for stream in {piece.stream for piece in pieces}:
        own = [piece for piece in pieces if piece.stream == stream]
        assert all(piece.ended - piece.began >= 0.999999 * piece.seconds - 1e-9 for piece in own)
        assert all(before.ended <= after.began for before, after in pairwise(own))
