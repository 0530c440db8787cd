"""Benchmarks: what MegaTrain claims about speed and memory, measured beside what it is compared with, in one run."""

from megatrain.system.environment import let_idle_threads_sleep

let_idle_threads_sleep()  # as the commands do, and like them before torch is imported
