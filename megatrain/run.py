"""A training run from its configuration: the only file that wires everything.

What can be wrong is looked for in the order of its cost: the run folder, the numbers, the device, the data (tokenised
once and kept), the model; the engine is built last. The run folder then holds

    config.yaml       every key as resolved; `megatrain train` takes it
    metrics.jsonl     one JSON object per event
    tensorboard/      the same for TensorBoard
    model/            Hugging Face folder with the tokenizer; it appears whole, at the end

A run that is told to stop saves like one that ends. A run that fails writes no model, and one that stood there stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from megatrain.config import Config, TrainSection, save_config
from megatrain.data import (
    Batch,
    Loader,
    Tokenizer,
    describe_tokens,
    evaluation_batches,
    load_tokenizer,
    pack,
    prepare_tokens,
    split_windows,
    unused_tokens,
    vocabulary_size,
)
from megatrain.data.tokenizer import encode_text, end_of_text_id
from megatrain.device import Device, open_device
from megatrain.engine import DTYPES
from megatrain.errors import ConfigError, ExportError
from megatrain.generation import draw_ids
from megatrain.machine import this_machine
from megatrain.model import FreshSource, PretrainedSource, Source, freeze_parameters, load_causal_lm, port_model
from megatrain.optim import AdamW, lr_schedule
from megatrain.plan import Plan, Question, available_threads, find_plan
from megatrain.preflight import Replanner
from megatrain.spec import ModelSpec
from megatrain.train.engine import Engine
from megatrain.train.events import Evaluated, Sampled, Watcher
from megatrain.train.metrics import JsonLines, TensorBoard
from megatrain.train.progress import Progress, describe_model, loading, printable, show_plan
from megatrain.train.stop import StopSignals
from megatrain.train.trainer import Task, train

VERIFIED_PARAMETERS = 10**9
"""A saved model below this size is loaded again and its loss compared."""

WARM_UP = 3
"""Steps after which measured times are compared with the plan's."""

TOLERANCE = {"bf16": 1e-2, "fp32": 1e-4}
"""Relative difference of two losses that rounding explains: two programs sum in two orders."""


def run_training(config: Config, console: Console) -> Path:
    """Train as `config` says, telling `console`. Returns the folder of the trained model.

    Raises a `MegaTrainError` for whatever is wrong, `NonFinite` for training that diverged among it.
    """
    folder = Path(config.output.folder).expanduser()
    _refuse_finished(folder, config.output.overwrite)
    optimizer, lr = _optimizer(config.train), _learning_rate(config.train)
    with ExitStack() as stack:
        device = open_device(config.train.device)
        stack.callback(device.close)
        tokenizer = load_tokenizer(config.tokenizer)
        source = _source(config)
        vocabulary = _check_limits(config, tokenizer, source.model)
        with console.status("planning"):
            ported = port_model(source.model, DTYPES[config.train.precision])
            plan = _plan(config, ported.spec, device)
        config = _resolved(config, plan)
        corpus = _corpus(config, plan, tokenizer, vocabulary, console)
        with loading(console, "loading the model") as progress:
            engine = stack.enter_context(
                Engine.from_source(
                    source,
                    ported=ported,
                    progress=progress,
                    device=device,
                    precision=config.train.precision,
                    optimizer=optimizer,
                    max_grad_norm=config.train.max_grad_norm,
                    policy=plan.policy,
                    seed=config.train.seed,
                    verify=config.model.verify,
                )
            )
        if config.trace is not None:
            engine.trace(config.trace)
        _show(config, engine, source, corpus, plan, console)
        watchers = _watchers(config, folder, stack, console)
        stop = stack.enter_context(StopSignals())
        train(
            engine,
            corpus.loader,
            steps=config.train.steps,
            lr=lr,
            watchers=watchers,
            tasks=[Task(0, Replanner(engine, plan), once=WARM_UP), *_tasks(config.train, engine, corpus, tokenizer)],
            nonfinite_limit=_nonfinite_limit(config.train, engine),
            should_stop=lambda: stop.requested,
        )
        saved = _save(config, engine, tokenizer, folder / "model")
        if config.output.verify_export and engine.spec.numel < VERIFIED_PARAMETERS:
            _verify(config, engine, corpus.validation[0], saved, console)
    _say_where(folder, console)
    return saved


@dataclass(frozen=True)
class _Corpus:
    """Text as a run uses it."""

    loader: Loader
    validation: list[Batch]
    """Micro-batches that the loss is measured on; without held-out text, one that is trained on too."""
    holds_out: bool
    facts: list[tuple[str, str]]
    """What to tell the user about it: name and fact."""


