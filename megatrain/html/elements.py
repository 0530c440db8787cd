"""A page and its plain parts: sections, tables, definitions, bars.

A page loads nothing from anywhere, and forbids itself to. Its data is JSON inside it, which its scripts read; without
scripts only what they draw is missing. Texts are escaped by whoever puts them into a tag, which is this file, for all
that is not marked as HTML by its name (`body`, `sections`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

OWNER_COLOURS = ("#3b82c4", "#d98324", "#2a9d6f", "#7b5ea7", "#c4453b", "#c2a83e", "#4fb3bf", "#b0578d", "#777777")
"""Of parts of a bar, the first the largest."""


def document(title: str, sections: Sequence[str], identity: str, content: Any, scripts: Sequence[str]) -> str:
    """The whole page. `content` is embedded as JSON in the element `identity`, for the scripts and for others."""
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style></head><body><main>",
            f"<h1>{escape(title)}</h1>",
            *sections,
            "</main>",
            f'<script type="application/json" id="{escape(identity)}">{embedded(content)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>",
            "",
        )
    )


def embedded(content: Any) -> str:
    """JSON that may stand inside a script element whatever its texts say."""
    text = json.dumps(content, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def definitions(rows: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in rows) + "</dl>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bar(title: str, parts: Sequence[tuple[str, float]], whole: float) -> str:
    """A bar of parts, each a text and a length of which `whole` fill the bar, and what each colour means."""
    spans, words = [], []
    for place, (text, length) in enumerate(parts):
        colour, said = OWNER_COLOURS[min(place, len(OWNER_COLOURS) - 1)], escape(text)
        width = 100 * length / whole if whole else 0.0
        spans.append(f'<span style="width:{width:.4f}%;background:{colour}" title="{said}"></span>')
        words.append(f'<li><i style="background:{colour}"></i>{said}</li>')
    return f'<h3>{escape(title)}</h3><div class="bar">{"".join(spans)}</div><ul class="legend">{"".join(words)}</ul>'


STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --paper: #fff; --line: #d5d9de; --soft: #f0f2f5; --faint: #6b737c;
  --c0: #2f6fb0; --c1: #c8641b; --c2: #23845d; --c3: #7a4fb0; --c4: #b8322a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #16181c; --line: #3a3f46; --soft: #23272d;
  --faint: #98a1ab; --c0: #6aa9e6; --c1: #f0a05a; --c2: #5cc79a; --c3: #b79be8; --c4: #f08078; } }
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
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 1.5rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; display: block; overflow: visible; }
figcaption { font-size: .9rem; min-height: 1.5em; font-variant-numeric: tabular-nums; color: var(--faint); }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif; } svg .grid { stroke: var(--line); }
svg .mark { stroke: var(--faint); stroke-dasharray: 3 3; } svg .at { stroke: var(--ink); opacity: .5; }
svg .mean { fill: none; stroke-width: 1.6; } svg .band { fill: none; opacity: .45; }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
"""
