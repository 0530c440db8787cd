"""Charts over training steps, drawn by plotly from data that the page holds.

A curve with more points than a screen has columns is thinned to the smallest and the largest value of each column, so
that a spike of one step in a million is still seen. Values that are not finite are gaps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.html.elements import CURVE_COLOURS

COLUMNS = 800
"""Columns of a screen: a curve with more points is thinned to two for each."""
LOGARITHMIC_FROM = 50.0
"""Ratio of the largest to the median value above which positive values get a logarithmic axis."""
SYMBOLS = ("triangle-up", "diamond", "x", "square", "star", "circle")
"""Plotly symbols for kinds of events."""
MOST_EVENTS = 200


@dataclass(frozen=True)
class Curve:
    """A curve. xs: ascending. colour: index into `CURVE_COLOURS`. faint: drawn behind. points: mark each point.

    Faint points are dots that no line connects.
    """

    name: str
    xs: Sequence[float] | NDArray[np.float64]
    ys: Sequence[float] | NDArray[np.float64]
    colour: int = 0
    faint: bool = False
    points: bool = False


def marked(name: str, points: Sequence[tuple[float, float]], colour: int) -> Curve:
    """A curve through (step, value) points, sorted by step, with each point marked."""
    ordered = np.array(sorted(points), np.float64)
    return Curve(name, ordered[:, 0], ordered[:, 1], colour, points=True)


@dataclass(frozen=True, slots=True)
class ChartEvent:
    """An event at a step, with its kind."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Axes:
    """What a chart's axes say. unit: written after values. floor: where the y axis starts, e.g. 0."""

    x_name: str = "step"
    unit: str = ""
    floor: float | None = None


STEPS = Axes()


