"""Build the planner's input from a configuration, for a run and for `megatrain plan CONFIG`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.plan import Question
from megatrain.run.memory_limits import limits_of, with_disk
from megatrain.spec import Batching, Hardware, ModelSpec

ROWS_OF: Mapping[str, Batching] = {"best_fit": "packed", "grouped": "padded"}
"""data.packing -> how rows are packed; `auto` is decided only after planning, when the data are read."""


STAGED = 2
"""Steps whose images are in host memory besides those read ahead: the running one's, as read and as staged."""


def question_of(
    config: Config,
    spec: ModelSpec,
    hardware: Hardware,
    overrides: Mapping[str, Any],
    values_per_token: float = 0.0,
) -> Question:
    """The planning question of one rank. overrides: policy fields in addition to `config.policy`'s. values_per_token:
    see `Work`.

    Raises `ConfigError` if nothing is left to train.
    """
    train = config.train
    if not spec.trained_numel:
        raise ConfigError("freezes all parameters", where="train.freeze", fix="freeze fewer of them")
    hardware = with_disk(hardware, config.disk)
    pinned = {**overrides, **config.policy.overrides}
    if train.micro_batch_override is not None:
        pinned["micro_batch"] = train.micro_batch_override
    return Question(
        spec,
        hardware,
        tokens_per_step=train.sequences * config.data.sequence_length,
        length=config.data.sequence_length,
        precision=train.precision,
        clips=train.max_grad_norm is not None,
        overrides=pinned,
        batching="padded" if train.prefers or config.data.images else ROWS_OF.get(config.data.packing, "uniform"),
        values_per_token=values_per_token,
        read_ahead=STAGED + (config.data.workers + 1 if config.data.workers else 0),
        saves=config.checkpoint.every > 0,
        limits=limits_of(config.memory, config.disk, hardware),
    )
