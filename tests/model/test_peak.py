"""The largest bytes alive in a run: what they are made of, and that large results need not be computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from megatrain.model import peak, port_model
from megatrain.model.mapped_tensors import lazy_zeros
from megatrain.model.peak import Living, Run, growth_of, measured, recorded_backward
from megatrain.model.skeleton import blueprint
from megatrain.spec.layer_profile import Peak
from tests.tiny import FAMILIES, tiny_model

LENGTHS = (8, 16, 32)


def fitted(run: Run) -> Peak:
    return measured(partial(recorded_backward, run), LENGTHS)[0]


def test_matmul_fits_agree_where_they_meet() -> None:
    """Of sigmoid(x A) B: autograd keeps the sigmoid; its gradient and that of its input exist with it."""
    up, down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def run(tokens: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        given = torch.zeros(1, tokens, 8, requires_grad=True)
        return down(up(given).sigmoid()), [up.weight, down.weight], [given]

    found = fitted(run)
    assert found.device == found.host  # float32: a cpu's products take nothing beside
    # 800 tokens: those three, and the input, which the run makes; the output has been let go of.
    assert found.nbytes(False, 800, 800) == pytest.approx(4 * 800 * (3 * 32 + 8), rel=0.01)
    # One token: the gradient of a weight counts.
    assert found.nbytes(False, 1, 1) >= 4 * 8 * 32


def test_sequential_loops_are_fitted_by_their_largest_run() -> None:
    def run(tokens: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        given = torch.zeros(tokens, 4, requires_grad=True)
        sums = [given[:place].sum(0) for place in range(1, tokens + 1)]
        return torch.stack(sums), [], [given]

    found, further = fitted(run), recorded_backward(run, 100).peak
    assert further <= found.nbytes(False, 100, 100) <= 1.03 * further


def test_fits_are_never_below_their_measurements() -> None:
    for sizes in ([10, 10, 10], [100, 120, 200], [5, 200, 210], [900, 700, 400], [0, 64, 320]):
        found = growth_of(sizes, LENGTHS)
        for size, tokens in zip(sizes, LENGTHS, strict=True):
            assert found.nbytes(tokens, tokens) >= size - 1e-6


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
        ("gpt2", torch.float32),  # what its norms save has another dtype in bfloat16 on a cpu than elsewhere
        ("mixtral", torch.bfloat16),
        pytest.param("qwen3-moe", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_skipped_computation_is_still_counted(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and head are the same whether results are computed, or as few of them as can be."""
    expected = port_model(tiny_model(family), dtype).spec
    monkeypatch.setattr(peak, "LARGE_NUMEL", 1)
    assert port_model(tiny_model(family), dtype).spec.units[1:] == expected.units[1:]


def test_unwritten_zeros_take_no_memory() -> None:
    before = resident_nbytes()
    zeros = lazy_zeros([1 << 20, 1 << 14], torch.float32)
    assert float(zeros[::4096].abs().sum()) == 0.0
    assert zeros.is_contiguous()
    for shape in ((), (0, 3), (2, 0)):
        assert lazy_zeros(shape, torch.bfloat16).shape == shape
    assert resident_nbytes() - before < 64 << 20, "of 64 GiB"


def test_a_layer_of_billions_of_parameters_is_measured_in_little_memory() -> None:
    """One of Llama-3.1-405B's, 3.2 billion, which would take 6.4 GB; and its head another 4.2."""
    wide = {"hidden_size": 16_384, "intermediate_size": 53_248, "num_attention_heads": 128, "num_key_value_heads": 8}
    fields = FAMILIES["llama"] | wide | {"vocab_size": 128_256, "num_hidden_layers": 1}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    before = resident_nbytes()
    with peak_memory() as most:
        spec = port_model(blueprint(config, attention="auto"), torch.bfloat16).spec
    assert spec.numel > 7e9
    assert most() - before < 400 << 20


def resident_nbytes() -> int:
    return psutil.Process().memory_info().rss


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """In the block; the call tells the most that was resident in it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    yield lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def test_tensor_lifetimes_are_tracked() -> None:
    living = Living()
    with living:
        kept = torch.ones(100)
        view = kept[:10]
        torch.ones(1000)
    assert (living.peak, living.nbytes) == (4400, 400)
    del kept
    assert living.nbytes == 400
    del view
    assert living.nbytes == 0
