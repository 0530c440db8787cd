"""`megatrain report`: write a run as one self-contained HTML page; a run also does so at its end.

Shows training and validation loss, learning rate, gradient norm, speed, what compute waited for, memory use against the
plan, samples, checkpoints, events and the configuration. Reads only the run folder (`history`), so it works for running
and killed runs. Charts are drawn in `html`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.errors import ExportError
from megatrain.formatting import amount, counted, counted_epochs, duration
from megatrain.html import (
    Axes,
    ChartEvent,
    Curve,
    bar,
    chart,
    chart_scripts,
    definitions,
    document,
    marked,
    section,
    smoothed,
    table,
)
from megatrain.run.history import TRACE, HeldOut, History, Note, read_history
from megatrain.system.paths import written_or_refused

REPORT = "report.html"
SILENT_SECONDS = 30.0
"""Seconds without a heartbeat after which a run is probably dead, though its status says that it runs."""
MOST_ROWS = 200
"""Of a table or list; what lies between the first and the last of them is counted."""
MOST_PROMPT = 60
"""Characters of a prompt in the heading of its sample."""
DATA = "page"


def write_report(folder: Path, target: Path | None = None) -> Path:
    """Write the page of the run in `folder` to `target`, by default into the folder, atomically; returns its path.

    Raises `ConfigError` for a folder without a run, `ExportError` if the page cannot be written.
    """
    page, path = render_report(read_history(folder), time.time()), target or folder / REPORT
    with written_or_refused(path, ExportError, "free some space, or choose another --html") as draft:
        draft.write_text(page, encoding="utf-8")
    return path


def render_report(run: History, now: float) -> str:
    """The HTML page. now: current time, in seconds since 1970."""
    charts: dict[str, Any] = {}
    model = str(run.planned.get("model") or "")
    title = f"{model or 'Run'}: {run.folder.resolve().name}"
    parts = [
        definitions(_summary(run, now)),
        section("Loss", _loss(run, charts)),
        section("Course", _course(run, charts)),
        section("Memory", _memory(run, charts)),
        section("A step", _step(run)),
        section("Samples", _samples(run)),
        section("Checkpoints", _checkpoints(run)),
        section("Events", _notes(run.notes)),
        section("Plan", definitions([(str(name), str(fact)) for name, fact in run.planned.get("facts", {}).items()])),
        section("Configuration", f"<details><summary>config.yaml</summary><pre>{escape(run.config)}</pre></details>"),
        "<p>Made by <code>megatrain report</code> from the run folder; units are decimal.</p>",
    ]
    return document(title, parts, DATA, {"charts": charts}, chart_scripts() if charts else [])


# Parts -------------------------------------------------------------------------------------------------------------


def _summary(run: History, now: float) -> list[tuple[str, str]]:
    columns, rows = run.columns, []
    rows.append(("state", _state(run, now)))
    rows.append(("steps", f"{run.done:,} of {run.steps:,}{_epochs(run)}"))
    tokens, seconds = run.total("tokens"), run.total("seconds")
    if seconds:
        rows.append(("time in steps", duration(seconds)))
        rows.append(("tokens", f"{tokens:,.0f}, {tokens / seconds:,.0f} per second"))
        mfu = float(np.nansum(np.asarray(columns["mfu"]) * np.asarray(columns["seconds"]))) / seconds
        waits = (run.total("data_seconds") + run.total("stall_seconds")) / seconds
        rows.append(("MFU", f"{mfu:.0%} of the measured peak; compute waited {waits:.1%} of the time"))
        if last := run.last_losses():
            mean = f"{sum(last) / len(last):.4f} over the last {counted(len(last), 'step')}"
            rows.append(("loss", f"{columns['loss'][0]:.4f} at first, {mean}"))
    if run.evaluated:
        rows.append(("validation", _held_out(run.evaluated[-1])))
        if run.best is not None and run.best.step != run.evaluated[-1].step:
            rows.append(("best validation", _held_out(run.best)))
    if run.planned.get("seconds") and seconds:
        foreseen, steps = float(run.planned["seconds"]), len(columns["seconds"])
        middle = float(np.nanmedian(np.asarray(columns["seconds"])))
        rows.append(("a step", f"{duration(middle)} (median of {steps:,}); planned {duration(foreseen)}"))
    return rows


def _state(run: History, now: float) -> str:
    state = str(run.status.get("state") or "unknown: there is no status.json")
    beat = run.status.get("heartbeat")
    if state in ("running", "starting", "stopping") and isinstance(beat, int | float):
        age = now - beat
        silent = age > SILENT_SECONDS
        state += f"; but it has not reported for {duration(age)}, so it was probably killed" if silent else ""
    if run.status.get("error"):
        state += f": {run.status['error']}"
    stalled = run.status.get("stalled")
    return f"{state}; {'; '.join(map(str, stalled))}" if isinstance(stalled, list) and stalled else state


def _loss(run: History, charts: dict[str, Any]) -> str:
    title = "training and validation loss" if run.evaluated else "training loss"
    html = chart(charts, "loss", title, _loss_curves(run), _events(run))
    html += _by_name(
        charts, "sources", "loss of each validation source", [(h.step, h.by_source) for h in run.evaluated]
    )
    html += _by_name(charts, "scores", "metrics", run.scored)
    if not run.evaluated:
        return html
    shown = 3 if any(each.perplexity_text for each in run.evaluated) else 2
    rows = [(f"{each.step:,}", f"{each.loss:.4f}", each.perplexity_text)[:shown] for each in run.evaluated]
    listed = table(("step", "validation loss", "perplexity")[:shown], _some(rows))
    return f"{html}<details><summary>validation by step</summary>{listed}</details>"


def _by_name(charts: dict[str, Any], key: str, title: str, measured: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """A chart with a curve for each named measurement, and a table of the last values."""
    names = dict.fromkeys(name for _, numbers in measured for name in numbers)
    if not names:
        return ""
    in_order = sorted(measured, key=lambda each: each[0])  # of the best state they are told last
    points = {name: [(float(step), found[name]) for step, found in in_order if name in found] for name in names}
    curves = [marked(name, points[name], at) for at, name in enumerate(names)]
    rows = [(name, f"{at:,.0f}", f"{value:.4g}") for name in names for at, value in points[name][-1:]]
    return chart(charts, key, title, curves) + table((title, "step", "last"), rows)


def _course(run: History, charts: dict[str, Any]) -> str:
    steps, columns, events = run.columns["step"], run.columns, _events(run)
    rates = columns["tokens_per_second"]
    parts = [
        chart(charts, "lr", "learning rate", [Curve("learning rate", steps, columns["lr"])], axes=Axes(floor=0.0)),
        chart(
            charts,
            "norm",
            "gradient norm",
            _with_smoothed("before clipping", steps, columns["grad_norm"], 3),
            events,
        ),
        chart(
            charts,
            "speed",
            "tokens per second",
            _with_smoothed("tokens/s", steps, rates, 2),
            events,
            axes=Axes(floor=0.0),
        ),
        chart(
            charts,
            "stalls",
            "share of a step in which compute waited",
            [
                Curve("for copies or updates", steps, np.asarray(run.share("stall_seconds")) * 100, 1),
                Curve("for data", steps, np.asarray(run.share("data_seconds")) * 100, 4),
            ],
            axes=Axes(unit="%", floor=0.0),
        ),
    ]
    return f'<div class="charts">{"".join(parts)}</div>'


def _memory(run: History, charts: dict[str, Any]) -> str:
    curves = [
        Curve(tier, run.columns["step"], column, colour)
        for colour, (tier, column) in enumerate(sorted(run.tiers.items()))
    ]
    title = "bytes held after each step" + (f": {curves[0].name}" if len(curves) == 1 else "")
    parts = [chart(charts, "memory", title, curves, axes=Axes(unit="B", floor=0.0))] if curves else []
    foreseen, held = _by_tier(run.planned.get("nbytes")), _by_tier(run.planned.get("held_nbytes"))
    for tier in dict.fromkeys((*foreseen, *held)):
        planned, at_start = foreseen.get(tier, {}), held.get(tier, {})
        peak = max((value for value in run.tiers.get(tier, ()) if math.isfinite(value)), default=0.0)
        whole = max(sum(planned.values()), sum(at_start.values()), 1.0)
        for words, uses in (("planned peak", planned), ("held at the start", at_start)):
            if uses:
                rows = [(f"{use}: {amount(nbytes)}", nbytes) for use, nbytes in uses.items() if nbytes]
                parts.append(bar(f"{tier}, {words}: {amount(sum(uses.values()))}", rows, whole))
        if peak:
            parts.append(f"<p>{escape(tier)}: at most {escape(amount(peak))} held after a step.</p>")
    return "".join(parts) or "<p>no data</p>"


def _step(run: History) -> str:
    if run.trace is None:
        return "<p>no step was traced</p>"
    shares = {name: seconds / run.trace.seconds for name, seconds in run.trace.waits.items()}
    said = [f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.001]
    causes = f"Compute waited for: {', '.join(said)}." if said else "Compute waited for nothing."
    where = f"{TRACE} in the run folder has its ops, for Perfetto or chrome tracing"
    return f"<p>{escape(causes)} The step took {duration(run.trace.seconds)}; {where}.</p>"


def _samples(run: History) -> str:
    if not run.samples:
        return "<p>none</p>"
    parts = []
    for at, sample in enumerate(reversed(run.samples[-MOST_ROWS:])):
        text = f"<i>{escape(sample['prompt'])}</i>{escape(sample['text'])}"
        about = " ".join(sample["prompt"].split())
        about = f"{about[:MOST_PROMPT]}…" if len(about) > MOST_PROMPT else about  # scripts without spaces, too
        head = f"after step {sample['step']:,}{': ' if about else ''}{escape(about)}"
        parts.append(f"<details{' open' if at == 0 else ''}><summary>{head}</summary><pre>{text}</pre></details>")
    return "".join(parts)


def _checkpoints(run: History) -> str:
    if not run.saved:
        return "<p>none</p>"
    rows = []
    for saved in run.saved:
        nbytes, seconds = _float(saved, "nbytes"), _float(saved, "seconds")
        written = nbytes - _float(saved, "shared_nbytes")
        rate = f"{amount(written / seconds)}/s" if seconds else ""
        step, path = int(_float(saved, "step")), str(saved.get("checkpoint", ""))
        kept = "kept" if Path(path).is_dir() else "removed"
        rows.append((f"{step:,}", amount(nbytes), amount(written), duration(seconds), rate, kept, path))
    return table(("step", "bytes", "written", "time", "speed", "state", "folder"), _some(rows))


def _notes(notes: Sequence[Note]) -> str:
    if not notes:
        return "<p>none</p>"
    return table(("step", "event", "details"), _some([(f"{note.step:,}", note.kind, note.text) for note in notes]))


def _epochs(run: History) -> str:
    done = run.columns["epoch"][-1] if run.columns["epoch"] else math.nan
    if not math.isfinite(done):
        return ""
    return f" = {counted_epochs(done)}" if math.isnan(run.epochs) else f" = {done:.3g} of {counted_epochs(run.epochs)}"


# Inside ------------------------------------------------------------------------------------------------------------


def _loss_curves(run: History) -> list[Curve]:
    """Curves of the loss: each step's, smoothed, validation, and of steps undone by a rollback."""
    curves = _with_smoothed("training", run.columns["step"], run.columns["loss"], 0)
    if run.evaluated:
        held = [(float(each.step), each.loss) for each in run.evaluated]
        curves.append(marked("validation", held, 1))
    if run.undone:
        curves.append(replace(marked("undone by a rollback", run.undone, 3), faint=True))
    return curves


