"""Charts: a spike is seen among a million points, whatever the values, and what is under the pointer is of its step."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly import graph_objects

from megatrain.html import Axes, ChartEvent, Curve, chart, chart_scripts, document, ink_on, smoothed
from megatrain.html.charts import COLUMNS
from megatrain.html.elements import CURVE_COLOURS, PART_COLOURS, luminance
from megatrain.run.report import write_report
from megatrain.train.events import Evaluated
from tests.html.browser import BROWSER, seen
from tests.html.reader import HOSTILE, read
from tests.run.test_report import EVERYTHING, run

ANY = st.floats(allow_nan=True, allow_infinity=True, width=32)


def drawn(curves: list[Curve], events: list[ChartEvent] | None = None, **how: Any) -> tuple[str, dict[str, Any]]:
    """The place of a chart in a page, and what plotly is given for it."""
    charts: dict[str, Any] = {}
    html = chart(charts, "a", "a chart", curves, events or [], axes=Axes(**how))
    return html, charts.get("a", {})


def test_a_spike_in_a_million_steps_survives_downsampling() -> None:
    losses = np.full(1_000_000, 2.0)
    losses[654_321] = 9.0
    losses[123_456] = 0.5
    _, figure = drawn([Curve("training", np.arange(1, 1_000_001), losses, faint=True)])
    (line,) = figure["data"]
    assert len(line["x"]) <= 2 * COLUMNS
    assert (max(line["y"]), min(line["y"])) == (9.0, 0.5)
    assert line["x"][line["y"].index(9.0)] == 654_322
    assert line["x"][line["y"].index(0.5)] == 123_457
    assert line["x"] == sorted(line["x"])
    assert len(json.dumps(figure)) < 200_000


def test_hover_shows_each_points_own_step() -> None:
    _, figure = drawn(
        [Curve("training", [1, 2, 5], [3.0, 1.0, 2.0]), Curve("held-out", [4], [2.5], points=True)], unit="%"
    )
    first, second = figure["data"]
    assert first["hovertemplate"] == "training, step %{x:,}: %{y:.5~g}%<extra></extra>"
    assert second["hovertemplate"].startswith("held-out, step ")
    assert figure["layout"]["xaxis"]["unifiedhovertitle"]["text"] == " "
    assert figure["layout"]["xaxis"]["dtick"] == 1


def test_markers_are_connected_over_gaps_and_lines_are_not() -> None:
    for points in (False, True):
        _, figure = drawn([Curve("x", [1, 2, 3], [3.0, math.nan, 1.0], points=points)])
        (line,) = figure["data"]
        assert line["connectgaps"] is points
        assert line["y"] == ([3.0, 1.0] if points else [3.0, None, 1.0])


@given(st.lists(ANY, max_size=30), st.sampled_from([None, 0.0]), st.booleans())
def test_charts_accept_any_values(values: list[float], floor: float | None, points: bool) -> None:
    html, figure = drawn([Curve("x", list(range(len(values))), values, points=points, faint=True)], floor=floor)
    read(html)
    assert (figure == {}) == (not any(map(math.isfinite, values)))
    json.dumps(figure, allow_nan=False)


@given(st.lists(ANY, max_size=40), st.integers(1, 9))
def test_smoothing_is_a_centred_mean(values: list[float], window: int) -> None:
    found = smoothed(values, window)
    for at, mean in enumerate(found):
        near = values[max(0, at - window // 2) : at + window // 2 + 1]
        near = [value for value in near if math.isfinite(value)]
        if near:
            scale = sum(abs(value) for value in values if math.isfinite(value))
            assert mean == pytest.approx(sum(near) / len(near), rel=1e-6, abs=1e-12 * scale)
        else:
            assert math.isnan(mean)


def test_norms_over_several_orders_get_a_log_axis() -> None:
    html, figure = drawn([Curve("x", list(range(101)), [1.0] * 100 + [1e4])])
    assert "(logarithmic)" in html
    assert figure["layout"]["yaxis"]["type"] == "log"
    html, figure = drawn([Curve("x", list(range(3)), [1.0, 2.0, 3.0])])
    assert "logarithmic" not in html
    assert figure["layout"]["yaxis"]["type"] == "linear"


def test_thousands_are_written_as_k_and_learning_rates_as_powers_of_ten() -> None:
    for value, how in ((15e3, "SI"), (6e-4, "e"), (3.0, "e")):
        _, figure = drawn([Curve("x", [1, 2, 3], [0.0, math.nan, value])])
        assert figure["layout"]["yaxis"]["exponentformat"] == how


def test_each_event_kind_has_a_symbol_and_a_line() -> None:
    events = [ChartEvent(2, "resumed", "at 2"), ChartEvent(3, "skipped", "at 3"), ChartEvent(4, "resumed", "at 4")]
    _, figure = drawn([Curve("x", [1, 5], [1.0, 2.0])], events)
    _, resumed, skipped = figure["data"]
    assert (resumed["name"], resumed["x"], resumed["text"]) == ("resumed", [2, 4], ["at 2", "at 4"])
    assert skipped["marker"]["symbol"] != resumed["marker"]["symbol"]
    assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [2, 3, 4]


def test_events_of_one_step_lie_above_each_other() -> None:
    events = [ChartEvent(3, "skipped", ""), ChartEvent(3, "rolled back", ""), ChartEvent(4, "skipped", "")]
    _, skipped, back = drawn([Curve("x", [1, 5], [1.0, 2.0])], events)[1]["data"]
    assert skipped["y"] == [skipped["y"][0]] * 2
    assert back["y"][0] - skipped["y"][0] >= 0.05


def test_faint_points_are_dots_that_no_line_connects() -> None:
    (dots,) = drawn([Curve("undone", [1, 2, 9], [3.0, 2.0, 1.0], points=True, faint=True)])[1]["data"]
    assert dots["mode"] == "markers"


def test_many_steps_and_tokens_are_short_on_the_axis() -> None:
    for last, how in ((900, ",d"), (1e6, "~s")):
        assert drawn([Curve("x", [1, last], [1.0, 2.0])])[1]["layout"]["xaxis"]["tickformat"] == how


def test_plotly_accepts_every_chart_field() -> None:
    """Its own classes refuse a property or a value that there is not."""
    events = [ChartEvent(2, "resumed", "at 2"), ChartEvent(3, "skipped", "at 3")]
    curves = [
        Curve("x", range(5000), [each % 7 for each in range(5000)], faint=True),
        Curve("y", [1], [2.0], points=True),
    ]
    for how in ({}, {"unit": "B", "floor": 0.0}):
        _, figure = drawn(curves, events, **how)
        graph_objects.Figure(figure)
    with pytest.raises(ValueError, match="filled"):
        graph_objects.Figure({"data": [{**figure["data"][0], "filled": "toself"}]})


def contrast(one: str, other: str) -> float:
    """Of WCAG 2, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_adjacent_colours_differ_in_brightness() -> None:
    for one, other in pairwise(PART_COLOURS):
        assert contrast(one, other) > 1.5, (one, other)
    assert len({round(luminance(colour), 2) for colour in PART_COLOURS}) == len(PART_COLOURS)
    for colour in PART_COLOURS:
        assert contrast(colour, {"#000": "#000000", "#fff": "#ffffff"}[ink_on(colour)]) >= 4.5, colour
    assert len(set(CURVE_COLOURS)) == len(CURVE_COLOURS)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="looks at pages in chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_charts_render_without_console_errors_or_overflow(width: int, tmp_path: Path) -> None:
    charts: dict[str, Any] = {}
    steps = list(range(1, 3001))
    losses = [2 + math.cos(step) for step in steps]
    held = list(range(50, 3001, 50))
    curves = [Curve(HOSTILE, steps, losses, faint=True), Curve("held-out", held, [2.0] * len(held), 1, points=True)]
    html = chart(charts, "loss", "loss", curves, [ChartEvent(1000, "resumed", HOSTILE)])
    page = document("a page", [html], "page", {"charts": charts}, chart_scripts())
    hover = """
      const drag = page.querySelector(".nsewdrag"), box = drag.getBoundingClientRect();
      drag.dispatchEvent(new frame.contentWindow.MouseEvent("mousemove",
        { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true }));"""
    found = seen(page, tmp_path, width=width, act=hover)
    assert found["charts"] >= 1
    assert found["lowest"] > 180
    assert found["problems"] == []
    assert found["overflow"] <= 0
    assert found["wide"] == []
    words = " ".join(found["words"])
    assert HOSTILE in words
    assert re.search(r"held-out, step 1,[56][05]0: 2", words), words  # in the middle of the chart


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="looks at pages in chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_reports_render_without_console_errors_or_overflow(width: int, tmp_path: Path) -> None:
    """A legend with all kinds of events leaves the chart its height, on a phone, too."""
    folder = run(tmp_path / "a", *EVERYTHING, Evaluated(3, 2.0, {}, {"math": 1.0, "code": 3.0}))
    found = seen(write_report(folder).read_text(), tmp_path, width=width)
    assert found["charts"] >= 5
    assert found["lowest"] > 180
    assert found["problems"] == []
    assert found["overflow"] <= 0
    assert found["wide"] == []
