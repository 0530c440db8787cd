"""LLaMA-Factory's and Axolotl's YAMLs as ours, and a line about each key that has no counterpart.

What asks for a method that is not here is refused: a run without it would be another one. Left out: reading data or
models, and files that a YAML names (DeepSpeed's, say).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from megatrain.config import axolotl, llama_factory
from megatrain.config.keys import Config
from megatrain.config.load import complaint, read
from megatrain.config.translation import Reader, Translation
from megatrain.errors import ConfigError


def translate(path: Path) -> Translation:
    """The YAML `path` of LLaMA-Factory or Axolotl by our keys, as a configuration that is valid.

    Raises `ConfigError`, with file and line, for a file of neither, for a method that is not here, and for a value that
    the key has not here either.
    """
    given, places = read(path)
    if "base_model" in given:
        reader = Reader(path, given, places, axolotl.DEFAULTS)
        axolotl.read_axolotl(reader)
    elif "model_name_or_path" in given:
        reader = Reader(path, given, places, llama_factory.DEFAULTS)
        llama_factory.read_llama_factory(reader)
    else:
        what = "is no YAML of LLaMA-Factory or Axolotl: it has neither model_name_or_path nor base_model"
        raise ConfigError(what, where=str(path), fix="give one that the trainer itself would take for training")
    reader.by_the_table()
    try:
        Config.model_validate(reader.found.tree)
    except ValidationError as error:
        raise complaint(error, path, reader.came_from) from None
    return reader.found


__all__ = ["Translation", "translate"]
