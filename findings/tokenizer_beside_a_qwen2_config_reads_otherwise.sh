#!/usr/bin/env bash
# A tokenizer that is saved beside a Qwen2 model comes back with Qwen2's rules instead of its own, and so do other classes.
#
# Versions: transformers 5.23.0, tokenizers 0.23.3.
# Expected: `AutoTokenizer` reads tokenizer.json, as `tokenizers` does, and gives the ids with which the model was trained.
# Seen: for some model types (qwen2, qwen3_5, phi3 and others, "incorrect hub tokenizer class") the class follows from the type, and
# GPT2Tokenizer, Qwen2Tokenizer, GPTNeoXTokenizer and others take the vocabulary and the merges from the file, nothing else: the normalizer
# and the pre-tokenizer are their own. `tokenizer_class: PreTrainedTokenizerFast`, as saved, does not help beside Qwen2. Only the pair of
# LlamaTokenizer and a byte-level file is noticed. For OLMo's tokenizers it is known (transformers issue 45920, open-instruct issue 1896).
# Cost: a tokenizer trained for a new model of this architecture works until the model is saved with it; then the model is
# evaluated, served and trained on with other tokens for numbers and capitals, of the same vocabulary, and nothing fails.
# MegaTrain compares what it loaded with the file on a probe of text, and follows the file; it cannot mend how others load its exports.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile transformers==5.23.0 tokenizers==0.23.3

cd "$work"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

rules = tokenizers.Tokenizer(models.BPE())
rules.normalizer = normalizers.Lowercase()
rules.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(tokenizers.Regex(r"\d{1,3}(?=(\d{3})*\b)"), "isolated"),  # numbers in threes from the right
    pre_tokenizers.ByteLevel(add_prefix_space=False)])
rules.decoder = decoders.ByteLevel()
rules.train_from_iterator(["in 1987 some 250 000 or 1000000 people lived here"] * 9, trainers.BpeTrainer(
    vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
text, seen = "In 1987 Some lived", {}
for config in (None, LlamaConfig(), Qwen2Config()):
    where = "beside " + (config.model_type if config else "nothing")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(where)
    if config:
        config.save_pretrained(where)
    loaded = AutoTokenizer.from_pretrained(where)
    seen[where] = loaded.convert_ids_to_tokens(loaded(text)["input_ids"])
    print(f"{where:15} {type(loaded).__name__:18} {seen[where]}")
with open("beside nothing/tokenizer_config.json") as file:
    described = json.load(file)
with open("beside nothing/tokenizer_config.json", "w") as file:
    json.dump({**described, "tokenizer_class": "GPT2Tokenizer"}, file)
loaded = AutoTokenizer.from_pretrained("beside nothing")
seen["GPT2Tokenizer"] = loaded.convert_ids_to_tokens(loaded(text)["input_ids"])
print(f"{'GPT2Tokenizer':15} {type(loaded).__name__:18} {seen['GPT2Tokenizer']}")
stored = tokenizers.Tokenizer.from_file("beside qwen2/tokenizer.json").encode(text).tokens
assert stored == rules.encode(text).tokens == seen["beside nothing"] == seen["beside llama"], f"this has changed: {seen}"
for where in ("beside qwen2", "GPT2Tokenizer"):
    assert seen[where] != stored, f"this has changed: {where} reads as its file says"
PYTHON
