"""Whole runs of a tiny model, from a configuration to a folder that Hugging Face loads."""

from __future__ import annotations

import io
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from megatrain.config import Config, load_config
from megatrain.device import probe
from megatrain.errors import ConfigError, DeviceError, ExportError, ModelError, NonFinite, PlanError
from megatrain.model import split_into_units
from megatrain.model.weight_sources import load_causal_lm
from megatrain.plan.machines import machine, save_hardware
from megatrain.run.sampling import Sampling
from megatrain.run.training import run_training
from megatrain.train.engine import Engine, StepOutput
from tests.tiny import BYTE_LLAMA

TEXT = "def answer(question):\n    return 42 if question else None\n" * 120


def configuration(tmp_path: Path, **changed: dict[str, Any]) -> Config:
    (tmp_path / "corpus.txt").write_text(TEXT)
    tree: dict[str, dict[str, Any]] = {
        "model": {"config": {**BYTE_LLAMA}},
        "data": {
            "sources": [str(tmp_path / "corpus.txt")],
            "tokenizer": "bytes",
            "sequence_length": 32,
            "cache": str(tmp_path / "cache"),
        },
        "train": {
            "steps": 4,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "eval_every": 2,
            "eval_batches": 1,
            "sample_tokens": 4,
            "log_every": 1,
        },
        "output": {"folder": str(tmp_path / "run"), "trackers": []},
    }
    for section, values in changed.items():
        tree.setdefault(section, {}).update(values)
    return Config.model_validate(tree)


def train(config: Config) -> str:
    """What the run tells the person."""
    console = Console(file=io.StringIO(), width=120)
    run_training(config, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder) if line["event"] == "stepped"]


def test_a_finished_run_folder_is_complete(tmp_path: Path) -> None:
    config = configuration(tmp_path, output={"trackers": ["tensorboard"]}, train={"optimizer": "muon"})
    said = train(config)
    folder = tmp_path / "run"
    files = ["config.yaml", "metrics.jsonl", "status.json", "trace.json"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, "checkpoints", "model", "tensorboard"])
    assert load_config(folder / "config.yaml") == config
    kinds = [line["event"] for line in lines(folder)]
    assert kinds == ["stepped"] * 2 + ["evaluated"] + ["stepped"] * 2 + [
        "evaluated",
        "sampled",
        "ended",
        "saved",
    ]
    found = losses(folder)
    assert found[-1] < found[0]
    assert (folder / "model" / "tokenizer.json").exists()
    assert json.loads((folder / "trace.json").read_text()).keys() >= {"traceEvents", "waits"}
    updated = "Muon, weight decay 0.1, momentum 0.95 with Nesterov, rates by match_rms_adamw; beside matrices AdamW, "
    card = (folder / "model" / "README.md").read_text()
    assert f"| optimizer | {updated}weight decay 0.1, learning rate 0.01 |" in card
    for part in (
        "LlamaForCausalLM",
        updated.split(";")[0],
        "14 updated whole (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj)",
        "optimizer state",
        "MFU:",
        "validation loss",
        "loaded with from_pretrained",
        "model",
    ):
        assert part in said


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_saved_model_is_the_trained_one(tmp_path: Path, precision: str) -> None:
    said = train(configuration(tmp_path, train={"precision": precision}))
    (proof,) = [line for line in said.splitlines() if "from_pretrained" in line]
    theirs, ours = (float(part.split()[0].rstrip(",")) for part in proof.replace("engine", "loss").split("loss ")[1:])
    assert theirs == pytest.approx(ours, rel=1e-3)
    assert load_causal_lm(str(tmp_path / "run" / "model")).num_parameters() > 0


