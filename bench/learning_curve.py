"""Trains the quickstart's model, made smaller, with AdamW and with Muon at equal tokens, and compares losses.

    python -m bench.learning_curve [--steps N] [--rates RATE ...] [--seeds N ...] [--json FILE]

Both get the same peak rates to choose from, the same warm-up and decay, data in the same order, and weights of the same
seed; Muon's rate is that of the AdamW beside it, too. A loss is that of validation rows in nats a byte. 1.9 million
parameters and 200 steps of 1,024 tokens say whether an optimizer trains, and not which is better at any other size,
length or rate.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from megatrain.config import load_config
from megatrain.run.training import run_training

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SMALL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
OPTIMIZERS = ("adamw", "muon")


def curve(optimizer: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Validation losses by step, and the mean training loss of the last tenth."""
    with tempfile.TemporaryDirectory() as folder:
        keys: dict[str, Any] = {f"model.config.{key}": value for key, value in SMALL.items()}
        keys |= {"train.optimizer": optimizer, "train.learning_rate": rate, "train.seed": seed, "train.steps": steps}
        keys |= {"train.eval_every": max(1, steps // 4), "train.sample_tokens": 0, "checkpoint.every": 0}
        keys |= {"output.folder": folder + "/run", "output.trackers": "[]"}
        run_training(
            load_config(QUICKSTART, [f"{key}={value}" for key, value in keys.items()]), Console(file=io.StringIO())
        )
        events = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [event["loss"] for event in events if event["event"] == "stepped"]
    evaluated = {event["step"]: event["loss"] for event in events if event["event"] == "evaluated"}
    last = trained[-max(1, steps // 10) :]
    return {
        "optimizer": optimizer,
        "rate": rate,
        "seed": seed,
        "validation": evaluated,
        "trained": sum(last) / len(last),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="AdamW and Muon on the quickstart at equal tokens")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=[6e-4, 2e-3, 6e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    curves = []
    for seed in arguments.seeds:
        for rate in arguments.rates:
            for optimizer in OPTIMIZERS:
                curves.append(curve(optimizer, rate, seed, arguments.steps))
                losses = "  ".join(f"{step}: {loss:.3f}" for step, loss in curves[-1]["validation"].items())
                print(f"{optimizer:<6} rate {rate:<7g} seed {seed}  {losses}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    main()
