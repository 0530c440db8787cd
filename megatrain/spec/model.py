"""`ModelSpec`: a causal language model as streamed units: a prologue, its decoder layers, an epilogue, an encoder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Annotated, Literal, NamedTuple

from megatrain.errors import PlanError
from megatrain.spec.layer_profile import NOTHING_KNOWN, Amount, Count, Growth, LayerProfile, Share
from megatrain.spec.validate_fields import Bounds


class FileBytes(NamedTuple):
    """Bytes [place, place + nbytes) of a file."""

    file: str
    place: int
    nbytes: int


Place = Annotated[int, Bounds(0, 1 << 20)]


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """How directions of whole matrices are made orthogonal: in this precision, by so many iterations."""

    precision: Literal["bf16", "fp32"] = "bf16"
    steps: Place = 5

    @property
    def nbytes(self) -> int:
        """Bytes of an element of a direction."""
        return 2 if self.precision == "bf16" else 4


AS_IN_TORCH = NewtonSchulz()
UnitKind = Literal["prologue", "layer", "epilogue"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, by its full Hugging Face name; tied parameters appear once."""

    name: str
    shape: tuple[Count, ...]
    active: Share = 1.0
    """Share of its elements that one token uses: below 1 for experts."""
    trainable: bool = True
    """A frozen parameter streams like any other, without gradient and updates."""
    products: Annotated[int, Bounds(-1, 1 << 20)] = 0
    """How many matrices, one behind the other, products of its layer read: 1 for a projection, the number of experts
    for stacked ones; 0 if it is no weight of a layer, or a router's, or read by something else; -1 if nobody looked."""
    inputs_first: bool = False
    """Whether each of these is stored with a row for each input; usually one has a row for each output."""
    file_backed: bool = False
    """It is frozen, and the model's own files hold exactly its bytes."""
    state: tuple[str, ...] = ("m", "v")
    """Names of the arrays that its optimizer keeps of it if it is trained, each with a float32 for each element."""
    matrices: Annotated[int, Bounds(0, 1 << 20)] = 0
    """How many matrices, one behind the other, its optimizer needs whole; 0 if it updates each element by itself."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """The unit of streaming. `borrows` names parameters of the prologue that this unit also uses (tied weights).

    Parameters are reordered: trained ones first, so that gradients and moments cover a prefix of the unit, and among
    them matrices that are updated whole last, and those with more state first; those in the model's files last, so that
    the others are a prefix, too.
    """

    name: str
    kind: UnitKind
    params: tuple[ParamSpec, ...]
    borrows: tuple[str, ...] = ()
    profile: LayerProfile = NOTHING_KNOWN
    ranks: int = 1
    """Number of ranks that share its state, each owning an equal part of every shard (`layout`)."""

    def __post_init__(self) -> None:
        ordered = sorted(self.params, key=_home)
        trained = [param for param in ordered if param.trainable]
        if any(len(param.state) < len(later.state) for param, later in pairwise(trained)):
            what, fix = "matrices updated whole have more state than its other parameters", "describe no more arrays"
            raise PlanError(what, where=f"unit {self.name}", fix=fix)
        object.__setattr__(self, "params", tuple(ordered))

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    def with_in_files(self, names: Collection[str]) -> UnitSpec:
        """The same unit with exactly these frozen parameters in the model's files."""
        read = {param.name for param in self.params if param.numel and not param.trainable and param.name in names}
        params = tuple(replace(param, file_backed=param.name in read) for param in self.params)
        return self if params == self.params else replace(self, params=params)

    @property
    def trains(self) -> bool:
        """Whether any of its parameters is updated."""
        return bool(self.params) and self.params[0].trainable


def _home(param: ParamSpec) -> tuple[int, bool, int]:
    if param.trainable:
        return 0, param.matrices > 0, -len(param.state)
    return 1 + param.file_backed, False, 0


UNMEASURED = Growth()


