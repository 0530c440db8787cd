"""Conversations and tokenizers for tests of chat templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from megatrain.data.sample_formats import Sample
from megatrain.data.tokenizer import Tokenizer, load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
MARK = re.compile(
    r"<[|\uff5c][^<>|\uff5c' ]+[|\uff5c]>|</?(?:start|end)_of_turn>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS)\]"
)
ENDS = {"gptoss": "<|return|>", "phi3": "<|endoftext|>", "deepseek_r1": "<\uff5cend▁of▁sentence\uff5c>"}

Message = dict[str, Any]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks the weather up.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
    },
}


def template_text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def special_tokens(text: str) -> list[str]:
    """The special tokens of a template, as its model's tokenizer would have them."""
    return sorted({*MARK.findall(text), "<s>", "</s>"})


def byte_tokenizer(name: str) -> Tokenizer:
    """A tokenizer with one token per byte and per special token of the template, and with the template."""
    text = template_text(name)
    tokenizer = load_tokenizer("bytes")
    special = [AddedToken(token, special=True, normalized=False) for token in special_tokens(text)]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", ENDS.get(name, "</s>")
    tokenizer.chat_template = text
    return tokenizer


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **more: object) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(city: str = "Bern") -> Message:
    function = {"name": "look_up", "arguments": {"city": city, "days": 2}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "id": "call00001", "function": function}]}


def answer(content: str = '{"sun": 3}') -> Message:
    return {"role": "tool", "content": content, "tool_call_id": "call00001", "name": "look_up"}


def chat(*messages: Message, tools: tuple[dict[str, Any], ...] = ()) -> Sample:
    return Sample("here.jsonl:1", tuple(messages), tools)
