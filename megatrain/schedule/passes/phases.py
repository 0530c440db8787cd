"""Splits one call of a layer into several ops, called phases, so that compute waits for shards of weights, not for a
unit.

The ops of a call follow each other on the compute stream, numbered by `Op.shard`. Each may read more of the unit's
weights, in the order in which they arrive; in the last phases of a backward pass more and more of the gradient is
complete and may leave, last parameter first. The engine runs the layer's code once and advances from phase to
phase when it reads a weight or has completed a gradient (`engine.resumable_call`). Waits between phases are derived
from declared ranges like all others, so checker, replay and devices need no special rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from megatrain.schedule.contents import Content, Gradient, Weights
from megatrain.schedule.ops import CALLS, Access, Op
from megatrain.spec import UnitSpec
from megatrain.spec.layout import Shard, layout_of

FORWARD_SHARE = 1 / 3
"""Forward's share of the price of a backward with recomputation, and of the loss."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A unit's shards of weights in the order of arrival: ascending, or last first."""

    shards: Sequence[Shard]
    nbytes: int
    """Bytes of an element."""
    last_first: bool = False

    @property
    def ordered(self) -> Sequence[Shard]:
        return self.shards[::-1] if self.last_first else self.shards

    def ranges(self) -> list[tuple[int, int]]:
        """Bytes [start, stop) that arrive with each shard."""
        begin, end = self.shards[0].start * self.nbytes, self.shards[-1].stop * self.nbytes
        if self.last_first:
            return [(shard.start * self.nbytes, end) for shard in self.ordered]
        return [(begin, shard.stop * self.nbytes) for shard in self.ordered]


def gated(
    unit: UnitSpec, calls: Sequence[Op], after: Sequence[Op], arrival: Arrival, *, arrives: bool, gives_up: bool
) -> list[Op]:
    """The ops of a visit, split into phases if that lets something start earlier.

    `calls` are its ops on the compute stream, `after` those that follow. The first call proceeds as its weights
    arrive (`arrives`). A layer's gradient leaves shard by shard, each after the phase of the last call that
    completes it. With `gives_up` a layer's last backward reads only the weights that it still needs, so that others may
    take their place.
    """
    releases = unit.kind == "layer" and calls[-1].kind == "BACKWARD"
    leading = list(takewhile(lambda op: op.kind == "GRAD", after))
    releases = releases and len(leading) == sum(op.kind == "GRAD" for op in after)  # pieces leave one after the other
    copies = leading[::-1] if releases else []
    ops: list[Op] = []
    for index, call in enumerate(calls):
        is_last = index == len(calls) - 1
        out = copies if is_last else []
        leaves = [op.reads[0] for op in out]
        phases = _phases(unit, call, arrival, leaves, arrives=arrives and index == 0, gives_up=gives_up and is_last)
        if len(phases) == 1:
            ops += [*phases, *out]
            continue
        ops += phases[: len(phases) - len(out)]
        for phase, copy in zip(phases[len(phases) - len(out) :], out, strict=True):
            ops += [phase, copy]
    return [*ops, *(op for op in after if not (op.kind == "GRAD" and releases))]


def _phases(
    unit: UnitSpec, call: Op, arrival: Arrival, leaves: Sequence[Access], *, arrives: bool, gives_up: bool
) -> list[Op]:
    """One phase per shard that arrives, plus one per further gradient shard in `leaves`."""
    windows = _windows(unit, call, arrival, leaves, arrives=arrives, gives_up=gives_up)
    turn, count = len(windows) - max(1, len(leaves)), len(windows)
    if count == 1:
        return [call]
    through_graph = call.kind == "BACKWARD" and arrival.last_first and turn > 0
    sums_from = turn if call.kind == "BACKWARD" and not through_graph else 0
    shares = _shares(unit, call, arrival if turn else None, leaves)
    weights = [access for access in call.reads if access.content == Weights(call.unit)]
    sums = [access for access in call.reads if _is_gradient(access)]
    others = [access for access in call.reads if not _is_gradient(access) and access not in weights]
    totals = [access for access in call.writes if _is_gradient(access)]
    phases = []
    for phase, window in enumerate(windows):
        reads = [*others]
        reads += [access.between(access.start + a, access.start + b) for access in weights for a, b in window]
        writes = [access for access in call.writes if not _is_gradient(access)] if phase == count - 1 else []
        for total in totals if phase >= sums_from else ():
            done = max(0, phase - turn)
            left = leaves[done] if done < len(leaves) else None
            if phase == sums_from:
                reads += [access for access in sums if access.buffer == total.buffer]
            else:
                reads.append(_under_way(total, left.stop if left else total.stop))
            writes += _sums(total, left if phase >= turn else None, last=phase == count - 1)
        phases.append(call._replace(shard=phase, reads=tuple(reads), writes=tuple(writes), share=shares[phase]))
    return phases


Window = list[tuple[int, int]]
"""Byte ranges [start, stop) of a unit's weights that a phase may read."""