@dataclass(frozen=True, slots=True)
class SideValue:
    """A tensor that a unit makes for later ones besides what the next one gets: keys and values that layers share,
    inputs of each layer from the prologue, indices of sparse attention, router logits for the auxiliary loss; or its
    hidden state, if units beyond the next one read it."""

    source: Place
    """The unit that makes it."""
    users: tuple[Place, ...]
    """The units that read it, ascending; the epilogue reads it in the loss."""
    differentiable: bool = True
    """Whether a gradient flows through it."""
    size: Growth = UNMEASURED
    """Bytes, once measured. Those of the prologue are among the arguments of layers, except its hidden state; only
    their gradient is apart."""
    most_per_token: Amount = 0.0
    """Bytes of a token in sequences of any length; 0 if nothing limits what `size` says."""
    is_hidden: bool = False
    """Whether it is the hidden state."""

    def nbytes(self, tokens: int, length: int) -> float:
        """Bytes for `tokens` tokens in sequences of `length`."""
        nbytes = self.size.nbytes(tokens, length)
        return min(nbytes, tokens * self.most_per_token) if self.most_per_token else nbytes


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A causal language model as a sequence of units: prologue, layers in order of use, epilogue.

    Behind these may be the units of an encoder of images, which are run before the prologue: the first makes the input
    of its layers, the others are its layers. The prologue reads what the last one returns.
    """

    name: str
    units: tuple[UnitSpec, ...]
    hidden_size: Count
    vocab_size: Count
    max_positions: Count | None = None
    attention: str = "sdpa"
    """Hugging Face name of the attention kernel that the model's code calls."""
    base_apart: bool = False
    """Checkpoints hold only an adapter, without its base."""
    sides: tuple[SideValue, ...] = ()
    """What units pass on besides the hidden state, in order of the units that make it."""
    encoders: Place = 0
    """How many units are of an encoder of images."""
    encoded_per_value: Amount = 0.0
    """Numbers in the input of one of its layers for each value of images (`Work.values_per_token`)."""
    taps: tuple[Place, ...] = ()
    """Places in `encoder` of layers whose input the prologue reads, too: features of several layers."""
    newton_schulz: NewtonSchulz = AS_IN_TORCH
    """Of the parameters that are updated as whole matrices (`ParamSpec.matrices`), if there are any."""

    def __post_init__(self) -> None:
        kinds, behind = [unit.kind for unit in self.units], ["layer"] * self.encoders
        if len(kinds) < 3 or kinds != ["prologue", *["layer"] * (self.epilogue - 1), "epilogue", *behind]:
            raise PlanError(
                f"units must be a prologue, layers and an epilogue, not {kinds}", where=f"model {self.name}"
            )

    def __hash__(self) -> int:
        """Hashes only short fields; equality compares all. A search calls it hundreds of times."""
        return hash((self.name, len(self.units), self.hidden_size, self.vocab_size, self.max_positions, self.attention))

    @property
    def names(self) -> list[str]:
        """Names of the units."""
        return [unit.name for unit in self.units]

    @property
    def ranks(self) -> int:
        """Number of ranks that train it together."""
        return self.units[0].ranks

    def over(self, ranks: int) -> ModelSpec:
        """The same model with its state shared by this many ranks."""
        if ranks == self.ranks:
            return self
        return replace(self, units=tuple(replace(unit, ranks=ranks) for unit in self.units))

    def with_in_files(self, names: Collection[str]) -> ModelSpec:
        """The same model with exactly these frozen parameters in its files."""
        return replace(self, units=tuple(unit.with_in_files(names) for unit in self.units))

    def on_a_cpu(self) -> ModelSpec:
        """The same model with layers as a cpu runs them, whose attention may differ from a device's."""
        profiles = [unit.profile.of("cpu") for unit in self.units]
        if all(profile is unit.profile for profile, unit in zip(profiles, self.units, strict=True)):
            return self
        units = (replace(unit, profile=profile) for unit, profile in zip(self.units, profiles, strict=True))
        return replace(self, units=tuple(units))

    @property
    def layers(self) -> range:
        """Indices of the decoder layers among the units."""
        return range(1, self.epilogue)

    @property
    def epilogue(self) -> int:
        return len(self.units) - 1 - self.encoders

    @property
    def encoder(self) -> range:
        """Indices of the units of the encoder."""
        return range(self.epilogue + 1, len(self.units))

    @property
    def tapped(self) -> tuple[int, ...]:
        """The units whose input the prologue reads: itself, and others of the encoder."""
        return (0, *(self.encoder[place] for place in self.taps))

    @property
    def streamed(self) -> tuple[int, ...]:
        """Indices of all layers, and of what is streamed like one."""
        return (*self.layers, *self.encoder)

    def after(self, unit: int) -> int:
        """The unit that gets what this one makes of its input."""
        return 0 if unit == len(self.units) - 1 else unit + 1

    def is_first(self, unit: int) -> bool:
        """Whether a unit makes its output from a micro-batch, and the arguments of the layers behind it."""
        return unit in (0, self.epilogue + 1)

    @property
    def tied(self) -> bool:
        """Whether the epilogue uses a parameter of the prologue (a tied head)."""
        return bool(self.units[self.epilogue].borrows)

    @property
    def lowest_trained(self) -> int:
        """Index of the first unit up to the epilogue that has trained parameters or trained units of the encoder before
        it: there the backward pass ends, or enters the encoder."""
        if any(self.units[unit].trains for unit in self.encoder):
            return 0
        return next((index for index, unit in enumerate(self.units) if unit.trains), len(self.units))

    def has_backward(self, unit: int) -> bool:
        """Whether something in a unit, or in one that is run before it, is trained."""
        if unit > self.epilogue:
            return any(self.units[index].trains for index in range(self.epilogue + 1, unit + 1))
        return unit >= self.lowest_trained

    def wants_gradient(self, side: SideValue) -> bool:
        """Whether a step needs the gradient of a side value: something at or below the unit that makes it is
        trained."""
        return side.differentiable and side.source >= self.lowest_trained

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def trained_numel(self) -> int:
        """Number of trained parameters."""
        return sum(param.numel for unit in self.units for param in unit.params if param.trainable)


def hidden_sides(model: ModelSpec, user: int = -1) -> dict[int, int]:
    """Unit -> number of the side value that is its hidden state. user: only of those that this unit reads."""
    told = enumerate(model.sides)
    return {side.source: number for number, side in told if side.is_hidden and (user < 0 or user in side.users)}
