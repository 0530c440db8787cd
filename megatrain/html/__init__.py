"""Self-contained HTML pages: elements and charts. Imports no torch.

The contents of pages come from `run.report`. All text is escaped here.
"""

from megatrain.html.charts import Axes, ChartEvent, Curve, chart, chart_scripts, marked, smoothed
from megatrain.html.elements import bar, definitions, document, ink_on, section, table

__all__ = [
    "Axes",
    "ChartEvent",
    "Curve",
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
]
