"""`Policy`: how a model is streamed. Affects time and memory of a step, but no numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from megatrain.errors import PlanError
from megatrain.spec.limits import Nbytes
from megatrain.spec.model import ModelSpec
from megatrain.spec.validate_fields import Bounds, check_fields

ActivationPlan = Literal["keep", "recompute"]
Keep = Literal[
    "graph", "chosen", "attention", "input", "offload_chosen", "offload_attention", "offload", "disk", "drop"
]
"""What a layer's forward keeps for its backward: its autograd graph; its input and the outputs of large products and
attention; its input and attention's output; its input; the same three in host memory, prefetched in time; its input on
the disk; or nothing, so that the input is recomputed from the nearest one below that was not dropped."""
SavedOutputs = Literal["chosen", "attention"]
SAVED_BY: Mapping[Keep, SavedOutputs] = {
    "chosen": "chosen",
    "attention": "attention",
    "offload_chosen": "chosen",
    "offload_attention": "attention",
}
"""The op outputs that each kind saves, for those that save any."""
NOT_OFFLOADED: Mapping[Keep, Keep] = {
    "offload": "input",
    "offload_chosen": "chosen",
    "offload_attention": "attention",
    "disk": "input",
}
"""Kind that keeps in host memory or on the disk -> the same on the device."""
UpdateTime = Literal["next_forward", "during_backward"]
WaitFor = Literal["unit", "shard"]
Tier = Literal["device", "host", "disk", "file"]
"""Where bytes are stored. `file`: the model's own files, which are only read."""
StateTier = Literal["device", "host", "disk"]
Transfer = Literal["pinned", "pageable"]
"""How weights and gradients cross the bus: from pinned memory, or from pageable memory."""
Delivery = Literal["gather", "shared"]
"""How each device gets whole weights of which several ranks own parts: over the link between devices, or from host
memory shared by all ranks of a machine."""
Slots = Annotated[int, Bounds(1, 1 << 12)]


class Part(StrEnum):
    """A part of a unit's state. The value is the field of `Placement` that has its tier between steps."""

    WEIGHTS = "weights"
    """The streamed weights: in bf16 the upper half of each float32 master, in fp32 the master."""
    LOW_BITS = "low_bits"
    """The other half of each master, in bf16."""
    MOMENTS = "moments"
    """What the optimizer keeps of trained elements: AdamW's m and v."""
    GRADIENTS = "gradients"
    """Gradients that wait for the norm."""

    @property
    def label(self) -> str:
        return self.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Placement:
    """The tier of each part of a unit's state between steps. State on the disk passes through host memory.

    Only the weights on the device: they are a copy, fetched once per step; the optimizer updates host memory. All parts
    on the device: nothing of the unit crosses the bus, and it is updated there. Weights in files: frozen parameters
    whose bytes are in the model's files (`ParamSpec.file_backed`) are read when needed; the unit's other weights are in
    host memory.
    """

    weights: Tier = "host"
    low_bits: StateTier = "host"
    """The other half of each master, in bf16."""
    moments: StateTier = "host"
    """AdamW's m and v."""
    gradients: StateTier = "host"
    """Where gradients wait for the norm; on the device if the whole state is."""

    def tier(self, part: Part) -> Tier:
        """The tier of a part's master copy. Weights alone on the device are a copy of those in host memory."""
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
            raise PlanError("gradients must wait where their unit is updated", where="placement.gradients", fix=fix)
        aside = self.low_bits == "device", self.moments == "device"
        if any(aside) and not (all(aside) and self.weights == "device"):
            raise PlanError(
                f"a unit is updated where all of its state is, so this cannot be: {self}",
                where="policy.placements",
                fix="put all parts on the device, or the weights alone, or none",
            )
        if self.on_device and self.gradients == "disk":
            what = "the gradient of a unit that is updated on the device waits there, not on the disk"
            raise PlanError(what, where="placement.gradients", fix="leave gradients out")

    @property
    def uses_disk(self) -> bool:
        """Whether any part is on the disk."""
        return "disk" in (self.weights, self.low_bits, self.moments, self.gradients)

    @property
    def uses_drive(self) -> bool:
        """Whether any part is on the disk or in files."""
        return self.uses_disk or self.weights == "file"

    @property
    def on_device(self) -> bool:
        """Whether the whole state is on the device, where the unit is then updated."""
        return self.moments == "device"


