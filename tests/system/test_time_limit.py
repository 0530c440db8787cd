"""What does not end is ended, and nothing else is disturbed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from megatrain.system.time_limit import Deadline, OutOfTime, within

SOON, NEVER = 0.05, 1e9
"""Seconds of work."""


def endless() -> None:
    while True:
        pass


def test_a_call_that_never_ends_is_ended() -> None:
    with pytest.raises(OutOfTime, match=r"not finished after 0\.05 seconds of CPU time"):
        within(SOON, endless)


def test_it_is_ended_in_any_thread_and_the_others_go_on() -> None:
    said: list[str] = []

    def work() -> None:
        try:
            within(SOON, endless)
        except OutOfTime as error:
            said.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert within(NEVER, lambda: [thread.join() for thread in threads]) == [None] * 3
    assert len(said) == 3


def test_what_a_call_returns_and_raises_is_passed_on() -> None:
    assert within(NEVER, lambda: 5) == 5
    with pytest.raises(KeyError):
        within(NEVER, lambda: {}["x"])


def test_what_catches_every_exception_is_ended_too() -> None:
    def stubborn() -> None:
        while True:
            with suppress(Exception):
                endless()

    with pytest.raises(OutOfTime):
        within(SOON, stubborn)


def test_what_is_lost_is_raised_again() -> None:
    """As in a callback of the interpreter's, which may say nothing."""

    def swallowing() -> None:
        for _ in range(3):
            with suppress(BaseException):
                endless()
        endless()

    with pytest.raises(OutOfTime):
        within(SOON, swallowing)


def test_a_deadline_counts_work_and_is_asked() -> None:
    deadline = Deadline(SOON)
    deadline.check()
    time.sleep(2 * SOON)
    deadline.check()
    with pytest.raises(OutOfTime, match=r"not finished after 0\.05 seconds of CPU time"):
        while True:
            deadline.check()


def test_to_wait_is_no_work() -> None:
    def waits() -> str:
        time.sleep(0.3)
        return "done"

    if hasattr(time, "pthread_getcpuclockid"):
        assert within(0.2, waits) == "done"


@pytest.mark.parametrize(("outer", "inner"), [(SOON, NEVER), (NEVER, SOON)])
def test_of_two_limits_the_one_that_is_reached_counts(outer: float, inner: float) -> None:
    def nested() -> str:
        try:
            within(inner, endless)
        except OutOfTime:
            return "inner"
        return "none"

    if outer == SOON:
        with pytest.raises(OutOfTime):
            within(outer, nested)
    else:
        assert within(outer, nested) == "inner"


def test_nothing_is_raised_later_once_a_call_has_been_left() -> None:
    """Calls that end at about the time at which they would be ended."""

    def almost(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    for number in range(20):
        with suppress(OutOfTime):
            within(0.01, lambda seconds=0.005 * (number % 5): almost(seconds))  # type: ignore[misc]
    almost(0.2)


def output_of(code: str) -> str:
    """What a process of its own prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_forked_child_has_limits_of_its_own() -> None:
    """From a small process: to fork one of several GiB is refused where memory is short."""
    code = """
import os
from megatrain.system.time_limit import OutOfTime, within

def endless():
    while True:
        pass

within(1e9, lambda: None)
if child := os.fork():
    print(os.waitpid(child, 0)[1])
else:
    code = 1
    try:
        within(0.05, endless)
    except OutOfTime:
        code = 0
    finally:
        os._exit(code)
"""
    assert output_of(code) == "0\n"


def test_what_ran_out_of_time_leaves_no_trace_in_the_interpreter() -> None:
    """In Python 3.11 the first call under a profiler never returned afterwards; hence a process of its own."""
    code = """
import sys
from megatrain.system.time_limit import OutOfTime, within

def endless():
    while True:
        pass

for _ in range(3):
    try:
        within(0.05, endless)
    except OutOfTime:
        pass
count = 0

def counted(*_):
    global count
    count += 1

sys.setprofile(counted)
len("one call")
(lambda: None)()
sys.setprofile(None)
print(count > 3)
"""
    assert output_of(code) == "True\n"
