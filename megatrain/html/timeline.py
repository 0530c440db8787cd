"""Timeline of a step: a zoomable canvas with a lane for each stream, which describes the op under the pointer.

The page's data holds `timeline` (`timeline_content`): `seconds`, `streams` and `units` (names), `kinds` (name and
colour), and `ops`, each [kind, stream, unit, micro-batch, shard, bytes, start, end] as indices and in seconds from the
start of the step; -1 means none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from megatrain.html.elements import OTHER_COLOUR, ink_on

KIND_COLOURS = {
    "FORWARD": "#5ec962",
    "BACKWARD": "#3b528b",
    "LOSS": "#fde725",
    "PLACE": "#440154",
    "FETCH": "#21918c",
    "RELOAD": "#addc30",
    "GATHER": "#472d7b",
    "GRAD": "#f1605d",
    "OFFLOAD": "#721f81",
    "REDUCE": "#feb078",
    "NORM": "#c7c7c7",
    "UPDATE": "#b73779",
    "READ": "#28ae80",
    "WRITE": "#2c728e",
}
"""Colours of op kinds, from viridis and magma: kinds in the same lane differ in brightness."""

DrawnOp = tuple[str, str, int, int, int, int, float, float]
"""Kind, stream, unit, micro-batch, shard, bytes; start and end in seconds from the start of the step."""


def timeline_content(ops: Sequence[DrawnOp], units: Sequence[str], called: Mapping[str, str]) -> dict[str, Any]:
    """The data that `TIMELINE` draws. ops: ordered within each stream, no overlap. called: display names of streams."""
    kinds, streams = (list(dict.fromkeys(str(op[at]) for op in ops)) for at in (0, 1))
    return {
        "seconds": max((op[-1] for op in ops), default=0.0),
        "streams": [called.get(stream, stream) for stream in streams],
        "kinds": [{"name": kind, "colour": colour, "ink": ink_on(colour)} for kind, colour in coloured(kinds)],
        "units": list(units),
        "ops": [
            [kinds.index(op[0]), streams.index(op[1]), *op[2:6], *(float(f"{at:.9g}") for at in op[6:])] for op in ops
        ],
    }


def timeline(kinds: Iterable[str], identity: str) -> str:
    """HTML for a timeline and the legend of `kinds`. identity: id of the element with the page's data."""
    return (
        "<p>Zoom with the wheel, two fingers or + and -, move by dragging or with the arrow keys, double-click or 0 to "
        "reset.</p>"
        f'<canvas id="time" tabindex="0" role="img" data-source="{escape(identity)}" '
        'aria-label="Ops of the step, a lane for each stream"></canvas>'
        f'<p id="op" aria-live="polite">&nbsp;</p><ul class="legend">{legend(kinds)}</ul>'
    )


def legend(kinds: Iterable[str]) -> str:
    """HTML list items with the colour of each kind of op."""
    return "".join(f'<li><i style="background:{colour}"></i>{escape(kind)}</li>' for kind, colour in coloured(kinds))


