#!/usr/bin/env bash
# The mask of assistant tokens leaves out the end of an answer that ends in a character of several tokens.
#
# Versions: transformers 5.23.0, tokenizers 0.23.3.
# Expected: `return_assistant_tokens_mask=True` marks all tokens of what a template writes in a `{% generation %}` block.
# Seen: the end of a block is found with `char_to_token` of its last character, which names the first of that character's
# tokens. If a byte-level vocabulary writes it with several (most emoji, many accents and scripts), the others are not marked.
# Cost: where the block ends with the answer, a model never learns to finish such a character. The next token, the end of the
# turn, is then learnt after bytes that it was not taught to write.
# MegaTrain marks by the offsets of all tokens, so a character is a target as a whole.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import tokenizers
import transformers

alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
rules = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
rules.decoder = tokenizers.decoders.ByteLevel()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rules)
template = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
seen = {}
for answer in ("ae", "a\u00e9", "a\U0001f600"):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}, {"role": "user", "content": "r"}]
    out = tokenizer.apply_chat_template(chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
    seen[answer] = out["assistant_masks"]
    marked = [i for i, target in zip(out["input_ids"], out["assistant_masks"]) if target]
    print(f"{answer}: mask {seen[answer]}, the marked tokens are the text {tokenizer.decode(marked)!r}")
assert seen["ae"] == [0, 1, 1, 0], f"this has changed: {seen}"
assert seen["a\u00e9"] == [0, 1, 1, 0, 0] and seen["a\U0001f600"] == [0, 1, 1, 0, 0, 0, 0], f"this has changed: {seen}"
PYTHON
