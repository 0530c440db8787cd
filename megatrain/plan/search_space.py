"""What the plan search tries, and when it stops: points, the knobs that tell them apart, and thresholds.

`WORTH_...` are ratios of step times: an alternative is taken, or looked at further, if its step takes less than this
share of the time of the step that it is compared with. The search itself is in `search`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatrain.plan.estimates import sizes
from megatrain.plan.placement import PARTS
from megatrain.plan.question import Choice, Question
from megatrain.spec import Numerics, Policy

KNOBS: dict[str, tuple[Any, ...]] = {
    "weight_slots": (1, 2),
    "grad_slots": (1, 2, 3),
    "loss_chunk_tokens": (64, 256, 512, 1024, 4096),
}
"""Fields of every policy that the search changes, and the values it tries."""

LEAN = {name: values[0] for name, values in KNOBS.items()}
"""The values that take the least memory."""

MOST_SHARDS = 4
"""Shards of the largest unit, and of a layer with a read-ahead."""

READ_AHEAD_DIVISORS = (16, 4)
"""The read-ahead holds this fraction of a layer: to save memory, or a whole shard for speed."""

LEAST_SHARD_NBYTES = 64 << 20
"""A bus is slower with smaller copies."""

OFFLOAD_SLOTS, FEWEST_OFFLOAD_SLOTS = 3, 2
"""One is filled, one is copied out and one is in use; and where memory is short."""

MLP_CHUNK_TOKENS = 4096
"""Chunk size where token-wise parts have to run in chunks. Products of so many tokens are as fast as larger ones."""

ROUND_SIZES = (1, 4)
"""Micro-batches per round that are tried."""

WORTH_A_ROUND = 0.99
"""After a turn of all knobs, relative to before: else the climb ends."""

COMPUTE_BOUND = 0.97
"""If compute is busy for at least this share of the step, other streams hardly matter."""

MOST_REPLAYED = 8
"""Options that are replayed whole."""

NEARLY_AS_FAST = 1.02
"""Estimate of an option, relative to the fastest replay so far, up to which it is replayed."""

MOST_CORRECTIONS = 12
"""Times that replays may contradict the estimates before the search gives up."""

SLOWER_FOR_FEWER_WRITES = 1.03
"""A plan that writes less to the disk may take this much longer than the fastest."""

FEWER_WRITES = 0.8
"""Bytes that such a plan may write, relative to the fastest."""

STREAMED_FACTORS = (1.0, 0.75, 1.35)
"""Factors of the share of streamed updates that keeps bus and host equally busy. These shares are tried, and all."""

WORTH_STREAMING = 0.99
"""Streaming some updates, relative to updating all state where it is placed."""


@dataclass(frozen=True, slots=True)
class Point:
    """How a step is run, except what layers keep and which state is on the disk.

    layer_parts: sixteenths of the layers whose whole state stays on the device. weight_parts: sixteenths of the others
    whose weights do.
    """

    choice: Choice
    micro_batch: int
    layer_parts: int = 0
    weight_parts: int = 0

    def get(self, knob: str) -> Any:
        return getattr(self, knob) if knob in _OF_POINTS else self.choice.get(knob)

    def change(self, **fields: Any) -> Point:
        """A copy with some fields of the point, or of its choice, replaced."""
        of_point = {name: fields.pop(name) for name in _OF_POINTS if name in fields}
        return replace(self, choice=self.choice.change(**fields) if fields else self.choice, **of_point)


_OF_POINTS = ("micro_batch", "layer_parts", "weight_parts")


class SearchSpace:
    """The points of one question: where climbs start, and the knobs that they turn."""

    def __init__(self, question: Question) -> None:
        self.question, self.overrides = question, dict(question.overrides)
        fixed = self.overrides.pop("micro_batch", None)
        self.sizes = sizes(question.sequences) if fixed is None else [min(fixed, question.sequences)]
        self._weight_nbytes = 2 if question.precision == "bf16" else 4
        largest = self._weight_nbytes * max(unit.numel for unit in question.model.units)
        self._shard_nbytes = max(LEAST_SHARD_NBYTES, largest // MOST_SHARDS)
        policy = Policy(
            shares_memory=question.hardware.shares_memory,
            update="next_forward" if question.clips else "during_backward",
            shard_nbytes=self._shard_nbytes,
            offload_slots=OFFLOAD_SLOTS,
        )
        self.usual = Choice(Numerics(question.precision), policy).change(**self.overrides)
        self.lean = self.usual.change(**LEAN | {"offload_slots": FEWEST_OFFLOAD_SLOTS} | self.overrides)
        least = self._read_aheads[0]
        self.leanest = self.lean.change(**self._read_ahead(least)) if least else self.lean

    @property
    def mixes(self) -> bool:
        """Whether the planner chooses what layers keep."""
        return {"activations", "activations_by_layer"}.isdisjoint(self.overrides)

    def every_size(self, choice: Choice) -> list[Point]:
        """Points with each size of micro-batch."""
        return [Point(choice, size) for size in self.sizes]

    @cached_property
    def last_resorts(self) -> list[Point]:
        """Points that need even less memory than the leanest: parts of layers that treat tokens one by one run in
        chunks; and with the smallest micro-batches the step runs in rounds, so that nothing is kept of others."""
        chunks = {} if "mlp_chunk_tokens" in self.overrides else {"mlp_chunk_tokens": MLP_CHUNK_TOKENS}
        chunked = self.every_size(self.leanest.change(**chunks)) if chunks else []
        if 1 not in self.knobs.get("micro_batches_per_round", ()) or 2 * self.sizes[0] > self.question.sequences:
            return chunked
        smallest = Point(self.leanest, self.sizes[0], 0, 0).change(micro_batches_per_round=1)
        return [*chunked, smallest, *([smallest.change(**chunks)] if chunks else [])]

    @cached_property
    def knobs(self) -> dict[str, list[Any]]:
        """Knob -> the values that the climb tries, ascending, of those that the user has not fixed."""
        model, hardware = self.question.model, self.question.hardware
        shared = model.ranks > 1 and self.overrides.get("delivery") == "shared"
        may_hold = not hardware.computes_in_host_memory and "placements" not in self.overrides
        has_rounds = not (model.tied or model.ranks > 1 or hardware.shares_memory)
        streams = self.usual.policy.transfer == "pinned" and not hardware.shares_memory
        knobs: dict[str, list[Any]] = {"micro_batch": self.sizes}
        knobs["read_ahead_nbytes"] = sorted({0, *self._read_aheads})
        knobs |= {name: list(values) for name, values in KNOBS.items()}
        knobs["streamed_updates"] = [0.0, 1.0] if streams else [0.0]
        knobs["micro_batches_per_round"] = [0, *ROUND_SIZES] if has_rounds else [0]
        knobs = {name: values for name, values in knobs.items() if name not in self.overrides}
        knobs["layer_parts"] = [*range(PARTS + 1)] if may_hold and not shared else [0]
        return knobs | {"weight_parts": [*range(PARTS + 1)] if may_hold else [0]}

    def turned(self, point: Point, knob: str, value: Any) -> Point:
        """The point with another value of a knob, and of those that depend on it."""
        if knob == "micro_batches_per_round" and value:  # a step has several rounds
            most = max(self.sizes[0], self.question.sequences // (2 * value))
            smaller = max(size for size in self.sizes if size <= most)
            return point.change(micro_batches_per_round=value, micro_batch=min(point.micro_batch, smaller))
        if knob == "streamed_updates" and value and point.get("read_ahead_nbytes"):  # which leave weights in slots
            slots = self.usual.get("weight_slots")
            point = point.change(weight_slots=slots, **self._read_ahead(0))
        return point.change(**(self._read_ahead(value) if knob == "read_ahead_nbytes" else {knob: value}))

    def _read_ahead(self, nbytes: int) -> dict[str, Any]:
        """Fields of a policy with one slot for all units and a read-ahead; or for 0 bytes without."""
        if not nbytes:
            return {"read_ahead_nbytes": 0, "wait_for": "unit", "shard_nbytes": self._shard_nbytes}
        fields = {"weight_slots": 1, "wait_for": "shard", "shard_nbytes": max(1, self._layer_nbytes // MOST_SHARDS)}
        streamed = {} if "streamed_updates" in self.overrides else {"streamed_updates": 0.0}
        return {**fields, **streamed, "read_ahead_nbytes": nbytes}

    @cached_property
    def _read_aheads(self) -> list[int]:
        """Bytes of read-aheads that are tried, ascending. None but 0 if memory is shared, with several ranks, or if an
        override contradicts it."""
        model, hardware = self.question.model, self.question.hardware
        fixed = {"weight_slots", "read_ahead_nbytes", "shard_nbytes", "wait_for"} & self.overrides.keys()
        if fixed or hardware.shares_memory or model.ranks > 1:
            return [0]
        return [max(1, self._layer_nbytes // divisor) for divisor in READ_AHEAD_DIVISORS]

    @cached_property
    def _layer_nbytes(self) -> int:
        model = self.question.model
        return self._weight_nbytes * max(model.units[index].numel for index in model.layers)
