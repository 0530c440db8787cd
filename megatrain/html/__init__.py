"""Self-contained HTML pages: elements, charts and a zoomable timeline. Imports no torch.

The contents of pages come from `plan.html` and `run.report`. All text is escaped here.
"""

from megatrain.html.charts import Axes, ChartEvent, Curve, chart, chart_scripts, marked, smoothed
from megatrain.html.elements import bar, definitions, document, ink_on, section, table
from megatrain.html.timeline import TIMELINE, DrawnOp, timeline, timeline_content

__all__ = [
    "TIMELINE",
    "Axes",
    "ChartEvent",
    "Curve",
    "DrawnOp",
    "bar",
    "chart",
    "chart_scripts",
    "definitions",
    "document",
    "ink_on",
    "marked",
    "section",
    "smoothed",
    "table",
    "timeline",
    "timeline_content",
]
