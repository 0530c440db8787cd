"""The tour of the code names files and functions that exist."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "contributing" / "tour.md").read_text()
FILES = (".json", ".yaml", ".md", ".safetensors", ".py")
SPANS = sorted(set(re.findall(r"`([^`\n]+)`", TOUR)))
NAMES = [each for each in SPANS if re.fullmatch(r"[a-z_]\w*(\.[A-Za-z_]\w*)+", each) and not each.endswith(FILES)]
PATHS = [each for each in SPANS if each.startswith(("megatrain/", "tests/", "docs/"))]
OF_A_MODEL = ("model.layers.0.mlp.up_proj.weight", "nn.Linear")  # names in the user's model, and the library's own


def found(name: str) -> object:
    """What a dotted name stands for: below `megatrain`, else of a library. Raises `AttributeError`."""
    first, *_ = name.split(".")
    parts = name.split(".") if first in ("torch", "transformers") else ["megatrain", *name.split(".")]
    length = len(parts)
    while find_spec_of(".".join(parts[:length])) is None:
        length -= 1
    thing: object = import_module(".".join(parts[:length]))
    for part in parts[length:]:
        thing = getattr(thing, part)
    return thing


def find_spec_of(module: str) -> object:
    try:
        return find_spec(module)
    except ModuleNotFoundError:  # its parent is no package
        return None


def test_the_tour_names_enough_code() -> None:
    assert len(NAMES) > 40
    assert len(PATHS) > 4


@pytest.mark.parametrize("name", [each for each in NAMES if each not in OF_A_MODEL])
def test_names_in_the_tour_exist(name: str) -> None:
    found(name)


@pytest.mark.parametrize("path", PATHS)
def test_files_in_the_tour_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", ["engine.streamer.Streamer._gone", "engine.gone.Streamer"])
def test_removed_names_are_noticed(name: str) -> None:
    with pytest.raises(AttributeError):
        found(name)


def test_ops_in_the_tour_match_a_real_step() -> None:
    from bench.shapes import llama_shape
    from megatrain.schedule import build_step, show_schedule
    from megatrain.spec import Numerics, Policy, Work

    model = llama_shape("two layers", 2, 256, vocabulary=512)
    lines = show_schedule(build_step(model, Numerics(), Policy(shard_nbytes=1 << 20), Work((64,)), "all")).splitlines()
    shown = re.search(r"```text\n(.*?)```", TOUR, re.DOTALL)
    assert shown is not None
    for line in shown[1].splitlines():
        number, stream, kind, *rest = line.split()
        there = lines[int(number)].split()
        assert there[:3] == [number, stream, kind], line
        buffers = re.findall(r"(?:host|device)/[\w/.]+", " ".join(rest))
        assert all(each in lines[int(number)] for each in buffers), line
        if waits := re.search(r"after (\d+)$", line):
            assert waits[1] in re.split(r"[ ,]", lines[int(number)].rpartition("after ")[2]), line
