#!/usr/bin/env bash
# transformers 5 reads a SentencePiece model of a Llama without the rules in it, and splits nearly every text otherwise.
#
# Versions: transformers 5.23.0 and 4.57.6, sentencepiece 0.2.3, protobuf 7.36.2.
# Expected: a folder with a config.json of a Llama and the tokenizer.model with which it was trained gives SentencePiece's ids, as
# version 4 does (`use_fast=False`). The file says whether pieces come from merges or from a unigram model, how text is
# normalised, and whether a text begins with a space that is put before it.
# Seen: if no tokenizer_config.json names a class, a general one is taken that puts no space before the text, whatever the file says, so the
# first word has other ids in every row. If it names LlamaTokenizer, the vocabulary and the order of merges are taken from the file and the
# rest is Llama 2's: a unigram model is run as merges, NFKC is left out, a space is put before texts of a model that was trained
# without. Of spaces at the beginning of a text, either class loses one. The vocabulary has the right size; nothing is logged.
# Cost: who trained a SentencePiece model for a Llama or Mistral, as many models for one language are, continues to train or evaluates it
# on pieces that it never saw in those places. Only a loss that is a little high tells. A tokenizer.json made by version 4 does not suffer from the first.
# MegaTrain compares what it loaded with SentencePiece on two texts, and refuses a difference.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 5.23.0 4.57.6; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install --quiet --no-compile transformers==$version sentencepiece==0.2.3 protobuf==7.36.2
done

cd "$work"
cat > train.py <<'PYTHON'
import json
from pathlib import Path

import sentencepiece

LINES = (
    "The quick brown fox jumps over the lazy dog and runs home.",
    "Training a language model takes many tokens of text.",
    "def loss(logits, labels): return cross_entropy(logits, labels)",
    "Numbers such as 2024 and 1.5 are split into digits, ½ is one sign.",
    "A model learns what it reads, and it reads what the tokenizer writes.",
)
LLAMA = {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True, "remove_extra_whitespaces": False}
CHANGES = {
    "as Llama 2": {},
    "unigram": {"model_type": "unigram"},
    "NFKC": {"normalization_rule_name": "nmt_nfkc"},
    "no space before": {"add_dummy_prefix": False},
}
for name, changes in CHANGES.items():
    for described in (False, True):
        folder = Path("described" if described else "plain", name)
        folder.mkdir(parents=True)
        sizes = {"vocab_size": 330, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES * 8), model_prefix=str(folder / "tokenizer"), **LLAMA | changes, **sizes
        )
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        if described:
            (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
PYTHON
cat > seen.py <<'PYTHON'
from pathlib import Path

import sentencepiece
import transformers

TEXTS = ("the model reads tokens", "  return loss", "½ of the text", "a model\tand a fox")
EQUAL = {
    "TokenizersBackend": {"as Llama 2": 0, "unigram": 0, "NFKC": 0, "no space before": 4},
    "LlamaTokenizer": {"as Llama 2": 3, "unigram": 2, "NFKC": 1, "no space before": 1},
}

print(f"transformers {transformers.__version__}")
for folder in sorted(Path().glob("*/*/")):
    if folder.parts[0] not in ("plain", "described"):
        continue
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, use_fast=False)
    kind = type(tokenizer).__name__
    other = [text for text in TEXTS if tokenizer(text, add_special_tokens=False).input_ids != pieces.encode(text)]
    print(f"  {folder.name:16} read by {kind:18} {len(TEXTS) - len(other)} of {len(TEXTS)} texts have SentencePiece's ids")
    if other:
        print(f"    {other[0]!r}: {pieces.encode(other[0], out_type=str)}\n      here {tokenizer.tokenize(other[0])}")
    wanted = EQUAL[kind][folder.name] if transformers.__version__ == "5.23.0" else len(TEXTS)
    assert len(TEXTS) - len(other) == wanted, "this has changed"
PYTHON
5.23.0/bin/python train.py
for version in 4.57.6 5.23.0; do "$version/bin/python" seen.py; done
