"""Claims about where a trained model stops: at the end of a turn, as TRL saves it and as stock generation shows."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatrain.commands.export import run_export
from megatrain.commands.generate import GenerationModel, run_chat
from megatrain.data.chat import choose_template
from megatrain.data.encode import turn_ends
from megatrain.data.tokenizer import load_tokenizer
from megatrain.run.sampling import Sampling
from tests.data.chats import byte_tokenizer
from tests.data.test_trl_masks import tokenizer_of
from tests.run.test_training import configuration, train

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"}]


def base(folder: Path) -> Path:
    """A base model that ends texts with <|endoftext|>, and whose tokenizer knows the marks of turns."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run_on_chats(tmp_path: Path, adapter: dict[str, Any] | None = None, steps: int = 25, **output: Any) -> str:
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 32)
    data: dict[str, Any] = {
        "sources": [str(tmp_path / "chats.jsonl")],
        "tokenizer": None,
        "sequence_length": 48,
        "validation_fraction": 0,
    }
    how = {"steps": steps, "learning_rate": 2e-2, "sample_every": 25, "sample_prompts": ["q"], "sample_tokens": 24}
    model = {"path": str(base(tmp_path / "base")), "config": None, "verify": False}
    output = {"verify_export": False, "folder": str(tmp_path / "run"), **output}
    sections = {"model": model, "data": data, "train": {**how, "sample_temperature": 0}, "output": output}
    more = {"adapter": adapter} if adapter else {}
    config = configuration(tmp_path, **sections, checkpoint={"every": 1 if steps < 25 else 0}, **more)
    return train(config.model_copy(update={"resume": "auto"}))


def stops_of(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def stock_answer(folder: Path) -> list[int]:
    """The ids that transformers generates, without any option."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=False)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=36, do_sample=False, pad_token_id=0)
    return list(found[0, ids.shape[1] :].tolist())


def test_a_model_stops_where_its_trained_turns_end(tmp_path: Path) -> None:
    said = " ".join(run_on_chats(tmp_path).split())
    assert "<|im_end|> ends what is trained, so generation stops there too" in said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stock_answer(tmp_path / "run" / "model") == [*b"ok", end]
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event["text"] for event in events if event["event"] == "sampled"] == ["ok"]
    heard: list[str] = []
    run_chat(GenerationModel(str(tmp_path / "run"), precision="fp32"), ["q"], heard.append, Sampling(24, 0))
    assert "".join(heard) == "ok\n"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": None}
    config = trl.SFTConfig(str(tmp_path / "trl"), eos_token="<|im_end|>", **options)
    rows = datasets.Dataset.from_list([{"messages": CHAT}])
    tokenizer.pad_token = "<|endoftext|>"
    trl.SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
    assert stops_of(tmp_path / "run" / "model") == model.generation_config.eos_token_id == [end, 256]


def test_a_folder_may_keep_its_own_stops(tmp_path: Path) -> None:
    assert "generation stops" not in run_on_chats(tmp_path, stop_at_turn_end=False)
    assert stops_of(tmp_path / "run" / "model") == 256
    assert len(stock_answer(tmp_path / "run" / "model")) > 3
    heard: list[str] = []
    run_chat(GenerationModel(str(tmp_path / "run"), precision="fp32"), ["q"], heard.append, Sampling(24, 0))
    assert "".join(heard) == "ok\n", "the template itself says where a turn ends"


def test_a_resumed_run_may_take_its_stops_back(tmp_path: Path) -> None:
    run_on_chats(tmp_path, steps=1)
    assert stops_of(tmp_path / "run" / "model") == [258, 256]
    assert "<|im_end|> ends what is trained" in " ".join(run_on_chats(tmp_path, steps=2).split()), "told again"
    run_on_chats(tmp_path, steps=3, stop_at_turn_end=False)
    assert stops_of(tmp_path / "run" / "model") == 256


def test_an_adapter_says_where_it_stops_and_so_does_its_merge(tmp_path: Path) -> None:
    """A folder of an adapter has no generation config of its own."""
    run_on_chats(tmp_path, {"r": 4, "target_modules": "all-linear"}, steps=1)
    stops = stops_of(tmp_path / "run" / "model")
    assert len(stops) == 2
    with GenerationModel(str(tmp_path / "run"), precision="fp32").load() as engine:
        assert engine.generation_config.eos_token_id == stops
    run_export(str(tmp_path / "run"), tmp_path / "merged", merge=True)
    assert stops_of(tmp_path / "merged") == stops


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen3", ["<|im_end|>"]),
        ("llama3_1", ["<|eot_id|>"]),
        ("gemma", ["<end_of_turn>"]),
        ("phi3", ["<|end|>"]),
        ("gptoss", ["<|return|>", "<|call|>"]),
        ("mistral_v3", ["</s>"]),
        ("cohere2", ["<|END_OF_TURN_TOKEN|>"]),
        ("gemma4", ["<turn|>", "<|tool_response>"]),
    ],
)
def test_turns_of_known_templates_end_where_their_publishers_say(name: str, ends: list[str]) -> None:
    """The ids in the `generation_config.json` of the published models, but for ends of texts."""
    tokenizer = copy.deepcopy(tokenizer_of(name)) if name in ("cohere2", "gemma4") else byte_tokenizer(name)
    if name == "gemma4":
        tokenizer.add_tokens(["<turn|>", "<tool_call|>", "<|tool_response>"], special_tokens=True)
    assert [tokenizer.decode([end]) for end in turn_ends(choose_template(tokenizer))] == ends


def test_a_token_within_a_turn_is_no_end() -> None:
    """Gemma 4 writes texts of a call in tokens of their own; here the token that ends the call is no added token."""
    assert turn_ends(choose_template(tokenizer_of("gemma4"))) == []
