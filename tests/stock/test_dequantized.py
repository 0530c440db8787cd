"""Checkpoints published in mxfp4, fp8 and compressed-tensors x transformers' own dequantization, bit for bit."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.quantizers.base import HfQuantizer

from megatrain import Engine
from megatrain.config.keys import ModelSection
from megatrain.errors import ModelError
from megatrain.hf import streamed
from megatrain.model import PretrainedSource, carried_by, dequantize, pretrained
from megatrain.model.architecture import read_config
from megatrain.model.carried import WAS_QUANTIZED
from megatrain.model.skeleton import blueprint
from tests.run.test_training import configuration, train
from tests.tiny import FAMILIES, VOCAB, equal, stock_gradients, unequal_batches

Tensors = dict[str, Tensor]
GPT_OSS: dict[str, Any] = {
    **{**FAMILIES["mixtral"], "model_type": "gpt_oss", "head_dim": 8, "hidden_size": 64, "intermediate_size": 32},
    "num_hidden_layers": 2,
}
MINIMAX: dict[str, Any] = {
    **{**FAMILIES["mixtral"], "model_type": "minimax_m2", "head_dim": 8, "rotary_dim": 8, "num_hidden_layers": 2},
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
}
DEEPSEEK: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
    **{"q_lora_rank": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
BLOCK = 16
PLAIN = re.compile(r"embed|head|norm|gate\.weight$|bias|sinks|router")
"""Names of tensors that publishers leave as they are."""


def skip_without_names() -> None:
    if not dequantize._KINDS["mxfp4"].serialized_names:
        pytest.skip(f"transformers {transformers.__version__} does not tell which tensors make a quantized weight")


def published(
    folder: Path, fields: dict[str, Any], quantization: dict[str, Any], quantize: Callable[..., Tensors]
) -> Path:
    """A folder as published: bfloat16, and the tensors that `quantize` makes of each matrix of a layer.

    Skips the test where transformers does not tell which tensors make a weight: there all such folders are refused.
    """
    skip_without_names()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**json.loads(json.dumps(fields)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if not PLAIN.search(name) and tensors[name].dim() > 1]:
        tensors |= quantize(name, tensors.pop(name).float())
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": quantization}))
    return folder


def to_fp8(
    block: tuple[int, int] = (BLOCK, BLOCK), end: str = "weight_scale_inv", *, power: bool = False
) -> Callable[..., Tensors]:
    """Blocks of fp8 with float32 scales, or with powers of two in one byte."""

    def quantize(name: str, weight: Tensor) -> Tensors:
        rows, columns = weight.shape
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        scales = torch.empty(grid)
        values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        for row in range(grid[0]):
            for column in range(grid[1]):
                part = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
                scale = weight[part].abs().max() / 448
                scales[row, column] = scale.log2().ceil().exp2() if power else scale
                values[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
        stored = scales.to(torch.float8_e8m0fnu) if power else scales
        return {name: values, f"{name.removesuffix('weight')}{end}": stored}

    return quantize


def to_mxfp4(name: str, weight: Tensor) -> Tensors:
    """Random codes and exponents in the shape of an experts' tensor [n, in, out]."""
    if "experts" not in name:
        return {name: weight.bfloat16()}
    count, inside, outside = weight.shape
    return {
        f"{name}_blocks": torch.randint(0, 256, (count, outside, inside // 32, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(100, 130, (count, outside, inside // 32), dtype=torch.uint8),
    }


def to_fp4_experts(name: str, weight: Tensor) -> Tensors:
    """As DeepSeek V4: experts of random 4-bit codes with a power of two for 32 of them, the rest in fp8."""
    if "experts." not in name or "shared" in name:
        return to_fp8(power=True, end="scale")(name, weight)
    rows, columns = weight.shape
    return {
        name: torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8),
        name.replace(".weight", ".scale"): torch.randint(110, 130, (rows, columns // 8), dtype=torch.uint8).view(
            torch.float8_e8m0fnu
        ),
    }


def packed(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [rows, n], lowest bits first, in int32 [rows, words]."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each)).view(codes.shape[0], -1, each)
    words = (padded << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def to_int(bits: int, *, size: int = 8, zeros: bool = False) -> Callable[..., Tensors]:
    """Random integers with a bfloat16 scale for each group of columns, and packed zero points."""

    def quantize(name: str, weight: Tensor) -> Tensors:
        rows, columns = weight.shape
        stem = name.removesuffix("weight")
        found = {
            f"{stem}weight_packed": packed(torch.randint(0, 1 << bits, (rows, columns)), bits),
            f"{stem}weight_scale": (torch.rand(rows, columns // size) / 50).bfloat16(),
            f"{stem}weight_shape": torch.tensor([rows, columns]),
        }
        if zeros:
            points = torch.randint(0, 1 << bits, (rows, columns // size))
            found[f"{stem}weight_zero_point"] = packed(points.T, bits).T.contiguous()
        return found

    return quantize


def to_float(*, by_row: bool) -> Callable[..., Tensors]:
    """fp8 with a bfloat16 `weight_scale` for each row or for all."""

    def quantize(name: str, weight: Tensor) -> Tensors:
        most = weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max().reshape(1)
        scale = (most / 448).bfloat16()
        stem = name.removesuffix("weight")
        more = {f"{stem}input_scale": torch.ones(1, dtype=torch.bfloat16)}
        return {name: (weight / scale.float()).to(torch.float8_e4m3fn), f"{stem}weight_scale": scale, **more}

    return quantize


def compressed(form: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """The quantization_config of a compressed-tensors checkpoint."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}},
        **{"quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None},
    }


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
INT4 = compressed("pack-quantized", 4, "int", "group", group_size=8)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Tensors], Callable[[], Any]]] = {
    "gpt-oss": (GPT_OSS, MXFP4, to_mxfp4, lambda: Mxfp4Config(dequantize=True)),
    "minimax": (MINIMAX, FP8, to_fp8(), lambda: FineGrainedFP8Config(dequantize=True)),
    "deepseek": (DEEPSEEK, FP8, to_fp8(), lambda: FineGrainedFP8Config(dequantize=True)),
    "powers": (
        *(DEEPSEEK, {**FP8, "scale_fmt": "ue8m0"}, to_fp8(power=True)),
        lambda: FineGrainedFP8Config(dequantize=True),
    ),
    "fp4-experts": (MINIMAX, FP8, to_fp4_experts, lambda: FineGrainedFP8Config(dequantize=True)),
}


def loaded(source: PretrainedSource) -> Tensors:
    """Every parameter of a source by name."""
    found: Tensors = {}

    class Kept:
        def master(self, name: str) -> Tensor:
            return found[name]

        def write_master(self, name: str, value: Tensor) -> None:
            found[name] = value.to(torch.float32, copy=True)

    source.fill(Kept(), [[name for name, _ in source.model.named_parameters()]])
    return found


def require_equal(folder: Path, stock: PreTrainedModel) -> None:
    """Every parameter as MegaTrain loads it has the bits of the stock model's, in either dtype."""
    found = loaded(PretrainedSource(folder))
    expected = dict(stock.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].to(value.dtype), value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_weights_have_the_bits_of_transformers_dequantization(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    fields, quantization, quantize, how = CASES[case]
    folder = published(tmp_path / "model", fields, quantization, quantize)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how())
    require_equal(folder, stock)


INTEGERS: dict[str, tuple[dict[str, Any], Callable[..., Tensors]]] = {
    "int4": (INT4, to_int(4)),
    "int8": (compressed("pack-quantized", 8, "int", "group", group_size=8), to_int(8)),
    "fp8-rows": (compressed("float-quantized", 8, "float", "channel"), to_float(by_row=True)),
    "fp8-all": (compressed("float-quantized", 8, "float", "tensor"), to_float(by_row=False)),
}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")  # both are needed to dequantize
@pytest.mark.parametrize("case", INTEGERS)
@pytest.mark.parametrize("fields", [DEEPSEEK, MINIMAX], ids=["deepseek", "minimax"])
def test_compressed_tensors_have_the_bits_of_the_stock_library(
    case: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    folder = published(tmp_path / "model", fields, *INTEGERS[case])
    how = CompressedTensorsConfig(dequantize=True)
    require_equal(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=how))


# Values that no library here computes right, or that need another package: by their definition ------------------------


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, True)])
@pytest.mark.parametrize("fields", [DEEPSEEK, MINIMAX], ids=["deepseek", "minimax"])
def test_integers_are_their_code_less_their_zero_times_their_scale(
    fields: dict[str, Any], bits: int, zeros: bool, tmp_path: Path
) -> None:
    """transformers cannot load experts with zero points."""
    quantization = compressed("pack-quantized", bits, "int", "group", group_size=8, symmetric=not zeros)
    folder = published(tmp_path / "model", fields, quantization, to_int(bits, zeros=zeros))
    tensors = load_file(folder / "model.safetensors")
    stem = "model.layers.1.self_attn.o_proj."
    rows, columns = tensors[f"{stem}weight_shape"].tolist()
    scales, content = tensors[f"{stem}weight_scale"], tensors[f"{stem}weight_packed"].tolist()
    found = loaded(PretrainedSource(folder))[f"{stem}weight"]

    def code(words: list[int], place: int) -> int:
        return (words[place * bits // 32] >> (place * bits % 32)) & ((1 << bits) - 1)

    for row in range(rows):
        for column in range(columns):
            zero = 1 << (bits - 1)
            if zeros:
                zero = code(tensors[f"{stem}weight_zero_point"][:, column // 8].tolist(), row)
            exact = torch.tensor(code(content[row], column) - zero).bfloat16() * scales[row, column // 8]
            assert found[row, column] == exact.float()


def test_a_cut_block_has_the_scale_of_its_place(tmp_path: Path) -> None:
    """transformers takes 24 rows under two scales of blocks of 16 for two blocks of 12."""
    fields = {**DEEPSEEK, "kv_lora_rank": 8}  # 24 rows, and 8 columns
    folder = published(tmp_path / "model", fields, FP8, to_fp8())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    scales = tensors[f"{name}_scale_inv"]
    assert scales.shape == (2, 2)
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:24, :32]
    assert torch.equal(loaded(PretrainedSource(folder))[name], tensors[name].float() * whole)


# What becomes of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["minimax", "int4", *(pytest.param(case, marks=pytest.mark.slow) for case in ("gpt-oss", "deepseek"))]
)
def test_a_run_goes_on_from_its_checkpoint_and_exports_plain_bfloat16(case: str, tmp_path: Path) -> None:
    fields, quantization, quantize = CASES[case][:3] if case in CASES else (MINIMAX, *INTEGERS[case])
    folder = published(tmp_path / "model", fields, quantization, quantize)
    masters = loaded(PretrainedSource(folder))
    with Engine.from_pretrained(folder, device="cpu", verify=False) as engine:
        saved = engine.save_pretrained(tmp_path / "export")
        exact = engine.save_pretrained(tmp_path / "exact", precision="fp32")
        engine.step(unequal_batches(1))
        checkpoint = engine.save(tmp_path / "checkpoints").wait()
        expected = engine.step(unequal_batches(1)).loss, engine.master_weights()
    with Engine.from_checkpoint(checkpoint, verify=False) as engine:
        assert engine.step(unequal_batches(1)).loss == expected[0]
        assert equal(engine.master_weights(), expected[1])
        later = engine.save_pretrained(tmp_path / "later")
    for there, dtype in ((saved, "bfloat16"), (later, "bfloat16"), (exact, "float32")):
        written = json.loads((there / "config.json").read_text())
        assert written["dtype"] == dtype
        assert not {"quantization_config", WAS_QUANTIZED} & written.keys()
    model, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(report.values())
    for name, value in model.named_parameters():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, masters[name].bfloat16()), name


@pytest.mark.slow
def test_a_run_and_its_resumption_save_bfloat16_unless_told_otherwise(tmp_path: Path) -> None:
    fields = {**MINIMAX, "vocab_size": 260}
    folder = str(published(tmp_path / "model", fields, *CASES["minimax"][1:3]))

    def dtype_of(name: str, resume: str | None = None, **changes: Any) -> str:
        config = configuration(tmp_path, output={"folder": str(tmp_path / name)}, **changes)
        train(config.model_copy(update={"model": ModelSection(path=folder), "resume": resume}))
        written: str = json.loads((tmp_path / name / "model" / "config.json").read_text())["dtype"]
        return written

    steps = {"steps": 1, "sample_tokens": 0}
    assert dtype_of("run", train=steps, checkpoint={"every": 1}) == "bfloat16"
    shutil.rmtree(tmp_path / "run" / "model")
    assert dtype_of("run", train=steps | {"steps": 2}, resume="auto") == "bfloat16"


@pytest.mark.slow
def test_a_streamed_trainer_saves_bfloat16(tmp_path: Path) -> None:
    folder = published(tmp_path / "model", *CASES["minimax"][:3])
    batch = unequal_batches(1)[0]
    arguments = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    rows = [{name: value[0] for name, value in batch.items()}] * 8
    trainer = streamed(Trainer)(str(folder), arguments, train_dataset=rows, engine_options={"verify": False})
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_load_takes_one_weight_beside_the_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bytes that torch allocates, but for the maps of files; a weight is the largest one in float32."""

    class Dropped:
        def master(self, name: str) -> Tensor:
            raise AssertionError(name)

        def write_master(self, name: str, value: Tensor) -> None:
            pass

    monkeypatch.setattr(pretrained, "BATCH_NBYTES", 1)  # the masters take one weight at a time
    wide = {"hidden_size": 256, "intermediate_size": 512}
    for number, (fields, quantization, quantize) in enumerate(
        [*(CASES[case][:3] for case in ("gpt-oss", "minimax")), *((DEEPSEEK, *of) for of in INTEGERS.values())]
    ):
        folder = published(tmp_path / str(number), {**fields, **wide}, quantization, quantize)
        source = PretrainedSource(folder)
        sizes = {name: 4 * parameter.numel() for name, parameter in source.model.named_parameters()}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            source.fill(Dropped(), [[*sizes]])
        changes = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
        changes.sort(key=lambda each: each.start_ns())
        of_file = (folder / "model.safetensors").stat().st_size
        held = itertools.accumulate(each.nbytes() for each in changes if abs(each.nbytes()) != of_file)
        assert max(held) <= 2.3 * max(sizes.values())


def test_an_adapter_is_trained_over_the_dequantized_base(tmp_path: Path) -> None:
    folder = published(tmp_path / "model", *CASES["minimax"][:3])
    adapter = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    with Engine.from_pretrained(folder, device="cpu", verify=False, adapter=adapter) as engine:
        engine.step(unequal_batches(1))
        saved = engine.save_pretrained(tmp_path / "adapter")
        batch = unequal_batches(1)[0]
        ours = engine.evaluate([batch])
    how = FineGrainedFP8Config(dequantize=True)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=how)
    theirs = peft.PeftModel.from_pretrained(base, saved, is_trainable=True).float()
    expected, _ = stock_gradients(theirs, [batch])
    assert ours == pytest.approx(expected, rel=2e-2)


def test_quantized_files_are_not_read_instead_of_weights(tmp_path: Path) -> None:
    source = PretrainedSource(published(tmp_path / "model", *CASES["minimax"][:3]))
    names = [name for name, _ in source.model.named_parameters()]
    held = source.in_files(names, torch.bfloat16)
    assert "model.embed_tokens.weight" in held.files
    said = "is quantized in the files (F32 and F8_E4M3), so they do not hold its value"
    assert held.others["model.layers.0.self_attn.q_proj.weight"] == said
    assert held.others["model.layers.0.mlp.experts.down_proj"] == said


def test_the_first_lines_name_the_format(tmp_path: Path) -> None:
    folder = published(tmp_path / "model", DEEPSEEK, *INTEGERS["int4"])
    source = PretrainedSource(folder)
    assert re.fullmatch(r"\d+ tensors are published in compressed-tensors int4 and loaded .*", source.dequantized())
    assert not source.unexpected


def test_a_plan_is_that_of_the_plain_model() -> None:
    skip_without_names()
    plain, quantized = (read_config({**GPT_OSS, **more}, where="x") for more in ({}, {"quantization_config": MXFP4}))
    outlines = [
        {name: each.shape for name, each in blueprint(config).named_parameters()} for config in (plain, quantized)
    ]
    assert outlines[0] == outlines[1]


OTHERS: list[tuple[Mapping[str, Any], str]] = [
    ({"quant_method": "awq"}, "its method is awq"),
    ({"load_in_4bit": True}, "its method is None"),
    (compressed("nvfp4-pack-quantized", 4, "float", "tensor_group"), "in the format nvfp4-pack-quantized"),
    (compressed("pack-quantized", 3, "int", "group"), "of 3 bits"),
    (compressed("pack-quantized", 4, "int", "group", actorder="group"), "columns in another order"),
    ({"quant_method": "compressed-tensors"}, "without config_groups"),
]


@pytest.mark.parametrize(("quantization", "says"), OTHERS, ids=[says for _, says in OTHERS])
def test_other_formats_are_refused_from_the_config(quantization: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"a quantized checkpoint that cannot be dequantized .*{says}"):
        blueprint(read_config({**FAMILIES["llama"], "quantization_config": dict(quantization)}, where="x"))


def test_a_library_that_does_not_tell_the_names_is_refused_not_failed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.17 is."""
    monkeypatch.setattr(dequantize._KINDS["mxfp4"], "serialized_names", dequantize._names_of(HfQuantizer))
    with pytest.raises(ModelError, match=r"transformers .* does not tell .*install a later transformers"):
        blueprint(read_config({**GPT_OSS, "quantization_config": MXFP4}, where="x"))


def test_no_later_library_is_advised_for_a_format_that_is_refused_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize._KINDS["compressed-tensors"], "serialized_names", {})
    with pytest.raises(ModelError, match="without config_groups"):
        blueprint(read_config({**FAMILIES["llama"], "quantization_config": OTHERS[-1][0]}, where="x"))


def test_values_without_their_scales_are_refused_before_loading(tmp_path: Path) -> None:
    folder = published(tmp_path / "model", *CASES["minimax"][:3])
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.0.self_attn.q_proj.weight_scale_inv")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"cannot convert model.layers.0.self_attn.q_proj.weight .*without a scale"):
        PretrainedSource(folder)


def test_unread_tensors_are_carried_over_unless_they_are_quantized(tmp_path: Path) -> None:
    """A layer for the prediction of further tokens: an export without quantization cannot say how to read its fp8."""
    folder = published(tmp_path / "model", DEEPSEEK, FP8, to_fp8())
    file = folder / "model.safetensors"
    further = {"model.layers.2.enorm.weight": torch.ones(32, dtype=torch.bfloat16)}
    quantized = to_fp8()("model.layers.2.eh_proj.weight", torch.ones(32, 64))
    save_file({**load_file(file), **further, **quantized}, file, {"format": "pt"})
    source = PretrainedSource(folder)
    assert len(source.unexpected) == 3
    assert [tensor.name for tensor in carried_by(source.model).tensors] == [*further]
    assert source.left_out() == "1 tensor is not loaded: model.layers.2.enorm.weight"
    assert "lacks 2 quantized tensors that the class does not read" in source.dequantized()
