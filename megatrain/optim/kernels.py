"""The optimizers' numba loops, with argument checks, blocks and threads."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numpy.typing import NDArray

from megatrain.errors import ConfigError, MegaTrainError
from megatrain.spec.layout import NORM_BLOCK

# Arrays and blocks ----------------------------------------------------------------------------------------------------
#
# Blocks depend on the segments alone, never on the thread count. Threads come from our own small pool, not from
# numba's parallel loops, whose threading layers clash with OpenMP and with other callers. The calling thread always
# works too, and a helper that has not started when the work is done is dropped, so concurrent calls cannot wait for
# each other. Threads are not pinned to cores.


Array = NDArray[Any]
F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
Segment = tuple[int, int, int]
"""Elements [start, stop), and what the kernel reads of them: whether weights decay, for AdamW."""

BLOCK = NORM_BLOCK  # elements; a multiple of `kernels.LANES` and of a cache line in every dtype

MOST_THREADS = 1 << 10
"""More threads than any machine runs."""

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def whole(nelements: int) -> list[Segment]:
    """One segment covering a whole array, with weight decay."""
    return [(0, nelements, True)]


def cut(segments: Sequence[Segment], nelements: int) -> NDArray[np.int64]:
    """Cut segments into blocks of at most `BLOCK` elements, each with its segment's third number: int64[blocks, 3].

    Raises MegaTrainError unless the segments ascend, do not overlap and lie within [0, nelements]. The same array for
    the same arguments, as of each step.
    """
    return _cut(tuple(segments), nelements)


@lru_cache(256)
def _cut(segments: tuple[Segment, ...], nelements: int) -> NDArray[np.int64]:
    if len(segments) == 0:
        return np.zeros((0, 3), np.int64)
    table = np.array(segments, np.int64)
    start, stop = table[:, 0], table[:, 1]
    if start[0] < 0 or stop[-1] > nelements or (start > stop).any() or (start[1:] < stop[:-1]).any():
        raise MegaTrainError(
            "segments overlap, descend or leave the array",
            where=f"{len(segments)} segments of an array of {nelements} elements",
            fix="take them from the unit's layout, in its order",
        )
    counts = -(-(stop - start) // BLOCK)
    owner = np.arange(len(table)).repeat(counts)
    index = np.arange(len(owner)) - (counts.cumsum() - counts).repeat(counts)
    blocks = table[owner]
    blocks[:, 0] += index * BLOCK
    blocks[:, 1] = np.minimum(blocks[:, 0] + BLOCK, blocks[:, 1])
    return blocks


_DTYPES: dict[str, tuple[type, ...]] = {"hi": (np.uint16,), "lo": (np.uint16,)}
_DTYPES |= dict.fromkeys(("grad", "direction"), (np.uint16, np.float32))


def check_arrays(written: dict[str, Array], read: dict[str, Array]) -> None:
    """Raise MegaTrainError unless the arrays are contiguous, 1-D, equally long, disjoint, and of the dtypes in
    `_DTYPES` or float32.

    The kernels rely on it: they check no bounds and assume that no array aliases another.
    """
    arrays = written | read
    length = next(iter(arrays.values())).size
    for name, array in arrays.items():
        problem = ""
        dtypes = _DTYPES.get(name, (np.float32,))
        if array.dtype not in dtypes:
            problem = f"dtype {array.dtype}, expected {' or '.join(d.__name__ for d in dtypes)}"
        elif array.shape != (length,):
            problem = f"shape {array.shape}, expected ({length},)"
        elif not array.flags.c_contiguous or not array.flags.aligned:
            problem = "not contiguous and aligned"
        elif name in written and not array.flags.writeable:
            problem = "read-only"
        if problem:
            raise MegaTrainError(problem, where=name, fix="pass flat arrays of one length")
    starts = sorted((array.__array_interface__["data"][0], name) for name, array in arrays.items() if array.size)
    for (begin, one), (next_begin, other) in pairwise(starts):
        if begin + arrays[one].nbytes > next_begin and (one in written or other in written):
            names = ", ".join(sorted((one, other), key=list(arrays).index))
            raise MegaTrainError("two arrays of one call share memory", where=names)


def run(kernel: Kernel, *args: Any, blocks: NDArray[np.int64], threads: int) -> None:
    """Run `kernel(*args, blocks, counter)` on the calling thread and up to `threads - 1` helpers; return when all is
    done.

    If the calling thread is restricted to some processors, no more threads than those run, and a helper inherits the
    restriction of the thread that first started it. Raises `ConfigError` for fewer than one thread.
    """
    if threads < 1:
        raise ConfigError(f"{threads} threads", where="optimizer threads", fix="give at least 1")
    counter = np.zeros(1, np.int64)
    helpers = min(threads, len(blocks)) - 1
    if helpers > 0:
        helpers = min(helpers, _most_threads() - 1)
    pool = _shared_pool() if helpers > 0 else None
    futures = [pool.submit(kernel, *args, blocks, counter) for _ in range(helpers)] if pool else []
    try:
        kernel(*args, blocks, counter)
    finally:
        for future in futures:
            if not future.cancel():
                future.result()


def _most_threads() -> int:
    allowed, there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0, os.cpu_count() or 1
    return allowed if 0 < allowed < there else MOST_THREADS


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="megatrain-optim")
        return _pool


def _forget_pool() -> None:
    """In a forked child: the parent's threads are gone, and the lock may have been copied while held."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


