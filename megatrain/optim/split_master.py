"""The split float32 master: the bfloat16 weight that streams to the device, and the 16 low bits that stay behind.

With u the 32 bits of the master:

    hi = (u + 0x8000) >> 16                        the bfloat16 nearest to the master, ties away from zero
    lo = u & 0xffff                                the low bits, unchanged
    u  = ((hi - (lo >> 15)) << 16) | lo            all modulo their width

`lo >> 15` is exactly the carry that rounding added to hi, so the two halves restore *all* 2**32 bit patterns. Ties go
away from zero, not to even, so that lo alone tells the carry. A bfloat16 checkpoint is already split: hi is its bits
and lo is zero.

In two edge cases hi alone misrepresents the master: a finite master of magnitude 0x7f7f8000 (3.396e38) or more rounds
to infinity in bfloat16, and a NaN whose payload is at either end of its range rounds to infinity or wraps to zero. The
NaNs that arithmetic produces (0x7fc00000, 0xffc00000) stay NaN in hi.

bfloat16 arrays are passed as their bits, uint16. `StateArrays` has the halves beside what an optimizer keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from megatrain.optim import kernels
from megatrain.optim.kernels import F32, U16, check_arrays, cut, run, whole


class Sliced(Protocol):
    """A flat array, of numpy or torch."""

    def __getitem__(self, elements: slice, /) -> Any: ...


A = TypeVar("A", bound=Sliced)
B = TypeVar("B", bound=Sliced)


@dataclass(frozen=True, slots=True)
class StateArrays(Generic[A]):
    """Views of the state of a unit, or of a piece of one: masters, and what the optimizer keeps for each of them.

    Arrays are numpy's in host memory (uint16 for halves), or tensors on the device (int16 for halves).
    """

    hi: A
    """bfloat16 bits, or float32 masters if `lo` is None. Of a whole unit, frozen elements follow the trained ones."""
    lo: A | None
    """The low bits of the trained elements."""
    moments: tuple[A, ...]
    """What the optimizer keeps (`Optimizer.STATE`), float32, of the trained elements."""

    @property
    def masters(self) -> tuple[A, ...]:
        """Both halves, or the float32 masters alone."""
        return (self.hi,) if self.lo is None else (self.hi, self.lo)

    def map(self, function: Callable[[A], B]) -> StateArrays[B]:
        """What a function makes of each array."""
        lo = None if self.lo is None else function(self.lo)
        return StateArrays(function(self.hi), lo, tuple(map(function, self.moments)))

    def part(self, elements: slice) -> StateArrays[A]:
        """Views of some of the trained elements."""
        return self.map(lambda array: array[elements])


HostArrays = StateArrays[np.ndarray]


def split(master: F32, threads: int = 1) -> tuple[U16, U16]:
    """Split `master`, float32[n], into (hi, lo), uint16[n] each."""
    hi, lo = np.empty(master.shape, np.uint16), np.empty(master.shape, np.uint16)
    split_into(master, hi, lo, threads)
    return hi, lo


def split_into(master: F32, hi: U16, lo: U16, threads: int = 1) -> None:
    """Split `master`, float32[n], into the given `hi` and `lo`, uint16[n] each."""
    check_arrays({"hi": hi, "lo": lo}, {"master": master})
    run(kernels.split, master, hi, lo, blocks=cut(whole(master.size), master.size), threads=threads)


def join(hi: U16, lo: U16, threads: int = 1) -> F32:
    """Join `hi` and `lo`, uint16[n] each, into the master that was split, float32[n]; bit-exact."""
    out = np.empty(hi.shape, np.float32)
    join_into(hi, lo, out, threads)
    return out


def join_into(hi: U16, lo: U16, out: F32, threads: int = 1) -> None:
    """Join `hi` and `lo`, uint16[n] each, into the given `out`, float32[n]."""
    check_arrays({"out": out}, {"hi": hi, "lo": lo})
    run(kernels.join, hi, lo, out, blocks=cut(whole(out.size), out.size), threads=threads)
