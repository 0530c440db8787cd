"""The rules of the house (docs/design.md, "The house") as tables and checks over the source text.

A check takes a `House`, which is any folder laid out like this repository, and yields its complaints, one
line each; so a test can hand it a small bad house and see it complain. Only the syntax tree is read: nothing
of the package is imported here. Left out: what ruff says already (`__all__` is sorted, RUF022) and what mypy
says (an imported name exists).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

PACKAGE = "megatrain"

# From the ground up. A module may import what is below its floor, and its own room.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "formatting", "version"),
    ("spec", "system"),
    ("schedule", "device", "optim", "model", "data", "dist"),
    ("memory", "plan", "config"),
    ("engine", "checkpoint"),
    ("train", "losses"),
    ("run", "hf"),
    ("commands",),
    ("testing", "__init__"),
    ("cli",),
    ("__main__",),
)
TORCH_FREE = ("errors", "formatting", "version", "spec", "system", "schedule", "plan", "optim")

# Foreign name -> the rooms or modules that may use it, and why there.
HOMES: dict[str, tuple[tuple[str, ...], str]] = {
    "transformers": (("model", "data.tokenizer", "hf"), "its classes change; three places to mend"),
    "peft": (("model.adapters",), "an option that nothing else may need"),
    "trl": (("data.chat",), "its templates for training; an option that nothing else may need"),
    "tokenizers": (("data",), "text becomes ids there"),
    "PIL": (("data.images",), "images are read there"),
    "torch.cuda": (("device.cuda",), "everything else talks to the device protocol"),
    "torch.distributed": (("dist",), "one rank must not need it"),
    "os.environ": (("system.environment",), "what steers a run is in its config file"),
    "os.getenv": (("system.environment",), "what steers a run is in its config file"),
    "numba": (("optim",), "the one arithmetic on the host that must run at memory bandwidth"),
    "triton": (
        ("train.device_adamw_triton", "engine.fused_triton"),
        "one kernel for an update on a GPU, and one for each fused function",
    ),
    "yaml": (("config",), "the user's file ends there; beyond it are typed values"),
    "pydantic": (("config",), "the user's file ends there; beyond it are typed values"),
    "typer": (("cli",), "arguments end there"),
    "rich": (("cli", "commands", "run", "train.progress"), "the terminal: tables, a line"),
    "tensorboard": (("train",), "metrics leave there"),
    "torch.utils.tensorboard": (("train",), "metrics leave there"),
    "wandb": (("train.metrics",), "metrics leave there, where the user asks for it"),
    "lm_eval": (("run.lm_eval_tasks",), "the harness asks the model there, where the user wants it"),
    "trackio": (("train.metrics",), "metrics leave there, where the user asks for it"),
    "safetensors": (("model", "checkpoint"), "weights come in and go out"),
    "psutil": (("plan.host_resources", "memory"), "what this machine has, and how much of it is free"),
}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ROOTS = ("__init__", "__main__", "cli", "hf", "testing")  # what a user can start; all else must be imported from there
# Folders under tests/ that test no one room.
TESTS_WITHOUT_ROOM = ("arch", "bench", "docs", "gpu", "integration", "standin_cuda", "stock")
EXPAND_HOME = (
    "system.paths",
    "config.keys",
    "run.this_machine",
    "train.parity",
    "plan.measured_models",
)  # keys that were checked, and folders of our own
VAGUE_NAMES = ("utils", "util", "common", "core", "helpers", "misc")
MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 800  # a file is a concept: it is split for one, never for a line count
MAX_METHODS = 20
LARGE_CLASSES = {"train.engine.Engine": 25}
"""Methods of the classes that are larger. A class leaves the table as it shrinks, and none comes in."""
MAX_PARAMETERS = 7
WIDE_FUNCTIONS = {"train.device_adamw_triton._adamw": 19}
"""Parameters of the functions that have more. As above."""
COMMAND_LINES = ("cli",)  # where a function's parameters are the options of a command
FILLER_LINES = 2
FILLER_NAMES = ("found", "each", "there", "own", "how", "again", "way", "sides", "taken")


@dataclass(frozen=True)
class Import:
    """One imported name, dotted."""

    name: str  # "a.b.c" for `from a.b import c`
    alias: str  # the local name that it binds
    bound: str  # what that local name stands for: "a" for `import a.b`
    line: int
    when: Literal["load", "call", "typing"]  # as the module loads, in a call, or for the type checker only


@dataclass(frozen=True)
class Module:
    """One source file and its syntax tree."""

    name: str  # dotted, from below the package on: "plan.search", "plan", "__init__"
    path: Path  # relative to the root of the house
    text: str
    is_package: bool

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        return self.name.split(".")[0]

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, self, "load"))

    @cached_property
    def public(self) -> list[str] | None:
        """The names in `__all__`, or None where there is none."""
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                return [str(item.value) for item in ast.walk(node) if isinstance(item, ast.Constant)]
        return None

    @cached_property
    def uses(self) -> list[tuple[str, int]]:
        """Every dotted name imported, or reached through an imported name, with its line."""
        bound = {item.alias: item.bound for item in self.imports}
        found = [(item.name, item.line) for item in self.imports]
        for node in self.nodes:
            parts: list[str] = []
            inner: ast.expr | None = node if isinstance(node, ast.Attribute) else None
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in bound:
                found.append((".".join([bound[inner.id], *reversed(parts)]), inner.lineno))
        return found


def _imports(node: ast.AST, module: Module, when: Literal["load", "call", "typing"]) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for item in child.names:
                bound = item.name if item.asname else item.name.split(".")[0]
                yield Import(item.name, item.asname or bound, bound, child.lineno, when)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module)
            for item in child.names:
                name = f"{base}.{item.name}"
                yield Import(name, item.asname or item.name, name, child.lineno, when)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _imports(ast.Module(child.body, []), module, "typing")
            yield from _imports(ast.Module(child.orelse, []), module, when)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
            if child.args and isinstance(child.args[0], ast.Constant):
                yield Import(str(child.args[0].value), "", "", child.lineno, when)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, module, "call" if inside and when == "load" else when)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    """The dotted name that a `from` import starts at, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    here = [PACKAGE, *(module.name.split(".") if module.name != "__init__" else [])]
    up = node.level - 1 if module.is_package else node.level
    return ".".join([*here[: len(here) - up], *([node.module] if node.module else [])])


