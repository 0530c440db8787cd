"""Chooses what each layer keeps of its forward pass, by bytes and by recomputation time saved.

Against keeping inputs alone, a graph, chosen outputs or attention's save compute of the backward pass and cost device
memory; what is offloaded takes slots instead, and costs bus time, out in the forward pass and back in the backward; a
dropped input saves memory and costs compute. All of these are sums over layers, so a mixture is priced without a
replay: each pass takes as long as its busiest stream, and what the step takes beyond that is taken to stay. So memory
that is spare goes to what saves most per byte, then a way of the bus that has time is filled, and the rest is computed
again; where that pays is decided by no rule, but by pricing every mixture of up to `MOST_KINDS` kinds by sixteenths of
the layers.
Left out: whether it fits and how long it takes (`search` replays the best).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any, get_args

import numpy as np

from megatrain.plan.cost import DRAM, Calibration, forward_seconds, host_dram_bandwidth, shape_of
from megatrain.plan.placement import PARTS, spread
from megatrain.plan.question import Choice, Estimate, PricedAlike, Question
from megatrain.spec import NOT_OFFLOADED, SAVED_BY, Keep, Numerics, Policy, Work

KINDS: tuple[Keep, ...] = get_args(Keep)

MOST_KINDS = 3
"""Kinds in one mixture: one to fill memory, one to fill the bus, and one for the rest."""

BY_LAYER: tuple[Keep, ...] = ("drop", "graph")
"""Kinds that all micro-batches of a layer share."""

OFFLOADED_OUTPUTS = [KINDS.index(kind) for kind in NOT_OFFLOADED if kind in SAVED_BY]
"""Places in `KINDS`."""

MOST_DROPPED = PARTS // 2
"""Of the inputs, so that each that is dropped has one beneath it to be computed from."""

Batching = tuple[tuple[Keep, ...], ...]

Counts = tuple[int, ...]
"""Sixteenths of the layers, by place in `KINDS`."""


@dataclass(frozen=True)
class Changes:
    """What each kind adds for all layers, beside keeping inputs: a value for each of `KINDS`."""

    device: tuple[float, ...]
    """Bytes."""
    slots: tuple[float, ...]
    """Bytes on the device where there is any of the kind; as many never leave, since what came last is needed first."""
    host: tuple[float, ...]
    compute: tuple[float, ...]
    """Seconds of the backward pass."""
    inward: tuple[float, ...]
    """Seconds of the bus to the device in the backward pass."""
    outward: tuple[float, ...]
    """Seconds of the bus from the device in the forward pass."""
    crossing: tuple[float, ...]
    """Seconds of host memory's full bandwidth, in each pass."""


def changes(question: Question, choice: Choice, work: Work) -> Changes:
    """Of a policy that keeps inputs. Where memory is shared, what is on the device is in the host's."""
    policy = choice.policy
    numerics = replace(choice.numerics, loss_chunk_tokens=1)  # it is no layer's
    return _changes(question.priced_alike, numerics, policy.offload_slots, policy.micro_batches_per_round, work)


