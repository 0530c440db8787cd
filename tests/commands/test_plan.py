"""`megatrain plan` from a model's name to what is shown and written, and every mistake in one line."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import megatrain.commands.plan
import megatrain.plan.analysis
import megatrain.run.this_machine
from bench.shapes import llama_shape
from megatrain.commands.plan import Options, find_hardware, find_model, more_tokens, run_plan
from megatrain.errors import ConfigError, DoesNotFit, MegaTrainError, ModelError, PlanError
from megatrain.plan import Question, find_plan, machine, measured_models, save_hardware
from megatrain.spec import Limits
from megatrain.spec.limits import parse_nbytes
from tests.model.test_architecture import SILENT
from tests.tiny import FAMILIES, tiny_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
}

FEW: dict[str, Any] = {"tokens_per_step": 4096, "sequence_length": 512}
"""What plans in a second where tokens are not the question."""


@pytest.fixture
def config(tmp_path: Path) -> str:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder / "config.json")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A saved model that is large on paper."""
    path = tmp_path / "saved.json"
    path.write_text(json.dumps({"model": asdict(llama_shape("1B", 4, 4096, vocabulary=32_000))}))
    return str(path)


@pytest.fixture
def plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is planned but what is asked about: what else would gain takes four times as long."""
    monkeypatch.setattr(megatrain.plan.analysis, "changes", lambda *_: ())


def shown(model: str, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    run_plan(model, console, Options(**{"hardware": "rtx-4090", **options}))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("plan_alone")
def test_plans_for_ranks_show_the_launch_command(saved: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = shown(saved, hardware="8x-h100", ranks=16, nodes=2, sequence_length=512, json=str(file))
    assert "65,536 tokens in 1 micro-batch of 8 x 512 on each rank" in text
    assert "16 on 2 machines, 8 on each: each with 1/16 of the state and 4,096 tokens of a step" in text
    assert "2.19 TB host" in text
    assert "torchrun --nnodes 2 --nproc-per-node 8 " in text
    content = json.loads(file.read_text())
    assert (content["question"]["ranks"], content["question"]["tokens_per_step"]) == (16, 65_536)
    assert find_model(str(file), "bf16") == find_model(saved, "bf16"), "for any number of ranks again"


@pytest.mark.usefixtures("plan_alone")
def test_an_optimizer_that_keeps_less_is_planned_with_less(saved: str, tmp_path: Path) -> None:
    """4 bytes of each parameter instead of 8."""

    def state(model: str, optimizer: str | None) -> int:
        text = shown(model, sequence_length=512, optimizer=optimizer, json=str(tmp_path / f"{optimizer}.json"))
        assert optimizer is None or f"train.optimizer={optimizer}" in text
        assert ("48 updated whole (c_attn, c_proj, c_fc), 84.9M of 124M" in " ".join(text.split())) == (
            optimizer == "muon"
        )
        content = json.loads((tmp_path / f"{optimizer}.json").read_text())
        return sum(row["nbytes"] for row in content["memory"] if row["use"] == "optimizer state")

    adamw, lion = state(saved, "adamw"), state(saved, "lion")
    assert adamw - lion == 4 * llama_shape("1B", 4, 4096, vocabulary=32_000).numel
    assert state(str(tmp_path / "lion.json"), None) == lion  # as the saved plan has it
    assert "train.optimizer=lion" in shown(str(tmp_path / "lion.json"), sequence_length=512)
    with pytest.raises(ConfigError, match="--optimizer: 'adam' is no optimizer here; use adamw or lion"):
        shown(saved, optimizer="adam")
    matrices = 12 * 12 * 768**2  # of each of 12 layers: 3 for q, k and v, 1 behind them and 4 + 4 for the MLP
    padding = 12 * 10 << 16  # at most, between a layer's other parameters and its matrices
    assert 0 <= 4 * matrices - (state("gpt2", "adamw") - state("gpt2", "muon")) < padding


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"attention": "eager"}, "is a saved plan, which includes its attention kernel, sdpa; leave --attention out"),
        ({"precision": "bf16"}, "is a saved plan in fp32; add --precision fp32"),
    ],
)
def test_what_a_saved_plan_includes_cannot_be_asked_anew(options: dict[str, Any], complaint: str, saved: str) -> None:
    """Its layers were measured with one kernel and in one precision."""
    content = json.loads(Path(saved).read_text()) | {"question": {"precision": "fp32"}}
    Path(saved).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=complaint):
        shown(saved, **{"precision": "fp32", **options})


def test_a_saved_plan_that_names_no_matrices_is_refused_with_muon(saved: str) -> None:
    content = json.loads(Path(saved).read_text())
    for unit in content["model"]["units"]:
        for param in unit["params"]:
            del param["products"]
    Path(saved).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="where it was saved, nothing told which parameters are matrices"):
        shown(saved, optimizer="muon")


@pytest.mark.usefixtures("plan_alone")
def test_a_run_config_can_be_planned_for_ranks(config: str, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    train = "{global_batch_size: 8, steps: 3, device: cpu}"
    data = "{sources: [x.txt], tokenizer: bytes, sequence_length: 32}"
    run.write_text(f"model: {{config: {config}}}\ndata: {data}\ntrain: {train}\noutput: {{folder: runs/x}}\n")
    text = shown(str(run), hardware="4x-rtx-4090", ranks=4)
    assert "256 tokens in 1 micro-batch of 2 x 32 on each rank" in text
    assert f"megatrain train {run} --ranks 4" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": 8}, "ranks: 8 ranks on each machine, and NVIDIA RTX 4090, 128 GiB host has one GPU"),
        ({"ranks": 4, "nodes": 3}, "nodes: 4 ranks cannot be divided evenly among 3 machines"),
        ({"ranks": 2, "nodes": 2}, "the bandwidth to other machines is unknown"),
    ],
)
def test_impossible_ranks_are_refused_before_the_model_is_read(options: dict[str, Any], told: str) -> None:
    with pytest.raises(MegaTrainError, match=told) as caught:
        shown("no/such-model", **options)
    assert "\n" not in str(caught.value)


def test_progress_is_shown_only_on_a_terminal(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(config, **FEW)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    shown(config, **FEW)
    assert "looking for improvements" in capsys.readouterr().err


def test_a_config_plan_shows_every_section(config: str, tmp_path: Path) -> None:
    trace, content = tmp_path / "step.json", tmp_path / "plan.json"
    text = shown(config, attention="eager", sequence_length=512, trace=str(trace), json=str(content))
    for words in (
        *("tiny-llama", "NVIDIA RTX 4090", "optimizer state", "tokens/s", "MFU"),
        *("hide behind compute from about", "planned, not measured", "less than 1% each: "),
        "eager",
    ):
        assert words in text, words
    ops = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"FORWARD", "BACKWARD", "LOSS"} <= {op["cat"] for op in ops}
    written = json.loads(content.read_text())
    assert written["model"]["attention"] == "eager"
    assert f"{written['tokens_per_second']:,.0f} tokens/s" in text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plan.json", "step.json", "tiny-llama"]


@pytest.mark.usefixtures("plan_alone")
def test_disk_access_is_described_when_the_plan_uses_it(saved: str, tmp_path: Path) -> None:
    """A probe notes that direct I/O was refused."""
    refused = "measured: through the page cache, direct I/O was refused, a file of 256 MiB, 512 MiB written"
    described = machine("rtx-4090")
    sources = tuple({**dict(described.sources), "disk_read_bandwidth": refused}.items())
    save_hardware(replace(described, sources=sources), tmp_path / "probed.json")
    options: dict[str, Any] = {
        "hardware": str(tmp_path / "probed.json"),
        "tokens_per_step": 4096,
        "sequence_length": 512,
    }
    assert refused in " ".join(shown(saved, host_memory="12GB", device_memory="6GB", **options).split())
    assert "disk tier" not in shown(saved, **options)


@pytest.mark.usefixtures("plan_alone")
def test_sections_not_asked_for_are_not_shown(saved: str) -> None:
    assert "by memory" not in shown(saved, **FEW)


def test_a_saved_spec_is_planned_again_without_the_model(config: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    shown(config, json=str(first), **FEW)
    Path(config).unlink()
    shown(str(first), json=str(second), **FEW)
    assert first.read_text() == second.read_text()


@pytest.mark.usefixtures("plan_alone")
def test_a_spec_saved_on_a_cpu_is_the_models_and_not_a_cpus(tmp_path: Path) -> None:
    """A cpu has no fused kernel for attention with dropout."""
    files = {name: tmp_path / f"{name}.json" for name in ("cpu-server", "rtx-4090")}
    for name, file in files.items():
        shown("gpt2", hardware=name, json=str(file), **FEW)
    models = [json.loads(file.read_text())["model"] for file in files.values()]
    assert models[0] == models[1]


@pytest.mark.parametrize("path", [None, "org/model"])
def test_a_run_config_is_distinguished_from_a_model(path: str | None, tmp_path: Path) -> None:
    tree = {"model": {"path": path} if path else {"config": {}}, "data": {}, "train": {}}
    for name in ("run.json", "run.yaml"):
        (tmp_path / name).write_text(json.dumps(tree))
        with pytest.raises(
            ModelError, match="is the configuration of a run, not of a model; name its model, "
        ) as caught:
            find_model(str(tmp_path / name), "bf16")
        assert path is None or path in str(caught.value)


def test_a_saved_plan_for_a_described_machine_needs_no_torch(saved: str) -> None:
    code = (
        "import sys; from rich.console import Console; from megatrain.commands.plan import find_model, find_hardware\n"
        f"find_model({saved!r}, 'bf16'); find_hardware('h200')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'slow'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_model_whose_shape_is_built_in_needs_no_network_and_no_file() -> None:
    assert find_model("HuggingFaceTB/SmolLM2-135M-Instruct", "bf16").numel == 134_515_008
    with pytest.raises(ModelError, match=r"did you mean .*SmolLM2-135M"):
        find_model("HuggingFaceTB/SmolLM-135M", "bf16")


def test_each_model_is_measured_once(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another config, of another precision or by another kernel it is another model."""
    measure, measured = megatrain.commands.plan._measured, list[object]()
    monkeypatch.setattr("megatrain.commands.plan._measured", lambda *a, **k: measured.append(a) or measure(*a, **k))
    Path(config).write_text(Path(config).read_text() + "\n")  # what no other test has asked for
    first = find_model(config, "bf16")
    assert first == find_model(config, "bf16")
    assert len(measured) == 1
    find_model(config, "fp32")
    find_model(config, "bf16", attention="eager")
    Path(config).write_text(Path(config).read_text() + "\n")
    find_model(config, "bf16")
    assert len(measured) == 4
    find_model(config, "bf16", trust_remote_code=True)
    assert len(measured) == 5


