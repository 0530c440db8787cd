"""`Policy`: how a model is streamed. It decides time and memory of a step, and no number that comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from megatrain.errors import PlanError
from megatrain.spec.fields import Bounds, check_fields
from megatrain.spec.limits import Nbytes
from megatrain.spec.model import ModelSpec
from megatrain.spec.numerics import Numerics

ActivationPlan = Literal["keep", "recompute"]
Keep = Literal["graph", "chosen", "attention", "input", "offload_chosen", "offload_attention", "offload", "drop"]
"""What is left of a layer's forward for its backward: its autograd graph; its input and what its large products and its
attention have given; its input and what attention has; its input; the same three in host memory, brought back in time;
or nothing, and the input is computed again from the nearest one below that was not dropped."""
SavedOutputs = Literal["chosen", "attention"]
SAVED_BY: Mapping[Keep, SavedOutputs] = {
    "chosen": "chosen",
    "attention": "attention",
    "offload_chosen": "chosen",
    "offload_attention": "attention",
}
"""Which outputs of ops each kind saves, of those that save any."""
NOT_OFFLOADED: Mapping[Keep, Keep] = {
    "offload": "input",
    "offload_chosen": "chosen",
    "offload_attention": "attention",
}
"""What is kept in host memory -> the same, kept on the device."""
UpdateTime = Literal["next_forward", "during_backward"]
WaitFor = Literal["unit", "shard"]
Tier = Literal["device", "host", "disk", "file"]
"""Where bytes live. `file` are the model's own files, which are read and never written."""
StateTier = Literal["device", "host", "disk"]
Transfer = Literal["pinned", "staged", "pageable"]
"""How weights and gradients cross the bus: from pinned memory, through pinned staging buffers, or from pageable
memory."""
Delivery = Literal["gather", "shared"]
"""How weights that several ranks own parts of come to be whole on each device: over the link between devices, or out of
host memory that all ranks of a machine reach."""
Slots = Annotated[int, Bounds(1, 1 << 12)]


class Part(StrEnum):
    """A part of a unit's state. The value is the field of `Home` that says where it is between steps."""

    WEIGHTS = "weights"
    """What streams: in bf16 the upper half of each float32 master, in fp32 the master."""
    LOW_BITS = "low_bits"
    """The other half of each master, in bf16."""
    MOMENTS = "moments"
    """AdamW's m and v."""
    GRADIENTS = "gradients"
    """A gradient that waits for the norm."""

    @property
    def label(self) -> str:
        return self.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Placement:
    """The tier of each part of a unit's state between steps. What is on the disk passes through host memory.

    The weights may be on the device beside a copy in host memory, which the optimizer updates: then they are fetched
    once per step. With all parts on the device nothing of the unit crosses the bus, and it is updated there. With
    weights in files, those of the model that hold frozen parameters as they are held here (`ParamSpec.file_backed`) are
    read as they are needed; the other weights of the unit are in host memory.
    """

    weights: Tier = "host"
    low_bits: StateTier = "host"
    """The other half of each master, in bf16."""
    moments: StateTier = "host"
    """AdamW's m and v."""
    gradients: StateTier = "host"
    """Where a gradient waits for the norm; with the whole state on the device, it waits there."""

    def tier(self, part: Part) -> Tier:
        """Where the truth about a part is. Weights alone on the device are a copy: those in host memory rule."""
        if part is Part.WEIGHTS and self.weights == "device" and not self.on_device:
            return "host"
        if part is Part.GRADIENTS and self.on_device:
            return "device"
        tier: Tier = getattr(self, part)
        return tier

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "placement.")
        if self.gradients == "device":
            fix = "leave gradients out" if self.on_device else "use host or disk"
            raise PlanError("a gradient waits where its unit is updated", where="placement.gradients", fix=fix)
        aside = self.low_bits == "device", self.moments == "device"
        if any(aside) and not (all(aside) and self.weights == "device"):
            raise PlanError(
                f"a unit is updated where its whole state is, not with {self}",
                where="policy.placements",
                fix="put all parts on the device, or the weights alone, or none",
            )
        if self.on_device and self.gradients == "disk":
            what = "a gradient whose unit is updated on the device waits there, and not on the disk"
            raise PlanError(what, where="placement.gradients", fix="leave gradients out")

    @property
    def uses_disk(self) -> bool:
        """Whether any part is there."""
        return "disk" in (self.weights, self.low_bits, self.moments, self.gradients)

    @property
    def uses_drive(self) -> bool:
        """Whether any part is on the disk or in files."""
        return self.uses_disk or self.weights == "file"

    @property
    def on_device(self) -> bool:
        """Whether the whole state is there, and the unit is updated there."""
        return self.moments == "device"


