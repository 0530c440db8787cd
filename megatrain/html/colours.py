"""Colours that stay distinct in greyscale and for colour-blind readers.

Bars and ops use viridis, whose brightness rises steadily; neighbours are far apart in it. Lines use the palette of
Okabe and Ito, which works on white and on black.
"""

from __future__ import annotations

VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
"""From dark to bright (S. van der Walt and N. Smith, 2015)."""
PART_COLOURS = tuple(VIRIDIS[at] for at in (1, 6, 3, 8, 0, 5, 2, 7, 4))
"""Colours for the parts of a bar, in order."""
OTHER_COLOUR = "#777777"
"""For what is beyond those."""
CURVE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of lines (M. Okabe and K. Ito, 2008)."""


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2) of `#rrggbb`, from 0 to 1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(colour: str) -> str:
    """Black or white, whichever is more readable on a colour."""
    return "#000" if luminance(colour) > 0.179 else "#fff"
