"""Activations: what lives between a layer's forward and backward, and how the rest is recomputed.

The policy says what each forward leaves (`spec.Keep`), per layer and micro-batch. Graphs, inputs and stored outputs
are transient buffers on the device. An *offloaded* input goes through slots to host memory and back: ops name it as
if it stayed on the device, and `disk_staging` adds OFFLOAD and RELOAD ops. If it is still in its slot when needed
again, it never leaves. The same holds for offloaded outputs, which the forward packs into their slot. An input that
waits on the *disk* takes one more step of the same kind: from a few slots in host memory by WRITE, and back by READ. In
shared memory that is its only step.

*Dropped* inputs form stretches above one that was not dropped, from which FORWARD ops recompute them. With as many
slots as the stretch is long, one pass makes them all (Chen et al., 2016); with fewer, passes start from inputs
held half-way, at the places that minimise their number (`passes`; Griewank & Walther, 2000, "revolve"). A pass
goes layer by layer over all micro-batches that need it, so weights are fetched once per visit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from megatrain.errors import PlanError
from megatrain.schedule.contents import (
    USED,
    Arguments,
    Content,
    Hidden,
    HiddenGradient,
    LayerGraph,
    Saved,
    Scratch,
    Side,
    SideGradient,
)
from megatrain.schedule.ops import Access, Buffer, Op, Use, declare
from megatrain.schedule.passes.disk_staging import DISK, Route, Staged, stage
from megatrain.schedule.passes.workspace import (
    answered_nbytes,
    arguments_nbytes,
    beside_nbytes,
    forward_nbytes,
    input_nbytes,
    profile_of,
    runs_in_chunks,
)
from megatrain.spec import NOT_OFFLOADED, SAVED_BY, Keep, ModelSpec, Numerics, Policy, Work

THROUGH_THE_BUS = Route(("RELOAD", "fetch"), ("OFFLOAD", "grad"))

ALIGNMENT_NBYTES = 4096
"""Padding for offloaded outputs, so that each is aligned for kernels."""

WORKSPACES = (Use.FORWARD_WORKSPACE, Use.LOSS_WORKSPACE, Use.BACKWARD_WORKSPACE)
"""Workspaces of single ops, with one name for each kind."""

PREFIXES = {use: f"device/{use.name.lower()}/" for use in Use}
"""Prefix of the names of transient buffers."""


def workspace_name(model: ModelSpec, unit: int) -> str:
    """The name of a unit's workspace, which is as large as any of its kind needs."""
    if unit in model.encoder:
        return "start" if model.is_first(unit) else "encoder"
    return model.units[unit].kind


Pass = tuple[int, int]
"""(start, stop): recompute layers from boundary `start`, which exists, to `stop`, which is held from then on."""


@lru_cache(maxsize=4096)
def passes(dropped: int, slots: int) -> tuple[tuple[Pass, ...], ...]:
    """The passes before each backward over `dropped` boundaries above boundary 0, which exists.

    Backwards come in the order `dropped`, ..., 1, after which a boundary is freed; at most `slots` are held at a time.
    Entry i has the passes before the backward of boundary i + 1, none if it is already held. The number of recomputed
    layers is minimal: (d + 1) r - C(s + r, r - 1) for d dropped boundaries and s slots, with the smallest r such that
    d + 1 <= C(s + r, r) (Griewank & Walther, 2000).
    """
    if not dropped:
        return ()
    if slots >= dropped:
        return *((),) * (dropped - 1), tuple((start, start + 1) for start in range(dropped))
    _, first = _fewest(dropped, slots)
    below = passes(first - 1, slots)
    if first == dropped:
        return *below, ((0, first),)
    *above, last = (
        tuple((first + start, first + stop) for start, stop in stretch)
        for stretch in passes(dropped - first, slots - 1)
    )
    return *below, (), *above, ((0, first), *last)