def _with_smoothed(name: str, steps: Sequence[float], values: Sequence[float], colour: int) -> list[Curve]:
    """A curve; with more than 20 steps also its moving average over a fiftieth of them, an odd number, at
    least 5."""
    if len(values) <= 20:
        return [Curve(name, steps, values, colour)]
    window = max(5, len(values) // 50 | 1)
    mean = Curve(f"{name}, mean of {window:,} steps", steps, smoothed(values, window), colour)
    return [Curve(name, steps, values, colour, faint=True), mean]


def _events(run: History) -> list[ChartEvent]:
    kinds = ("resumed", "rolled back", "replanned", "skipped", "stopped early", "warning")
    return [
        ChartEvent(note.step, note.kind, f"step {note.step:,}: {note.kind}, {note.text}")
        for note in run.notes
        if note.kind in kinds
    ]


def _some(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first and last rows of a long table, with a row that counts those in between."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    half = MOST_ROWS // 2
    between = (f"{len(rows) - 2 * half:,} more", *("" for _ in rows[0][1:]))
    return [*rows[:half], between, *rows[-half:]]


def _by_tier(told: Any) -> dict[str, dict[str, float]]:
    """Tier -> use -> bytes, from untrusted JSON."""
    if not isinstance(told, Mapping):
        return {}
    return {
        str(tier): {str(use): float(nbytes) for use, nbytes in uses.items() if isinstance(nbytes, int | float)}
        for tier, uses in told.items()
        if isinstance(uses, Mapping)
    }


def _float(told: Mapping[str, Any], name: str) -> float:
    value = told.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _held_out(held: HeldOut) -> str:
    perplexity = f", perplexity {held.perplexity_text}" if held.perplexity_text else ""
    return f"loss {held.loss:.4f}{perplexity} at step {held.step:,}"
