"""Encodes chats with images by the model's Hugging Face processor, and collates them into micro-batches.

The text of a chat has one token of an image where its template puts it. The processor replaces it by as many as the
model's tower makes of the image, between marks and line ends of its own; how many depends on sizes, not on pixels. So
samples are encoded with blank images of the same sizes, each set of sizes once, and no pixel is read before training.
A micro-batch is made by one call of the processor with its texts and images; its ids must be those of the encoding.

The processor decides the names and shapes of what it returns: rows of patches, grids, sizes, masks. Per token are the
entries that it also returns for a text alone.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from megatrain.data.assistant_turns import Span
from megatrain.data.images import Image, pillow
from megatrain.data.tokenizer import PROCESSOR_FIX, pretrained_processor, tokenizer_identity
from megatrain.errors import DataError, ModelError, SampleError, first_line

if TYPE_CHECKING:
    import torch

SIDES = (64, 128, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096)
"""Sides in pixels of the square images that are tried for a full row."""
MOST_SIZES = 1 << 16
"""Sets of sizes whose replacements are kept in memory."""


@dataclass(frozen=True, eq=False)
class ImageText:
    """A rendered chat with one token for each image, and the images. place: of its row, for errors."""

    text: str
    images: tuple[Image, ...]
    place: str


class Processor:
    """A processor of transformers, made by `load_processor`. name: what errors call it.

    Raises `DataError` if it has no token for images. Calls are made one at a time, since its tokenizer is changed by
    each (padding).
    """

    def __init__(self, processor: Any, name: str) -> None:
        self._processor, self._name, self._lock = processor, name, threading.Lock()
        self._replacements: dict[tuple[tuple[int, int], ...], tuple[str, ...]] = {}
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str) or not hasattr(processor, "tokenizer"):
            what = f"{type(processor).__name__} has no token for images in a text"
            raise DataError(what, where=f"processor {name}", fix="leave data.images out")
        self.image_token, self.image_token_id = token, int(processor.tokenizer.convert_tokens_to_ids(token))
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token  # which token it is makes no difference
        self._per_token = frozenset(self._call(text=["x"]))

    @property
    def chat_template(self) -> str | None:
        """Its own chat template, if it has one."""
        template = getattr(self._processor, "chat_template", None)
        return template.get("default") if isinstance(template, Mapping) else template

    @property
    def identity(self) -> str:
        """A hash of everything that its ids depend on."""
        settings = self._processor.to_dict()
        settings = {key: value for key, value in settings.items() if "path" not in key and "tokenizer" not in key}
        content = [type(self._processor).__name__, settings, tokenizer_identity(self._processor.tokenizer)]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    def entries(self) -> list[str]:
        """The names of what it returns for a text with an image, besides the ids and their mask."""
        names = self._call(images=[[_blank((64, 64))]], text=[self.image_token])
        return sorted(set(names) - {"input_ids", "attention_mask"})

    def full_row(self, tokens: int) -> dict[str, torch.Tensor]:
        """The arguments of a model's forward for one row of this many tokens or a few more, all of them of images: as
        large as the processor leaves them, and as fit."""
        sizes: dict[int, int] = {}
        for side in SIDES:
            blanks: dict[str, Any] = {"images": [[_blank((side, side))]], "text": [self.image_token]}
            sizes.setdefault(len(self._call(**blanks)["input_ids"][0]), side)
            if max(sizes) > tokens:
                break
        size = max((count for count in sizes if count <= tokens), default=min(sizes))
        count, side = -(-tokens // size), sizes[size]
        given: dict[str, Any] = {"images": [[_blank((side, side))] * count], "text": [self.image_token * count]}
        return dict(self._call(**given, return_tensors="pt"))

    def expanded(self, text: str, images: Sequence[Image], place: str) -> tuple[str, list[tuple[Span, int]]]:
        """(`text` with the tokens of each image, and for each image its span in the old text and its new length).

        Raises `SampleError` for an image that cannot be read, and if the text has another number of tokens of images.
        """
        pieces = text.split(self.image_token)
        if len(pieces) - 1 != len(images):
            wrote = f"the chat template writes {len(pieces) - 1} images ({self.image_token})"
            what = f"{wrote}, and the sample has {len(images)}"
            fix = "choose a chat template for images, and remove that token from texts"
            raise SampleError(what, reason="images that the template leaves out", where=place, fix=fix)
        if not images:
            return text, []
        written = self._written_for(tuple(image.size() for image in images), place)
        replaced, at = list[tuple[Span, int]](), 0
        for piece, replacement in zip(pieces, written, strict=False):
            at += len(piece)
            replaced.append((Span(at, at + len(self.image_token)), len(replacement)))
            at += len(self.image_token)
        return "".join(part for pair in zip(pieces, [*written, ""], strict=True) for part in pair), replaced

    def micro_batch(
        self, rows: Sequence[ImageText], ids: Sequence[npt.NDArray[Any]], width: int
    ) -> dict[str, torch.Tensor]:
        """What a micro-batch has besides ids and mask, from pixels read now. Rows are padded on the right to `width`.

        ids: those of each row, which may be fewer than its text has. Raises `DataError` for an image that cannot be
        read, or has changed since the samples were encoded.
        """
        import torch

        images = [[image.pixels() for image in row.images] for row in rows]
        places = rows[0].place if len(rows) == 1 else f"{rows[0].place} and {len(rows) - 1} more"
        entries = self._call(
            place=places,
            text=[row.text for row in rows],
            images=images if any(images) else None,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        tensors: dict[str, torch.Tensor] = {}
        for name, value in entries.items():
            if name in self._per_token:
                tensors[name] = torch.zeros((len(rows), width), dtype=value.dtype)
                for number, size in enumerate(map(len, ids)):
                    tensors[name][number, :size] = value[number, :size]
            else:
                tensors[name] = value
        for number, (row, row_ids) in enumerate(zip(rows, ids, strict=True)):
            if not np.array_equal(tensors["input_ids"][number, : len(row_ids)].numpy(), row_ids):
                what = (
                    "the processor gives other tokens than when the sample was encoded: an image has changed its size"
                )
                raise DataError(what, where=row.place, fix="restore the image, or begin a new run")
        return {name: value for name, value in tensors.items() if name not in ("input_ids", "attention_mask")}

    def _written_for(self, sizes: tuple[tuple[int, int], ...], place: str) -> tuple[str, ...]:
        """What replaces the token of each image of a sample whose images have these sizes (width, height)."""
        if sizes not in self._replacements:
            given = {"images": [[_blank(size) for size in sizes]], "text": [self.image_token * len(sizes)]}
            made = self._call(place, return_text_replacement_offsets=True, **given)
            replaced = (made.get("text_replacement_offsets") or [[]])[0]
            if len(replaced) != len(sizes):
                what = f"{type(self._processor).__name__} does not say what it writes for an image"
                raise DataError(what, where=f"processor {self._name}", fix="train this model with images from Python")
            if len(self._replacements) >= MOST_SIZES:
                self._replacements.clear()
            self._replacements[sizes] = tuple(offset["replacement"] for offset in replaced)
        return self._replacements[sizes]

    def _call(self, place: str = "", **arguments: Any) -> Mapping[str, Any]:
        """The processor's result without special tokens, which templates write. Raises `DataError` if it fails."""
        try:
            with self._lock:
                result: Mapping[str, Any] = self._processor(add_special_tokens=False, **arguments)
        except Exception as error:  # processors raise anything
            what = f"the processor {type(self._processor).__name__} fails ({first_line(error)})"
            raise DataError(
                what, where=place or f"processor {self._name}", fix="correct its images, or remove it"
            ) from error
        return result


class Arguments(Protocol):
    """Names of arguments of a forward, as `model.forward_arguments` finds them."""

    def __contains__(self, name: str, /) -> bool: ...


def refuse_without_tower(processor: Processor, name: str, arguments: Arguments) -> None:
    """Raise `ModelError` for a model that does not read what the processor makes of images. name: its class.
    arguments: those that its forward takes."""
    unread = [entry for entry in processor.entries() if entry not in arguments]
    if unread:
        what = f"takes no images: its forward has no {unread[0]}"
        fix = "leave data.images out, or name a model with images"
        raise ModelError(what, where=f"model {name}", fix=fix)


def load_processor(name: str) -> Processor:
    """The processor of a folder or a model on the hub. Raises `DataError` if there is none for images."""
    pillow()
    processor = pretrained_processor(name)
    if not hasattr(processor, "image_processor"):
        what = f"data.images needs a processor of images, and this is a {type(processor).__name__}"
        raise DataError(what, where=name, fix=PROCESSOR_FIX)
    return Processor(processor, name)


def _blank(size: tuple[int, int]) -> Any:
    """An image of this width and height, all black."""
    return pillow().new("RGB", size)