@lru_cache(maxsize=1024)
def _changes(
    alike: PricedAlike, numerics: Numerics, offload_slots: int, micro_batches_per_round: int, work: Work
) -> Changes:
    question = alike.question
    model, hardware = question.model, question.hardware
    found = {each.name: dict.fromkeys(KINDS, 0.0) for each in fields(Changes)}
    measured = question.calibration or Calibration()
    inward, outward = measured.of("RELOAD", "layer"), measured.of("OFFLOAD", "layer")
    policy = Policy(offload_slots=offload_slots, micro_batches_per_round=micro_batches_per_round)
    price = forward_seconds(model, numerics, policy, work, hardware, question.calibration)
    trained = [layer for layer in model.layers if layer >= model.lowest_trained]
    kinds = {shape_of(model.units[layer]): layer for layer in trained}
    numbers = Counter(shape_of(model.units[layer]) for layer in trained)
    for (shape, layer), (tokens, micros) in product(kinds.items(), Counter(work.tokens).items()):
        times = numbers[shape] * micros
        boundary = times * work.repeats * tokens * model.hidden_size * numerics.weight_nbytes
        profile, length = model.units[layer].profile, min(work.length or tokens, tokens)
        found["device"]["graph"] += times * work.repeats * profile.kept(tokens // length, length)
        again = times * price(layer, tokens, "")
        found["compute"]["graph"] -= again
        for keep, saved in SAVED_BY.items():
            found["compute"][keep] -= again - times * price(layer, tokens, saved)
        for keep, like in NOT_OFFLOADED.items():
            stored = profile.stored(SAVED_BY[keep], tokens) if keep in SAVED_BY else 0
            crosses = boundary + times * work.repeats * stored
            found["device"][like] += times * work.repeats * stored
            found["device"][keep] -= boundary
            inputs = tokens * model.hidden_size * numerics.weight_nbytes
            found["slots"][keep] = max(found["slots"][keep], offload_slots * (inputs + stored))
            found["host"][keep] += crosses
            found["inward"][keep] += crosses / hardware.fetch_bandwidth * inward
            found["outward"][keep] += crosses / hardware.grad_bandwidth * outward
            found["crossing"][keep] += 0.0 if hardware.shares_memory else crosses / host_dram_bandwidth(hardware)
        found["device"]["drop"] -= boundary
        found["compute"]["drop"] += again
    rounds = round_count(policy, work.micro_batches * work.repeats)
    for tier in ("device", "host"):  # what a round keeps is gone in the next
        found[tier] = {kind: nbytes / rounds for kind, nbytes in found[tier].items()}
    return Changes(**{name: tuple(each[kind] for kind in KINDS) for name, each in found.items()})


def round_count(policy: Policy, micro_batches: float) -> float:
    """How many rounds a step of so many micro-batches has."""
    return max(1.0, micro_batches / (policy.micro_batches_per_round or micro_batches))


class Mixtures:
    """All mixtures of one policy, by the seconds that they promise. found: of the policy, keeping inputs."""

    def __init__(self, question: Question, choice: Choice, work: Work, found: Estimate) -> None:
        self._question, self._found = question, found
        shares = question.hardware.shares_memory
        self._table = _grid(question.model.units[1].profile.outputs.chosen_nbytes > 0, shares)
        self._price(changes(question, choice, work))

    def _price(self, each: Changes) -> None:
        self._each = each
        shares = self._question.hardware.shares_memory
        self.device, self.host, self.seconds = _taken(each, self._table / PARTS, self._found, shares)

    def slowed(self, counts: Counts, seconds: float) -> Mixtures:
        """The same with a slower way out: by as much as the mixture of these counts has taken longer than promised. It
        offloads something."""
        spent = float(np.array(counts) / PARTS @ np.array(self._each.outward))
        factor = 1.0 + max(0.0, seconds - self.promised(counts).seconds) / spent
        other = copy(self)
        other._price(replace(self._each, outward=tuple(factor * each for each in self._each.outward)))
        return other

    def best(
        self, budgets: Mapping[str, float], most: int, *, outputs_stay: bool = False
    ) -> list[tuple[float, Counts]]:
        """The `most` quickest of those that fit beside the rest, with the seconds that they promise; outputs_stay: of
        those by which no outputs are offloaded."""
        fit = ~self._table[:, OFFLOADED_OUTPUTS].any(axis=1) if outputs_stay else np.ones(len(self._table), dtype=bool)
        for tier, grown in (("device", self.device), ("host", self.host)):
            if tier in budgets:
                fit &= self._found.nbytes[tier] + grown <= budgets[tier]
        places = np.flatnonzero(fit)
        size = self.device if not self._question.hardware.shares_memory else self.host
        order = places[np.lexsort((size[places], np.round(self.seconds[places], 12)))][:most]
        return [(float(self.seconds[place]), tuple(int(n) for n in self._table[place])) for place in order]

    def promised(self, counts: Counts) -> Estimate:
        """What a mixture should take; what it takes of the device is the host's where memory is shared."""
        shares = self._question.hardware.shares_memory
        return _estimate(self._each, np.array([counts]) / PARTS, self._found, shares)


def offloads_outputs(counts: Counts) -> bool:
    return any(counts[place] for place in OFFLOADED_OUTPUTS)


@dataclass(frozen=True)
class Option:
    """The mixture of a policy that promises most, and how many seconds."""

    seconds: float
    micro_batch: int
    counts: Counts
    mixtures: Mixtures
    choice: Choice

    @property
    def offloads_outputs(self) -> bool:
        return offloads_outputs(self.counts)


def mixed(question: Question, choice: Choice, work: Work, found: Estimate) -> Estimate:
    """What the policy takes with its rows. found: of the same, keeping inputs."""
    entries = [keep for row in choice.policy.activations_by_layer for keep in row]
    parts = np.array([[entries.count(kind) / len(entries) for kind in KINDS]])
    return _estimate(changes(question, choice, work), parts, found, question.hardware.shares_memory)


def _estimate(each: Changes, parts: Any, found: Estimate, shares: bool) -> Estimate:
    """Of one mixture. parts: its row of shares."""
    device, host, seconds = (float(value[0]) for value in _taken(each, parts, found, shares))
    grown = {"device": device, "host": host}
    nbytes = {tier: round(taken + grown.get(tier, 0.0)) for tier, taken in found.nbytes.items()}
    forward, backward = ({stream: float(value[0]) for stream, value in added.items()} for added in _added(each, parts))
    return Estimate(seconds, nbytes, _with(_with(found.busy, forward), backward), _with(found.late, backward))


def _added(each: Changes, parts: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stream -> seconds that mixtures add to the forward pass, and to the backward."""
    compute, inward, outward, dram = (
        parts @ np.array(values) for values in (each.compute, each.inward, each.outward, each.crossing)
    )
    return {"grad": outward, DRAM: dram}, {"compute": compute, "fetch": inward, DRAM: dram}


def _with(busy: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {stream: spent + more.get(stream, 0.0) for stream, spent in busy.items()}


def _taken(each: Changes, parts: Any, found: Estimate, shares: bool) -> tuple[Any, Any, Any]:
    """Bytes that mixtures add on the device and in the host, and seconds of the step. parts: a row of shares each."""
    device = parts @ np.array(each.device) + (parts > 0) @ np.array(each.slots)
    host = parts @ np.array(each.host) - (parts > 0) @ np.array(each.slots) + (device if shares else 0.0)
    late = {stream: found.late.get(stream, 0.0) for stream in found.busy}
    early = {stream: spent - late[stream] for stream, spent in found.busy.items()}
    forward, backward = _added(each, parts)
    rest = max(0.0, found.seconds - max(early.values()) - max(late.values()))
    return device, host, _busiest(early, forward, shares) + _busiest(late, backward, shares) + rest


def _busiest(busy: Mapping[str, float], added: Mapping[str, Any], shares: bool) -> Any:
    """Seconds of a pass, for each mixture. Where memory is shared, all but the disk share the processor too."""
    streams = [busy.get(stream, 0.0) + added.get(stream, 0.0) for stream in {**busy, **added}]
    if shares:
        return sum(added.get(stream, 0.0) for stream in added) + max(busy.values(), default=0.0)
    longest = streams[0]
    for each in streams[1:]:
        longest = np.maximum(longest, each)
    return longest


@lru_cache(maxsize=4)
def _grid(stores: bool, shares: bool) -> Any:
    """Every mixture: int[mixtures, kinds]; without stored outputs or offloading where there is none."""
    absent = {*(() if stores else SAVED_BY), *(NOT_OFFLOADED if shares else ())}
    usable = [place for place, kind in enumerate(KINDS) if kind not in absent]
    rows: list[list[int]] = []
    for number in range(1, MOST_KINDS + 1):
        for chosen in combinations(usable, number):
            for cuts in combinations(range(1, PARTS), number - 1):
                counts = [0] * len(KINDS)
                for place, start, stop in zip(chosen, (0, *cuts), (*cuts, PARTS), strict=True):
                    counts[place] = stop - start
                if counts[KINDS.index("drop")] <= MOST_DROPPED:
                    rows.append(counts)
    return np.array(rows)


def rows_of(counts: Counts, layers: int, entries: int = 1) -> Batching:
    """A row for each layer, of so many entries. Each kind is spread over the depth and the entries, so that streams are
    as busy at the ends as between; but all micro-batches of a layer drop its input, so that a pass fetches each weight
    once, and all keep its graph."""
    whole = range(layers)
    alone = _dealt({kind: counts[KINDS.index(kind)] for kind in BY_LAYER}, whole, PARTS)
    rest = PARTS - sum(counts[KINDS.index(kind)] for kind in BY_LAYER)
    cells = [(layer, entry) for layer in whole if layer not in alone for entry in range(entries)]
    each = {kind: counts[KINDS.index(kind)] for kind in (*NOT_OFFLOADED, "chosen", "attention", "input")}
    dealt = _dealt(each, cells, rest)
    return tuple(tuple(alone.get(layer) or dealt[layer, entry] for entry in range(entries)) for layer in whole)


def _dealt(counts: Mapping[Keep, int], places: Sequence[Any], parts: int) -> dict[Any, Keep]:
    """Place -> kind, for as many of the places as the counts are of `parts`."""
    kept: dict[Any, Keep] = {}
    free, done = list(places), 0
    for kind, count in counts.items():
        if count:
            number = -(-(done + count) * len(places) // parts) - -(-done * len(places) // parts)
            kept |= dict.fromkeys(spread(free, number) if number else [], kind)
            free = [place for place in free if place not in kept]
            done += count
    return kept
