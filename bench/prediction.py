"""Predicted against measured: seconds and peak memory of a step, over shapes and policies, after a probe.

    python -m bench.prediction [--seconds 30] [--json FILE]

The machine is probed first, in the same process, so that both sides see the same machine. Each case is a fresh
Llama-shaped model on the cpu; its step is predicted by replaying the very schedule that runs, then measured (median of
several steps after two that warm up). Exits 1 where a prediction of time is off by more than `--tolerance`. It leaves
out GPUs (`bench.gpu`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatrain import Engine
from megatrain.device.cpu import CpuDevice
from megatrain.plan import Question, calibrate, examine, op_seconds
from megatrain.probe import probe
from megatrain.spec import Hardware, Policy, Precision


@dataclass(frozen=True)
class Case:
    """A shape, a policy and how a step is cut."""

    hidden: int
    layers: int
    precision: Precision = "bf16"
    activations: str = "recompute"
    rows: int = 4
    length: int = 256
    micro_batch: int = 2
    clips: bool = True


CASES = (
    Case(384, 6, "fp32"),
    Case(384, 6, "fp32", "keep"),
    Case(384, 12, "fp32", rows=8),
    Case(512, 4, "fp32", micro_batch=4),
    Case(512, 4, "fp32", micro_batch=1),
    Case(512, 8, "fp32", "keep", clips=False),
    Case(768, 3, "fp32", length=512),
    Case(768, 3, "fp32", "keep"),
    Case(256, 4),
    Case(256, 4, activations="keep"),
)
STEPS = 5


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step; `calibrated` is predicted with prices corrected by the first measured step."""

    case: Case
    predicted: float
    calibrated: float
    measured: float
    predicted_nbytes: int
    by_kind: dict[str, float]
    """Kind of op -> measured over predicted seconds."""


def fields(case: Case) -> dict[str, Any]:
    """The Hugging Face configuration of a case."""
    return {
        "model_type": "llama",
        "hidden_size": case.hidden,
        "intermediate_size": case.hidden * 7 // 2 // 64 * 64,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.hidden // 64,
        "num_key_value_heads": max(1, case.hidden // 256),
        "vocab_size": 8192,
        "max_position_embeddings": case.length,
        "tie_word_embeddings": False,
    }


def run(case: Case, hardware: Hardware) -> Outcome:
    """Predict one case and measure it."""
    clip = 1.0 if case.clips else None
    policy = Policy(
        precision=case.precision,
        shares_memory=True,
        activations="keep" if case.activations == "keep" else "recompute",
        update="next_forward" if case.clips else "during_backward",
    )
    generator = torch.Generator().manual_seed(0)
    with Engine.from_config(
        fields(case), precision=case.precision, policy=policy, max_grad_norm=clip, verify=False
    ) as engine:
        question = Question(engine.spec, hardware, case.rows * case.length, case.length, case.precision, case.clips)
        plan = examine(question, policy, case.micro_batch)

        def batches() -> list[dict[str, torch.Tensor]]:
            shape = case.micro_batch, case.length
            ids = [torch.randint(8192, shape, generator=generator) for _ in plan.work.tokens]
            return [{"input_ids": each, "labels": each} for each in ids]

        seconds = []
        for _ in range(2 + STEPS):
            given = batches()
            began = time.perf_counter()
            engine.step(given)
            seconds.append(time.perf_counter() - began)
        timeline = engine.timeline
        assert timeline is not None
        price = op_seconds(engine.spec, policy, plan.work, hardware)
        calibration = calibrate(engine.spec, timeline, price)
        corrected = examine(replace(question, calibration=calibration), policy, case.micro_batch)
    kinds = {f"{kind} {unit}": round(factor, 2) for (kind, unit), factor in calibration.factors.items()}
    measured = statistics.median(seconds[2:])
    return Outcome(case, plan.seconds, corrected.seconds, measured, sum(plan.nbytes.values()), kinds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the probe")
    parser.add_argument("--tolerance", type=float, default=0.10)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    parser.add_argument("--kinds", action="store_true", help="show measured over predicted by kind of op")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        device = CpuDevice()
        hardware = probe(device, Path(folder), options.seconds)
        device.close()
    outcomes = []
    for case in CASES[: options.cases]:
        outcome = run(case, hardware)
        outcomes.append(outcome)
        shape = f"{case.hidden} x {case.layers} {case.precision} {case.activations} {case.rows}/{case.micro_batch}"
        ratio, corrected = outcome.predicted / outcome.measured, outcome.calibrated / outcome.measured
        print(
            f"{shape:<40} measured {outcome.measured:6.3f} s  predicted {ratio:5.2f}x  calibrated {corrected:5.2f}x",
            flush=True,
        )
        if options.kinds:
            print("   ", outcome.by_kind)
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    off = [outcome for outcome in outcomes if abs(outcome.predicted / outcome.measured - 1) > options.tolerance]
    print(f"{len(outcomes) - len(off)} of {len(outcomes)} predictions within {options.tolerance:.0%}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
