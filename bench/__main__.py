"""`python -m bench [--out FOLDER]`: every benchmark of this machine in turn, each with its table and JSON."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = {"step": ["--out"], "adamw": ["--json"]}
"""Module of `bench/` -> the option that names where its results go."""


def main() -> int:
    parser = argparse.ArgumentParser(description="run every benchmark of this machine")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder for the JSON results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, (option,) in BENCHMARKS.items():
        target = arguments.out if option == "--out" else arguments.out / f"{name}.json"
        print(f"\n== bench.{name}", flush=True)
        failed = subprocess.call([sys.executable, "-m", f"bench.{name}", option, str(target)])
        if failed:
            return failed
    return 0


if __name__ == "__main__":
    sys.exit(main())
