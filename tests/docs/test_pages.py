"""Pages that are generated, and tables that stand in two places."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench import fits
from megatrain.cli import app
from megatrain.config import describe_keys
from megatrain.hf.training_options import OPTIONS
from megatrain.plan import machine_names
from megatrain.spec import Placement

ROOT = Path(__file__).parents[2]
README_NBYTES = 8192


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_NBYTES


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_links_outside_the_site_resolve(document: str) -> None:
    """Those of the site are checked by `make docs`."""
    links = re.findall(r"\]\((?!https?:)([^)\s]*)\)", (ROOT / document).read_text())
    assert not [link for link in links if link[0] != "#" and not (ROOT / link.partition("#")[0]).exists()]


def rows_of(document: str) -> list[list[str]]:
    found = re.search(r"<!-- bench\.fits: machines -->\n(.*?)\n<!-- end -->", (ROOT / document).read_text(), re.DOTALL)
    assert found is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def test_the_what_fits_table_is_the_same_everywhere() -> None:
    head, _, *rows = rows_of("README.md")
    assert rows_of("docs/benchmarks/planning.md") == rows_of("README.md")
    assert head[1:] == list(fits.MACHINES)
    assert [row[0] for row in rows] == list(fits.MODELS)


def test_table_cells_show_speed_and_disk_use() -> None:
    def plan(speed: float, *placements: Placement) -> Any:
        return SimpleNamespace(tokens_per_second=speed, policy=SimpleNamespace(placements=placements))

    assert fits.cell(plan(1234.5, Placement())) == "1,234"
    assert fits.cell(plan(8.25, Placement(), Placement(moments="disk"))) == "8.2 (disk)"
    assert fits.cell(None) == "no"


@pytest.mark.slow
def test_model_sizes_match_their_names() -> None:
    for name in ("Qwen3-1.7B",):
        said = float(name.partition("B")[0].rpartition("-")[2])
        assert fits.model_called(name).numel / 1e9 == pytest.approx(said, rel=0.05)


def test_the_start_page_lists_every_machine() -> None:
    listed = re.search(r"is a described machine \((.*?)\)", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(.+?)`", listed[1])) == set(machine_names())


def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="only the extra `docs` has it")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_list_every_key_and_verb() -> None:
    generated = hooks()
    assert all(f"| `{each.key}` |" in generated.keys_page() for each in describe_keys())
    verbs = [command.name for command in app.registered_commands]
    assert len(verbs) > 5
    assert all(f"## megatrain {verb}\n" in generated.command_line_page() for verb in verbs)
    assert all(f"| `{name}` |" in generated.trainer_page() for name in OPTIONS)
