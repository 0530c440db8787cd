"""`megatrain report RUN...`: the page of one run, or several compared, with shared charts and the keys that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.errors import ConfigError
from megatrain.formatting import duration
from megatrain.html import Axes, Curve, chart, chart_scripts, document, marked, section, smoothed, table
from megatrain.run.history import History, config_of, read_history
from megatrain.run.report import DATA, smoothing_window, write_page, write_report
from megatrain.system.paths import usable_path

COMPARISON = "comparison.html"
MOST_RUNS = 6
"""One run per line colour."""


def run_report(folders: Sequence[str], html: str | None) -> Path:
    """Write the page of the runs in `folders` to `html`, by default into the first folder; returns its path.

    Raises `ConfigError` for a folder without a run, `ExportError` if the page cannot be written.
    """
    target = None if html is None else usable_path(html, where="--html", to_write="file")
    runs = [usable_path(folder, where="RUN") for folder in folders]
    return write_report(runs[0], target) if len(runs) == 1 else write_comparison(runs, target)


def write_comparison(folders: Sequence[Path], target: Path | None = None) -> Path:
    """Write the page of the runs in `folders` to `target`, by default into the first folder; returns its path.

    Raises `ConfigError` for a folder without a run, a folder named twice, and more than six runs; `ExportError` if the
    page cannot be written.
    """
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs are too many; give at most {MOST_RUNS}", where="RUN")
    same = [folder for folder in folders if sum(folder.resolve() == other.resolve() for other in folders) > 1]
    if same:
        raise ConfigError("is named twice", where=str(same[0]), fix="name each run once")
    return write_page(
        render_comparison([read_history(folder) for folder in folders]), target or folders[0] / COMPARISON
    )


def render_comparison(runs: Sequence[History]) -> str:
    """The page. Each run has one colour in all charts."""
    names = short_names([run.folder.resolve() for run in runs])
    charts: dict[str, Any] = {}
    pairs = list(zip(names, runs, strict=True))

    def of_all(values: Callable[[History], Sequence[float]], xs: Callable[[History], Sequence[float]]) -> list[Curve]:
        return [
            Curve(name, xs(run), smoothed(values(run), smoothing_window(len(values(run)))), colour)
            for colour, (name, run) in enumerate(pairs)
        ]

    def steps(run: History) -> Sequence[float]:
        return run.columns["step"]

    def tokens(run: History) -> Sequence[float]:
        return list(np.nancumsum(np.asarray(run.columns["tokens"])))

    held = [
        marked(name, [(each.step, each.loss) for each in run.evaluated], colour)
        for colour, (name, run) in enumerate(pairs)
        if run.evaluated
    ]
    losses = [chart(charts, "loss", "training loss, smoothed", of_all(lambda run: run.columns["loss"], steps))]
    if held:
        losses.append(chart(charts, "held", "validation loss", held))
    losses.append(
        chart(
            charts,
            "tokens",
            "training loss by tokens trained, smoothed",
            of_all(lambda run: run.columns["loss"], tokens),
            axes=Axes(x_name="token"),
        )
    )
    rates = of_all(lambda run: run.columns["tokens_per_second"], steps)
    norms = of_all(lambda run: run.columns["grad_norm"], steps)
    speeds = [
        chart(charts, "speed", "tokens per second, smoothed", rates, axes=Axes(floor=0.0)),
        chart(charts, "norm", "gradient norm before clipping, smoothed", norms),
    ]
    parts = [
        table(
            ("run", "state", "steps", "tokens", "loss at the end", "best validation loss", "tokens/s", "time"),
            _rows(pairs),
        ),
        section("Loss", f'<div class="charts">{"".join(losses)}</div>'),
        section("Course", f'<div class="charts">{"".join(speeds)}</div>'),
        section("Differences in their configurations", _differences(names, runs)),
    ]
    title = f"{len(runs)} runs compared"
    return document(title, parts, DATA, {"charts": charts}, chart_scripts() if charts else [])


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that differ from each other."""
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return ["/".join(folder.parts[-depth:]) for folder in folders]


def _rows(pairs: Sequence[tuple[str, History]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, run in pairs:
        tokens, seconds, last, best = run.total("tokens"), run.total("seconds"), run.last_losses(), run.best
        rows.append(
            (
                name,
                str(run.status.get("state") or "unknown"),
                f"{run.done:,} of {run.steps:,}",
                f"{tokens:,.0f}",
                f"{sum(last) / len(last):.4f}" if last else "",
                f"{best.loss:.4f} at step {best.step:,}" if best else "",
                f"{tokens / seconds:,.0f}" if seconds else "",
                duration(seconds) if seconds else "",
            )
        )
    return rows


def _differences(names: Sequence[str], runs: Sequence[History]) -> str:
    """An HTML table with a row for each key that differs between runs."""
    flat = [_flat(config_of(run.folder)) for run in runs]
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if len({e.get(key) for e in flat}) > 1]
    if not keys:
        return "<p>nothing</p>"
    return table(("key", *names), [(key, *(each.get(key, "") for each in flat)) for key in keys])


def _flat(value: Any, within: str = "") -> dict[str, str]:
    """Dotted key -> value, as text."""
    if not isinstance(value, Mapping):
        return {within: str(value)} if within else {}
    found: dict[str, str] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{within}.{key}" if within else str(key))
    return found
