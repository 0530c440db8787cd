"""Shows a run to its user: the plan before it, a progress line during it, a summary after it.

On a terminal the line is redrawn in place, as much of it as fits; elsewhere (a file, a pipe, a job's log) a
plain line is printed every `log_every` steps. Loss and speeds are means over the last `log_every` steps; speeds
include the time of skipped steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from statistics import fmean as mean

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from megatrain.formatting import amount, clock, counted, duration, metric
from megatrain.spec import NOT_OFFLOADED, ModelSpec, Numerics, Placement, Policy
from megatrain.train.events import (
    Ended,
    Evaluated,
    Event,
    Replanned,
    Resumed,
    RolledBack,
    Sampled,
    Saved,
    Scored,
    Skipped,
    Stepped,
    StoppedEarly,
    Warned,
    mean_loss,
    perplexity_of,
)

HINT = (
    "MFU: the share of the device's measured peak at which the model's products run, recomputation not counted; "
    "stall: share in which compute waited for data, copies or updates; bytes: held between steps"
)
"""Printed before the first line."""
RANKS_HINT = "; of the rank that holds most; slowest: the rank that was busy longest, against the mean of all"
"""The same with several ranks, behind it."""


# The plan ----------------------------------------------------------------------------------------------------------


def show_plan(
    console: Console,
    facts: Sequence[tuple[str, str]],
    held: Mapping[tuple[str, str], int],
    peaks: Mapping[str, int],
    numerics: Numerics,
    policy: Policy,
) -> None:
    """Print `facts` (a name and what it is), the policy, and the memory of each tier.

    held: (tier, use) -> bytes between steps. peaks: tier -> the plan's peak in bytes, including compute.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for name, fact in (*facts, ("policy", "; ".join(describe_policy(numerics, policy)))):
        grid.add_row(name, Text(fact))
    console.print(grid)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("memory")
    table.add_column("what for")
    table.add_column("held between steps", justify="right")
    table.add_column("peak within a step", justify="right")
    for tier in dict.fromkeys(tier for tier, _ in held):
        uses = {use: nbytes for (of, use), nbytes in held.items() if of == tier}
        for use, nbytes in uses.items():
            if nbytes:
                table.add_row(tier, use, amount(nbytes))
        peak = f"{amount(peaks[tier])} planned" if peaks.get(tier) else ""
        table.add_row(tier, "total", amount(sum(uses.values())), peak, style="bold")
    console.print(table)


