#!/usr/bin/env bash
# `apply_chat_template` removes `"content": null`, on which DeepSeek-V3's own template relies.
#
# Versions: transformers 5.23.0, jinja2 3.1.6; the template is the copy of DeepSeek-V3's that TRL 1.16.0 ships.
# Expected: a call of a tool in the form in which OpenAI's interface returns it, with null for its content, is written. The
# template asks `message['content'] is none` for it, and plain Jinja renders it.
# Seen: keys of a message whose value is None are removed before the template sees them (by design, because many templates
# write "None"). `message['content']` is then undefined, which is not none, and the rendering fails.
# Cost: data that worked before fails, with a message that denies a key which is there. The empty text is written as intended,
# so people who find that out are saved; those who catch errors and skip rows lose all calls of tools.
# MegaTrain gives such templates the empty text where the template has no rendering for a missing content.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6
"$work/venv/bin/pip" install --quiet --no-compile --no-deps trl==1.16.0  # for the file of its template

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
from importlib.util import find_spec
from pathlib import Path

import jinja2
import tokenizers
import transformers

template = (Path(find_spec("trl").origin).parent / "chat_templates/deepseekv3.jinja").read_text()
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="x", bos_token="<s>", eos_token="</s>")

def chat(content):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, "tool_calls": [call]}]

plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
expected = plain.render(messages=chat(None), bos_token="<s>", eos_token="</s>")
print("plain Jinja, null:      ", repr(expected))
empty = tokenizer.apply_chat_template(chat(""), chat_template=template, tokenize=False)
print("transformers, empty text:", repr(empty))
try:
    seen = repr(tokenizer.apply_chat_template(chat(None), chat_template=template, tokenize=False))
except jinja2.exceptions.UndefinedError as error:
    seen = f"UndefinedError: {error}"
print("transformers, null:     ", seen)
assert "no attribute 'content'" in seen, f"this has changed: {seen}"
PYTHON
