"""Check a configuration before torch is imported, as far as neither model nor device is needed.

The command line checks first. The run checks again, because it can be started from Python, and ranks may be on other
machines. An earlier run in the same folder is checked by `existing_run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.config import Config, TrainSection
from megatrain.data.detect_kind import require_source
from megatrain.data.sample_formats import Format, Schema
from megatrain.data.tokenizer import refuse_absent_tokenizer
from megatrain.errors import ConfigError, MegaTrainError, ModelError
from megatrain.plan import load_hardware
from megatrain.plan.measured_models import known_names, refuse_absent
from megatrain.spec.device_name import parse_device
from megatrain.spec.work import refuse_huge_step
from megatrain.system.paths import nearest_folder, usable_path
from megatrain.train.metrics import refuse_missing


@contextmanager
def keys_named() -> Iterator[None]:
    """In the block, errors about an argument name the configuration key that it came from instead."""
    try:
        yield
    except MegaTrainError as error:
        if error.where.partition(",")[0] in TrainSection.model_fields:
            error.where = f"train.{error.where}"
        raise


@keys_named()
def refuse_mistakes(config: Config) -> None:
    """Raise a `MegaTrainError` for a tracker that is not installed, an unknown device, an unknown machine,
    too many tokens per step, a folder that is not writable, keys that do not fit the data's format, and a model,
    tokenizer or data that is missing."""
    refuse_missing(config.output.trackers)
    parse_device(config.train.device)
    if config.train.hardware is not None:
        load_hardware(config.train.hardware)
    length = config.data.sequence_length
    refuse_huge_step(length, "data.sequence_length", ConfigError)
    refuse_huge_step(config.train.sequences * length, "train.global_batch_size", ConfigError, tokens_each=length)
    _refuse_unwritable(config)
    if config.model.path is not None and usable_path(config.model.path, where="model.path").is_file():
        fix = "name the folder of a Hugging Face model; a config.json goes to model.config, for a fresh model"
        raise ModelError("is a file, not a folder", where=f"model {config.model.path}", fix=fix)
    for name in (config.model.path, config.model.config):
        if isinstance(name, str) and config.resume is None:
            refuse_absent(name)
    if config.data.tokenizer is not None:
        refuse_absent_tokenizer(config.data.tokenizer, known_names())
    schema = schema_of(config)
    for name in (*config.data.sources, *config.data.validation.values()):
        require_source(name, schema, asks_hub=True)


def schema_of(config: Config) -> Schema:
    """How sample fields are read. Raises `ConfigError` for columns or tags that the format does not use."""
    data = config.data
    chosen: Format = data.format
    if config.train.prefers:
        chosen = "unpaired" if config.train.objective == "kto" else "preference"
    schema = Schema(chosen, data.columns, data.tags, data.images)
    schema.refuse_unused()
    return schema


def _refuse_unwritable(config: Config) -> None:
    folders = {"output.folder": config.folder, "checkpoint.folder": config.checkpoints}
    if not config.data.streaming:  # a stream is read without a cache
        folders["data.cache"] = config.data.cache_folder
    for key, folder in folders.items():
        nearest = nearest_folder(folder)
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"{nearest} is not writable", where=str(folder), fix=f"choose another {key}")
