"""Measures the CPU time and the peak memory that running `megatrain plan` itself takes, for a few built-in models.

    python -m bench.planner_cost [MODEL ...] [--tokens-per-step N]

Each is planned in a process of its own, imports included, for an RTX 4090 with 64 GB of host memory and a disk, and for
an H200: until the plan is shown, and until the end, when what would help has been looked at, too. It leaves out time by
the clock, which other processes decide too. To compare builds whose defaults differ, name the tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

import psutil

MODELS = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3",
)
MACHINES = {"RTX 4090, 64 GB and a disk": ("rtx-4090", "64GB"), "H200": ("h200", None)}


def planned(model: str, machine: str, host: str | None, tokens: str | None = None) -> tuple[float, float, float]:
    """Processor seconds until the first line is shown and until the end, and peak GB, of one `megatrain plan` of an
    empty home folder, whether or not the model fits."""
    arguments = [sys.executable, "-m", "megatrain", "plan", model, "--hardware", machine]
    arguments += ["--host-memory", host] if host else []
    arguments += ["--tokens-per-step", tokens] if tokens else []
    with tempfile.TemporaryDirectory() as home:
        surroundings = {**os.environ, "HOME": home}
        child = subprocess.Popen(arguments, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert child.stdout is not None
        child.stdout.readline()
        so_far = psutil.Process(child.pid).cpu_times()
        child.stdout.read()
        _, _, used = os.wait4(child.pid, 0)
    return so_far.user + so_far.system, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--tokens-per-step")
    arguments = parser.parse_args()
    print("| model | machine | until the plan is shown | until the end | peak memory |\n|---|---|---|---|---|")
    for model in arguments.models:
        for words, (machine, host) in MACHINES.items():
            shown, whole, peak = planned(model, machine, host, arguments.tokens_per_step)
            print(f"| {model} | {words} | {shown:.1f} s | {whole:.1f} s | {peak:.2f} GB |", flush=True)


if __name__ == "__main__":
    main()
