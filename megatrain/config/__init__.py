"""What steers a run: a YAML file and `key=value` overrides, checked into one frozen tree.

A key that does not exist is an error that names the nearest one that does; a key given twice and a value of the wrong
type are errors too, each with its line. The environment is read here too: which of several processes this is.
"""

from megatrain.config.environment import (
    Launch,
    find_launch,
    let_idle_threads_sleep,
    refuse_several_processes,
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
    "tell_torchrun",
]
