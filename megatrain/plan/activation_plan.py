"""Chooses what each layer keeps of its forward pass, by bytes and by recomputation time saved.

Compared to keeping only inputs: a kept graph, the outputs of large products or those of attention save compute in the
backward pass and cost device memory. If they are offloaded, they cost slots and bus time instead, out in the forward
pass and back in the backward. Where a disk tier is in use, inputs may wait there too, and cost the drive's time in both
passes. A dropped input saves memory and costs compute.

All of these are sums over layers, so a mixture is priced without a replay: each pass takes as long as its busiest
stream, and what a step that keeps inputs takes beyond that is added unchanged. Every mixture of up to `MOST_KINDS`
kinds, in sixteenths of the layers, is priced with the whole layers that it becomes; there are no heuristics. `search`
replays the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations, product
from math import ceil, gcd
from typing import Any, get_args

import numpy as np

from megatrain.plan.cost import (
    DRAM,
    DRAM_PASSES,
    Calibration,
    duplex_disk_bandwidths,
    host_dram_bandwidth,
    recompute_seconds,
    unit_cost_key,
)
from megatrain.plan.placement import PARTS, spread
from megatrain.plan.question import Choice, CostKey, Estimate, Question, plus
from megatrain.schedule.replay import DISK_STREAMS
from megatrain.spec import NOT_OFFLOADED, SAVED_BY, Keep, ModelSpec, Numerics, Policy, Work

KINDS: tuple[Keep, ...] = get_args(Keep)

MOST_KINDS = 3
"""Kinds in one mixture: one to fill memory, one to fill the bus, and one for the rest."""

BY_LAYER: tuple[Keep, ...] = ("drop", "graph")
"""Kinds that apply to all micro-batches of a layer."""

BY_ENTRY: tuple[Keep, ...] = (*NOT_OFFLOADED, "chosen", "attention", "input")
"""The other kinds, in the order in which they are spread."""

MOST_ENTRIES = 4
"""Entries of a row, each for every so many micro-batches."""

DROPPED = KINDS.index("drop")
OFFLOADED_OUTPUTS = [KINDS.index(kind) for kind in NOT_OFFLOADED if kind in SAVED_BY]
"""Indices in `KINDS` of the kinds that offload outputs."""

MOST_DROPPED = PARTS // 2
"""Sixteenths of the layers that may drop their input, so that each can be recomputed from the layer below."""

ActivationRows = tuple[tuple[Keep, ...], ...]
"""`Policy.activations_by_layer`."""

Counts = tuple[int, ...]
"""Sixteenths of the layers for each of `KINDS`."""


@dataclass(frozen=True)
class KindCosts:
    """What each of `KINDS` adds, compared to keeping inputs, if all layers are of this kind."""

    device: tuple[float, ...]
    """Bytes."""
    slots: tuple[float, ...]
    """Bytes of slots on the device if any layer is of this kind. The host needs that much less: the activations saved
    last are used first, and never leave the device."""
    staging: tuple[float, ...]
    """Bytes of slots in host memory if any layer is of this kind."""
    host: tuple[float, ...]
    """Bytes."""
    disk: tuple[float, ...]
    """Bytes."""
    compute: tuple[float, ...]
    """Seconds in the backward pass."""
    reload: tuple[float, ...]
    """Seconds of the bus to the device, in the backward pass."""
    offload: tuple[float, ...]
    """Seconds of the bus from the device, in the forward pass."""
    reload_early: tuple[float, ...]
    """Seconds of the bus to the device in the forward pass, for side values."""
    offload_late: tuple[float, ...]
    """Seconds of the bus from the device in the backward pass, for gradients of side values."""
    read: tuple[float, ...]
    """Seconds of reads from the disk, in the backward pass."""
    write: tuple[float, ...]
    """Seconds of writes to the disk, in the forward pass."""
    dram: tuple[float, ...]
    """Seconds at the full bandwidth of host memory, in each of the two passes."""


def kind_costs(question: Question, choice: Choice, work: Work) -> KindCosts:
    """For a policy that keeps inputs. `device` counts as host memory where the device shares it."""
    policy = choice.policy
    numerics = replace(choice.numerics, loss_chunk_tokens=1)  # not used by layers; for cache hits
    slots = policy.offload_slots, policy.disk_staging_slots
    return _kind_costs(question.cost_key, numerics, slots, policy.micro_batches_per_round, work)


@lru_cache(maxsize=1024)
def _kind_costs(
    key: CostKey, numerics: Numerics, slots: tuple[int, int], micro_batches_per_round: int, work: Work
) -> KindCosts:
    question, (offload_slots, staging_slots) = key.question, slots
    model, hardware = question.model, question.hardware
    costs = {each.name: dict.fromkeys(KINDS, 0.0) for each in fields(KindCosts)}
    measured = question.calibration or Calibration()
    shares = hardware.shares_memory
    factors = {kind: measured.of(kind, "layer") for kind in ("RELOAD", "OFFLOAD", "READ", "WRITE")}
    reading, writing = duplex_disk_bandwidths(hardware)
    policy = Policy(offload_slots=offload_slots, micro_batches_per_round=micro_batches_per_round)
    price = recompute_seconds(model, numerics, policy, work, hardware, question.calibration)
    trained = [layer for layer in model.layers if layer >= model.lowest_trained]
    kinds = {unit_cost_key(model.units[layer]): layer for layer in trained}
    numbers = Counter(unit_cost_key(model.units[layer]) for layer in trained)
    for (shape, layer), (tokens, micros) in product(kinds.items(), Counter(work.tokens).items()):
        times = numbers[shape] * micros
        boundary = times * work.repeats * tokens * model.hidden_size * numerics.weight_nbytes
        profile, length = model.units[layer].profile, min(work.length or tokens, tokens)
        costs["device"]["graph"] += times * work.repeats * profile.kept(tokens // length, length)
        recomputed = times * price(layer, tokens, "")
        costs["compute"]["graph"] -= recomputed
        for keep, saved in SAVED_BY.items():
            costs["compute"][keep] -= recomputed - times * price(layer, tokens, saved)
            if keep not in NOT_OFFLOADED:
                costs["device"][keep] += times * work.repeats * profile.stored(saved, tokens)
        for keep in NOT_OFFLOADED:
            stored = profile.stored(SAVED_BY[keep], tokens) if keep in SAVED_BY else 0
            crosses = boundary + times * work.repeats * stored
            costs["device"][keep] -= boundary
            inputs = tokens * model.hidden_size * numerics.weight_nbytes
            if not shares:
                costs["slots"][keep] = max(costs["slots"][keep], offload_slots * (inputs + stored))
                costs["reload"][keep] += crosses / hardware.fetch_bandwidth * factors["RELOAD"]
                costs["offload"][keep] += crosses / hardware.grad_bandwidth * factors["OFFLOAD"]
                copies = 1 + (DRAM_PASSES["WRITE"] if keep == "disk" else 0)
                costs["dram"][keep] += copies * crosses / host_dram_bandwidth(hardware)
            if keep == "disk":
                costs["staging"][keep] = max(costs["staging"][keep], staging_slots * inputs)
                costs["read"][keep] += crosses / reading * factors["READ"]
                costs["write"][keep] += crosses / writing * factors["WRITE"]
            costs["disk" if keep == "disk" else "host"][keep] += crosses
        costs["device"]["drop"] -= boundary
        costs["compute"]["drop"] += recomputed
    for name, added in _costs_of_sides(model, numerics, policy, work).items():
        rates = {
            "reload": factors["RELOAD"] / hardware.fetch_bandwidth,
            "offload": factors["OFFLOAD"] / hardware.grad_bandwidth,
        }
        rate = rates.get(name.partition("_")[0], 1.0)
        if name == "dram":
            rate = 0.0 if hardware.shares_memory else 1 / host_dram_bandwidth(hardware)
        for keep in NOT_OFFLOADED:
            costs[name][keep] += rate * added
    for layer in {side.source + 1 for side in model.sides if side.is_hidden} & {*trained}:  # are not dropped
        for tokens in work.tokens:
            costs["device"]["drop"] += work.repeats * tokens * model.hidden_size * numerics.weight_nbytes
            costs["compute"]["drop"] -= price(layer, tokens, "")
    rounds = round_count(policy, work.micro_batches * work.repeats)
    for tier in ("device", "host", "disk"):  # a round keeps activations of its own micro-batches only
        costs[tier] = {kind: nbytes / rounds for kind, nbytes in costs[tier].items()}
    return KindCosts(**{name: tuple(each[kind] for kind in KINDS) for name, each in costs.items()})


def _costs_of_sides(model: ModelSpec, numerics: Numerics, policy: Policy, work: Work) -> dict[str, float]:
    """What side values add to the fields of `KindCosts` if all layers offload, in bytes.

    A pass goes over all micro-batches for each unit that reads them, so what does not fit the slots crosses the bus for
    each. The gradients of those that the head reads are on the device with everything else.
    """
    added = dict.fromkeys((each.name for each in fields(KindCosts)), 0.0)
    at_once = Counter[int]()
    """Unit -> side values and gradients in slots of their own that its backward mentions."""
    largest = 0.0
    offloaded = [side for side in model.sides if side.users != (model.epilogue,) or side.is_hidden]
    for side in offloaded:
        has_gradient, has_slot = model.wants_gradient(side), side.source > 0 and not side.is_hidden
        for unit in side.users:
            at_once[unit] += has_slot + has_gradient
        at_once[side.source] += has_gradient
        largest = max([largest, *(side.nbytes(n, min(work.length or n, n)) for n in work.tokens)])
    slots = policy.offload_slots - 1 + max(at_once.values()) if at_once else 0
    in_slots = slots // max(at_once.values(), default=1)
    crossing = max(0.0, 1 - in_slots / (work.micro_batches * work.repeats))
    """Share of the micro-batches that do not stay in a slot."""
    for side, tokens in product(offloaded, work.tokens):
        nbytes = work.repeats * side.nbytes(tokens, min(work.length or tokens, tokens))
        has_gradient, has_slot = model.wants_gradient(side), side.source > 0 and not side.is_hidden
        readers = len(side.users) if has_slot or side.is_hidden else 0
        added["device"] -= nbytes * (has_slot + (has_gradient and model.epilogue in side.users))
        added["host"] += nbytes * (has_slot + has_gradient)
        added["offload"] += crossing * nbytes * has_slot
        added["reload_early"] += crossing * nbytes * readers
        added["reload"] += crossing * nbytes * (readers + has_gradient * len(side.users))
        added["offload_late"] += crossing * nbytes * has_gradient * len(side.users)
    added["slots"] = slots * largest
    added["dram"] = sum(added[name] for name in ("offload", "reload_early", "reload", "offload_late")) / 2
    return added


def round_count(policy: Policy, micro_batches: float) -> float:
    """Rounds of a step with so many micro-batches."""
    return max(1.0, micro_batches / (policy.micro_batches_per_round or micro_batches))


class Mixtures:
    """All mixtures for one policy, with their estimates. inputs: the estimate of the policy, which keeps inputs."""

    def __init__(self, question: Question, choice: Choice, micro_batch: int, work: Work, inputs: Estimate) -> None:
        self.choice, self._micro_batch = choice, micro_batch
        self._question, self.inputs = question, inputs
        per_round = choice.policy.micro_batches_per_round or ceil(work.micro_batches * work.repeats)
        self._layers, self._entries = len(question.model.layers), gcd(per_round, MOST_ENTRIES)
        saves_outputs = question.model.units[1].profile.outputs.chosen_nbytes > 0
        shares, placements = question.hardware.shares_memory, choice.policy.placements
        on_disk = bool(placements) and all(placements[layer].uses_disk for layer in question.model.layers)
        kinds = frozenset(_usable(saves_outputs, shares, on_disk))
        self._table, self._parts, self._outputs_stay = _grid(kinds, self._layers, self._entries)
        self._price(kind_costs(question, choice, work))

    def _price(self, costs: KindCosts) -> None:
        self._costs = costs
        shares = self._question.hardware.shares_memory
        self.added_nbytes, self.seconds = _bytes_and_seconds(costs, self._parts, self.inputs, shares)
        """Tier -> bytes that each mixture adds there; and seconds of the step."""

    def slowed(self, counts: Counts, seconds: float) -> Mixtures:
        """The same with slower offloading, so that the mixture of these counts takes `seconds`. It must offload some
        layers."""
        spent = float(self._parts_of(counts)[0] @ np.array(self._costs.offload))
        factor = 1.0 + max(0.0, seconds - self.estimate(counts).seconds) / spent
        other = copy(self)
        other._price(replace(self._costs, offload=tuple(factor * each for each in self._costs.offload)))
        return other

    def best(
        self, budgets: Mapping[str, float], most: int, *, outputs_stay: bool = False, drops: bool = True
    ) -> list[tuple[float, Counts]]:
        """(seconds, counts) of the `most` fastest mixtures that fit; of equally fast ones, those that write less to the
        disk. outputs_stay: only of those without offloaded outputs. drops: also of those that drop inputs."""
        fit = self._outputs_stay.copy() if outputs_stay else np.ones(len(self._table), dtype=bool)
        if not drops:
            fit &= self._table[:, DROPPED] == 0
        for tier, added in self.added_nbytes.items():
            if tier in budgets:
                fit &= self.inputs.nbytes[tier] + added <= budgets[tier]
        places = np.flatnonzero(fit)
        seconds = np.round(self.seconds[places], 12)
        if most < len(places):  # only the fastest have to be sorted
            fastest = seconds <= np.partition(seconds, most - 1)[most - 1]
            places, seconds = places[fastest], seconds[fastest]
        size = self.added_nbytes["host" if self._question.hardware.shares_memory else "device"]
        written = self._parts[places] @ np.array(self._costs.disk)
        order = places[np.lexsort((size[places], written, seconds))][:most]
        return [(float(self.seconds[place]), tuple(int(n) for n in self._table[place])) for place in order]

    def leanest(self, budgets: Mapping[str, float]) -> Counts:
        """The mixture that exceeds these budgets least; of several, the fastest."""
        added = {tier: nbytes for tier, nbytes in self.added_nbytes.items() if tier in budgets and nbytes.any()}
        short = [self.inputs.nbytes[tier] + nbytes - budgets[tier] for tier, nbytes in added.items()]
        order = np.lexsort((self.seconds, np.maximum.reduce(short)))
        return tuple(int(count) for count in self._table[order[0]])

    def option(self, counts: Counts) -> Option:
        """A step with this mixture."""
        return Option(self.choice, self._micro_batch, self.estimate(counts), self, counts)

    def estimate(self, counts: Counts) -> Estimate:
        """The estimate of one mixture."""
        return _estimate(self._costs, self._parts_of(counts), self.inputs, self._question.hardware.shares_memory)

    def host_nbytes(self, kind: Keep) -> int:
        """Bytes of host memory that a kind takes if all layers are of it."""
        return round(self._costs.host[KINDS.index(kind)])

    def fields(self, counts: Counts) -> dict[str, Any]:
        """The fields of a policy with this mixture."""
        rows = rows_of(counts, self._layers, self._entries)
        kinds = {keep for row in rows for keep in row}
        if kinds <= {"graph"} or kinds <= {"input"}:
            return {"activations": "keep" if "graph" in kinds else "recompute", "activations_by_layer": ()}
        return {"activations_by_layer": ((*kinds,),) if len(kinds) == 1 else rows}

    def _parts_of(self, counts: Counts) -> Any:
        return _whole_parts(np.array([counts]), self._layers, self._entries)


def drops_inputs(counts: Counts) -> bool:
    """Whether any layer of a mixture drops its input."""
    return bool(counts) and counts[DROPPED] > 0


def offloads_outputs(counts: Counts) -> bool:
    """Whether any layer of a mixture offloads outputs of its ops."""
    return any(counts[place] for place in OFFLOADED_OUTPUTS if counts)


@dataclass(frozen=True)
class Option:
    """A way to run a step, with its estimate. mixtures, counts: what layers keep, if the choice does not say it."""

    choice: Choice
    micro_batch: int
    estimate: Estimate
    mixtures: Mixtures | None = None
    counts: Counts = ()

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def chosen(self) -> Choice:
        """The choice with its mixture."""
        return self.choice if self.mixtures is None else self.choice.change(**self.mixtures.fields(self.counts))


def estimate_rows(question: Question, choice: Choice, work: Work, inputs: Estimate) -> Estimate:
    """The estimate of a policy with `activations_by_layer`. inputs: of the same policy, keeping inputs."""
    parts = _shares(choice.policy.activations_by_layer)
    return _estimate(kind_costs(question, choice, work), parts, inputs, question.hardware.shares_memory)


def _shares(rows: ActivationRows) -> Any:
    """float[1, kinds]: the share of each kind."""
    entries = [keep for row in rows for keep in row]
    return np.array([[entries.count(kind) / len(entries) for kind in KINDS]])


def _estimate(costs: KindCosts, parts: Any, inputs: Estimate, shares: bool) -> Estimate:
    """The estimate of one mixture. parts: float[1, kinds], its share of the layers for each kind."""
    added_nbytes, (seconds,) = _bytes_and_seconds(costs, parts, inputs, shares)
    more = {tier: float(added) for tier, (added,) in added_nbytes.items()}
    nbytes = {tier: round(taken + more.get(tier, 0.0)) for tier, taken in inputs.nbytes.items()}
    forward, backward = ({stream: float(value[0]) for stream, value in added.items()} for added in _added(costs, parts))
    both, share = (plus(forward, backward), backward), inputs.further_share
    busy, late = (plus(taken, added) for taken, added in zip((inputs.busy, inputs.late), both, strict=True))
    (more, more_late) = (plus(taken, added, share) for taken, added in zip(inputs.further, both, strict=True))
    return replace(inputs, seconds=float(seconds), nbytes=nbytes, busy=busy, late=late, further=(more, more_late))


def _added(costs: KindCosts, parts: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stream -> seconds that each mixture adds to the forward pass; the same for the backward pass."""
    early = {"grad": costs.offload, "fetch": costs.reload_early, "write": costs.write, DRAM: costs.dram}
    late = {"compute": costs.compute, "fetch": costs.reload, "grad": costs.offload_late, "read": costs.read}
    late[DRAM] = costs.dram
    none = np.zeros(len(parts))
    forward, backward = (
        {stream: parts @ np.array(of) if any(of) else none for stream, of in each.items()} for each in (early, late)
    )
    return forward, backward