def test_an_unreadable_measurement_cache_is_measured_again(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    model.config.save_pretrained(tmp_path)
    first = find_model(str(tmp_path), "bf16")
    for file in measured_models.FOLDER.glob("*.json"):
        file.write_text(file.read_text()[:-9])
    assert find_model(str(tmp_path), "bf16") == first
    assert find_model(str(tmp_path), "bf16") == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention"),  # not `auto`, which is in the package
    [("meta-llama/Llama-3.1-405B", "sdpa"), ("openai/gpt-oss-120b", "eager"), ("deepseek-ai/DeepSeek-V3", "sdpa")],
)
def test_huge_models_are_inspected_in_little_memory(name: str, attention: str) -> None:
    code = (
        "from pathlib import Path; from megatrain.commands.plan import find_model\n"
        f"print(find_model({name!r}, 'bf16', attention={attention!r}).numel)\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"  # ru_maxrss would be pytest's own
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=240)
    numel, kilobytes = map(int, done.stdout.split())
    assert numel > 1.1e11
    assert kilobytes < 1.5e6


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("llama-tied", "gpt2", "mixtral") else pytest.mark.slow)
        for family in sorted(FAMILIES)
    ],
)
def test_the_specification_of_each_family_is_found_from_its_config(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.config.save_pretrained(tmp_path)
    spec = find_model(str(tmp_path), "bf16")
    assert spec.name == tmp_path.name
    assert spec.numel == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("plan_alone")
def test_the_default_number_of_tokens_shrinks_until_it_fits(saved: str) -> None:
    """With more host memory they would fit in rounds, whose sums wait there."""
    small = {"device_memory": "2.9GB", "host_memory": "19GB", "disk_memory": "0"}
    assert "65,536 tokens in" in shown(saved, hardware="h200")
    assert "32,768 tokens in" in shown(saved, **small)
    with pytest.raises(DoesNotFit):
        shown(saved, **small, tokens_per_step=65_536)


def test_tokens_are_doubled_where_the_drive_decides() -> None:
    """The state is 17 GB with waiting gradients, and a step of so many tokens computes for 3 seconds."""
    spec = llama_shape("1B", 4, 4096, vocabulary=32_000)
    asked = Question(spec, replace(machine("rtx-4090"), disk_nbytes=10**12), 65_536, 4096)
    few, some, none = (
        replace(asked, limits=Limits(host_nbytes=nbytes * 10**9, disk_nbytes=disk))
        for nbytes, disk in ((8, None), (14, None), (8, 0))
    )
    assert [more_tokens(each).tokens_per_step for each in (few, some, none)] == [131_072, 65_536, 65_536]


@pytest.mark.slow
@pytest.mark.usefixtures("plan_alone")
def test_steps_have_twice_the_default_tokens_where_the_drive_decides(saved: str) -> None:
    few = {"host_memory": "8GB", "disk_memory": "1TB"}
    text = shown(saved, **few)
    assert "131,072 tokens in" in text
    assert "train.global_batch_size=32" in text, "since `init` would write the default"
    assert "65,536 tokens in" in shown(saved, **few, tokens_per_step=65_536)
    text = shown(saved, **few | {"host_memory": "14GB"})  # the rest is read and written quickly
    assert "65,536 tokens in" in text
    assert "global_batch_size" not in text


@pytest.mark.slow
@pytest.mark.usefixtures("plan_alone")
def test_host_gradient_sums_keep_the_default_tokens(saved: str) -> None:
    assert "65,536 tokens in" in shown(saved, device_memory="2.9GB", host_memory="40GB", disk_memory="0")


@pytest.mark.usefixtures("plan_alone")
def test_options_reach_the_plan(saved: str) -> None:
    console = Console(file=io.StringIO())
    options = Options(
        hardware="h200",
        tokens_per_step=16_384,
        sequence_length=2048,
        precision="fp32",
        clip=False,
        device_memory="40GiB",
        host_memory="0.5TB",
        disk_memory="2TB",
        token_budget=2e9,
    )
    outlook = run_plan(saved, console, options)
    plan = outlook.plan
    assert plan.question.budgets() == {"device": 40 << 30, "host": 5 * 10**11, "disk": 2 * 10**12}
    assert (plan.numerics.precision, plan.policy.update) == ("fp32", "during_backward")
    assert (plan.question.sequences, plan.question.length) == (8, 2048)
    assert outlook.run_seconds == pytest.approx(2e9 / plan.tokens_per_second)
    assert outlook.peak_flops == machine("h200").peak_flops_fp32


@pytest.mark.usefixtures("plan_alone")
def test_this_machine_is_probed_or_roughly_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.setattr(megatrain.run.this_machine, "PROBED", tmp_path / "hardware.json")
    rough = find_hardware(None)
    assert "not probed" in rough.name
    text = shown(config, hardware=None, sequence_length=128, tokens_per_step=256)
    assert "not probed" in text
    probed = replace(machine("laptop"), name="my own")
    save_hardware(probed, tmp_path / "hardware.json")
    assert find_hardware(None) == probed
    assert find_hardware(str(tmp_path / "hardware.json")) == probed


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GB", 24 * 10**9),
        ("1.5TB", 15 * 10**11),
        (" 80 GiB ", 80 << 30),
        ("512m", 512 * 10**6),
        ("2000000", 2 * 10**6),
        ("1MB", 10**6),
    ],
)
def test_memory_amounts_are_parsed(text: str, nbytes: int) -> None:
    assert parse_nbytes(text, "here") == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "24 gigs", "1e9", "nan", "12XB", "inf TB"])
