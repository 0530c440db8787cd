"""Run training from a configuration; the only module that connects everything.

Checks are made in order of cost: the run folder, the numbers, the device, the data (tokenized once and cached), the
model; the engine is built last. The run folder then holds

    config.yaml       every key with its value; `megatrain train` accepts it
    metrics.jsonl     one JSON object per event
    tensorboard/      the same for TensorBoard, where it is among the trackers
    status.json       state of the run: see `train.status`
    trace.json        one early step, op by op, unless `trace` names another file
    logs/             output of the ranks other than 0
    checkpoints/      for resuming; each appears only when complete
    model/            Hugging Face folder with the tokenizer; appears at the end, when complete

A run that is stopped writes a checkpoint, or the model if checkpoints are off. A run that fails writes no model and
leaves an existing one alone; one that could not save its last state counts as failed, but writes its model. Files of an
earlier run in the folder are replaced, or continued when resuming. Reporting must open without errors; errors later are
only printed.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from megatrain.checkpoint.folder import Retention, open_checkpoint, refuse_damaged_weights
from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.peer_checkpoints import PeerCheckpoint
from megatrain.config import AdapterSection, Config, TrainSection, save_config
from megatrain.data.loader import Loader
from megatrain.data.tokenizer import Tokenizer, load_tokenizer, vocabulary_size
from megatrain.device import Device, open_device
from megatrain.engine.batch import TEXT_ENTRIES
from megatrain.errors import ConfigError
from megatrain.formatting import counted, counted_epochs
from megatrain.model import (
    AdaptedSource,
    FreshSource,
    PortedModel,
    PretrainedSource,
    Progress,
    Source,
    freeze_parameters,
    listed,
    lora_config,
    model_named,
    pretrained_source,
)
from megatrain.model.architecture import position_limit, read_config
from megatrain.model.encoder_stack import stream_encoder
from megatrain.model.profile_prologue import see, values_of, values_per_token
from megatrain.optim import LrSchedule
from megatrain.plan import Plan, find_plan
from megatrain.plan.report import describe_images, describe_matrices, slow_precision_warning
from megatrain.run import resume
from megatrain.run.data import Corpus, Encoding, as_begun, largest_image_row, open_corpus, shortened
from megatrain.run.disk_space import checkpoint_space_warning, refuse_full_disk
from megatrain.run.early_checks import keys_named, refuse_mistakes
from megatrain.run.evaluation import Evaluation, Metric, evaluated, load_metrics, scored
from megatrain.run.existing_run import CONFIG, METRICS, MODEL, TRACE, is_own, remove_others
from megatrain.run.finish import restore_best, save_beside, save_trained, say_where, verify_trained
from megatrain.run.lm_eval_tasks import Tasks
from megatrain.run.objective import loss_of, take_up_reference, without_reference
from megatrain.run.planner_inputs import (
    describe_disk,
    describe_files,
    describe_memory,
    open_disk,
    optimizer_for,
    question_of,
    refuse_wear,
)
from megatrain.run.ranks import Ranks, StopsInTime, joined
from megatrain.run.replan import Replanner
from megatrain.run.sampling import sample_of, stop_at_ends
from megatrain.run.this_machine import this_machine
from megatrain.spec import Numerics
from megatrain.system.environment import seconds_to_stop
from megatrain.system.locks import Claim
from megatrain.train.checkpoints import Checkpoints, LowestLoss, found_by_first
from megatrain.train.engine import Engine
from megatrain.train.events import Ended, Event, Resumed, StoppedEarly, Watcher, tell_all
from megatrain.train.loop import BetweenSteps, Feed, RunSteps, Task, train
from megatrain.train.metrics import OPTIONAL, JsonLines, Tracked, identity_of, open_tracker
from megatrain.train.options import EngineOptions, SourceInUnits, optimizer_of, ported_of
from megatrain.train.progress import ProgressLine, describe_model, loading, preparing, printable, show_plan, warn
from megatrain.train.restore import NewMoments, PeerSource
from megatrain.train.status import STATUS, Health, Intervals
from megatrain.train.stop import StopSignals

VERIFIED_PARAMETERS = 10**9
"""Saved models with fewer parameters are reloaded to compare their loss."""

GOES_ON = "not finished; `resume=auto` continues after step {:,}"

WARM_UP = 3
"""Steps before measured times are compared with the plan's."""