def test_the_saved_config_repeats_the_run_bit_for_bit(tmp_path: Path) -> None:
    train(configuration(tmp_path))
    again = load_config(tmp_path / "run" / "config.yaml", [f"output.folder={tmp_path / 'again'}"])
    train(again)
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    first, second = (load_causal_lm(str(tmp_path / name / "model")).state_dict() for name in ("run", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_weights_missing_from_files_are_shown_by_name(tmp_path: Path) -> None:
    train(configuration(tmp_path, train={"steps": 1}))
    folder = tmp_path / "run" / "model"
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "vision.[bold]proj\x1b": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    more = {"folder": str(tmp_path / "more")}
    model = {"config": None, "path": str(folder)}
    said = train(configuration(tmp_path, model=model, train={"steps": 1}, output=more))
    assert "carried over" in said
    assert "1 tensor is not loaded: vision.[bold]proj\N{REPLACEMENT CHARACTER}" in said


def test_the_model_is_split_once_and_the_device_measured_once_in_each_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name, place in (("_ported", split_into_units), ("_measured_flops", probe)):
        honest = getattr(place, name)

        def counted(*given: Any, name: str = name, honest: Any = honest) -> Any:
            calls.append(" ".join([name, *(str(each) for each in given if isinstance(each, torch.dtype))]))
            return honest(*given)

        monkeypatch.setattr(place, name, counted)
    train(configuration(tmp_path, model={"verify": False}))
    in_each_precision = ["_measured_flops torch.bfloat16", "_measured_flops torch.float32"]
    assert sorted(calls) == [*in_each_precision, "_ported torch.bfloat16"]


def test_a_processor_that_is_slow_in_bfloat16_is_warned_of(tmp_path: Path) -> None:
    told = "matrix products take this processor 10 times as long in bf16 as in fp32: use precision fp32"
    for precision, flops, expected in (("bf16", 1e10, True), ("bf16", 6e10, False), ("fp32", 1e10, False)):
        described = replace(machine("cpu-desktop"), flops=flops, flops_fp32=1e11, device_bandwidth=None)
        save_hardware(described, tmp_path / "here.json")
        train_ = {"hardware": str(tmp_path / "here.json"), "precision": precision, "steps": 1}
        folder = str(tmp_path / f"{precision} {flops}")
        said = train(configuration(tmp_path, train=train_, model={"verify": False}, output={"folder": folder}))
        assert (told in " ".join(said.split())) == expected


def test_policy_keys_reach_the_policy_and_change_no_number(tmp_path: Path) -> None:
    train(configuration(tmp_path))
    overrides = {"weight_slots": 3, "activations": "recompute", "host_threads": 1}
    said = train(configuration(tmp_path, policy=overrides, output={"folder": str(tmp_path / "pinned")}))
    words = " ".join(said.split())
    assert "recomputes each layer" in words
    assert "host_threads 1" in words
    assert losses(tmp_path / "pinned") == losses(tmp_path / "run")


def test_without_validation_data_the_saved_model_is_still_checked(tmp_path: Path) -> None:
    said = train(configuration(tmp_path, data={"validation_fraction": 0.0}, train={"sample_tokens": 0}))
    assert "none held out" in said
    assert "from_pretrained" in said
    assert "evaluated" not in {line["event"] for line in lines(tmp_path / "run")}


@pytest.mark.parametrize(
    ("changed", "error", "expected"),
    [
        ({"data": {"sequence_length": 65}}, ConfigError, "65 tokens exceed the model's 64 positions"),
        ({"model": {"config": {"model_type": "llama", "vocab_size": 256, "hidden_size": 8, "intermediate_size": 8,
                               "num_hidden_layers": 1, "num_attention_heads": 1}}},
         ConfigError, "needs a vocabulary of 257, but the model has 256"),
        ({"train": {"device": "tpu"}}, DeviceError, "train.device: 'tpu' is not a device"),
        ({"train": {"hardware": "h300"}}, PlanError, "train.hardware: unknown machine 'h300'"),
        ({"train": {"learning_rates": {"*lm_haed*": 1e-5}}}, ConfigError,
         "train.learning_rates: no trained parameter matches '*lm_haed*'; names look like 'lm_head.weight'"),
        ({"train": {"freeze": ["foo*"]}}, ModelError, "train.freeze, model LlamaForCausalLM: no parameter matches"),
        ({"train": {"weight_decay": 1e3}}, ConfigError, "train.weight_decay: "),
    ],
)  # fmt: skip
def test_user_errors_leave_no_run_folder(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error) as caught:
        train(configuration(tmp_path, **changed))
    assert expected in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_a_model_is_reported_before_its_tokenizer(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    config = configuration(tmp_path).model_dump()
    config["model"] |= {"path": str(adapter), "config": None}
    config["data"]["tokenizer"] = None
    with pytest.raises(ModelError, match="holds a LoRA adapter for org/base, not a whole model"):
        train(Config.model_validate(config))


def test_a_run_shorter_than_warmup_ends_during_warmup(tmp_path: Path) -> None:
    train(configuration(tmp_path, train={"warmup_steps": 10}))
    rates = [line["lr"] for line in lines(tmp_path / "run") if line["event"] == "stepped"]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])


def not_finite(engine: Engine, micro_batches: Any, *how: Any) -> StepOutput:
    raise NonFinite("the gradient is not finite", where="layer 1")


def test_a_diverging_run_keeps_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(configuration(tmp_path))
    before = load_causal_lm(str(tmp_path / "run" / "model")).state_dict()
    monkeypatch.setattr(Engine, "step", not_finite)
    for folder in ("run", "fresh"):
        config = configuration(tmp_path, output={"folder": str(tmp_path / folder), "overwrite": True})
        with pytest.raises(NonFinite, match="3 steps in a row not finite"):
            train(config)
        assert [line["step"] for line in lines(tmp_path / folder) if line["event"] == "skipped"] == [1, 2, 3]
        assert "NonFinite" in json.loads((tmp_path / folder / "status.json").read_text())["error"]
    assert not (tmp_path / "fresh" / "model").exists()
    after = load_causal_lm(str(tmp_path / "run" / "model")).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.few(1)
@pytest.mark.parametrize("on_nonfinite", ["skip", "rollback"])
def test_nonfinite_weights_end_the_run_and_are_named(on_nonfinite: str, tmp_path: Path) -> None:
    train(configuration(tmp_path, train={"steps": 1, "sample_tokens": 0}))
    file = tmp_path / "run" / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, file, {"format": "pt"})
    model = {"config": None, "path": str(file.parent)}
    nonfinite = {"on_nonfinite": on_nonfinite}
    config = configuration(tmp_path, model=model, train=nonfinite, output={"folder": str(tmp_path / "next")})
    what = r"the loss is nan, and some weights are not finite either: model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(NonFinite, match=f"^step 1: 1 step not finite, the last one: {what}; start from other weights"):
        train(config)
    (skipped,) = [line for line in lines(tmp_path / "next") if line["event"] == "skipped"]
    assert skipped["step"] == 1
    assert skipped["reason"].startswith("the loss is nan, and some weights")


