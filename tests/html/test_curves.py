"""Curves: a spike is seen among a million points, whatever the values, and the pointer is told what is there."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.html import CURVES, Curve, Marker, figure
from megatrain.html.curves import COLUMNS, HEIGHT, WIDTH
from tests.plan.test_html import HOSTILE, read

ANY = st.floats(allow_nan=True, allow_infinity=True, width=32)


def numbers_in(svg: str) -> list[float]:
    return [float(each) for path in re.findall(r' d="([^"]*)"', svg) for each in re.findall(r"-?[\d.]+", path)]


def test_a_spike_among_a_million_steps_stays_visible_in_a_small_page() -> None:
    losses = np.full(1_000_000, 2.0)
    losses[654_321] = 9.0
    losses[123_456] = 0.5
    data: dict[str, Any] = {}
    html = figure(data, "loss", "loss", [Curve("training", np.arange(1, 1_000_001), losses)])
    (curve,) = data["loss"]["curves"]
    assert len(curve["xs"]) <= COLUMNS
    assert (max(curve["highs"]), min(curve["lows"])) == (9.0, 0.5)
    at = curve["highs"].index(9.0)
    assert abs(curve["xs"][at] - 654_321) <= 1_000_000 / COLUMNS
    assert curve["means"][at] < 2.1
    assert html.count('class="band"') == 1
    assert len(html) < 100_000
    read(html)


def test_few_points_are_drawn_as_they_are() -> None:
    data: dict[str, Any] = {}
    html = figure(data, "a", "a", [Curve("x", [1, 2, 5], [3.0, 1.0, 2.0])])
    assert data["a"]["curves"][0]["means"] == [3.0, 1.0, 2.0]
    assert "band" not in html


@given(st.lists(ANY, max_size=30), st.sampled_from([None, 0.0]))
def test_any_values_make_a_drawing_within_its_frame(values: list[float], floor: float | None) -> None:
    data: dict[str, Any] = {}
    html = figure(data, "a", "a", [Curve("x", list(range(len(values))), values)], floor=floor)
    read(html)
    assert "nan" not in html.replace("polynan", "")
    for path in re.findall(r'class="mean"[^>]* d="M([^"]*)"', html):
        for point in path.split("L"):
            x, y = map(float, point.split())
            assert 0 <= x <= WIDTH + 0.1
            assert -0.1 <= y <= HEIGHT + 0.1
    finite = [value for value in values if math.isfinite(value)]
    assert (data == {}) == (not finite)
    json.dumps(data, allow_nan=False)


def test_norms_that_differ_by_orders_get_a_logarithmic_scale() -> None:
    html = figure({}, "a", "norm", [Curve("x", list(range(101)), [1.0] * 100 + [1e4])])
    assert "norm (logarithmic)" in html
    html = figure({}, "a", "norm", [Curve("x", list(range(3)), [1.0, 2.0, 3.0])])
    assert "logarithmic" not in html


def test_hostile_names_stay_text() -> None:
    html = figure({}, HOSTILE, HOSTILE, [Curve(HOSTILE, [1, 2], [1.0, 2.0])], [Marker(1, HOSTILE)], unit=HOSTILE)
    reader = read(html)
    assert reader.count["script"] == reader.count["img"] == 0
    assert HOSTILE in reader.text


NODE = """
const on = {}, set = {}, told = { textContent: "" };
const line = { setAttribute: (name, value) => { set[name] = value; } };
const svg = { dataset: { curves: "loss" }, parentNode: { querySelector: () => told }, querySelector: () => line,
  getBoundingClientRect: () => ({ left: 0, width: 860 }), addEventListener: (name, act) => { on[name] = act; } };
globalThis.document = { querySelectorAll: () => [svg], getElementById: () => ({ textContent: DATA }) };
new Function(SCRIPT)();
on.pointermove({ clientX: 860 });
console.log(told.textContent); console.log(set.visibility);
on.pointermove({ clientX: 62 }); console.log(told.textContent);
on.pointerleave({}); console.log(set.visibility);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")
def test_the_pointer_is_told_the_values_under_it(tmp_path: Path) -> None:
    curves = [Curve("training", [1, 2, 3], [3.0, 2.0, 1.0]), Curve("held-out", [2], [2.5], dots=True)]
    data: dict[str, Any] = {}
    figure(data, "loss", "loss", curves, unit="%")
    program = NODE.replace("DATA", json.dumps(json.dumps({"figures": data}))).replace("SCRIPT", json.dumps(CURVES))
    (tmp_path / "run.js").write_text(program)
    done = subprocess.run(["node", str(tmp_path / "run.js")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "step 3: training 1%, held-out 2.5%",
        "visible",
        "step 1: training 3%, held-out 2.5%",
        "hidden",
    ]
