"""One rank's view of the world: its rank, the world size, messages exchanged with the others, and collectives.

All ranks must make the same calls in the same order, separately on each carrier: `device` for collectives of the
schedule, `host` for messages between and around steps, `beside` for a thread that saves. Sums are made in rank order,
in float32, so the result depends only on the terms, not on arrival order or a library's reduction tree.

`Collectives` transfers the bytes, between processes, or between threads in tests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatrain.dist.watch import Watch
from megatrain.errors import RankError, typed_line

T = TypeVar("T")

FRAME_NBYTES = 4096
"""Bytes of a message sent at once; longer ones need a second transfer."""
AT_ONCE = 1 << 18
"""Elements of a sum that are added up where nothing is received: what they pass through stays in a cache."""
SHOWN = 120
"""Characters of a value that are shown."""
HEAD_NBYTES = 8
"""Format of a message's length prefix."""


class Collectives(Protocol):
    """Transfers bytes between ranks.

    Each call returns when this rank's part is done; on a device with streams, it is ordered in the current stream.
    Raises `RankError` if another rank is gone.
    """

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole`, uint8[ranks * n], with each rank's `part`, uint8[n], in rank order. `part` may be its place
        in `whole`."""

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_nbytes: Sequence[int] | None = None,
        sent_nbytes: Sequence[int] | None = None,
    ) -> None:
        """Send part r of `sent`, uint8, to rank r, and fill `received`, uint8, with what arrives, in rank order. The
        parts are of equal size, or of these sizes by rank."""

    def close(self) -> None:
        """End all transfers."""


@dataclass(frozen=True, eq=False)
class World:
    """`rank` of `size`, and the carriers between ranks; with one rank there are none."""

    rank: int = 0
    size: int = 1
    host: Collectives | None = None
    device: Collectives | None = None
    beside: Collectives | None = None
    """Collectives of a thread that runs during steps, also on the host."""
    watch: Watch | None = None
    """Detects failed ranks, if they are processes."""
    _waited: list[float] = field(default_factory=lambda: [0.0])

    def aside(self) -> World:
        """A view of the same ranks for messages of another thread, which do not mix with those of the main thread."""
        return World(self.rank, self.size, self.beside)

    def at(self, what: str, doing: Callable[[], str]) -> None:
        """Record what this rank is doing; `doing`, a method, returns more detail on request."""
        if self.watch is not None:
            self.watch.at(what, doing)

    @property
    def waited_seconds(self) -> float:
        """Seconds that this rank has waited for others in messages on the host."""
        return self._waited[0]

    # On the host ----------------------------------------------------------------------------------------------------

    def exchange(self, what: str, value: T) -> list[T]:
        """Each rank's `value`, in rank order: JSON, with exact floats. `what` is the subject, the same on all ranks.

        Raises `RankError` if another rank has a different subject.
        """
        if self.host is None:
            return [value]
        if self.watch is not None:
            self.watch.about = what
        told = self._told(json.dumps([what, value]).encode())
        heard: list[Any] = [json.loads(text) for text in told]
        for rank, (about, _) in enumerate(heard):
            if about != heard[0][0]:
                where = f"rank {rank}"
                raise RankError(f"is at {about}, but rank 0 at {heard[0][0]}", where=where, fix="call alike on all")
        return [value for _, value in heard]

    def agree(self, what: str, make: Callable[[], T]) -> list[T]:
        """The results of `make` on all ranks, in rank order. If it raises on any rank, all raise: that rank its
        own error, the others a `RankError` that quotes it."""
        if self.host is None:
            return [make()]
        made: T | None = None
        failure: Exception | None = None
        try:
            made = make()
        except Exception as error:
            failure = error
        told = self.exchange(what, (typed_line(failure) if failure is not None else None, made))
        if failure is not None:
            raise failure
        for rank, (line, _) in enumerate(told):
            if line is not None:
                raise RankError(line, where=f"rank {rank}")
        return [value for _, value in told]  # type: ignore[misc]  # there is a value if there is no error

    def _told(self, text: bytes) -> list[bytes]:
        """Each rank's bytes, of any length."""
        framed = len(text).to_bytes(HEAD_NBYTES, "little") + text
        first = self._gathered(framed[:FRAME_NBYTES].ljust(FRAME_NBYTES))
        lengths = [int.from_bytes(frame[:HEAD_NBYTES], "little") for frame in first]
        rest = HEAD_NBYTES + max(lengths) - FRAME_NBYTES
        more = self._gathered(framed[FRAME_NBYTES:].ljust(rest)) if rest > 0 else [b""] * self.size
        whole = (head[HEAD_NBYTES:] + tail for head, tail in zip(first, more, strict=True))
        return [text[:length] for text, length in zip(whole, lengths, strict=True)]

    def _gathered(self, text: bytes) -> list[bytes]:
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self.together(message)]

    def together(self, part: Tensor) -> Tensor:
        """[ranks, n] of all ranks' `part` [n], in host memory, of any dtype."""
        if self.host is None:
            return part[None]
        whole = torch.empty(self.size, *part.shape, dtype=part.dtype)
        began = time.perf_counter()
        self.host.all_gather(_bytes(whole), _bytes(part.contiguous()))
        self._waited[0] += time.perf_counter() - began
        return whole

    def of_first(self, result: Tensor) -> Tensor:
        """Rank 0's tensor on all ranks: for results that could differ between machines in the last bits."""
        return result if self.host is None else self.together(result.cpu())[0].to(result.device)

    # On the device --------------------------------------------------------------------------------------------------

    def gather(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole`, uint8[ranks * n], from all ranks' `part`, uint8[n], each at its place."""
        assert self.device is not None
        self.device.all_gather(whole, part)

    def reduce(self, total: Tensor, received: Tensor, terms: Tensor) -> Tensor:
        """Sum over ranks: `total` [n] is this rank's part of the sum of all `terms`, float32[ranks * n], rounded once.

        received: float32[ranks * n], overwritten. Returns the largest magnitude from each rank, float32[ranks],
        nan if there was one.
        """
        assert self.device is not None
        self.device.all_to_all(_bytes(received), _bytes(terms))
        return _summed(total, list(received.view(self.size, -1)))

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_nbytes: Sequence[int], sent_nbytes: Sequence[int]
    ) -> None:
        """Send each rank its part of `sent`, uint8, and get what the others send, in rank order; bytes by rank."""
        assert self.device is not None
        self.device.all_to_all(received, sent, received_nbytes, sent_nbytes)

    # In memory that all ranks reach ---------------------------------------------------------------------------------

    def meet(self) -> None:
        """Barrier: wait for all ranks."""
        if self.host is not None:
            self.host.all_gather(torch.empty(self.size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))

    def reduce_there(self, total: Tensor, terms: Sequence[Tensor]) -> Tensor:
        """Sum over ranks like `reduce`, but read all ranks' `terms`, each float32[ranks * n], where they are. Nobody
        may change them meanwhile."""
        parts = [term.view(self.size, -1)[self.rank] for term in terms]
        largest = []
        for start in range(0, total.numel(), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            largest.append(_summed(total[some], [parts[0][some].clone(), *(part[some] for part in parts[1:])]))
        return torch.stack(largest).amax(dim=0)

    # Micro-batches --------------------------------------------------------------------------------------------------

    def number(self, micro: int) -> int:
        """The step-wide number of this rank's micro-batch `micro`: they are dealt round-robin."""
        return micro * self.size + self.rank

    def dealt(self, of_ranks: Sequence[Sequence[T]]) -> list[T]:
        """Order all ranks' values of their micro-batches as the step numbers these. Raises `RankError` if they are not
        dealt round-robin."""
        counts = [len(values) for values in of_ranks]
        total = sum(counts)
        fair = [(total - rank + self.size - 1) // self.size for rank in range(self.size)]
        if counts != fair:
            what = f"the ranks have {counts} micro-batches of the step"
            raise RankError(what, where="step", fix=f"deal the {total} in turns: {fair}")
        return [of_ranks[number % self.size][number // self.size] for number in range(total)]

    def close(self) -> None:
        """Leave it."""
        for carrier in (self.device, self.host, self.beside):
            if carrier is not None:
                carrier.close()


ALONE = World()
"""A single rank."""


def refuse_unlike(verb: str, told: Sequence[Mapping[str, object]]) -> None:
    """Raise `RankError`, the same on all, where a rank has another value than rank 0 under one of the names."""
    for rank, values_of_rank in enumerate(told):
        for name in dict.fromkeys((*told[0], *values_of_rank)):
            if values_of_rank.get(name) != told[0].get(name):
                values = (_short(of.get(name)) for of in (values_of_rank, told[0]))
                what = f"{verb} {name} {{}}, where rank 0 {verb} {{}}".format(*values)
                raise RankError(what, where=f"rank {rank}", fix="start all alike")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _summed(total: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Set `total` to the sum of the parts, each float32[n], in order, using the first as accumulator.

    Returns the largest magnitude in each part.
    """
    largest = torch.stack([_largest(part) for part in parts])
    accumulator = parts[0]
    for part in parts[1:]:
        accumulator.add_(part)
    total.copy_(accumulator)
    return largest


def _largest(part: Tensor) -> Tensor:
    """The largest magnitude; nan if there is one. torch's norm takes 18 times as long on a CPU."""
    least, most = torch.aminmax(part)
    return torch.maximum(most, -least)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
