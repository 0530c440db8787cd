"""Layers through `torch.compile`: the numbers of the library's code to rounding, once for all layers of a structure."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from megatrain import AdamW, Engine, Policy
from megatrain.errors import ModelError, NonFinite, PlanError
from megatrain.model import spent
from megatrain.spec import Numerics
from tests.tiny import batch, equal, relative_error, stock_gradients, tiny_model, unequal_batches

STEP = [batch(2, 12, 0), batch(2, 12, 1)]


def engine(family: str, numerics: Numerics, policy: Policy, device: str = "cpu") -> Engine:
    how = {"numerics": numerics, "policy": policy, "verify": False}
    return Engine.from_model(tiny_model(family), device, optimizer=AdamW(lr=1e-2), **how)  # type: ignore[arg-type]


def no_compiler() -> str:
    raise RuntimeError("none")


def test_compile_without_a_compiler_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    with pytest.raises(PlanError, match=r"policy.kernels: there is no C\+\+ compiler; install g\+\+"):
        engine("llama", Numerics("fp32", kernels="compile"), Policy(shares_memory=True))


def test_compiling_models_with_recorded_router_outputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    made = engine("mixtral-balanced", Numerics("fp32", kernels="compile"), Policy(shares_memory=True))
    with made, pytest.raises(ModelError, match="kernels=stock"):
        made.step(STEP)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler imports
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_layers_give_the_stock_models_gradients_whatever_the_schedule(precision: str) -> None:
    """Three layers, one structure: a compilation with gradients and one without; and weights leave their slot."""
    torch._dynamo.reset()
    before, _ = spent()
    numerics = Numerics(precision, loss_chunk_tokens=5, kernels="compile")  # type: ignore[arg-type]
    plain = Policy(shares_memory=True)
    with engine("llama", numerics, plain) as made:
        found = made.gradients(STEP)
        assert equal(found, made.gradients(STEP))
    compilations, seconds = spent()
    assert compilations - before == 2
    assert seconds > 0
    lean = Policy(activations="keep", weight_slots=1)
    with engine("llama", numerics, lean, "sim:1") as made:
        kept = made.gradients(STEP)
    assert spent()[0] == compilations
    if precision == "bf16":
        with engine("llama", replace(numerics, kernels="stock"), plain) as made:
            expected = made.gradients(STEP)
    else:
        _, expected = stock_gradients(tiny_model("llama"), STEP)
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) < tolerance, name
        assert relative_error(kept[name], found[name]) < tolerance, name


class NanIfCompiled(torch.nn.Module):
    """What a broken compiled kernel would do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float("nan") if torch.compiler.is_compiling() else torch.nn.functional.silu(x)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler imports
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("shares_memory", [True, False])
def test_a_nonfinite_loss_of_compiled_layers_names_the_first_module(shares_memory: bool) -> None:
    """Layers are compiled again afterwards; kernels that alone give what is not finite are told from the model."""
    torch._dynamo.reset()
    numerics, policy = Numerics("fp32", kernels="compile"), Policy(shares_memory=shares_memory)
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1e6)
        model.model.layers[1].mlp.down_proj.weight[5] = 3e38  # its output overflows
    with Engine.from_model(model, numerics=numerics, policy=policy, verify=False) as made:
        for call in (made.step, made.evaluate):
            with pytest.raises(NonFinite, match=r"first not finite: the output of model\.layers\.1\.mlp\.down_proj; "):
                call(unequal_batches())
        assert made.numerics == numerics
    broken = tiny_model("llama")
    broken.model.layers[1].mlp.act_fn = NanIfCompiled()
    with Engine.from_model(broken, numerics=numerics, policy=policy, verify=False) as made:
        for _ in range(2):
            with pytest.raises(NonFinite, match="the loss is nan, and finite when computed again without compiling; "):
                made.step(unequal_batches())
