"""Plots as SVG text: lines, points and marks on linear or logarithmic axes, and nothing else.

A few lines of our own rather than a library: the files are committed, so they have to come out the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

COLOURS = ("#1d4e89", "#d98324", "#2a9d6f", "#c4453b", "#7b5ea7", "#777777")
WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 44, 50


@dataclass(frozen=True)
class Line:
    """Points (x, y) joined in order. `mark` is an x at which a dashed line in the same colour stands."""

    name: str
    points: Sequence[tuple[float, float]]
    mark: float | None = None


@dataclass(frozen=True)
class Axis:
    """What an axis is for, and how it is divided."""

    title: str
    ticks: Sequence[float]
    log: bool = False
    show: Callable[[float], str] = field(default=lambda value: f"{value:,.4g}")

    def share(self, value: float) -> float:
        """Where a value stands, from 0 at the first tick to 1 at the last."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.log:
            return (log10(value) - log10(low)) / (log10(high) - log10(low))
        return (value - low) / (high - low)


def linear(title: str, most: float, show: Callable[[float], str] | None = None) -> Axis:
    """An axis from 0 to a round number that is at least `most`, in four to eight steps."""
    rough = most / 5
    size = 10 ** floor(log10(rough))
    step = next(size * times for times in (1, 2, 2.5, 5, 10) if size * times >= rough)
    ticks = [step * place for place in range(ceil(most / step - 1e-9) + 1)]
    return Axis(title, ticks) if show is None else Axis(title, ticks, show=show)


def plot(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """The whole file."""

    def across(value: float) -> float:
        return LEFT + x.share(value) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - y.share(value) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in x.ticks:
        parts.append(_stroke(across(tick), TOP, across(tick), HEIGHT - BOTTOM, "#e3e6ea"))
        parts.append(_text(across(tick), HEIGHT - BOTTOM + 16, x.show(tick), "middle"))
    for tick in y.ticks:
        parts.append(_stroke(LEFT, up(tick), WIDTH - RIGHT, up(tick), "#e3e6ea"))
        parts.append(_text(LEFT - 6, up(tick) + 4, y.show(tick), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x.title, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(y.title)}</text>'
    )
    legend = LEFT
    for place, line in enumerate(lines):
        colour = COLOURS[place % len(COLOURS)]
        spots = [(across(horizontal), up(vertical)) for horizontal, vertical in line.points]
        joined = " ".join(f"{left:.1f},{top:.1f}" for left, top in spots)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{colour}"/>' for left, top in spots]
        if line.mark is not None:
            parts.append(_stroke(across(line.mark), TOP, across(line.mark), HEIGHT - BOTTOM, colour, dashes="4 3"))
        parts.append(f'<rect x="{legend}" y="29" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(legend + 14, 38, line.name, "start"))
        legend += 34 + 7 * len(line.name)
    return "\n".join([*parts, "</svg>", ""])


def _text(left: float, top: float, words: str, anchor: str) -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'