@keys_named()
def run_training(config: Config, console: Console) -> Path:
    """Train as `config` says, printing to `console`; returns the folder of the trained model.

    Raises a `MegaTrainError` if anything is wrong, e.g. `NonFinite` if training diverges.
    """
    ranks, damaged, said = joined(config), dict[Path, str](), set[str]()
    console = console if ranks.leads else Console(file=io.StringIO())

    def say(line: str) -> None:
        if line not in said:  # with a checkpoint that proved to be damaged
            said.add(line)
            warn(console, line)

    while True:
        try:
            return _run_training(config, console, ranks, damaged, say)
        except resume.DamageFound as error:  # as it was loaded, so nothing has changed yet
            damaged[error.folder] = error.what


def _run_training(
    config: Config, console: Console, ranks: Ranks, damaged: Mapping[Path, str], say: Callable[[str], None]
) -> Path:
    """As `run_training`, without the checkpoints that have proved to be damaged: what is wrong in each."""
    folder = config.folder
    opens = open_checkpoint if ranks.world.size > 1 else resume.opens_to_load(damaged)
    with ExitStack() as stack, ranks.watched():  # other ranks learn of an error before cleanup
        refuse_mistakes(config)
        metrics, tasks = load_metrics(config.train.metrics), Tasks(config.lm_eval) if config.lm_eval.tasks else None
        if config.model.path is not None:
            model = config.model.model_copy(update={"path": model_named(config.model.path)})
            config = config.model_copy(update={"model": model})
        claim = stack.enter_context(Claim())
        resumed = found_by_first(ranks.world, lambda: _find(config, claim, say, opens))
        if resumed is not None:
            steps = config.train.steps
            if steps is not None and resumed.step >= steps and resume.is_finished(config, resumed):
                return _finished(config, resumed, console)
            config = resume.as_begun(config, resumed)
            resume.refuse_changes(config, resumed, say)
        device = open_device(ranks.device_of(config.train.device))
        stack.callback(device.close)
        if resumed is None and (path := config.model.path) is not None:  # report a wrong model before its tokenizer
            read_config(path, where=f"model {path}", trust_remote_code=config.model.trust_remote_code)
        tokenizer = load_tokenizer(config.tokenizer)
        source = _source(config, resumed, say)
        _check_limits(config, tokenizer, source.model)
        begun, images = _looked_at(config, tokenizer, source.model, ranks, console, resumed)
        with console.status("planning"):
            split = SourceInUnits(source, _ported(config, source, of_checkpoint=resumed is not None))
            plan = _plan(config, split.ported, device, ranks, resumed, images)
        config = _resolved(config, plan, ranks)
        with preparing(console) as told:
            size, encoding = _vocabulary(source.model), Encoding(begun, told)
            corpus = open_corpus(config, plan, tokenizer, size, source.model, ranks.world, encoding)
        stack.callback(_close, corpus, say)
        feed = Feed(corpus.loader)
        begins = 0 if resumed is None else resume.take_up_data(feed, resumed, config, say)
        steps = _steps(config.train, corpus.loader, begins)
        lowest = resume.lowest_loss_at(config, resumed, f"{loss_of(config)!r} of {corpus.validation.identity}")
        if resumed is not None:
            if (resumed.step >= steps or lowest.is_over) and resume.is_finished(config, resumed):
                return _finished(config, resumed, console, ended_early=lowest.is_over)
            steps = resumed.step if lowest.is_over else max(steps, resumed.step)
        ranks.at("loading the model")
        with loading(console, "loading the model") as progress, resume.loading_checked(resumed):
            engine = stack.enter_context(_engine(config, split, plan, device, resumed, progress, ranks))
        if ranks.leads:
            claim.make(folder)
        else:
            console.file = stack.enter_context(ranks.open_log(folder))
        corpus = stop_at_ends(config, engine, corpus, tokenizer)
        if config.train.has_reference:
            with loading(console, "computing the reference's log-probabilities") as progress:
                take_up_reference(config, corpus, engine, plan, resumed, progress)
        if config.trace_file is not None and ranks.leads:
            engine.diagnostics.trace(config.trace_file)
        checkpoints = _checkpoints(config, engine, feed, tokenizer, plan, lowest, corpus.begun)
        _show(config, engine, split, corpus, plan, console, steps)
        length = steps, _epochs(config.train, corpus.loader, steps - begins)
        run = _Run(engine, corpus, feed, checkpoints, tokenizer, plan, claim, ranks, *length, metrics, tasks)
        ended, tell = _train(config, run, resumed, stack, console)
        if ended.step < steps and config.checkpoint.every and not checkpoints.lowest.is_over:
            checkpoints.refuse_unsaved(ended.step)
            say(GOES_ON.format(checkpoints.step))
            return Path(checkpoints.newest)
        saved = _leave_model(config, run, ended, tell, console)
    if ranks.leads:
        say_where(config.folder, console)
    return saved


