"""Signals that stop a run."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator

import pytest

from megatrain.train.stop import NOTICE, SIGNALS, OutOfTime, StopSignals


@pytest.fixture(autouse=True)
def hangups() -> Iterator[None]:
    """SIGHUP as in a terminal, also where the tests run under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_acknowledged(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
    assert capfd.readouterr().err == NOTICE.decode()


def test_several_hangups_are_one_and_none_under_nohup() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with StopSignals() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert stop.requested
    assert signal.getsignal(signal.SIGHUP) == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_is_noted_without_a_terminal_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", gone)
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_the_second_ctrl_c_exits_immediately(first: int) -> None:
    with StopSignals() as stop:
        signal.raise_signal(first)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("raised", [False, True])
def test_previous_signal_handlers_are_restored(raised: bool) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals():
        assert [signal.getsignal(number) for number in SIGNALS] != before
        if raised:
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_deadline_aborts_steps_that_leave_no_time_to_save() -> None:
    with StopSignals(deadline_seconds=10.0, needs_seconds=lambda: 9.9) as stop:
        assert stop.remaining_seconds() is None
        with pytest.raises(OutOfTime), stop.interruptible(), stop.region():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
        remaining = stop.remaining_seconds()
        assert remaining is not None
        assert 5 < remaining < 10


def test_steps_ending_in_time_are_not_aborted() -> None:
    alarm = signal.getsignal(signal.SIGALRM)
    with StopSignals(deadline_seconds=0.05) as stop:
        with stop.interruptible():
            signal.raise_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert stop.remaining_seconds() == 0
    assert signal.getsignal(signal.SIGALRM) == alarm


def test_without_a_deadline_no_step_is_aborted() -> None:
    with StopSignals() as stop, stop.interruptible():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.02)
        assert stop.requested
        assert stop.remaining_seconds() is None


def test_only_interruptible_steps_are_aborted() -> None:
    """An alarm between two steps is kept for the next region, and forgotten with the block."""
    with StopSignals(deadline_seconds=0.02) as stop:
        with stop.interruptible():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.1)
            with pytest.raises(OutOfTime), stop.region():
                raise AssertionError("it began")
        with stop.region():
            pass


def test_a_signal_before_the_block_counts() -> None:
    with StopSignals(deadline_seconds=0.2) as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(OutOfTime), stop.interruptible(), stop.region():
            time.sleep(5)
