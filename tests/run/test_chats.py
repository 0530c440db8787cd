"""Whole runs on samples: chats are recognised, packed and trained on by their answers, and all is said and counted."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.checkpoint.listing import checkpoints, step_of
from megatrain.commands.generate import GenerationModel, run_chat, run_generation
from megatrain.config import Config
from megatrain.data.tokenizer import load_tokenizer
from megatrain.dist import World
from megatrain.errors import ConfigError, DataError, ModelError
from megatrain.run.data import open_corpus
from megatrain.run.sampling import Sampling
from tests.ranks import together, worlds
from tests.run.test_training import configuration, lines, losses, train
from tests.tiny import BYTE_LLAMA, causal_lm_from_config


def chats(path: Path, count: int = 60) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"{n % 7}!" * (1 + n % 3)},
            ]
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_run(
    tmp_path: Path, model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **data: Any
) -> Config:
    data = {"sources": [str(chats(tmp_path / "chats.jsonl"))], "chat_template": "none", "sequence_length": 48, **data}
    return configuration(tmp_path, data=data, train=train or {}, **({"model": model} if model else {}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("columns", {"messages": "dialog"}),
        ("tags", {"role_tag": "who"}),
        ("split", "foo"),
        ("subset", "x"),
        ("chat_template", "chatml"),
        ("chat_template_kwargs", {"x": 1}),
    ],
)
def test_unused_data_keys_are_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^data.{key}: applies only to .*, and there is no such source; leave"):
        train(configuration(tmp_path, data={key: value}))
    if key in ("split", "subset"):
        with pytest.raises(ConfigError, match=f"^data.{key}: "):
            train(chat_run(tmp_path, **{key: value}))


def test_sources_too_small_for_validation_are_named(tmp_path: Path) -> None:
    config = configuration(tmp_path, data={"sequence_length": 64, "sources": [str(tmp_path / "short.txt")]})
    for text, what in (("x" * 80, "holding out the only sequence"), ("x" * 9, "10 tokens are less than one")):
        (tmp_path / "short.txt").write_text(text)
        with pytest.raises(DataError) as caught:
            train(config)
        assert str(caught.value).startswith(f"{tmp_path / 'short.txt'}: {what}")
        assert "data.sequence_length" in str(caught.value)


def test_a_chat_run_shows_its_label_masks_and_uses_its_template(tmp_path: Path) -> None:
    said = train(chat_run(tmp_path, train={"sample_prompts": ["3?", ""], "sample_tokens": 2}))
    for part in (
        "60 samples",
        "of them trained (",
        "best fit: ",
        "of them filled; 1 sample held out",
        "the first sample; trained text is green",
        "0?",
        "loaded with from_pretrained",
    ):
        assert part in said
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    prompts = [each["prompt"] for each in events if each["event"] == "sampled"][-2:]
    assert prompts == ["3?", "30?\n"], "without a prompt, the sample that is held out is asked"
    heard: list[str] = []
    how = Sampling(4, temperature=0)
    generator = GenerationModel(str(tmp_path / "run"), precision="fp32")
    run_chat(generator, ["3?"], heard.append, how)
    asked = run_generation(generator, "3?\n", lambda text: None, how)
    assert "".join(heard) == asked.text + "\n"


@pytest.mark.parametrize("packing", [pytest.param("best_fit", marks=pytest.mark.slow), "grouped"])
def test_a_cached_run_is_identical(tmp_path: Path, packing: str) -> None:
    train(chat_run(tmp_path, packing=packing, workers=0))
    first = losses(tmp_path / "run")
    config = chat_run(tmp_path, packing=packing, workers=3)
    (tmp_path / "chats.jsonl").touch()
    said = train(config.model_copy(update={"output": config.output.model_copy(update={"overwrite": True})}))
    assert losses(tmp_path / "run") == first
    assert "60 samples" in said
    assert ("like lengths together" in said) == (packing == "grouped")


DATED = (
    "{% for m in messages %}{% if loop.first %}{{ strftime_now('%d %b %Y') }}\n{% endif %}"
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("streaming", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_on_another_day_keeps_its_date(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dated.jinja").write_text(DATED)

    class Clock(datetime):
        today = "2026-01-31T23:59:59"

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromisoformat(cls.today)

    for module in ("megatrain.run.data", "megatrain.data.encode", "transformers.utils.chat_template_utils"):
        monkeypatch.setattr(f"{module}.datetime", Clock)
    steps = {"steps": 2, "lr_scheduler": "constant"}
    config = chat_run(tmp_path, train=steps, chat_template=str(tmp_path / "dated.jinja"), streaming=streaming)

    def into(name: str, **more: Any) -> Config:
        output = config.output.model_copy(update={"folder": str(tmp_path / name)})
        return config.model_copy(update={"output": output, **more})

    keep = config.checkpoint.model_copy(update={"every": 1, "keep_last": 9})
    said = train(into("run", checkpoint=keep))
    assert "the chat template writes 31 Jan 2026" in said
    whole = losses(tmp_path / "run")
    Clock.today = "2026-02-01T00:00:01"
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (taken,) = [path for path in checkpoints(tmp_path / "run" / "checkpoints") if step_of(path) == 1]
    assert "the chat template writes 31 Jan 2026" in train(into("part", resume=str(taken)))
    assert losses(tmp_path / "part") == whole[1:]
    assert "the chat template writes 01 Feb 2026" in train(into("fresh"))
    assert losses(tmp_path / "fresh")[0] != whole[0]


def test_ranks_that_begin_around_midnight_write_one_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dated.jinja").write_text(DATED)
    config = chat_run(tmp_path, chat_template=str(tmp_path / "dated.jinja"), packing="grouped")
    plan: Any = SimpleNamespace(micro_batch=4, work=SimpleNamespace(micro_batches=2))
    moments = iter(["2026-01-31T23:59:59", "2026-02-01T00:00:00"])

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromisoformat(next(moments))

    monkeypatch.setattr("megatrain.run.data.datetime", Clock)

    def opened(world: World) -> tuple[str, list[str]]:
        corpus = open_corpus(config, plan, load_tokenizer("bytes"), 257, None, world)
        corpus.loader.close()
        assert corpus.chats is not None
        return corpus.begun["moment"], corpus.chats.dates

    first, second = together(worlds(2), opened)
    assert first == second
    assert first[1] in (["31 Jan 2026"], ["01 Feb 2026"])


def test_text_and_chats_are_mixed_by_weight_and_duplicates_reported(tmp_path: Path) -> None:
    """Of 60 chats sample 30 is held out; the other file repeats it, five of those trained on, and one of its own."""
    config = chat_run(tmp_path)
    rows = (tmp_path / "chats.jsonl").read_text().splitlines(keepends=True)
    more = [row.replace("?", "??") for row in rows[10:30]]
    (tmp_path / "more.jsonl").write_text("".join([*rows[:5], rows[30], *more, more[0]]))
    sources = tuple(str(tmp_path / name) for name in ("corpus.txt", "chats.jsonl", "more.jsonl"))
    data = config.data.model_copy(update={"sources": sources, "weights": (3.0, 1.0, 1.0)})
    said = " ".join(train(config.model_copy(update={"data": data})).split())
    assert "sequences" in said
    assert "best fit" in said
    assert "duplicates 6 of 85 samples repeat another (1 within more, 5 of more in others); " in said
    assert "; 1 of the samples held out of chats also occurs in training data" in said
    assert "; 1 sample held out" in said


def test_a_step_has_the_requested_number_of_target_tokens(tmp_path: Path) -> None:
    train(
        chat_run(
            tmp_path, train={"target_tokens_per_step": 40, "micro_batch_size": 1, "gradient_accumulation_steps": None}
        )
    )
    steps = [line for line in lines(tmp_path / "run") if line["event"] == "stepped"]
    assert all(step["tokens"] >= 40 for step in steps)


MIXING = {
    "config": {
        "model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "word_embed_proj_dim": 32, "max_position_embeddings": 64, "vocab_size": 257, "bos_token_id": 0,
        "eos_token_id": 256, "pad_token_id": 0,
    }
}  # fmt: skip


def test_models_that_mix_packed_samples_are_refused_or_use_groups(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"data\.packing: cannot be trained on packed samples.*data\.packing=grouped"):
        train(chat_run(tmp_path, model=MIXING, packing="best_fit"))
    assert "like lengths together" in train(chat_run(tmp_path, model=MIXING, train={"steps": 1, "sample_tokens": 0}))


@pytest.mark.parametrize(
    ("line", "what"),
    [('{"messages"\n', r"bad\.jsonl:2: not a line of JSON"), ("", "no sample is left to train on.*1 without a target")],
)
def test_bad_samples_end_the_run_before_it_starts(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "q"}]}\n' + line)
    with pytest.raises(DataError, match=what):
        train(chat_run(tmp_path, sources=[str(tmp_path / "bad.jsonl")]))
    assert not (tmp_path / "run").exists()


def test_samples_are_not_concatenated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.packing: .*holds samples"):
        train(chat_run(tmp_path, packing="windows"))


def test_text_tables_are_cut_into_windows(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"text": "some words " * 40}] * 9).to_parquet(str(tmp_path / "text.parquet"))
    said = train(chat_run(tmp_path, sources=[str(tmp_path / "text.parquet")], train={"steps": 1}))
    assert "sequences" in said
    assert "9 samples" in said


def test_only_answers_are_trained(tmp_path: Path) -> None:
    """By the labels of three steps."""
    plan: Any = SimpleNamespace(micro_batch=4, work=SimpleNamespace(micro_batches=2))
    corpus = open_corpus(chat_run(tmp_path), plan, load_tokenizer("bytes"), 257, causal_lm_from_config(BYTE_LLAMA, 0))
    seen: list[str] = []
    for _ in range(3):
        for batch in next(corpus.loader):
            labels = batch["labels"]
            spoken = labels.masked_fill(labels == -100, 257)
            for row in spoken.tolist():
                seen += bytes(token if token < 256 else 0 for token in row).decode().replace("\0", " ").split()
            assert torch.equal(labels[labels != -100], batch["input_ids"][labels != -100])
    corpus.loader.close()
    assert set(seen) <= {f"{n % 7}!" * k for n in range(60) for k in (1, 2, 3)}
    assert len(seen) > 30
