"""What the compiled loops must be besides right: vectorised, uncontracted, and usable without a cache."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.types import UniTuple

import megatrain
from megatrain.optim import AdamW, kernels

F32, U16, I64 = numba.float32[::1], numba.uint16[::1], numba.int64[::1]
BLOCKS = numba.int64[:, ::1]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 assembly")
@pytest.mark.parametrize(
    "signature",
    [
        (UniTuple(U16, 2), UniTuple(F32, 2), U16, F32, BLOCKS, I64),
        (UniTuple(F32, 1), UniTuple(F32, 2), F32, F32, BLOCKS, I64),
    ],
    ids=["split", "float32"],
)
def test_roots_and_quotients_are_vectorised_and_nothing_is_contracted(signature) -> None:
    fresh = numba.njit(error_model="numpy")(kernels.adamw.py_func)  # what comes from the cache cannot be read
    fresh.compile(signature)
    (assembly,) = fresh.inspect_asm().values()
    packed = set(re.findall(r"\bv?(sqrtps|divps)\b", assembly))
    assert packed == {"sqrtps", "divps"}
    assert not re.findall(r"\bvfn?m(?:add|sub)\w+[ps]s\b", assembly)
    assert not re.findall(r"\bvr(?:sqrt|cp)\w*[ps]s\b", assembly)


def test_warming_up_leaves_nothing_to_compile() -> None:
    AdamW().warm_up()
    for kernel, least in ((kernels.adamw, 4), (kernels.block_sums, 2)):  # bfloat16 and float32 gradients
        assert len({str(signature) for signature in kernel.signatures}) >= least
    assert kernels.split.signatures
    assert kernels.join.signatures


def test_kernels_work_where_no_cache_can_be_written(tmp_path: Path) -> None:
    source = Path(megatrain.__path__[0])
    room = tmp_path / "megatrain" / "optim"
    shutil.copytree(source, tmp_path / "megatrain", ignore=shutil.ignore_patterns("__pycache__"))
    (room / "__pycache__").write_text("a file, so that no folder of this name can be made, by root either")
    script = (
        "import numpy as np, megatrain.optim as optim\n"
        "print(optim.__file__)\n"
        "print(optim.join(*optim.split(np.array([1.2345678], np.float32)))[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "HOME": os.devnull, "XDG_CACHE_HOME": os.devnull, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(room / "__init__.py"), str(np.float32(1.2345678))]
    assert "each process compiles the optimizer kernels again" in done.stderr
