"""Measures the CPU time and the peak memory that running `megatrain plan` itself takes, for a few built-in models.

    python -m bench.planner_cost [MODEL ...]

Each is planned in a process of its own, imports included, for an RTX 4090 with 64 GB of host memory and a disk, and for
an H200: once with an empty home folder, where the model is measured first, and again with what that has remembered.
It leaves out time by the clock, which other processes decide too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

MODELS = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3",
)
MACHINES = {"RTX 4090, 64 GB and a disk": ("rtx-4090", "64GB"), "H200": ("h200", None)}


def planned(model: str, machine: str, host: str | None, home: str) -> tuple[float, float]:
    """Processor seconds and peak GB of one `megatrain plan` in that home folder, whether or not the model fits."""
    arguments = [sys.executable, "-m", "megatrain", "plan", model, "--hardware", machine]
    arguments += ["--host-memory", host] if host else []
    code = (
        f"import subprocess, resource; subprocess.run({arguments!r}, capture_output=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    surroundings = {**os.environ, "HOME": home}
    done = subprocess.run([sys.executable, "-c", code], env=surroundings, check=True, capture_output=True, text=True)
    seconds, kilobytes = map(float, done.stdout.split())
    return seconds, kilobytes * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    print("| model | machine | first call | repeated | peak memory |\n|---|---|---|---|---|")
    for model in parser.parse_args().models:
        for words, (machine, host) in MACHINES.items():
            with tempfile.TemporaryDirectory() as home:
                calls = [planned(model, machine, host, home) for _ in range(2)]
            seconds = " | ".join(f"{each:.1f} s" for each, _ in calls)
            print(f"| {model} | {words} | {seconds} | {max(peak for _, peak in calls):.2f} GB |", flush=True)


if __name__ == "__main__":
    main()
