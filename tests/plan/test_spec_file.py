"""A saved plan brings its model along, and a file that does not is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.shapes import llama_shape
from megatrain.errors import ModelError
from megatrain.plan import read_model
from megatrain.spec import LayerProfile, ModelSpec, ParamSpec, UnitSpec
from megatrain.spec.layer_profile import Growth, Outputs, Peak

NAMES = st.text(min_size=1, max_size=5)
COUNTS = st.integers(1, 10_000)
PARAMS = st.builds(
    ParamSpec, NAMES, st.lists(COUNTS, min_size=1, max_size=3).map(tuple), st.floats(0.01, 1.0), st.booleans()
)
AMOUNTS = st.floats(0, 1e6)
GROWTHS = st.builds(Growth, AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, st.booleans())
PEAKS = st.builds(lambda *growths: Peak(growths, growths[1:]), GROWTHS, GROWTHS)
OUTPUTS = st.builds(Outputs, AMOUNTS, AMOUNTS, AMOUNTS, PEAKS, PEAKS, st.floats(0, 1), st.floats(0, 1))
PLAIN = st.builds(
    LayerProfile, AMOUNTS, st.none() | COUNTS, backward=PEAKS, graph_in_chunks=st.none() | GROWTHS, outputs=OUTPUTS
)
PROFILES = st.builds(
    lambda plain, masked, several: replace(
        plain, others=(("masked", replace(masked, others=(("several", several),))), ("several", several))
    ),
    *(PLAIN, PLAIN, PLAIN),
)


def units(kind: str) -> st.SearchStrategy[UnitSpec]:
    params = st.lists(PARAMS, max_size=2).map(tuple)
    return st.builds(UnitSpec, NAMES, st.just(kind), params, st.lists(NAMES, max_size=1).map(tuple), PROFILES)


MODELS = st.builds(
    lambda prologue, layers, epilogue, *rest: ModelSpec("name", (prologue, *layers, epilogue), *rest),
    units("prologue"),
    st.lists(units("layer"), min_size=1, max_size=2),
    units("epilogue"),
    COUNTS,
    COUNTS,
    st.none() | COUNTS,
    NAMES,
)


@given(MODELS)
def test_saved_model_specs_round_trip(model: ModelSpec) -> None:
    assert read_model(json.loads(json.dumps({"model": asdict(model)})), "here") == model


def test_what_former_versions_wrote_of_units_is_read() -> None:
    model = llama_shape("small", 2, 64, vocabulary=100)
    content = asdict(model)
    for unit in content["units"]:
        unit["looks_up"] = unit["kind"] == "prologue"
    assert read_model({"model": content}, "here") == model


def changed(path: str, value: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"model": json.loads(json.dumps(asdict(llama_shape("x", 2, 64, vocabulary=10))))}
    place: Any = content
    *parents, last = path.split(".")
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    key: Any = int(last) if last.isdigit() else last
    if value is None:
        del place[key]
    else:
        place[key] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("model.units", None, "lacks 'units'"),
        ("model.units", [], "units must be a prologue"),
        ("model.name", 3, "model.name: 3 is not valid; use a text"),
        ("model.hidden_size", -4, "hidden_size: -4 is not valid"),
        ("model.units.1.params.0.shape", [10**13], "shape.0.: 10000000000000 is not valid"),
        ("model.units.1.params.0.active", 2.0, r"active: 2.0 is not valid"),
        ("model.units.1.profile.graph.per_token", float("nan"), "graph.per_token: nan is not valid"),
        ("model.units.1.kind", "laier", "kind: 'laier' is not valid"),
        ("model.units.1", 7, "'int' object"),
        ("model.units.1.params", 7, "params: 7 is not valid; use a tuple, each a ParamSpec"),
        ("model.units.1.params.0.shape", None, "is not valid; use a ParamSpec with shape"),
    ],
)
def test_invalid_model_specs_are_refused_in_one_line(path: str, value: Any, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        read_model(changed(path, value), "plan.json")
    assert str(caught.value).startswith("plan.json: is not a valid model specification")
    assert "\n" not in str(caught.value)
