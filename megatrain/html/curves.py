"""Curves over steps as drawings in a page, with the values under the pointer told below them.

However many points a curve has, it is drawn in as many columns as a screen has; each keeps the smallest, the largest
and the mean of its points, so that a spike of one step in a million is still seen. Values that are not finite are left
out. It leaves out what is worth drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT, LEFT, TOP, FOOT = 860, 240, 62, 8, 22
"""Of a drawing and its margins, in units of its own; it is scaled to the page."""
COLUMNS = WIDTH - LEFT
LOGARITHMIC_FROM = 50.0
"""Ratio of the largest to the median value from which a curve of positive values is drawn on a logarithmic scale."""


@dataclass(frozen=True)
class Curve:
    """One line; `colour` is 0 to 4. As `dots` each point stands for itself; they are few."""

    name: str
    xs: Sequence[float] | NDArray[np.float64]
    ys: Sequence[float] | NDArray[np.float64]
    colour: int = 0
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Marker:
    """Something that happened at a step."""

    x: float
    text: str


@dataclass(frozen=True)
class _Columns:
    """A curve in columns: where, and the mean, least and largest value of each."""

    xs: NDArray[np.float64]
    means: NDArray[np.float64]
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]


def figure(
    figures: dict[str, Any],
    identity: str,
    title: str,
    curves: Sequence[Curve],
    markers: Sequence[Marker] = (),
    *,
    unit: str = "",
    floor: float | None = None,
) -> str:
    """The drawing; what `CURVES` needs of it goes to `figures`, of the page's data, under its `identity`.

    unit: is written behind values. floor: a value that the scale shows whatever the curves hold, 0 say.
    """
    thin = [_thinned(curve) for curve in curves]
    values = np.concatenate([*(each.lows for each in thin), *(each.highs for each in thin), np.empty(0)])
    every = np.concatenate([*(each.xs for each in thin), np.empty(0)])
    if not every.size:
        return f"<figure><h3>{escape(title)}</h3><p>nothing was told</p></figure>"
    middle = float(np.median(np.concatenate([each.means for each in thin])))
    scale = _Scale(float(values.min()), float(values.max()), middle, floor)
    left, right = float(every.min()), float(every.max())
    right = right if right > left else left + 1.0
    body = [*_grid(scale, left, right, unit)]
    shown = [marker for marker in markers if left <= marker.x <= right]
    body += [_marker(marker, _x(marker.x, left, right)) for marker in shown[:200]]
    body += [_path(curve, each, scale, left, right) for curve, each in zip(curves, thin, strict=True)]
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" data-curves="{escape(identity)}">'
        f'{"".join(body)}<line class="at" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - FOOT}" visibility="hidden"/></svg>'
    )
    words = "".join(
        f'<li><i style="background:var(--c{curve.colour})"></i>{escape(curve.name)}</li>' for curve in curves
    )
    logarithmic = " (logarithmic)" if scale.logarithmic else ""
    html = (
        f"<figure><h3>{escape(title)}{logarithmic}</h3>{drawing}"
        f'<ul class="legend">{words}</ul><figcaption aria-live="polite">&nbsp;</figcaption></figure>'
    )
    figures[identity] = {
        "left": left,
        "right": right,
        "unit": unit,
        "curves": [
            {"name": curve.name, **{key: _short(getattr(each, key)) for key in ("xs", "means", "lows", "highs")}}
            for curve, each in zip(curves, thin, strict=True)
        ],
    }
    return html


def _thinned(curve: Curve) -> _Columns:
    """A column for each point where there are few, else for each part of the drawing. xs must not fall."""
    xs, ys = np.asarray(curve.xs, np.float64), np.asarray(curve.ys, np.float64)
    finite = np.isfinite(ys)
    xs, ys = xs[finite], ys[finite]
    if xs.size <= COLUMNS or curve.dots:
        return _Columns(xs, ys, ys, ys)
    column = ((xs - xs[0]) / max(xs[-1] - xs[0], 1.0) * (COLUMNS - 1)).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    counts = np.diff(starts, append=xs.size)
    means = np.add.reduceat(ys, starts) / counts
    middle = xs[starts + counts // 2]
    return _Columns(middle, means, np.minimum.reduceat(ys, starts), np.maximum.reduceat(ys, starts))


class _Scale:
    """From values to heights."""

    def __init__(self, low: float, high: float, middle: float, floor: float | None) -> None:
        self.logarithmic = floor is None and low > 0 and high / middle > LOGARITHMIC_FROM
        if floor is not None:
            low, high = min(low, floor), max(high, floor)
        if high <= low:
            low, high = low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
        self.low, self.high = low, high

    def y(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, values = math.log(low), math.log(high), np.log(values)
        share = (values - low) / (high - low)
        found: NDArray[np.float64] = TOP + (1 - share) * (HEIGHT - TOP - FOOT)
        return found

    def ticks(self) -> list[float]:
        """Round values, some five."""
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = max(1, len(powers) // 6)
            found = [10.0**power for power in powers if power % every == 0]
        else:
            rough = (self.high - self.low) / 5
            size = 10.0 ** math.floor(math.log10(rough))
            size *= next(each for each in (1, 2, 5, 10) if each * size >= rough)
            found = [number * size for number in range(math.ceil(self.low / size), math.floor(self.high / size) + 1)]
        return [each for each in found if self.low <= each <= self.high]


def _x(value: float, left: float, right: float) -> float:
    return LEFT + (value - left) / (right - left) * COLUMNS


def _grid(scale: _Scale, left: float, right: float, unit: str) -> list[str]:
    found = []
    for tick in scale.ticks():
        height = float(scale.y(np.array([tick]))[0])
        found.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>')
        text = f"{_number(tick)}{unit}"
        found.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for mark in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[mark]
        step = f"{left + (right - left) * mark / 4:,.0f}"
        found.append(f'<text x="{LEFT + COLUMNS * mark / 4:.0f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step}</text>')
    return found


def _marker(marker: Marker, x: float) -> str:
    line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - FOOT}"/>'
    return f"<g><title>{escape(marker.text)}</title>{line}</g>"


def _path(curve: Curve, each: _Columns, scale: _Scale, left: float, right: float) -> str:
    xs = LEFT + (each.xs - left) / (right - left) * COLUMNS
    means, colour = scale.y(each.means), f"var(--c{curve.colour})"
    if curve.dots or xs.size == 1:
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in zip(xs, means, strict=True))
        return f'<g style="fill:{colour}">{dots}</g>'
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, means, strict=True))
    mean = f'<path class="mean" style="stroke:{colour}" d="{line}"/>'
    if np.array_equal(each.lows, each.highs):
        return mean
    lows, highs = scale.y(each.lows), scale.y(each.highs)
    band = "".join(f"M{x:.1f} {low:.1f}V{high:.1f}" for x, low, high in zip(xs, lows, highs, strict=True))
    return f'<path class="band" style="stroke:{colour}" d="{band}"/>{mean}'


def _short(values: NDArray[np.float64]) -> list[float]:
    """Six digits do for a pointer."""
    return [float(f"{value:.6g}") for value in values]


def _number(value: float) -> str:
    size = abs(value)
    if size >= 1e4 or 0 < size < 1e-3:
        for power, word in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= power:
                return f"{value / power:g}{word}"
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.6g}"


CURVES = """
"use strict";
(() => {
  for (const svg of document.querySelectorAll("svg[data-curves]")) {
    const data = JSON.parse(document.getElementById("page").textContent).figures[svg.dataset.curves];
    const told = svg.parentNode.querySelector("figcaption"), line = svg.querySelector(".at");
    const LEFT = LEFT_, WIDTH = WIDTH_;
    const short = n => Math.abs(n) >= 1e4 ? n.toLocaleString("en", { maximumSignificantDigits: 4 })
      : String(Number(n.toPrecision(4)));
    // Columns come in the order of steps, so the nearest is found by halving.
    const nearest = (xs, x) => {
      let low = 0, high = xs.length - 1;
      while (low < high) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid + 1; else high = mid; }
      return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
    };
    const show = clientX => {
      const box = svg.getBoundingClientRect(), place = (clientX - box.left) / box.width * WIDTH;
      const share = Math.min(1, Math.max(0, (place - LEFT) / (WIDTH - LEFT)));
      const step = data.left + share * (data.right - data.left), parts = [];
      for (const curve of data.curves) {
        if (!curve.xs.length) continue;
        const at = nearest(curve.xs, step), unit = data.unit;
        const range = curve.lows[at] === curve.highs[at] ? ""
          : " (" + short(curve.lows[at]) + " to " + short(curve.highs[at]) + ")";
        parts.push(curve.name + " " + short(curve.means[at]) + unit + range);
      }
      const x = LEFT + share * (WIDTH - LEFT);
      line.setAttribute("x1", x); line.setAttribute("x2", x); line.setAttribute("visibility", "visible");
      told.textContent = "step " + Math.round(step).toLocaleString("en") + ": " + parts.join(", ");
    };
    svg.addEventListener("pointermove", event => show(event.clientX));
    svg.addEventListener("pointerleave", () => {
      line.setAttribute("visibility", "hidden"); told.textContent = "\\u00a0";
    });
  }
})();
""".replace("LEFT_", str(LEFT)).replace("WIDTH_", str(WIDTH))
"""What tells the values under the pointer; the page's data (element `page`) holds them as `figures`."""