def _bytes_and_seconds(costs: KindCosts, parts: Any, inputs: Estimate, shares: bool) -> tuple[dict[str, Any], Any]:
    """For each mixture: bytes that it adds by tier, and seconds of the step.

    parts: float[mixtures, kinds], the share of the layers for each kind. `Estimate.movable` is ignored, so that all
    of the disk's seconds count in their own pass: replays of mixtures wait longer for the disk than it says.
    """
    used, slots = parts > 0, np.array(costs.slots)
    to_disk = np.array([kind == "disk" for kind in KINDS])
    device = parts @ np.array(costs.device) + used @ slots
    host = parts @ np.array(costs.host) - used @ np.where(to_disk, 0.0, slots) + used @ np.array(costs.staging)
    host = host + (device if shares else 0.0)
    disk = np.maximum(
        0.0, parts @ np.array(costs.disk) - used @ np.where(to_disk, slots + np.array(costs.staging), 0.0)
    )
    bound = replace(inputs, movable=0.0)
    added, further = _added(costs, parts), inputs.further_share
    seconds = inputs.loss + max(0.0, inputs.seconds - bound.least_seconds())
    for number, busy in enumerate(bound.passes()):  # forward, backward, and the same of further rounds
        share = further if number > 1 else 1.0 - further
        seconds = seconds + _pass_seconds(busy, added[number % 2], share, shares)
    return {"device": device, "host": host, "disk": disk}, seconds


