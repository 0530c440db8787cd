"""Muon in torch: momentum and weight update on the device, and Newton-Schulz on any device.

Momentum and weight update are twins of the passes on the host (`optim.muon`), bit for bit: every operation rounds once,
in the same order, and none is fused with its neighbour. `orthogonalize` has the operations of `torch.optim.Muon` in
their order. It works matrix by matrix, so that a result does not depend on what is made orthogonal with it: kernels for
batches may round differently. Of large symmetric products only blocks of rows up to the diagonal are computed, and
mirrored: products and sums are torch's, and so are their bits where its kernels sum in the same order for all shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megatrain.optim import MatrixScalars, MomentumArrays, Muon
from megatrain.optim.kernels import F32, Segment
from megatrain.spec.layout import symmetric_blocks
from megatrain.train.device_update import CHUNK, join, split_to


def momentum_on_device(
    arrays: MomentumArrays[Tensor],
    scalars: MatrixScalars,
    segments: Sequence[Segment],
    *,
    nesterov: bool,
    flag: Tensor | None = None,
) -> None:
    """The twin of `optim.momentum_on_host`. flag: a bool on the device; if false the mean does not change, and
    directions are of no use."""
    for part, moves in _chunks(segments):
        g, m = arrays.gradient[part].to(torch.float32) * float(scalars.grad_scale), arrays.momenta[part]
        if moves:
            new = _lerp(m, g, scalars.rest)
            m.copy_(new if flag is None else torch.where(flag, new, m))
        arrays.direction[part].copy_(_lerp(g, m, scalars.momentum) if nesterov else m)


def apply_on_device(
    masters: tuple[Tensor, ...],
    direction: Tensor,
    keep: np.float32,
    rates: F32,
    segments: Sequence[Segment],
    *,
    flag: Tensor | None = None,
) -> None:
    """The twin of `optim.apply_on_host`; halves of masters are int16. flag: a bool on the device; if false nothing
    changes."""
    for part, index in _chunks(segments):
        change = direction[part].to(torch.float32) * float(rates[index])
        halves = [half[part] for half in masters]
        weight = join(*halves) if len(halves) == 2 else halves[0]
        moved = (weight * float(keep)).sub_(change)
        if flag is not None:
            moved = torch.where(flag, moved, weight)
        if len(halves) == 2:
            split_to(moved, *halves)
        else:
            weight.copy_(moved)


def orthogonalize(direction: Tensor, shape: tuple[int, int, int], muon: Muon) -> None:
    """Make each of the stacked matrices in a flat direction orthogonal, in place, by Newton-Schulz in its dtype.

    direction: contiguous bfloat16 or float32, whole. shape: (matrices, rows, columns). Zeros stay zeros; what is not
    finite spreads over its matrix. Torch allocates `directions.workspace_numel` elements.
    """
    matrices, rows, columns = shape
    small, large = sorted((rows, columns))
    spare = direction.new_empty(small, large)
    grams = direction.new_empty(2, small, small)
    for matrix in direction.view(matrices, rows, columns):
        x = _iterated(matrix, spare, grams, muon)
        if x is spare:
            matrix.copy_(x.T if rows > columns else x)
        elif rows > columns and muon.ns_steps:  # in the matrix's memory, but turned
            matrix.copy_(spare.copy_(x).T)


def _iterated(matrix: Tensor, spare: Tensor, grams: Tensor, muon: Muon) -> Tensor:
    """The orthogonal matrix, with no more rows than columns, in the memory of `matrix` and `spare` by turns."""
    a, b, c = muon.ns_coefficients
    gram, update = grams
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x.div_(x.norm().clamp(min=muon.eps))
    turned = matrix.view(spare.shape)
    for step in range(muon.ns_steps):
        into = turned if step % 2 else spare
        for start, stop in symmetric_blocks(len(gram)):
            torch.mm(x[start:stop], x[:stop].T, out=gram[start:stop, :stop])
            gram[:start, start:stop] = gram[start:stop, :start].T
        for start, stop in symmetric_blocks(len(gram)):
            rows = gram[start:stop]
            torch.addmm(rows[:, :stop], rows, gram[:, :stop], beta=b, alpha=c, out=update[start:stop, :stop])
            update[:start, start:stop] = update[start:stop, :start].T
        x = torch.addmm(x, update, x, beta=a, out=into)
    return x


def _chunks(segments: Sequence[Segment]) -> Iterator[tuple[slice, int]]:
    """The segments in chunks that stay in the device's cache, each with its third number."""
    for start, stop, number in segments:
        for begin in range(start, stop, CHUNK):
            yield slice(begin, min(begin + CHUNK, stop)), number


def _lerp(start: Tensor, end: Tensor, weight: np.float32) -> Tensor:
    """`torch.lerp`, with one rounding per operation."""
    difference = end - start
    if weight < 0.5:
        return difference.mul_(float(weight)).add_(start)
    return difference.mul_(float(weight) - 1).add_(end)