IN_HOST = Placement()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a model is streamed. The numbers that come out of a step never depend on it, only time and memory do."""

    weight_slots: Slots = 2
    """Device buffers that the layers' weights pass through; 2 hides each fetch behind the layer before."""
    read_ahead_nbytes: Nbytes = 0
    """In place of `weight_slots`, where it is not 0: all units share one slot, embedding and head with the layers, and
    while it is in use the first shards of the next layer come into this much device memory. Where compute waits for
    shards, others then follow straight into places of the slot that the layer before has given up. Shards of layers
    are no larger."""
    grad_slots: Slots = 2
    """Device buffers that the layers' gradients pass through."""
    shard_nbytes: Annotated[int, Bounds(1, 1 << 60)] = 64 << 20
    """Largest piece of a unit that one copy moves."""
    wait_for: WaitFor = "unit"
    """What compute waits for: all weights of a unit; or, inside a layer's code, the shard that it comes to, and then
    shards of a gradient leave as each is complete. Where memory is shared there is nothing to wait for."""
    activations: ActivationPlan = "recompute"
    """Keep each layer's autograd graph until its backward, or keep its input and compute the layer again."""
    activations_by_layer: tuple[Annotated[tuple[Keep, ...], Bounds(1)], ...] = ()
    """In place of `activations`, for each layer and micro-batch: a row per layer, an entry per micro-batch. Rows and
    entries start over at their end, so `(("input",), ("drop",))` keeps every other input. The lowest layer that has a
    backward pass keeps its input where it says `drop`; where memory is shared, nothing is offloaded."""
    offload_slots: Slots = 2
    """Device buffers that offloaded inputs pass through, out and back, and as many for offloaded outputs."""
    recompute_slots: Slots | None = None
    """Dropped inputs, computed again, that a micro-batch may hold at one time: with fewer, layers are computed more
    often. `None` is as many as are dropped in a row, so that each layer is computed again once."""
    micro_batches_per_round: Annotated[int, Bounds(0, 1 << 20)] = 0
    """Cut a step into rounds: so many micro-batches go through all layers, forward and back, before the next ones do,
    and weights are fetched anew. Partial gradients wait in host memory from one round to the next, in float32. 0 is all
    in one round. Not for models whose head is tied to the prologue: the two shares of that gradient would be summed in
    another order."""
    update: UpdateTime = "next_forward"
    """Apply each unit's update during the next forward (needed for an exact global norm), or as its gradient lands."""
    streamed_updates: Annotated[float, Bounds(0, 1)] = 0.0
    """Share of the layers whose state waits in host memory that are updated on the device: their state passes through
    it in pieces. It is copied from pinned memory."""
    shares_memory: bool = False
    """The device computes in host memory: weights need no fetch, and gradients of the right dtype are summed where they
    stay."""
    host_threads: Annotated[int, Bounds(0, 1 << 10)] = 0
    """Threads of the optimizer pass; 0 is one per available core."""
    transfer: Transfer = "pinned"
    """It is decided when the state is allocated, and stays."""
    pinned_staging_slots: Slots = 2
    """Pinned buffers of a shard each, in each direction, where `transfer` is staged."""
    placements: tuple[Placement, ...] = ()
    """Of each unit, in order; empty keeps everything in host memory."""
    delivery: Delivery = "gather"
    """Of several ranks: `gather` brings a rank's own part of a shard over its bus, and the others' over the link
    between devices, where gradients are summed, too. `shared` is for ranks of one machine whose devices have no quick
    link: each fetches whole shards out of memory that all of them map, and gradients are summed there. With one rank
    there is nothing to choose."""
    disk_staging_slots: Slots = 2
    """Host buffers that each kind of state passes through on its way from and to the disk: how far reads run ahead."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "policy.")
        if self.shares_memory and self.transfer != "pinned":
            raise PlanError("nothing crosses a bus where memory is shared", where="policy.transfer", fix="use pinned")
        if self.shares_memory and any(placement.weights == "device" for placement in self.placements):
            raise PlanError("the device has no memory of its own", where="policy.placements", fix="use host or disk")
        if self.streamed_updates and (self.shares_memory or self.transfer != "pinned"):
            what = "nothing crosses a bus where memory is shared" if self.shares_memory else "state is not all pinned"
            raise PlanError(what, where="policy.streamed_updates", fix="use 0")

    def placements_of(self, model: ModelSpec) -> tuple[Placement, ...]:
        """Where the state of each unit of a model lives. Raises `PlanError` for another number of them."""
        if not self.placements:
            return (IN_HOST,) * len(model.units)
        if len(self.placements) != len(model.units):
            what = f"places the state of {len(self.placements)} units, and the model has {len(model.units)}"
            raise PlanError(what, where="policy.placements", fix="give one for each unit, or none")
        return self.placements

    def placement(self, unit: int) -> Placement:
        """Where the state of a unit lives."""
        return self.placements[unit] if self.placements else IN_HOST

    def updates_streamed(self, model: ModelSpec) -> frozenset[int]:
        """The units that are updated on the device while their state is in host memory: evenly spread layers, of those
        that train whole."""
        if not self.streamed_updates:
            return frozenset()
        placements = self.placements_of(model)
        layers = [
            unit
            for unit in model.layers
            if all(param.trainable for param in model.units[unit].params)
            and not (placements[unit].on_device or placements[unit].uses_drive)
        ]
        count = round(self.streamed_updates * len(layers))
        return frozenset(layers[(2 * number + 1) * len(layers) // (2 * count)] for number in range(count))

    def keep(self, layer: int, micro: int) -> Keep:
        """What is left of the forward of a layer, counted from 0, and a micro-batch."""
        if not self.activations_by_layer:
            return "graph" if self.activations == "keep" else "input"
        row = self.activations_by_layer[layer % len(self.activations_by_layer)]
        return row[micro % len(row)]

    @property
    def kept_shares(self) -> dict[str, float]:
        """What is left of forwards -> of which share of the rows and their entries."""
        rows = self.activations_by_layer or ((self.keep(0, 0),),)
        return {keep: sum(row.count(keep) / len(row) for row in rows) / len(rows) for row in rows for keep in row}

    @property
    def offloads(self) -> bool:
        """Whether inputs of layers leave the device."""
        return not self.shares_memory and not NOT_OFFLOADED.keys().isdisjoint(self.kept_shares)

    @property
    def offloads_outputs(self) -> bool:
        """Whether outputs of single ops do."""
        return self.offloads and any(keep in NOT_OFFLOADED and keep in SAVED_BY for keep in self.kept_shares)

    @property
    def layer_slots(self) -> int:
        """Device buffers that hold a layer's weights whole."""
        return 1 if self.read_ahead_nbytes else self.weight_slots

    @property
    def layers_fetched(self) -> int:
        """Layers of which the device may hold weights at one time."""
        return 2 if self.read_ahead_nbytes else self.weight_slots

    @property
    def gives_up_shards(self) -> bool:
        """Whether the last call of a visit gives up shards of weights as it is done with them."""
        return self.read_ahead_nbytes > 0 and self.wait_for != "unit" and not self.shares_memory

    def refuse_contradictions(self, numerics: Numerics) -> None:
        """Raise `PlanError` where no layer can be run so."""
        if numerics.kernels == "compile" and self.wait_for != "unit":
            what = "a compiled layer does not say which weight it comes to"
            raise PlanError(what, where="policy.wait_for", fix="use unit, or policy.kernels=stock")
