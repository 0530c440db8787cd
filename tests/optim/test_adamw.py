"""The fused update against its reference, bit for bit, and against torch, to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ConfigError, MegaTrainError, NonFinite
from megatrain.optim import AdamW, HostArrays, StateArrays, StepScalars, kernels, update_on_host
from megatrain.optim.split_master import join, split
from tests.references import bf16_to_f32, f32_to_bf16, reference_update, reference_update_split

Segments = Sequence[tuple[int, int, bool]]
State = dict[str, np.ndarray]

SIZES = [0, 1, 2, 31, 1023, 4097, kernels.BLOCK, 3 * kernels.BLOCK + 17]
GRADS = [np.uint16, np.float32]


def gradient(rng: np.random.Generator, size: int, dtype: type, scale: float = 1e-2) -> np.ndarray:
    grad = (rng.standard_normal(size) * scale).astype(np.float32)
    grad[::7] = 0
    return f32_to_bf16(grad) if dtype is np.uint16 else grad


def split_state(rng: np.random.Generator, size: int) -> State:
    hi, lo = split(rng.standard_normal(size).astype(np.float32))
    m = rng.standard_normal(size).astype(np.float32)
    return {"hi": hi, "lo": lo, "m": m, "v": np.square(rng.standard_normal(size)).astype(np.float32)}


def as_fp32(state: State) -> State:
    return {"weight": join(state["hi"], state["lo"]), "m": state["m"].copy(), "v": state["v"].copy()}


def arrays(state: State) -> HostArrays:
    hi = state["weight"] if "weight" in state else state["hi"]
    return StateArrays(hi, state.get("lo"), (state["m"], state["v"]))


def copied(state: State) -> State:
    return {name: array.copy() for name, array in state.items()}


def assert_same_bits(one: State, other: State) -> None:
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


def scalars(step: int = 3, grad_scale: float = 0.37) -> StepScalars:
    return AdamW().scalars(lr=2e-3, step=step, grad_scale=grad_scale)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize("size", SIZES)
def test_the_fused_pass_is_its_reference_bit_for_bit(size: int, dtype: type, threads: int) -> None:
    rng = np.random.default_rng(size)
    fused = split_state(rng, size)
    slow, fused32, slow32 = copied(fused), as_fp32(fused), as_fp32(fused)
    segments = [(0, size // 3, False), (size // 3, size, True)]
    for step in (1, 2):
        grad = gradient(rng, size, dtype)
        update_on_host(arrays(fused), grad=grad, scalars=scalars(step), segments=segments, threads=threads)
        reference_update_split(**slow, grad=grad, scalars=scalars(step), segments=segments)
        update_on_host(arrays(fused32), grad=grad, scalars=scalars(step), segments=segments, threads=threads)
        reference_update(**slow32, grad=grad, scalars=scalars(step), segments=segments)
    assert_same_bits(fused, slow)
    assert_same_bits(fused32, slow32)
    assert_same_bits(as_fp32(fused), fused32)  # the split master is the float32 run


@st.composite
def segments_with_gaps(draw: st.DrawFn) -> tuple[int, Segments]:
    size = draw(st.integers(0, 3000))
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=12)))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    return size, [(start, stop, draw(st.booleans())) for start, stop in pairs]


@given(segments_with_gaps(), st.sampled_from(GRADS), st.integers(1, 4))
def test_what_no_segment_covers_is_left_alone(case: tuple[int, Segments], dtype: type, threads: int) -> None:
    size, segments = case
    rng = np.random.default_rng(size)
    before = split_state(rng, size)
    grad = gradient(rng, size, dtype)
    fused, slow = copied(before), copied(before)
    with patch.object(kernels, "BLOCK", 256):
        update_on_host(arrays(fused), grad=grad, scalars=scalars(), segments=segments, threads=threads)
    reference_update_split(**slow, grad=grad, scalars=scalars(), segments=segments)
    assert_same_bits(fused, slow)
    gap = np.ones(size, bool)
    for start, stop, _ in segments:
        gap[start:stop] = False
    for name in before:
        assert np.array_equal(fused[name][gap], before[name][gap])


@pytest.mark.parametrize("scale", [1e-18, 1e-30, 1e-42, 1e17], ids="gradients of {}".format)
@pytest.mark.parametrize("dtype", GRADS)
def test_denormals_and_large_values_are_kept_as_the_reference_keeps_them(dtype: type, scale: float) -> None:
    rng = np.random.default_rng(1)
    fused = split_state(rng, 3000)
    fused["m"] *= np.float32(scale)
    fused["v"] *= np.float32(0)
    slow = copied(fused)
    grad = gradient(rng, 3000, dtype, scale)
    segments = [(0, 3000, True)]
    update_on_host(arrays(fused), grad=grad, scalars=scalars(), segments=segments, threads=2)
    reference_update_split(**slow, grad=grad, scalars=scalars(), segments=segments)
    assert_same_bits(fused, slow)
    tiny = np.finfo(np.float32).tiny
    if scale < 1e-40:
        assert ((fused["m"] != 0) & (np.abs(fused["m"]) < tiny)).any()


def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    size = 2 * kernels.BLOCK + 5
    units = [split_state(np.random.default_rng(seed), size) for seed in range(6)]
    expected = [copied(unit) for unit in units]
    grads = [gradient(np.random.default_rng(seed), size, np.uint16) for seed in range(6)]
    segments = [(0, size, True)]

    def update(unit: State, grad: np.ndarray) -> None:
        for step in (1, 2, 3):
            update_on_host(arrays(unit), grad=grad, scalars=scalars(step), segments=segments, threads=3)

    with ThreadPoolExecutor(6) as callers:
        list(callers.map(update, units, grads))
    for unit, twin, grad in zip(units, expected, grads, strict=True):
        for step in (1, 2, 3):
            reference_update_split(**twin, grad=grad, scalars=scalars(step), segments=segments)
        assert_same_bits(unit, twin)


@pytest.mark.parametrize("grad_scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", GRADS)
def test_twenty_steps_are_those_of_torch_to_rounding(dtype: type, grad_scale: float) -> None:
    size, rng = 2000, np.random.default_rng(7)
    state = split_state(rng, size)
    state["m"][:], state["v"][:] = 0, 0
    theirs = torch.nn.Parameter(torch.from_numpy(join(state["hi"], state["lo"])))
    ours = AdamW(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    torch_adamw = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(1, 21):
        grad = gradient(rng, size, dtype)
        values = bf16_to_f32(grad) if dtype is np.uint16 else grad
        theirs.grad = torch.from_numpy(values * np.float32(grad_scale))
        factors = ours.scalars(lr=3e-3, step=step, grad_scale=grad_scale)
        update_on_host(arrays(state), grad=grad, scalars=factors, segments=[(0, size, True)])
        torch_adamw.step()
    expected = torch_adamw.state[theirs]
    close = dict(rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(join(state["hi"], state["lo"]), theirs.detach().numpy(), **close)
    np.testing.assert_allclose(state["m"], expected["exp_avg"].numpy(), rtol=2e-6, atol=1e-8)
    np.testing.assert_allclose(state["v"], expected["exp_avg_sq"].numpy(), rtol=5e-6)


EDGES = np.float32(1.5) * np.exp2(np.arange(-149, 128)).astype(np.float32)
EDGES = np.concatenate([EDGES, -EDGES, np.float32([0, 1e20, -1e20, 2e19, 3.4e38])])
"""Gradients of every exponent of float32, of both signs."""

SEQUENCES: dict[str, list[np.ndarray]] = {
    "once": [EDGES],
    "again": [EDGES, EDGES],
    "turned": [EDGES, -EDGES],
    "then none": [EDGES, 0 * EDGES, 0 * EDGES],
    "after ones": [np.ones_like(EDGES), EDGES],
}


@pytest.mark.parametrize("kind", ["fp32", "bf16", "reference fp32", "reference bf16"])
@pytest.mark.parametrize("steps", SEQUENCES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"betas": (0.9, 0.95), "eps": 1e-30},
        {"betas": (0.0, 0.5)},  # torch interpolates from the other end
        {"lr": 50.0, "weight_decay": 0.0},
    ],
    ids=str,
)
def test_at_the_edges_of_float32_each_step_is_that_of_torch(settings: dict, steps: str, kind: str) -> None:
    """For a gradient of any exponent, each step from torch's own state overflows where torch does, and else is equal
    to rounding: of each of its ways to compute on a cpu."""
    ours = AdamW(**settings)
    given = {"lr": ours.lr, "betas": ours.betas, "eps": ours.eps, "weight_decay": ours.weight_decay}
    start = np.where(np.arange(EDGES.size) % 2, np.float32(1), np.float32(0))
    for way in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
        adamw = torch.optim.AdamW([theirs], **given, **way)
        weight, m, v = start, np.zeros_like(start), np.zeros_like(start)
        for step, grad in enumerate(SEQUENCES[steps], 1):
            theirs.grad = torch.from_numpy(grad.copy())
            adamw.step()
            state = adamw.state[theirs]
            expected = [each.detach().numpy().copy() for each in (theirs, state["exp_avg"], state["exp_avg_sq"])]
            found = one_step(kind, (weight, m, v), grad, ours.scalars(lr=ours.lr, step=step))
            for before, one, other in zip((weight, m, v), found, expected, strict=True):
                assert_equal_to_rounding(one, other, before)
            weight, m, v = expected


def one_step(kind: str, before: tuple[np.ndarray, ...], grad: np.ndarray, factors: StepScalars) -> list[np.ndarray]:
    """Weight, m and v after a step; in bf16 the weight goes through its halves."""
    weight, m, v = (each.copy() for each in before)
    segments = [(0, weight.size, True)]
    if kind.endswith("fp32"):
        if "reference" in kind:
            reference_update(weight, m, v, grad, factors, segments)
        else:
            update_on_host(StateArrays(weight, None, (m, v)), grad, factors, segments)
        return [weight, m, v]
    hi, lo = split(weight)
    if "reference" in kind:
        reference_update_split(hi, lo, m, v, grad, factors, segments)
    else:
        update_on_host(StateArrays(hi, lo, (m, v)), grad, factors, segments)
    return [join(hi, lo), m, v]


def assert_equal_to_rounding(found: np.ndarray, expected: np.ndarray, before: np.ndarray) -> None:
    """The same are infinite, of the same sign, and none is a number in one alone; numbers are apart by no more than a
    few roundings, of what there was before where that has cancelled."""
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite])
    found, expected, before = (each[finite].astype(np.float64) for each in (found, expected, before))
    smallest = 2.0**-148
    largest = np.maximum(np.abs(expected), np.where(np.isfinite(before), np.abs(before), 0))
    assert (np.abs(found - expected) <= 1e-6 * largest + smallest).all()


def test_weight_decay_acts_where_a_segment_says_so_and_nowhere_else() -> None:
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    weight, m, v = ones.copy(), zeros.copy(), zeros.copy()
    factors = AdamW(weight_decay=0.5).scalars(lr=0.1, step=1)
    update_on_host(StateArrays(weight, None, (m, v)), zeros, factors, [(0, 2, True), (2, 4, False)])
    assert weight.tolist() == [np.float32(0.95), np.float32(0.95), 1, 1]


def test_factors_are_rounded_once_from_float64() -> None:
    factors = AdamW(lr=1e-3, weight_decay=0.1).scalars(lr=5e-4, step=1000, grad_scale=0.3)
    assert factors.decay == np.float32(1 - 5e-4 * 0.1)
    assert factors.step_size == np.float32(5e-4 / (1 - 0.9**1000))
    assert factors.root_scale == np.float32((1 - 0.999**1000) ** -0.5)
    assert factors.rest2 == np.float32(1 - 0.999) != np.float32(1) - np.float32(0.999)
    assert factors.packed().dtype == np.float32
    assert factors.packed().shape == (8,)


def test_vectors_and_patterns_name_the_parameters_that_do_not_decay() -> None:
    adamw = AdamW(no_decay=("*norm*", "*.bias"))
    assert adamw.decays("model.layers.0.mlp.up_proj.weight", (8, 4))
    assert not adamw.decays("model.layers.0.input_layernorm.weight", (4,))
    assert not adamw.decays("model.layers.0.self_attn.q_proj.bias", (8,))
    assert adamw.decays("model.layers.0.INPUT_LAYERNORM.weight", (4,))
    assert AdamW().decays("anything", (4,))
    adamw = AdamW(no_decay=("vectors", "*embed*"))
    assert adamw.decays("a_norm.dense.weight", (8, 4))
    assert not adamw.decays("ln_f.weight", (4,))
    assert not adamw.decays("scale", ())
    assert not adamw.decays("model.embed_tokens.weight", (8, 4))


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("lr", {"lr": -1e-3}),
        ("lr", {"lr": float("nan")}),
        ("lr", {"lr": float("inf")}),
        ("betas", {"betas": (0.9, 1.0)}),
        (r"betas\[0\]", {"betas": (-0.1, 0.9)}),
        ("betas", {"betas": (0.9, 1 - 1e-12)}),  # 1 in float32: v would never move
        ("betas", {"betas": (0.9,)}),
        ("eps", {"eps": 0.0}),
        ("eps", {"eps": 1e-60}),  # 0 in float32
        ("eps", {"eps": float("nan")}),
        ("weight_decay", {"weight_decay": -0.1}),
        ("weight_decay", {"lr": 0.5, "weight_decay": 2.0}),
        ("no_decay", {"no_decay": "*.bias"}),  # would match by character
        ("no_decay", {"no_decay": ("",)}),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused_at_construction(where: str, wrong: dict) -> None:
    with pytest.raises(ConfigError, match=f"^{where}: "):
        AdamW(**wrong)


def test_a_step_below_one_and_a_factor_that_is_not_finite_are_refused() -> None:
    with pytest.raises(ConfigError, match="count updates from 1"):
        AdamW().scalars(lr=1e-3, step=0)
    for lr in (float("nan"), -1.0, "1e-3", True):
        with pytest.raises(ConfigError, match=r"^lr: .* is not valid; use a finite number, 0 or more"):
            AdamW().scalars(lr=lr, step=1)  # type: ignore[arg-type]
    for lr in (1e60, 3e38):  # infinite in float32, the second once it is divided by 1 - b1
        with pytest.raises(ConfigError, match=r"^lr: a learning rate of .* is too high"):
            AdamW(weight_decay=0).scalars(lr=lr, step=1)
    with pytest.raises(NonFinite, match="update number 5"):
        AdamW().scalars(lr=1e-3, step=5, grad_scale=float("nan"))


@pytest.mark.parametrize(
    "segments",
    [[(-1, 3, True)], [(0, 11, True)], [(5, 3, True)], [(0, 5, True), (4, 8, True)], [(5, 8, True), (0, 2, True)]],
)
def test_segments_that_do_not_fit_the_array_are_refused_before_anything_changes(segments: Segments) -> None:
    state = split_state(np.random.default_rng(0), 10)
    before = copied(state)
    with pytest.raises(MegaTrainError, match="segments overlap, descend or leave the array"):
        update_on_host(arrays(state), grad=np.zeros(10, np.uint16), scalars=scalars(), segments=segments)
    assert_same_bits(state, before)


def test_arrays_that_do_not_fit_are_refused_by_name() -> None:
    state = split_state(np.random.default_rng(0), 10)
    with pytest.raises(MegaTrainError, match="grad: dtype float64, expected uint16 or float32"):
        update_on_host(arrays(state), grad=np.zeros(10), scalars=scalars(), segments=[(0, 10, True)])
    with pytest.raises(MegaTrainError, match=r"grad: shape \(9,\)"):
        update_on_host(arrays(state), grad=np.zeros(9, np.uint16), scalars=scalars(), segments=[(0, 9, True)])
    with pytest.raises(MegaTrainError, match=r"moments\[0\], grad: two arrays of one call share memory"):
        update_on_host(arrays(state), grad=state["m"], scalars=scalars(), segments=[(0, 10, True)])
    with pytest.raises(ConfigError, match="0 threads"):
        update_on_host(arrays(state), grad=np.zeros(10, np.uint16), scalars=scalars(), segments=[], threads=0)


def test_a_read_only_gradient_will_do() -> None:
    state = split_state(np.random.default_rng(0), 10)
    grad = gradient(np.random.default_rng(1), 10, np.uint16)
    slow = copied(state)
    grad.flags.writeable = False
    update_on_host(arrays(state), grad=grad, scalars=scalars(), segments=[(0, 10, True)])
    reference_update_split(**slow, grad=grad, scalars=scalars(), segments=[(0, 10, True)])
    assert_same_bits(state, slow)