def _pass_seconds(busy: Mapping[str, float], added: Mapping[str, Any], share: float, shares: bool) -> Any:
    """Seconds of the busiest stream in a pass, to which each mixture adds this share. Where memory is shared, all
    streams but the disk's share the processor too, and their added seconds are summed."""
    added = added if share == 1.0 else {stream: share * spent for stream, spent in added.items()}
    streams = [busy.get(stream, 0.0) + added.get(stream, 0.0) for stream in {**busy, **added}]
    if shares:
        computed = sum(spent for stream, spent in added.items() if stream not in DISK_STREAMS)
        streams = [busy.get(stream, 0.0) + added.get(stream, 0.0) for stream in DISK_STREAMS]
        streams.append(computed + max(busy.values(), default=0.0))
    longest = streams[0]
    for each in streams[1:]:
        longest = np.maximum(longest, each)
    return longest


def _usable(saves_outputs: bool, shares: bool, on_disk: bool) -> Iterator[Keep]:
    """The kinds that are tried. saves_outputs: whether layers have outputs to save; shares: whether the device shares
    memory, so that nothing is offloaded to the host; on_disk: whether all layers have state on the disk. As long as one
    has all of its state in host memory, to move that state makes room as well as to write inputs does."""
    for kind in KINDS:
        if kind == "disk":
            if on_disk:
                yield kind
        elif not (shares and kind in NOT_OFFLOADED) and (saves_outputs or kind not in SAVED_BY):
            yield kind


