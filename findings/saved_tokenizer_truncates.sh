#!/usr/bin/env bash
# A tokenizer that has once been called with `truncation=True` is saved as one that truncates and pads.
#
# Versions: transformers 5.23.0, tokenizers 0.23.3.
# Expected: `truncation`, `max_length` and `padding` are arguments of one call. What `save_pretrained` writes does not depend on
# which texts were tokenized before.
# Seen: the last call's settings stay in the Rust tokenizer and are written to tokenizer.json. transformers resets them at each
# of its own calls and shows nothing; `tokenizers` and everything built on it (servers, data pipelines, other languages) obey
# the file: prompts are cut at the training's length without a word, and short ones are padded.
# Cost: a served model sees the first tokens of a prompt only. The file differs by the order in which a script did its work.
# MegaTrain cuts ids itself and never asks a tokenizer to truncate or pad, so the tokenizers that its runs write do neither.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile transformers==5.23.0 tokenizers==0.23.3

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import tokenizers
import transformers

words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "y": 1, "<pad>": 2}, unk_token="x"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="x")
text = "x y x y x y"
tokenizer.save_pretrained("before")
tokenizer(text, truncation=True, max_length=3, padding="max_length")
tokenizer.save_pretrained("after")
for folder in ("before", "after"):
    read = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    print(folder, "a call with truncation:", text, "->", read.encode(text).ids, "and x ->", read.encode("x").ids)
    print("    in transformers:", transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
assert len(read.encode(text).ids) == 3 and len(read.encode("x").ids) == 3, "this has changed: the file does not truncate and pad"
PYTHON