@contextmanager
def loading(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere; yields a function to call with (done, total)."""
    columns = TextColumn(what), BarColumn(), TaskProgressColumn()
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if done == total:
                bar.stop()  # what follows may print, or prompt

        yield tell


@contextmanager
def preparing(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """As `loading`, for data: yields a function to call with (source, samples so far, total samples)."""
    columns = TextColumn("preparing the data{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(name: str, done: int, total: int | None) -> None:
            said = f": {done:,} samples of {printable(name)}"
            bar.update(task, description=said, completed=0 if total is None else done, total=total)

        yield tell


def describe_model(spec: ModelSpec) -> str:
    tied = ", embedding and head tied" if spec.tied else ""
    layers = f"{len(spec.layers)} layers of width {spec.hidden_size:,}"
    trained = "" if spec.trained_numel == spec.numel else f", {metric(spec.trained_numel)} of them trained"
    return f"{spec.name}, {metric(spec.numel)} parameters{trained}: {layers}, vocabulary {spec.vocab_size:,}{tied}"


def describe_policy(numerics: Numerics, policy: Policy) -> list[str]:
    """Everything that was chosen, by its key in a run's configuration: `weight_slots 2`. What is off is left out, and
    what layers keep and where state lives are phrases."""
    chosen = {field.name: getattr(of, field.name) for of in (numerics, policy) for field in fields(of)}
    for name in ("activations", "activations_by_layer", "placements"):
        chosen.pop(name)
    if not any(placement.uses_drive for placement in policy.placements):
        chosen.pop("disk_staging_slots")
    phrases = []
    for name, value in chosen.items():
        if value is True:
            phrases.append(name)
        elif value:
            size = amount(value) if name.endswith("_nbytes") else f"{value:,}" if isinstance(value, int) else str(value)
            phrases.append(f"{name} {size}")
    return [describe_activations(policy), *phrases, *describe_placements(policy.placements)]


def describe_activations(policy: Policy) -> str:
    if not policy.activations_by_layer:
        whole = "recomputes each layer in the backward pass"
        return "keeps each layer's graph" if policy.activations == "keep" else whole
    counts = Counter(keep for row in policy.activations_by_layer for keep in row)
    words = {"graph": "the graph", "chosen": "products and attention", "attention": "attention", "input": "the input"}
    words |= {"drop": "nothing"}
    shares = []
    for keep, count in counts.most_common():
        where = " on the disk" if keep == "disk" else " in host memory" if keep in NOT_OFFLOADED else ""
        shares.append(f"{words[NOT_OFFLOADED.get(keep, keep)]} of {_share(count, counts.total())}{where}")
    return f"keeps {', '.join(shares)}"


def _share(count: int, total: int) -> str:
    return "each layer" if count == total else f"{count / total:.0%} of the layers"


def describe_placements(placements: Sequence[Placement]) -> list[str]:
    """Where state is if not in host memory: `moments of 4 of 6 units on the disk`."""
    phrases = []
    whole = sum(placement.on_device for placement in placements)
    if whole:
        phrases.append(f"{whole} of {len(placements)} units live on the device")
    kept = sum(placement.weights == "device" and not placement.on_device for placement in placements)
    if kept:
        phrases.append(f"weights of {kept} of {len(placements)} units stay on the device")
    read = sum(placement.weights == "file" for placement in placements)
    if read:
        phrases.append(f"frozen weights of {read} of {len(placements)} units are read from the model's files")
    for field, words in (
        ("weights", "weights"),
        ("low_bits", "low bits"),
        ("moments", "moments"),
        ("gradients", "gradients"),
    ):
        count = sum(getattr(placement, field) == "disk" for placement in placements)
        if count:
            phrases.append(f"{words} of {count} of {len(placements)} units on the disk")
    return phrases or ["all state in host memory"]


# The line ----------------------------------------------------------------------------------------------------------


def line_fields(event: Stepped, recent: Sequence[Stepped | Skipped]) -> list[str]:
    """The parts of the line after `event`, the most important first, with loss and speeds averaged over `recent`, which
    ends with it."""
    seconds = sum(one.seconds for one in recent)
    steps = [one for one in recent if isinstance(one, Stepped)]
    product_seconds = sum(one.flops / one.peak_flops for one in steps)
    stalled = sum(one.data_seconds + one.stall_seconds for one in steps)
    left = event.elapsed_seconds / (event.step - event.resumed_at) * (event.steps - event.step)
    width = len(f"{event.steps:,}")
    shows_epoch = event.epoch is not None and (event.epochs is None or event.epochs >= 1)
    return [
        f"step {event.step:>{width},}/{event.steps:,}",
        *([f"epoch {describe_epoch(event.epoch, event.epochs)}"] if shows_epoch and event.epoch is not None else []),
        f"loss {mean_loss(recent):.3f}",
        f"{clock(left)} left",
        f"{metric(sum(one.tokens for one in steps) / seconds):>5} tok/s",
        f"MFU {product_seconds / seconds:3.0%}",
        f"grad {event.grad_norm:.2f}",
        f"stall {stalled / seconds:3.0%}",
        *([f"slowest rank {event.slowest[0]} {event.slowest[1]:.2f}x"] if event.slowest else []),
        *(f"{tier} {amount(nbytes)}" for tier, nbytes in event.nbytes.items() if nbytes),
    ]


def describe_epoch(epoch: float, epochs: float | None) -> str:
    """`0.26/3` if the number of epochs is known, else `0.26`."""
    return f"{epoch:.2f}" if epochs is None else f"{epoch:.2f}/{epochs:.3g}"


class ProgressLine:
    def __init__(self, console: Console, log_every: int) -> None:
        self._console, self._log_every = console, log_every
        self._recent: deque[Stepped | Skipped] = deque(maxlen=log_every)
        self._losses: list[float] = []
        self._tokens, self._seconds, self._hinted = 0, 0.0, False
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> ProgressLine:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_line()

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped():
                self._add(event)
                self._losses.append(event.loss)
                self._tokens += event.tokens
                self._show(event)
            case Skipped():
                self._add(event)
                if not event.ends:
                    self._print(f"step {event.step:,} skipped: {event.reason}", "yellow")
            case Evaluated():
                reported = event.metrics or {"perplexity": event.perplexity}
                said = ", ".join([f"validation loss {event.loss:.3f}", *(f"{k} {v:.4g}" for k, v in reported.items())])
                self._print(f"step {event.step:,}  {said}", "green")
                for name, loss in event.by_source.items():
                    perplexity = "" if event.metrics else f", perplexity {perplexity_of(loss):.4g}"
                    self._print(f"step {event.step:,}    {name}: loss {loss:.3f}{perplexity}", "green")
            case Scored():
                said = ", ".join(f"{name} {value:.4g}" for name, value in event.scores.items())
                self._print(f"step {event.step:,}  {said}", "green")
            case StoppedEarly():
                self._print(f"step {event.step:,}  stops early: {event.why}", "yellow")
            case Replanned(_, before, after, changes):
                self._print(f"replanned by measured times: {before:.3g} s to {after:.3g} s a step ({changes})", "dim")
            case Resumed():
                self._print(f"goes on after step {event.step:,}, from {event.checkpoint}", "green")
            case Saved():
                written = max(event.nbytes - event.shared_nbytes, 0)
                speed = f"{amount(round(written / max(event.seconds, 1e-9)))}/s"
                kept = f", {amount(event.shared_nbytes)} of it as before," if event.shared_nbytes else ""
                streamed = f", streamed to rank 0: {event.streamed}" if event.streamed else ""
                said = f"checkpoint of {amount(event.nbytes)}{kept} in {duration(event.seconds)} ({speed}){streamed}"
                self._print(f"step {event.step:,}  {said}", "dim")
            case RolledBack():
                self._print(f"step {event.step:,} left out; goes on after step {event.to:,}", "yellow")
            case Warned():
                self._print(f"step {event.step:,}  {event.what}", "yellow")
            case Sampled():
                text = Text(printable(event.prompt), "dim") + Text(printable(event.text.rstrip()))
                lines = [Text("  | ", "dim") + line for line in text.split("\n")]
                self._print(f"step {event.step:,}  sample", "green")
                self._console.print(Text("\n").join(lines), soft_wrap=True)
            case Ended():
                self._keep_line()
                self._print(self._summary(event), "bold")

    def _keep_line(self) -> None:
        """Leave the current line as it is; what follows is printed below it."""
        if self._live:
            self._live.stop()
            self._live = None

    def _add(self, event: Stepped | Skipped) -> None:
        self._recent.append(event)
        self._seconds += event.seconds

    def _show(self, event: Stepped) -> None:
        if not self._hinted:
            self._print(HINT + RANKS_HINT * (event.slowest is not None), "dim")
            self._hinted = True
        line = "  ".join(line_fields(event, self._recent))
        if self._live:
            text = Text(line)
            text.truncate(self._console.width - 1, overflow="ellipsis")
            self._live.update(text, refresh=True)
        elif event.step == event.resumed_at + 1 or event.step % self._log_every == 0 or event.step == event.steps:
            self._print(line)

    def _summary(self, event: Ended) -> str:
        stopped = event.step < event.steps
        steps = f"stopped after {event.step:,} of {event.steps:,} steps" if stopped else counted(event.steps, "step")
        if not self._losses:
            return f"{steps} in {duration(event.elapsed_seconds)}"
        speed = f"{metric(self._tokens)} tokens at {metric(self._tokens / self._seconds)} a second"
        losses = f"loss from {self._losses[0]:.3f} to {mean(self._losses[-self._log_every :]):.3f}"
        return f"{steps} in {duration(event.elapsed_seconds)}; {speed}; {losses}"

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)


# Numbers and text --------------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """`text` with control characters replaced, which could control a terminal; line breaks and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def warn(console: Console, line: str) -> None:
    """Print a highlighted line, whatever its text contains."""
    console.print(Text(printable(line), "yellow"), soft_wrap=True)
