"""The calibration against published measurements: its points have sources, and the planner has what it finds."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest

from bench import published
from bench.published import BEFORE, LEAST, MOST, Efficiencies, Found, Point, Replayed, points, stays_out, way, why_not
from megatrain.plan import machine
from megatrain.plan.cost import ELEMENTWISE_PASSES, MEASURED_OVER_PLANNED


@cache
def found() -> Found:
    return published.compare(points())


def small(system: str) -> Point:
    """The first point of a system, with a model of few layers."""
    point = next(each for each in points() if each.system == system)
    shape = dict(point.shape) | {"layers": 4, "hidden_size": 512, "feed_forward": 1024, "heads": 4, "kv_heads": 4}
    return replace(point, shape=tuple((shape | {"vocab": 4000}).items()))


SYSTEMS = sorted({point.system for point in points()})


def test_each_published_point_quotes_its_source() -> None:
    for entry in published.entries():
        assert re.search(r"https?://|arXiv \d{4}\.\d{5}|arXiv:|github\.com/", entry["source"]), entry["source"]
        assert entry["quote"].strip()


def test_points_that_cannot_be_replayed_print_a_reason() -> None:
    left = [entry for entry in published.entries() if why_not(entry)]
    assert len(left) + len(points()) == len(published.entries())
    assert sum(int(line.split(" ")[0]) for line in published.left_out()) == len(left)
    assert len(points()) >= 40


def test_a_third_of_the_points_is_held_out_by_hash() -> None:
    chosen, out = points(), stays_out(points())
    assert 0.3 < sum(out) / len(out) < 0.35
    per_system = Counter(point.system for point, left in zip(chosen, out, strict=True) if left)
    assert sum(count > 0 for count in per_system.values()) >= len(SYSTEMS) - 1  # but for a system of one point
    assert stays_out(points()) == out


def test_every_machine_is_one_of_the_library() -> None:
    assert all(machine(name) for name in published.MACHINES.values())


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(name, marks=() if name in ("MegaTrain", "llmq", "ml_dataflow") else pytest.mark.slow)
        for name in SYSTEMS
    ],
)
def test_a_replay_takes_time_and_more_of_it_on_a_less_efficient_machine(system: str) -> None:
    replayed = Replayed(small(system))
    seconds = replayed.seconds(BEFORE)
    assert seconds > 0
    kernels = replayed.way.kernels
    worse = {"products": 0.5, kernels: 4.0, **({"host": 0.01} if replayed.way.host_nbytes else {})}
    for name, value in worse.items():
        assert replayed.seconds(replace(BEFORE, **{name: value})) > seconds
    other = "eager" if kernels == "fused" else "fused"
    assert replayed.seconds(replace(BEFORE, **{other: 9.0})) == seconds
    longer = replace(replayed.point, sequences=2 * replayed.point.sequences)
    assert seconds < Replayed(longer).seconds(BEFORE) < 2.2 * seconds


def test_recomputation_is_read_from_the_systems_own_columns() -> None:
    eights = [point for point in points() if (point.system, point.model) == ("ml_dataflow", "Llama-3 8B dimensions")]
    shares = [(way(point).again, point.comment) for point in eights]
    assert all(-0.01 < again < 0.9 for again, _ in shares)
    none = [again for again, comment in shares if "(0 input only, 0 input+attention" in comment]
    assert none == pytest.approx([0.0] * len(none), abs=0.01)
    assert min(again for again, comment in shares if "29 input only" in comment) > 0.5


def test_the_fit_recovers_the_efficiencies_of_synthetic_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Efficiencies(0.9, 0.8, 3.0, 0.2)
    replays = [Replayed(small(system)) for system in SYSTEMS]
    seconds = {id(each.point): each.seconds(true) for each in replays}
    monkeypatch.setattr(Point, "seconds", property(lambda point: seconds[id(point)]))
    fitted = published.fit(replays)
    assert fitted.products == pytest.approx(true.products, rel=0.05)
    for each in replays:
        assert each.seconds(fitted) == pytest.approx(seconds[id(each.point)], rel=0.01)


@pytest.mark.slow  # builds and replays all points: half a minute
def test_planner_constants_equal_the_fit() -> None:
    efficiencies = found().efficiencies
    assert efficiencies.eager == pytest.approx(ELEMENTWISE_PASSES, abs=0.1)
    assert efficiencies.products == pytest.approx(1, abs=0.03)  # so that the library's rates need no share
    assert found().range(False) == pytest.approx(MEASURED_OVER_PLANNED, abs=0.01)
    for field in fields(Efficiencies):
        assert getattr(LEAST, field.name) <= getattr(efficiencies, field.name) <= getattr(MOST, field.name)


@pytest.mark.slow
def test_held_out_points_have_similar_errors_to_fitted_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = (sorted(found().errors(in_fit)) for in_fit in (True, False))
    assert inside[len(inside) // 2] < 0.06
    assert outside[len(outside) // 2] < 0.08
    assert max(*inside, *outside) < 0.3
    monkeypatch.setattr(published, "compare", lambda points: found())
    assert published.main(["--json", str(tmp_path / "found.json")]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    assert len(content["rows"]) == len(points())
    assert all(row["source"] for row in content["rows"])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.endswith((" in |", " out |"))]) == len(points())
