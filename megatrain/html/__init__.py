"""Pages that hold everything they show: parts of HTML, curves, and a timeline that zooms. Imports no torch.

What a page is about comes from elsewhere (`plan.html`, `report`). Every text is escaped here, on its way in.
"""

from megatrain.html.curves import CURVES, Curve, Marker, figure
from megatrain.html.elements import bar, definitions, document, section, table
from megatrain.html.timeline import TIMELINE, DrawnOp, timeline, timeline_content

__all__ = [
    "CURVES",
    "TIMELINE",
    "Curve",
    "DrawnOp",
    "Marker",
    "bar",
    "definitions",
    "document",
    "figure",
    "section",
    "table",
    "timeline",
    "timeline_content",
]