IN_HOST = Placement()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a model is streamed. Results never depend on it, only time and memory do."""

    weight_slots: Slots = 2
    """Device buffers for layers' weights; with 2, each fetch overlaps with the previous layer."""
    read_ahead_nbytes: Nbytes = 0
    """If not 0, replaces `weight_slots`: all units share one slot, and while it is in use the first shards of the next
    layer arrive in this much device memory. If compute waits for shards, more of them go straight to parts of the slot
    that the previous layer has given up. Layers' shards are at most this large."""
    grad_slots: Slots = 2
    """Device buffers for layers' gradients."""
    shard_nbytes: Annotated[int, Bounds(1, 1 << 60)] = 64 << 20
    """Largest piece of a unit that one copy moves."""
    wait_for: WaitFor = "unit"
    """What compute waits for: all weights of a unit; or, within a layer's code, the shard that it reaches, and then
    each shard of a gradient also leaves once complete. Irrelevant in shared memory."""
    activations: ActivationPlan = "recompute"
    """Keep each layer's autograd graph until its backward, or keep its input and recompute the layer."""
    activations_by_layer: tuple[Annotated[tuple[Keep, ...], Bounds(1)], ...] = ()
    """Replaces `activations`, with a row per layer and an entry per micro-batch. Rows and entries repeat, so
    `(("input",), ("drop",))` keeps every other input. The lowest layer with a backward pass keeps its input even if it
    says `drop`; in shared memory nothing is offloaded to host memory, where it is already."""
    offload_slots: Slots = 2
    """Device buffers for offloaded inputs on their way out and back, and as many for offloaded outputs."""
    recompute_slots: Slots | None = None
    """Recomputed inputs that a micro-batch may hold at a time: with fewer, layers are recomputed more often. `None`
    means as many as are dropped in a row, so that each layer is recomputed once."""
    micro_batches_per_round: Annotated[int, Bounds(0, 1 << 20)] = 0
    """Split a step into rounds: this many micro-batches go through all layers, forward and backward, before the next,
    for which weights are fetched again. Partial gradients wait in host memory between rounds, in float32. 0 means one
    round. Not for tied heads: the two shares of that gradient would be summed in another order."""
    update: UpdateTime = "next_forward"
    """Apply each unit's update during the next forward (needed for an exact global norm), or as its gradient lands."""
    streamed_updates: Annotated[float, Bounds(0, 1)] = 0.0
    """Share of the layers with state in host memory that are updated on the device, through which their state passes in
    pieces. Needs pinned memory."""
    shares_memory: bool = False
    """The device computes in host memory: weights need no fetch, gradients of the right dtype are summed in place."""
    host_threads: Annotated[int, Bounds(0, 1 << 10)] = 0
    """Threads of the optimizer pass; 0 means one per available core."""
    transfer: Transfer = "pinned"
    """Fixed when the state is allocated."""
    pinned_staging_slots: Slots = 2
    """Pinned buffers, of a shard each, for weights from the disk or from files."""
    placements: tuple[Placement, ...] = ()
    """One per unit, in order; empty places everything in host memory."""
    delivery: Delivery = "gather"
    """With several ranks: `gather` copies a rank's own part of a shard over its bus, and the others' over the link
    between devices, which also sums gradients. `shared` is for ranks of one machine without a fast link between
    devices: each fetches whole shards from memory that all of them map, and gradients are summed there."""
    disk_staging_slots: Slots = 2
    """Host staging buffers for each kind of state on the disk, and for inputs and outputs of layers there. They limit
    how far reads run ahead."""

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
        """The placement of each of a model's units. Raises `PlanError` for a wrong number of them."""
        if not self.placements:
            return (IN_HOST,) * len(model.units)
        if len(self.placements) != len(model.units):
            what = f"places the state of {len(self.placements)} units, but the model has {len(model.units)}"
            raise PlanError(what, where="policy.placements", fix="give one for each unit, or none")
        return self.placements

    def placement(self, unit: int) -> Placement:
        """The placement of a unit."""
        return self.placements[unit] if self.placements else IN_HOST

    def updates_streamed(self, model: ModelSpec) -> frozenset[int]:
        """Units that are updated on the device with their state in host memory: evenly spread layers, out of those
        without frozen parameters and without matrices that are updated whole."""
        if not self.streamed_updates:
            return frozenset()
        placements = self.placements_of(model)
        layers = [
            unit
            for unit in model.layers
            if all(param.trainable and not param.matrices for param in model.units[unit].params)
            and not (placements[unit].on_device or placements[unit].uses_drive)
        ]
        count = round(self.streamed_updates * len(layers))
        return frozenset(layers[(2 * number + 1) * len(layers) // (2 * count)] for number in range(count))

    def keep(self, layer: int, micro: int) -> Keep:
        """What the forward of a layer, counted from 0, keeps for a micro-batch."""
        if not self.activations_by_layer:
            return "graph" if self.activations == "keep" else "input"
        row = self.activations_by_layer[layer % len(self.activations_by_layer)]
        return row[micro % len(row)]

    @property
    def kept_shares(self) -> dict[str, float]:
        """What forwards keep -> share of the layers and micro-batches."""
        rows, shares = self.activations_by_layer or ((self.keep(0, 0),),), dict[str, float]()
        for row in rows:
            for keep in row:
                shares[keep] = shares.get(keep, 0.0) + 1 / (len(row) * len(rows))
        return shares

    @property
    def offloads(self) -> bool:
        """Whether inputs of layers are offloaded."""
        return not ({"disk"} if self.shares_memory else NOT_OFFLOADED.keys()).isdisjoint(self.kept_shares)

    @property
    def uses_disk(self) -> bool:
        """Whether any state, or what any layer keeps, is on the disk."""
        return any(each.uses_disk for each in self.placements) or "disk" in self.kept_shares

    def offloads_in(self, model: ModelSpec) -> bool:
        """Whether inputs of layers are offloaded, those of a trained encoder of images included: always, since they
        are many and small."""
        return self.offloads or (model.encoders > 0 and not self.shares_memory)

    @property
    def offloads_outputs(self) -> bool:
        """Whether outputs of single ops are offloaded."""
        return not self.shares_memory and any(keep in NOT_OFFLOADED and keep in SAVED_BY for keep in self.kept_shares)

    @property
    def layer_slots(self) -> int:
        """Device buffers for the weights of a whole layer."""
        return 1 if self.read_ahead_nbytes else self.weight_slots

    @property
    def gives_up_shards(self) -> bool:
        """Whether the last call of a visit gives up shards of weights once it no longer needs them."""
        return self.read_ahead_nbytes > 0 and self.wait_for != "unit" and not self.shares_memory
