"""The end of a run: save the model as a Hugging Face folder, verify it, and say where everything is."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from megatrain.checkpoint.folder import lowest_scored
from megatrain.config import Config
from megatrain.data.loader import Batch
from megatrain.data.tokenizer import Tokenizer, save_tokenizer
from megatrain.engine import DTYPES
from megatrain.errors import ExportError
from megatrain.formatting import at_least, at_most, counted
from megatrain.model import load_trained
from megatrain.run.existing_run import CONFIG, METRICS
from megatrain.spec import Precision
from megatrain.system.paths import parsed_json
from megatrain.train.checkpoints import found_by_first
from megatrain.train.engine import Engine
from megatrain.train.parity import adds_for_routers, stock_loss
from megatrain.version import __version__

TOLERANCE = {"bf16": 1e-2, "fp32": 1e-4}
"""Largest difference of two losses that rounding explains: relative to the loss, or to 1 if the loss is smaller, since
rounding of logits does not shrink with the loss."""

SLACK = 4.0
"""In bf16, how much the engine's loss may differ, as a multiple of the effect of rounding on the stock model's loss."""

LAST = 50
"""Steps whose mean loss the model card tells as the loss at the end."""

LOGITS = 12
"""Bytes per logit of the batch in the comparison: the logits, their float32 copy, and the softmax."""


def restore_best(config: Config, engine: Engine, step: int, since: int, say: Callable[[str], None]) -> int:
    """Load the checkpoint with the lowest validation loss into the engine, which is at `step`; returns its step.

    Collective. since: step up to which losses were measured on other data. If no checkpoint has a loss, the state is
    left as it is, with a message.
    """
    best = found_by_first(engine.world, lambda: lowest_scored(config.checkpoints, since))
    if best is None:
        say("no checkpoint has a validation loss, so the model is the last state")
        return step
    if best.step != step:
        engine.restore(best)
    say(f"the model is the state after step {best.step:,}, with the lowest validation loss")
    return best.step


def save_trained(config: Config, engine: Engine, tokenizer: Tokenizer, target: Path, steps: int) -> Path:
    """Write model, tokenizer and model card after `steps` steps; the folder appears only when complete."""
    train = config.train
    facts = {
        "steps": f"{steps:,}",
        "tokens per step": f"{train.sequences * config.data.sequence_length:,}",
        "base model": config.model.path or "none: trained from scratch",
        "data": ", ".join(config.data.sources),
        "optimizer": engine.optimizer.description,
        "learning rate": f"{train.learning_rate:g} ({train.lr_scheduler})",
        "precision": f"{train.precision} with exact float32 masters",
        **_losses(config, steps),
        "command": f"megatrain train {config.folder / CONFIG}",
        "trained with": f"megatrain {__version__}",
    }
    return engine.save_pretrained(
        target, precision=config.output.precision, facts=facts, write_more=partial(save_beside, tokenizer, engine)
    )


def save_beside(tokenizer: Tokenizer, engine: Engine, folder: Path) -> None:
    """Write the tokenizer beside a model or an adapter, and beside an adapter where generation stops, which its base
    does not say."""
    save_tokenizer(tokenizer, folder)
    stops = getattr(engine.generation_config, "eos_token_id", None)
    if not (folder / "config.json").exists() and stops is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))


def _losses(config: Config, steps: int) -> dict[str, str]:
    """Losses for the model card, up to step `steps`, as far as the run's metrics can be read.

    A step that a rollback undid has been made once more since, or is later than `steps`, so its last line counts.
    """
    trained, measured = dict[int, float](), dict[int, float]()
    with suppress(OSError), (config.folder / METRICS).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # torn, another event, or a loss that was not finite
                told = parsed_json(line)
                if told["step"] <= steps:
                    {"stepped": trained, "evaluated": measured}[told["event"]][told["step"]] = float(told["loss"])
    last = [trained[step] for step in sorted(trained)[-LAST:]]
    facts = {}
    if last:
        facts["training loss"] = f"{sum(last) / len(last):.4f}, mean of the last {counted(len(last), 'step')}"
    if measured:
        facts["validation loss"] = f"{measured[max(measured)]:.4f} after step {max(measured):,}"
    return facts


def verify_trained(config: Config, engine: Engine, batch: Batch, saved: Path, console: Console) -> None:
    """Load the saved model with `from_pretrained` and compare its loss with the engine's.

    Skipped with a message if there is not enough memory. Collective; rank 0 loads. Raises `ExportError` if the losses
    differ by more than rounding.
    """
    if config.adapter is not None and config.model.path is None:
        said = "the saved adapter was not loaded again to compare its loss: its base is a fresh model, in no folder"
        console.print(Text(said, "yellow"), soft_wrap=True)
        return
    needed = 4 * engine.structure.numel + LOGITS * batch["input_ids"].numel() * engine.structure.vocab_size
    left = min(engine.world.exchange("free memory", engine.diagnostics.host_nbytes_left()))
    if needed > left:
        what = f"that takes {at_least(needed)} of host memory, but {at_most(left)} are left"
        said = f"the saved model was not reloaded to compare its loss: {what}"
        console.print(Text(said, "yellow"), soft_wrap=True)
        return
    ours = engine.evaluate([batch])
    if engine.world.rank > 0:
        return  # rank 0 compares
    theirs = _stock_loss(config, batch, saved, config.train.precision)
    say = f"on one batch the saved model, loaded with from_pretrained, has loss {theirs:.4f}, the engine {ours:.4f}"
    allowed = TOLERANCE[config.train.precision] * max(abs(ours), 1.0)
    if config.train.precision == "bf16" and not abs(ours - theirs) <= allowed:
        allowed = SLACK * abs(theirs - _stock_loss(config, batch, saved, "fp32"))
    if not abs(ours - theirs) <= allowed:
        raise ExportError(say, where=str(saved), fix="they should agree: please report this as a bug")
    console.print(Text(say, "green"), soft_wrap=True)


def _stock_loss(config: Config, batch: Batch, saved: Path, precision: Precision) -> float:
    """The loss of `batch` by the stock model loaded from the saved folder with `from_pretrained`."""
    loaded = load_trained(str(saved), dtype=DTYPES[precision], trust_remote_code=config.model.trust_remote_code).eval()
    with torch.set_grad_enabled(adds_for_routers(loaded)):
        return float(stock_loss(loaded, batch).detach())


def say_where(folder: Path, console: Console) -> None:
    for name, what in (
        ("model", "Hugging Face folder of the trained model, with its tokenizer"),
        ("metrics.jsonl", "every step as a line of JSON"),
        ("tensorboard", f"the same for `tensorboard --logdir {folder}`"),
        ("checkpoints", "for `resume`; each is a Hugging Face folder too"),
        ("config.yaml", "every key of this run, with its value"),
    ):
        if (folder / name).exists():
            console.print(Text.assemble((str(folder / name), "bold"), f"  {what}"), soft_wrap=True)
