"""Claims about `megatrain init`: what it writes can be trained with, and says what the plan says."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain import cli
from megatrain.commands.init import Answers, write_recipe, write_translation
from megatrain.config import load_config
from megatrain.errors import ConfigError, DoesNotFit
from tests import before_torch_import
from tests.run.test_chats import chats
from tests.run.test_recipes import TINY
from tests.run.test_training import TEXT, train
from tests.run.test_training import lines as lines_of


def sizes(tmp_path: Path, **fields: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **TINY, **fields}))
    return str(path)


def test_the_written_config_trains(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    answers = Answers(
        sizes(tmp_path), (str(tmp_path / "text.txt"),), from_scratch=True, sequence_length=32, steps=2,
        folder=str(tmp_path / "run"), precision="fp32",
    )  # fmt: skip
    plan = write_recipe(answers, tmp_path / "new.yaml")
    text = (tmp_path / "new.yaml").read_text()
    assert f"{plan.tokens_per_second:,.0f} tokens/s" in text
    assert plan.question.hardware.name in text
    assert [path.name for path in tmp_path.glob(".*")] == []
    overrides = ["train.global_batch_size=4", f"data.cache={tmp_path}/cache", "train.sample_tokens=0"]
    train(load_config(tmp_path / "new.yaml", overrides))
    assert (tmp_path / "run" / "model").is_dir()


def test_chat_data_gets_fine_tuning_defaults(tmp_path: Path) -> None:
    answers = Answers(sizes(tmp_path), (str(chats(tmp_path / "chats.jsonl")),), hardware="rtx-4090")
    write_recipe(answers, tmp_path / "new.yaml")
    config = load_config(tmp_path / "new.yaml")
    assert (config.train.steps, config.train.epochs) == (None, 3)
    assert (config.train.learning_rate, config.train.weight_decay) == (1e-5, 0.0)
    assert (config.train.device, config.train.hardware) == ("cuda:0", "rtx-4090")
    assert config.data.sequence_length == TINY["max_position_embeddings"]
    assert config.train.sequences == 1, "a step of few samples takes few"
    assert "NVIDIA RTX 4090" in (tmp_path / "new.yaml").read_text()


def test_a_fresh_model_gets_a_chat_template_and_pretraining_rate(tmp_path: Path) -> None:
    data = (str(chats(tmp_path / "chats.jsonl")),)
    write_recipe(Answers(sizes(tmp_path), data, from_scratch=True, hardware="rtx-4090"), tmp_path / "new.yaml")
    config = load_config(tmp_path / "new.yaml")
    assert (config.data.tokenizer, config.data.chat_template) == ("bytes", "chatml")
    assert (config.train.learning_rate, config.train.weight_decay) == (6e-4, 0.1)
    text = (tmp_path / "new.yaml").read_text()
    assert "# Trains a fresh" in text
    steps = -(-3 * Path(data[0]).stat().st_size // (config.train.sequences * config.data.sequence_length))
    assert f"3 epochs are about {steps:,} steps" in text, "a token of its tokenizer is a byte"


@pytest.mark.few(1)
@pytest.mark.parametrize(("samples", "sequences"), [(100, 1), (4_000, 16)])
def test_the_default_step_is_a_hundredth_of_three_epochs(tmp_path: Path, samples: int, sequences: int) -> None:
    row = json.dumps({"prompt": "q", "completion": "words " * 10})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * samples)
    answers = Answers(sizes(tmp_path), (str(tmp_path / "rows.jsonl"),), hardware="rtx-4090", sequence_length=128)
    write_recipe(answers, tmp_path / "new.yaml")
    text, config = (tmp_path / "new.yaml").read_text(), load_config(tmp_path / "new.yaml")
    tokens = (len(row) + 1) * samples // 4
    steps = -(-3 * tokens // (sequences * config.data.sequence_length))
    assert config.train.sequences == sequences
    assert f"3 epochs are about {steps:,} steps" in text
    write_recipe(replace(answers, steps=7), tmp_path / "told.yaml")
    assert (load_config(tmp_path / "told.yaml").train.steps, load_config(tmp_path / "told.yaml").train.epochs) == (
        7,
        None,
    )


@pytest.mark.parametrize(
    ("nbytes", "key", "takes"),
    [
        (20_000, "epochs: 3", "3 epochs are about 118 steps"),
        (400 << 20, "steps: 1000", "1,000 steps are about 0.16 epochs"),
    ],
)
def test_little_text_is_read_three_times_and_much_for_a_thousand_steps(
    tmp_path: Path, nbytes: int, key: str, takes: str
) -> None:
    """A fresh model has the tokenizer of bytes, a token for each."""
    with (tmp_path / "text.txt").open("w") as file:
        file.write("text\n")
        file.truncate(nbytes)
    answers = Answers(sizes(tmp_path), (str(tmp_path / "text.txt"),), from_scratch=True, hardware="rtx-4090")
    write_recipe(answers, tmp_path / "new.yaml")
    text = (tmp_path / "new.yaml").read_text()
    assert f"  {key}" in text
    assert takes in text


def test_init_neither_overwrites_nor_writes_configs_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new.yaml"
    target.write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        write_recipe(Answers("x", ("y",)), target)

    def refuses(_: object) -> None:
        raise DoesNotFit("too large", where="plan")

    monkeypatch.setattr("megatrain.commands.init.find_plan", refuses)
    data = (str(chats(tmp_path / "y.jsonl")),)
    with pytest.raises(DoesNotFit):
        write_recipe(Answers(sizes(tmp_path), data, hardware="rtx-3090"), tmp_path / "other.yaml")
    assert target.read_text() == "mine"
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "chats.jsonl: is empty; name a file with something in it"),
        (
            '{"messages": []}\n'.encode("utf-16"),
            "chats.jsonl:1: not UTF-8 text (invalid start byte); convert it to UTF-8",
        ),
    ],
)
def test_a_file_that_cannot_be_read_gets_no_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        cli.main(["init", "new.yaml", "--model", sizes(tmp_path), "--from-scratch", "--data", "chats.jsonl"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {told}\n"
    assert not Path("new.yaml").exists()


def test_mistakes_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    chats(tmp_path / "chats.jsonl")
    (tmp_path / "old.yaml").touch()
    commands = [f"init {files}" for files in ("old.yaml --data chats.jsonl", "new.yaml --data chat.jsonl")]
    assert before_torch_import.told([f"{each} --model org/model" for each in commands], tmp_path, slow=["torch"]) == [
        "error: old.yaml: already exists; name another file, or remove it",
        "error: chat.jsonl: no such file or folder; did you mean chats.jsonl?",
    ]
    assert not (tmp_path / "new.yaml").exists()


def test_sequences_that_the_model_has_no_positions_for_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    answers = Answers("gpt2", (str(tmp_path / "text.txt"),), hardware="rtx-4090", sequence_length=1025)
    with pytest.raises(ConfigError, match="--sequence-length: sequences of 1,025 tokens exceed the model's 1,024 pos"):
        write_recipe(answers, tmp_path / "new.yaml")


def test_init_asks_for_missing_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["init", str(tmp_path / "new.yaml"), "--data", "x.jsonl"])
    assert caught.value.code == 2
    assert "error: megatrain init: --model is missing; give it as --model VALUE" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_are_requested_by_name(tmp_path: Path) -> None:
    data = (str(chats(tmp_path / "chats.jsonl")),)
    plans = {}
    for adapter in (None, "lora", "lora:4:all-linear"):
        answers = Answers(sizes(tmp_path), data, hardware="rtx-4090", adapter=adapter)
        plans[adapter] = write_recipe(answers, tmp_path / f"{adapter}.yaml".replace(":", "-"))
    config = load_config(tmp_path / "lora.yaml")
    assert config.adapter is not None
    assert (config.adapter.r, config.adapter.alpha, config.adapter.target_modules) == (16, 32.0, ("auto",))
    assert config.train.learning_rate == 2e-4
    small = load_config(tmp_path / "lora-4-all-linear.yaml").adapter
    assert small is not None
    assert (small.r, small.alpha, small.target_modules) == (4, 8.0, ("all-linear",))
    base = plans[None].question.model
    for adapter, each in (("lora", 16), ("lora:4:all-linear", 4)):
        model = plans[adapter].question.model
        assert model.numel - model.trained_numel == base.numel
        widths = (32 + 32) * 2 + (32 + 16) * 2 + (32 + 48) * 3
        assert model.trained_numel == each * widths * len(base.layers)
    for wrong in ("qlora", "lora:x", "lora:0"):
        with pytest.raises(ConfigError, match="is not an adapter; give lora, lora:16 or lora:16:all-linear"):
            write_recipe(Answers(sizes(tmp_path), data, adapter=wrong), tmp_path / "wrong.yaml")


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "coming-from.md"


def test_init_from_translates_another_trainers_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, shown, ours = re.findall(r"^```(?:text|yaml)\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    command, said = shown.split("\n", 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3.yaml").write_text(theirs)
    words = shlex.split(command)[2:]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out == said
    written = (tmp_path / "sft.yaml").read_text()
    assert "".join(line for line in written.splitlines(True) if line[0] != "#").lstrip("\n") == ours
    assert "#   template=llama3: the model" in written
    assert load_config(tmp_path / "sft.yaml").train.warmup_ratio == 0.1
    for again, what in (
        (words, "already exists"),
        ([*words, "--steps", "3"], "--steps cannot be combined with --from"),
    ):
        with pytest.raises(SystemExit):
            cli.main(again)
        assert what in capsys.readouterr().err


def test_translated_configs_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rows = [{"instruction": f"{n}+{n}", "input": "", "output": f"{2 * n}"} for n in range(24)]
    (tmp_path / "data" / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "rows.json"}}))
    lines = [
        "model_name_or_path: unused", "finetuning_type: full", "dataset: sums", "output_dir: run", "cutoff_len: 64",
        "learning_rate: 1.0e-3", "num_train_epochs: 1", "warmup_ratio: 0.5", "val_size: 0.1", "report_to: none",
    ]  # fmt: skip
    (tmp_path / "theirs.yaml").write_text("\n".join(lines))
    write_translation(Path("theirs.yaml"), Path("ours.yaml"), None)
    fresh = [
        "model.path=null", f"model.config={sizes(tmp_path)}", "model.verify=false", "data.tokenizer=bytes",
        "data.chat_template=chatml", f"data.cache={tmp_path}/cache", "train.sample_tokens=0",
    ]  # fmt: skip
    train(load_config("ours.yaml", fresh))
    rates = [line["lr"] for line in lines_of(tmp_path / "run") if line["event"] == "stepped"]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])
