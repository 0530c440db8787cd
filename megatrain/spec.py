"""What a model, a machine, a step's work and a policy *are*, as frozen values.

Everything that is decided without touching a device is decided on these: layouts, schedules, plans and reports all
take them and nothing else, so a laptop can plan for a machine it has never seen. The module leaves out how a
specification is read from a real model (`model.unit`) and how a policy is chosen (`plan`).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Annotated, Literal

from megatrain.errors import PlanError
from megatrain.fields import Bounds, check_fields
from megatrain.profiles import NOTHING_KNOWN
from megatrain.profiles import LayerProfile as LayerProfile
from megatrain.profiles import Moment as Moment
from megatrain.rates import AttentionRate, DiskRate, ElementwiseRate, ProductRate
from megatrain.rates import Precision as Precision

UnitKind = Literal["prologue", "layer", "epilogue"]
ActivationPlan = Literal["keep", "recompute"]
Keep = Literal["graph", "chosen", "attention", "input", "offload", "drop"]
"""What is left of a layer's forward for its backward: its autograd graph; its input and what its large products and its
attention have given; its input and what attention has; its input; its input in host memory, brought back in time; or
nothing, and the input is computed again from the nearest one below that was not dropped."""
UpdateTime = Literal["next_forward", "during_backward", "after_backward"]
Gates = Literal["unit", "shard", "rows"]
Tier = Literal["device", "host", "disk"]
Rows = Literal["whole", "padded", "packed"]
"""Rows of one length without a mask; padded ones with theirs; several samples in a row, with their positions."""
Kernels = Literal["stock", "compile", "liger"]
Transit = Literal["locked", "slabs", "pageable"]
"""How weights and gradients cross the bus: page-locked where they lie, through page-locked slabs, or not locked."""

Slots = Annotated[int, Bounds(1, 1 << 12)]
Tokens = Annotated[int, Bounds(1, 1 << 60)]
Nbytes = Annotated[int, Bounds(0, 1 << 60)]

WEIGHT_NBYTES: dict[Precision, int] = {"bf16": 2, "fp32": 4}
"""Bytes per parameter of what the device streams, and of a gradient that crosses the bus in the compute dtype."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, by its full Hugging Face name, stored once however many names it is tied to."""

    name: str
    shape: tuple[int, ...]
    active: float = 1.0
    """Share of the elements that one token uses: below 1 for experts."""
    trainable: bool = True
    """A frozen parameter streams like any other, has no gradient and is never updated."""
    held: int = 0
    """Parameters behind it, in order of use, that a forward of its layer comes to before it reads this one for the last
    time: 1 for a matrix that is read together with its bias; -1 where it may come back to it at any time."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What streams as one. `borrows` names parameters of the prologue that this unit also uses (tied weights).

    Trainable parameters come first, in whatever order they are given, so that gradients and moments are arrays over a
    prefix of the unit and frozen parameters take no place in them.
    """

    name: str
    kind: UnitKind
    params: tuple[ParamSpec, ...]
    borrows: tuple[str, ...] = ()
    profile: LayerProfile = NOTHING_KNOWN
    looks_up: bool = False
    """Of a prologue: its gradient depends on ids alone, so its backward pass needs no weights."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", tuple(sorted(self.params, key=lambda param: not param.trainable)))

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def trains(self) -> bool:
        """Whether any of its parameters is updated."""
        return bool(self.params) and self.params[0].trainable


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A causal language model as a sequence of units: prologue, layers in order of use, epilogue."""

    name: str
    units: tuple[UnitSpec, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int | None = None
    attention: str = "sdpa"
    """Attention kernel that the model's own code calls, by its Hugging Face name."""

    def __post_init__(self) -> None:
        kinds = [unit.kind for unit in self.units]
        if len(kinds) < 3 or kinds != ["prologue", *["layer"] * (len(kinds) - 2), "epilogue"]:
            raise PlanError(
                f"units must be a prologue, layers and an epilogue, not {kinds}", where=f"model {self.name}"
            )

    def __hash__(self) -> int:
        """Of what is short; equality looks at all. A search asks for it some hundred times."""
        return hash((self.name, len(self.units), self.hidden_size, self.vocab_size, self.max_positions, self.attention))

    @property
    def layers(self) -> range:
        """Indices of the decoder layers among the units."""
        return range(1, len(self.units) - 1)

    @property
    def epilogue(self) -> int:
        return len(self.units) - 1

    @property
    def tied(self) -> bool:
        """Whether the epilogue uses a parameter of the prologue (a tied head)."""
        return bool(self.units[-1].borrows)

    @property
    def lowest_trained(self) -> int:
        """Index of the first unit that has anything to train: the backward pass ends there."""
        return next((index for index, unit in enumerate(self.units) if unit.trains), len(self.units))

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def trained_numel(self) -> int:
        """Parameters that are updated."""
        return sum(param.numel for unit in self.units for param in unit.params if param.trainable)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as the planner and `replay` see it. Rates are per second; capacities are in bytes, and free.

    What is `None` or empty is not known, and `plan.rates` answers from what is.
    """

    name: str
    device_nbytes: int
    host_nbytes: int
    fetch_bandwidth: float
    """Host to device, bytes per second, with nothing else on the way."""
    grad_bandwidth: float
    """Device to host, bytes per second, with nothing else on the way."""
    flops: float
    """Floating-point operations per second of a large matrix product in bf16; in fp32 too, if no other is known."""
    host_bandwidth: float
    """Bytes per second, read plus written, of the optimizer pass in host memory, on all threads."""
    shares_memory: bool = False
    """The device computes in host memory; the fetch and grad bandwidths are then those of a copy within it."""
    flops_fp32: float | None = None
    peak_flops: float | None = None
    """What the maker states for bf16, dense; `flops` is what is achieved of it."""
    peak_flops_fp32: float | None = None
    products: tuple[ProductRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    device_bandwidth: float | None = None
    """Bytes per second, read plus written, of a copy within device memory."""
    elementwise: tuple[ElementwiseRate, ...] = ()
    elementwise_bandwidth: float | None = None
    """The same of the forward alone, in whatever precision, where `elementwise` has no row."""
    fresh_bandwidth: float | None = None
    """Bytes per second of host memory that is touched for the first time since it was allocated: what the system takes
    to hand out its pages. It counts where the device computes in host memory."""
    launch_seconds: float | None = None
    """What the smallest op costs when many follow each other."""
    duplex_fetch_bandwidth: float | None = None
    """As `fetch_bandwidth`, while gradients leave at `duplex_grad_bandwidth`."""
    duplex_grad_bandwidth: float | None = None
    pageable_fetch_bandwidth: float | None = None
    """As `fetch_bandwidth`, from memory that is not page-locked."""
    pageable_grad_bandwidth: float | None = None
    optimizer_bandwidth: tuple[tuple[int, float], ...] = ()
    """Pairs of a thread count, ascending, and `host_bandwidth` with so many."""
    norm_bandwidth: float | None = None
    """Bytes per second of gradients, read for their norm on all threads."""
    host_copy_bandwidth: float | None = None
    """Bytes per second that one thread copies within host memory, each counted once."""
    disk_nbytes: int | None = None
    disk_read_bandwidth: float | None = None
    disk_write_bandwidth: float | None = None
    disk_duplex_read_bandwidth: float | None = None
    """As `disk_read_bandwidth`, while `disk_duplex_write_bandwidth` is written."""
    disk_duplex_write_bandwidth: float | None = None
    disk_block_nbytes: int | None = None
    """The block and the depth that the two disk bandwidths are for."""
    disk_depth: int | None = None
    disk_rates: tuple[DiskRate, ...] = ()
    disk_endurance_nbytes: int | None = None
    """Bytes that may be written to the drive in its life (its TBW)."""
    pinnable_nbytes: int | None = None
    """Host memory that may be page-locked; 0 where that is refused."""
    sources: tuple[tuple[str, str], ...] = ()
    """Field -> where its figure is from: a datasheet, a measurement, an assumption."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step has to do: the token count (batch x length, padding included) of each micro-batch."""

    tokens: tuple[Tokens, ...]
    length: Tokens | None = None
    """Tokens of a sequence; `None` where a micro-batch is one sequence. It matters for prices, not for ops."""
    repeats: Annotated[float, Bounds(1)] = 1
    """How many micro-batches each stands for: 1 but in the planner's first look, where fewer ops do."""
    rows: Rows = "whole"
    """What the rows of micro-batches are, which decides what layers are told by masks."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "work.")
        if not self.tokens:
            raise PlanError("a step needs micro-batches of at least one token", where="work.tokens")

    @property
    def micro_batches(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Home:
    """The tier of each part of a unit's state between steps. What is on the disk passes through host memory.

    The weights may be on the device beside a copy in host memory, which the optimizer updates: then they are fetched
    once per step. With all parts on the device nothing of the unit crosses the bus, and it is updated there.
    """

    weights: Tier = "host"
    low_bits: Tier = "host"
    """The other half of each master, in bf16."""
    moments: Tier = "host"
    """AdamW's m and v."""
    gradients: Tier = "host"
    """Where a gradient waits for the norm; with the whole state on the device, it waits there."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "home.")
        if self.gradients == "device":
            fix = "leave gradients out" if self.on_device else "use host or disk"
            raise PlanError("a gradient waits where its unit is updated", where="home.gradients", fix=fix)
        aside = self.low_bits == "device", self.moments == "device"
        if any(aside) and not (all(aside) and self.weights == "device"):
            raise PlanError(
                f"a unit is updated where its whole state is, not with {self}",
                where="policy.homes",
                fix="put all parts on the device, or the weights alone, or none",
            )
        if self.on_device and self.gradients == "disk":
            what = "a gradient whose unit is updated on the device waits there, and not on the disk"
            raise PlanError(what, where="home.gradients", fix="leave gradients out")

    @property
    def uses_disk(self) -> bool:
        """Whether any part is there."""
        return "disk" in (self.weights, self.low_bits, self.moments, self.gradients)

    @property
    def on_device(self) -> bool:
        """Whether the whole state is there, and the unit is updated there."""
        return self.moments == "device"


IN_HOST = Home()

ROUNDED_BY_ROWS = (
    *("gates", "weight_slots", "read_ahead_nbytes", "shard_nbytes", "homes"),
    *("activations", "activation_rows", "recompute_slots"),
)
"""Fields of a policy that decide which matrices are cut with `gates="rows"`, and where: so its numbers, by rounding."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a model is streamed. The numbers that come out of a step never depend on it, only time and memory do."""

    precision: Precision = "bf16"
    _: KW_ONLY
    weight_slots: Slots = 2
    """Device buffers that the layers' weights pass through; 2 hides each fetch behind the layer before."""
    read_ahead_nbytes: Nbytes = 0
    """In place of `weight_slots`, where it is not 0: all units share one slot, embedding and head with the layers, and
    while it is in use the first shards of the next layer come into this much device memory. With gates, shards then
    follow straight into places of the slot that the layer before has given up. Shards of layers are no larger."""
    grad_slots: Slots = 2
    """Device buffers that the layers' gradients pass through."""
    shard_nbytes: Annotated[int, Bounds(1, 1 << 60)] = 64 << 20
    """Largest piece of a unit that one copy moves."""
    gates: Gates = "unit"
    """What compute waits for: all weights of a unit; or, inside a layer's code, the shard that it comes to, and then
    shards of a gradient leave as each is complete; or, besides, those rows of a matrix that are next, where it is cut
    into shards (equal to rounding). Where memory is shared there is nothing to wait for."""
    activations: ActivationPlan = "recompute"
    """Keep each layer's autograd graph until its backward, or keep its input and compute the layer again."""
    activation_rows: tuple[Annotated[tuple[Keep, ...], Bounds(1)], ...] = ()
    """In place of `activations`, for each layer and micro-batch: a row per layer, an entry per micro-batch. Rows and
    entries start over at their end, so `(("input",), ("drop",))` keeps every other input. The lowest layer that has a
    backward pass keeps its input where it says `drop`; where memory is shared, `offload` is `input`."""
    offload_slots: Slots = 2
    """Device buffers that offloaded inputs pass through, out and back."""
    recompute_slots: Slots | None = None
    """Dropped inputs, computed again, that a micro-batch may hold at one time: with fewer, layers are computed more
    often. `None` is as many as are dropped in a row, so that each layer is computed again once."""
    grad_precision: Precision | None = None
    """What gradients cross the bus in; `None` is the compute precision."""
    update: UpdateTime = "next_forward"
    """Apply each unit's update during the next forward (needed for an exact global norm), or as its gradient lands; or
    all of them when the backward pass has ended, as other systems do (for comparison only)."""
    masters: Literal["split", "whole"] = "split"
    """Weights as the upper halves of their masters, 4 bytes in all; or both side by side, 6 (for comparison only)."""
    loss_chunk_tokens: Tokens = 512
    """Target tokens whose logits exist at one time."""
    mlp_chunk_tokens: Annotated[int, Bounds(0, 1 << 60)] = 0
    """Tokens that token-wise parts of a layer, its feed-forward above all, compute at one time, keeping their input
    alone of more; 0 is all. As `loss_chunk_tokens` and `kernels`, it changes numbers by rounding."""
    kernels: Kernels = "stock"
    """Of layers: as the library calls them, or fused by `torch.compile`. Liger's are refused."""
    shares_memory: bool = False
    """The device computes in host memory: weights need no fetch, and gradients of the right dtype are born at home."""
    host_threads: Annotated[int, Bounds(0, 1 << 10)] = 0
    """Threads of the optimizer pass; 0 is one per available core."""
    transit: Transit = "locked"
    """What is page-locked; it is decided when the state is allocated, and stays."""
    slabs: Slots = 2
    """Page-locked buffers of a shard each, in each direction, where `transit` is by slabs."""
    homes: tuple[Home, ...] = ()
    """Of each unit, in order; empty keeps everything in host memory."""
    stage_slots: Slots = 2
    """Host buffers that each kind of state passes through on its way from and to the disk: how far reads run ahead."""
    device_budget_nbytes: Nbytes | None = None
    host_budget_nbytes: Nbytes | None = None
    disk_budget_nbytes: Nbytes | None = None

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "policy.")
        if self.precision == "fp32" and self.grad_precision == "bf16":
            raise PlanError(
                "gradients in bf16 would hold less than precision fp32 promises",
                where="policy.grad_precision",
                fix="leave it unset or use precision bf16",
            )
        if self.shares_memory and self.transit != "locked":
            raise PlanError("nothing crosses a bus where memory is shared", where="policy.transit", fix="use locked")
        if self.kernels == "liger":
            what = (
                "Liger's kernels cannot be held against the library's code here, so nothing shows that they are right"
            )
            raise PlanError(what, where="policy.kernels", fix="use compile, which fuses the same operations")
        if self.kernels == "compile" and self.gates != "unit":
            what = "a compiled layer does not say which weight it comes to"
            raise PlanError(what, where="policy.gates", fix="use unit, or policy.kernels=stock")
        if self.shares_memory and any(home.weights == "device" for home in self.homes):
            raise PlanError("the device has no memory of its own", where="policy.homes", fix="use host or disk")

    def homes_of(self, model: ModelSpec) -> tuple[Home, ...]:
        """Where the state of each unit of a model lives. Raises `PlanError` where there are homes for fewer or more."""
        if not self.homes:
            return (IN_HOST,) * len(model.units)
        if len(self.homes) != len(model.units):
            what = f"names homes for {len(self.homes)} units, and the model has {len(model.units)}"
            raise PlanError(what, where="policy.homes", fix="give one for each unit, or none")
        return self.homes

    def home(self, unit: int) -> Home:
        """Where the state of a unit lives."""
        return self.homes[unit] if self.homes else IN_HOST

    def keep(self, layer: int, micro: int) -> Keep:
        """What is left of the forward of a layer, counted from 0, and a micro-batch."""
        if not self.activation_rows:
            return "graph" if self.activations == "keep" else "input"
        row = self.activation_rows[layer % len(self.activation_rows)]
        return row[micro % len(row)]

    @property
    def kept_shares(self) -> dict[str, float]:
        """What is left of forwards -> of which share of the rows and their entries."""
        rows = self.activation_rows or ((self.keep(0, 0),),)
        return {keep: sum(row.count(keep) / len(row) for row in rows) / len(rows) for row in rows for keep in row}

    @property
    def offloads(self) -> bool:
        """Whether inputs of layers leave the device."""
        return not self.shares_memory and any("offload" in row for row in self.activation_rows)

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
        return self.read_ahead_nbytes > 0 and self.gates != "unit" and not self.shares_memory

    @property
    def weight_nbytes(self) -> int:
        """Bytes per parameter of the weights that stream."""
        return WEIGHT_NBYTES[self.precision]

    @property
    def grad_nbytes(self) -> int:
        """Bytes per parameter of a gradient in host memory."""
        return WEIGHT_NBYTES[self.grad_precision or self.precision]

    def accumulator_nbytes(self, partial_sums: int) -> int:
        """Bytes per parameter of a gradient on the device: float32 as soon as more than one term is summed."""
        return 4 if partial_sums > 1 else self.weight_nbytes
