#!/usr/bin/env bash
# `{% generation %}` marks other characters than those it surrounds as soon as it stands in a macro or a `set` block.
#
# Versions: transformers 5.23.0, jinja2 3.1.6.
# Expected: the same mask of assistant tokens, however a template is divided into macros, since it writes the same text.
# Seen: the place of a mark is the length of the output when Jinja comes to it. A macro, a `set`, `filter` or `call` block is written to
# the output as a whole, at its end, so marks in it are too early by what it wrote before them: "[A]because[e" for "because[end]".
# Cost: the model is trained on the headers of its turns and not on the ends of its answers. The mask has the right number of tokens,
# and most are the right ones. Templates of recent models are written with macros; those who train add the marks.
# MegaTrain makes the template write a character at each mark, and takes the text between the two.

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

turn = ("{% if m.role == 'user' %}[U]{{ m.content }}{% else %}[A]{% generation %}{{ m.content }}[end]{% endgeneration %}"
        "{% endif %}")
templates = {
    "in the loop": "{% for m in messages %}" + turn + "{% endfor %}",
    "in a macro": "{% macro said(m) %}" + turn + "{% endmacro %}{% for m in messages %}{{ said(m) }}{% endfor %}",
    "in a set block": "{% for m in messages %}{% set said %}" + turn + "{% endset %}{{ said }}{% endfor %}",
}
chat = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"},
        {"role": "user", "content": "so"}, {"role": "assistant", "content": "fine"}]
texts, seen = set(), {}
for where, template in templates.items():
    out = tokenizer.apply_chat_template(chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
    texts.add(tokenizer.decode(out["input_ids"]))
    seen[where] = tokenizer.decode([i for i, marked in zip(out["input_ids"], out["assistant_masks"]) if marked])
    print(f"{where:14} {tokenizer.decode(out['input_ids'])}  marked: {seen[where]}")
assert len(texts) == 1 and seen["in the loop"] == "because[end]fine[end]"
for where in ("in a macro", "in a set block"):
    assert seen[where] == "[A]because[e[A]fine[e", f"this has changed: {seen}"
PYTHON