@dataclass(frozen=True)
class House:
    """A folder laid out like this repository: the package, the tests, the README."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Module]:
        found = {}
        for path in sorted((self.root / PACKAGE).rglob("*.py")):
            parts = path.relative_to(self.root / PACKAGE).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package and len(parts) > 1 else parts)
            found[name] = Module(name, path.relative_to(self.root), path.read_text(), is_package)
        return found

    def module_of(self, dotted: str) -> Module | None:
        """The module that a dotted name lies in: its longest prefix that is a file of the package."""
        first, *rest = dotted.split(".")
        if first != PACKAGE:
            return None
        for size in range(len(rest), 0, -1):
            if module := self.modules.get(".".join(rest[:size])):
                return module
        return self.modules.get("__init__")


@cache
def this_house() -> House:
    """The repository that this file is in; its sources are parsed once for all tests."""
    return House(Path(__file__).parents[2])


def _floor(room: str) -> int | None:
    return next((level for level, rooms in enumerate(FLOORS) if room in rooms), None)


def _is_within(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(home + ".") for home in homes)


def imports_point_down(house: House) -> Iterator[str]:
    for module in house.modules.values():
        floor = _floor(module.room)
        if floor is None:
            yield f"{module.path}: the room {module.room!r} is on no floor"
            continue
        for item in module.imports:
            target = house.module_of(item.name)
            level = _floor(target.room) if target else None
            if target is None or level is None or level < floor or target.room == module.room:
                continue
            yield f"{module.path}:{item.line}: floor {floor} imports {target.name} of floor {level}"


def imports_make_no_circle(house: House) -> Iterator[str]:
    """Imports for the type checker and inside functions count, too. That a submodule loads its packages first does not,
    nor that the public names at the package's front door are loaded on first use."""
    graph: dict[str, set[str]] = {}
    for module in house.modules.values():
        targets = [house.module_of(item.name) for item in module.imports]
        graph[module.name] = {target.name for target in targets if target and target is not module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "circle: " + " <- ".join(error.args[1])


def torch_free_rooms_reach_no_torch(house: House) -> Iterator[str]:
    for module in house.modules.values():
        if module.room not in TORCH_FREE:
            continue
        for item in module.imports:
            target = house.module_of(item.name)
            if _is_within(item.name, ("torch",)) or (target and target.room not in TORCH_FREE):
                yield f"{module.path}:{item.line}: torch-free, but imports {item.name}"


def foreign_libraries_stay_home(house: House) -> Iterator[str]:
    for module in house.modules.values():
        for library, (homes, reason) in HOMES.items():
            if _is_within(module.name, homes):
                continue
            for line in sorted({line for used, line in module.uses if _is_within(used, (library,))}):
                yield f"{module.path}:{line}: {library} belongs in {' or '.join(homes)} ({reason})"


def every_module_is_reachable(house: House) -> Iterator[str]:
    reached: set[str] = set()
    waiting = [name for name in ROOTS if name in house.modules]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        parent = name.rpartition(".")[0]  # importing a submodule loads its package
        waiting += [parent] if parent in house.modules else []
        targets = [house.module_of(item.name) for item in house.modules[name].imports]
        waiting += [target.name for target in targets if target]
    for name in sorted(house.modules.keys() - reached):
        yield f"{house.modules[name].path}: nothing that a user can start imports it"


def every_test_folder_has_a_room(house: House) -> Iterator[str]:
    rooms = {module.room for module in house.modules.values()}
    for path in sorted((house.root / "tests").iterdir()):
        if path.is_dir() and path.name != "__pycache__" and path.name not in {*rooms, *TESTS_WITHOUT_ROOM}:
            yield f"tests/{path.name}: {PACKAGE} has no room of that name"


def public_names_are_declared(house: House) -> Iterator[str]:
    """A package that re-exports says what in `__all__`; every name in an `__all__` is bound in its file."""
    for module in house.modules.values():
        exports = [item for item in module.imports if item.when != "call" and house.module_of(item.name)]
        if module.public is None:
            if module.is_package and exports:
                yield f"{module.path}: re-exports names without an __all__"
            continue
        bound = {item.alias for item in module.imports if item.when != "call"} | _top_level_names(module.tree)
        for name in module.public:
            if name not in bound and f"{module.name}.{name}" not in house.modules:
                yield f"{module.path}: __all__ names {name!r}, which the file does not bind"


def _top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        else:
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            names |= {item.id for item in stored}
    return names


def modules_are_named_for_what_they_do(house: House) -> Iterator[str]:
    for module in house.modules.values():
        if vague := set(module.name.split(".")) & set(VAGUE_NAMES):
            yield f"{module.path}: {vague.pop()!r} says nothing"


def modules_open_with_a_docstring(house: House) -> Iterator[str]:
    for module in house.modules.values():
        if not ast.get_docstring(module.tree):
            yield f"{module.path}: no docstring"


def files_and_functions_are_short(house: House) -> Iterator[str]:
    for module in house.modules.values():
        if (nlines := module.text.count("\n")) > MAX_FILE_LINES:
            yield f"{module.path}: {nlines} lines, {MAX_FILE_LINES} at most"
        for node in module.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                nlines = (node.end_lineno or node.lineno) - node.lineno + 1
                if nlines > MAX_FUNCTION_LINES:
                    where = f"{module.path}:{node.lineno}"
                    yield f"{where}: {node.name} has {nlines} lines, {MAX_FUNCTION_LINES} at most"


def classes_are_small(house: House) -> Iterator[str]:
    yield from _within_limits("methods", methods_of(house), MAX_METHODS, LARGE_CLASSES)


def functions_take_few_parameters(house: House) -> Iterator[str]:
    yield from _within_limits("parameters", parameters_of(house), MAX_PARAMETERS, WIDE_FUNCTIONS)


def _within_limits(what: str, counts: dict[str, int], usual: int, larger: dict[str, int]) -> Iterator[str]:
    for name, count in counts.items():
        most = larger.get(name, usual)
        if count > most:
            yield f"{name} has {count} {what}, {most} at most"
        elif name in larger and count < most:
            yield f"{name} has {count} {what} and may have {most}: correct the table, or take it out"


@cache
def methods_of(house: House) -> dict[str, int]:
    """Dotted name of each class -> its methods, with properties."""
    return {
        f"{module.name}.{node.name}": sum(isinstance(item, FUNCTIONS) for item in node.body)
        for module in house.modules.values()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }


@cache
def parameters_of(house: House) -> dict[str, int]:
    """Dotted name of each function -> its parameters, without `self`. Not of those that are a command line."""
    counts: dict[str, int] = {}
    for module in house.modules.values():
        for name, node in _functions(module.tree, module.name) if module.name not in COMMAND_LINES else ():
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            names += [argument.arg for argument in (node.args.vararg, node.args.kwarg) if argument]
            counts[name] = max(counts.get(name, 0), len(names) - (names[:1] in (["self"], ["cls"])))
    return counts


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}.{node.name}" if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else prefix
        if isinstance(node, FUNCTIONS):
            yield name, node
        yield from _functions(node, name)


