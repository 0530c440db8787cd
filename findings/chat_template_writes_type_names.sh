#!/usr/bin/env bash
# A date in a JSON Lines file is trained as the text "<datetime>".
#
# Versions: datasets 5.2.0, pyarrow 26.0.1, transformers 5.23.0, jinja2 3.1.6.
# Expected: `load_dataset("json")` and `apply_chat_template` write the argument of a tool call as it is in the file, or fail, as
# `json.dumps` fails for a datetime.
# Seen: if a field is an ISO date in all rows, pyarrow's reader makes it a timestamp (its documented inference), with the offset
# from UTC lost. `apply_chat_template` replaces each value that is no JSON by the name of its type, because methods of objects
# are dangerous in templates. Both are reasonable; together a model learns to answer {"when": "<datetime>"}. A function passed to
# the template, such as `strftime_now` to fix the date, becomes such a text, too.
# Cost: a model that calls tools with type names. Whether it happens depends on the other rows of the file.
# MegaTrain reads JSON itself, writes dates of typed columns as their ISO text, and refuses values that JSON does not have.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1 transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import json
from datetime import date
from pathlib import Path

import datasets
import tokenizers
import transformers

words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="x")
template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
call = {"type": "function", "function": {"name": "remind", "arguments": {"when": "2026-05-01T10:00:00+02:00"}}}
line = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]})
Path("rows.jsonl").write_text(f"{line}\n" * 2)

rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
print("in the file:    ", line)
print("in the data set:", rows[0]["messages"])
written = tokenizer.apply_chat_template(rows[0]["messages"], chat_template=template, tokenize=False)
print("trained:        ", written)
assert written == '{"when": "<datetime>"}', f"this has changed: {written}"

today = date(2024, 7, 26).strftime
written = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], chat_template="{{ strftime_now }}", tokenize=False,
                                        strftime_now=today)
print("a function given to the template:", written)
assert written == "<builtin_function_or_method>", f"this has changed: {written}"
PYTHON