@contextmanager
def _says_where_it_goes_on(checkpoints: Checkpoints, say: Callable[[str], None]) -> Iterator[None]:
    """If the block fails, or is left by a second Ctrl-C, name the step that `resume=auto` continues after, if any."""
    try:
        yield
    except BaseException:
        if checkpoints.newest:
            say(GOES_ON.format(checkpoints.step))
        raise


def _leave_model(config: Config, run: _Run, ended: Ended, tell: Callable[..., None], console: Console) -> Path:
    """Write and verify the model of a run that has ended, and return its folder.

    tell: handles events. Raises `CheckpointError` if the last state could not be saved.
    """
    engine, of = run.engine, ended.step
    if config.output.best:
        of = restore_best(config, engine, of, run.checkpoints.lowest.since, partial(warn, console))
    if ended.step == run.steps or run.checkpoints.lowest.is_over:  # no samples after a stop signal
        due = (task for task in _of_the_model(config, run) if not task.is_due(of, run.steps))
        tell(*(event for task in due if (event := task.run(of))))
    with _says_where_it_goes_on(run.checkpoints, partial(warn, console)):
        saved = save_trained(config, engine, run.tokenizer, config.folder / MODEL, of)
    if config.output.verify_export and engine.structure.numel < VERIFIED_PARAMETERS:
        verify_trained(config, engine, without_reference(run.corpus.first_batch()), saved, console)
    if config.checkpoint.every:
        run.checkpoints.refuse_unsaved(ended.step, saved)
    return saved


def _finished(config: Config, resumed: Checkpoint, console: Console, *, ended_early: bool = False) -> Path:
    """Say that the run is already finished, and return its model's folder."""
    with resume.loading_checked(resumed):
        resumed.verify_rest()
    key, ended = "train.epochs" if config.train.steps is None else "train.steps", ""
    if ended_early:
        key, ended = "train.early_stopping_patience", ", ended by its validation loss"
    done = counted(resumed.step, "step")
    warn(console, f"{config.folder} is a finished run of {done}{ended}; increase {key} to extend it")
    say_where(config.folder, console)
    return config.folder / MODEL


def _find(config: Config, claim: Claim, say: Callable[[str], None], opens: resume.Opens) -> Checkpoint | None:
    """The checkpoint to resume from, if any; locks the run's folders that exist."""
    claim.take(config.folder)
    claim.take(config.checkpoints)
    return resume.find(config, say, opens)


