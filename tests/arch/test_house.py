"""The house obeys its rules, and each rule can be broken: a small bad house makes its check complain."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.arch import house
from tests.arch.house import CHECKS, FLOORS, HOMES, PACKAGE, House, this_house

Check = Callable[[House], Iterator[str]]
# Check -> houses that break it: the files in the package (path: text), and what the complaint must say.
BAD_HOUSES: dict[Check, list[tuple[dict[str, str], str]]] = {
    house.imports_point_down: [
        ({"spec/layout.py": "from megatrain.train import loop", "train/loop.py": ""}, "imports train.loop of floor 5"),
        ({"plan/cost.py": "from megatrain.memory import pool", "memory/pool.py": ""}, "imports memory.pool"),
        ({"plan/cost.py": "from ..memory.pool import Pool", "memory/pool.py": ""}, "imports memory.pool"),
        (
            {"plan/cost.py": "if TYPE_CHECKING:\n    import megatrain.run.data", "run/data.py": ""},
            "imports run.data of floor 6",
        ),
        ({"optim/lr.py": "def f():\n    import megatrain.data", "data/__init__.py": ""}, "lr.py:2: floor 2"),
        ({"plan/cost.py": "from megatrain import __version__", "__init__.py": ""}, "imports __init__ of floor 8"),
        ({"attic/box.py": ""}, "'attic' is on no floor"),
    ],
    house.imports_make_no_circle: [
        (
            {
                "plan/__init__.py": "from megatrain.plan.cost import price",
                "plan/cost.py": "from megatrain.plan import search",
                "plan/search.py": "from . import cost",
            },
            "plan.cost <- plan.search",
        )
    ],
    house.torch_free_rooms_reach_no_torch: [
        ({"plan/cost.py": "def f():\n    from torch import nn"}, "cost.py:2: torch-free, but imports torch.nn"),
        ({"plan/cost.py": "from megatrain.device import cpu", "device/cpu.py": ""}, "megatrain.device.cpu"),
    ],
    house.foreign_libraries_stay_home: [
        ({"engine/step.py": "import transformers.models as m"}, "step.py:1: transformers belongs in model or"),
        ({"data/pack.py": "from transformers import AutoTokenizer"}, "or data.tokenizer"),
        ({"device/cpu.py": "import torch\ntorch.cuda.synchronize()"}, "cpu.py:2: torch.cuda belongs"),
        ({"device/cpu.py": "from torch import cuda as c"}, "torch.cuda belongs in device.cuda"),
        ({"train/loop.py": "import torch.distributed"}, "torch.distributed belongs in dist"),
        (
            {"train/loop.py": "import os as o\nx = o.environ['HOME']"},
            "loop.py:2: os.environ belongs in system.environment",
        ),
        ({"train/loop.py": "import importlib as i\ni.import_module('yaml')"}, "yaml belongs in config"),
    ],
    house.every_module_is_reachable: [
        (
            {
                "cli.py": "def main():\n    from megatrain.plan import search",
                "plan/__init__.py": "",
                "plan/search.py": "",
                "plan/lost.py": "import megatrain.plan.search",
            },
            "plan/lost.py: nothing that a user can start imports it",
        )
    ],
    house.every_test_folder_has_a_room: [({"../tests/attic/test_box.py": ""}, "tests/attic")],
    house.public_names_are_declared: [
        ({"plan/__init__.py": "from megatrain.plan.cost import price", "plan/cost.py": ""}, "without an __all__"),
        ({"spec.py": "__all__ = ['A', 'B']\nclass A: pass"}, "names 'B'"),
    ],
    house.modules_are_named_for_what_they_do: [({"plan/utils.py": ""}, "'utils' says nothing")],
    house.modules_open_with_a_docstring: [({"spec.py": "import os"}, "spec.py: no docstring")],
    house.files_and_functions_are_short: [
        ({"spec.py": "\n" * 801}, "801 lines, 800 at most"),
        ({"spec.py": "def f():\n" + "    pass\n" * 70}, "f has 71 lines, 70 at most"),
    ],
    house.classes_are_small: [
        (
            {"spec.py": "class C:\n" + "".join(f"    def m{n}(self): pass\n" for n in range(21))},
            "C has 21 methods, 20 at most",
        ),
        ({"train/engine.py": "class Engine: pass"}, "may have 25: correct the table"),
    ],
    house.filler_names_live_briefly: [
        ({"plan/cost.py": "def f(x):\n    found = x\n\n\n    return found"}, "cost.py:2: found lives 3 lines long"),
        ({"plan/cost.py": "def f(own):\n    x = 1\n    x = 2\n    return lambda: own"}, "cost.py:1: own lives"),
    ],
    house.functions_take_few_parameters: [
        (
            {"spec.py": "class C:\n    def f(self, a, b, *c, d, e, f, g, h): pass"},
            "spec.C.f has 8 parameters, 7 at most",
        ),
        ({"spec.py": "def f():\n    def g(a, b, c, d, e, f, g, **h): pass"}, "spec.f.g has 8 parameters"),
    ],
    house.paths_of_users_become_paths_in_one_place: [
        ({"report.py": "path = Path(html).expanduser()"}, "report.py:1: a user's path becomes one by system.")
    ],
    house.the_tree_of_rooms_is_whole: [
        (
            {"../CONTRIBUTING.md": "```\nmegatrain/\n  plan/  prices\n```", "plan/cost.py": "", "data/text.py": ""},
            "lacks data/",
        ),
        ({"../CONTRIBUTING.md": "```\nmegatrain/\n  gone.py  words\n```", "cli.py": ""}, "gone.py does not exist"),
        ({"../CONTRIBUTING.md": "```\nmegatrain/\n  a.py  1\n  a.py  2\n```", "a.py": ""}, "names a.py twice"),
        ({"../CONTRIBUTING.md": "No tree here.\n", "spec/work.py": ""}, "the tree lacks spec/"),
    ],
}


def _build(root: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        path = (root / PACKAGE / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(root)


@pytest.fixture
def our_house() -> House:
    return this_house()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_room_rules_hold_in_this_repository(check: Check, our_house: House) -> None:
    complaints = list(check(our_house))
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(
    ("check", "files", "complaint"),
    [(check, files, complaint) for check, cases in BAD_HOUSES.items() for files, complaint in cases],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_broken_room_rule_is_reported(check: Check, files: dict[str, str], complaint: str, tmp_path: Path) -> None:
    assert complaint in "\n".join(check(_build(tmp_path, files)))


def test_a_good_tree_of_rooms_is_accepted(tmp_path: Path) -> None:
    tree = "megatrain/\n  plan/    prices\n  cli.py   verbs\n"
    files = {"../CONTRIBUTING.md": f"```\n{tree}```\n", "plan/__init__.py": "", "plan/cost.py": "", "cli.py": ""}
    assert not list(house.the_tree_of_rooms_is_whole(_build(tmp_path, files)))


@pytest.mark.parametrize(("library", "home"), [(name, home) for name in HOMES for home in HOMES[name][0]])
def test_a_library_may_be_imported_in_its_own_room(library: str, home: str, tmp_path: Path) -> None:
    outer, _, inner = library.rpartition(".")
    text = f"from {outer} import {inner}" if outer else f"import {library}"
    built = _build(tmp_path, {home.replace(".", "/") + ".py": text})
    assert not list(house.foreign_libraries_stay_home(built))


def test_every_room_check_has_a_failing_example() -> None:
    assert set(BAD_HOUSES) == set(CHECKS)


def test_room_tables_name_existing_rooms() -> None:
    rooms = {room for floor in FLOORS for room in floor}
    assert {home.split(".")[0] for homes, _ in HOMES.values() for home in homes} <= rooms
    assert set(house.TORCH_FREE) <= rooms


def test_the_built_package_includes_all_rooms(our_house: House) -> None:
    assert "errors" in our_house.modules


def test_a_wheel_has_every_file_of_the_package_and_says_that_its_types_count(our_house: House) -> None:
    """setuptools takes Python files by itself, and others where `package-data` names them."""
    described = tomllib.loads((our_house.root / "pyproject.toml").read_text())
    shipped = {
        path
        for package, patterns in described["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (our_house.root / package.replace(".", "/")).glob(pattern)
    }
    others = {
        path
        for path in (our_house.root / "megatrain").rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert others == shipped
    assert our_house.root / "megatrain" / "py.typed" in shipped
    assert described["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "megatrain.version.__version__"}


def test_exceptions_to_limits_are_still_in_the_house(our_house: House) -> None:
    assert house.LARGE_CLASSES.keys() <= house.methods_of(our_house).keys()
    assert house.WIDE_FUNCTIONS.keys() <= house.parameters_of(our_house).keys()
