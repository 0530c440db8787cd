"""FlashAttention without a compiler: the hub's prebuilt kernels, through the `kernels` library.

The kernel here is substituted, in plain PyTorch: a real one is for a GPU, and is fetched from the hub.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils, modeling_utils
from transformers.integrations import hub_kernels

from megatrain import AdamW, Engine
from megatrain.errors import BatchError, ModelError
from megatrain.model import skeleton
from megatrain.model.skeleton import blueprint
from megatrain.model.split_into_units import port_model
from tests.kinds import tiny_config
from tests.tiny import FAMILIES, batch, equal, unequal_batches

NAME = {2: "kernels-community/flash-attn2", 3: "kernels-community/vllm-flash-attn3"}
Get = Callable[..., Any]


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float, causal: bool, window_size: Any, softcap: float
) -> Tensor:
    """One sequence, [length, heads, width] and fewer heads of keys and values, under the hub's own names."""
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(len(query) // len(tensor), 0) for tensor in (key, value))
    scores = query @ key.mT * softmax_scale
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    ahead = torch.arange(key.shape[1]) - torch.arange(query.shape[1]).unsqueeze(1)
    hidden = (ahead > 0) if causal else torch.zeros_like(ahead, dtype=torch.bool)
    hidden |= (ahead < -window_size[0]) if window_size[0] >= 0 else hidden
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(0, 1)


class Kernel(SimpleNamespace):
    """calls: of each function of a kernel."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float = 1.0, causal: bool = False,
        window_size: Any = (-1, -1), softcap: float = 0.0,
    ) -> tuple[Tensor, None]:  # fmt: skip
        self.calls["rows"] += 1
        how: Any = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        return torch.stack([attend(*row, **how) for row in zip(q, k, v, strict=True)]), None

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float = 1.0, causal: bool = False, window_size: Any = (-1, -1),
        softcap: float = 0.0,
    ) -> tuple[Tensor, None]:  # fmt: skip
        self.calls["sequences"] += 1
        how: Any = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        sizes = cu_seqlens_q.diff().tolist()
        parts = zip(*(tensor.split(sizes) for tensor in (q, k, v)), strict=True)
        return torch.cat([attend(*part, **how) for part in parts]), None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Get], None]:
    """Makes `kernels` look installed, with this in place of its `get_kernel`."""

    def answer(get: Get) -> None:
        for module in (modeling_utils, hub_kernels, skeleton):
            monkeypatch.setattr(module, "is_kernels_available", lambda: True)
        monkeypatch.setattr(hub_kernels, "get_kernel", get)
        monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)

    return answer


@pytest.fixture
def kernel(hub: Callable[[Get], None]) -> Kernel:
    made = Kernel()
    hub(lambda name, **_: made if name in NAME.values() else pytest.fail(name))
    return made


def engine_with(attention: str, kind: str, **options: Any) -> Engine:
    options = {"optimizer": AdamW(lr=1e-2), "precision": "fp32", "device": "cpu", "verify": False} | options
    return Engine.from_config(FAMILIES[kind], attention=attention, **options)


def packed() -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0)
    one = batch(1, 12, 3)
    return {**one, "position_ids": positions, "labels": one["labels"].masked_fill(positions == 0, -100)}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])  # the last has windows, and a cap of scores
def test_a_step_with_a_prebuilt_kernel_is_that_of_the_library_s_attention(kind: str, kernel: Kernel) -> None:
    given = [*unequal_batches(), batch(2, 12, 1), packed()]  # with padding, whole rows, packed
    with engine_with("eager", kind) as stock, engine_with("flash_attention_3", kind) as engine:
        assert engine.structure.attention == NAME[3]
        expected, got = stock.gradients(given), engine.gradients(given)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        assert engine.step(given).loss == pytest.approx(stock.step(given).loss, rel=1e-5)
    assert kernel.calls["rows"] > 0 < kernel.calls["sequences"]


@pytest.mark.usefixtures("kernel")
def test_a_run_with_a_prebuilt_kernel_resumes_bit_for_bit(tmp_path: Path) -> None:
    with engine_with("flash_attention_2", "llama") as engine:
        engine.step([batch(2, 12, 1)])
        saved = engine.save(tmp_path).wait()
        expected = engine.step([batch(2, 12, 2)]).loss, engine.gradients([packed()])
    options: Any = {"optimizer": AdamW(lr=1e-2), "device": "cpu", "verify": False}
    with Engine.from_checkpoint(saved, attention="flash_attention_2", **options) as engine:
        assert engine.structure.attention == NAME[2]
        loss, gradients = engine.step([batch(2, 12, 2)]).loss, engine.gradients([packed()])
    assert loss == expected[0]
    assert equal(gradients, expected[1])


@pytest.mark.usefixtures("kernel")
def test_a_prebuilt_kernel_is_priced_as_pytorch_s_fused_attention() -> None:
    prices = [
        port_model(blueprint(tiny_config("llama"), attention=attention), torch.bfloat16).spec
        for attention in ("sdpa", "flash_attention_3")
    ]
    assert prices[1].attention == NAME[3]
    assert replace(prices[1], attention="sdpa") == prices[0]


@pytest.mark.usefixtures("kernel")
def test_packed_samples_in_several_rows_are_refused_where_they_would_see_each_other() -> None:
    several = {name: value.repeat(2, 1) for name, value in packed().items()}
    with engine_with("flash_attention_3", "llama") as engine:
        with pytest.raises(BatchError, match="tells packed samples apart only in a micro-batch of one row"):
            engine.step([several])
        engine.step([packed()])
        engine.step([{**several, "position_ids": torch.arange(12).repeat(2, 1)}])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("gpt_oss", {}, "GptOssForCausalLM cannot use attention=flash_attention_3 here; use attention=eager"),
        (
            "llama",
            {"attention_dropout": 0.1},
            "since it has no dropout; set attention_dropout to 0 in the config, or use",
        ),
        ("gpt2", {"attn_pdrop": 0.1}, "since it has no dropout; set attn_pdrop to 0"),
    ],
)
def test_what_a_kernel_would_silently_leave_out_is_refused(kind: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        blueprint(tiny_config(kind, **changes), attention="flash_attention_3")


def test_without_the_library_the_refusal_names_the_versions_that_work() -> None:
    with pytest.raises(ModelError) as raised:
        blueprint(tiny_config("llama"), attention="flash_attention_3")
    told = 'here; pip install "kernels>=0.1'
    assert told in str(raised.value)
    assert "which loads a prebuilt kernel, or use attention=eager or sdpa" in str(raised.value)


def test_a_kernel_that_does_not_load_is_refused_each_time_with_the_reason(hub: Callable[[Get], None]) -> None:
    def get(name: str, **_: Any) -> Any:
        raise FileNotFoundError(f"no build of {name} for this PyTorch\nand more")

    hub(get)
    for _ in range(2):
        with pytest.raises(ModelError, match=f"{NAME[3]} does not load .*no build of .* for this PyTorch") as raised:
            blueprint(tiny_config("llama"), attention="flash_attention_3")
        assert "\n" not in str(raised.value)
