"""Measures the CPU time until `megatrain train` tells a mistake that needs no model, for one mistake of each kind.

    python -m bench.time_to_first_error

Each is made in a process of its own, from the interpreter's start to its end; of three tries the quickest counts.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
model: {path: org/model}
data: {sources: [chats.txt], tokenizer: bytes, sequence_length: 16}
train: {steps: 1, learning_rate: 1e-3}
output: {folder: run, trackers: []}
"""
MISTAKES = {
    "a data file that is missing": "data.sources=chat.jsonl",
    "a model's folder that is missing": "model.path=./gone",
    "a key that there is not": "train.stps=1",
    "the name of a device": "train.device=gpu",
    "the name of a machine": "train.hardware=h300",
    "a file in place of the run folder": "output.folder=chats.txt",
    "a finished run in the run folder": "output.folder=old",
    "a checkpoint that is missing": "resume=gone",
}


def seconds_to_error(folder: Path, mistake: str) -> tuple[float, str]:
    """Processor seconds of the command, and the error that it tells."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "megatrain", "train", "config.yaml", mistake]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stderr.strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(CONFIG)
        (folder / "chats.txt").write_text("hello\n")
        (folder / "old" / "model").mkdir(parents=True)
        (folder / "old" / "status.json").write_text(json.dumps({"step": 2}))
        print("| mistake | CPU seconds | told |\n|---|---|---|")
        for words, mistake in MISTAKES.items():
            tries = [seconds_to_error(folder, mistake) for _ in range(3)]
            print(f"| {words} | {min(tries)[0]:.2f} | {tries[0][1]} |", flush=True)


if __name__ == "__main__":
    main()