def coloured(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Each kind with its colour."""
    return [(kind, KIND_COLOURS.get(kind, OTHER_COLOUR)) for kind in kinds]


TIMELINE = """
"use strict";
(() => {
  const canvas = document.getElementById("time");
  const { timeline } = JSON.parse(document.getElementById(canvas.dataset.source).textContent);
  const told = document.getElementById("op");
  const LANE = 34, GAP = 6, LEFT = 84, FOOT = 22;
  const [KIND, STREAM, UNIT, MICRO, SHARD, NBYTES, START, END] = [0, 1, 2, 3, 4, 5, 6, 7];
  const lanes = timeline.streams.map((_, lane) => timeline.ops.filter(op => op[STREAM] === lane));
  const whole = Math.max(timeline.seconds, 1e-12);
  const held = new Map();  // pointer -> where it is
  let from = 0, span = whole;

  // In a lane ops follow each other, so the first that ends after a time is found by halving.
  const firstAfter = (lane, time) => {
    let low = 0, high = lane.length;
    while (low < high) { const mid = (low + high) >> 1; if (lane[mid][END] > time) high = mid; else low = mid + 1; }
    return low;
  };
  const width = () => Math.max(1, canvas.clientWidth - LEFT);
  const toX = time => LEFT + (time - from) / span * width();
  const toTime = x => from + (x - LEFT) / width() * span;
  // exact: the step between two numbers that have to differ; else three decimals
  const scaled = (n, units, exact) => { if (n === 0) return "0";
    const [size, unit] = units.find(([size]) => n >= size) || units[units.length - 1];
    const digits = exact ? Math.max(0, -Math.floor(Math.log10(exact / size * 1.001))) : 3;
    return (n / size).toFixed(size === 1 && unit === "B" ? 0 : digits) + " " + unit; };
  const seconds = (s, exact) => scaled(s, [[1, "s"], [1e-3, "ms"], [1e-6, "us"]], exact);
  const bytes = n => scaled(n, [[1e9, "GB"], [1e6, "MB"], [1, "B"]]);

  const draw = () => {
    const ratio = window.devicePixelRatio || 1, height = lanes.length * (LANE + GAP) + FOOT;
    canvas.width = canvas.clientWidth * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.body);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, canvas.clientWidth, height);
    pen.font = "13px system-ui, sans-serif"; pen.textBaseline = "middle";
    lanes.forEach((lane, row) => {
      const top = row * (LANE + GAP), end = from + span;
      let filled = -1;  // the last pixel column that has been drawn: ops thinner than one share it
      for (let at = firstAfter(lane, from); at < lane.length && lane[at][START] < end; at++) {
        const op = lane[at], left = Math.max(LEFT, toX(op[START])), right = Math.min(LEFT + width(), toX(op[END]));
        const wide = right - left;
        if (wide < 1 && Math.floor(left) === filled) continue;
        filled = Math.floor(left);
        const { colour, ink } = timeline.kinds[op[KIND]];
        pen.fillStyle = colour;
        pen.fillRect(left, top, wide > 4 ? wide - 1 : Math.max(1, wide), LANE);
        if (wide > 50 && pen.measureText(name(op)).width < wide - 8) {
          pen.fillStyle = ink; pen.fillText(name(op), left + 5, top + LANE / 2);
        }
      }
      pen.clearRect(0, top, LEFT, LANE);
      pen.fillStyle = style.color; pen.fillText(timeline.streams[row], 0, top + LANE / 2, LEFT - 6);
    });
    const foot = lanes.length * (LANE + GAP) + FOOT / 2;
    pen.fillStyle = style.color;
    const rough = span * 70 / width(), power = 10 ** Math.floor(Math.log10(rough));  // a label takes 70 pixels
    const tick = power * [1, 2, 5, 10].find(each => power * each >= rough);
    for (let at = Math.ceil(from / tick); at * tick <= from + span; at++) {
      const x = toX(at * tick);
      pen.textAlign = x < LEFT + 30 ? "left" : x > LEFT + width() - 30 ? "right" : "center";
      pen.fillText(seconds(at * tick, tick), x, foot);
    }
    pen.textAlign = "left";
  };
  const name = op => timeline.kinds[op[KIND]].name + " u" + op[UNIT] + (op[MICRO] >= 0 ? " m" + op[MICRO] : "")
    + (op[SHARD] >= 0 ? " s" + op[SHARD] : "");
  const show = (start, length) => {
    span = Math.min(whole, Math.max(whole * 1e-6, length));
    from = Math.min(whole - span, Math.max(0, start));
    draw();
  };
  const zoom = (factor, x) => {
    const time = toTime(x), next = Math.min(whole, span * factor);
    show(time - (x - LEFT) / width() * next, next);
  };
  const tell = (x, y) => {
    const lane = lanes[Math.floor(y / (LANE + GAP))], time = toTime(x);
    const op = lane && x >= LEFT ? lane[firstAfter(lane, time)] : undefined;
    const hit = op && op[START] <= time;
    told.textContent = hit ? name(op) + ", " + timeline.units[op[UNIT]] + ": " + bytes(op[NBYTES]) + " written, "
      + seconds(op[END] - op[START]) + " from " + seconds(op[START]) : "\\u00a0";
  };

  canvas.addEventListener("wheel", event => {
    event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX);
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => {
    held.set(event.pointerId, event.offsetX); canvas.setPointerCapture(event.pointerId);
    tell(event.offsetX, event.offsetY);  // a finger does not hover
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, event => held.delete(event.pointerId));
  canvas.addEventListener("pointermove", event => {
    const x = event.offsetX, before = held.get(event.pointerId);
    if (before === undefined) { tell(x, event.offsetY); return; }
    held.set(event.pointerId, x);
    const other = [...held].find(([id]) => id !== event.pointerId);
    if (other) zoom(Math.max(1, Math.abs(before - other[1])) / Math.max(1, Math.abs(x - other[1])), other[1]);
    else show(from - (x - before) / width() * span, span);
  });
  canvas.addEventListener("dblclick", () => show(0, whole));
  canvas.addEventListener("keydown", event => {
    const middle = LEFT + width() / 2;
    const act = { "+": () => zoom(0.8, middle), "-": () => zoom(1.25, middle), "0": () => show(0, whole),
      ArrowLeft: () => show(from - span / 5, span), ArrowRight: () => show(from + span / 5, span) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  window.addEventListener("resize", draw);
  draw();
})();
"""
