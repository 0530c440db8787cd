"""What a run leaves when it ends: the model as a Hugging Face folder, a proof of it, and where everything is."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from megatrain.config import Config
from megatrain.data import Batch, Tokenizer
from megatrain.errors import ExportError
from megatrain.model import load_causal_lm
from megatrain.train.engine import Engine

TOLERANCE = {"bf16": 1e-2, "fp32": 1e-4}
"""Relative difference of two losses that rounding explains: two programs sum in two orders."""


def save_trained(config: Config, engine: Engine, tokenizer: Tokenizer, target: Path) -> Path:
    """Write model, tokenizer and model card; the folder appears when it is whole."""
    train = config.train
    facts = {
        "steps": f"{train.steps:,}",
        "tokens per step": f"{train.rows * config.data.window:,}",
        "data": ", ".join(config.data.sources),
        "optimizer": f"AdamW, learning rate {train.lr:g} ({train.lr_schedule}), weight decay {train.weight_decay:g}",
        "precision": f"{train.precision} with exact float32 masters",
        "trained with": f"megatrain {version('megatrain')}",
    }
    return engine.save_pretrained(
        target, precision=config.output.precision, facts=facts, write_more=tokenizer.save_pretrained
    )


def verify_trained(config: Config, engine: Engine, batch: Batch, saved: Path, console: Console) -> None:
    """Load the saved model as any user of it would, and compare its loss with the engine's.

    Raises `ExportError` where they differ by more than rounding.
    """
    ours, theirs = _both_losses(config, engine, batch, saved)
    say = f"on one batch the saved model, loaded with from_pretrained, has loss {theirs:.4f}, the engine {ours:.4f}"
    if not abs(ours - theirs) <= TOLERANCE[config.train.precision] * abs(ours):
        raise ExportError(say, where=str(saved), fix="they should agree: please report this defect")
    console.print(Text(say, "green"), soft_wrap=True)


def _both_losses(config: Config, engine: Engine, batch: Batch, saved: Path) -> tuple[float, float]:
    """The loss of `batch` by the engine and by the stock model that `from_pretrained` makes of the saved folder."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.precision]
    loaded = load_causal_lm(str(saved)).eval().to(dtype)
    with torch.no_grad():
        theirs = float(loaded(**batch).loss)
    return engine.evaluate([batch]), theirs


def say_where(folder: Path, console: Console) -> None:
    for name, what in (
        ("model", "Hugging Face folder of the trained model, with its tokenizer"),
        ("report.html", "the run as a page for a browser; `megatrain report` makes it anew"),
        ("metrics.jsonl", "every step as a line of JSON"),
        ("tensorboard", f"the same for `tensorboard --logdir {folder}`"),
        ("checkpoints", "what `resume` goes on from; each is a Hugging Face folder too"),
        ("config.yaml", "every key of this run, as resolved"),
    ):
        if (folder / name).exists():
            console.print(Text.assemble((str(folder / name), "bold"), f"  {what}"), soft_wrap=True)
