"""The plots and tables of docs/benchmarks/planning.md: well-formed, from the planner, and filled into that page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import product
from pathlib import Path

import pytest
import torch

from bench import scaling
from bench.plots import Axis, Line, linear, plot
from bench.shapes import llama_shape
from megatrain.model import port_model
from megatrain.model.architecture import read_config
from megatrain.model.skeleton import blueprint
from megatrain.schedule.passes.workspace import answered_nbytes, backward_nbytes
from megatrain.spec import Numerics, Policy, Work

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
SVG = "{http://www.w3.org/2000/svg}"


def test_a_shape_on_paper_is_that_of_the_real_model() -> None:
    fields = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 320,
    }
    config = read_config(fields, where="test")
    real = port_model(blueprint(config), torch.bfloat16).spec
    paper = llama_shape("paper", 2, 512, vocabulary=320, key_value_heads=1)
    assert [unit.numel for unit in paper.units] == [unit.numel for unit in real.units]
    assert {(p.name, p.shape) for u in paper.units for p in u.params} == {
        (p.name, p.shape) for u in real.units for p in u.params
    }
    profile = real.units[1].profile
    assert paper.units[1].profile.attention_flops == profile.attention_flops
    for tokens, chunk in ((1000, 0), (10_000, 0), (10_000, 500)):
        assert paper.units[1].profile.kept(1, tokens, chunk) == pytest.approx(profile.kept(1, tokens, chunk), rel=0.02)
        numerics, work = Numerics(mlp_chunk_tokens=chunk), Work((tokens,))
        said, measured = (backward_nbytes(model, numerics, Policy(), work, 1, tokens) for model in (paper, real))
        kept = profile.kept(1, tokens, chunk)
        assert kept + measured <= 1.002 * (kept + said) <= 1.04 * (kept + measured)
    assert profile.chunk_numel == paper.units[1].profile.chunk_numel
    for field in ("chosen_nbytes", "shared_nbytes", "attention_nbytes", "chosen_share", "spared_share"):
        assert getattr(paper.units[1].profile.outputs, field) == pytest.approx(getattr(profile.outputs, field)), field
    for tokens, keep in product((1000, 10_000), ("offload_chosen", "offload_attention")):
        work = Work((tokens,))
        said, measured = (answered_nbytes(each, Numerics(), Policy(), work, 1, tokens, keep) for each in (paper, real))  # type: ignore[arg-type]
        assert said == pytest.approx(measured, rel=0.05), keep


def test_a_plot_places_its_points() -> None:
    across = Axis("x", [1.0, 10.0, 100.0], log=True)
    text = plot("a < b", across, linear("y", 9.3), [Line("one", [(1.0, 0.0), (10.0, 5.0), (100.0, 10.0)], mark=10.0)])
    drawn = ElementTree.fromstring(text)
    circles = [(float(each.get("cx", 0)), float(each.get("cy", 0))) for each in drawn.iter(f"{SVG}circle")]
    left, middle, right = circles
    assert middle == pytest.approx(((left[0] + right[0]) / 2, (left[1] + right[1]) / 2))
    assert left[1] > right[1]  # up is up
    words = [each.text for each in drawn.iter(f"{SVG}text")]
    assert words[0] == "a < b"
    assert {"x", "y", "one", "1", "100", "0", "10"} <= set(words)
    assert sum(each.get("stroke-dasharray") is not None for each in drawn.iter(f"{SVG}line")) == 1


@pytest.mark.parametrize(("most", "ticks"), [(9.3, 6), (0.7, 5), (150, 4), (1, 6)])
def test_a_linear_axis_ends_on_a_round_number(most: float, ticks: int) -> None:
    axis = linear("y", most)
    assert axis.ticks[0] == 0
    assert most <= axis.ticks[-1] < 1.5 * most
    assert len(axis.ticks) == ticks


def test_a_step_is_linear_in_depth_and_only_inputs_of_layers_grow() -> None:
    plots = scaling.depth([8, 16, 24])
    for name, text in plots.items():
        lines = [each.get("points", "").split() for each in ElementTree.fromstring(text).iter(f"{SVG}polyline")]
        points = [[tuple(map(float, spot.split(","))) for spot in line] for line in lines]
        for first, second, third in points:
            assert second[1] == pytest.approx((first[1] + third[1]) / 2, abs=1.0), name
        if name == "depth-memory":
            assert points[0][0][1] > points[0][2][1] + 20
            assert points[1][0][1] == pytest.approx(points[1][2][1], abs=0.2)


def test_the_knee_of_the_formula_is_found_by_replay() -> None:
    for row in scaling.knees(["h200", "laptop"])[2:]:
        formula, found = (int(cell.strip().replace(",", "")) for cell in row.split("|")[4:6])
        assert 0.8 * formula < found < 1.05 * formula


def test_tables_go_between_their_marks() -> None:
    text = "a\n<!-- bench.scaling: knees -->\nold\n<!-- end -->\nb\n"
    once = scaling.filled(text, {"knees": ["| new |"]})
    assert once == "a\n<!-- bench.scaling: knees -->\n| new |\n<!-- end -->\nb\n"
    assert scaling.filled(once, {"knees": ["| new |"]}) == once
    with pytest.raises(KeyError):
        scaling.filled(text, {})


def test_the_example_has_a_limit_and_an_upgrade_of_each_machine() -> None:
    _, _, *rows = scaling.example()
    assert [row.split(" | ")[0] for row in rows] == ["| laptop", "| rtx-4090", "| h200"]


def test_the_page_has_every_table_and_every_plot() -> None:
    page = (DOCS / "planning.md").read_text()
    tables = re.findall(r"<!-- bench\.scaling: (\w+) -->\n\|.*?\n<!-- end -->", page, flags=re.DOTALL)
    assert sorted(tables) == ["example", "knees", "plans", "published", "sizes"]
    shown = re.findall(r"\(plots/([\w-]+\.svg)\)", page)
    assert sorted(shown) == sorted(each.name for each in (DOCS / "plots").iterdir())
    for name in shown:
        ElementTree.parse(DOCS / "plots" / name)
