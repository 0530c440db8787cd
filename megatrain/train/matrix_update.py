"""One Muon update: its scale factors, and its three steps (momentum, orthogonalize, apply), on host and device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatrain.optim import MatrixScalars, MomentumArrays, Muon, Optimizer, apply_on_host, momentum_on_host
from megatrain.optim.kernels import F32, Segment
from megatrain.spec.layout import MatrixGroup
from megatrain.train import torch_muon


class TrainedParameter(NamedTuple):
    """A parameter that is updated, and what decides how."""

    name: str
    group: int
    """Number of the group whose learning rate it has (`Optimizer.group`)."""
    segments: tuple[Segment, ...]
    """(start, stop, decays) of its elements in the unit's state buffers; with several ranks, of those of this rank."""
    shape: tuple[int, int] = (0, 0)
    """Rows and columns of each of its matrices, if these are updated whole."""


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
        """The factors of an update by this optimizer, if it updates matrices whole. Raises as `Muon.matrix_scalars`."""
        if not isinstance(optimizer, Muon):
            return None
        return MuonUpdate(optimizer, lr, optimizer.matrix_scalars(lr=lr, grad_scale=grad_scale))

    def momentum(
        self, arrays: MomentumArrays[Tensor], segments: Sequence[Segment], flag: Tensor | None, threads: int
    ) -> None:
        """The first step. segments: as `within` returns them. flag: a bool on the device; if false nothing changes.
        threads: on the host; 0 on the device."""
        nesterov = self.muon.nesterov
        if not threads:
            torch_muon.momentum_on_device(arrays, self.scalars, segments, nesterov=nesterov, flag=flag)
            return
        given = MomentumArrays(*map(as_numpy, (arrays.momenta, arrays.gradient, arrays.direction)))
        momentum_on_host(given, self.scalars, segments, nesterov=nesterov, threads=threads)

    def orthogonalize(self, group: MatrixGroup, direction: Tensor) -> None:
        """The second step, where the direction is."""
        for start, stacked, rows, columns in group.stacks:
            whole = direction[start - group.start : start - group.start + stacked * rows * columns]
            torch_muon.orthogonalize(whole, (stacked, rows, columns), self.muon)

    def shaped(self, parameters: Sequence[TrainedParameter], start: int, stop: int, first: int) -> Shaped:
        """What the third step needs to know of elements [start, stop) of a unit, counted from `first`."""
        known: dict[tuple[int, int], int] = {}
        segments = []
        for begin, end, shape in _matrices(parameters, start, stop):
            segments.append((begin - first, end - first, known.setdefault(shape, len(known))))
        return np.array([self.muon.rate(self.lr, *shape) for shape in known], np.float32), segments

    def apply(
        self, masters: Sequence[Tensor], direction: Tensor, shaped: Shaped, flag: Tensor | None, threads: int
    ) -> None:
        """The third step. flag, threads: as of `momentum`."""
        keep = self.scalars.keep
        if not threads:
            torch_muon.apply_on_device(tuple(masters), direction, keep, *shaped, flag=flag)
            return
        apply_on_host(tuple(map(as_numpy, masters)), as_numpy(direction), keep, *shaped, threads=threads)


def within(parameters: Sequence[TrainedParameter], start: int, stop: int, moved: int) -> list[Segment]:
    """(start, stop, moves) of the matrices among elements [start, stop) of a unit, counted from `start`. Those before
    `moved` have their momentum already."""
    segments: list[Segment] = []
    for begin, end, _ in _matrices(parameters, start, stop):
        cuts = [begin, end] if not begin < moved < end else [begin, moved, end]
        segments += [(a - start, b - start, a >= moved) for a, b in pairwise(cuts)]
    return segments


def _matrices(
    parameters: Sequence[TrainedParameter], start: int, stop: int
) -> Iterator[tuple[int, int, tuple[int, int]]]:
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