# Compiled loops -------------------------------------------------------------------------------------------------------
#
# A kernel is one pass over memory, in place, without the GIL. It *claims* the next block from a shared counter
# (an atomic add) until none is left, so a thread enters compiled code once per call: it never waits for the GIL
# between blocks, and a slow core simply claims fewer. Blocks are disjoint and elements independent, so the result does
# not depend on which thread claimed which block.
#
# Every operation is float32, rounded once, in the order written here. There is no fast-math flag, hence no fused
# multiply-add and no approximate root or quotient, and denormals are kept. LLVM vectorizes the loops.
# `reference_update` in `tests/references.py` is the same in numpy, and a test holds the two bit-equal.
#
# All compiled code lives in this one file because numba's cache recompiles a kernel only if the file that defines it
# changes, not if a function that it calls from another file does.


LANES = 64  # float64 partial sums in `block_sums`; fixed, so that the order of additions is

Kernel = Callable[..., None]

_log = logging.getLogger(__name__)
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def compiled(function: Kernel) -> Kernel:
    """Compile `function` at its first call for each combination of dtypes, and cache the result on disk if possible.

    numba tries a folder beside the source, then the user's cache directory, and refuses to cache if it can write
    to neither (a read-only image). Then each process compiles again, which takes seconds.
    """
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError as error:
        _log.warning("each process compiles the optimizer kernels again: %s", error)
    kernel: Kernel = dispatcher
    return kernel


def inlined(function: Callable[..., Any]) -> Any:
    """Inline `function` into the kernels that call it."""
    return numba.njit(inline="always")(function)


instruction: Callable[[Callable[..., Any]], Any] = intrinsic
"""Makes a function, which emits LLVM code, callable from kernels."""


@instruction
def to_f32(typingctx: Any, x: Any) -> Any:
    """Convert x, as bfloat16 bits (uint16), float32 bits (uint32) or a float32, to float32."""
    if x not in (types.uint16, types.uint32, types.float32):
        raise TypingError(f"{x} cannot be read as float32")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,) = args
        if x == types.uint16:
            value = builder.shl(builder.zext(value, _I32), _I32(16))
        return builder.bitcast(value, _F32)

    return types.float32(x), codegen


@instruction
def _bits(typingctx: Any, x: Any) -> Any:
    """The 32 bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@instruction
def claim(typingctx: Any, counter: Any) -> Any:
    """Atomically add one to `counter[0]` (int64[1]); returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, _I64(1), "monotonic")

    return types.int64(counter), codegen


