"""A run's configuration: a YAML file plus `key=value` overrides, validated into one frozen tree.

Unknown keys, duplicate keys and values of the wrong type are errors with a line number; an unknown key also names the
nearest known one. Environment variables are read here too: which rank of a multi-process run this process is.
"""

from megatrain.config.environment import (
    Launch,
    find_launch,
    let_idle_threads_sleep,
    refuse_several_processes,
    seconds_to_stop,
    tell_torchrun,
)
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
    describe_keys,
)
from megatrain.config.load import load_config, save_config

__all__ = [
    "AdapterSection",
    "Config",
    "DataSection",
    "DiskSection",
    "Launch",
    "LmEvalSection",
    "MemorySection",
    "PolicySection",
    "Section",
    "TrainSection",
    "called",
    "describe_keys",
    "find_launch",
    "let_idle_threads_sleep",
    "load_config",
    "refuse_several_processes",
    "save_config",
    "seconds_to_stop",
    "tell_torchrun",
]