def _windows(
    unit: UnitSpec, call: Op, arrival: Arrival, leaves: Sequence[Access], *, arrives: bool, gives_up: bool
) -> list[Window]:
    """Find the weights that each phase may read: those that have arrived and are not yet given up.

    A backward gives up parameters whose gradient is complete, since nothing passes through them after that. Frozen
    weights stay until the end, as do all of a forward's.
    """
    layout, nbytes = layout_of(unit), arrival.nbytes
    end = layout.size * nbytes
    forward = [[span] for span in arrival.ranges()] if arrives else [[(0, end)]]
    backward = []
    begin = leaves[-1].start if leaves else 0
    for done in leaves[:-1]:  # each after the phase that completes it
        still = (done.start - begin) * layout.trained.size // (leaves[0].stop - begin) * nbytes
        backward.append([(0, still), (layout.trained.size * nbytes, end)] if gives_up else [(0, end)])
    return forward + [[span for span in window if span[0] < span[1]] for window in backward]


def _sums(total: Access, left: Access | None, *, last: bool) -> list[Access]:
    """What a phase leaves of a gradient: `left` is complete, the rest not yet."""
    if left is None:
        return [total if last else _under_way(total, total.stop)]
    complete = total.between(left.start, left.stop)
    return [complete] if last else [complete, _under_way(total, left.start)]


def _under_way(total: Access, stop: int) -> Access:
    assert isinstance(total.content, Gradient)
    unit, version, terms = total.content.unit, total.content.version, total.content.terms
    return Access(total.buffer, total.start, stop, Gradient(unit, version, terms, changing=True))


def _is_gradient(access: Access) -> bool:
    """Whether it accesses a sum of weight gradients."""
    return isinstance(access.content, Gradient)


# Prices ---------------------------------------------------------------------------------------------------------------


def _shares(unit: UnitSpec, call: Op, arrival: Arrival | None, leaves: Sequence[Access]) -> list[float]:
    """Each phase's share of the call's price, in proportion to the matrix products of the parameters that it
    reaches."""
    arrival = arrival or Arrival([Shard(0, 0, layout_of(unit).size)], 1)
    size = layout_of(unit).trained.size
    begin = leaves[-1].start if leaves else 0  # leaves: the last shard first
    nbytes = max(1, (leaves[0].stop - begin) // size) if leaves else 1
    going = [((access.start - begin) // nbytes, (access.stop - begin) // nbytes) for access in leaves]
    coming = [(shard.start, shard.stop) for shard in arrival.ordered]
    forward = 1.0 if call.kind == "FORWARD" or arrival.last_first else FORWARD_SHARE
    shares = [forward * products for products in _products(unit, coming, arrival)]
    turn = len(shares) - 1
    shares += [0.0] * max(0, len(going) - 1)
    for index, products in enumerate(_products(unit, going) or [1.0]):
        shares[turn + index] += (1 - forward) * products
    return shares


def _products(unit: UnitSpec, ranges: Sequence[tuple[int, int]], arrival: Arrival | None = None) -> list[float]:
    """The share of each range of elements in the unit's matrix products; a matrix counts where its last part is
    reached."""
    last_first = arrival is not None and arrival.last_first
    matrices = [
        (place.start if last_first else place.stop - 1, param.active * param.numel)
        for place, param in zip(layout_of(unit).fields, unit.params, strict=True)
        if len(param.shape) > 1
    ]
    amounts = [sum(amount for place, amount in matrices if start <= place < stop) for start, stop in ranges]
    total = sum(amounts)
    return [amount / total if total else 1 / len(ranges) for amount in amounts]


# Back to calls --------------------------------------------------------------------------------------------------------


def calls_in(ops: Iterable[Op]) -> list[list[int]]:
    """The places of the phases of each call that is split."""
    calls: list[list[int]] = []
    for place, op in enumerate(ops):
        if op.kind in CALLS and op.shard == 0:
            calls.append([place])
        elif op.kind in CALLS and op.shard > 0:
            calls[-1].append(place)
    return calls


def whole(phases: Sequence[Op]) -> Op:
    """The call that these phases make up."""
    reads = _hulls(access for op in phases for access in op.reads)
    writes = _hulls(access for op in phases for access in op.writes)
    return phases[0]._replace(shard=-1, reads=reads, writes=writes, share=1.0)


def _hulls(accesses: Iterable[Access]) -> tuple[Access, ...]:
    """One access per buffer and content, without incomplete ones."""
    hulls: dict[tuple[str, Content], Access] = {}
    for access in accesses:
        if not (isinstance(access.content, Gradient) and access.content.changing):
            known = hulls.get((access.buffer, access.content), access)
            start, stop = min(known.start, access.start), max(known.stop, access.stop)
            hulls[access.buffer, access.content] = access._replace(start=start, stop=stop)
    return tuple(hulls.values())
