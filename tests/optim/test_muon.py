"""Muon's passes on the host against their references, bit for bit, and its hyperparameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatrain.errors import ConfigError, MegaTrainError, NonFinite
from megatrain.optim import (
    AdamW,
    MomentumArrays,
    Muon,
    apply_on_host,
    join,
    kernels,
    matrix_shape,
    momentum_on_host,
    split,
)
from megatrain.spec import ParamSpec
from tests.references import f32_to_bf16, reference_apply, reference_momentum, reference_split

SIZE = 2 * kernels.BLOCK + 17
SEGMENTS = [(3, 1000, 1), (1000, kernels.BLOCK + 5, 0), (kernels.BLOCK + 9, SIZE, 1)]
DTYPES = [np.uint16, np.float32]


def numbers(seed: int, dtype: type = np.float32) -> np.ndarray:
    """Numbers of all magnitudes, with zeros, ties of bfloat16, infinities and NaN."""
    draw = np.random.default_rng(seed)
    values = (draw.standard_normal(SIZE) * 10.0 ** draw.uniform(-38, 3, SIZE)).astype(np.float32)
    values[::101] = 0
    values[1::101] = np.float32(1 + 2**-8)
    values[2::1001], values[3::1001] = np.inf, np.nan
    return f32_to_bf16(values) if dtype is np.uint16 else values


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """NaNs of any payload are alike."""
    if one.dtype == np.float32:
        nans = np.isnan(one)
        return bool(np.array_equal(nans, np.isnan(other))) and one[~nans].tobytes() == other[~nans].tobytes()
    return one.tobytes() == other.tobytes()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.95, 0.3])
@pytest.mark.parametrize("of_gradient", DTYPES)
@pytest.mark.parametrize("of_direction", DTYPES)
def test_momentum_equals_its_reference(of_gradient: type, of_direction: type, momentum: float, nesterov: bool) -> None:
    scalars = Muon(momentum=momentum).matrix_scalars(lr=1e-3, grad_scale=0.37)
    arrays = [MomentumArrays(numbers(1), numbers(2, of_gradient), numbers(3, of_direction)) for _ in range(2)]
    momentum_on_host(arrays[0], scalars, SEGMENTS, nesterov=nesterov, threads=3)
    reference_momentum(arrays[1], scalars, SEGMENTS, nesterov=nesterov)
    assert same_bits(arrays[0].momenta, arrays[1].momenta)
    assert same_bits(arrays[0].direction, arrays[1].direction)
    assert not same_bits(arrays[0].momenta, numbers(1))


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_direction_is_made_again_with_the_same_bits(nesterov: bool) -> None:
    scalars = Muon().matrix_scalars(lr=1e-3, grad_scale=0.37)
    arrays = MomentumArrays(numbers(1), numbers(2, np.uint16), np.zeros(SIZE, np.uint16))
    momentum_on_host(arrays, scalars, [(0, SIZE, True)], nesterov=nesterov)
    momenta, direction = arrays.momenta.copy(), arrays.direction.copy()
    arrays.direction[:] = 0
    momentum_on_host(arrays, scalars, [(0, SIZE, False)], nesterov=nesterov)
    assert same_bits(arrays.momenta, momenta)
    assert same_bits(arrays.direction, direction)


@pytest.mark.parametrize("of_direction", DTYPES)
def test_directions_move_masters_as_the_reference_does(of_direction: type) -> None:
    scalars, rates = Muon().matrix_scalars(lr=0.02), np.array([0.02, 0.3], np.float32)
    weight, direction = numbers(1), numbers(2, of_direction)
    expected, (hi, lo) = weight.copy(), split(weight)
    apply_on_host((weight,), direction, scalars.keep, rates, SEGMENTS, threads=3)
    apply_on_host((hi, lo), direction, scalars.keep, rates, SEGMENTS, threads=3)
    reference_apply(expected, direction, scalars.keep, rates, SEGMENTS)
    assert same_bits(weight, expected)
    assert same_bits(join(hi, lo), expected)
    assert same_bits(hi[~np.isnan(expected)], reference_split(expected)[0][~np.isnan(expected)])


def test_arrays_that_do_not_fit_are_refused() -> None:
    scalars, rates = Muon().matrix_scalars(lr=0.02), np.ones(1, np.float32)
    three, four = np.zeros(3, np.float32), np.zeros(4, np.float32)
    with pytest.raises(MegaTrainError, match="direction"):
        momentum_on_host(MomentumArrays(three, three.copy(), four), scalars, [(0, 3, True)], nesterov=True)
    with pytest.raises(MegaTrainError, match="no rate"):
        apply_on_host((three,), three.copy(), scalars.keep, rates, [(0, 3, 1)])
    with pytest.raises(MegaTrainError, match="share memory"):
        apply_on_host((three,), three, scalars.keep, rates, [(0, 3, 0)])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "momentum": ({"momentum": 1.0}, "momentum"),
    "eps": ({"eps": 0}, "eps"),
    "adjustment": ({"adjust_lr_fn": None}, "adjust_lr_fn"),
    "rest": ({"adjust_lr_fn": "original"}, "adamw"),
    "decay": ({"lr": 20.0}, "weight_decay"),
    "steps": ({"ns_steps": 100}, "ns_steps"),
    "pattern": ({"matrices": (("", True),)}, "matrices"),
    "parts": ({"cut": (("*qkv*", 1),)}, "cut"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_hyperparameters_are_refused_by_name(name: str) -> None:
    fields, where = WRONG[name]
    with pytest.raises(ConfigError, match=f"^{where}"):
        Muon(**fields)


def test_rates_are_those_of_torch() -> None:
    """`torch.optim.Muon` lets the rate adjust the update, not the decay; shapes are as stored."""
    original = Muon(adjust_lr_fn="original", adamw=AdamW(lr=3e-4))
    assert original.rate(0.02, 400, 100) == np.float32(0.04)
    assert original.rate(0.02, 100, 400) == np.float32(0.02)
    assert Muon().rate(0.02, 100, 400) == Muon().rate(0.02, 400, 100) == np.float32(0.02 * 0.2 * 20)
    assert Muon().matrix_scalars(lr=0.02).keep == np.float32(1 - 0.02 * 0.1)
    with pytest.raises(NonFinite):
        Muon().matrix_scalars(lr=0.02, grad_scale=np.inf)
    with pytest.raises(ConfigError, match="too high"):
        Muon().matrix_scalars(lr=10.0)


def test_adamw_follows_the_schedule_of_matrices() -> None:
    muon = Muon(lr=0.02, adjust_lr_fn="original", adamw=AdamW(lr=3e-4, learning_rates=(("*embed*", 1e-4),)))
    at_half = muon.scalars_by_group(lr=0.01, step=7, grad_scale=0.5)
    assert muon.adamw is not None
    assert at_half == muon.adamw.scalars_by_group(lr=1.5e-4, step=7, grad_scale=0.5)
    assert Muon(lr=1e-4).elementwise == AdamW(lr=1e-4)
    with pytest.raises(ConfigError, match="peak of 0"):
        Muon(lr=0.0).scalars_by_group(lr=0.01, step=1)


PROJECTION = ParamSpec("layers.0.qkv.weight", (12, 8), products=1)
EXPERTS = ParamSpec("layers.0.experts", (3, 4, 8), products=3)
GATE = ParamSpec("layers.0.gate.weight", (3, 8))
NORM = ParamSpec("layers.0.norm.weight", (8,))


def test_what_is_kept_of_a_parameter_follows_from_its_role_and_the_users_choice() -> None:
    muon = Muon(matrices=(("*.gate.*", True), ("*.experts", False)), cut=(("*.qkv.*", 3),))
    described = [muon.described(param) for param in (PROJECTION, EXPERTS, GATE, NORM)]
    assert [param.matrices for param in described] == [3, 0, 1, 0]
    assert [param.state for param in described] == [("momentum",), ("m", "v"), ("momentum",), ("m", "v")]
    muon.refuse_patterns(described)
    assert Muon().described(EXPERTS).matrices == 3
    assert matrix_shape(EXPERTS.shape, 3) == (4, 8)
    assert matrix_shape(PROJECTION.shape, 3) == (4, 8)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no match": ({"matrices": (("*.gated.*", True),)}, "no trained parameter matches"),
    "two patterns": ({"matrices": (("*.qkv.*", False), ("*.weight", False))}, "matches both"),
    "a vector": ({"matrices": (("*.norm.*", True),)}, "1 dimensions"),
    "unequal": ({"cut": (("*.qkv.*", 5),)}, "12 rows"),
    "no matrix": ({"cut": (("*.gate.*", 3),)}, "no matrix"),
    "a rate of its own": ({"adamw": AdamW(learning_rates=(("*.qkv.*", 1e-5),))}, "a matrix, which Muon updates"),
    "no decay": ({"adamw": AdamW(no_decay=("vectors", "*.qkv.*"))}, "a matrix, which Muon updates"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_patterns_that_cannot_be_followed_are_refused(name: str) -> None:
    fields, said = REFUSED[name]
    muon = Muon(**fields)
    with pytest.raises(ConfigError, match=said):
        muon.refuse_patterns([muon.described(param) for param in (PROJECTION, GATE, NORM)])


def test_a_weight_stored_with_its_inputs_first_cannot_be_cut_at_its_rows() -> None:
    with pytest.raises(ConfigError, match="inputs first"):
        Muon(cut=(("*", 2),)).described(ParamSpec("c_attn.weight", (8, 24), products=1, inputs_first=True))
