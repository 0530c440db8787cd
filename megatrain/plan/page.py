"""A plan as one web page: memory, limits, upgrades, comparison, heat map, and a timeline that zooms.

The page holds everything it shows. It loads nothing from anywhere, and forbids itself to; without scripts only the
timeline is missing. Data is embedded as JSON (id `plan`), the same that `--json` writes, and the ops of the step.
Every text is escaped, names of models among them. It leaves out writing the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from megatrain.plan.compare import Row
from megatrain.plan.outlook import STREAM_WORDS, Outlook, Sweep
from megatrain.plan.report import (
    COMPARISON_HEADS,
    amount,
    as_content,
    comparison_rows,
    load_rows,
    owner_rows,
    summary_rows,
    upgrade_rows,
)
from megatrain.schedule import Timeline

KIND_COLOURS = {
    "FORWARD": "#3b82c4",
    "BACKWARD": "#1d4e89",
    "LOSS": "#7b5ea7",
    "FETCH": "#2a9d6f",
    "GRAD": "#d98324",
    "NORM": "#a3a3a3",
    "ADD": "#c2a83e",
    "UPDATE": "#c4453b",
    "READ": "#4fb3bf",
    "WRITE": "#b0578d",
}
OTHER_COLOUR = "#777777"
OWNER_COLOURS = ("#3b82c4", "#d98324", "#2a9d6f", "#7b5ea7", "#c4453b", "#c2a83e", "#4fb3bf", "#b0578d", "#777777")


def render_page(
    outlook: Outlook,
    facts: Sequence[tuple[str, str]],
    comparison: tuple[Row, ...] = (),
    swept: Sweep | None = None,
) -> str:
    """The whole page. `facts` (name and fact) stand above what the outlook tells."""
    content = as_content(outlook, comparison, swept) | {"timeline": timeline_content(outlook.plan.timeline)}
    model, hardware = outlook.plan.question.model.name, outlook.plan.question.hardware.name
    title = f"{model} on {hardware}"
    sections = [
        _definitions([*facts, *summary_rows(outlook)]),
        _memory(outlook),
        _section("What limits", _loads(outlook)),
        _section("The step", _timeline(outlook.plan.timeline)),
        _section("What one upgrade buys", _table(("upgrade", "tokens/s", "gain"), upgrade_rows(outlook.upgrades))),
    ]
    if comparison:
        note = "<p>All by replay on the described machine, at the best choices that fit. Nothing here is measured.</p>"
        sections.append(_section("Beside other systems", _table(COMPARISON_HEADS, comparison_rows(comparison)) + note))
    if swept is not None:
        sections.append(_section("Tokens per second by memory", _heat_map(swept)))
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style></head><body><main>",
            f"<h1>{escape(title)}</h1>",
            *sections,
            "<p>Predicted by <code>megatrain plan</code>; amounts are decimal (1 GB is 1e9 bytes).</p></main>",
            f'<script type="application/json" id="plan">{embedded(content)}</script>',
            f"<script>{_SCRIPT}</script></body></html>",
            "",
        )
    )


def embedded(content: Any) -> str:
    """JSON that may stand inside a script element whatever its texts say."""
    text = json.dumps(content, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def timeline_content(timeline: Timeline) -> dict[str, Any]:
    """Streams, kinds and ops: [kind, stream, unit, micro-batch, shard, bytes, start, end], seconds from the start."""
    ops = timeline.schedule.ops
    streams, kinds = list(dict.fromkeys(op.stream for op in ops)), list(dict.fromkeys(op.kind for op in ops))
    return {
        "seconds": timeline.seconds,
        "streams": [STREAM_WORDS.get(stream, stream) for stream in streams],
        "kinds": [{"name": kind, "colour": KIND_COLOURS.get(kind, OTHER_COLOUR)} for kind in kinds],
        "units": list(timeline.schedule.units),
        "ops": [
            [
                kinds.index(op.kind),
                streams.index(op.stream),
                op.unit,
                op.micro,
                op.shard,
                op.nbytes,
                float(f"{start:.9g}"),
                float(f"{end:.9g}"),
            ]
            for op, start, end in zip(ops, timeline.starts, timeline.ends, strict=True)
        ],
    }


# Parts -------------------------------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _definitions(rows: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in rows) + "</dl>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _memory(outlook: Outlook) -> str:
    """A bar per tier, as long as its budget or its use, whichever is more."""
    budgets = outlook.plan.question.budgets()
    bars = []
    for tier, owners in owner_rows(outlook.plan).items():
        used, budget = outlook.plan.nbytes[tier], budgets[tier]
        parts, legend = [], []
        for place, (owner, nbytes) in enumerate(owners):
            colour = OWNER_COLOURS[min(place, len(OWNER_COLOURS) - 1)]
            words = escape(f"{owner}: {amount(nbytes)}")
            width = 100 * nbytes / max(used, budget)
            parts.append(f'<span style="width:{width:.4f}%;background:{colour}" title="{words}"></span>')
            legend.append(f'<li><i style="background:{colour}"></i>{words}</li>')
        title = escape(f"{tier}: {amount(used)} of {amount(budget)}")
        bars.append(f'<h3>{title}</h3><div class="bar">{"".join(parts)}</div><ul class="legend">{"".join(legend)}</ul>')
    return _section("Memory at its peak", "".join(bars))


def _loads(outlook: Outlook) -> str:
    heads = ("stream", "share of the step's length", "busy", "busy for", "slack")
    bars = []
    for load in outlook.loads:
        share = 100 * load.chain_seconds / outlook.plan.seconds
        span = f'<span style="width:{share:.4f}%;background:#c4453b"></span>'
        bars.append(f'<div class="bar" title="{escape(load.name)}">{span}</div>')
    return _table(heads, load_rows(outlook)) + f'<div class="bars">{"".join(bars)}</div>'


def _timeline(timeline: Timeline) -> str:
    kinds = dict.fromkeys(op.kind for op in timeline.schedule.ops)
    legend = "".join(
        f'<li><i style="background:{KIND_COLOURS.get(kind, OTHER_COLOUR)}"></i>{escape(kind)}</li>' for kind in kinds
    )
    return (
        "<p>Wheel or + and - zoom, dragging or the arrows move, double click or 0 shows the whole step.</p>"
        '<canvas id="time" tabindex="0" role="img" aria-label="Ops of the step, a lane for each stream"></canvas>'
        f'<p id="op" aria-live="polite">&nbsp;</p><ul class="legend">{legend}</ul>'
    )


def _heat_map(swept: Sweep) -> str:
    known = [rate for row in swept.tokens_per_second for rate in row if rate is not None]
    most = max(known, default=1.0)
    head = "".join(f"<th>{escape(amount(nbytes)) if nbytes else 'shared'}</th>" for nbytes in swept.device_nbytes)
    rows = []
    for host, rates in zip(swept.host_nbytes, swept.tokens_per_second, strict=True):
        cells = []
        for rate in rates:
            if rate is None:
                cells.append('<td class="none">does not fit</td>')
            else:
                share = rate / most
                ink = "#fff" if share > 0.6 else "#111"
                light = 92 - 57 * share
                cells.append(f'<td style="background:hsl(205 60% {light:.1f}%);color:{ink}">{rate:,.0f}</td>')
        rows.append(f"<tr><th>{escape(amount(host))}</th>{''.join(cells)}</tr>")
    head = f"<thead><tr><th>host \\ device</th>{head}</tr></thead>"
    return f'<div class="wide"><table class="heat">{head}<tbody>{"".join(rows)}</tbody></table></div>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --paper: #fff; --line: #d5d9de; --soft: #f0f2f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #16181c; --line: #3a3f46; --soft: #23272d; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: .8rem 0 .3rem; } dt { font-weight: 600; } dd { margin: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .heat td { text-align: center; } .none { opacity: .55; }
.bar { display: flex; height: 1.2rem; background: var(--soft); margin: .2rem 0; overflow: hidden; }
.bar span { display: block; } .bars { max-width: 40rem; } .bars .bar { height: .4rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; margin: .3rem 0; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
canvas { width: 100%; display: block; touch-action: none; cursor: grab; } #op { font-variant-numeric: tabular-nums; }
"""

