"""Renders a plan as one web page: memory, limits, upgrades, a heat map and a timeline with zoom.

The page is self-contained (see `megatrain.html`). It embeds the JSON that `--json` writes, with the timeline of the
step added, in the element `plan`. The caller writes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatrain.formatting import amount
from megatrain.html import TIMELINE, DrawnOp, bar, definitions, document, section, table, timeline, timeline_content
from megatrain.plan.analysis import Outlook, Sweep, stream_words
from megatrain.plan.report import (
    as_content,
    free_rows,
    hiding_line,
    rate_lines,
    sensitivity_rows,
    summary_rows,
    tier_name,
    upgrade_rows,
    use_rows,
    warning_rows,
    without_gain,
)
from megatrain.schedule import Timeline


def render_page(
    outlook: Outlook,
    facts: Sequence[tuple[str, str]],
    swept: Sweep | None = None,
) -> str:
    """The page as HTML. facts: (name, text) rows that are shown above the summary."""
    replayed = outlook.plan.timeline
    words = stream_words(outlook.plan.question.hardware)
    drawn = timeline_content(_drawn(replayed), replayed.schedule.units, words)
    content = as_content(outlook, swept) | {"timeline": drawn}
    model, hardware = outlook.plan.question.model.name, outlook.plan.question.hardware.name
    title = f"{model} on {hardware}"
    sections = [
        definitions([*warning_rows(outlook), *facts, *summary_rows(outlook)]),
        _memory(outlook),
        section("What limits", _limits(outlook)),
        section("The step", timeline((kind["name"] for kind in drawn["kinds"]), "plan")),
        section("What a change would gain", _changes(outlook)),
    ]
    if swept is not None:
        sections.append(section("Tokens per second by memory", _heat_map(swept)))
    sections.append("<p>Predicted by <code>megatrain plan</code>; amounts are decimal (1 GB is 1e9 bytes).</p>")
    return document(title, sections, "plan", content, [TIMELINE])


def _drawn(replayed: Timeline) -> list[DrawnOp]:
    return [
        (op.kind, op.stream, op.unit, op.micro, op.shard, op.nbytes, start, end)
        for op, start, end in zip(replayed.schedule.ops, replayed.starts, replayed.ends, strict=True)
    ]


# Parts -------------------------------------------------------------------------------------------------------------


def _memory(outlook: Outlook) -> str:
    """A bar per tier, whose length is its budget or its use, whichever is larger."""
    budgets = outlook.plan.question.budgets()
    bars = []
    for tier, uses in use_rows(outlook.plan).items():
        used, budget = outlook.plan.nbytes[tier], budgets[tier]
        parts = [(f"{use}: {amount(nbytes)}", float(nbytes)) for use, nbytes in uses]
        bars.append(
            bar(f"{tier_name(outlook.plan, tier)}: {amount(used)} of {amount(budget)}", parts, max(used, budget))
        )
    return section("Memory at its peak", "".join(bars))


def _limits(outlook: Outlook) -> str:
    found = table(("resource", "busy", "step with 10% more of it"), sensitivity_rows(outlook))
    return found + "".join(f"<p>{escape(line)}</p>" for line in rate_lines(outlook))


def _changes(outlook: Outlook) -> str:
    found = f"<p>{escape(hiding_line(outlook))}</p>"
    for head, rows in (("costs nothing", free_rows(outlook)), ("upgrade", upgrade_rows(outlook))):
        if rows:
            found += table((head, "tokens/s", "gain"), rows)
    return found + f"<p>{escape(without_gain(outlook))}</p>"


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