def filler_names_live_briefly(house: House) -> Iterator[str]:
    """A name that says nothing is read beside what it stands for, or not at all."""
    for module in house.modules.values():
        for line, name, lines in sorted(set(_long_lived(module.tree))):
            yield f"{module.path}:{line}: {name} lives {lines} lines long; name it for what it holds"


def _long_lived(tree: ast.AST) -> list[tuple[int, str, int]]:
    """(line, name, lines) of each of `FILLER_NAMES` that is used more than two lines below where it is bound."""
    lived: list[tuple[int, str, int]] = []

    def uses_from_outside(scope: ast.AST) -> dict[str, list[int]]:
        bound, used = dict[str, list[int]](), dict[str, list[int]]()

        def look(node: ast.AST) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, SCOPES):
                    for name, lines in uses_from_outside(child).items():
                        used.setdefault(name, []).extend(lines)
                    continue
                if isinstance(child, ast.Name) and child.id in FILLER_NAMES:
                    of = bound if isinstance(child.ctx, ast.Store) else used
                    of.setdefault(child.id, []).append(child.lineno)
                elif isinstance(child, ast.arg) and child.arg in FILLER_NAMES:
                    bound.setdefault(child.arg, []).append(child.lineno)
                look(child)

        look(scope)
        for name in bound.keys() & used.keys():
            if (lines := max(used[name]) - min(bound[name])) > FILLER_LINES:
                lived.append((min(bound[name]), name, lines))
        return {name: lines for name, lines in used.items() if name not in bound}

    uses_from_outside(tree)
    return lived


