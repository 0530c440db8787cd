"""One Muon update: its scale factors, and its three steps (momentum, orthogonalize, apply), on host and device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatrain.optim import MatrixScalars, MomentumArrays, Muon, Optimizer, apply_on_host, momentum_on_host
from megatrain.optim.kernels import F32, Segment
from megatrain.spec.layout import MatrixGroup
from megatrain.train import torch_muon


class Stacked(Protocol):
    """A trained parameter: the elements that it has of its unit, and (rows, columns) of each of its matrices."""

    @property
    def segments(self) -> Sequence[Segment]: ...
    @property
    def shape(self) -> tuple[int, int]: ...


Shaped = tuple[F32, list[Segment]]
"""Rates, and (start, stop, index of its rate)."""


@dataclass(frozen=True)
class MuonUpdate:
    """The hyperparameters, learning rate and scale factors of one Muon update.

    lr: the learning rate of the step, before it is adjusted to the shape of a matrix.
    """

    muon: Muon
    lr: float
    scalars: MatrixScalars

    @staticmethod
    def of(optimizer: Optimizer, lr: float, grad_scale: float = 1.0) -> MuonUpdate | None:
        """The factors of an update by this optimizer, if it updates matrices whole. Raises as `Muon.matrix_scalars`
        does."""
        if not isinstance(optimizer, Muon):
            return None
        return MuonUpdate(optimizer, lr, optimizer.matrix_scalars(lr=lr, grad_scale=grad_scale))

    def momentum_on_host(self, arrays: MomentumArrays[Tensor], segments: Sequence[Segment], threads: int) -> None:
        """The first step, in host memory. segments: as `within` returns them."""
        given = MomentumArrays(*map(as_numpy, (arrays.momenta, arrays.gradient, arrays.direction)))
        momentum_on_host(given, self.scalars, segments, nesterov=self.muon.nesterov, threads=threads)

    def momentum_on_device(
        self, arrays: MomentumArrays[Tensor], segments: Sequence[Segment], flag: Tensor | None
    ) -> None:
        """The same on the device. flag: a bool there; if false nothing changes."""
        torch_muon.momentum_on_device(arrays, self.scalars, segments, nesterov=self.muon.nesterov, flag=flag)

    def orthogonalize(self, group: MatrixGroup, direction: Tensor) -> None:
        """The second step, where the direction is."""
        for start, stacked, rows, columns in group.stacks:
            whole = direction[start - group.start : start - group.start + stacked * rows * columns]
            torch_muon.orthogonalize(whole, (stacked, rows, columns), self.muon)

    def shaped(self, parameters: Sequence[Stacked], start: int, stop: int, first: int) -> Shaped:
        """What the third step needs to know of elements [start, stop) of a unit, counted from `first`."""
        known: dict[tuple[int, int], int] = {}
        segments = []
        for begin, end, shape in _matrices(parameters, start, stop):
            segments.append((begin - first, end - first, known.setdefault(shape, len(known))))
        return np.array([self.muon.rate(self.lr, *shape) for shape in known], np.float32), segments

    def apply_on_host(
        self, masters: Sequence[Tensor], direction: Tensor, rates: F32, segments: Sequence[Segment], threads: int
    ) -> None:
        """The third step, in host memory."""
        given = tuple(map(as_numpy, masters))
        apply_on_host(given, as_numpy(direction), self.scalars.keep, rates, segments, threads=threads)

    def apply_on_device(
        self, masters: Sequence[Tensor], direction: Tensor, rates: F32, segments: Sequence[Segment], flag: Tensor | None
    ) -> None:
        """The same on the device."""
        torch_muon.apply_on_device(tuple(masters), direction, self.scalars.keep, rates, segments, flag=flag)


def within(parameters: Sequence[Stacked], start: int, stop: int, moved: int) -> list[Segment]:
    """(start, stop, moves) of the matrices among elements [start, stop) of a unit, counted from `start`. Those before
    `moved` have their momentum already."""
    segments: list[Segment] = []
    for begin, end, _ in _matrices(parameters, start, stop):
        cuts = [begin, end] if not begin < moved < end else [begin, moved, end]
        segments += [(a - start, b - start, a >= moved) for a, b in pairwise(cuts)]
    return segments


def _matrices(parameters: Sequence[Stacked], start: int, stop: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """(start, stop, shape) of the elements in [start, stop) of parameters that are updated as whole matrices."""
    for parameter in parameters:
        for begin, end, _ in parameter.segments if parameter.shape[0] else ():
            if max(begin, start) < min(end, stop):
                yield max(begin, start), min(end, stop), parameter.shape


def as_numpy(tensor: Tensor) -> np.ndarray:
    """bfloat16 and halves of masters as their bits (uint16), float32 unchanged; no copy."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(np.uint16)