@lru_cache(maxsize=4096)
def _fewest(dropped: int, slots: int) -> tuple[float, int]:
    """(minimum number of recomputed layers, boundary to hold first)."""
    if slots >= dropped:
        return dropped, min(1, dropped)
    if not slots:
        return float("inf"), 0
    places = range(1, dropped + 1)
    return min((at + _fewest(dropped - at, slots - 1)[0] + _fewest(at - 1, slots)[0], at) for at in places)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Recomputation of a layer for one micro-batch: where its input is, and where its output goes."""

    layer: int
    micro: int
    source: Access
    target: Access


class Activations:
    """Assigns the memory of one step's activations, and adds its buffers to `buffers`.

    Raises `PlanError` for a policy with more rows than the model has layers.
    """

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        work: Work,
        buffers: dict[str, Buffer],
        *,
        trains: bool,
    ) -> None:
        self._model, self._numerics, self._policy = model, numerics, policy
        self._work, self._buffers = work, buffers
        if len(policy.activations_by_layer) > len(model.layers):
            what = f"has rows for {len(policy.activations_by_layer)} layers, but the model has {len(model.layers)}"
            raise PlanError(what, where="policy.activations_by_layer", fix="give one row for each layer, or fewer")
        self._trains = trains
        self._lowest = max(1, model.lowest_trained)
        """The lowest layer with a backward pass."""
        self._readers = {side.source + 1: side.users for side in model.sides if side.is_hidden}
        """Layer -> the units that read its input, too, as a side value."""
        layers = range(self._lowest, model.epilogue) if trains else range(0)
        needed = {unit for unit in model.encoder[1:] if model.has_backward(unit)}
        needed |= {*model.tapped} if model.encoders and model.has_backward(0) else set()
        of_encoder = sorted(needed)
        """Inputs of its layers with a backward pass, and what the prologue reads of it."""
        self._keeps = {
            (layer, micro): self._keep(layer, micro)
            for layer in (*layers, *(of_encoder if trains else ()))
            for micro in range(work.micro_batches)
        }
        self.round = 0
        """Round of the ops being made."""
        self._held: dict[tuple[int, int], Access] = {}
        """Where a recomputed input is."""
        self._known: dict[tuple[Use, int, int], Access] = {}
        """Cache of frequent accesses, by unit and micro-batch."""
        self._workspaces: dict[tuple[int, int], int] = {}
        """(unit, tokens of a micro-batch) -> `forward_nbytes`."""
        self._times: Counter[tuple[int, int]] = Counter()
        """How often each was recomputed."""

    def _keep(self, layer: int, micro: int) -> Keep:
        if layer not in self._model.layers:
            return "input" if self._policy.shares_memory else "offload"
        keep, readers = self._policy.keep(layer - 1, micro), self._readers.get(layer, ())
        if keep == "drop" and (layer == self._lowest or readers):
            return "input"
        if self._policy.shares_memory and keep == "disk" and not readers:
            return keep
        return NOT_OFFLOADED.get(keep, keep) if not self.leaves(layer, readers, micro) else keep

    def leaves(self, layer: int, readers: Sequence[int], micro: int) -> bool:
        """Whether what a unit makes is offloaded: the input of `layer`, with all that `readers` read. The graph of a
        reader would hold it on the device."""
        policy = self._policy
        graphs = any(policy.keep(reader - 1, micro) == "graph" for reader in readers if reader in self._model.layers)
        return self._trains and not (policy.shares_memory or graphs) and policy.keep(layer - 1, micro) in NOT_OFFLOADED

    # One op's part --------------------------------------------------------------------------------------------------

    def left_by(self, layer: int, micro: int) -> list[Access]:
        """What a layer's forward writes only for its backward."""
        keep = self._keeps.get((layer, micro))
        left = [self.graph(layer, micro)] if keep == "graph" else []
        left += [self._offloaded(layer, micro)] if keep in NOT_OFFLOADED else []
        return [*left, self.stored(layer, micro)] if keep in SAVED_BY else left

    def taken_up_by(self, layer: int, micro: int) -> list[Access]:
        """Everything left by a layer's forward that its backward reads."""
        also = [self.stored(layer, micro)] if self._keeps[layer, micro] in SAVED_BY else []
        return [self.found_by(layer, micro), *also]

    def found_by(self, layer: int, micro: int) -> Access:
        """The graph or input from which a layer's backward starts; where units behind the layer find its input."""
        keep = self._keeps.get((layer, micro))
        if keep in NOT_OFFLOADED:
            return self._offloaded(layer, micro)
        match keep:
            case "graph":
                return self.graph(layer, micro)
            case "drop":
                return self._held[layer, micro]
        return self.hidden(layer, micro)

    def keeps_graph(self, layer: int, micro: int) -> bool:
        return self._keeps[layer, micro] == "graph"

    def recomputations(self, layer: int, micros: Iterable[int]) -> list[list[Recomputation]]:
        """Recomputations before a layer's backward, grouped by layer, lowest first."""
        by_layer: dict[int, list[Recomputation]] = defaultdict(list)
        for micro in micros:
            bottom = layer
            while self._keeps.get((bottom, micro)) == "drop":
                bottom -= 1
            top = layer
            while self._keeps.get((top + 1, micro)) == "drop":
                top += 1
            dropped = top - bottom
            if bottom == layer:
                continue
            ahead = passes(dropped, min(dropped, self._policy.recompute_slots or dropped))[layer - bottom - 1]
            for start, stop in ahead:
                source = self.found_by(bottom + start, micro)
                for recomputed in range(bottom + start, bottom + stop):
                    target = self._recomputed(recomputed + 1, micro)
                    by_layer[recomputed].append(Recomputation(recomputed, micro, source, target))
                    source = target
                self._held[bottom + stop, micro] = source
        return [by_layer[recomputed] for recomputed in sorted(by_layer)]

    # Memory ---------------------------------------------------------------------------------------------------------

    def hidden(self, unit: int, micro: int) -> Access:
        """A unit's input: batch x length x hidden size, in the compute dtype."""
        key = Use.INPUTS, unit, micro
        if key not in self._known:
            nbytes = input_nbytes(self._model, self._numerics, self._work, unit, micro)
            self._known[key] = self.transient(Use.INPUTS, f"{unit}.{micro}", nbytes, Hidden(unit, micro))
        return self._known[key]

    def dhidden(self, unit: int, micro: int) -> Access:
        """The gradient of a unit's input; each unit overwrites that of the unit above it."""
        key = Use.INPUT_GRADIENTS, unit, micro
        if key not in self._known:
            nbytes, of_text = (
                input_nbytes(self._model, self._numerics, self._work, unit, micro),
                0 < unit <= self._model.epilogue,
            )
            name = f"{micro}" if of_text else f"encoder.{micro}"
            self._known[key] = self.transient(Use.INPUT_GRADIENTS, name, nbytes, HiddenGradient(unit, micro))
        return self._known[key]

    def arguments(self, unit: int, micro: int) -> Access:
        """The arguments besides the hidden state of the layers that a unit is among, or makes them for."""
        of = 0 if unit <= self._model.epilogue else self._model.encoder[0]
        key = Use.ARGUMENTS, of, micro
        if key not in self._known:
            nbytes_of_one = arguments_nbytes(self._model, self._numerics, self._work, self._work.tokens[micro], of)
            nbytes, name = round(self._work.repeats * nbytes_of_one), f"encoder.{micro}" if of else f"{micro}"
            self._known[key] = self.transient(Use.ARGUMENTS, name, nbytes, Arguments(micro, of))
        return self._known[key]

    def graph(self, layer: int, micro: int) -> Access:
        """What autograd keeps of a layer between its forward (or recomputation) and its backward."""
        key = Use.GRAPHS, layer, micro
        if key not in self._known:
            nbytes, content = self._graph_nbytes(layer, micro), LayerGraph(layer, micro)
            self._known[key] = self.transient(Use.GRAPHS, f"{layer}.{micro}", nbytes, content)
        return self._known[key]

    def _graph_nbytes(self, layer: int, micro: int) -> int:
        tokens = self._work.tokens[micro]
        length = min(self._work.length or tokens, tokens)
        alike = self._work.repeats if self.keeps_graph(layer, micro) else 1  # recomputed ones exist one at a time
        profile, keep = profile_of(self._model, layer, self._work, length), self._keeps[layer, micro]
        kept = alike * profile.kept(tokens // length, length, self._numerics.mlp_chunk_tokens)
        in_chunks = runs_in_chunks(self._model.units[layer], self._numerics, tokens)
        if keep in SAVED_BY and not (in_chunks and SAVED_BY[keep] == "chosen"):  # outputs within chunks are not stored
            kept -= answered_nbytes(self._model, self._numerics, self._policy, self._work, layer, tokens, keep)
        nbytes = max(1, round(kept))
        return nbytes + (
            input_nbytes(self._model, self._numerics, self._work, layer, micro) if self.keeps_graph(layer, micro) else 0
        )  # the input

    def made(self, unit: int, micro: int, *, recomputes: bool = False) -> list[Access]:
        """A forward's workspace; little beyond the graph if it keeps that."""
        if unit and not recomputes and (unit, micro) in self._keeps and self.keeps_graph(unit, micro):
            return []
        tokens = self._work.tokens[micro]
        if (unit, tokens) not in self._workspaces:
            nbytes = forward_nbytes(self._model, self._numerics, self._policy, self._work, unit, tokens)
            self._workspaces[unit, tokens] = nbytes
        nbytes = self._workspaces[unit, tokens]
        keep = self._keeps.get((unit, micro))
        if keep in NOT_OFFLOADED and keep in SAVED_BY and not recomputes:  # until they are in their slot
            nbytes += round(self._saved_nbytes(unit, micro) / self._work.repeats)
        if not nbytes:
            return []
        return [
            self.transient(
                Use.FORWARD_WORKSPACE,
                workspace_name(self._model, unit),
                nbytes + beside_nbytes(self._numerics, self._policy),
                Scratch("made"),
            )
        ]

    def stored(self, layer: int, micro: int) -> Access:
        """The op outputs stored by a layer's forward; `offloaded` replaces the name of offloaded ones by a slot."""
        keep, nbytes = self._keeps[layer, micro], max(1, self._saved_nbytes(layer, micro))
        if keep not in NOT_OFFLOADED:
            return self.transient(Use.SAVED_OUTPUTS, f"{layer}.{micro}", nbytes, Saved(layer, micro, SAVED_BY[keep]))
        name = f"{PREFIXES[Use.SAVED_OUTPUTS]}{layer}.{micro}"
        nbytes += round(self._work.repeats * ALIGNMENT_NBYTES)
        return Access(name, 0, nbytes, Saved(layer, micro, SAVED_BY[keep], offloaded=True))

    def _saved_nbytes(self, layer: int, micro: int) -> int:
        saved = SAVED_BY[self._keeps[layer, micro]]
        return round(self._work.repeats * self._model.units[layer].profile.stored(saved, self._work.tokens[micro]))

    def _recomputed(self, unit: int, micro: int) -> Access:
        """A recomputed boundary; each time a different buffer with its own lifetime."""
        times = self._times[unit, micro]
        self._times[unit, micro] += 1
        which = f"{unit}.{micro}" + (f".{times}" if times else "")
        nbytes = input_nbytes(self._model, self._numerics, self._work, unit, micro)
        return self.transient(Use.RECOMPUTED_INPUTS, which, nbytes, Hidden(unit, micro))

    def _offloaded(self, layer: int, micro: int) -> Access:
        """An offloaded input, whose name `offloaded` replaces by a slot."""
        name = f"{PREFIXES[Use.OFFLOADED_INPUTS]}{layer}.{micro}"
        return Access(
            name, 0, input_nbytes(self._model, self._numerics, self._work, layer, micro), Hidden(layer, micro)
        )

    def transient(self, use: Use, which: str, nbytes: int, content: Content) -> Access:
        """Device memory that exists while ops need it."""
        if self.round and use in WORKSPACES:  # not shared between rounds
            which = f"{which}.{self.round}"
        name = f"{PREFIXES[use]}{which}"
        known = self._buffers.get(name)
        if known is None or known.nbytes < nbytes:
            declare(self._buffers, Buffer(name, "device", nbytes, use, arena=False))
        return Access(name, 0, nbytes, content)

    # Offloading -----------------------------------------------------------------------------------------------------

    def offloaded(self, ops: Sequence[Op], side_values: Sequence[Access]) -> list[Op]:
        """`ops` with slots for what is offloaded, and the necessary OFFLOAD, WRITE, READ and RELOAD ops.

        side_values: those that are offloaded, and sums of their gradients. Of each kind there are as many slots as the
        policy says; more if one op needs several.
        """
        away = [key for key, keep in self._keeps.items() if keep in NOT_OFFLOADED]
        saved, shares = [key for key in away if self._keeps[key] in SAVED_BY], self._policy.shares_memory
        of_kinds = {
            "": [self._offloaded(*key) for key in away],
            "/outputs": [self.stored(*key) for key in saved],
            "/sides": side_values,
        }
        to_disk = {self._offloaded(*key).buffer for key in away if self._keeps[key] == "disk"}
        through_bus, through_host = dict[str, Staged](), dict[str, Staged]()
        at_a_time = self._policy.micro_batches_per_round or self._work.micro_batches
        place = partial(_staged, self._model, at_a_time)
        slots_of = partial(_slots, self._buffers, self._work.repeats)
        for kind, accesses in of_kinds.items():
            most = _most_at_once(ops, accesses) if self._model.sides or self._model.encoders else 1
            if not shares:  # while an op runs, the others are filled
                slots = slots_of(f"device/offload_slots{kind}", accesses, self._policy.offload_slots - 1 + most)
                for access in accesses:
                    tier: Waits = "passing" if access.buffer in to_disk else "host"
                    through_bus[access.buffer] = place(access, slots, tier)
            going = [access for access in accesses if access.buffer in to_disk]
            if not shares:
                going = [each._replace(buffer=through_bus[each.buffer].region) for each in going]
            slots = slots_of(f"host/disk_staging/kept{kind}", going, self._policy.disk_staging_slots)
            through_host |= {access.buffer: place(access, slots, "disk") for access in going}
        placed = _through(THROUGH_THE_BUS, ops, through_bus, self._buffers, passing=through_host)
        return _through(DISK, placed, through_host, self._buffers)


Waits = Literal["host", "disk", "passing"]
"""Where something offloaded waits; `passing` for a place in host memory from which it goes on to the disk."""

OFFLOADED_AS: dict[type[Content], Use] = {
    Hidden: Use.OFFLOADED_INPUTS,
    Saved: Use.OFFLOADED_OUTPUTS,
    Side: Use.OFFLOADED_SIDES,
    SideGradient: Use.OFFLOADED_SIDES,
}
"""What is offloaded -> the use of its place in host memory or on the disk."""


def _most_at_once(ops: Sequence[Op], accesses: Sequence[Access]) -> int:
    """The largest number of these accesses that one op mentions, compared by the names of their buffers."""
    names = {access.buffer for access in accesses}
    mentioned = ({access.buffer for access in (*op.reads, *op.writes)} for op in ops)
    return max((len(names & buffers) for buffers in mentioned), default=0) if names else 0


def _slots(
    buffers: dict[str, Buffer], repeats: float, name: str, accesses: Sequence[Access], most: int
) -> tuple[str, ...]:
    """At most so many slots through which all of these pass, added to `buffers`. repeats: micro-batches that one
    represents, of which one at a time is in a slot."""
    slots = tuple(f"{name}/{k}" for k in range(min(most, len(accesses))))
    largest = max((round(access.stop / repeats) for access in accesses), default=0)
    on_device = name.startswith("device/")
    for slot in slots:
        use = Use.OFFLOAD_SLOTS if on_device else Use.DISK_STAGING
        declare(buffers, Buffer(slot, "device" if on_device else "host", largest, use))
    return slots


def _staged(model: ModelSpec, at_a_time: int, access: Access, slots: tuple[str, ...], where: Waits) -> Staged:
    """The place where something offloaded waits, and the slots that it passes through. at_a_time: micro-batches that
    need a place at a time."""
    content = access.content
    is_sum = isinstance(content, SideGradient)
    if isinstance(content, Hidden | Saved):
        unit = which = content.unit
    else:
        assert isinstance(content, Side | SideGradient)
        unit, which = model.sides[content.number].source, content.number
    folder = f"{OFFLOADED_AS[type(content)].name.lower()}{'/gradients' if is_sum else ''}"
    outside = f"{where}/{folder}/{which}.{content.micro % at_a_time}"
    if where == "passing":
        outside = f"host/passing/{folder}/{which}.{content.micro}"
    route = DISK if where == "disk" else THROUGH_THE_BUS
    return Staged(unit, outside, access.stop, USED, slots, content.micro, route, copies_each=is_sum)


def _through(
    route: Route,
    ops: Sequence[Op],
    staged: Mapping[str, Staged],
    buffers: dict[str, Buffer],
    passing: Container[str] = (),
) -> list[Op]:
    """`ops` with copies into slots and out of them, less the copies out whose content never comes back. The places
    where contents wait are added to `buffers`.

    passing: names of places where nothing waits, since it goes on from there.
    """
    if not staged:
        return list(ops)
    placed, (inward, _), (outward, _) = stage(ops, staged), route.inward, route.outward
    coming = [op for op in placed if op.kind == inward and type(op.reads[0].content) in OFFLOADED_AS]
    for op in coming:
        name, use = op.reads[0].buffer, OFFLOADED_AS[type(op.reads[0].content)]
        if route is DISK:
            declare(buffers, Buffer(name, "disk", op.nbytes, use, unit=op.unit))
        elif name not in passing:
            declare(buffers, Buffer(name, "host", op.nbytes, use))
    returning = {op.reads[0].content for op in coming}
    leaving = {op.writes[0].content for op in placed if op.kind == outward}
    stays = {content for content in leaving - returning if type(content) in OFFLOADED_AS}
    return [op for op in placed if op.kind != outward or op.writes[0].content not in stays]
