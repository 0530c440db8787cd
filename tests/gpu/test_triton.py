"""The optimizer pass of units on the device, as Triton's kernels: run by its interpreter, and compiled for a GPU."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from megatrain.train import device_adamw

pytest.importorskip("triton", reason="needs Triton: make test-cuda")
pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
FACTORS = ("keep", "step_size", "root_scale", "eps", "share", "b2", "rest2", "grad_scale")

INTERPRETED = """
import sys
from types import SimpleNamespace
import torch
from megatrain.optim import AdamW
from megatrain.train import device_adamw, device_adamw_triton

wrong = sys.argv[1]

def adamw(state, gradient, scalars, flag, *, decays):
    if wrong == "beta":
        scalars = AdamW(betas=(0.3, 0.99), weight_decay=0.1).scalars(lr=1e-2, step=3, grad_scale=0.7)
    if wrong == "flag":
        flag = None
    device_adamw_triton.adamw(state, gradient, scalars, flag, decays=decays)

def squares(gradient):
    return device_adamw_triton.sum_of_squares(gradient[:-1] if wrong == "squares" else gradient)

torch.set_default_dtype(torch.bfloat16)  # a user's own, which counts for nothing here
print(device_adamw.agrees(SimpleNamespace(adamw=adamw, sum_of_squares=squares), torch.device("cpu")))
"""


@pytest.mark.parametrize("wrong", ["nothing", "beta", "flag", "squares"])
def test_triton_kernels_match_eager_bits_and_mutants_are_detected(wrong: str) -> None:
    """By Triton's interpreter, for which a process of its own must be told before it imports Triton."""
    steps = [sys.executable, "-W", "ignore", "-c", INTERPRETED, wrong]
    done = subprocess.run(steps, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout.strip() == str(wrong == "nothing"), done.stderr


@pytest.fixture
def nothing_known() -> Iterator[None]:
    device_adamw._kernels.cache_clear()
    yield
    device_adamw._kernels.cache_clear()


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("numel", ["i32", "i64"])
@pytest.mark.parametrize("split", [True, False], ids=["bf16", "fp32"])
def test_compiled_kernels_use_no_fma_or_approximation(capability: int, numel: str, split: bool) -> None:
    """Triton compiles for a GPU that is not there: in its assembly each operation rounds once, to nearest."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megatrain.train.device_adamw_triton import _adamw as kernel

    types = {name: "*u16" if split else "*fp32" for name in ("hi", "low")}
    types |= {"m": "*fp32", "v": "*fp32", "flag": "*u8", "numel": numel} | dict.fromkeys(FACTORS, "fp32")
    for near, gradient in product((True, False), ("*u16", "*fp32")):
        constants = {"NEAR": near, "SPLIT": split, "CHECKED": split, "BLOCK": 1024}
        signature = {name: {**types, "gradient": gradient}.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        nothing_is_approximate(made.asm["ptx"])


def nothing_is_approximate(code: str) -> None:
    floating = set(re.findall(r"\b(\w+(?:\.\w+)*\.f32)\b", code)) - {"ld.global.f32", "st.global.f32", "mov.f32"}
    assert {"div.rn.f32", "sqrt.rn.f32"} <= floating
    assert all(".rn" in each or each.startswith(("add", "sub")) for each in floating), floating
    assert "fma" not in code


def test_a_triton_failure_falls_back_to_eager_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nothing_known: None
) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(device_adamw, "agrees", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        assert device_adamw._kernels(GPU) is None
    assert "AdamW on cuda:0 uses single torch operations: Triton failed (ZeroDivisionError" in caplog.text


@pytest.mark.silicon
def test_triton_kernels_are_used_on_a_real_gpu(nothing_known: None) -> None:
    assert device_adamw._kernels(GPU) is not None