def paths_of_users_become_paths_in_one_place(house: House) -> Iterator[str]:
    """`~` is what only a user writes, so whoever expands it has a user's text in hand."""
    for module in house.modules.values():
        if module.name in EXPAND_HOME:
            continue
        for number, line in enumerate(module.text.splitlines(), start=1):
            if "expanduser(" in line:
                yield f"{module.path}:{number}: a user's path becomes one by system.paths.usable_path"


def the_tree_of_rooms_is_whole(house: House) -> Iterator[str]:
    """CONTRIBUTING.md draws the package as its rooms, one line each; the files' first lines say the rest."""
    page = house.root / "CONTRIBUTING.md"
    if not page.exists():
        return
    named = _drawn_rooms(page.read_text())
    rooms = {
        path.name + "/" if path.is_dir() else path.name
        for path in (house.root / PACKAGE).iterdir()
        if path.name not in ("__pycache__", "__init__.py")
    }
    for name in sorted(rooms - set(named)):
        yield f"CONTRIBUTING.md: the tree lacks {name}"
    for name in sorted(set(named)):
        if named.count(name) > 1:
            yield f"CONTRIBUTING.md: the tree names {name} twice"
        if name not in rooms:
            yield f"CONTRIBUTING.md: {name} does not exist"


def _drawn_rooms(text: str) -> list[str]:
    """The first words of the lines below `megatrain/` in the fenced block that draws the package."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    block = next((b for b in blocks if b.startswith(f"{PACKAGE}/")), "")
    return [line.split()[0] for line in block.splitlines()[1:] if line.strip()]


CHECKS = (
    imports_point_down,
    imports_make_no_circle,
    torch_free_rooms_reach_no_torch,
    foreign_libraries_stay_home,
    every_module_is_reachable,
    every_test_folder_has_a_room,
    public_names_are_declared,
    modules_are_named_for_what_they_do,
    modules_open_with_a_docstring,
    files_and_functions_are_short,
    classes_are_small,
    functions_take_few_parameters,
    filler_names_live_briefly,
    paths_of_users_become_paths_in_one_place,
    the_tree_of_rooms_is_whole,
)