@instruction
def rounded_like(typingctx: Any, x: Any, array: Any) -> Any:
    """A float32 in the dtype of an array's elements: itself, or bfloat16 bits, ties to even and every NaN to 0x7fc0, as
    torch rounds."""
    if array.dtype not in (types.uint16, types.float32):
        raise TypingError(f"a float32 cannot be written to {array}")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        if signature.return_type == types.float32:
            return value
        bits = builder.bitcast(value, _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        near = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), odd), _I32(16))
        near = builder.select(builder.fcmp_unordered("uno", value, value), _I32(0x7FC0), near)
        return builder.trunc(near, ir.IntType(16))

    return array.dtype(types.float32, array), codegen


@inlined
def _join(hi: Any, lo: Any) -> Any:
    low = np.uint32(lo)
    return to_f32(np.uint32(((np.uint32(hi) - (low >> np.uint32(15))) << np.uint32(16)) | low))


@inlined
def _hi(u: Any) -> Any:
    return np.uint16((u + np.uint32(0x8000)) >> np.uint32(16))


@inlined
def _lo(u: Any) -> Any:
    return np.uint16(u & np.uint32(0xFFFF))


@inlined
def _lerp(weight: Any) -> Any:
    """`torch.lerp` from m to g by this weight: (whether to start from m, else from g; the factor of g - m)."""
    near = weight < np.float32(0.5)
    return near, weight if near else weight - np.float32(1.0)


@inlined
def _change(masters: Any, hi: Any, lo: Any, j: Any, keep: Any, change: Any) -> None:
    """Set element j to w * keep - change. Whether `masters` are split (hi, lo) or float32 is known when it compiles."""
    if len(masters) == 2:
        u = _bits(_join(hi[j], lo[j]) * keep - change)
        hi[j] = _hi(u)
        lo[j] = _lo(u)
    else:
        hi[j] = hi[j] * keep - change


@compiled
def split(master: Any, hi: Any, lo: Any, blocks: Any, counter: Any) -> None:
    """Split float32[n] into uint16[n] and uint16[n]; see `split_master.py`."""
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        start, stop = blocks[i, 0], blocks[i, 1]
        master_b, hi_b, lo_b = master[start:stop], hi[start:stop], lo[start:stop]
        for j in range(stop - start):
            u = _bits(master_b[j])
            hi_b[j] = _hi(u)
            lo_b[j] = _lo(u)


@compiled
def join(hi: Any, lo: Any, out: Any, blocks: Any, counter: Any) -> None:
    """Join uint16[n] and uint16[n] into float32[n]; see `split_master.py`."""
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        start, stop = blocks[i, 0], blocks[i, 1]
        hi_b, lo_b, out_b = hi[start:stop], lo[start:stop], out[start:stop]
        for j in range(stop - start):
            out_b[j] = _join(hi_b[j], lo_b[j])


@compiled
def adamw(masters: Any, moments: Any, grad: Any, scalars: Any, blocks: Any, counter: Any) -> None:
    """One step on masters, split (hi, lo) or float32 (weight,), and moments (m, v). `scalars` is
    `AdamWScalars.packed()`, float32[8]."""
    decay, grad_scale, step_size, root_scale = scalars[0], scalars[1], scalars[2], scalars[3]
    eps, rest1, b2, rest2 = scalars[4], scalars[5], scalars[6], scalars[7]
    from_m, share = _lerp(rest1)
    m, v = moments
    hi, lo = masters[0], masters[-1]
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        start, stop = blocks[i, 0], blocks[i, 1]
        keep = decay if blocks[i, 2] else np.float32(1.0)
        hi_b, lo_b, grad_b = hi[start:stop], lo[start:stop], grad[start:stop]
        m_b, v_b = m[start:stop], v[start:stop]
        for j in range(stop - start):
            g = to_f32(grad_b[j]) * grad_scale
            m_j = (m_b[j] if from_m else g) + share * (g - m_b[j])
            v_j = b2 * v_b[j] + (rest2 * g) * g
            change = (step_size * m_j) / (np.sqrt(v_j) * root_scale + eps)
            _change(masters, hi_b, lo_b, j, keep, change)
            m_b[j] = m_j
            v_b[j] = v_j


