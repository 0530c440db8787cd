"""What a call of `linear` or `embedding` asks for, given by place, by name or by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_OF_EMBEDDING = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""Behind ids and table, in order."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The options of `torch.nn.functional.embedding`."""

    padding: int
    """The id whose row gets no gradient, or -1."""
    renorms: bool
    """Whether rows are changed when they are looked up."""
    by_frequency: bool
    sparse: bool


def bias_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The bias of a `linear`."""
    bias: Tensor | None = args[2] if len(args) > 2 else kwargs.get("bias")
    return bias


def lookup_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Lookup:
    """The options of an `embedding`."""
    given = {**dict(zip(_OF_EMBEDDING, args[2:], strict=False)), **kwargs}
    padding = given.get("padding_idx")
    return Lookup(
        -1 if padding is None else padding % len(args[1]),
        given.get("max_norm") is not None,
        bool(given.get("scale_grad_by_freq")),
        bool(given.get("sparse")),
    )
