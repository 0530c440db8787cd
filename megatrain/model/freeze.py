"""Freezes parameters by glob patterns over their names, or by the role of a part in a model with images or sound."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model.architecture import head_of
from megatrain.spec.validate_fields import checked

ENCODERS = {"vision": "image", "audio": "audio"}
"""Role of a part -> what transformers calls the kind of input that it encodes."""
ROLES = (*ENCODERS, "projector", "language")


def freeze_parameters(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name matches one of the patterns (`model.layers.*.mlp.*`, `*embed*`), or that is of
    a part with a role: `vision`, `audio`, `language`, or `projector`, what is in none of them.

    Raises `ModelError`, with the nearest name, for a pattern that matches none.
    """
    patterns = checked(patterns, tuple[str, ...], ModelError, "freeze")
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matching and pattern in ROLES:
            matching = _of_role(model, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, parameters, n=1, cutoff=0.0)
            has_part = f"has no {pattern} part that transformers knows" if pattern in ROLES else ""
            raise ModelError(
                has_part or f"no parameter matches {pattern!r}",
                where=f"freeze, model {type(model).__name__}",
                fix=f"names look like {near[0]!r}" if near else "",
            )
        for name in matching:
            parameters[name].requires_grad_(False)


def encoder_of(model: PreTrainedModel, role: str) -> nn.Module | None:
    """The part that encodes images (`vision`) or sound (`audio`), as the library finds it; None if there is none."""
    encoder: nn.Module = model.get_encoder(modality=ENCODERS[role])
    return None if encoder in (model, model.base_model) else encoder


def decoder_of(model: PreTrainedModel) -> str | None:
    """The name of the language model inside a model with an encoder of images or sound; None for any other."""
    if not any(encoder_of(model, role) for role in ENCODERS):
        return None
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder and name), None)


def _of_role(model: PreTrainedModel, role: str) -> list[str]:
    """The names of the parameters of a part."""
    encoders = {kind: encoder_of(model, kind) for kind in ENCODERS}
    named = decoder_of(model)
    parts = {**encoders, "language": model.get_submodule(named) if named else None}
    of = {name: {id(parameter) for parameter in part.parameters()} for name, part in parts.items() if part is not None}
    if head := head_of(model) if "language" in of else None:
        of["language"] |= {id(parameter) for parameter in head.parameters()}
    if of:
        every = {id(parameter) for parameter in model.parameters()}
        of["projector"] = every.difference(*of.values())
    return [name for name, parameter in model.named_parameters() if id(parameter) in of.get(role, ())]