@compiled
def lion(masters: Any, moments: Any, grad: Any, scalars: Any, blocks: Any, counter: Any) -> None:
    """One step on masters and the momentum, as `adamw` is called. `scalars` is `LionScalars.packed()`, float32[7]."""
    decay, grad_scale, lr, b1 = scalars[0], scalars[1], scalars[2], scalars[3]
    rest1, b2, rest2 = scalars[4], scalars[5], scalars[6]
    (m,) = moments
    hi, lo = masters[0], masters[-1]
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        start, stop = blocks[i, 0], blocks[i, 1]
        keep = decay if blocks[i, 2] else np.float32(1.0)
        hi_b, lo_b, grad_b, m_b = hi[start:stop], lo[start:stop], grad[start:stop], m[start:stop]
        for j in range(stop - start):
            g = to_f32(grad_b[j]) * grad_scale
            blend = b1 * m_b[j] + rest1 * g
            m_b[j] = b2 * m_b[j] + rest2 * g
            change = lr * (np.float32(blend > 0) - np.float32(blend < 0))
            _change(masters, hi_b, lo_b, j, keep, change)


@compiled
def muon_momentum(
    momenta: Any, grad: Any, direction: Any, scalars: Any, nesterov: Any, blocks: Any, counter: Any
) -> None:
    """Muon's running mean and direction. `scalars` is `MatrixScalars.packed()`, float32[4]. In blocks whose third
    column is 0 the mean has the gradient in it already and stays, and the direction is written again."""
    from_m, share = _lerp(scalars[1])
    from_g, ahead = _lerp(scalars[0])
    grad_scale = scalars[2]
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        start, stop, moves = blocks[i, 0], blocks[i, 1], blocks[i, 2] != 0
        m_b, grad_b, direction_b = momenta[start:stop], grad[start:stop], direction[start:stop]
        for j in range(stop - start):
            g = to_f32(grad_b[j]) * grad_scale
            m_j = m_b[j]
            if moves:
                m_j = (m_j if from_m else g) + share * (g - m_j)
                m_b[j] = m_j
            d = (g if from_g else m_j) + ahead * (m_j - g) if nesterov else m_j
            direction_b[j] = rounded_like(d, direction_b)


@compiled
def muon_apply(masters: Any, direction: Any, keep: Any, rates: Any, blocks: Any, counter: Any) -> None:
    """Add orthogonal directions to masters, split (hi, lo) or float32 (weight,): w * keep - rate * d. The third column
    of a block is the index of its rate in `rates`, float32[rates]."""
    hi, lo = masters[0], masters[-1]
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        start, stop, rate = blocks[i, 0], blocks[i, 1], rates[blocks[i, 2]]
        hi_b, lo_b, direction_b = hi[start:stop], lo[start:stop], direction[start:stop]
        for j in range(stop - start):
            change = rate * to_f32(direction_b[j])
            _change(masters, hi_b, lo_b, j, keep, change)


@inlined
def _square(x: Any) -> Any:
    wide = np.float64(to_f32(x))
    return wide * wide


@compiled
def block_sums(grad: Any, sums: Any, blocks: Any, counter: Any) -> None:
    """Write the sum of squares of each block to `sums`, float64[blocks].

    Squares of float32 are exact in float64, so only the additions round, and their order is fixed: four rows of
    LANES columns at a time; first the four of a column, then down the columns, then across them, then the
    remainder.
    """
    columns = np.empty(LANES, np.float64)
    while True:
        i = claim(counter)
        if i >= blocks.shape[0]:
            return
        grad_b = grad[blocks[i, 0] : blocks[i, 1]]
        columns[:] = 0.0
        whole = grad_b.size - grad_b.size % (4 * LANES)
        for row in range(0, whole, 4 * LANES):
            rows = grad_b[row : row + 4 * LANES]
            for k in range(LANES):
                upper = _square(rows[k]) + _square(rows[k + LANES])
                lower = _square(rows[k + 2 * LANES]) + _square(rows[k + 3 * LANES])
                columns[k] += upper + lower
        total = 0.0
        for k in range(LANES):
            total += columns[k]
        for k in range(whole, grad_b.size):
            total += _square(grad_b[k])
        sums[i] = total
