"""A run's configuration: a YAML file plus `key=value` overrides, validated into one frozen tree.

Unknown keys, duplicate keys and values of the wrong type are errors with a line number; an unknown key also names the
nearest known one.
"""

from megatrain.config.described_keys import describe_keys
from megatrain.config.keys import (
    AdapterSection,
    Config,
    DataSection,
    DiskSection,
    LmEvalSection,
    MemorySection,
    PolicySection,
    Section,
    TrainSection,
    called,
)
from megatrain.config.load import load_config, save_config

__all__ = [
    "AdapterSection",
    "Config",
    "DataSection",
    "DiskSection",
    "LmEvalSection",
    "MemorySection",
    "PolicySection",
    "Section",
    "TrainSection",
    "called",
    "describe_keys",
    "load_config",
    "save_config",
]