def test_invalid_memory_amounts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an amount of memory; give one such as 24GB") as caught:
        parse_nbytes(text, "--device-memory")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((text, "is too little memory; give 1MB or more") for text in ("0", "5", "999999", "100 kB")),
        *((text, "is too much memory; give less than 1000PB") for text in ("9" * 4000, "1001 PB")),
    ],
)
def test_amounts_that_no_machine_has_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        parse_nbytes(text, "--device-memory")
    assert len(str(caught.value)) < 400


@pytest.mark.usefixtures("plan_alone")
@pytest.mark.parametrize(
    ("options", "kind", "complaint"),
    [
        ({"hardware": "h20"}, PlanError, "unknown machine 'h20'; did you mean h200"),
        ({"hardware": "/no/such.json"}, PlanError, "cannot be read"),
        ({"device_memory": "40MB", **FEW}, DoesNotFit, "device memory"),
        pytest.param(
            {"device_memory": "6GB", "host_memory": "10GB", "disk_memory": "0", **FEW},
            DoesNotFit,
            "B of host memory",
            marks=pytest.mark.slow,
        ),
        (
            {"tokens_per_step": 100, "sequence_length": 200},
            ConfigError,
            "--tokens-per-step: 100 tokens per step are less than",
        ),
        ({"tokens_per_step": 0}, ConfigError, "--tokens-per-step: 0 tokens per step"),
        ({"tokens_per_step": 1 << 27}, ConfigError, "--tokens-per-step: 134,217,728 tokens per step are too many"),
        ({"sequence_length": 1 << 27}, ConfigError, "--sequence-length: 134,217,728 tokens per step are too many"),
        ({"sequence_length": 0}, ConfigError, "--sequence-length: 0 is too small"),
        ({"token_budget": 0.0}, ConfigError, "--token-budget: 0 is out of range"),
        ({"token_budget": float("nan")}, ConfigError, "--token-budget"),
        ({"precision": "fp8"}, ConfigError, "unknown precision 'fp8'; use bf16 or fp32"),
        ({"trace": "/no/folder/x.json"}, ConfigError, "--trace: there is no folder"),
        ({"json": "/"}, ConfigError, "--json: /: is a folder"),
    ],
)
def test_user_errors_are_one_line(saved: str, options: dict[str, Any], kind: type, complaint: str) -> None:
    with pytest.raises(kind, match=complaint) as caught:
        shown(saved, **options)
    assert isinstance(caught.value, MegaTrainError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"hardware": "h20"},
        {"host_memory": "24 gigs"},
        {"device_memory": "24 gigs", "hardware": None},
        {"tokens_per_step": 100, "sequence_length": 200},
        {"precision": "fp8"},
        {"trace": "/no/folder/x.json"},
        {"json": "/"},
        {"token_budget": 0.0},
    ],
    ids=str,
)
def test_bad_options_are_refused_before_the_model_is_read(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was read")

    monkeypatch.setattr(megatrain.commands.plan, "find_model", unread)
    monkeypatch.setattr(megatrain.commands.plan, "_unprobed_machine", unread)
    with pytest.raises(MegaTrainError):
        shown("no model", **options)


@pytest.mark.usefixtures("plan_alone")
def test_memory_overrides_are_noted_and_impossible_ones_refused(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = shown(saved, hardware="h200", host_memory="4TB", tokens_per_step=4096, sequence_length=512)
    assert "4.00 TB as asked; the described machine has 1.64 TB" in told
    assert "total of 4.00 TB" in told
    less = shown(saved, hardware="h200", host_memory="1TB", tokens_per_step=4096, sequence_length=512)
    assert "1.00 TB as asked; the described machine has 1.64 TB" in less
    assert "as asked" not in shown(saved, hardware="h200", tokens_per_step=4096, sequence_length=512)
    monkeypatch.setattr(megatrain.run.this_machine, "PROBED", tmp_path / "hardware.json")
    save_hardware(machine("laptop"), tmp_path / "hardware.json")
    with pytest.raises(
        ConfigError, match=r"--host-memory: 4.00 TB of host memory are asked for, but this machine has 30.0"
    ):
        shown(saved, hardware=None, host_memory="4TB")


@pytest.mark.usefixtures("plan_alone")
def test_drive_wear_within_a_year_is_the_first_line(saved: str) -> None:
    told = shown(saved, tokens_per_step=4096, sequence_length=512, host_memory="12GB", device_memory="6GB")
    written = r"\S+ TB written to disk per day, \S+ [TP]B per billion tokens"
    assert re.match(rf"warning +{written}: the drive's endurance lasts \S+ days", told)


@pytest.mark.usefixtures("plan_alone")
@pytest.mark.parametrize("kind", ["folder", "bare folder", "config", "saved"])
def test_output_ends_with_the_next_command(kind: str, config: str, saved: str) -> None:
    """A file, or a folder without weights, is of a model to train from scratch."""
    folder = Path(config).parent
    if kind == "folder":
        (folder / "model.safetensors").touch()
    model = {"config": config, "saved": saved}.get(kind, str(folder))
    told = shown(model, tokens_per_step=4096, sequence_length=512, clip=False, host_memory="64GB", attention="auto")
    name = "MODEL" if kind == "saved" else model
    fresh = " --from-scratch" if kind in ("config", "bare folder") else ""
    command = f"megatrain init config.yaml --model {name} --data FILE --sequence-length 512{fresh}"
    keys = "train.global_batch_size=8 train.max_grad_norm=null memory.host=64GB"
    assert told.splitlines()[-1] == f"next: {command}, then megatrain train config.yaml {keys}"


@pytest.mark.usefixtures("plan_alone")
def test_the_next_command_of_a_saved_plan_keeps_its_adapter(config: str, tmp_path: Path) -> None:
    """The file holds its layers, not the words that named it; without an adapter, the whole model would train."""
    file = str(tmp_path / "plan.json")
    told = shown(config, adapter="lora:4", optimizer="muon", json=file, **FEW)
    assert "28 updated whole (lora_A, lora_B)" in " ".join(told.split())
    assert "--sequence-length 512 --adapter ADAPTER, then" in shown(file, **FEW).splitlines()[-1]


@pytest.mark.usefixtures("plan_alone")
@pytest.mark.parametrize(("limit", "key"), [({}, ""), ({"host_memory": "8GB"}, " memory.host=8GB")])
def test_ranks_on_cores_are_limited_as_asked(limit: dict[str, str], key: str, config: str) -> None:
    told = shown(config, hardware="cpu-desktop", ranks=2, **limit, **FEW)
    assert told.splitlines()[-1].endswith(f"config.yaml train.global_batch_size=8{key} --ranks 2")


def test_sequences_longer_than_the_model_supports_are_refused(config: str) -> None:
    with pytest.raises(
        ConfigError, match="--sequence-length: sequences of 4,096 tokens exceed the model's 2,048 positions"
    ):
        shown(config, sequence_length=4096)


@pytest.mark.usefixtures("plan_alone")
@pytest.mark.parametrize("kind", ["olmo3", pytest.param("exaone_moe", marks=pytest.mark.slow)])
def test_sequences_longer_than_a_default_that_nobody_stated_are_planned(kind: str, tmp_path: Path) -> None:
    """As published, without `max_position_embeddings`, whose default is 2,048."""
    (tmp_path / "config.json").write_text(json.dumps(SILENT[kind]))
    assert "16,384" in shown(str(tmp_path), sequence_length=16_384, tokens_per_step=16_384)


@pytest.mark.parametrize(
    ("memory", "tokens", "named"),
    [
        (("6GB", "5GB"), FEW, r"all 25.8 GB of device memory would make it fit \(\S+ tokens/s\)"),
        (("3GB", "2GB"), {"tokens_per_step": 1 << 17, "sequence_length": 1 << 17}, "no single upgrade makes it fit"),
        pytest.param(
            ("6GB", "12GB"),
            FEW,
            r"\(disk.folders\) would fit; twice the host memory would make it fit \(\S+ tokens/s\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan_that_does_not_fit_names_the_upgrade_that_helps(
    saved: str, memory: tuple[str, str], tokens: dict[str, Any], named: str
) -> None:
    device, host = memory
    with pytest.raises(DoesNotFit, match=named):
        shown(saved, device_memory=device, host_memory=host, disk_memory="0", **tokens)


def test_a_refusal_tells_the_step_that_its_speeds_are_for(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no more than one sequence, where not even that fits; and what would make more fit is not looked for."""
    asked = []
    monkeypatch.setattr(
        megatrain.commands.plan,
        "find_plan",
        lambda question: asked.append(question.tokens_per_step) or find_plan(question),
    )
    with pytest.raises(DoesNotFit, match=r"would make it fit \(\S+ tokens/s with 512 tokens per step\)"):
        shown(saved, sequence_length=512, device_memory="6GB", host_memory="5GB", disk_memory="0")
    assert asked == [512]


@pytest.mark.usefixtures("plan_alone")
def test_memory_that_was_asked_for_is_told_as_it_was_asked(saved: str) -> None:
    told = shown(saved, hardware="cpu-server", ranks=2, host_memory="100GB", **FEW)
    assert re.search(r"host memory +100 GB as asked; the described machine has 545 GB", told)
    assert "device memory" not in told
    assert told.splitlines()[-1].endswith("memory.host=100GB --ranks 2")
    assert "cuda" not in told
    told = shown(saved, hardware="8x-h100", ranks=8, host_memory="512GB", **FEW)
    assert re.search(r"host memory +512 GB as asked; the described machine has 2.19 TB", told)


@pytest.mark.usefixtures("plan_alone")
def test_a_memory_that_device_and_host_divide_is_told_and_divided(saved: str) -> None:
    told = shown(saved, hardware="dgx-spark", **FEW)
    assert re.search(r"device memory +assumed: 32 GiB of the 128 GB are taken for the device", told)
    assert told.splitlines()[-1].endswith("memory.device=31GiB memory.host=87GiB")
    told = shown(saved, hardware="dgx-spark", device_memory="60GB", host_memory="60GB", **FEW)
    assert told.splitlines()[-1].endswith("memory.device=60GB memory.host=60GB")
    with pytest.raises(ConfigError, match=r"^--device-memory: .* divide one memory of 128 GB; give --host-memory too"):
        shown(saved, hardware="dgx-spark", device_memory="60GB", **FEW)
    with pytest.raises(ConfigError, match=r"^--host-memory: .* divide one memory of .*; give --device-memory too"):
        shown(saved, hardware="dgx-spark", host_memory="110GB", **FEW)


@pytest.mark.few(1)
@pytest.mark.usefixtures("plan_alone")
@pytest.mark.parametrize(("name", "is_divided"), [("dgx-spark", True), ("rtx-4090", False)])
def test_whether_device_and_host_divide_one_memory_is_no_matter_of_sources(
    name: str, is_divided: bool, saved: str, tmp_path: Path
) -> None:
    assumed = replace(machine(name), sources=(("device_nbytes", "assumed: what a friend says"),))
    for index, hardware in enumerate((assumed, replace(assumed, sources=()))):
        save_hardware(hardware, path := tmp_path / f"{index}.json")
        assert ("memory.device=" in shown(saved, hardware=str(path), **FEW)) == is_divided


def test_an_unknown_model_suggests_the_nearest_name(config: str) -> None:
    with pytest.raises(ModelError, match=r"did you mean \S*tiny-llama\?") as caught:
        find_model(str(Path(config).parents[1] / "tiny-lama"), "bf16")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"model": {}}', '{"model": [1]}', '{"hidden_size": 3}', "[]", "\x00"])
def test_files_that_are_not_models_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ModelError) as caught:
        find_model(str(path), "bf16")
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("plan_alone")
def test_a_failed_write_keeps_the_old_file(saved: str, tmp_path: Path, monkeypatch: Any) -> None:
    old = tmp_path / "step.json"
    old.write_text("old")

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigError, match=r"step.json: cannot be written \(No space left on device\)"):
        shown(saved, trace=str(old), **FEW)
    assert old.read_text() == "old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["saved.json", "step.json"]


@pytest.mark.usefixtures("plan_alone")
def test_a_run_config_is_planned_as_written(config: str, tmp_path: Path) -> None:
    """Length, batch and precision are its own; so are steps, epochs and what trains, each by the sizes of its files."""
    data = tmp_path / "text.txt"
    data.write_text("some words\n" * 20_000)
    run = tmp_path / "run.yaml"
    tree = {
        "model": {"config": config},
        "data": {"sources": str(data), "tokenizer": "bytes", "sequence_length": 64, "validation_fraction": 0.0},
        "train": {"epochs": 2, "global_batch_size": 10, "precision": "fp32"},
        "output": {"folder": str(tmp_path / "run")},
    }
    run.write_text(json.dumps(tree))
    steps = round(2 * 220_000 / 640)
    text = " ".join(shown(str(run)).split())
    assert f"2 epochs = about {steps} steps, estimated from file sizes; takes " in text
    assert "precision fp32" in text
    assert f"next: megatrain train {run}" in text
    whole = shown(str(run), overrides=["train.epochs=null", f"train.steps={steps}", "train.freeze=*embed*"])
    assert f"{steps} steps = about 2 epochs" in whole
    assert "of them trained" in whole
    with pytest.raises(ConfigError, match=r"--sequence-length: is decided by the configuration; set data\.sequence"):
        shown(str(run), sequence_length=32)
    with pytest.raises(ConfigError, match=r"'train\.steps=3': sets a key, but a model has no keys"):
        shown(config, overrides=["train.steps=3"])