def test_a_partially_applied_step_is_never_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "step", not_finite)
    with pytest.raises(NonFinite, match="step 1: 1 step not finite"):
        train(configuration(tmp_path, train={"max_grad_norm": None}))


@pytest.mark.parametrize(("number", "every"), [(signal.SIGINT, 500), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, every: int
) -> None:
    honest = Engine.step

    def interrupted(engine: Engine, micro_batches: Any, *how: Any) -> StepOutput:
        signal.raise_signal(number)
        return honest(engine, micro_batches, *how)

    monkeypatch.setattr(Engine, "step", interrupted)
    said = train(configuration(tmp_path, checkpoint={"every": every}))
    assert "stopped after 1 of 4 steps" in said
    told = ["stepped", "ended", *(["saved"] if every else [])]
    assert [line["event"] for line in lines(tmp_path / "run")] == told
    saved = "checkpoints/step-00000001" if every else "model"
    assert load_causal_lm(str(tmp_path / "run" / saved)).num_parameters() > 0
    assert (tmp_path / "run" / "model").exists() == (not every)


def test_a_failed_save_keeps_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    train(configuration(tmp_path))
    before = sorted(path.name for path in (tmp_path / "run" / "model").iterdir())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(ExportError, match="No space left on device"):
        train(configuration(tmp_path, output={"overwrite": True}))
    assert sorted(path.name for path in (tmp_path / "run" / "model").iterdir()) == before
    assert load_causal_lm(str(tmp_path / "run" / "model")).num_parameters() > 0


def test_a_trace_is_written_on_request_or_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    train(config.model_copy(update={"trace": str(tmp_path / "traces" / "run.json")}))
    events = json.loads((tmp_path / "traces" / "run.json").read_text())["traceEvents"]
    assert {"FORWARD u0 m0", "BACKWARD u1 m1", "UPDATE u2"} <= {event["name"] for event in events}
    (tmp_path / "again").mkdir()
    blocked = configuration(tmp_path / "again").model_copy(update={"trace": str(tmp_path / "corpus.txt" / "run.json")})
    with pytest.raises(ConfigError, match=r"trace: .*corpus.txt/run.json: .*corpus.txt is not a folder"):
        train(blocked)


def test_long_generation_continues_with_half_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], int]] = []

    def counting(engine: Engine, tokenizer: Any, ids: list[int], sampling: Sampling, **_: Any) -> list[int]:
        assert sampling.most is not None
        seen.append((list(ids), sampling.most))
        return [65 + (len(seen) - 1) % 26] * sampling.most

    monkeypatch.setattr("megatrain.run.sampling.draw_ids", counting)
    train(configuration(tmp_path, train={"sample_tokens": 50, "sample_prompts": "x" * 7, "steps": 1}))
    assert [(len(ids), tokens) for ids, tokens in seen] == [(8, 24), (16, 16), (16, 10)]
    assert seen[0][0] == [256, *b"xxxxxxx"]
    assert seen[1][0] == [65] * 16
    texts = [line["text"] for line in lines(tmp_path / "run") if line["event"] == "sampled"]
    assert texts == ["A" * 24 + "B" * 16 + "C" * 10]
