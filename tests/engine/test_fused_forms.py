"""Which forms of the fused functions a device gets, and what happens where Triton fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatrain.device import open_device
from megatrain.engine import fused_forms
from megatrain.engine.fused_forms import _guarded, use_fused_functions
from megatrain.model import port_model
from megatrain.model.fuse_layers import fuse_layers
from megatrain.model.fused import REFERENCES
from tests.tiny import tiny_model

GPU = torch.device("cuda", 0)
NORM = None, None, "norm(x) * weight", 1e-6, 1


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_forms, "has_gpu_kernels", lambda: False)
    monkeypatch.setattr(fused_forms, "_failed", set())
    fused_forms._runs_on_gpu.cache_clear()
    yield
    fused_forms._runs_on_gpu.cache_clear()


def fused_modules(layer: torch.nn.Module) -> int:
    return sum(getattr(part, "is_fused", False) for module in layer.modules() for part in vars(module).values())


@pytest.mark.parametrize(
    ("is_installed", "runs", "agrees", "why"),
    [
        (False, False, True, "triton is not installed"),
        (True, False, True, "Triton does not support this device"),
        (True, True, False, "Triton's kernels compute something else here"),
        (True, True, None, "Triton failed (ValueError: invalid literal for int() with base 10: 'x')"),
    ],
)
def test_layers_keep_the_librarys_code_where_triton_cannot_be_used(
    is_installed: bool,
    runs: bool,
    agrees: bool | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if runs:
        pytest.importorskip("triton")
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: is_installed)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: runs)
    monkeypatch.setattr(fused_forms, "agrees", lambda *_: int("x") if agrees is None else agrees)
    ported = port_model(tiny_model("mixtral"), torch.bfloat16)
    fuse_layers(ported)  # as a plan has done
    assert all(map(fused_modules, ported.templates))
    device = open_device("cpu")
    monkeypatch.setattr(type(device), "torch_device", GPU)
    with caplog.at_level(logging.WARNING):
        use_fused_functions(ported, device)
        use_fused_functions(ported, device)
    assert not any(map(fused_modules, ported.templates))
    assert [record.message for record in caplog.records] == [f"layers on cuda:0 keep the library's kernels: {why}"]


def test_a_kernel_that_fails_is_replaced_for_tensors_of_that_width(caplog: pytest.LogCaptureFixture) -> None:
    widths: list[int] = []

    def form(x: torch.Tensor, *rest: object) -> object:
        widths.append(x.shape[-1])
        if x.shape[-1] == 8:
            raise RuntimeError("out of resources")
        return REFERENCES["rms_norm"](x, *rest)

    call = _guarded("rms_norm", form, REFERENCES["rms_norm"])
    for width in (8, 4, 8, 4):
        x = torch.randn(2, width)
        assert torch.equal(call(x, *NORM)[0], REFERENCES["rms_norm"](x, *NORM)[0])
    assert widths == [8, 4, 4]
    assert "rms_norm uses single torch operations: Triton failed (RuntimeError: out of resources)" in caplog.text


def test_memory_that_runs_out_is_no_failure_of_a_kernel() -> None:
    def form(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        _guarded("rms_norm", form, REFERENCES["rms_norm"])(torch.ones(2))


def test_forms_that_write_in_another_layout_do_not_agree() -> None:
    forms = {**REFERENCES, "rms_norm": lambda *args: tuple(each.contiguous() for each in REFERENCES["rms_norm"](*args))}
    assert not fused_forms.agrees(SimpleNamespace(**forms), torch.device("cpu"))
    assert fused_forms.agrees(SimpleNamespace(**REFERENCES), torch.device("cpu"))
