"""Checks a configuration before torch is imported: what needs neither the model nor the device.

The command line asks here first. A run asks again, since it may be started from Python, and one of several ranks may
be on a machine of its own. Left out: an earlier run in the way (`existing_run`), and what takes the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.config import Config, TrainSection
from megatrain.data import Schema, require_source
from megatrain.data.sample_formats import Format
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.plan import load_hardware
from megatrain.spec.device_name import parse_device
from megatrain.system.paths import nearest_folder, refuse_absent_model
from megatrain.train.metrics import refuse_missing


@contextmanager
def keys_named() -> Iterator[None]:
    """What an error says of an argument, it says of the key of `train` that the argument is from."""
    try:
        yield
    except MegaTrainError as error:
        if error.where.partition(",")[0] in TrainSection.model_fields:
            error.where = f"train.{error.where}"
        raise


@keys_named()
def refuse_mistakes(config: Config) -> None:
    """Raise a `MegaTrainError` for a tracker that is not installed, the name of a device or a machine that is none, a
    folder that may not be written, keys that no data has, and a model or data that is not there."""
    refuse_missing(config.output.trackers)
    parse_device(config.train.device)
    if config.train.hardware is not None:
        load_hardware(config.train.hardware)
    _refuse_unwritable(config)
    if config.model.path is not None and config.resume is None:
        refuse_absent_model(config.model.path, f"model {config.model.path}")
    schema = schema_of(config)
    for name in (*config.data.sources, *config.data.validation.values()):
        require_source(name, schema)


def schema_of(config: Config) -> Schema:
    """How the fields of samples are read. Raises `ConfigError` for what the format has no use for."""
    data = config.data
    chosen: Format = data.format
    if config.train.prefers:
        chosen = "unpaired" if config.train.objective == "kto" else "preference"
    schema = Schema(chosen, data.columns, data.tags)
    schema.refuse_unused()
    return schema


def _refuse_unwritable(config: Config) -> None:
    for folder, key in ((config.folder, "output.folder"), (config.checkpoints, "checkpoint.folder")):
        there = nearest_folder(folder)
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"{there} may not be written", where=str(folder), fix=f"choose another {key}")
