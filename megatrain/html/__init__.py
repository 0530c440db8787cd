"""Pages that hold everything they show: parts of HTML, charts, and a timeline that zooms. Imports no torch.

What a page is about comes from elsewhere (`plan.html`, `run.report`). Every text is escaped here, on its way in.
"""

from megatrain.html.charts import ChartEvent, Curve, chart, chart_scripts, marked, smoothed
from megatrain.html.colours import ink_on
from megatrain.html.elements import bar, definitions, document, section, table
from megatrain.html.timeline import TIMELINE, DrawnOp, timeline, timeline_content

__all__ = [
    "TIMELINE",
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
