"""Python and C calls of a step, which take most of its time if it has few tokens (`python -m bench.launches`)."""

from __future__ import annotations

from bench.launches import calls
from megatrain.plan.cost import CHUNK_KERNEL_SHARE, HEAD_KERNELS, KERNELS, KERNELS_PER_PARAM


def test_the_engine_adds_few_calls_per_layer_and_chunks_take_what_plans_say() -> None:
    """Copies, norms and updates are counted, which a stock model without an optimizer does not have."""
    found = calls()
    assert found["layer, graphs kept"] - found["layer, stock"] < 520, found
    assert found["layer, recompute"] - found["layer, stock"] < 560, found
    layer, head = KERNELS + KERNELS_PER_PARAM * 9, HEAD_KERNELS + KERNELS_PER_PARAM * 2
    for chunk, share in (("MLP", CHUNK_KERNEL_SHARE), ("loss", head / layer)):
        called = found[f"chunk of {'an' if chunk == 'MLP' else 'the'} {chunk}"] / found["layer, graphs kept"]
        assert 0.75 * share < called < 1.33 * share, (chunk, called, share)