# Before training ---------------------------------------------------------------------------------------------------


def _refuse_finished(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError("is a file", where=str(folder), fix="choose another output.folder")
    if (folder / "model").exists() and not overwrite:
        raise ConfigError(
            "holds a finished run", where=str(folder), fix="set output.folder=NEW, or output.overwrite=true"
        )


def _optimizer(train: TrainSection) -> AdamW:
    return AdamW(
        lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay, no_decay=train.no_decay
    )


def _learning_rate(train: TrainSection) -> Callable[[int], float]:
    schedule = lr_schedule(
        train.lr_schedule,
        total_steps=max(train.steps, train.warmup_steps + train.decay_steps),
        warmup_steps=train.warmup_steps,
        min_ratio=train.min_lr_ratio,
        decay_steps=train.decay_steps,
    )
    return lambda step: train.lr * schedule.multiplier(step)


def _corpus(config: Config, plan: Plan, tokenizer: Tokenizer, vocabulary: int, console: Console) -> _Corpus:
    """The data, cut for the model and for the plan's micro-batches."""
    data, size = config.data, plan.micro_batch
    with console.status("preparing the text"):
        file = prepare_tokens(data.sources, tokenizer, cache=Path(data.cache).expanduser(), pattern=data.pattern)
    windows = pack(file, window=data.window, vocab_size=vocabulary)
    training, held_out = split_windows(windows, data.validation_fraction)
    batches = config.train.eval_batches if held_out else 1
    validation = list(evaluation_batches(held_out or training, size, limit=batches * size))
    loader = Loader(training, micro_batch=size, micro_batches=plan.work.micro_batches, seed=config.train.seed)
    held = f"{len(held_out):,} held out" if held_out else "none held out"
    cut = f"{len(windows):,} of {data.window:,} tokens, {held}; {unused_tokens(windows):,} tokens unused"
    facts = [("data", describe_tokens(file)), ("windows", cut)]
    return _Corpus(loader, validation, held_out is not None, facts)


def _source(config: Config) -> Source:
    model = config.model
    how: dict[str, Any] = {"attention": model.attention, "trust_remote_code": model.trust_remote_code}
    source: Source
    if model.path is not None:
        source = PretrainedSource(model.path, **how)
    else:
        assert model.config is not None  # `Config` has seen to it
        source = FreshSource(model.config, config.train.seed, **how)
    freeze_parameters(source.model, config.train.freeze)
    return source


def _check_limits(config: Config, tokenizer: Tokenizer, model: Any) -> int:
    """The model's vocabulary. Raises `ConfigError` where tokenizer or window do not go with the model."""
    vocabulary: int = model.get_input_embeddings().weight.shape[0]
    needed = vocabulary_size(tokenizer)
    if needed > vocabulary:
        raise ConfigError(
            f"the tokenizer {config.tokenizer!r} needs a vocabulary of {needed:,}, and the model has {vocabulary:,}",
            where="data.tokenizer",
            fix=f"use the model's own tokenizer, or set model.config.vocab_size={needed} for a fresh model",
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or -1
    if 0 < positions < config.data.window:
        raise ConfigError(
            f"a window of {config.data.window:,} tokens, and the model has {positions:,} positions",
            where="data.window",
            fix=f"set data.window={positions} or less",
        )
    return vocabulary


def _plan(config: Config, spec: ModelSpec, device: Device) -> Plan:
    """How to run it on this machine. Raises `DoesNotFit` before anything is allocated."""
    train = config.train
    if not spec.trained_numel:
        raise ConfigError("freezes every parameter", where="train.freeze", fix="freeze fewer of them")
    pinned = dict(config.policy.pinned)
    budgets = {name: pinned.pop(name, None) for name in ("device_budget_nbytes", "host_budget_nbytes")}
    pinned.setdefault("host_threads", available_threads())
    if train.pinned_micro_batch is not None:
        pinned["micro_batch"] = train.pinned_micro_batch
    question = Question(
        spec,
        this_machine(device, train.precision, train.hardware),
        tokens_per_step=train.rows * config.data.window,
        length=config.data.window,
        precision=train.precision,
        clips=train.max_grad_norm is not None,
        pinned=pinned,
        **budgets,
    )
    plan = find_plan(question)
    return replace(plan, policy=replace(plan.policy, **budgets))


def _resolved(config: Config, plan: Plan) -> Config:
    """The configuration with the sizes that the plan has chosen, so that the saved one repeats the run."""
    sizes = {"micro_batch": plan.micro_batch, "micro_batches": plan.work.micro_batches}
    return config.model_copy(update={"train": config.train.model_copy(update=sizes)})


def _show(config: Config, engine: Engine, source: Source, corpus: _Corpus, plan: Plan, console: Console) -> None:
    train, count = config.train, plan.work.micro_batches
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    speed = f"{plan.seconds:.3g} s a step, {plan.tokens_per_second:,.0f} tokens/s"
    left_out = source.left_out() if isinstance(source, PretrainedSource) else ""
    facts = [
        ("model", describe_model(engine.spec)),
        *([("left out", printable(left_out))] if left_out else []),
        ("attention", engine.spec.attention),
        ("verified", "no: " + engine.checked.why if engine.checked.state == "unchecked" else "against the stock code"),
        *corpus.facts,
        ("step", f"{batches} of {plan.micro_batch} windows, {sum(plan.work.tokens):,} tokens"),
        ("device", f"{train.device}, {engine.peak_flops() / 1e12:.2f} TFLOP/s measured in {train.precision}"),
        ("prediction", f"{speed} on {plan.question.hardware.name}"),
    ]
    engine.prepare(plan.work)
    show_plan(console, facts, engine.memory_table(), engine.policy)


def _watchers(config: Config, folder: Path, stack: ExitStack, console: Console) -> list[Watcher]:
    """Everything that reports, opened for as long as `stack`. This is the first to write into the run folder."""
    if (folder / "metrics.jsonl").exists():
        console.print(Text(f"replaces the metrics of an earlier run in {folder}", "yellow"), soft_wrap=True)
    save_config(config, folder / "config.yaml")
    watchers: list[Watcher] = [stack.enter_context(JsonLines(folder / "metrics.jsonl"))]
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    if config.output.tensorboard:
        watchers.append(stack.enter_context(TensorBoard(folder / "tensorboard")))
    return [*watchers, stack.enter_context(Progress(console, config.train.log_every))]


# During training ---------------------------------------------------------------------------------------------------


def _tasks(train: TrainSection, engine: Engine, corpus: _Corpus, tokenizer: Tokenizer) -> list[Task]:
    tasks = []
    if corpus.holds_out:
        evaluate = lambda step: Evaluated(step, engine.evaluate(corpus.validation))  # noqa: E731
        tasks.append(Task(train.eval_every, evaluate))
    if train.sample_tokens:
        tasks.append(Task(train.sample_every, lambda step: _sample(train, engine, corpus, tokenizer, step)))
    return tasks


def _sample(train: TrainSection, engine: Engine, corpus: _Corpus, tokenizer: Tokenizer, step: int) -> Sampled:
    """Text that the model continues. Where the window is full it goes on from its second half."""
    end, window = end_of_text_id(tokenizer), corpus.loader.windows.window
    ids = [end, *encode_text(tokenizer, train.sample_prompt).tolist()]
    drawn: list[int] = []
    while len(drawn) < train.sample_tokens and drawn[-1:] != [end]:
        seen = [*ids, *drawn]
        seen = seen if len(seen) < window else seen[-max(1, window // 2) :]
        drawn += draw_ids(
            engine,
            tokenizer,
            seen,
            tokens=max(1, min(train.sample_tokens - len(drawn), window - len(seen))),
            temperature=train.sample_temperature,
            top_k=train.sample_top_k,
            top_p=1.0,
            seed=train.seed + len(drawn),
        )
    said = drawn[:-1] if drawn[-1:] == [end] else drawn
    return Sampled(step, train.sample_prompt, str(tokenizer.decode(said)))


def _nonfinite_limit(train: TrainSection, engine: Engine) -> int:
    """A step that updates as it goes may have been applied in part, so it cannot be skipped."""
    return 1 if engine.policy.update == "during_backward" else train.nonfinite_limit


# After training ----------------------------------------------------------------------------------------------------


def _save(config: Config, engine: Engine, tokenizer: Tokenizer, target: Path) -> Path:
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


def _verify(config: Config, engine: Engine, batch: Batch, saved: Path, console: Console) -> None:
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


def _say_where(folder: Path, console: Console) -> None:
    for name, what in (
        ("model", "Hugging Face folder of the trained model, with its tokenizer"),
        ("metrics.jsonl", "every step as a line of JSON"),
        ("tensorboard", f"the same for `tensorboard --logdir {folder}`"),
        ("config.yaml", "every key of this run, as resolved"),
    ):
        if (folder / name).exists():
            console.print(Text.assemble((str(folder / name), "bold"), f"  {what}"), soft_wrap=True)
