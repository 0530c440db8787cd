"""Small processors for the models of `image_models.py`, with one token a byte, and chats with images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken
from torch import nn
from transformers import Gemma3Processor, LlavaProcessor, ProcessorMixin
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatrain.data.tokenizer import Tokenizer, load_tokenizer
from tests.stock.image_models import image_model

TOKENS = ("<pad>", "<image>", "<video>", "<begin>", "<end>", "<turn>", "<stop>")
IDS: dict[str, int] = {name: 257 + number for number, name in enumerate(TOKENS)}
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<stop>\n{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
"""ChatML in form; what an image is depends on the processor."""


class Grids(ProcessorMixin):
    """A processor as Qwen2-VL's, with rows of patches, their grids, and types of tokens. The library's own needs
    torchvision, for videos."""

    return_mm_token_type_ids = True

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any) -> None:
        self.image_token, self.image_token_id = "<image>", IDS["<image>"]
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // 4)


def tokenizer() -> Tokenizer:
    """One token a byte, and `TOKENS`."""
    made = load_tokenizer("bytes")
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in TOKENS], special_tokens=True)
    made.pad_token, made.eos_token = "<pad>", "<stop>"
    return made


def image_processor(kind: str) -> Any:
    """A processor for the model `image_model_of(kind)`."""
    words = tokenizer()
    if kind == "llava":
        template = TEMPLATE.replace("IMAGE", "<image>\n")
        pixels = LlavaImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        more = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return LlavaProcessor(pixels, words, chat_template=template, **more)
    if kind == "gemma3":
        marks = {"boi_token": "<begin>", "eoi_token": "<end>", "image_token": "<image>"}
        for name, token in marks.items():
            setattr(words, name, token)
            setattr(words, f"{name}_id", IDS[token])
        template, pixels = TEMPLATE.replace("IMAGE", "<begin>"), Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
        return Gemma3Processor(pixels, words, chat_template=template, image_seq_length=4)
    template = TEMPLATE.replace("IMAGE", "<begin><image><end>")
    size = {"shortest_edge": 64, "longest_edge": 1024}
    pixels = Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=1, merge_size=2, size=size)
    return Grids(pixels, words, chat_template=template)


def image_model_of(kind: str) -> nn.Module:
    """A small model whose tokens are those of `tokenizer()`."""
    names = {"llava": "image_token_index", "gemma3": "image_token_index"}
    ids: dict[str, Any] = {names.get(kind, "image_token_id"): IDS["<image>"]}
    if kind not in names:
        ids |= {"video_token_id": IDS["<video>"], "vision_start_token_id": IDS["<begin>"]}
        ids |= {"vision_end_token_id": IDS["<end>"]}
    if kind == "gemma3":
        ids |= {"boi_token_index": IDS["<begin>"], "eoi_token_index": IDS["<end>"]}
    return image_model(kind, vocabulary=288, **ids)


def picture(seed: int, width: int = 20, height: int = 12) -> Image.Image:
    """Noise, in RGB."""
    drawn = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


def write_pictures(folder: Path, count: int) -> list[str]:
    """Files of pictures in several sizes; returns their names."""
    (folder / "pictures").mkdir(exist_ok=True)
    names = [f"pictures/{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        picture(number, 16 + 8 * (number % 3), 12 + 12 * (number % 2)).save(folder / name)
    return names


def chat(question: object, *more: str) -> dict[str, Any]:
    """A row whose first message is `question`, followed by answers and questions in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": each} for at, each in enumerate((question, *more))]}


def write_chats(folder: Path, rows: Sequence[dict[str, Any]], name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def image_chats(folder: Path, count: int = 6) -> list[dict[str, Any]]:
    """Rows with no, one or two images in a column, whose places are parts of contents."""
    names, rows = write_pictures(folder, 2 * count), []
    for number in range(count):
        images = names[2 * number : 2 * number + number % 3]
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": f"What is {number}?"}]
        rows.append({**chat(parts, f"It is {number * 7}.", "Sure?", "Yes." * (1 + number % 2)), "images": images})
    return rows