_SCRIPT = """
"use strict";
(() => {
  const { timeline } = JSON.parse(document.getElementById("plan").textContent);
  const canvas = document.getElementById("time"), told = document.getElementById("op");
  const LANE = 34, GAP = 6, LEFT = 84, FOOT = 22;
  const [KIND, STREAM, UNIT, MICRO, SHARD, NBYTES, START, END] = [0, 1, 2, 3, 4, 5, 6, 7];
  const lanes = timeline.streams.map((_, lane) => timeline.ops.filter(op => op[STREAM] === lane));
  const whole = Math.max(timeline.seconds, 1e-12);
  let from = 0, span = whole, drag = null;

  // In a lane ops follow each other, so the first that ends after a time is found by halving.
  const firstAfter = (lane, time) => {
    let low = 0, high = lane.length;
    while (low < high) { const mid = (low + high) >> 1; if (lane[mid][END] > time) high = mid; else low = mid + 1; }
    return low;
  };
  const width = () => Math.max(1, canvas.clientWidth - LEFT);
  const toX = time => LEFT + (time - from) / span * width();
  const toTime = x => from + (x - LEFT) / width() * span;
  const scaled = (n, units) => { const [size, unit] = units.find(([size]) => n >= size) || units[units.length - 1];
    return (n / size).toFixed(size === 1 && unit === "B" ? 0 : 3) + " " + unit; };
  const seconds = s => scaled(s, [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]);
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
        pen.fillStyle = timeline.kinds[op[KIND]].colour;
        pen.fillRect(left, top, wide > 4 ? wide - 1 : Math.max(1, wide), LANE);
        if (wide > 70) { pen.fillStyle = "#fff"; pen.fillText(name(op), left + 5, top + LANE / 2, wide - 10); }
      }
      pen.clearRect(0, top, LEFT, LANE);
      pen.fillStyle = style.color; pen.fillText(timeline.streams[row], 0, top + LANE / 2, LEFT - 6);
    });
    const foot = lanes.length * (LANE + GAP) + FOOT / 2;
    pen.fillStyle = style.color;
    for (let mark = 0; mark <= 4; mark++) {
      pen.textAlign = mark === 4 ? "right" : mark ? "center" : "left";
      pen.fillText(seconds(from + span * mark / 4), LEFT + width() * mark / 4, foot);
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
    drag = { x: event.offsetX, from }; canvas.setPointerCapture(event.pointerId);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { drag = null; });
  canvas.addEventListener("pointermove", event => {
    if (drag) show(drag.from - (event.offsetX - drag.x) / width() * span, span);
    else tell(event.offsetX, event.offsetY);
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
