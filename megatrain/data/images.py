"""Reads the images of chats, and puts a mark into the text of a message for each.

Sizes are read from a file's first bytes, pixels when needed. In a sample's messages, `MARK` stands for an image, so
that a content stays one text, in which turns are found as in any other. It becomes a part of type `image` when a chat
template renders the messages (`chat.py`). The images of a sample are in the order of their marks.

    {"type": "image"}, {"type": "image_url"}    a part of a content, which may bring its image: a path or bytes
    <image>                                     in the text of a row with images in its column, as LLaVA's data has it
    neither                                     the images of the column come before the first question, as in TRL

The image of a part without one is the next of the row's column. An image is a path, relative to the folder of the data,
or its bytes, or what a `datasets` column of images holds, {"bytes", "path"}. An address is refused: training would
depend on a server. Not supported: video and sound.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megatrain.data.messages import IMAGES, Message, read_turns
from megatrain.data.read_rows import SourceRow
from megatrain.errors import DataError, SampleError, first_line
from megatrain.system.paths import usable_path

MARK = "\U000f0000"
"""A private-use character; those of plane 0 are anchors of `assistant_turns.py`."""

PLACEHOLDER = "<image>"
PART_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
ROTATED = (5, 6, 7, 8)
"""Values of the EXIF tag of an orientation that turns an image by a quarter."""
ORIENTATION = 0x0112
FIX = "correct or remove the sample"


@dataclass(frozen=True, eq=False)
class Image:
    """An encoded image (JPEG, PNG, ...): in the file `path`, or `data`. place: of its row, for errors."""

    place: str
    path: str = ""
    data: bytes | None = None

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"image {self.path}" if self.path else "an image in bytes"

    @property
    def nbytes(self) -> int:
        """Its size as a file. Raises `SampleError` for a path without one."""
        if self.data is not None:
            return len(self.data)
        try:
            return Path(self.path).stat().st_size
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error

    @property
    def identity(self) -> str:
        """Tells it from others without reading a file: the name and size of its file, or a hash of its bytes."""
        if self.data is not None:
            return hashlib.blake2b(self.data, digest_size=16).hexdigest()
        return f"{Path(self.path).name} {self.nbytes}"

    def size(self) -> tuple[int, int]:
        """(width, height) in pixels, as shown. Reads no pixels. Raises `SampleError` for what is no image."""
        with self._opened() as image:
            width, height = image.size
            turned = image.getexif().get(ORIENTATION) in ROTATED
        return (height, width) if turned else (width, height)

    def pixels(self) -> Any:
        """The decoded image in RGB, as transformers loads it. Raises `SampleError` for a damaged one."""
        from PIL import ImageOps

        try:
            with self._opened() as image:
                return ImageOps.exif_transpose(image).convert("RGB")
        except SampleError:
            raise
        except Exception as error:  # decoders raise anything
            raise self._unreadable(first_line(error)) from error

    def _opened(self) -> Any:
        library = pillow()
        try:
            return library.open(self.path if self.data is None else io.BytesIO(self.data))
        except library.UnidentifiedImageError as error:
            raise self._unreadable("it is not a known kind of image") from error
        except Exception as error:
            raise self._unreadable(getattr(error, "strerror", None) or first_line(error)) from error

    def _unreadable(self, why: str) -> SampleError:
        return SampleError(f"{self.name} cannot be read ({why})", reason="unreadable image", where=self.place, fix=FIX)


def pillow() -> ModuleType:
    """The module `PIL.Image`. Raises `DataError` if it is not installed."""
    try:
        import PIL.Image
    except ImportError as error:
        what = "images need the `pillow` package, which is not installed"
        raise DataError(what, where="data.images", fix="pip install 'megatrain[images]'") from error
    return PIL.Image


def take_images(row: SourceRow, column: str, fields: Sequence[str]) -> tuple[SourceRow, tuple[Image, ...], int]:
    """(the row with a `MARK` for each image in `fields`, its images in order, how many have no place yet).

    fields: the columns of turns and texts, in order. Raises `SampleError` for images and places that do not fit.
    """
    given = _column(row, column)
    taking = _Taking(row, deque(given))
    changed = {name: taking.value(_parsed(row, name)) for name in fields if row.fields.get(name) is not None}
    unplaced = len(taking.given)
    if unplaced and taking.images:
        what = f"{len(given)} images in {column!r}, and {len(given) - unplaced} places for them in the text"
        raise SampleError(what, reason="images without a place", where=row.place, fix=FIX)
    images = taking.images if not unplaced else given
    return row._replace(fields={**row.fields, **changed}), tuple(images), unplaced


def place_before_question(messages: Sequence[Message], count: int, place: str) -> tuple[Message, ...]:
    """`messages` with the marks of `count` images before the first message of the user."""
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        what = f"{count} images, and no user's message to put them before"
        raise SampleError(what, reason="images without a place", where=place, fix=FIX)
    marked = {**messages[first], "content": MARK * count + messages[first].get("content", "")}
    return (*messages[:first], marked, *messages[first + 1 :])


def as_parts(message: Message) -> Message:
    """A message whose content is a list of parts: texts, and one of type `image` for each mark."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


