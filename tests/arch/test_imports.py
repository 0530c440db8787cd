"""What happens when the package is really imported, where it matters in a fresh interpreter.

The syntax tree cannot see a library that imports torch behind our back, nor a lazy export that names nothing.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

from tests.arch.house import PACKAGE, TORCH_FREE, this_house

HERE = Path(__file__).parents[2]
BLOCK_TORCH = "import sys; sys.modules['torch'] = None\n"  # from here on `import torch` is an ImportError
IMPORT_ALL = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"


def _python(code: str, *modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *modules]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=240, check=False)


def _dotted(name: str) -> str:
    return PACKAGE if name == "__init__" else f"{PACKAGE}.{name}"


def test_torch_free_rooms_import_where_torch_is_missing() -> None:
    names = [_dotted(module.name) for module in this_house().modules.values() if module.room in TORCH_FREE]
    done = _python(BLOCK_TORCH + IMPORT_ALL, *names)
    assert done.returncode == 0, done.stderr


def test_blocking_torch_makes_its_import_fail() -> None:
    assert "ModuleNotFoundError" in _python(BLOCK_TORCH + IMPORT_ALL, "torch").stderr


def test_every_public_name_resolves() -> None:
    for module in this_house().modules.values():
        if module.public is not None:
            imported = import_module(_dotted(module.name))
            missing = [public for public in imported.__all__ if not hasattr(imported, public)]
            assert not missing, f"{module.name}.__all__ names {missing}"
