"""Translate LLaMA-Factory and Axolotl YAML files to ours, with a line about each key that has no counterpart.

A file that asks for a method we do not have is refused. Data, models and files named in the YAML (DeepSpeed's, for
example) are not read.
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
    """Translate the LLaMA-Factory or Axolotl YAML `path` to a valid configuration of ours.

    Raises `ConfigError`, with file and line, for a file of neither trainer, a method we do not have, or a bad value.
    """
    given, places = read(path)
    if "base_model" in given:
        reader = Reader(path, given, places, "axolotl")
        axolotl.read_axolotl(reader)
    elif "model_name_or_path" in given:
        reader = Reader(path, given, places, "llama_factory")
        llama_factory.read_llama_factory(reader)
    elif "train_dataset" in given:
        fix = "give a file with the keys of LLaMA-Factory's examples/train_full"
        raise ConfigError("is for LLaMA-Factory's v1, which is not supported", where=str(path), fix=fix)
    else:
        what = "is not a LLaMA-Factory or Axolotl YAML: it has neither model_name_or_path nor base_model"
        raise ConfigError(what, where=str(path), fix="give a file that one of them could train from")
    reader.by_the_table()
    try:
        Config.model_validate(reader.translation.tree)
    except ValidationError as error:
        raise complaint(error, path, reader.came_from) from None
    return reader.translation


__all__ = ["Translation", "translate"]