def smoothed(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """Moving average over `window` values, fewer at both ends; values that are not finite are ignored."""
    ys = np.asarray(values, np.float64)
    finite = np.isfinite(ys)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, ys, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    middle = np.arange(ys.size)
    begin, end = np.maximum(middle - window // 2, 0), np.minimum(middle + window // 2 + 1, ys.size)
    number = counts[end] - counts[begin]
    means: NDArray[np.float64] = np.divide(
        sums[end] - sums[begin], number, out=np.full(ys.size, np.nan), where=number > 0
    )
    return means


def chart(
    charts: dict[str, Any],
    identity: str,
    title: str,
    curves: Sequence[Curve],
    events: Sequence[ChartEvent] = (),
    axes: Axes = STEPS,
) -> str:
    """HTML for a chart; its data for the script `CHARTS` is added to `charts`."""
    points = [_thinned(curve) for curve in curves]
    if not any(xs.size for xs, _ in points):
        return f"<figure><h3>{escape(title)}</h3><p>no data</p></figure>"
    logarithmic = axes.floor is None and _spans_decades(np.concatenate([ys for _, ys in points]))
    charts[identity] = _figure(curves, points, events, axes, logarithmic)
    words = f"{title} (logarithmic)" if logarithmic else title
    place = f'<div class="chart" id="chart-{escape(identity)}" role="img" aria-label="{escape(title)}"></div>'
    return f"<figure><h3>{escape(words)}</h3>{place}</figure>"


Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps, and the values there."""


def _thinned(curve: Curve) -> Points:
    """At most two points per column: its smallest and its largest value. None if no value is finite."""
    xs, ys = np.asarray(curve.xs, np.float64), np.asarray(curve.ys, np.float64)
    finite = np.isfinite(ys)
    if not finite.any():
        return xs[:0], ys[:0]
    if xs.size <= COLUMNS:
        kept = finite if curve.points else np.ones(ys.size, bool)
        return xs[kept], np.where(finite, ys, np.nan)[kept]
    xs, ys = xs[finite], ys[finite]
    column = ((xs - xs[0]) / max(xs[-1] - xs[0], 1.0) * (COLUMNS - 1)).astype(np.int64)
    by_value = np.lexsort((ys, column))
    ends = np.flatnonzero(np.diff(column[by_value], append=-1))
    starts = np.append(0, ends[:-1] + 1)
    kept = np.unique(np.concatenate([by_value[starts], by_value[ends]]))
    return xs[kept], ys[kept]


def _spans_decades(values: NDArray[np.float64]) -> bool:
    finite = values[np.isfinite(values)]
    return bool(finite.size and finite.min() > 0 and finite.max() / np.median(finite) > LOGARITHMIC_FROM)


def _figure(
    curves: Sequence[Curve],
    points: Sequence[Points],
    events: Sequence[ChartEvent],
    axes: Axes,
    logarithmic: bool,
) -> dict[str, Any]:
    """A plotly figure as plain dicts, which are ten times as fast as plotly's classes."""
    unit, x_name = _text(axes.unit), _text(axes.x_name)
    traces = [_line(curve, xs, ys, x_name, unit) for curve, (xs, ys) in zip(curves, points, strict=True)]
    traces += _marks(events)
    steps = np.concatenate([xs for xs, _ in points])
    few = steps.max() - steps.min() < 6
    large = float(np.nanmax(np.abs(np.concatenate([ys for _, ys in points])))) >= 1e4
    layout = {
        "margin": {"l": 54, "r": 8, "t": 8, "b": 34},
        "hovermode": "x unified",
        "hoverlabel": {"namelength": -1},
        "legend": {"orientation": "h", "y": -0.18, "x": 0, "maxheight": 0.9},
        "xaxis": {
            "title": {"text": x_name if x_name == "step" else f"{x_name}s", "standoff": 4},
            "tickformat": ",d" if steps.max() < 1e5 else "~s",
            "tickangle": 0,
            **({"dtick": 1} if few else {"nticks": 7}),
            "unifiedhovertitle": {"text": " "},  # each line names its own step, as points differ in them
            "zeroline": False,
        },
        "yaxis": {
            "type": "log" if logarithmic else "linear",
            "rangemode": "normal" if axes.floor is None else "tozero",
            "exponentformat": "SI" if unit == "B" or large else "e",
            "separatethousands": True,
            "ticksuffix": unit,
            "zeroline": False,
            "nticks": 6,
        },
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "shapes": [
            {"type": "line", "yref": "paper", "x0": each.x, "x1": each.x, "y0": 0, "y1": 1}
            | {"line": {"width": 1, "dash": "dot", "color": "#8a8f96"}}
            for each in events[:MOST_EVENTS]
        ],
    }
    return {"data": traces, "layout": layout}


def _line(curve: Curve, xs: NDArray[np.float64], ys: NDArray[np.float64], x_name: str, unit: str) -> dict[str, Any]:
    colour = CURVE_COLOURS[curve.colour % len(CURVE_COLOURS)]
    marked = curve.points or xs.size == 1
    return {
        "type": "scatter",
        "x": _short(xs, 15),
        "y": _short(ys, 6),
        "hovertemplate": f"{_text(curve.name)}, {x_name} %{{x:,}}: %{{y:.5~g}}{unit}<extra></extra>",
        "name": _text(curve.name),
        "mode": "markers" if marked and curve.faint else "lines+markers" if marked else "lines",
        "line": {"color": colour, "width": 1 if curve.faint else 2},
        "opacity": 0.4 if curve.faint and not marked else 1.0,
        "marker": {"size": 4 if curve.faint else 7, "color": colour},
        "connectgaps": curve.points,
    }


def _marks(events: Sequence[ChartEvent]) -> list[dict[str, Any]]:
    """A symbol for each kind of event: on the axis, or above those of the same step."""
    placed: dict[str, list[tuple[float, float, str]]] = {}
    at_step: Counter[float] = Counter()
    for each in events[:MOST_EVENTS]:
        placed.setdefault(each.kind, []).append((each.x, 0.03 + 0.07 * at_step[each.x], _text(each.text)))
        at_step[each.x] += 1
    return [
        {
            "type": "scatter",
            "x": [x for x, _, _ in placed[kind]],
            "y": [y for _, y, _ in placed[kind]],
            "yaxis": "y2",
            "text": [text for _, _, text in placed[kind]],
            "hovertemplate": "%{text}<extra></extra>",
            "name": _text(kind),
            "mode": "markers",
            "marker": {"symbol": SYMBOLS[at % len(SYMBOLS)], "size": 10, "color": "#8a8f96"},
        }
        for at, kind in enumerate(placed)
    ]


def _short(values: NDArray[np.float64], digits: int) -> list[float | None]:
    """Values rounded for the screen, to keep the page small."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


def _text(words: str) -> str:
    """Escape text for plotly, which interprets some HTML and `%{...}`."""
    return escape(words, quote=False).replace("%{", "%&#123;")


def chart_scripts() -> list[str]:
    """The plotly library (4.8 MB), and the script that draws the page's charts."""
    from plotly.offline import get_plotlyjs

    return [get_plotlyjs(), CHARTS]


CHARTS = """
"use strict";
(() => {
  const { charts } = JSON.parse(document.getElementById("page").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = "12px sans-serif";
  // Rows that the legend takes, for which a chart is made higher: names in one row if they fit, else in columns.
  const legendRows = (data, width) => {
    const widths = data.filter(each => each.showlegend !== false).map(each => 48 + pen.measureText(each.name).width);
    if (widths.length < 2) return 0;
    if (widths.reduce((sum, each) => sum + each) <= width) return 1;
    return Math.ceil(widths.length / Math.max(1, Math.floor(width / Math.max(...widths))));
  };
  const draw = () => {
    const style = getComputedStyle(document.documentElement), take = name => style.getPropertyValue(name).trim();
    const ink = take("--ink"), line = take("--line"), paper = take("--paper");
    for (const [identity, { data, layout }] of Object.entries(charts)) {
      Object.assign(layout, { paper_bgcolor: paper, plot_bgcolor: paper, font: { color: ink, size: 12 } });
      Object.assign(layout.hoverlabel, { bgcolor: paper, bordercolor: line, font: { color: ink } });
      for (const axis of [layout.xaxis, layout.yaxis]) Object.assign(axis, { gridcolor: line, linecolor: line });
      const place = document.getElementById("chart-" + identity);
      layout.height = 276 + 19 * legendRows(data, place.clientWidth - 62);
      Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
    }
  };
  dark.addEventListener("change", draw);
  window.addEventListener("resize", draw);
  draw();
})();
"""
"""Script that draws the page's `charts` in its light or dark colours."""
