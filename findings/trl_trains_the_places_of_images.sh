#!/usr/bin/env bash
# TRL's collator for images makes targets of the tokens that stand for an image, and they are most of the loss.
#
# Versions: trl 1.16.0, transformers 5.23.0, torch 2.13.0, pillow 12.0.0.
# Expected: labels are -100 where the model is fed an image: it never writes these tokens.
# Seen: for chats, without `assistant_only_loss`, each of the hundreds of placeholders of an image is a target.
# Cost: the loss and the accuracy that are logged are mostly about placeholders, and the rest of a row counts the less the larger its images are.
# MegaTrain's own runs train the assistant's answers only; its `streamed(SFTTrainer)` does as the stock trainer does.

set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 trl==1.16.0 pillow==12.0.0

cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

rules = Tokenizer(WordLevel({"a": 0, "<image>": 1, "<pad>": 2}, unk_token="a"))
rules.pre_tokenizer = WhitespaceSplit()
words = PreTrainedTokenizerFast(tokenizer_object=rules, unk_token="a", pad_token="<pad>")
words.add_special_tokens({"extra_special_tokens": ["<image>"]})
template = ("{% for m in messages %}{% for p in m['content'] %}{{ '<image> ' if p['type'] == 'image' else p['text'] + ' ' }}"
            "{% endfor %}{% endfor %}")
processor = LlavaProcessor(LlavaImageProcessorPil(), words, patch_size=14, vision_feature_select_strategy="full",
                           chat_template=template)
row = {"images": [Image.new("RGB", (336, 336))],
       "messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "a cat"}]}
batch = DataCollatorForVisionLanguageModeling(processor)([row])
targets = batch["labels"][batch["labels"] != -100]
places = int((targets == 1).sum())
print(f"{places} of {len(targets)} targets are <image>")
assert places > 100 and places > 0.9 * len(targets), f"this has changed: {places} of {len(targets)}"
PYTHON
