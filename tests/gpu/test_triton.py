"""Triton's kernels, for the optimizer pass and for fused functions: run by its interpreter, and compiled for a GPU."""

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

from megatrain.engine import fused_forms
from megatrain.model.fuse_layers import PAIRS
from megatrain.train import device_update

pytest.importorskip("triton", reason="needs Triton: make test-cuda")
pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
FACTORS = ("keep", "step_size", "root_scale", "eps", "share", "b2", "rest2", "grad_scale")

INTERPRETED = """
import sys
from types import SimpleNamespace
import torch
from megatrain.optim import AdamW
from megatrain.train import device_update, device_adamw_triton

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
print(device_update.agrees(SimpleNamespace(adamw=adamw, sum_of_squares=squares), torch.device("cpu")))
"""


@pytest.mark.parametrize("wrong", ["nothing", "beta", "flag", "squares"])
def test_triton_kernels_match_eager_bits_and_mutants_are_detected(wrong: str) -> None:
    """By Triton's interpreter, for which a process of its own must be told before it imports Triton."""
    steps = [sys.executable, "-W", "ignore", "-c", INTERPRETED, wrong]
    done = subprocess.run(steps, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout.strip() == str(wrong == "nothing"), done.stderr


INTERPRETED_FUNCTIONS = """
import sys
from types import SimpleNamespace
import torch
from megatrain.engine import fused_forms, fused_triton
from megatrain.model.fused import REFERENCES

wrong, _, place = sys.argv[1].partition(" ")

def with_mistake(name, form):
    def call(*args):
        args = list(args)
        if name == wrong:
            args[int(place)] = {float: lambda x: x + 0.1, bool: lambda x: not x, str: lambda x: "quick_gelu"}[
                type(args[int(place)])](args[int(place)])
        return form(*args)
    return call

forms = {name: with_mistake(name, getattr(fused_triton, name)) for name in REFERENCES}
print(fused_forms.agrees(SimpleNamespace(**forms), torch.device("cpu")))
"""


@pytest.mark.parametrize("wrong", ["nothing", "rms_norm 4", "rms_norm_backward 6", "rotary 6", "gated 3"])
def test_fused_kernels_match_their_reference_and_mutants_are_detected(wrong: str) -> None:
    steps = [sys.executable, "-W", "ignore", "-c", INTERPRETED_FUNCTIONS, wrong]
    done = subprocess.run(steps, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout.strip() == str(wrong == "nothing"), done.stderr


GATED = {"LINEAR": 1.0, "CUBIC": 0.0, "BLOCK": 1024}
ROTATED = {"INVERSE": True}
COMPILED: dict[str, tuple[str, dict[str, object]]] = {
    "norm": ("_rms_forward", {"FLAGS": (True, False, ""), "ROWS": 1, "BLOCK": 8192}),
    "norm of heads": ("_rms_forward", {"FLAGS": (False, False, ""), "ROWS": 32, "BLOCK": 128}),
    "norm with a gate": ("_rms_forward", {"FLAGS": (True, False, "sigmoid"), "ROWS": 32, "BLOCK": 128}),
    "norm of a gated input": ("_rms_forward", {"FLAGS": (True, True, "silu"), "ROWS": 1, "BLOCK": 8192}),
    "norm, backward": ("_rms_backward", {"FLAGS": (True, False, "", True), "ROWS": 1, "BLOCK": 8192}),
    "norm of heads, backward": ("_rms_backward", {"FLAGS": (False, False, "", False), "ROWS": 32, "BLOCK": 128}),
    "norm with a gate, backward": (
        "_rms_backward",
        {"FLAGS": (True, False, "sigmoid", True), "ROWS": 32, "BLOCK": 128},
    ),
    "norm of a gated input, backward": (
        "_rms_backward",
        {"FLAGS": (True, True, "silu", True), "ROWS": 1, "BLOCK": 8192},
    ),
    "sum of parts": ("_sum_parts", {"PARTS": 32, "COLUMNS": 128}),
    **{f"gated by {kind}": ("_gated_forward", {**GATED, "KIND": kind}) for kind in ("silu", "gelu", "relu", "sigmoid")},
    **{
        f"gated by {kind}, backward": ("_gated_backward", {**GATED, "KIND": kind})
        for kind in ("silu", "gelu", "relu", "sigmoid")
    },
    **{f"rotary {pairs}": ("_rotate", {**ROTATED, "PAIRS": pairs, "BLOCKS": (32, 64, 1)}) for pairs, _ in PAIRS},
    "partly rotary": ("_rotate", {**ROTATED, "PAIRS": PAIRS[0][0], "BLOCKS": (32, 64, 64)}),
}
"""What is compiled -> kernel, constants."""
TENSORS = {
    "_rms_forward": "xxxxw",
    "_rms_backward": "xxwxxxxw",
    "_gated_forward": "xxx",
    "_gated_backward": "xxxxx",
    "_rotate": "xxxxxx",
}
"""Kernel -> its tensors: of the compute dtype, or float32."""


@pytest.mark.parametrize("what", COMPILED)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fused_kernels_compile_for_a_gpu(what: str, dtype: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megatrain.engine import fused_triton

    name, constants = COMPILED[what]
    kernel = getattr(fused_triton, name)
    sizes = {"_rotate": 5, "_rms_forward": 3, "_rms_backward": 4}.get(name, 2)
    types: dict[str, object] = {
        "tensors": tuple(f"*{dtype}" if each == "x" else "*fp32" for each in TENSORS.get(name, "xxxx")),
        "sizes": ("i32",) * sizes,
        "strides": ("i64",) * 8,
        **dict.fromkeys(("count", "width"), "i32"),
        "offset": "fp32",
        "numbers": ("fp32", "fp32"),
        "parts": "*fp32",
        "out": f"*{dtype}",
    }
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    for capability in (80, 90):
        made = compile(source, target=GPUTarget("cuda", capability, 32), options=dict(fused_triton.OPTIONS))
        assert made.metadata.shared <= 48 << 10


@pytest.fixture
def nothing_known() -> Iterator[None]:
    device_update._kernels.cache_clear()
    yield
    device_update._kernels.cache_clear()


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
    monkeypatch.setattr(device_update, "agrees", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        assert device_update._kernels(GPU) is None
    assert "AdamW on cuda:0 uses single torch operations: Triton failed (ZeroDivisionError" in caplog.text


@pytest.mark.silicon
def test_triton_kernels_are_used_on_a_real_gpu(nothing_known: None) -> None:
    assert device_update._kernels(GPU) is not None
    assert fused_forms._runs_on_gpu(GPU)