@dataclass(frozen=True)
class _Run:
    engine: Engine
    corpus: Corpus
    feed: Feed
    checkpoints: Checkpoints
    tokenizer: Tokenizer
    plan: Plan
    claim: Claim
    ranks: Ranks
    steps: int
    """Last step of the run."""
    epochs: float | None
    """Passes over the data by then, if known."""
    metrics: Mapping[str, Metric]
    """The user's own."""
    tasks: Tasks | None
    """Of lm_eval."""


# Before training ---------------------------------------------------------------------------------------------------


def _looked_at(
    config: Config, tokenizer: Tokenizer, model: Any, ranks: Ranks, console: Console, resumed: Checkpoint | None
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """What the run began with (`as_begun`); and the row with the largest images, if it has any, for the plan. Their
    samples are encoded here."""
    begun = as_begun(ranks.world, None if resumed is None else resumed.training.get("run"))
    with preparing(console) as told:
        encoding = Encoding(begun, told)
        return begun, largest_image_row(config, tokenizer, _vocabulary(model), model, encoding)


def _close(corpus: Corpus, say: Callable[[str], None]) -> None:
    """Stop the readers, and report what was left out of streams."""
    corpus.loader.close()
    for stream in corpus.loader.streams:
        lines = stream.statistics.left_out.lines()
        if lines:
            say(f"left out of the stream of {stream.source.name}: {'; '.join(lines)}")


def _steps(train: TrainSection, loader: Loader, begins: int) -> int:
    """Steps of the whole run. begins: the step at which this data began."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None  # one of the two
    return begins + loader.steps_in(train.epochs)


def _epochs(train: TrainSection, loader: Loader, steps: int) -> float | None:
    """Passes over the data in `steps` steps; if steps differ in rows, the epochs asked for, if any."""
    epochs = loader.epochs_in(steps)
    return train.epochs if epochs is None else epochs


def _length(steps: int, loader: Loader) -> str:
    epochs = loader.epochs_in(steps)
    if epochs is None:
        return counted(steps, "step")
    rows = sum(len(source) for source in loader.sources)
    whole = f"{counted(steps, 'step')} = {counted_epochs(epochs)} of {counted(rows, 'row')}"
    passes = loader.passes(steps)
    if len(passes) == 1:
        return whole
    return f"{whole}; passes over each source: {', '.join(f'{each:.3g}' for each in passes)}"


def _learning_rate(train: TrainSection, steps: int) -> Callable[[int], float]:
    warmup = train.warmup_steps or ceil(train.warmup_ratio * steps)
    schedule = LrSchedule(
        train.lr_scheduler,
        total_steps=max(steps, warmup + train.decay_steps),
        warmup_steps=warmup,
        min_ratio=train.min_lr_ratio,
        decay_steps=train.decay_steps,
    )
    return lambda step: train.learning_rate * schedule.multiplier(step)


def _source(config: Config, resumed: Checkpoint | None, say: Callable[[str], None]) -> Source:
    """The model, frozen as asked, with the weights that the run begins or goes on with."""
    options: dict[str, Any] = {"attention": config.model.attention, "trust_remote_code": config.model.trust_remote_code}
    adapter = config.adapter
    if config.model.path is not None and (resumed is None or adapter is not None):
        refuse_damaged_weights(config.model.path)
    if adapter is None:
        source = _whole_source(config, resumed, options)
    else:
        source = _adapted_source(config, adapter, resumed, options)
    if isinstance(resumed, PeerCheckpoint):
        resume.take_over(resumed, source, optimizer_for(config.train), say)
    return source


def _whole_source(config: Config, resumed: Checkpoint | None, options: Mapping[str, Any]) -> Source:
    model = config.model
    source: Source
    masters = isinstance(resumed, PeerCheckpoint) and resumed.holds_masters
    folder = model.path if resumed is None or masters else resumed.folder
    if folder is not None:
        source = PretrainedSource(folder, **options)
    else:
        assert model.config is not None  # `Config` has seen to it
        source = FreshSource(model.config, config.train.seed, **options)
    if isinstance(resumed, PeerCheckpoint) and masters:
        source = PeerSource(resumed, source.model)
    freeze_parameters(source.model, config.train.freeze)
    return source


def _adapted_source(
    config: Config, adapter: AdapterSection, resumed: Checkpoint | None, options: Mapping[str, Any]
) -> Source:
    model, seed = config.model, config.train.seed
    fresh = adapter.model_dump(exclude={"type", "path"})
    begins: Any = lora_config(**fresh) if adapter.path is None else adapter.path
    given: Any = begins if resumed is None else resumed.folder
    if model.path is not None:
        return pretrained_source(model.path, given, seed, **options)
    assert model.config is not None  # `Config` has seen to it
    return AdaptedSource(FreshSource(model.config, seed, **options), given, seed)


def _vocabulary(model: Any) -> int:
    """Token ids that the model has an embedding for."""
    return int(model.get_input_embeddings().weight.shape[0])


def _check_limits(config: Config, tokenizer: Tokenizer, model: Any) -> None:
    """Raise `ConfigError` if tokenizer or sequence length do not fit the model."""
    vocabulary, needed = _vocabulary(model), vocabulary_size(tokenizer)
    if needed > vocabulary:
        raise ConfigError(
            f"the tokenizer {config.tokenizer!r} needs a vocabulary of {needed:,}, but the model has {vocabulary:,}",
            where="data.tokenizer",
            fix=f"use the model's own tokenizer, or set model.config.vocab_size={needed} for a fresh model",
        )
    positions = position_limit(model.config)
    if positions is not None and positions < config.data.sequence_length:
        raise ConfigError(
            f"{config.data.sequence_length:,} tokens exceed the model's {positions:,} positions",
            where="data.sequence_length",
            fix=f"set data.sequence_length={positions} or less",
        )


def _ported(config: Config, source: Source, *, of_checkpoint: bool) -> PortedModel:
    """The source's model in units. Raises `ConfigError` for a pattern of the optimizer that matches nothing in it."""
    numerics = Numerics(config.train.precision, kernels=config.policy.kernels or "stock")
    ported = ported_of(source, {"numerics": numerics}, of_checkpoint=of_checkpoint)
    optimizer_of({"optimizer": optimizer_for(config.train)}, ported)
    return ported


def _plan(
    config: Config,
    ported: PortedModel,
    device: Device,
    ranks: Ranks,
    resumed: Checkpoint | None,
    images: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan the run for this machine. images: a row with the most of the data, if they have any. Raises `DoesNotFit`
    before anything is allocated, `ConfigError` for full disks."""
    if images is not None:
        values = values_of(images, TEXT_ENTRIES)
        stream_encoder(ported, images, values)
        see(ported, images, values)
    if ranks.leads:
        refuse_full_disk(config, ported, resumed)
    hardware = this_machine(device, config.train.precision, config.train.hardware)
    threads = {"host_threads": ranks.threads}
    question = question_of(config, ported.spec, hardware, threads, values_per_token(ported))
    plan = find_plan(question) if ranks.alone else ranks.planned(question, device)
    refuse_wear(plan, config.disk)
    return plan


def _resolved(config: Config, plan: Plan, ranks: Ranks) -> Config:
    """The configuration with the sizes chosen by the plan, so that the saved file reproduces the run."""
    count = plan.work.micro_batches if ranks.alone else -(-config.train.sequences // plan.micro_batch)
    sizes = {"micro_batch_size": plan.micro_batch, "gradient_accumulation_steps": count}
    return config.model_copy(update={"train": config.train.model_copy(update=sizes)})


def _engine(
    config: Config,
    split: SourceInUnits,
    plan: Plan,
    device: Device,
    resumed: Checkpoint | None,
    progress: Progress,
    ranks: Ranks,
) -> Engine:
    options: EngineOptions = {
        "device": device,
        "precision": config.train.precision,
        "optimizer": optimizer_for(config.train),
        "max_grad_norm": config.train.max_grad_norm,
        "numerics": plan.numerics,
        "policy": plan.policy,
        "limits": plan.question.limits,
        "disk": open_disk(config.disk, plan.question.hardware) or (),
        "seed": config.train.seed,
        "verify": config.model.verify,
        "world": ranks.world,
    }
    if resumed is None:
        return Engine.from_source(split, progress=progress, **options)
    new: NewMoments = "zero" if config.accept_changes else "refuse"
    return Engine.from_checkpoint(resumed, source=split, new=new, progress=progress, **options)


def _checkpoints(
    config: Config,
    engine: Engine,
    feed: Feed,
    tokenizer: Tokenizer,
    plan: Plan,
    lowest: LowestLoss,
    begun: Mapping[str, Any],
) -> Checkpoints:
    """The run's checkpoint writer. begun: see `Corpus`. Raises `DoesNotFit` if there is no memory for it."""
    section = config.checkpoint
    if section.every:
        engine.saver.reserve()
    return Checkpoints(
        engine,
        config.checkpoints,
        Retention(section.keep_last, section.keep_every, max(section.keep_best, config.output.best)),
        feed,
        {"config": resume.with_numbers(config, plan.numerics).model_dump(mode="json"), **begun},
        write_more=partial(save_beside, tokenizer, engine),
        lowest=lowest,
    )


def _show(
    config: Config, engine: Engine, split: SourceInUnits, corpus: Corpus, plan: Plan, console: Console, steps: int
) -> None:
    """Print a summary of the run before it starts."""
    train, world = config.train, engine.world
    count = train.gradient_accumulation_steps or plan.work.micro_batches
    batches, rows = counted(count, "micro-batch"), counted(plan.micro_batch, "sequence")
    speed = f"{plan.seconds:.3g} s a step, {plan.tokens_per_second:,.0f} tokens/s"
    ported = split.ported
    files = split.source if isinstance(split.source, PretrainedSource | AdaptedSource) else None
    left_out, dequantized = ("", "") if files is None else (files.left_out(), files.dequantized())
    rounded, peak_flops = engine.weights.rounded, engine.diagnostics.peak_flops()
    facts = [
        ("model", describe_model(engine.structure)),
        *([("dequantized", printable(dequantized))] if dequantized else []),
        *([("carried over" if config.adapter is None else "left out", printable(left_out))] if left_out else []),
        *([("rounded", printable(f"to bfloat16, because frozen: {listed(rounded)}"))] if rounded else []),
        ("attention", engine.structure.attention),
        ("verified", "no: " + engine.checked.why if engine.checked.state == "unchecked" else "against the stock code"),
        *corpus.facts,
        ("step", f"{batches} of {rows}, {counted(plan.question.tokens_of_all, 'token')}"),
        ("length", _length(steps, corpus.loader)),
        ("optimizer", f"{engine.optimizer.description}; learning rate {train.learning_rate:g}, {train.lr_scheduler}"),
        *describe_matrices(plan),
        *([("ranks", f"{world.size}, each with 1/{world.size} of the state")] if world.size > 1 else []),
        ("device", f"{train.device}, {peak_flops / 1e12:.2f} TFLOP/s measured in {train.precision}"),
        *describe_disk(engine.parts.disk, config.disk),
        *((name, printable(fact)) for name, fact in describe_files(plan, ported.in_files)),
        ("memory", f"peak {describe_memory(plan)}"),
        *describe_images(plan),
        ("prediction", f"{speed} on {plan.question.hardware.name}"),
    ]
    engine.parts.prepare(plan.work)
    show_plan(console, facts, engine.diagnostics.memory_table(), plan.nbytes, engine.numerics, engine.policy)
    if corpus.example:
        console.print(Text("the first sample; trained text is green", "bold"))
        styled = ((printable(text), "green" if trained else "dim") for text, trained in shortened(corpus.example))
        console.print(Text.assemble(*styled), soft_wrap=True)
    for warning in slow_precision_warning(plan.question), checkpoint_space_warning(config, ported, steps):
        if warning:
            warn(console, warning)


# During training ---------------------------------------------------------------------------------------------------


def _train(
    config: Config, run: _Run, resumed: Checkpoint | None, stack: ExitStack, console: Console
) -> tuple[Ended, Callable[..., None]]:
    """Train to the end or until stopped, and save the state. Returns how it ended, and a function that sends events to
    all watchers."""
    train_, checkpoints, engine = config.train, run.checkpoints, run.engine
    stop = stack.enter_context(StopSignals(config.checkpoint.deadline_seconds, checkpoints.expected_seconds))
    if config.checkpoint.every and engine.world.rank == 0:
        run.claim.make(config.checkpoints)
    watchers: list[Watcher] = [ProgressLine(console, train_.log_every), checkpoints]
    start = 0 if resumed is None else resumed.step
    run.ranks.at(f"step {start + 1:,}")
    if engine.world.rank == 0:
        watchers = [*_open_watchers(config, resumed, stack, console), checkpoints]
        health = stack.enter_context(_health(config, engine, stop, run.steps, console))
        run.ranks.before_it_is_ended(health.failed)
        watchers.append(health)
        if config.trace is None:
            with suppress(ConfigError):  # the user has not asked for it
                engine.diagnostics.trace(config.folder / TRACE, steps=1)
    watchers += [run.ranks.follow, StopsInTime(seconds_to_stop(), partial(warn, console))]
    if resumed is not None:
        tell_all(watchers, Resumed(start, run.steps, str(resumed.folder)))
    if train_.on_nonfinite == "rollback" and checkpoints.step < 0:
        tell_all(watchers, *checkpoints.finish(start))
    if engine.policy.update == "next_forward":
        engine.parts.streamer.region = stop.region  # an interrupted step counts as not started, and repeats bit for bit
    planned_steps = RunSteps(
        run.steps, _learning_rate(train_, run.steps), start, lambda: (run.corpus.loader.epoch, run.epochs)
    )
    saves_alone = config.checkpoint.every and engine.world.size == 1  # other ranks may wait in the task that failed
    between = BetweenSteps(
        tasks=_tasks(config, run, start),
        should_stop=lambda: checkpoints.lowest.is_over or any(engine.world.exchange("a stop", stop.requested)),
        undo=run.feed.put_back,
        keep=lambda step: tell_all(watchers, *checkpoints.finish(step)) if saves_alone else None,
        nonfinite_limit=_nonfinite_limit(train_, engine),
        recover=checkpoints.roll_back if train_.on_nonfinite == "rollback" else None,
    )
    with _says_where_it_goes_on(checkpoints, partial(warn, console)):
        try:
            with stop.interruptible():
                ended = train(engine, run.feed, planned_steps, loss_of(config), watchers, between)
        except Exception:
            tell_all(watchers, *checkpoints.settle())
            raise
        if config.checkpoint.every:
            tell_all(watchers, *checkpoints.finish(ended.step, stop.remaining_seconds()))
    return ended, partial(tell_all, watchers)


def _tasks(config: Config, run: _Run, start: int) -> list[Task]:
    train, checkpoints = config.train, run.checkpoints
    tasks = []
    # else steps differ in micro-batches or in what ranks wait for, so no plan fits all
    if train.target_tokens_per_step is None and run.engine.world.size == 1:
        tasks.append(Task(1, Replanner(run.engine, run.plan, start + WARM_UP)))
    tasks += _measurements(config, run)
    if config.checkpoint.every:
        due = partial(_save, checkpoints, config.checkpoint.every, run.steps)
        tasks += [Task(1, checkpoints.collect), Task(1, due)]
    return tasks


def _save(checkpoints: Checkpoints, every: int, steps: int, step: int) -> Event | None:
    """Start a checkpoint that is due, or of the best state so far. The last step's is written when the run ends."""
    is_due = step % every == 0 or checkpoints.is_best(step)
    return checkpoints.save(step) if is_due and step < steps else None


def _measurements(config: Config, run: _Run) -> list[Task]:
    train, engine, tokenizer, tasks = config.train, run.engine, run.tokenizer, []
    sources, lowest = run.corpus.validation.batches(), run.checkpoints.lowest
    together = run.corpus.loader.micro_batches
    if sources:
        loss_fn = loss_of(config)
        tasks.append(Task(train.eval_every, lambda step: evaluated(step, engine, sources, loss_fn, together)))
        tasks.append(Task(train.eval_every, lambda step: _over(lowest, step, run.steps)))
    if run.metrics:
        given = partial(Evaluation, engine=engine, tokenizer=tokenizer, sources=sources)
        tasks.append(Task(train.eval_every, lambda step: scored(run.metrics, given(step))))
    return tasks + _of_the_model(config, run)


def _of_the_model(config: Config, run: _Run) -> list[Task]:
    """What is told of the state in `model/` too, where that is not the last one or training has ended early."""
    tasks = []
    if run.tasks is not None:
        size = run.plan.micro_batch, run.plan.micro_batch * config.data.sequence_length
        ask = partial(run.tasks.run, engine=run.engine, tokenizer=run.tokenizer, rows=size[0], tokens=size[1])
        tasks.append(Task(run.tasks.section.every, ask))
    return tasks + _samples(config.train, run)


def _samples(train: TrainSection, run: _Run) -> list[Task]:
    if not train.sample_tokens:
        return []
    sample = partial(sample_of, train, run.engine, run.corpus, run.tokenizer)
    named = [prompt for prompt in train.sample_prompts if prompt or not run.corpus.has_images]  # text alone is answered
    return [Task(train.sample_every, partial(sample, prompt)) for prompt in named]


def _over(lowest: LowestLoss, step: int, steps: int) -> StoppedEarly | None:
    return StoppedEarly(step, lowest.why) if lowest.is_over and step < steps else None


def _nonfinite_limit(train: TrainSection, engine: Engine) -> int:
    """Limit of non-finite steps; a step that updates as it goes may be partly applied and cannot be skipped."""
    torn = engine.policy.update == "during_backward" and train.on_nonfinite != "rollback"
    return 1 if torn or train.on_nonfinite == "stop" else train.nonfinite_limit


def _health(config: Config, engine: Engine, stop: StopSignals, steps: int, console: Console) -> Health:
    return Health(
        config.folder / STATUS,
        engine,
        steps,
        Intervals(config.train.log_every, config.train.stall_seconds),
        say=partial(warn, console),
        stopping=lambda: stop.requested,
    )


def _open_watchers(config: Config, resumed: Checkpoint | None, stack: ExitStack, console: Console) -> list[Watcher]:
    """Open all watchers, to be closed with `stack`. The run folder must exist and be locked."""
    folder, say = config.folder, partial(warn, console)
    goes_on = resumed is not None and is_own(config, resumed)
    step = resumed.step if resumed is not None and goes_on else None
    remove_others(config, resumed if goes_on else None)
    once = config.output.model_copy(update={"overwrite": False})  # a one-time permission, not saved
    save_config(config.model_copy(update={"output": once}), folder / CONFIG)
    watchers: list[Watcher] = [stack.enter_context(JsonLines(folder / METRICS, step, say))]
    if not goes_on:
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    output = config.output
    identity = identity_of(folder, goes_on) if set(output.trackers) & set(OPTIONAL) else ""
    tracked = Tracked(folder, output.project, output.trackers_online, config.model_dump(mode="json"), identity, step)
    watchers += [stack.enter_context(open_tracker(name, tracked, say)) for name in output.trackers]
    return [*watchers, stack.enter_context(ProgressLine(console, config.train.log_every))]
