"""A page, its colours and its simple elements: sections, tables, definition lists, bars.

A page loads nothing external, and its content security policy forbids it. Its data is embedded as JSON for its scripts;
without scripts only charts are missing. All arguments are escaped here, except HTML arguments (`body`,
`sections`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

# Colours stay distinct in greyscale and for colour-blind readers. Bars use viridis, whose brightness rises
# steadily; neighbours are far apart in it. Lines use the palette of Okabe and Ito, which works on white and on black.
VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
"""From dark to bright (S. van der Walt and N. Smith, 2015)."""
PART_COLOURS = tuple(VIRIDIS[at] for at in (1, 6, 3, 8, 0, 5, 2, 7, 4))
"""Colours for the parts of a bar, in order."""
OTHER_COLOUR = "#777777"
"""For what is beyond those."""
CURVE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of lines (M. Okabe and K. Ito, 2008)."""

WRAPPED_FROM = 30
"""Characters from which a cell of a table wraps."""
LABELLED_FROM = 0.08
"""Smallest share of a bar whose part gets a label."""


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2) of `#rrggbb`, from 0 to 1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(colour: str) -> str:
    """Black or white, whichever is more readable on a colour."""
    return "#000" if luminance(colour) > 0.179 else "#fff"


def document(title: str, sections: Sequence[str], identity: str, content: Any, scripts: Sequence[str]) -> str:
    """A complete page. `content` is embedded as JSON in the element with id `identity`."""
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
    """JSON, escaped so that it is safe inside a script element."""
    text = json.dumps(content, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def definitions(rows: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in rows) + "</dl>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table. Columns with words are aligned left, and long words wrap."""
    words = [any(_is_words(row[at]) for row in rows) for at in range(len(heads))]
    head = "".join(f"<th{_class(text, of)}>{escape(text)}</th>" for text, of in zip(heads, words, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{_class(text, of)}>{escape(text)}</td>" for text, of in zip(row, words, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _is_words(text: str) -> bool:
    return text not in ("nan", "inf") and (text[:1].isalpha() or text[:1] in ("/", "."))


def _class(text: str, words: bool) -> str:
    return "" if not words else ' class="words"' if len(text) < WRAPPED_FROM else ' class="words long"'


def bar(title: str, parts: Sequence[tuple[str, float]], whole: float) -> str:
    """A stacked bar with a legend. parts: (text, length); `whole` is the length of the full bar."""
    spans, words = [], []
    for place, (text, length) in enumerate(parts):
        colour, said = PART_COLOURS[place] if place < len(PART_COLOURS) else OTHER_COLOUR, escape(text)
        width = 100 * length / whole if whole else 0.0
        style = f"width:{width:.4f}%;background:{colour};color:{ink_on(colour)}"
        label = said if width >= 100 * LABELLED_FROM else ""
        spans.append(f'<span style="{style}" title="{said}">{label}</span>')
        words.append(f'<li><i style="background:{colour}"></i>{said}</li>')
    return f'<h3>{escape(title)}</h3><div class="bar">{"".join(spans)}</div><ul class="legend">{"".join(words)}</ul>'


STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --paper: #fff; --line: #d5d9de; --soft: #f0f2f5; --faint: #6b737c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #16181c; --line: #3a3f46; --soft: #23272d;
  --faint: #98a1ab; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: .8rem 0 .3rem; } dt { font-weight: 600; } dd { margin: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; }
.long { white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
.wide { overflow-x: auto; margin: .5rem 0; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, .words { text-align: left; }
.bar { display: flex; height: 1.5rem; background: var(--soft); margin: .2rem 0; overflow: hidden; }
.bar span { display: block; box-sizing: border-box; border-right: 1px solid var(--paper);
  text-indent: .3rem; font-size: .8rem; line-height: 1.5rem; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; margin: .3rem 0; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; outline: 1px solid var(--line); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 1.5rem; }
figure { margin: 0; min-width: 0; } .chart { width: 100%; min-height: 276px; }
@media (max-width: 40rem) { main { padding: .8rem; } dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; } dd, dt { overflow-wrap: anywhere; } }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
"""
