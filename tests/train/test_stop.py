"""Signals that stop a run."""

from __future__ import annotations

import signal

import pytest

from megatrain.train.stop import NOTICE, SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_answered(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
    assert capfd.readouterr().err == NOTICE.decode()


def test_the_second_ctrl_c_leaves_at_once() -> None:
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("raised", [False, True])
def test_the_handlers_from_before_come_back(raised: bool) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals():
        assert [signal.getsignal(number) for number in SIGNALS] != before
        if raised:
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before
