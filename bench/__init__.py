"""Benchmarks: what MegaTrain claims about speed and memory, measured beside what it is compared with, in one run."""
