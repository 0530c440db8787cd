"""Freezes parameters by glob patterns over their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from transformers import PreTrainedModel

from megatrain.errors import ModelError
from megatrain.spec.validate_fields import checked


def freeze_parameters(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name matches one of the patterns (`model.layers.*.mlp.*`, `*embed*`).

    Raises `ModelError`, with the nearest name, for a pattern that matches none.
    """
    patterns = checked(patterns, tuple[str, ...], ModelError, "freeze")
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, parameters, n=1, cutoff=0.0)
            raise ModelError(
                f"no parameter matches {pattern!r}",
                where=f"freeze, model {type(model).__name__}",
                fix=f"names look like {near[0]!r}" if near else "",
            )
        for name in matching:
            parameters[name].requires_grad_(False)
