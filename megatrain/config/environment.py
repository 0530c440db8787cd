"""The one default for the environment that is set here. Left out: reading any of it."""

from __future__ import annotations

import os


def let_idle_threads_sleep() -> None:
    """Make idle OpenMP threads sleep, unless the user's environment says otherwise; to be called before torch loads.

    By default they spin, and take the core from the very thread that they wait for as soon as anything else runs. With
    three other processes on two cores the quickstart came to 170 tokens/s so, and to 2,500 with sleeping threads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
