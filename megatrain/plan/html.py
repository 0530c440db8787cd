"""Renders a plan as one web page: memory, limits, upgrades and a timeline with zoom.

The page is self-contained (see `megatrain.html`). It embeds the JSON that `--json` writes, with the timeline of the
step added, in the element `plan`. The caller writes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatrain.formatting import amount
from megatrain.html import TIMELINE, DrawnOp, bar, definitions, document, section, table, timeline, timeline_content
from megatrain.plan.analysis import Outlook, stream_words
from megatrain.plan.report import (
    as_content,
    free_rows,
    hiding_line,
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
) -> str:
    """The page as HTML. facts: (name, text) rows that are shown above the summary."""
    replayed = outlook.plan.timeline
    words = stream_words(outlook.plan.question.hardware)
    drawn = timeline_content(_drawn(replayed), replayed.schedule.units, words)
    content = as_content(outlook) | {"timeline": drawn}
    model, hardware = outlook.plan.question.model.name, outlook.plan.question.hardware.name
    title = f"{model} on {hardware}"
    sections = [
        definitions([*warning_rows(outlook), *facts, *summary_rows(outlook)]),
        _memory(outlook),
        section("What limits", _limits(outlook)),
        section("The step", timeline((kind["name"] for kind in drawn["kinds"]), "plan")),
        section("What a change would gain", _changes(outlook)),
    ]
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
    return table(("resource", "busy", "step with 10% more of it"), sensitivity_rows(outlook))


def _changes(outlook: Outlook) -> str:
    found = f"<p>{escape(hiding_line(outlook))}</p>"
    for head, rows in (("costs nothing", free_rows(outlook)), ("upgrade", upgrade_rows(outlook))):
        if rows:
            found += table((head, "tokens/s", "gain"), rows)
    return found + f"<p>{escape(without_gain(outlook))}</p>"