@lru_cache(maxsize=16)
def _grid(kinds: frozenset[Keep], layers: int, entries: int) -> tuple[Any, Any, Any]:
    """All mixtures of these kinds that differ in rows of so many layers and entries, int[mixtures, kinds] in
    sixteenths; their `_whole_parts`; and whether all outputs stay, bool[mixtures]."""
    usable = [place for place, kind in enumerate(KINDS) if kind in kinds]
    rows: list[list[int]] = []
    for number in range(1, MOST_KINDS + 1):
        for chosen in combinations(usable, number):
            for cuts in combinations(range(1, PARTS), number - 1):
                counts = [0] * len(KINDS)
                for place, start, stop in zip(chosen, (0, *cuts), (*cuts, PARTS), strict=True):
                    counts[place] = stop - start
                if counts[DROPPED] <= MOST_DROPPED:
                    rows.append(counts)
    table = np.array(rows)
    _, distinct = np.unique(parts := _whole_parts(table, layers, entries), axis=0, return_index=True)
    distinct.sort()
    table = table[distinct]
    return table, parts[distinct], ~table[:, OFFLOADED_OUTPUTS].any(axis=1)


def _whole_parts(counts: Any, layers: int, entries: int) -> Any:
    """float[mixtures, kinds]: the fraction of each kind in `rows_of(counts)`, which gives each layer a whole row."""
    cells = np.zeros(counts.shape)
    by_layer, by_entry = ([KINDS.index(kind) for kind in kinds] for kinds in (BY_LAYER, BY_ENTRY))
    cells[:, by_layer] = entries * _spread_counts(counts[:, by_layer], layers, PARTS)
    total, rest = layers * entries, PARTS - counts[:, by_layer].sum(axis=1)
    free = total - cells.sum(axis=1)
    cells[:, by_entry] = _spread_counts(counts[:, by_entry], free[:, None], np.maximum(1, rest)[:, None])
    return cells / total


