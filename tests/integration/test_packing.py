"""Packed samples give the gradients that they give unpacked, or packing is refused; asked of engine and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

import megatrain
from megatrain.data.encode import EncodedSample
from megatrain.data.loader import Batch, Loader
from megatrain.data.packing import PackedRows, SampleRows
from megatrain.data.sample_cache import SampleFile, write_samples
from megatrain.errors import BatchError
from megatrain.model import why_not_packable
from megatrain.model.packed_sequences import only_single_rows
from megatrain.optim import AdamW
from tests.kinds import KINDS

WINDOW = 40
LENGTHS = (17, 5, 11, 3, 29, 2, 8, 23)

ATTENTION: dict[str, dict[str, Any]] = {
    "full": {"model_type": "llama", **KINDS["llama"]},
    "sliding window": {"model_type": "mistral", **KINDS["llama"], "sliding_window": 4},
    "hybrid": {
        "model_type": "gemma3_text", **KINDS["gemma3_text"], "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "chunked": {
        "model_type": "llama4_text", **KINDS["llama"], "num_local_experts": 2, "attention_chunk_size": 8, "head_dim": 8,
        "intermediate_size_mlp": 48,
    },
    "learned positions": {"model_type": "gpt2", **KINDS["gpt2"]},
}  # fmt: skip


MIXES_CHUNKS = not hasattr(masking_utils, "packed_sequence_compatibility_function")
"""An older transformers divides packed rows into chunks, not their samples."""


def model_of(fields: dict[str, Any], attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    fields = dict(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleFile:
    generator = np.random.default_rng(0)
    encoded = []
    for number, length in enumerate(LENGTHS):
        trained = generator.random(length) < 0.6
        trained[0], trained[-1] = False, True
        encoded.append(EncodedSample(generator.integers(3, 96, length).astype(np.int32), trained, str(number)))
    return write_samples(tmp_path_factory.mktemp("samples") / "x.bin", encoded, 96, {})


def one_epoch(rows: PackedRows | SampleRows, size: int) -> list[Batch]:
    """Every sample once, in one step."""
    return next(Loader(rows, micro_batch=size, micro_batches=-(-len(rows) // size), seed=0))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        pytest.param(kind, kernel, marks=pytest.mark.slow if (place + (kernel == "eager")) % 2 else ())
        for place, kind in enumerate(ATTENTION)
        for kernel in ("sdpa", "eager")
    ],
)
def test_packed_and_unpacked_gradients_are_equal(samples: SampleFile, kind: str, kernel: str) -> None:
    if kind == "chunked" and MIXES_CHUNKS:
        pytest.skip("this transformers mixes them, and they are refused")
    model = model_of(ATTENTION[kind], kernel)
    every = np.arange(len(samples))
    packed = PackedRows(samples, every, WINDOW, 0)
    alone = SampleRows(samples, every, 1)
    assert len(packed) == 3  # of 98 tokens, so rows hold several samples and padding
    with megatrain.Engine.from_model(
        model, device="cpu", precision="fp32", optimizer=AdamW(lr=0.0), verify=False
    ) as engine:
        together = engine.gradients(one_epoch(packed, 3))
        apart = engine.gradients(one_epoch(alone, 1))
        grouped = engine.gradients(one_epoch(SampleRows(samples, every, 4), 4))
    scale = max(float(gradient.norm()) for gradient in apart.values())
    for name, expected in apart.items():
        assert float((together[name] - expected).norm()) <= 1e-6 * max(float(expected.norm()), scale), name
        assert float((grouped[name] - expected).norm()) <= 1e-6 * max(float(expected.norm()), scale), name


def test_packed_rows_may_exceed_the_models_positions(samples: SampleFile) -> None:
    """As TRL makes one row of a batch of packed ones."""
    model = model_of({**ATTENTION["full"], "max_position_embeddings": WINDOW}, "sdpa")
    packed = one_epoch(PackedRows(samples, np.arange(len(samples)), WINDOW, 0), 3)[0]
    one_row = {name: value.reshape(1, -1) for name, value in packed.items()}
    one_row["labels"][:, ::WINDOW] = -100  # a first token follows none, where rows are apart
    with megatrain.Engine.from_model(model, device="cpu", precision="fp32", verify=False) as engine:
        expected, found = engine.gradients([packed]), engine.gradients([one_row])
        beyond = {**one_row, "position_ids": one_row["position_ids"] + WINDOW}
        with pytest.raises(BatchError, match=f"position_ids go up to .*, but the model has {WINDOW} positions"):
            engine.gradients([beyond])
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def test_packing_without_position_ids_would_change_gradients(samples: SampleFile) -> None:
    """So the test above can fail."""
    model = model_of(ATTENTION["full"], "sdpa")
    (batch,) = one_epoch(PackedRows(samples, np.arange(len(samples)), WINDOW, 0), 3)
    with megatrain.Engine.from_model(
        model, device="cpu", precision="fp32", optimizer=AdamW(lr=0.0), verify=False
    ) as engine:
        right = engine.gradients([batch])
        wrong = engine.gradients([{name: batch[name] for name in ("input_ids", "labels")}])
    assert max(float((right[name] - wrong[name]).norm() / right[name].norm()) for name in right) > 1e-2


def test_flops_count_sequences_and_trained_tokens() -> None:
    ids, positions = torch.arange(12).unsqueeze(0), torch.arange(6).repeat(1, 2)
    labels = ids.clone()
    labels[:, 6] = -100  # the first token of the second sample
    with megatrain.Engine.from_model(model_of(ATTENTION["full"], "sdpa"), verify=False) as engine:
        packed = engine.diagnostics.step_flops([{"input_ids": ids, "labels": labels, "position_ids": positions}])
        rows = {"input_ids": ids.view(2, 6), "labels": labels.view(2, 6)}
        assert packed == engine.diagnostics.step_flops([rows])
        assert packed < engine.diagnostics.step_flops([{"input_ids": ids, "labels": labels}])
        head = 6 * engine.structure.vocab_size * engine.structure.hidden_size
        fewer = {**rows, "labels": rows["labels"].masked_fill(torch.arange(6) < 3, -100)}
        assert engine.diagnostics.step_flops([fewer]) == pytest.approx(packed - 4 * head)


HYBRID_STATE = {"model_type": "lfm2", **KINDS["llama"], "layer_types": ["conv", "full_attention"]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "mamba", **KINDS["mamba"]}, "does not take position_ids"),
        ({"model_type": "bamba", **KINDS["bamba"]}, "would see each other"),
        (HYBRID_STATE, "would see each other"),
        ({"model_type": "opt", **KINDS["opt"]}, "would see each other"),
    ],
)
def test_models_that_mix_packed_samples_are_reported(fields: dict[str, Any], reason: str) -> None:
    model = model_of(fields, "eager")
    assert reason in why_not_packable(model.config, type(model), "eager")


@pytest.mark.parametrize("kind", ATTENTION)
def test_models_that_separate_packed_samples_are_accepted(kind: str) -> None:
    model = model_of(ATTENTION[kind], "sdpa")
    reason = why_not_packable(model.config, type(model), "sdpa")
    assert (reason == "") == (kind != "chunked" or not MIXES_CHUNKS), reason


CHOOSING = [kind for kind in sorted(KNOWN) if "index_topk" in vars(CONFIG_MAPPING[kind])]
"""Types whose attention reads the tokens that an indexer chooses for it."""
COMPRESSING = {"deepseek_v4"}
"""Those whose layers also join neighbouring tokens, whichever samples they are from."""


@pytest.mark.parametrize("kind", CHOOSING)
def test_models_that_choose_tokens_separate_packed_samples(kind: str) -> None:
    reason = why_not_packable(AutoConfig.for_model(kind), None, "eager")
    assert (reason == "") == (kind not in COMPRESSING), reason


def test_flash_attention_requires_single_rows() -> None:
    assert only_single_rows("flash_attention_2")
    assert only_single_rows("kernels-community/vllm-flash-attn3")
    assert not only_single_rows("sdpa")
    assert not only_single_rows("flex_attention")


def test_written_samples_round_trip(samples: SampleFile, tmp_path: Path) -> None:
    assert [len(samples.sample(number)[0]) for number in range(len(samples))] == list(LENGTHS)
    assert samples.targets.sum() == sum(samples.sample(number)[1].sum() for number in range(len(samples)))