class _Taking:
    """Walks through the values of a row and takes its images, those of the column in order."""

    def __init__(self, row: SourceRow, given: deque[Image]) -> None:
        self.row, self.given, self.images = row, given, list[Image]()
        self._has_column = bool(given)

    def value(self, value: Any) -> Any:
        """A text, a part, a turn, or a list of them, with marks in place of images."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            if value.get("type") in IMAGES:
                return self._part(value)
            return {key: inner if key == "role" else self.value(inner) for key, inner in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list | tuple) else value

    def _text(self, text: str) -> str:
        if MARK in text:
            what = f"a text with the character U+{ord(MARK):X}, which stands for an image here"
            raise SampleError(what, reason="a private character", where=self.row.place, fix="remove it")
        if not self._has_column or PLACEHOLDER not in text:
            return text
        for _ in range(text.count(PLACEHOLDER)):
            self._take_next()
        return text.replace(PLACEHOLDER, MARK)

    def _part(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        brought = next((part[key] for key in PART_KEYS if part.get(key) not in (None, "")), None)
        if isinstance(brought, Mapping) and "url" in brought:
            brought = brought["url"]
        if brought is not None and brought == part.get("base64"):
            brought = f"data:,{brought}"
        if brought is None:
            self._take_next()
        else:
            self.images.append(_image(brought, self.row))
        return {**{key: inner for key, inner in part.items() if key not in PART_KEYS}, "type": "text", "text": MARK}

    def _take_next(self) -> None:
        if not self.given:
            what = "more places for images in the text than images in the row"
            raise SampleError(what, reason="places without an image", where=self.row.place, fix=FIX)
        self.images.append(self.given.popleft())


def _parsed(row: SourceRow, name: str) -> Any:
    """A field; a list of turns written as JSON text is parsed, as in a table."""
    value = row.fields[name]
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return read_turns(value, name, row.place)
        except SampleError:
            return value
    return value


def _column(row: SourceRow, column: str) -> list[Image]:
    """The images in the column: none, one or a list of them; or the JSON text of a list."""
    value = row.fields.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = read_turns(value, column, row.place)
    if value is None or value == "":
        return []
    return [_image(item, row) for item in (value if isinstance(value, list | tuple) else [value])]


def _image(value: object, row: SourceRow) -> Image:
    """What a row says an image is."""
    if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray):
        return Image(row.place, data=bytes(value))
    if not isinstance(value, str) or not value:
        what = f"an image is {type(value).__name__}, not a path or bytes"
        raise SampleError(what, reason="malformed image", where=row.place, fix=FIX)
    if value.startswith("data:"):
        try:
            return Image(row.place, data=base64.b64decode(value.partition(",")[2], validate=True))
        except binascii.Error as error:
            what = f"an image is not base64 ({error})"
            raise SampleError(what, reason="malformed image", where=row.place, fix=FIX) from error
    if "://" in value and not value.startswith("file://"):
        what = f"image {value:.80} is an address"
        raise SampleError(what, reason="an address of an image", where=row.place, fix="download it, and give its path")
    try:
        path = usable_path(value.removeprefix("file://"), error=DataError)
    except DataError as error:
        raise SampleError(f"an image: {error}", reason="malformed image", where=row.place, fix=FIX) from error
    if not path.is_absolute():
        source = usable_path(row.file, error=DataError)
        path = (source if source.is_dir() else source.parent) / path
    return Image(row.place, path=str(path))