def _spread_counts(counts: Any, places: Any, parts: Any) -> Any:
    """Places of each kind, as `_spread_kinds` takes them: int or float[mixtures, kinds]."""
    ends = np.cumsum(counts, axis=1)
    return -(-ends * places // parts) + (-(ends - counts) * places // parts)


def rows_of(counts: Counts, layers: int, entries: int = 1) -> ActivationRows:
    """`activations_by_layer` for a mixture: a row for each layer, with so many entries.

    Kinds are spread evenly over layers and entries, so that streams are equally busy during the whole pass. The kinds
    of `BY_LAYER` fill whole rows: a dropped input then costs no second fetch of weights, and graphs are kept by layer.
    """
    every = range(layers)
    by_layer = _spread_kinds({kind: counts[KINDS.index(kind)] for kind in BY_LAYER}, every, PARTS)
    rest = PARTS - sum(counts[KINDS.index(kind)] for kind in BY_LAYER)
    cells = [(layer, entry) for layer in every if layer not in by_layer for entry in range(entries)]
    counts_by_kind = {kind: counts[KINDS.index(kind)] for kind in BY_ENTRY}
    by_cell = _spread_kinds(counts_by_kind, cells, rest)
    return tuple(tuple(by_layer.get(layer) or by_cell[layer, entry] for entry in range(entries)) for layer in every)


def _spread_kinds(counts: Mapping[Keep, int], places: Sequence[Any], parts: int) -> dict[Any, Keep]:
    """Place -> kind. Each kind gets `count / parts` of the places, evenly spaced among those still free."""
    kept: dict[Any, Keep] = {}
    free, done = list(places), 0
    for kind, count in counts.items():
        if count:
            number = -(-(done + count) * len(places) // parts) - -(-done * len(places) // parts)
            kept |= dict.fromkeys(spread(free, number) if number else [], kind)
            free = [place for place in free if place not in kept]
            done += count
    return kept
